"""C4 and C5: where along the layers the arms part, what patching brings back, and whether the cache is the cause."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxkv.experiments.divergence import cause
from jaxkv.experiments.divergence.wording import LABELS
from jaxkv.experiments.report_parts import base_precision
from jaxkv.overview.contrasts import ASKED, by_model, select
from jaxkv.overview.gather import Study, select_valid
from jaxkv.overview.orders import explain_orders
from jaxkv.reporting.format import format_counted_share, format_interval, format_number, format_part, say_count
from jaxkv.reporting.rules import DOUBLE, FAMILY, HALF, Evidence, hold_all, lies_above, lies_below
from jaxkv.reporting.shares import share, take_rest
from jaxkv.reporting.statistics import fisher_exact, read_estimate, share_p_above, share_p_below

NARROW = ("fp16", "bf16")


class Claim(msgspec.Struct, frozen=True):
    """What there is on a claim, in sentences, and how strong it is (None without records); `rules.decide` judges."""

    evidence: Evidence | None
    figure: Sequence[str]
    control: Sequence[str] = ()


def describe_aligned(study: Study) -> list[str]:
    """What both arms through one program, the cache on, say of a bug."""
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
    if steps := sum(gate["steps"] for gate in passed):
        lines.append(f"the aligned gate of {say_count(len(passed), 'condition')} found equal bits at all {steps} steps")
    return lines or ["no aligned run, so a bug of the cache is not told from rounding"]


def _percent(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "not defined (no drift)"
    text = format_part(entry["mean"], entry["interval"])
    return text if entry["interval"] else f"{text} (one problem, no interval)"


def _select_drift(study: Study) -> list[Any]:
    return [c for c in select_valid(study, "drift") if c["regime"] == "plain" and base_precision(c) in NARROW]


def judge_c4(study: Study) -> Claim:
    """Sharp at the first layer in grouped-query models other than Gemma, even in Gemma: any model refutes it."""
    found = _select_drift(study)
    if not found:
        return Claim(None, ["no valid 16-bit drift records (`--experiments=drift`)"])
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
    return Claim(evidence, lines, [*control, *explain_orders(study, found)])


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
    control = ["every value of the donor gives the donor's logits, its own values change nothing: else no verdict"]
    judged = [(c, c["patching"]["claim"]) for c in _choose_patching(select_valid(study, "patching"))]
    if not judged:
        return Claim(None, ["no valid patching records (`--experiments=patching`)"], control)
    lines = [f"{c['model']} {c['precision']}: {claim['why']}" for c, claim in judged]
    return Claim(hold_all([Evidence(claim["supports"], claim["refutes"]) for _, claim in judged]), lines, control)


def _choose_patching(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of runs that ask a model the same, those with most problems: one that asks a few of them again adds nothing."""
    groups: dict[tuple, list[tuple[int, Mapping[str, Any]]]] = defaultdict(list)
    for condition in found:
        count = condition["patching"]["problems"]["ok"]
        groups[tuple(condition[name] for name in (*ASKED, "precision"))].append((count, condition))
    return [c for members in groups.values() for n, c in members if n == max(count for count, _ in members)]


ALIKE = ("model", "weights", "precision", "device", "framework", "batch_size")  # of which programs have one shape


def _count_problems(compared: Mapping[str, Any]) -> dict[str, Any]:
    """Problems with other bits at some step, and the share of steps that have."""
    return compared["sequences_with_other_bits"] | {"steps": 1 - compared["bit_equal"]["rate"]}


def _choose_aligned(study: Study, like: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the runs and gates of a condition's programs (`ALIKE`) aligned, cache on, the one that says most.

    By problems that have other bits, then by problems. They share problems, so that they do not add up.
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
    """Whether the arms of each model and precision part by rounding or by a fault: `verdict`, by `cause.decide`.

    `plain` and `aligned` are shares of problems with other bits at some step (aligned: both arms through one program,
    cache on, in a run or in the gate; None if there is none), `distance` is the largest of the plain arms' ratios of
    their distances to float64 (None without one). Why it may be open: `enough`, whether the aligned arms tried enough
    problems; `unmeasured`, samplers without float64 in fp32; `odd`, whether a step is not as rounding has it.
    """
    plain = [c for c in select(study, each=True) if c["divergence"]["teacher_forced"]]
    found = []
    for name, members in by_model(plain).items():
        shares = [_count_problems(c["divergence"]["teacher_forced"]) for c in members]
        without = max(shares, key=lambda entry: (entry["total"], entry["count"]))
        aligned = _choose_aligned(study, members[0])
        both = [[entry["count"], entry["total"] - entry["count"]] for entry in (without, aligned) if entry]
        enough = aligned is not None and fisher_exact(both) <= FAMILY  # p that as many have other bits in both
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
            full_gate=samplers <= {c["sampler"] for c in members if _passed_full_gate(c)},
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


def _find_falls(conditions: Sequence[Mapping[str, Any]]) -> list[bool | None]:
    """Whether the difference of the arms falls from each 16-bit condition to the fp32 one of its sampler."""

    def size(condition: Mapping[str, Any]) -> float:
        """Of the steps that differ alone: a CPU's kernels may round alike at most of the steps in 16 bits."""
        forced = condition["divergence"]["teacher_forced"]
        differing = forced["tokens"] - forced["bit_equal"]["count"]
        return forced["mean_abs"]["mean"] * forced["tokens"] / differing if differing else 0.0

    wide = {c["sampler"]: size(c) for c in conditions if c["precision"] == "fp32"}  # without overrides
    return [
        cause.falls(str(base_precision(c)), size(c), wide[c["sampler"]])
        for c in conditions
        if base_precision(c) in NARROW and c["sampler"] in wide
    ]


def _passed_full_gate(condition: Mapping[str, Any]) -> bool:
    gate = condition["divergence"]["gate"] or {}
    return bool(gate.get("passed") and (gate.get("plain") or {}).get("passed"))


def judge_c5b(study: Study) -> Claim:
    """Whether the arms part because there is a cache, or because they are of other shapes.

    The aligned share of problems with other bits is set against half of the plain one, either end of its interval.
    """
    lines, parts = [], []
    for entry in study["causes"]:
        if entry["precision"] not in NARROW:
            continue
        plain, aligned = entry["plain"], entry["aligned"]
        beside = f"through one program with the cache on {format_counted_share(aligned)}"
        said = f"{entry['name']}, problems with other bits: {format_counted_share(plain)}"
        lines.append(f"{said}; {beside if aligned else 'no aligned run to set beside'}")
        if aligned and plain["count"]:
            low, high = (HALF * end for end in plain["interval"])
            count, total = aligned["count"], aligned["total"]
            above = share_p_above(count, total, high) if aligned["steps"] > HALF * plain["steps"] else 1.0
            parts.append(Evidence(above, share_p_below(count, total, low)))
    evidence = hold_all(parts) if parts else None
    if evidence is not None and evidence.p <= FAMILY:
        fault = "makes the arms part: a fault, or it keeps other numbers than it was given"
        shapes = "does not make most of it: it takes other shapes too"
        lines.append(f"in these programs a cache alone {fault if evidence.holds else shapes}")
    plain = [c for name in NARROW for c in select(study, name)]
    control = [*_describe_lengths(study), *describe_aligned(study), *explain_orders(study, plain)]
    return Claim(evidence, lines or ["no valid 16-bit run of the plain regime"], control)


def _describe_lengths(study: Study) -> list[str]:
    """The uncached arm against itself at another length: no cache at all.

    Counted by runs: programs differ at nearly every step or at none, so a share of steps would tell of what was chosen.
    """
    runs: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for precision in NARROW:
        for condition in select(study, precision):
            if found := condition["divergence"]["controls"]["uncached_other_length"]:
                runs[precision, condition["model"]].append(found["bit_equal"]["count"] < found["tokens"])
    return [
        f"{LABELS['uncached_other_length']}, {precision}, {model}: other bits in {sum(found)} of "
        f"{say_count(len(found), 'run')}"
        for (precision, model), found in runs.items()
    ]
