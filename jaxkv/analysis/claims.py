"""The claims of arXiv 2604.15409 against a study's figures: a verdict each, never stronger than its interval.

Every function is pure: the summary of a study (jaxkv.analysis.study) in, a claim with its verdict out. The models are
those of the study, not those of the paper: 'not reproduced' says that it does not hold here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.analysis.claims_common import (
    CANNOT_TELL,
    NOT_REPRODUCED,
    REPRODUCED,
    Claim,
    Study,
    by_model,
    describe_aligned,
    describe_reruns,
    make_claim,
    say_count,
    select,
)
from jaxkv.analysis.claims_layers import judge_c4, judge_c5a, judge_c5b
from jaxkv.analysis.contrasts import base_precision
from jaxkv.analysis.format import (
    format_counted_share,
    format_number,
    format_points,
)
from jaxkv.analysis.summary import share

ALMOST_ALL = 0.95  # "100 % diverge" stands where at most one sequence in twenty may yet agree
ZERO_PERCENT = 0.0005  # what "0.0 %" rounds from
ORDERS = 7.5  # what "eight orders" rounds from


def judge_c1(study: Study) -> Claim:
    """All FP16 generations diverge: refuted by one condition in which some do not."""
    conditions = [c for c in select(study, "fp16") if c["divergence"]["free_running"]]
    shares = [(c, c["divergence"]["free_running"]["diverged"]) for c in conditions]
    control = [*describe_reruns(study), *describe_aligned(study)]
    if not shares:
        return make_claim("C1", CANNOT_TELL, ["no valid FP16 run of the plain regime"], control)
    whole = [(c, s) for c, s in shares if s["count"] == s["total"]]
    lines = _list_diverged(conditions)
    theirs = [c for c in select(study, "fp16", framework="torch") if c["divergence"]["free_running"]]
    lines += [f"PyTorch, {line}" for line in _list_diverged(theirs)]
    if len(whole) < len(shares):
        verdict = NOT_REPRODUCED
    elif all(s["lower_bound"] >= ALMOST_ALL for _, s in whole):
        verdict = REPRODUCED
    else:
        verdict = CANNOT_TELL
        lines.append("all part, but the bounds of so few sequences do not tell 100 % from less")
    rates = {c["name"]: s["rate"] for c, s in shares}
    return make_claim("C1", verdict, lines, control, diverged=rates)


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


def _describe_truth(study: Study) -> list[str]:
    lines = []
    for found in study["truth"]:
        if base_precision({"precision": found["variant"]}) != "fp16" or found["tile"] is not None:
            continue
        nearer = {m: found["nearer"][m]["nearer"] for m in ("rms", "kl")}
        told = {None: "cannot tell which arm is nearer", "same": "no difference"}
        said = ", ".join(f"{told.get(n) or f'the {n} arm is nearer'} by {m.upper()}" for m, n in nearer.items())
        lines.append(f"distance to fp64, {found['model']} {found['variant']}: {said}")
    return lines or ["no fp64 run, so which arm is nearer the truth is not measured"]


def judge_c2(study: Study) -> Claim:
    """More accurate with the cache: by the interval over problems, conditions of a problem averaged."""
    pooled = study["accuracy"].get("fp16", {}).get("numeric")
    control = _describe_truth(study)
    wide = study["accuracy"].get("fp32", {}).get("numeric")
    if wide:
        control.append(f"FP32, where the arms hardly differ: {_points(wide)} points")
    if not pooled:
        return make_claim("C2", CANNOT_TELL, ["no valid FP16 run of the plain regime"], control)
    found, interval = pooled["conditions"], pooled["difference"]["interval"]
    lines = [
        f"cached minus uncached {_points(pooled)} points over {say_count(pooled['problems'], 'problem')}",
        f"ahead in {found['cached_ahead']} of {sum(found.values())} conditions, behind in {found['uncached_ahead']}, "
        f"equal in {found['equal']} (sign test p = {format_number(pooled['sign_p'])})",
    ]
    if pooled["stouffer_p"] is not None:
        lines.append(f"McNemar over conditions (Stouffer): p = {format_number(pooled['stouffer_p'])}")
    verdict = CANNOT_TELL
    if interval is not None and pooled["difference"]["mean"]:
        verdict = REPRODUCED if interval[0] > 0 else NOT_REPRODUCED if interval[1] < 0 else CANNOT_TELL
    if verdict == REPRODUCED and found["cached_ahead"] <= sum(found.values()) / 2:
        verdict = CANNOT_TELL
        lines.append("on average ahead, but not in most conditions")
    return make_claim("C2", verdict, lines, control, difference=pooled["difference"], conditions=found)


def _points(pooled: Mapping[str, Any]) -> str:
    if pooled["difference"]["interval"] is None:
        return f"{100 * pooled['difference']['mean']:+.1f} (one problem has no interval)"
    return format_points(pooled["difference"])


def _orders(entry: Mapping[str, Any]) -> str:
    if entry["orders"] is None:
        return "not defined, since the arms do not differ at all in one of the two"
    text = f"{entry['orders']:.1f}"
    return text if entry["interval"] is None else f"{text} [{entry['interval'][0]:.1f}, {entry['interval'][1]:.1f}]"


def _list_orders(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """By how much KL falls, a line for each model and precision."""
    return [
        f"{name}, orders of ten by which mean KL falls: "
        + ", ".join(f"{p['sampler']} {_orders(p['metrics']['kl'])}" for p in members)
        for name, members in by_model(pairs).items()
    ]


def judge_c3a(study: Study) -> Claim:
    """Eight orders, by KL, the metric that falls fastest: quadratic in the error of the logits."""
    pairs = [p for p in study["precisions"] if base_precision(p) == "fp16" and p["regime"] == "plain"]
    ours = [p for p in pairs if p["framework"] == "jax"]
    control = [
        "KL and JS are quadratic in the logits' error, so that eight orders of KL are four of a logit difference"
    ]
    accumulators = sorted({p["products"] for p in ours if p["products"]})
    if accumulators:
        control.append(f"products returned in {', '.join(accumulators)}")
    if not ours:
        return make_claim("C3a", CANNOT_TELL, ["no FP16 and FP32 run of one condition"], control)
    verdicts = []
    for pair in ours:
        if (interval := pair["metrics"]["kl"]["interval"]) is None:
            verdicts.append(CANNOT_TELL)
        else:
            low, high = interval
            verdicts.append(REPRODUCED if low >= ORDERS else NOT_REPRODUCED if high < ORDERS else CANNOT_TELL)
    lines = _list_orders(ours)
    linear = [p["metrics"]["max_abs"]["orders"] for p in ours if p["metrics"]["max_abs"]["orders"] is not None]
    if linear:
        lines.append(f"the largest logit difference falls by {min(linear):.1f} to {max(linear):.1f} orders")
    control += [f"PyTorch, {line}" for line in _list_orders([p for p in pairs if p["framework"] == "torch"])]
    verdict = NOT_REPRODUCED if NOT_REPRODUCED in verdicts else CANNOT_TELL if CANNOT_TELL in verdicts else REPRODUCED
    return make_claim("C3a", verdict, lines, control, orders=[p["metrics"]["kl"] for p in ours])


def _count_parted(study: Study) -> Mapping[str, Any] | None:
    """Sequences that part by a token running free, in every fp32 run of the plain regime."""
    found = [
        c["divergence"]["free_running"]["diverged"] for c in select(study, "fp32") if c["divergence"]["free_running"]
    ]
    return share(sum(s["count"] for s in found), sum(s["total"] for s in found)) if found else None


def _count_near_ties(study: Study) -> tuple[int, int]:
    """Flips of these runs whose margin is at most twice the largest logit difference of their step, and all of them."""
    compared = [c["divergence"]["teacher_forced"] for c in select(study, "fp32") if c["divergence"]["teacher_forced"]]
    found = [f for c in compared if (f := c["flips_within_perturbation"])]
    return sum(f["count"] for f in found), sum(f["total"] for f in found)


def judge_c3b(study: Study) -> Claim:
    """No flips in FP32: one refutes "exactly"; a zero is worth its bound, which has to round to 0.0 %.

    And only where FP16 flips more on the same problems: where it flips none either, the run could not have told.
    """
    found, narrow = study["flips"].get("fp32"), study["flips"].get("fp16")
    control = [f"FP16, the same problems: {format_counted_share(narrow['flips'])} tokens"] if narrow else []
    control += [
        f"{c['model']} holds FP32 operands in {c['held']}"
        for c in select(study, "fp32")
        if c.get("held") not in (None, "float32")
    ]
    control += [sentence for found_at in study["processes"] for sentence in found_at["fp32"]]
    if not found:
        return make_claim("C3b", CANNOT_TELL, ["no valid FP32 run of the plain regime"], control)
    flips, sequences = found["flips"], found["sequences_with_flip"]
    lines = [
        f"{format_counted_share(flips)} tokens flip, in {format_counted_share(sequences)} sequences; "
        f"{say_count(found['conditions'], 'condition')} of {say_count(found['problems'], 'problem')}"
    ]
    parted, near = _count_parted(study), _count_near_ties(study)
    if parted:
        lines.append(f"running free, {format_counted_share(parted)} sequences of all FP32 runs part")
    if flips["count"]:
        verdict = NOT_REPRODUCED
        lines.append(f"of the flips of all FP32 runs {near[0]} of {near[1]} are at a margin within the perturbation")
    elif flips["upper_bound"] >= ZERO_PERCENT:
        verdict = CANNOT_TELL
        lines.append("none was seen, but the bound does not round to 0.0 %")
    elif not narrow or not narrow["flips"]["count"] or narrow["flips"]["interval"][0] <= flips["upper_bound"]:
        verdict = CANNOT_TELL
        lines.append(
            "none was seen, but FP16 is not seen to flip more on the same problems, so that this tests nothing"
        )
    else:
        verdict = REPRODUCED
        lines.append("none was seen, and the bound, which takes tokens as independent, rounds to 0.0 %")
    return make_claim("C3b", verdict, lines, control, flips=flips)


def judge_c6(study: Study) -> Claim:
    """Run again, in this process, in another one, and in another run of one configuration."""
    again = {arm: found for arm, found in study["reruns"].items() if found is not None}
    lines, control = describe_reruns(study), []
    for found in study["processes"]:
        dtypes = ", ".join(f"{dtype} {said}" for dtype, said in found["process"].items())
        control.append(f"another process, compiling for itself, on {found['device']}: {dtypes}")
    for pair in study["replicates"]:
        control.append(
            f"{' and '.join(pair['runs'])}, one configuration run twice: {format_counted_share(pair['other_tokens'])} "
            f"problems have other tokens, {format_counted_share(pair['other_figures'])} other figures"
        )
        if pair["signs"][0] != pair["signs"][1]:
            control.append(f"and the more accurate arm is another one ({' and '.join(pair['runs'])})")
    if not control:
        control = ["no other process, so only one is judged"]
    if not study["replicates"]:
        control.append("no configuration was run twice, so that no direction was seen to return")
    differing = any(found["count"] for found in again.values())
    turned = any(pair["signs"][0] != pair["signs"][1] for pair in study["replicates"])
    said = [text for found in study["processes"] for dtype, text in found["process"].items() if dtype == "fp16"]
    elsewhere = bool(study["replicates"])  # another process's operations have no direction to compare
    same = all(text == "equal" for text in said) and not any(p["other_tokens"]["count"] for p in study["replicates"])
    if turned:
        verdict = NOT_REPRODUCED
    elif not differing and len(again) == 2 and elsewhere and same:
        verdict = REPRODUCED
    else:
        verdict = CANNOT_TELL
        if differing:
            control.append("reruns differ in bits, which alone does not say that the direction does")
        elif again:
            control.append("within a process every rerun was equal; whether that holds across processes is open")
    return make_claim("C6", verdict, lines, control, reruns=again)


JUDGES = (judge_c1, judge_c2, judge_c3a, judge_c3b, judge_c4, judge_c5a, judge_c5b, judge_c6)


def judge(study: Study) -> list[Claim]:
    """All claims in order."""
    return [judge_claim(study) for judge_claim in JUDGES]
