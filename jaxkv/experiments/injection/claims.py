"""Pairs of changes that differ in one thing, and what they say of the seed study's statements.

How each statement is judged is told by `rules.SHEBEL`: one on pairs needs all of them either way, since errors that
differ in one thing still differ in the shape of their law; one on every other method does not hold where one method
refutes it, and bits count there as in `methods.weigh_bits`. A change with invalid samples decides nothing.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.methods import is_published_kvarn, weigh_bits
from jaxkv.experiments.record_parts import CLEAN
from jaxkv.reporting import rules, statistics
from jaxkv.reporting.format import format_interval, format_percent

Summary = Mapping[str, Any]
Values = Mapping[str, Mapping[str, Mapping[int, float]]]  # change -> 'score' or 'kl' -> problem -> value
NOT_RUN = "not run"  # nothing that bears on the statement was
SCOPE = ("layers", "heads", "positions")
ROWS = ("kind", "correlate", "draw", "side", *SCOPE)  # what the errors of a pair share, but for what is compared
CLOSE = 0.01  # moments this near, relative to the error, count as equal
SOME_FLIPS, NO_FLIPS, MANY_FLIPS = 0.01, 1e-4, 0.1
METHOD = "method"
KVARN = "KVarN"
LOW_BITS = 3  # an element, scales counted, windows not: methods with codes of 2 bits
PACKED_ALIKE = 0.05  # shares of packed elements this near are compared
UNLIKE = {"first": "it keeps other first tokens exactly", "own": "it reads rows being written otherwise"}
WIDE, PLAIN = "uniform:-1.5,1.5", "uniform:-1,1"
PAIRS = {
    "flips": "sign flips, at equal mean and variance",
    "mean": "mean against spread, at equal mean square",
    "shift": "mean added, at equal spread",
    "shape": "shape of the law alone: equal mean and variance, no flips",
    "draw": "redrawn at each read against frozen at write",
    "side": "K alone against V alone",
    "correlate": "one error a (token, head) against one a channel, at equal mean square",
    METHOD: "another method against KVarN: at most 3 bits each, the same first tokens, packed shares within 5 points, "
    "rows being written read alike",
}


def compare_specs(first: Summary, second: Summary) -> str | None:
    """In what two errors differ, the first having more of it; None if in nothing, in two things, or the other way."""
    apart = [name for name in ROWS if first[name] != second[name]]
    if not apart and all(spec["std"] or spec["mean"] for spec in (first, second)):
        return _compare_laws(first, second)
    if any(first[name] != second[name] for name in ("law", "numbers", "bits", "sign")):
        return None
    for name, values in (("draw", ("read", "write")), ("side", ("k", "v")), ("correlate", ("token", "none"))):
        if apart == [name] and (first[name], second[name]) == values:
            return name
    return None


def _compare_laws(first: Summary, second: Summary) -> str | None:
    """The same of errors that differ in their laws alone; means are relative to the error, variances to themselves."""
    sizes = [math.hypot(spec["mean"], spec["std"]) for spec in (first, second)]
    means, flips = (first["mean"], second["mean"]), (first["flip_share"], second["flip_share"])
    scale, spread = max(sizes), max(first["std"], second["std"])
    same_variance = abs(first["std"] ** 2 - second["std"] ** 2) <= CLOSE * spread**2
    if same_variance and abs(means[0] - means[1]) <= CLOSE * scale:
        if flips[0] >= SOME_FLIPS and flips[1] <= NO_FLIPS:
            return "flips"
        other = (first["law"], first["sign"]) > (second["law"], second["sign"])
        return "shape" if max(flips) <= NO_FLIPS and other else None
    mean_alone = abs(means[0]) > 0.9 * sizes[0] and abs(means[1]) < 0.1 * sizes[1]
    if mean_alone and abs(sizes[0] - sizes[1]) <= CLOSE * scale:
        return "mean"
    more = abs(means[0]) > abs(means[1]) + CLOSE * scale
    return "shift" if more and spread and abs(first["std"] - second["std"]) <= CLOSE * spread else None


def _has_low_bits(entry: Summary) -> bool:
    sides = [entry["spec"][side] for side in ("k", "v")]
    return bool(entry["cache"]) and all(side is not None and side["bits"] <= LOW_BITS for side in sides)


def _is_ours(entry: Summary) -> bool:
    """Whether an entry is KVarN's cache as its authors have it, of 2-bit codes."""
    return is_published_kvarn(entry["change"]) and _has_low_bits(entry)


def _why_no_rival(entry: Summary, ours: Summary) -> str:
    """Why a cache of another method may not be set beside KVarN's; empty if it may.

    Of 2-bit codes, as much of both packed. Both read the rows of a call alike, exactly or packed: a method that packs
    them first pays in a prefill for what the other does not.
    """
    sides = [(entry["spec"][side], ours["spec"][side]) for side in ("k", "v")]
    if any(side is None for side, _ in sides):
        return "it leaves a side as it is"
    if any(side["method"] == KVARN for side, _ in sides):
        return "it is a form of KVarN"
    if not _has_low_bits(entry):
        return f"it takes more than {LOW_BITS} bits an element"
    for part, why in UNLIKE.items():
        if any(side[part] != other[part] for side, other in sides):
            return why
    apart = abs(entry["cache"]["packed"] - ours["cache"]["packed"])
    return "" if apart <= PACKED_ALIKE else f"its packed share is {format_percent(apart)} points away"


def _list_unqualified(changes: Sequence[Summary]) -> list[str]:
    """Quantizers that are not compared with KVarN's, with the reason."""
    quantizers = [entry for entry in changes if entry["spec"] and entry["spec"]["family"] == "quant"]
    return [
        f"`{entry['change']}` is not compared with `{ours['change']}`: {why}"
        for ours in filter(_is_ours, quantizers)
        for entry in quantizers
        if entry is not ours and (why := _why_no_rival(entry, ours))
    ]


def _contrast(first: Mapping[int, float], second: Mapping[int, float], weight: float | None = 1.0) -> Any:
    """Mean of first minus second over the problems that both have, with its paired interval; None without problems.

    `weight` is what the second counts, of scores; None is for KL, which is skewed.
    """
    problems = sorted(first.keys() & second.keys())
    if not problems:
        return None
    a, b = (np.asarray([side[problem] for problem in problems], np.float64) for side in (first, second))
    if weight is None:
        estimate = statistics.estimate_paired(a, b, skewed=True)
    else:
        estimate = statistics.estimate_paired_share(a - weight * b, weight)
    mean = float(np.mean(a - (1.0 if weight is None else weight) * b))
    if abs(mean) < np.finfo(np.float64).eps * np.max(np.abs([a, b])):  # thirds, of three seeds, that should cancel
        mean = 0.0
    return statistics.describe(mean, estimate) | {"problems": len(problems)}


def _find_kind(first: Summary, second: Summary) -> str | None:
    """In what two changes differ: errors in one thing, or another method's cache from KVarN's."""
    families = {first["spec"]["family"], second["spec"]["family"]}
    if families == {"error"}:
        return compare_specs(first["spec"], second["spec"])
    return METHOD if families == {"quant"} and _is_ours(second) and not _why_no_rival(first, second) else None


def _find_pairs(changes: Sequence[Summary], values: Values) -> list[dict[str, Any]]:
    """All pairs that differ in one thing, with the differences of score and of KL, first minus second."""
    pairs = []
    for first, second in itertools.permutations([entry for entry in changes if entry["spec"]], 2):
        if (kind := _find_kind(first, second)) is None:
            continue
        ours, theirs = values[first["change"]], values[second["change"]]
        pair = {
            "kind": kind,
            "first": first["change"],
            "second": second["change"],
            "invalid": bool(first["invalid"] or second["invalid"]),
            "more_bits": first["cache"]["bits"] - second["cache"]["bits"] if kind == METHOD else None,
            "score": _contrast(ours["score"], theirs["score"]),
            "kl": _contrast(ours["kl"], theirs["kl"], None),
        }
        pairs.append(pair)
    return sorted(pairs, key=lambda pair: list(PAIRS).index(pair["kind"]))


WORSE = {"score": rules.lies_below, "kl": rules.lies_above}


def _judge_pairs(pairs: Sequence[Summary], kind: str, measure: str) -> rules.Found:
    """Whether the first of each pair is worse by a measure: lower in score, higher in KL."""
    chosen = [pair for pair in pairs if pair["kind"] == kind]
    if not chosen:
        return None, ["no pair of changes that differ in this alone"]
    parts = []
    lines = [f"{len(chosen)} pair{'s' if len(chosen) > 1 else ''} of {PAIRS[kind]}"]
    for pair in chosen:
        found = pair[measure]
        if not found:
            parts.append(rules.OPEN)
            continue
        evidence, why, counts = WORSE[measure](statistics.read_estimate(found)), "", True
        if pair["invalid"]:
            why = "invalid samples, so it decides nothing"
        elif kind == METHOD:
            worse = found["mean"] if measure == "kl" else -found["mean"]
            why, counts = weigh_bits(pair["more_bits"], worse, evidence.verdict == rules.HOLDS)
        if counts:
            parts.append(rules.OPEN if why else evidence)
        text = f"`{pair['first']}` - `{pair['second']}`: {_say(found)} over {found['problems']} problems"
        lines.append(text + (f"; {why}" if why else ""))
    return rules.hold_all(parts, one_refutes=kind == METHOD), lines


def _say(found: Summary) -> str:
    return format_interval(found["mean"], found["interval"]) + ("" if found["interval"] else " no interval")


def _of_control(entry: Summary | None, primary: str) -> tuple[float | None, Sequence[float] | None]:
    score = entry["score"].get(primary) if entry else None
    return (None, None) if score is None else (score["of_control"], score["of_control_interval"])


def _say_share(entry: Summary, primary: str) -> str:
    share, interval = _of_control(entry, primary)
    if share is None:
        return f"`{entry['change']}`: no share, the control scores 0"
    span = "no interval" if interval is None else f"[{', '.join(map(format_percent, interval))}] %"
    return f"`{entry['change']}` keeps {format_percent(share)} % of control {span}"


def _judge_share(entry: Summary, values: Values, primary: str, least: float) -> rules.Evidence:
    """Whether a change keeps at least a share of control, by the paired difference; the ratio's interval must agree."""
    share, interval = _of_control(entry, primary)
    if share is None or interval is None or entry["invalid"]:
        return rules.OPEN
    found = _contrast(values[entry["change"]]["score"], values[CLEAN]["score"], least)
    evidence = rules.lies_above(statistics.read_estimate(found))
    agrees = interval[0] >= least if evidence.holds else interval[1] < least
    return evidence if agrees else rules.OPEN


def _judge_catastrophe(
    changes: Sequence[Summary], values: Values, pairs: Sequence[Summary], primary: str
) -> rules.Found:
    """Flips are catastrophic where those who flip keep less than half of control and a partner more."""
    named = {entry["change"]: entry for entry in changes}
    parts, lines = [], []
    for entry in changes:
        spec = entry["spec"]
        if not spec or spec["family"] != "error" or spec["flip_share"] < MANY_FLIPS or spec["side"] != "kv":
            continue
        if any(spec[name] is not None for name in SCOPE):
            continue  # what is changed in part of the cache alone says nothing of what flips do to all of it
        keeps = _judge_share(entry, values, primary, rules.HALF)
        partners = [pair["second"] for pair in pairs if pair["kind"] == "flips" and pair["first"] == entry["change"]]
        spared = [_judge_share(named[name], values, primary, rules.HALF).supports for name in partners]
        supports = max(keeps.refutes, min(1.0, len(spared) * min(spared))) if spared else 1.0
        parts.append(rules.Evidence(supports, keeps.supports))
        lines.append(f"{_say_share(entry, primary)}, {format_percent(spec['flip_share'])} % of signs flipped")
        lines += [f"beside it, without flips: {_say_share(named[name], primary)}" for name in partners]
    if not parts:
        return None, [f"no change of all of K and V that flips {format_percent(MANY_FLIPS)} % of signs"]
    return rules.hold_all(parts), lines


# Statements on pairs: what the pairs differ in, and the measure by which the first is worse.
ON_PAIRS = {
    "E1b": ("flips", "score"), "E1c": ("flips", "kl"), "E2a": ("mean", "score"), "E2b": ("mean", "kl"),
    "E2c": ("shift", "score"), "E2d": ("shift", "kl"), "E5a": ("correlate", "score"), "E5b": ("correlate", "kl"),
    "E6a": (METHOD, "score"), "E6b": (METHOD, "kl"),
}  # fmt: skip


def judge(changes: Sequence[Summary], values: Values, primary: str) -> dict[str, Any]:
    """The pairs, and the studies' statements with verdict and figures, by the scorer `primary`, which `values` has."""
    pairs = _find_pairs(changes, values)
    named = {entry["change"]: entry for entry in changes}
    wide, plain = named.get(WIDE), named.get(PLAIN)
    found = {name: _judge_pairs(pairs, *on) for name, on in ON_PAIRS.items()}
    for name in ("E6a", "E6b"):
        found[name] = found[name][0], [*found[name][1], *_list_unqualified(changes)]
    found["E1a"] = _judge_catastrophe(changes, values, pairs, primary)
    found |= {"E3": (None, [f"`{WIDE}` was not run"]), "E4": (None, ["not both run"])}
    if wide is not None:
        found["E3"] = _judge_share(wide, values, primary, rules.CONTROL_KEPT), [_say_share(wide, primary)]
    if wide is not None and plain is not None:
        score = _contrast(values[WIDE]["score"], values[PLAIN]["score"])
        above = rules.lies_above(statistics.read_estimate(score))
        evidence = rules.OPEN if wide["invalid"] or plain["invalid"] else above
        found["E4"] = evidence, [f"score of `{WIDE}` - `{PLAIN}`: {_say(score)}" if score else "-"]
    return {"pairs": pairs, "claims": rules.decide(found, (rules.HOLDS, rules.DOES_NOT_HOLD), NOT_RUN)}
