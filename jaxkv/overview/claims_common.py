"""What the judges of claims share: verdicts, and the controls that several claims rest on."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.experiments.report_parts import base_precision
from jaxkv.overview.contrasts import drop_replicates
from jaxkv.reporting.format import format_counted_share
from jaxkv.reporting.rules import Evidence
from jaxkv.reporting.shares import take_rest

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
Study = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Claim:
    """What there is on a claim; its verdict depends on the others of the table (`rules.decide`).

    Attributes:
      evidence: None where no record bears on it.
      figure, control: sentences.
    """

    evidence: Evidence | None
    figure: Sequence[str]
    control: Sequence[str] = ()


def select(
    study: Study,
    precision: str | None = None,
    regime: str = "plain",
    framework: str = "jax",
    each: bool = False,
) -> list[Any]:
    """Conditions with valid 'divergence' samples: of runs of one configuration that with most problems, or `each`."""
    valid = [
        (c, range(c["divergence"]["problems"]["ok"]))
        for c in study["conditions"]
        if c.get("divergence")
        and c["divergence"]["status"] == "ok"
        and c["regime"] == regime
        and c["framework"] == framework
        and precision in (None, base_precision(c))
    ]
    return [c for c, _ in (valid if each else drop_replicates(valid))]


def say_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def describe_reruns(study: Study) -> list[str]:
    lines = [
        f"{arm} run again has other bits in {format_counted_share(found, 'runs')}, of {found['sequences']} sequences "
        f"and {found['steps']} steps"
        for arm, found in study["reruns"].items()
        if found is not None
    ]
    return lines or ["no arm was run again, so a difference between reruns is not ruled out"]


def describe_aligned(study: Study) -> list[str]:
    lines = []
    for condition in select(study, "fp16", "aligned"):
        found = condition["divergence"]
        equal, free = found["teacher_forced"], found["free_running"]
        if equal and free:
            lines.append(
                f"aligned, cache on ({condition['name']}): logits differ at "
                f"{format_counted_share(take_rest(equal['bit_equal']), 'steps')}, and "
                f"{format_counted_share(free['diverged'], 'sequences')} part"
            )
    gates = [c["divergence"]["gate"] for c in study["conditions"] if c.get("divergence") and c["divergence"]["gate"]]
    passed = [gate for gate in gates if gate.get("passed")]
    steps = sum(gate["steps"] for gate in passed)
    if steps:
        lines.append(f"the aligned gate of {say_count(len(passed), 'condition')} found equal bits at all {steps} steps")
    return lines or ["no aligned run, so a bug of the cache is not told from rounding"]


def by_model(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Conditions or pairs of one model and precision together, and of one device and batch where there are several."""
    devices, batches = ({entry[name] for entry in entries} for name in ("device", "batch_size"))
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        device = f" on {entry['device']}" if len(devices) > 1 else ""
        batch = f" in batches of {entry['batch_size']}" if len(batches) > 1 and entry["batch_size"] else ""
        groups.setdefault(f"{entry['model']} {entry['precision']}{device}{batch}", []).append(entry)
    return groups
