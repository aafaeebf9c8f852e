"""Schema of a record of experiment 'injection': a problem under one change of the cache. Imports neither jax nor flax.

::

    {"experiment": "injection", "problem": int, "change": str, "seed": int, "key": [experiment, problem, change, seed],
     "spec": null | error | quant,
     "prompt_tokens": int, "prompt_sha256": str, "shapes": {...}, "sampling": {...}, "headroom": {...},
     "status": "ok" | "invalid", "invalid": null | {...},
     "run": {"tokens": [int], "text": str, "stop": str, "scores": {scorer: {"answer": str | null, "correct": bool}}},
     "teacher_forced": null | comparison, "free_running": null | {...},
     "cache": {"bytes": int, "written": int, "bits": float, "exact_bits": float, "packed": float},
     "saturated": null | {"k": int, "v": int, "elements": int}}

    error = {"family": "error", "law": str, "numbers": [float], "bits": int | null, "mean": float, "std": float,
             "flip_share": float, "kind": str, "sign": str, "correlate": str, "draw": str, "side": str,
             "layers" | "heads" | "positions": null | [[int, int | null]]}
    quant = {"family": "quant", "k" | "v": null | {"method": str, "bits": float, "first": int, "recent": int,
             "block": int, "own": str}}

What has the name of a field in a sample of 'divergence' is as there (jaxkv.schemas), with the clean cached arm as the
reference: `teacher_forced` compares the changed arm's logits with its, along its tokens, `kl` being
KL(clean || changed). `run` is the changed arm on its own; the clean arm is the change "none", of seed 0, and has no
comparisons. `headroom` is the clean arm's. `seed` keys the error, not the sampler, whose seed is in `sampling`; it is 0
where a change draws nothing. The spec of an error is that of `jaxkv.interventions.cache_errors`; `bits` of a quant is
that of an element outside windows.

`bytes` is what the arrays of keys and values take for this row, empty slots included. `bits` is per element of a cache
of the `written` tokens of the clean arm, windows and pending tokens counted; `packed` is the share of its elements that
are packed. `saturated` counts elements of the clean arm's cache that a quantizer's format cannot hold.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.schemas import (
    HEADLINES,
    choose,
    fail,
    get_field,
    require_null,
    validate_comparison,
    validate_free_running,
    validate_setting,
    validate_tokens,
)

CLEAN = "none"
STOPS = ("eos", "length", "stop_string", "invalid")
ERROR_TEXTS = ("law", "kind", "sign", "correlate", "draw", "side")


def validate_spec(record: Any) -> None:
    """Checks `spec` beside `change`: null for the clean arm alone."""
    clean = record["change"] == CLEAN
    if (get_field(record, "spec", "dict", optional=True) is None) != clean:
        fail("spec", f"{'expected null' if clean else 'missing'} for the change '{record['change']}'")
    if clean:
        return
    family = choose(record, "spec.family", ("error", "quant"))
    if family == "quant":
        for side in ("k", "v"):
            if get_field(record, f"spec.{side}", "dict", optional=True) is not None:
                for name in ("method", "own"):
                    get_field(record, f"spec.{side}.{name}", "str")
                get_field(record, f"spec.{side}.bits", "float")
                for name in ("first", "recent", "block"):
                    get_field(record, f"spec.{side}.{name}", "count")
        return
    for name in ERROR_TEXTS:
        get_field(record, f"spec.{name}", "str")
    for name in ("mean", "std", "flip_share"):
        get_field(record, f"spec.{name}", "float")
    get_field(record, "spec.numbers", "list")
    get_field(record, "spec.bits", "count", optional=True)
    for name in ("layers", "heads", "positions"):
        get_field(record, f"spec.{name}", "list", optional=True)


def _validate_run(record: Any) -> int:
    steps = validate_tokens(record, "run.tokens")
    get_field(record, "run.text", "str")
    choose(record, "run.stop", STOPS)
    scores = get_field(record, "run.scores", "dict")
    if not set(scores) & set(HEADLINES):
        fail("run.scores", f"none of {', '.join(HEADLINES)}")
    for scorer in scores:
        get_field(record, f"run.scores.{scorer}.answer", "str", optional=True)
        get_field(record, f"run.scores.{scorer}.correct", "bool")
    return steps


def validate_cache(record: Any) -> None:
    """Checks `cache` and `saturated`."""
    for name in ("bytes", "written"):
        get_field(record, f"cache.{name}", "count")
    for name in ("bits", "exact_bits"):
        if get_field(record, f"cache.{name}", "float") <= 0:
            fail(f"cache.{name}", "expected a positive number")
    if not 0 <= get_field(record, "cache.packed", "float") <= 1:
        fail("cache.packed", f"{record['cache']['packed']} is no share")
    validate_saturated(record)


def validate_saturated(record: Any) -> None:
    """Checks `saturated`."""
    if get_field(record, "saturated", "dict", optional=True) is not None:
        for name in ("k", "v", "elements"):
            get_field(record, f"saturated.{name}", "count")
        if record["saturated"]["k"] + record["saturated"]["v"] > record["saturated"]["elements"]:
            fail("saturated", "more than there are elements")


def _check_written(record: Any, steps: int) -> None:
    """Whether the clean cache holds what was fed to it: the prompt and all but the last of its tokens."""
    fed = record["prompt_tokens"] + max(steps - 1, 0)
    if record["cache"]["written"] != fed:
        fail("cache.written", f"{record['cache']['written']} tokens beside {fed} that were fed")


def validate_injection(record: Mapping[str, Any]) -> None:
    """Checks a record against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    choose(record, "experiment", ("injection",))
    key = ["injection", get_field(record, "problem", "count"), get_field(record, "change", "str")]
    key.append(get_field(record, "seed", "int"))
    if list(get_field(record, "key", "list")) != key:
        fail("key", f"expected {key}, got {record['key']!r:.60}")
    validate_spec(record)
    status = validate_setting(record)
    steps = _validate_run(record)
    validate_cache(record)
    agreements = ["teacher_forced", "free_running"]
    if status == "invalid":
        require_null(record, agreements)
        return
    if record["run"]["stop"] == "invalid":
        fail("run.stop", "'invalid' in a record with status ok")
    if record["change"] == CLEAN:
        for name in agreements:
            if get_field(record, name, "dict", optional=True) is not None:
                fail(name, "the clean arm is compared with nothing; expected null")
        _check_written(record, steps)
        return
    _check_written(record, validate_comparison(record, "teacher_forced"))
    get_field(record, "free_running", "dict")
    validate_free_running(record)
