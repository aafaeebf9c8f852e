"""Pairs of changes that differ in one thing, and what they say of the seed study's statements.

A verdict is never stronger than its intervals: a statement holds where every pair's interval lies on its side, does not
hold where every one lies wholly on the other, and cannot be told otherwise, since errors that differ in one thing still
differ in the shape of their law. One on every other method does not hold where one method refutes it; bits count there
as in `methods.weigh_bits`. A change with invalid samples decides nothing.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.analysis import statistics
from jaxkv.analysis.format import format_number, format_percent
from jaxkv.analysis.methods import is_published_kvarn, weigh_bits
from jaxkv.schema_injection import CLEAN

Summary = Mapping[str, Any]
Values = Mapping[str, Mapping[str, Mapping[int, float]]]  # change -> 'score' or 'kl' -> problem -> value
HOLDS, DOES_NOT_HOLD, CANNOT_TELL = "holds", "does not hold", "cannot tell"
NOT_RUN = "not run"  # nothing that bears on the statement was
SCOPE = ("layers", "heads", "positions")
ROWS = ("kind", "correlate", "draw", "side", *SCOPE)  # what the errors of a pair share, but for what is compared
CLOSE = 0.01  # moments this near, relative to the error, count as equal
SOME_FLIPS, NO_FLIPS, MANY_FLIPS = 0.01, 1e-4, 0.1
CATASTROPHIC = 0.5  # of control: a change that keeps less is taken as a catastrophe
KEEPS = 0.8
METHOD = "method"
KVARN = "KVarN"
LOW_BITS = 3  # an element, scales counted, windows not: methods with codes of 2 bits
PACKED_ALIKE = 0.05  # shares of packed elements this near are compared
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


def _rms(spec: Summary) -> float:
    return math.hypot(spec["mean"], spec["std"])


def _same(first: Summary, second: Summary, but: str = "") -> bool:
    return all(first[name] == second[name] for name in ROWS if name != but)


def _matched(first: Summary, second: Summary) -> bool:
    """Equal mean and standard deviation, not both nothing."""
    scale = max(_rms(first), _rms(second))
    gaps = abs(first["mean"] - second["mean"]), abs(first["std"] - second["std"])
    return scale > 0 and max(gaps) <= CLOSE * scale


def _one_law(first: Summary, second: Summary) -> bool:
    return all(first[name] == second[name] for name in ("law", "numbers", "bits", "sign"))


def compare_specs(first: Summary, second: Summary) -> str | None:
    """In what two errors differ, the first having more of it; None if in nothing, in two things, or the other way."""
    drawn = all(spec["std"] or spec["mean"] for spec in (first, second))
    if drawn and _same(first, second):
        flips = first["flip_share"], second["flip_share"]
        if _matched(first, second):
            if flips[0] >= SOME_FLIPS and flips[1] <= NO_FLIPS:
                return "flips"
            other = first["law"], first["sign"]
            return "shape" if max(flips) <= NO_FLIPS and other > (second["law"], second["sign"]) else None
        scale = max(_rms(first), _rms(second))
        apart = abs(first["mean"]) > 0.9 * _rms(first) and abs(second["mean"]) < 0.1 * _rms(second)
        if apart and abs(_rms(first) - _rms(second)) <= CLOSE * scale:
            return "mean"
        spread = max(first["std"], second["std"])
        more = abs(first["mean"]) > abs(second["mean"]) + CLOSE * scale
        return "shift" if more and spread and abs(first["std"] - second["std"]) <= CLOSE * spread else None
    if not _one_law(first, second):
        return None
    for name, values in (("draw", ("read", "write")), ("side", ("k", "v")), ("correlate", ("token", "none"))):
        if _same(first, second, name) and (first[name], second[name]) == values:
            return name
    return None


def _is_rival(first: Summary, second: Summary) -> bool:
    """Whether the first is another method's cache of 2-bit codes and the second KVarN's, as much of both packed.

    Both read the rows of a call alike, exactly or packed: a method that packs them first pays in a prefill for what
    the other does not.
    """
    specs = first["spec"], second["spec"]
    for entry, spec in zip((first, second), specs, strict=True):
        sides = [spec[side] for side in ("k", "v")]
        if not entry["cache"] or any(side is None or side["bits"] > LOW_BITS for side in sides):
            return False
    ours = [[spec[side]["method"] == KVARN for side in ("k", "v")] for spec in specs]
    kept = [[(spec[side]["first"], spec[side]["own"]) for side in ("k", "v")] for spec in specs]
    alike = abs(first["cache"]["packed"] - second["cache"]["packed"]) <= PACKED_ALIKE
    return not any(ours[0]) and is_published_kvarn(second["change"]) and kept[0] == kept[1] and alike


def _contrast(first: Mapping[int, float], second: Mapping[int, float], share: bool = True) -> dict[str, Any] | None:
    """Mean of first minus second over the problems that both have, with its paired interval.

    Where all problems differ alike, or none does, a resample shows no width: at most a share b of problems, the exact
    bound, would then do otherwise, which moves the mean of a `share` by at most that much towards 1 or -1.
    """
    problems = sorted(first.keys() & second.keys())
    if not problems:
        return None
    a, b = (np.asarray([side[problem] for problem in problems], np.float64) for side in (first, second))
    interval = statistics.paired_interval(a, b)
    mean = float(np.mean(a - b))
    if abs(mean) < np.finfo(np.float64).eps * np.max(np.abs([a, b])):  # thirds, of three seeds, that should cancel
        mean = 0.0
    if share and interval is not None:
        if np.ptp(a - b) == 0:
            bound = statistics.zero_upper_bound(len(problems))
            interval = (1 - bound) * mean - bound, (1 - bound) * mean + bound
        interval = max(-1.0, interval[0]), min(1.0, interval[1])
    return {"mean": mean, "interval": None if interval is None else list(interval), "problems": len(problems)}


def find_pairs(changes: Sequence[Summary], values: Values) -> list[dict[str, Any]]:
    """All pairs that differ in one thing, with the differences of score and of KL, first minus second."""
    pairs = []
    for first, second in itertools.permutations([entry for entry in changes if entry["spec"]], 2):
        families = {first["spec"]["family"], second["spec"]["family"]}
        kind = None
        if families == {"error"}:
            kind = compare_specs(first["spec"], second["spec"])
        elif families == {"quant"} and _is_rival(first, second):
            kind = METHOD
        if kind is not None:
            names = first["change"], second["change"]
            found = {
                measure: _contrast(values[names[0]][measure], values[names[1]][measure], share=measure == "score")
                for measure in ("score", "kl")
            }
            broken = bool(first["invalid"] or second["invalid"])
            more = first["cache"]["bits"] - second["cache"]["bits"] if kind == METHOD else None
            pairs.append(
                {"kind": kind, "first": names[0], "second": names[1], "invalid": broken, "more_bits": more, **found}
            )
    return sorted(pairs, key=lambda pair: list(PAIRS).index(pair["kind"]))


def decide(intervals: Sequence[Sequence[float] | None], one_refutes: bool = True) -> str:
    """Whether a difference is above 0 in all of the intervals; one wholly below refutes it, or all of them do."""
    if not intervals:
        return CANNOT_TELL
    below, above = ([i is not None and (i[1] < 0, i[0] > 0)[side] for i in intervals] for side in (0, 1))
    if any(below) if one_refutes else all(below):
        return DOES_NOT_HOLD
    return HOLDS if all(above) else CANNOT_TELL


def _span(interval: Sequence[float] | None) -> str:
    return "no interval" if interval is None else f"[{format_number(interval[0])}, {format_number(interval[1])}]"


def _judge_pairs(pairs: Sequence[Summary], kind: str, measure: str, sign: int) -> tuple[str, list[str]]:
    """Whether the first of each pair is worse by a measure: lower in score (sign -1), higher in KL (sign 1)."""
    chosen = [pair for pair in pairs if pair["kind"] == kind]
    if not chosen:
        return NOT_RUN, ["no pair of changes that differ in this alone"]
    intervals: list[Sequence[float] | None] = []
    lines = []
    for pair in chosen:
        found = pair[measure]
        if not found:
            intervals.append(None)
            continue
        interval = found["interval"]
        worse = interval if sign > 0 or interval is None else [-interval[1], -interval[0]]
        why, counts = ("", True)
        if kind == METHOD:
            why, counts = weigh_bits(pair["more_bits"], sign * found["mean"], worse)
        if pair["invalid"]:
            why, counts = "invalid samples, so it decides nothing", True
        if counts:
            intervals.append(None if why else worse)
        text = f"`{pair['first']}` - `{pair['second']}`: {format_number(found['mean'])} {_span(interval)}"
        lines.append(f"{text} over {found['problems']} problems" + (f"; {why}" if why else ""))
    return decide(intervals, one_refutes=kind == METHOD), lines


def _of_control(entry: Summary | None, primary: str) -> tuple[float | None, Sequence[float] | None]:
    score = entry["score"].get(primary) if entry else None
    return (None, None) if score is None else (score["of_control"], score["of_control_interval"])


def _say_share(entry: Summary, primary: str) -> str:
    share, interval = _of_control(entry, primary)
    if share is None:
        return f"`{entry['change']}`: no share, the control scores 0"
    span = "no interval" if interval is None else f"[{format_percent(interval[0])}, {format_percent(interval[1])}] %"
    return f"`{entry['change']}` keeps {format_percent(share)} % of control {span}"


def _judge_share(entry: Summary | None, values: Values, primary: str, least: float) -> str:
    """Whether a change keeps at least a share of control: by the ratio's interval and by the paired difference's."""
    share, interval = _of_control(entry, primary)
    if entry is None or share is None or interval is None or entry["invalid"]:
        return CANNOT_TELL
    ours, control = values[entry["change"]]["score"], values[CLEAN]["score"]
    found = _contrast(ours, {problem: least * value for problem, value in control.items()})
    verdict = decide([found["interval"] if found else None])
    agrees = interval[0] >= least if verdict == HOLDS else interval[1] < least
    return verdict if agrees else CANNOT_TELL


def _judge_catastrophe(changes: Sequence[Summary], values: Values, pairs: Sequence[Summary], primary: str) -> Any:
    """Flips are catastrophic where those who flip keep less than half of control and their partners more."""
    named = {entry["change"]: entry for entry in changes}
    verdicts, lines = [], []
    for entry in changes:
        spec = entry["spec"]
        if not spec or spec["family"] != "error" or spec["flip_share"] < MANY_FLIPS or spec["side"] != "kv":
            continue
        if any(spec[name] is not None for name in SCOPE):
            continue  # what is changed in part of the cache alone says nothing of what flips do to all of it
        keeps = _judge_share(entry, values, primary, CATASTROPHIC)
        partners = [pair["second"] for pair in pairs if pair["kind"] == "flips" and pair["first"] == entry["change"]]
        spared = any(_judge_share(named[name], values, primary, CATASTROPHIC) == HOLDS for name in partners)
        broken = keeps == DOES_NOT_HOLD and spared
        verdicts.append(DOES_NOT_HOLD if keeps == HOLDS else HOLDS if broken else CANNOT_TELL)
        lines.append(f"{_say_share(entry, primary)}, {format_percent(spec['flip_share'])} % of signs flipped")
        lines += [f"beside it, without flips: {_say_share(named[name], primary)}" for name in partners]
    if not verdicts:
        return NOT_RUN, [f"no change of all of K and V that flips {format_percent(MANY_FLIPS)} % of signs"]
    verdict = CANNOT_TELL
    if DOES_NOT_HOLD in verdicts:
        verdict = DOES_NOT_HOLD
    elif set(verdicts) == {HOLDS}:
        verdict = HOLDS
    return verdict, lines


def judge(changes: Sequence[Summary], values: Values, primary: str) -> dict[str, Any]:
    """The pairs, and the studies' statements with verdict and figures.

    Args:
      changes: their summaries.
      values: score and KL of each problem.
      primary: the scorer that `values` has.
    """
    pairs = find_pairs(changes, values)
    named = {entry["change"]: entry for entry in changes}
    claims = []

    def add(name: str, text: str, found: tuple[str, list[str]]) -> None:
        claims.append({"id": name, "claim": text, "verdict": found[0], "figure": found[1]})

    half = format_percent(CATASTROPHIC)
    text = f"sign changes are catastrophic (less than {half} % of control is left, and more without them)"
    add("E1a", text, _judge_catastrophe(changes, values, pairs, primary))
    add("E1b", "at equal mean and variance, sign changes cost score", _judge_pairs(pairs, "flips", "score", -1))
    add("E1c", "at equal mean and variance, sign changes raise KL", _judge_pairs(pairs, "flips", "kl", 1))
    add("E2a", "at equal mean square, a mean costs more score than spread", _judge_pairs(pairs, "mean", "score", -1))
    add("E2b", "at equal mean square, a mean raises KL more than spread", _judge_pairs(pairs, "mean", "kl", 1))
    add("E2c", "at equal spread, a mean costs score", _judge_pairs(pairs, "shift", "score", -1))
    add("E2d", "at equal spread, a mean raises KL", _judge_pairs(pairs, "shift", "kl", 1))
    wide, plain = named.get(WIDE), named.get(PLAIN)
    lines = [_say_share(wide, primary)] if wide else [f"`{WIDE}` was not run"]
    keeps = _judge_share(wide, values, primary, KEEPS) if wide else NOT_RUN
    add("E3", f"U(-1.5, 1.5) keeps {format_percent(KEEPS)} % of control", (keeps, lines))
    if wide and plain:
        found = _contrast(values[WIDE]["score"], values[PLAIN]["score"])
        interval = found["interval"] if found else None
        lines = [f"score of `{WIDE}` - `{PLAIN}`: {format_number(found['mean'])} {_span(interval)}" if found else "-"]
        usable = None if wide["invalid"] or plain["invalid"] else interval
        add("E4", "U(-1.5, 1.5), which flips signs, beats U(-1, 1), which flips none", (decide([usable]), lines))
    else:
        add("E4", "U(-1.5, 1.5), which flips signs, beats U(-1, 1), which flips none", (NOT_RUN, ["not both run"]))
    text = "at equal mean square, an error of a token's scale {} than one of each channel (KVarN, arXiv 2606.03458)"
    add("E5a", text.format("costs more score"), _judge_pairs(pairs, "correlate", "score", -1))
    add("E5b", text.format("raises KL more"), _judge_pairs(pairs, "correlate", "kl", 1))
    text = "KVarN's cache of at most 3 bits an element {} every other method's, as much of both packed in no more bits "
    text += "and rows being written read alike"
    add("E6a", text.format("scores above"), _judge_pairs(pairs, "method", "score", -1))
    add("E6b", text.format("has a KL below"), _judge_pairs(pairs, "method", "kl", 1))
    return {"pairs": pairs, "claims": claims}
