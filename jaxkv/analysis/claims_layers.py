"""C4 and C5: where along the layers the arms part, what patching brings back, and whether the cache is the cause."""

from collections.abc import Mapping
from typing import Any

from jaxkv.analysis.claims_common import (
    CANNOT_TELL,
    NOT_REPRODUCED,
    REPRODUCED,
    Claim,
    Study,
    by_model,
    describe_aligned,
    make_claim,
    say_count,
    select,
)
from jaxkv.analysis.contrasts import base_precision
from jaxkv.analysis.format import format_counted_share, format_number
from jaxkv.analysis.summary import share
from jaxkv.analysis.wording import LABELS

HALF = 0.5  # "sharply at layer 1": more than half of the drift that leaves the last layer leaves the first
NARROW = ("fp16", "bf16")
EQUAL, ROUNDING, FAULT = "equal", "rounding", "fault"


def _percent(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "not defined (no drift)"
    text = f"{format_number(100 * entry['mean'], 3)} %"
    if entry["interval"] is None:
        return f"{text} (one problem, no interval)"
    return f"{text} [{format_number(100 * entry['interval'][0], 3)}, {format_number(100 * entry['interval'][1], 3)}]"


def judge_c4(study: Study) -> Claim:
    """Sharp at the first layer in grouped-query models other than Gemma, even in Gemma.

    'Sharp' is more than half of the drift that leaves the last layer leaving the first one already, 'even' less; the
    paper gives no measure. A model of either kind whose interval is on the other side refutes the claim, and both kinds
    are needed to reproduce it.
    """
    found = [
        c
        for c in study["conditions"]
        if c.get("drift") and c["drift"]["status"] == "ok" and c["regime"] == "plain" and base_precision(c) in NARROW
    ]
    if not found:
        return make_claim("C4", CANNOT_TELL, ["no valid 16-bit drift records (`--experiments=drift`)"], [])
    lines, control, sides = [], [], []
    for condition in found:
        drift, name = condition["drift"], f"{condition['model']} {condition['precision']}"
        heads, first = drift["heads"], drift["first_layer"]
        gemma, grouped = "gemma" in (condition["family"] or ""), heads["kv"] < heads["query"]
        kind = "Gemma" if gemma else "GQA" if grouped else "MHA"
        lines.append(
            f"{name} ({kind}, {heads['query']} query heads on {heads['kv']}): {_percent(first)} of the drift that "
            f"leaves layer {drift['num_layers']} leaves layer 1"
        )
        if repeated := drift["repeated"]:
            control.append(f"{name} with K/V heads repeated into MHA: {_percent(repeated['first_layer'])}")
        if first is not None and first["interval"] is not None and kind != "MHA":
            low, high = first["interval"]
            side = "sharp" if low > HALF else "even" if high < HALF else "open"
            sides.append((kind, side))
    wanted = {"GQA": "sharp", "Gemma": "even"}
    if any(side not in ("open", wanted[kind]) for kind, side in sides):
        verdict = NOT_REPRODUCED
    elif {("GQA", "sharp"), ("Gemma", "even")} == set(sides):
        verdict = REPRODUCED
    else:
        verdict = CANNOT_TELL
        missing = [kind for kind in wanted if kind not in {kind for kind, _ in sides}]
        if missing:
            lines.append(f"no model of the kind {' or '.join(missing)} to set beside")
    return make_claim("C4", verdict, lines, control, sides=[list(side) for side in sides])


def judge_c5a(study: Study) -> Claim:
    """The verdict of the patches (jaxkv.analysis.patching.judge_claim), all runs together."""
    found = [c for c in study["conditions"] if c.get("patching") and c["patching"]["status"] == "ok"]
    control = ["every value of the donor gives the donor's logits, its own values change nothing: else no verdict"]
    if not found:
        return make_claim("C5a", CANNOT_TELL, ["no valid patching records (`--experiments=patching`)"], control)
    lines = [f"{c['model']} {c['precision']}: {c['patching']['claim']['why']}" for c in found]
    verdicts = {c["patching"]["claim"]["verdict"] for c in found}
    verdict = NOT_REPRODUCED if NOT_REPRODUCED in verdicts else CANNOT_TELL if CANNOT_TELL in verdicts else REPRODUCED
    return make_claim("C5a", verdict, lines, control, verdicts=sorted(verdicts))


ALIKE = ("model", "precision", "device", "framework", "batch_size")  # of which programs have one shape


def _count_aligned(study: Study, like: Mapping[str, Any]) -> tuple[int, int]:
    """Aligned steps with other bits, and all of them, cache on, of a condition's programs (`ALIKE`)."""
    differing = total = 0
    for condition in study["conditions"]:
        found = condition.get("divergence")
        if not found or any(condition[name] != like[name] for name in ALIKE):
            continue
        gate = found["gate"]
        if gate and gate.get("passed"):
            total += gate["steps"]
        if condition["regime"] == "aligned" and found.get("teacher_forced"):
            total += found["teacher_forced"]["tokens"]
            differing += found["teacher_forced"]["tokens"] - found["teacher_forced"]["bit_equal"]["count"]
    return differing, total


def diagnose(study: Study) -> list[dict[str, Any]]:
    """Whether the arms of each model and precision part by rounding or by a fault.

    Returns:
      For each: `plain` and `aligned`, shares of steps with other bits (aligned: both arms through one program, cache
      on, in a run or in the gate; None if there is none), and `verdict`: 'equal' (no plain step differs), 'rounding'
      (plain steps differ, no aligned one does, and the bound of the aligned share lies below the plain interval),
      'fault' (aligned steps differ too) or 'cannot tell'.
    """
    plain = [
        c
        for c in study["conditions"]
        if c.get("divergence")
        and c["divergence"]["status"] == "ok"
        and (c["framework"], c["regime"]) == ("jax", "plain")
        and c["divergence"]["teacher_forced"]
    ]
    found = []
    for name, members in by_model(plain).items():
        tokens = sum(c["divergence"]["teacher_forced"]["tokens"] for c in members)
        equal = sum(c["divergence"]["teacher_forced"]["bit_equal"]["count"] for c in members)
        without, (differing, total) = share(tokens - equal, tokens), _count_aligned(study, members[0])
        aligned, verdict = share(differing, total), CANNOT_TELL
        if without is not None and not without["count"]:
            verdict = EQUAL
        elif aligned is not None and aligned["count"]:
            verdict = FAULT
        elif aligned is not None and without is not None and aligned["upper_bound"] < without["interval"][0]:
            verdict = ROUNDING
        precision = base_precision(members[0])
        found.append({"name": name, "precision": precision, "plain": without, "aligned": aligned, "verdict": verdict})
    return found


def judge_c5b(study: Study) -> Claim:
    """Whether the arms part because there is a cache, or because they are of other shapes.

    With both arms through one program, the cache still on, the share of steps whose logits differ is set against that
    of the plain arms. If its upper bound lies below their interval, the cache does not suffice for the difference.
    """
    found = [entry for entry in study["causes"] if entry["precision"] in NARROW]
    lines = []
    for entry in found:
        beside = "no aligned steps to set beside"
        if entry["aligned"] is not None:
            beside = f"through one program with the cache on {format_counted_share(entry['aligned'])}"
        lines.append(f"{entry['name']}, steps with other bits: {format_counted_share(entry['plain'])}; {beside}")
    verdict = NOT_REPRODUCED if any(entry["verdict"] == ROUNDING for entry in found) else CANNOT_TELL
    if verdict == NOT_REPRODUCED:
        lines.append("a cache alone does not make the arms part: other shapes round otherwise")
    control = [*_describe_lengths(study), *describe_aligned(study)]
    return make_claim("C5b", verdict, lines or ["no valid 16-bit run of the plain regime"], control)


def _describe_lengths(study: Study) -> list[str]:
    """The uncached arm against itself at another length: no cache at all.

    Counted by runs: programs differ at nearly every step or at none, so a share of steps would tell of what was chosen.
    """
    runs: dict[tuple[str, str], list[bool]] = {}
    for precision in NARROW:
        for condition in select(study, precision):
            if found := condition["divergence"]["controls"]["uncached_other_length"]:
                differs = found["bit_equal"]["count"] < found["tokens"]
                runs.setdefault((precision, condition["model"]), []).append(differs)
    return [
        f"{LABELS['uncached_other_length']}, {precision}, {model}: other bits in {sum(found)} of "
        f"{say_count(len(found), 'run')}"
        for (precision, model), found in runs.items()
    ]
