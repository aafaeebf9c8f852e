"""The claims of arXiv 2604.15409 against a study's figures: a verdict each, never stronger than its interval.

The models are those of the study, not those of the paper: 'not reproduced' says that it does not hold here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.experiments.divergence import cause
from jaxkv.experiments.report_parts import base_precision
from jaxkv.overview.claims_layers import Claim, Study, describe_aligned, judge_c4, judge_c4b, judge_c5a, judge_c5b
from jaxkv.overview.contrasts import BUILD, PROCESS, by_model, select
from jaxkv.reporting import statistics
from jaxkv.reporting.format import (
    format_count,
    format_counted_share,
    format_interval,
    format_number,
    format_points,
    say_count,
)
from jaxkv.reporting.rules import ALMOST_ALL, FAMILY, OPEN, ORDERS, ZERO_PERCENT, Evidence, decide, hold_all, lies_above

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"


def _describe_reruns(study: Study) -> list[str]:
    lines = [
        f"{arm} run again has other bits in {format_counted_share(found, 'runs')}, of {found['sequences']} sequences "
        f"and {found['steps']} steps"
        for arm, found in study["reruns"].items()
        if found is not None
    ]
    return lines or ["no arm was run again, so a difference between reruns is not ruled out"]


def judge_c1(study: Study) -> Claim:
    """All FP16 generations diverge: refuted by one that ended with the arms together, not by one that was cut."""
    conditions, theirs = (
        [c for c in select(study, "fp16", framework=one) if c["divergence"]["free_running"]] for one in ("jax", "torch")
    )
    control = [*_describe_reruns(study), *describe_aligned(study)]
    if not conditions:
        return Claim(None, ["no valid FP16 run of the plain regime"], control)
    lines = [*_list_diverged(conditions), *(f"PyTorch, {line}" for line in _list_diverged(theirs))]
    free = [c["divergence"]["free_running"] for c in conditions]
    ended, cut = (sum(found["together"][kind] for found in free) for kind in ("ended", "cut"))
    if ended:
        evidence = Evidence(refutes=0.0)
        lines.append(f"ended by themselves, the arms together: {ended}")
    elif cut:
        evidence = OPEN
    else:
        shares = [found["diverged"] for found in free]
        least = max(statistics.share_p_above(s["count"], s["total"], ALMOST_ALL) for s in shares)
        evidence = Evidence(least, sides=1)
        if evidence.p > FAMILY:
            lines.append("all part, but the bounds of so few sequences do not tell 100 % from less")
    if cut:
        lines.append(f"cut by length, the arms together, so that they might part yet: {cut}")
    return Claim(evidence, lines, control)


def _list_diverged(conditions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sequences that part, a line for each model and precision."""
    lines = []
    for name, members in by_model(conditions).items():
        tokens = sorted({c["new_tokens"] for c in members if c["new_tokens"]})
        within = f" within {' or '.join(map(str, tokens))} tokens" if tokens else ""
        shares = [
            f"{c['sampler']} {format_counted_share(c['divergence']['free_running']['diverged'])}" for c in members
        ]
        lines.append(f"{name}, sequences that part{within}: {', '.join(shares)}")
    return lines


def _describe_truth(study: Study, precision: str) -> list[str]:
    lines = []
    for found in study["truth"]:
        if base_precision({"precision": found["variant"]}) != precision or found["tile"] is not None:
            continue
        nearer = {m: found["nearer"][m]["nearer"] for m in ("rms", "kl")}
        told = {None: "cannot tell which arm is nearer", "same": "no difference seen"}
        said = ", ".join(f"{told.get(n) or f'the {n} arm is nearer'} by {m.upper()}" for m, n in nearer.items())
        lines.append(f"distance to fp64, {found['model']} {found['variant']}: {said}")
    for condition in select(study, precision):
        if (found := cause.read_distance(condition["divergence"])) is not None:
            lines.append(f"distance to fp64, {condition['name']}: {cause.describe_distance(found)}")
    return lines or ["no fp64 run, so which arm is nearer the truth is not measured"]


def judge_accuracy(study: Study, precision: str) -> Claim:
    """More accurate with the cache: the exact sign-flip test over problems, conditions of a problem added up."""
    pooled = study["accuracy"].get(precision, {}).get("numeric")
    control = _describe_truth(study, precision)
    if wide := study["accuracy"].get("fp32", {}).get("numeric"):
        control.append(f"FP32, where the arms hardly differ: {format_points(wide['difference'])} points")
    if not pooled:
        return Claim(None, [f"no valid {precision.upper()} run of the plain regime"], control)
    found = pooled["conditions"]
    only = [sum(table[side] for table in pooled["tables"]) for side in ("only_cached", "only_uncached")]
    lines = [
        f"cached minus uncached {format_points(pooled['difference'])} points over "
        f"{say_count(pooled['problems'], 'problem')}",
        f"right in the cached arm alone {only[0]}, in the uncached alone {only[1]}: p = "
        f"{format_number(pooled['p'])}, two-sided, by the exact "
        + ("McNemar test" if sum(found.values()) == 1 else "sign-flip test over problems"),
        f"ahead in {found['cached_ahead']} of {sum(found.values())} conditions, behind in {found['uncached_ahead']}, "
        f"equal in {found['equal']}",
    ]
    evidence = Evidence(pooled["p_cached"], pooled["p_uncached"])
    if evidence.holds and found["cached_ahead"] <= sum(found.values()) / 2:
        evidence = Evidence(1.0, evidence.refutes)
        lines.append("on average ahead, but not in most conditions")
    return Claim(evidence, lines, control)


def _orders(entry: Mapping[str, Any]) -> str:
    if entry["orders"] is None:
        return "not defined, since the arms do not differ at all in one of the two"
    return format_interval(entry["orders"], entry["interval"], "{:.1f}".format)


def _list_orders(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{name}, orders of ten by which mean KL falls: "
        + ", ".join(f"{p['sampler']} {_orders(p['metrics']['kl'])}" for p in members)
        for name, members in by_model(pairs).items()
    ]


def judge_c3a(study: Study) -> Claim:
    """Eight orders, by KL, the metric that falls fastest: quadratic in the error of the logits."""
    pairs = [p for p in study["precisions"] if base_precision(p) == "fp16" and p["regime"] == "plain"]
    ours, theirs = ([p for p in pairs if p["framework"] == framework] for framework in ("jax", "torch"))
    control = [
        "KL and JS are quadratic in the logits' error, so that eight orders of KL are four of a logit difference"
    ]
    if accumulators := sorted({p["products"] for p in ours if p["products"]}):
        control.append(f"products returned in {', '.join(accumulators)}")
    if not ours:
        return Claim(None, ["no FP16 and FP32 run of one condition"], control)
    evidence = hold_all([lies_above(statistics.read_estimate(p["metrics"]["kl"]), 10**ORDERS) for p in ours])
    lines = _list_orders(ours)
    linear = [p["metrics"]["max_abs"]["orders"] for p in ours if p["metrics"]["max_abs"]["orders"] is not None]
    if linear:
        lines.append(f"the largest logit difference falls by {min(linear):.1f} to {max(linear):.1f} orders")
    control += [f"PyTorch, {line}" for line in _list_orders(theirs)]
    return Claim(evidence, lines, control)


def _sort_flips(compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """How near the two tokens were at the flips of the FP32 runs; nothing in records of before."""
    kinds = [found["law"]["kinds"] for found in compared if found.get("law")]
    if len(kinds) < len(compared):
        return []
    counts = {name: sum(kind[name] for kind in kinds) for name in kinds[0]}
    return [
        f"of the flips of all FP32 runs {counts['tie_in_one'] + counts['tie_in_both']} are at exact ties, "
        f"{counts['swap_by_one_unit']} swaps by one unit, {counts['more']} more"
    ]


def _say_flips(found: Mapping[str, Any]) -> str:
    text = f"tokens that flip: {format_counted_share(found['flips'])}"
    return f"{text}, in {format_counted_share(found['problems_with_flip'], 'problems')}" if found["most"] else text


NO_TEST = "FP16 is not seen to flip more on the same problems, so that this tests nothing"
Flips = Mapping[str, Any]  # of `contrasts.count_flips`


def _judge_fp32(study: Study, weigh: Callable[[Flips, Flips | None], tuple[Evidence, list[str]]]) -> Claim:
    """What the flips in FP32, beside those of FP16 on the same problems, are found to weigh."""
    found, narrow, wide = study["flips"]["fp32"], study["flips"]["fp16"], select(study, "fp32")
    control = [f"FP16, the same problems: {_say_flips(narrow)}; at most {narrow['most']} in one"] if narrow else []
    control += [
        f"{c['model']} holds FP32 operands in {c['held']}" for c in wide if c.get("held") not in (None, "float32")
    ]
    control += [sentence for found_at in study["processes"] for sentence in found_at["fp32"]]
    if not found:
        return Claim(None, ["no valid FP32 run of the plain regime"], control)
    lines = [f"{_say_flips(found)}; {say_count(found['conditions'], 'condition')}"]
    free = [c["divergence"]["free_running"]["diverged"] for c in wide if c["divergence"]["free_running"]]
    parted, sequences = (sum(share[part] for share in free) for part in ("count", "total"))
    if parted:
        lines.append(f"running free, {parted} of {sequences} sequences of all FP32 runs part")
    if found["flips"]["count"]:
        lines += _sort_flips([c["divergence"]["teacher_forced"] for c in wide if c["divergence"]["teacher_forced"]])
    evidence, said = weigh(found, narrow)
    return Claim(evidence, [*lines, *said], control)


def _weigh_rate(found: Flips, narrow: Flips | None) -> tuple[Evidence, list[str]]:
    """Whether flips in FP32 round to 0.0 %, where FP16 flips in more of the same problems than FP32 can.

    After a first flip more may follow in its text, and near-ties come together: problems are the trials. The rate per
    token is the share of problems with a flip, times the flips of one of these, over its tokens. Of these flips it has
    at most as many as any problem in either precision.
    """
    problems, worth = found["problems_with_flip"], found["worth"]
    allowed = ZERO_PERCENT * found["flips"]["total"] / found["problems"]  # flips of a problem
    most = max(1, found["most"], narrow["most"] if narrow else 0)
    evidence = Evidence(
        statistics.share_p_below(problems["count"], problems["total"], min(1.0, allowed / most)),
        statistics.share_p_above(found["flips"]["rate"] * worth, worth, ZERO_PERCENT),
    )
    least = narrow["problems_with_flip"]["interval"][0] if narrow else 0.0
    if evidence.holds and least <= problems.get("upper_bound", problems["interval"][1]):
        return Evidence(1.0, evidence.refutes), [NO_TEST]
    return evidence, []


def _weigh_none(found: Flips, narrow: Flips | None) -> tuple[Evidence, list[str]]:
    """One flip in FP32 refutes that there is none; none is worth something where as many problems flip one in FP16."""
    if found["most"]:
        return Evidence(refutes=0.0), []
    if not narrow or not narrow["most"]:
        return OPEN, [NO_TEST]
    least = narrow["problems_with_flip"]["interval"][0]
    evidence = Evidence(statistics.share_p_below(0, found["problems"], least), sides=1)
    return evidence, ["of these problems: no sample shows that a rate is zero"]


RARE = 1 - ALMOST_ALL  # of runs: more that differ would be seen


def judge_c6a(study: Study) -> Claim:
    """Each arm run again in its process; a run is a trial, since its steps come out of one set of programs."""
    again, lines = [found for found in study["reruns"].values() if found is not None], _describe_reruns(study)
    if not again:
        return Claim(None, lines)
    if any(found["count"] for found in again):
        evidence = Evidence(refutes=0.0)
        lines.append("other bits alone do not say that the direction is another")
    elif len(again) < 2:
        evidence = OPEN
        lines.append("one arm alone was run again")
    else:
        evidence = Evidence(max(statistics.share_p_below(0, found["total"], RARE) for found in again), sides=1)
    return Claim(evidence, lines)


def judge_replicates(study: Study, kind: str, noun: str, plural: str) -> Claim:
    """Runs of one configuration made more than once, and for processes what the doctor compiled twice.

    Each further process, or build, is a trial: its kernels are chosen once for all of its problems.
    """
    pairs = [pair for pair in study["replicates"] if pair["kind"] == kind]
    lines, control = [], []
    for pair in pairs:
        names, turned = " and ".join(pair["runs"]), pair["signs"][0] != pair["signs"][1]
        if pair["other_tokens"]["count"] or pair["other_figures"]["count"]:
            lines.append(
                f"{names}: {format_count(pair['other_tokens'])} problems have other tokens, "
                f"{format_count(pair['other_figures'])} other figures"
            )
        lines += [f"and the more accurate arm is not the same one ({names})"] if turned else []
    processes = study["processes"] if kind == PROCESS else ()
    for found in processes:
        dtypes = ", ".join(f"{dtype} {said}" for dtype, said in found["process"].items())
        control.append(f"another process, compiling for itself, on {found['device']}: {dtypes}")
    equal = all(found["process"].get("fp16", "equal") == "equal" for found in processes)
    if not pairs:
        said = f"no configuration was run again in another {noun}, so that no direction was seen to return"
        return Claim(None, [said], control)
    others = len({pair["another"] for pair in pairs})
    said = f"{others} other {noun if others == 1 else plural}"
    apart = sum(pair["other_tokens"]["count"] > 0 for pair in pairs)
    lines.insert(0, f"{say_count(len(pairs), 'pair')} of runs of one configuration, in {said}; other tokens in {apart}")
    if any(pair["signs"][0] * pair["signs"][1] < 0 for pair in pairs):
        evidence = Evidence(refutes=0.0)
    elif equal and not any(p["other_tokens"]["count"] or p["signs"][0] != p["signs"][1] for p in pairs):
        evidence = Evidence(statistics.share_p_below(0, others, RARE), sides=1)
    else:
        evidence = OPEN
        lines.append("runs differ, which alone does not say that the direction does")
    return Claim(evidence, lines, control)


JUDGES: dict[str, Callable[[Study], Claim]] = {
    "C1": judge_c1,
    "C2": lambda study: judge_accuracy(study, "fp16"),  # of which the paper speaks
    "C2b": lambda study: judge_accuracy(study, "bf16"),
    "C3a": judge_c3a,
    "C3b": lambda study: _judge_fp32(study, _weigh_rate),
    "C3c": lambda study: _judge_fp32(study, _weigh_none),
    "C4": judge_c4,
    "C4b": judge_c4b,
    "C5a": judge_c5a,
    "C5b": judge_c5b,
    "C6a": judge_c6a,
    "C6b": lambda study: judge_replicates(study, PROCESS, "process", "processes"),
    "C6c": lambda study: judge_replicates(study, BUILD, "build", "builds"),
}


def judge(study: Study) -> list[dict[str, Any]]:
    """All claims in order, with verdicts that hold together, figures and controls."""
    claims = {name: judge_claim(study) for name, judge_claim in JUDGES.items()}
    judged = decide({name: (c.evidence, c.figure) for name, c in claims.items()}, (REPRODUCED, NOT_REPRODUCED))
    return [claim | {"control": list(claims[claim["id"]].control)} for claim in judged]
