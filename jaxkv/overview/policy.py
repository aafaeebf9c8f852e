"""What a run is called in a report: by its whole policy, so that a residual stream in fp32 is never called fp16."""

from collections.abc import Mapping, Sequence
from typing import Any

Condition = Mapping[str, Any]
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
WIDENED = ("residual", "cache")  # parts that are of the precision unless a run says otherwise


def name_precision(precision: Any) -> str | None:
    """'fp16+residual=fp32' of what run.json says of a precision; its parts count where its name leaves them out."""
    if not isinstance(precision, Mapping):
        return precision
    name = precision.get("name")
    if name is None:
        return None
    base = name.split("+")[0]
    parts = [(part, SHORT.get(str(precision.get(part)), base)) for part in WIDENED]
    return name + "".join(f"+{part}={own}" for part, own in parts if own != base and f"+{part}=" not in name)


def name_condition(condition: Condition, without: Sequence[str] = ()) -> str:
    """``smollm2-135m bf16 greedy, torch eager, aligned, batch 8``.

    Args:
      condition: as `jaxkv.overview.gather.describe_condition` has it.
      without: parts that need no telling, of 'model' and 'batch_size'.
    """
    first = [condition["precision"], condition["sampler"]]
    if "model" not in without:
        first = [condition["model"] or condition["name"], *first]
    more = [" ".join(filter(None, first))]
    if condition["framework"] != "jax":
        more.append(" ".join(filter(None, (condition["framework"], condition["attention"]))))
    if condition["regime"] != "plain":
        more.append(condition["regime"])
    if condition["batch_size"] and "batch_size" not in without:
        more.append(f"batch {condition['batch_size']}")
    return ", ".join(filter(None, more)) or condition["name"]


def name_conditions(conditions: Sequence[Condition]) -> list[str]:
    """A name for each: batch sizes only where there are several, and the directory where two are alike."""
    alike = len({c["batch_size"] for c in conditions if c.get("divergence")}) < 2
    names = [name_condition(c, ("batch_size",) if alike else ()) for c in conditions]
    return [
        f"{name} ({condition['name']})" if names.count(name) > 1 else name
        for name, condition in zip(names, conditions, strict=True)
    ]
