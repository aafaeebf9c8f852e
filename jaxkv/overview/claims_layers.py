"""C4 and C5: where along the layers the arms part, what patching brings back, and whether the cache is the cause."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.experiments.divergence import cause
from jaxkv.experiments.divergence.wording import LABELS
from jaxkv.experiments.report_parts import base_precision
from jaxkv.overview.claims_common import (
    Claim,
    Study,
    by_model,
    describe_aligned,
    say_count,
    select,
)
from jaxkv.overview.contrasts import ASKED
from jaxkv.reporting.format import format_counted_share, format_interval, format_number, format_part
from jaxkv.reporting.rules import DOUBLE, FAMILY, HALF, Evidence, hold_all, lies_above, lies_below
from jaxkv.reporting.shares import share
from jaxkv.reporting.statistics import fisher_exact, read_estimate, share_p_above, share_p_below

NARROW = ("fp16", "bf16")


def _percent(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "not defined (no drift)"
    text = format_part(entry["mean"], entry["interval"])
    return text if entry["interval"] else f"{text} (one problem, no interval)"


def _select_drift(study: Study) -> list[Any]:
    return [
        c
        for c in study["conditions"]
        if c.get("drift") and c["drift"]["status"] == "ok" and c["regime"] == "plain" and base_precision(c) in NARROW
    ]


NO_DRIFT = ["no valid 16-bit drift records (`--experiments=drift`)"]


def judge_c4(study: Study) -> Claim:
    """Sharp at the first layer in grouped-query models other than Gemma, even in Gemma.

    A model of either kind whose interval is on the other side refutes the claim, and both kinds are needed to
    reproduce it.
    """
    found = _select_drift(study)
    if not found:
        return Claim(None, NO_DRIFT)
    lines, control = [], []
    sides: dict[str, list[Evidence]] = {"GQA": [], "Gemma": []}
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
        if kind != "MHA":
            sides[kind].append((lies_below if kind == "Gemma" else lies_above)(read_estimate(first), HALF))
    evidence = hold_all([*sides["GQA"], *sides["Gemma"]])
    if missing := [kind for kind, parts in sides.items() if not parts]:
        evidence = Evidence(1.0, evidence.refutes)
        lines.append(f"no model of the kind {' or '.join(missing)} to set beside")
    return Claim(evidence, lines, control)


def judge_c4b(study: Study) -> Claim:
    """Whether grouping makes the first layer sharp: the model beside itself with repeated K/V heads."""
    parts, lines = [], []
    for condition in _select_drift(study):
        drift = condition["drift"]
        if (compared := drift["repeated"] and drift["repeated"]["first_layer_against"]) is None:
            continue
        difference, ratio = compared["difference"], compared["ratio"]
        points = format_interval(difference["mean"], difference["interval"], lambda p: format_number(100 * p, 3))
        times = format_interval(ratio["mean"], ratio["interval"], lambda r: format_number(r, 3))
        lines.append(
            f"{condition['model']} {condition['precision']}: {_percent(drift['first_layer'])} as it is, "
            f"{_percent(drift['repeated']['first_layer'])} with repeated heads: {points} points more, {times} times"
        )
        parts.append(lies_above(read_estimate(ratio), DOUBLE))
    if not parts:
        return Claim(None, ["no drift records of a model beside itself with repeated K/V heads"])
    control = ["repeated heads are equal mathematics in other shapes, which round otherwise by themselves"]
    return Claim(hold_all(parts), lines, control)


def judge_c5a(study: Study) -> Claim:
    """What the patches say (jaxkv.experiments.patching.report.judge_claim), all runs together."""
    found = [c for c in study["conditions"] if c.get("patching") and c["patching"]["status"] == "ok"]
    control = ["every value of the donor gives the donor's logits, its own values change nothing: else no verdict"]
    if not found:
        return Claim(None, ["no valid patching records (`--experiments=patching`)"], control)
    found = _choose_patching(found)
    claims = [c["patching"]["claim"] for c in found]
    lines = [f"{c['model']} {c['precision']}: {claim['why']}" for c, claim in zip(found, claims, strict=True)]
    evidence = hold_all([Evidence(claim["supports"], claim["refutes"]) for claim in claims])
    return Claim(evidence, lines, control)


def _choose_patching(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of runs that ask a model the same, those with most problems: one that asks a few of them again adds nothing."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for condition in found:
        groups.setdefault(tuple(condition[name] for name in (*ASKED, "precision")), []).append(condition)
    most = {key: max(c["patching"]["problems"]["ok"] for c in members) for key, members in groups.items()}
    return [c for key, members in groups.items() for c in members if c["patching"]["problems"]["ok"] == most[key]]


ALIKE = ("model", "weights", "precision", "device", "framework", "batch_size")  # of which programs have one shape


def _count_problems(compared: Mapping[str, Any]) -> dict[str, Any]:
    """Problems with other bits at some step, and the share of steps that have."""
    return compared["sequences_with_other_bits"] | {"steps": 1 - compared["bit_equal"]["rate"]}


def _choose_aligned(study: Study, like: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the runs and gates of a condition's programs (`ALIKE`) aligned, cache on, the one that says most.

    That is the one with most problems that have other bits, then with most problems. They share problems, so that they
    do not add up.
    """
    found: list[dict[str, Any]] = []
    for condition in study["conditions"]:
        divergence = condition.get("divergence")
        if not divergence or any(condition[name] != like[name] for name in ALIKE):
            continue
        gate = divergence["gate"]
        if gate and gate.get("passed") and gate["steps"] and (none := share(0, gate["problems"])):
            found.append(none | {"steps": 0.0})
        if condition["regime"] == "aligned" and divergence.get("teacher_forced"):
            found.append(_count_problems(divergence["teacher_forced"]))
    return max(found, key=lambda entry: (entry["count"], entry["total"]), default=None)


def diagnose(study: Study) -> list[dict[str, Any]]:
    """Whether the arms of each model and precision part by rounding or by a fault.

    Returns:
      For each: `plain` and `aligned`, shares of problems with other bits at some step (aligned: both arms through one
      program, cache on, in a run or in the gate; None if there is none), `distance`, the largest of the plain arms'
      ratios of their distances to float64 (None without one), and `verdict`, by
      `jaxkv.experiments.divergence.cause.decide`. Why it may be open: `enough`, whether the aligned arms tried enough
      problems; `unmeasured`, samplers without float64 in fp32; `odd`, whether a step is not as rounding has it.
    """
    plain = [c for c in select(study, each=True) if c["divergence"]["teacher_forced"]]
    found = []
    for name, members in by_model(plain).items():
        shares = [_count_problems(c["divergence"]["teacher_forced"]) for c in members]
        without = max(shares, key=lambda entry: (entry["total"], entry["count"]))
        aligned = _choose_aligned(study, members[0])
        enough = aligned is not None and _differ(without, aligned) <= FAMILY
        same = [c for c in plain if all(c[k] == members[0][k] for k in ALIKE if k != "precision")]
        measured = [(c, d) for c in same if (d := cause.read_distance(c["divergence"])) is not None]
        samplers = {c["sampler"] for c in members}
        unmeasured = samplers - {c["sampler"] for c, _ in measured if c["precision"] == "fp32"}
        known = cause.Evidence(
            differs=any(entry["count"] for entry in shares),
            aligned=False if aligned is not None and aligned["count"] else True if enough else None,
            distances=[d for _, d in measured],
            wide=not unmeasured,
            falls=_find_falls(same),
            full_gate=samplers <= {c["sampler"] for c in members if _passed_whole(c)},
            strays=any(cause.strays(d, c["divergence"]["teacher_forced"]["mean_abs"]["max"]) for c, d in measured),
        )
        ratios = [r for c in members if (d := cause.read_distance(c["divergence"])) for r in (d.ratio, 1 / d.ratio)]
        found.append(
            {
                "name": name,
                "precision": base_precision(members[0]),
                "plain": without,
                "aligned": aligned,
                "distance": max(ratios, default=None),
                "verdict": cause.decide(known),
                "enough": enough,
                "unmeasured": sorted(map(str, unmeasured)),
                "odd": known.odd,
            }
        )
    return found


def _differ(plain: Mapping[str, Any], aligned: Mapping[str, Any]) -> float:
    """p-value that as many problems have other bits in both (Fisher's exact test)."""
    return fisher_exact([[entry["count"], entry["total"] - entry["count"]] for entry in (plain, aligned)])


def _find_falls(conditions: Sequence[Mapping[str, Any]]) -> list[bool | None]:
    """Whether the difference of the arms falls from each 16-bit condition to the fp32 one of its sampler."""

    def size(condition: Mapping[str, Any]) -> float:
        """Of the steps that differ alone: a CPU's kernels may round alike at most of the steps in 16 bits."""
        forced = condition["divergence"]["teacher_forced"]
        differing = forced["tokens"] - forced["bit_equal"]["count"]
        return forced["mean_abs"]["mean"] * forced["tokens"] / differing if differing else 0.0

    wide = {c["sampler"]: size(c) for c in conditions if c["precision"] == "fp32"}  # without overrides
    falls = []
    for condition in conditions:
        precision, narrow, other = base_precision(condition), size(condition), wide.get(condition["sampler"])
        if precision in NARROW and other is not None:
            falls.append(cause.falls(str(precision), narrow, other))
    return falls


def _passed_whole(condition: Mapping[str, Any]) -> bool:
    """Whether the plain programs passed the full gate."""
    gate = condition["divergence"]["gate"] or {}
    return bool(gate.get("passed") and (gate.get("plain") or {}).get("passed"))


def judge_c5b(study: Study) -> Claim:
    """Whether the arms part because there is a cache, or because they are of other shapes.

    With both arms through one program, the cache still on, the share of problems with other bits is set against half
    of that of the plain arms, either end of its interval. Problems are the trials, not steps: a program's bits agree
    at all steps of a text, or hardly at any.
    """
    found = [entry for entry in study["causes"] if entry["precision"] in NARROW]
    lines, parts = [], []
    for entry in found:
        plain, aligned = entry["plain"], entry["aligned"]
        beside = "no aligned run to set beside"
        if aligned is not None:
            beside = f"through one program with the cache on {format_counted_share(aligned)}"
        lines.append(f"{entry['name']}, problems with other bits: {format_counted_share(plain)}; {beside}")
        if aligned is not None and plain["count"]:
            low, high = (HALF * end for end in plain["interval"])
            count, total = aligned["count"], aligned["total"]
            above = share_p_above(count, total, high) if aligned["steps"] > HALF * plain["steps"] else 1.0
            parts.append(Evidence(above, share_p_below(count, total, low)))
    evidence = hold_all(parts) if parts else None
    if evidence is not None and evidence.p <= FAMILY:
        lines.append(
            "in these programs a cache alone makes the arms part: a fault, or it keeps other numbers than it was given"
            if evidence.holds
            else "in these programs a cache alone does not make most of it: it takes other shapes too"
        )
    control = [*_describe_lengths(study), *describe_aligned(study)]
    return Claim(evidence, lines or ["no valid 16-bit run of the plain regime"], control)


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
