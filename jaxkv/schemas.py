"""Schemas of the records, one validator an experiment. Imports neither jax nor flax.

A sample of experiment 'divergence' is one problem decoded by both arms::

    {"experiment": "divergence", "problem": int, "key": [experiment, problem],
     "prompt_tokens": int, "prompt_sha256": str,
     "shapes": {"batch": int, "prefill": int, "slots": int, "uncached": str, "left_pad": int,
                "tile": int | null},
     "sampling": {"sampler": "greedy" | "temperature" | "top_k" | "top_p", "temperature": float,
                  "top_k": int | null, "top_p": float | null, "seed": int},
     "status": "ok" | "invalid",
     "invalid": null | {"arm": str, "layer": int | null, "op": str, "position": int, "step": int | null,
                        "value": "inf" | "nan"},
     "headroom": {"max_abs": float, "layer": int | null, "op": str, "limit": float},
     "arms": {"cached": arm, "uncached": arm},
     "teacher_forced": null | comparison,
     "free_running": null | {"diverged": bool, "first_diverged": int | null, "differing_after": int,
                             "compared_after": int},
     "controls": {"cached_rerun": null | comparison, "uncached_rerun": null | comparison,
                  "uncached_other_length": null | comparison, "uncached_stepwise": null | comparison},
     "truth": null | {"cached": distance, "uncached": distance},
     "label_change": {scorer: "same" | "answer_changed" | "extraction_only"}}

    arm = {"tokens": [int], "text": str, "stop": "eos" | "length" | "stop_string" | "invalid",
           "scores": {scorer: {"answer": str | null, "correct": bool}}}

    comparison = {"flip": [bool], "kl": [float], "kl_reverse": [float], "js": [float], "max_abs": [float],
                  "mean_abs": [float], "margin": [float], "margin_other": [float], "shift": [float],
                  "unit": [float], "bit_equal": [bool], "choice_flip": [bool]}

    distance = {"flip": [bool], "kl": [float], "rms": [float], "max_abs": [float]}

`truth_left_out` says why a float64 run that was asked for is missing. `truth` is each arm's distance to a float64 run
along the cached arm's tokens, where one was made; older records lack the field. The lists of a comparison have one
entry a token and equal lengths. `kl` is KL(uncached || cached) in nats and `margin` the reference arm's top logit
minus its second, `margin_other` the other arm's own; `shift` is by how much the gap between the reference's top two is
another in the other arm, `unit` the spacing of the dtype at the top logit. These three, and `choice_flip` (the arms
choose other tokens under the shared noise), are missing in older records. `teacher_forced` compares uncached with
cached logits at each position, along the cached arm's tokens. `tile` is the aligned regime's, null in the plain one.
`uncached_stepwise` compares the uncached arm's own run by draft and check with brute force. `scorer` is one of the
task's, the same in both arms: "strict", "flexible" and "numeric" in gsm8k and arith. Samples of the PyTorch path also
have `framework` "torch" (without the field it is "jax"), `attention` and `versions` (package -> str). `headroom` is
the largest finite activation of the sample beside its dtype's maximum. In an invalid sample a non-finite number arose:
it has no comparisons at all, since NaN is not agreement.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxkv.analysis.metrics import free_running

FRAMEWORKS = ("jax", "torch")
DEFAULT_FRAMEWORK = "jax"
SAMPLERS = ("greedy", "temperature", "top_k", "top_p")
SCORERS = ("strict", "flexible", "numeric")  # of gsm8k and arith
HEADLINES = ("numeric", "verified", "pass", "exact", "strict")
CONTROLS = ("cached_rerun", "uncached_rerun", "uncached_other_length", "uncached_stepwise")
LABEL_CHANGES = ("same", "answer_changed", "extraction_only")
COMPARISON_FLAGS = ("flip", "bit_equal")
COMPARISON_NUMBERS = ("kl", "kl_reverse", "js", "max_abs", "mean_abs", "margin")
DISTANCE_NUMBERS = ("kl", "rms", "max_abs")
LAW_NUMBERS = ("margin_other", "shift", "unit")  # missing in records of before 2026-11-29


def fail(field: str, message: str) -> None:
    """Raises the ValueError of a field at fault."""
    raise ValueError(f"{field}: {message}")


def get_field(values: Any, field: str, kind: str, *, optional: bool = False) -> Any:
    """Returns the value at a dotted field, checked to be of `kind`: int, count, float, bool, str, list or dict."""
    for part in field.split("."):
        if not isinstance(values, Mapping) or part not in values:
            fail(field, "missing")
        values = values[part]
    if values is None and optional:
        return None
    number = isinstance(values, int | float) and not isinstance(values, bool)
    fits = {
        "int": number and isinstance(values, int),
        "count": number and isinstance(values, int) and values >= 0,
        "float": number and math.isfinite(values),
        "bool": isinstance(values, bool),
        "str": isinstance(values, str),
        "list": isinstance(values, list),
        "dict": isinstance(values, dict),
    }[kind]
    if not fits:
        fail(field, f"expected {kind}{' or null' if optional else ''}, got {values!r:.60}")
    return values


def choose(values: Any, field: str, known: tuple[str, ...]) -> str:
    """Returns the string at a dotted field, checked to be one of those known."""
    value = get_field(values, field, "str")
    if value not in known:
        fail(field, f"'{value}' is not one of {', '.join(known)}")
    return value


def validate_comparison(record: Any, field: str) -> int:
    """Checks the comparison at a dotted field of a record.

    Returns:
      Its length in tokens.

    Raises:
      ValueError: names the field.
    """
    lengths = set()
    newer = [name for name in (*LAW_NUMBERS, "choice_flip") if name in get_field(record, field, "dict")]
    for name in (*COMPARISON_FLAGS, *COMPARISON_NUMBERS, *newer):
        column = get_field(record, f"{field}.{name}", "list")
        lengths.add(len(column))
        for index, value in enumerate(column):
            if name in (*COMPARISON_FLAGS, "choice_flip"):
                if not isinstance(value, bool):
                    fail(f"{field}.{name}[{index}]", f"expected bool, got {value!r:.60}")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                fail(f"{field}.{name}[{index}]", f"expected a finite number, got {value!r:.60}")
            elif value < 0 and name != "shift":
                fail(f"{field}.{name}[{index}]", f"{value} is below 0")
    if len(lengths) != 1:
        fail(field, f"lists of unequal length: {sorted(lengths)}")
    comparison = get_field(record, field, "dict")
    for index, equal in enumerate(comparison["bit_equal"]):
        if equal and comparison["max_abs"][index]:
            fail(f"{field}.bit_equal[{index}]", "true beside a difference")
        if comparison["flip"][index] and not comparison["max_abs"][index]:
            fail(f"{field}.flip[{index}]", "true beside no difference")
    return lengths.pop()


def validate_distance(record: Any, field: str, steps: int) -> None:
    """Checks the distance to a float64 run at a dotted field: an entry for each of `steps` tokens."""
    for name in ("flip", *DISTANCE_NUMBERS):
        column = get_field(record, f"{field}.{name}", "list")
        if len(column) != steps:
            fail(f"{field}.{name}", f"{len(column)} entries beside {steps} tokens")
        for index, value in enumerate(column):
            if name == "flip":
                if not isinstance(value, bool):
                    fail(f"{field}.flip[{index}]", f"expected bool, got {value!r:.60}")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                fail(f"{field}.{name}[{index}]", f"expected a finite number of at least 0, got {value!r:.60}")


def validate_tokens(record: Any, field: str) -> int:
    """Checks a list of token ids and returns its length."""
    tokens = get_field(record, field, "list")
    for index, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int):
            fail(f"{field}[{index}]", f"expected int, got {token!r:.60}")
        if token < 0:
            fail(f"{field}[{index}]", f"{token} is no token id")
    return len(tokens)


def find_headline(scorers: Iterable[str]) -> str:
    """The scorer whose figure stands for a task: the first of HEADLINES that it has."""
    return next(name for name in HEADLINES if name in scorers)


def _validate_arm(record: Any, arm: str) -> int:
    """Checks an arm and returns how many tokens it has."""
    steps = validate_tokens(record, f"arms.{arm}.tokens")
    get_field(record, f"arms.{arm}.text", "str")
    choose(record, f"arms.{arm}.stop", ("eos", "length", "stop_string", "invalid"))
    scorers = get_field(record, f"arms.{arm}.scores", "dict")
    if not set(scorers) & set(HEADLINES):
        fail(f"arms.{arm}.scores", f"none of {', '.join(HEADLINES)}")
    for scorer in scorers:
        get_field(record, f"arms.{arm}.scores.{scorer}.answer", "str", optional=True)
        get_field(record, f"arms.{arm}.scores.{scorer}.correct", "bool")
    return steps


def validate_setting(record: Any) -> str:
    """Checks what every sample of a problem has: prompt, shapes, sampling, headroom, status and what is invalid.

    Returns:
      The status.
    """
    get_field(record, "prompt_tokens", "count")
    get_field(record, "prompt_sha256", "str")
    for name in ("batch", "prefill", "slots", "left_pad"):
        get_field(record, f"shapes.{name}", "count")
    get_field(record, "shapes.uncached", "str")
    get_field(record, "shapes.tile", "count", optional=True)
    choose(record, "sampling.sampler", SAMPLERS)
    if get_field(record, "sampling.temperature", "float") <= 0:
        fail("sampling.temperature", "expected a positive number")
    get_field(record, "sampling.top_k", "count", optional=True)
    get_field(record, "sampling.top_p", "float", optional=True)
    get_field(record, "sampling.seed", "int")
    for name in ("max_abs", "limit"):
        if get_field(record, f"headroom.{name}", "float") < 0:
            fail(f"headroom.{name}", "negative")
    if record["headroom"]["limit"] == 0:
        fail("headroom.limit", "expected a positive number")
    get_field(record, "headroom.layer", "count", optional=True)
    get_field(record, "headroom.op", "str")
    status = choose(record, "status", ("ok", "invalid"))
    if status == "invalid":
        get_field(record, "invalid.arm", "str")
        get_field(record, "invalid.layer", "count", optional=True)
        get_field(record, "invalid.op", "str")
        get_field(record, "invalid.position", "int")
        get_field(record, "invalid.step", "int", optional=True)
        choose(record, "invalid.value", ("inf", "nan"))
    elif record.get("invalid") is not None:
        fail("invalid", "expected null in a sample with status ok")
    return status


def require_null(record: Any, fields: Sequence[str]) -> None:
    """Checks that an invalid sample states no agreement."""
    for name in fields:
        if get_field(record, name, "dict", optional=True) is not None:
            fail(name, "an invalid sample has no agreement to state; expected null")


def validate_free_running(record: Any, arms: Mapping[str, Any] | None = None) -> None:
    """Checks the free runs of a sample, where it has them.

    Args:
      record: the sample.
      arms: tokens of its arms 'uncached' and 'cached', where it has both: they say the same.
    """
    if get_field(record, "free_running", "dict", optional=True) is not None:
        diverged = get_field(record, "free_running.diverged", "bool")
        first = get_field(record, "free_running.first_diverged", "count", optional=True)
        if diverged == (first is None):
            fail("free_running.first_diverged", f"{first} beside diverged {diverged}")
        differing = get_field(record, "free_running.differing_after", "count")
        if differing > get_field(record, "free_running.compared_after", "count"):
            fail("free_running.differing_after", "more than compared_after")
        for name, value in free_running(arms["uncached"], arms["cached"]).items() if arms else ():
            if record["free_running"][name] != value:
                fail(f"free_running.{name}", f"{record['free_running'][name]} beside tokens that say {value}")


def validate_sample(record: Mapping[str, Any]) -> None:
    """Checks a sample of experiment 'divergence' against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    choose(record, "experiment", ("divergence",))
    problem = get_field(record, "problem", "count")
    if list(get_field(record, "key", "list")) != ["divergence", problem]:
        fail("key", f"expected ['divergence', {problem}], got {record['key']!r:.60}")
    if choose({"framework": DEFAULT_FRAMEWORK, **record}, "framework", FRAMEWORKS) != DEFAULT_FRAMEWORK:
        get_field(record, "attention", "str")
        for package in get_field(record, "versions", "dict"):
            get_field(record, f"versions.{package}", "str")
    status = validate_setting(record)
    steps = {arm: _validate_arm(record, arm) for arm in ("cached", "uncached")}
    scorers, others = (set(record["arms"][arm]["scores"]) for arm in ("cached", "uncached"))
    if scorers != others:
        fail("arms.uncached.scores", f"{sorted(others)} beside {sorted(scorers)} of the cached arm")
    comparisons = ["teacher_forced", *(f"controls.{name}" for name in CONTROLS)]
    if status == "invalid":
        require_null(record, [*comparisons, "free_running"])
        return
    for arm in ("cached", "uncached"):
        if record["arms"][arm]["stop"] == "invalid":
            fail(f"arms.{arm}.stop", "'invalid' in a sample with status ok")
    for name in comparisons:
        if get_field(record, name, "dict", optional=True) is None:
            continue
        length = validate_comparison(record, name)
        if name == "controls.uncached_stepwise":  # of the uncached arm's own run, as far as both forms of it go
            if length > steps["uncached"]:
                fail(name, f"{length} entries beside {steps['uncached']} tokens of the uncached arm")
        elif length != steps["cached"]:
            fail(name, f"{length} entries beside {steps['cached']} tokens of the cached arm")
    if record.get("truth") is not None:
        for arm in ("cached", "uncached"):
            validate_distance(record, f"truth.{arm}", steps["cached"])
    validate_free_running(record, {arm: record["arms"][arm]["tokens"] for arm in steps})
    for scorer in record["arms"]["cached"]["scores"]:
        differ = len({record["arms"][arm]["scores"][scorer]["correct"] for arm in ("cached", "uncached")}) > 1
        if (choose(record, f"label_change.{scorer}", LABEL_CHANGES) != "same") != differ:
            fail(f"label_change.{scorer}", "contradicts the scores of the arms")
