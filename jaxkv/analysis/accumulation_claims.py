"""What a run's quantizers say of the statements of the KVarN study (arXiv 2606.03458).

A statement on all quantizers holds where every one's interval lies on its side, does not hold where one lies wholly on
the other, and cannot be told otherwise. A quantizer with invalid samples decides nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.analysis import statistics
from jaxkv.analysis.format import format_number, format_percent
from jaxkv.analysis.injection_claims import CANNOT_TELL, decide
from jaxkv.analysis.methods import KVARN, is_published_kvarn, read_codes, weigh_bits

Summary = Mapping[str, Any]
Values = Mapping[str, Mapping[str, Any]]  # quantizer -> figure -> problem -> value
Interval = Sequence[float] | None
WINDOWS_CLOSE = 0.05  # windows are comparable where the packed shares of both sides are this near
REASON = 0.5  # of the squared error that a reason accounts for at least
PERCENT = (format_percent, " %")


def average(values: Mapping[int, float], least: float = -math.inf, most: float = math.inf) -> Any:
    """Mean over problems with its interval, the bootstrap's widened to Student's t, and their number.

    Args:
      values: by problem.
      least, most: what the figure cannot be below or above; the interval ends there.

    Returns:
      `interval` is None for one problem. Where every value is exactly 0, `bound` is the share of problems that could
      still have another (95 %, exact); else None. None without problems.
    """
    if not values:
        return None
    column = np.asarray([values[problem] for problem in sorted(values)], np.float64)
    interval = statistics.paired_interval(column, np.zeros(len(column)))
    equal = len(column) > 1 and not column.any()
    return {
        "mean": float(column.mean()),
        "interval": None if interval is None else [max(least, interval[0]), min(most, interval[1])],
        "problems": len(column),
        "bound": statistics.zero_upper_bound(len(column)) if equal else None,
    }


def subtract(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """first - second of the problems that have both."""
    return {problem: first[problem] - second[problem] for problem in sorted(first.keys() & second.keys())}


def quadrature(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """sqrt(first^2 - second^2) of the problems that have both, 0 where second is larger.

    The error that an independent one of size `second` must be joined by to give `first`. first - second of the same
    added error is smaller the larger `second` is.
    """
    return {
        problem: math.sqrt(max(0.0, first[problem] ** 2 - second[problem] ** 2))
        for problem in sorted(first.keys() & second.keys())
    }


def show_average(entry: Summary | None, show: Callable[[float], str] = format_number, unit: str = "") -> str:
    """A mean with its interval, ``-`` for None; of zeros alone, the bound."""
    if entry is None:
        return "-"
    if entry["bound"] is not None:
        return f"0{unit} (bound {format_percent(entry['bound'])} %)"
    if entry["interval"] is None:
        return f"{show(entry['mean'])}{unit}"
    return f"{show(entry['mean'])}{unit} [{', '.join(map(show, entry['interval']))}]"


def _decisive(values: Mapping[int, float], entry: Summary) -> Interval:
    """The interval that a verdict may rest on: values that are all alike have a spread that nobody has seen."""
    spread = max(values.values()) - min(values.values())
    return None if spread <= 1e-9 * abs(entry["mean"]) else entry["interval"]


def _hull(first: Interval, second: Interval) -> Interval:
    """An interval that lies on a side of 0 exactly where both do; None where one is missing."""
    if first is None or second is None:
        return None
    return min(first[0], second[0]), max(first[1], second[1])


def _judge_both(difference: Interval, quadrature: Interval) -> str:
    """A verdict where both measures have the same one, else why there is none."""
    found = decide([difference]), decide([quadrature])
    if found[0] == found[1]:
        return found[0]
    return (
        f"{CANNOT_TELL}, since the static errors differ so that the two measures disagree (difference: {found[0]}; "
        f"quadrature: {found[1]})"
    )


def _say_problems(count: int) -> str:
    return f"{count} problem{'' if count == 1 else 's'}" + (", no interval" if count == 1 else "")


@dataclasses.dataclass(frozen=True)
class Figure:
    """What must lie above a threshold, for every quantizer.

    Attributes:
      name: what it is called.
      choose: a quantizer's values -> the figure by problem.
      least: the threshold.
      percent: whether it is shown so.
      quadrature: a quantizer's values -> the same in quadrature, which must lie on the same side.
    """

    name: str
    choose: Callable[[Mapping[str, Any]], Mapping[int, float]]
    least: float = 0.0
    percent: bool = False
    quadrature: Callable[[Mapping[str, Any]], Mapping[int, float]] | None = None


def _judge_each(entries: Sequence[Summary], values: Values, figures: Sequence[Figure]) -> tuple[str, list[str]]:
    """Whether every figure lies above its threshold for every quantizer."""
    intervals: list[Interval] = []
    lines = []
    for entry in entries:
        name = entry["quantizer"]
        found = [(figure, by_problem) for figure in figures if (by_problem := figure.choose(values[name]))]
        if not found:
            continue
        if _errs_nowhere(values[name]):
            lines.append(f"`{name}` errs at no decoded position and says nothing")
            continue
        own: list[Interval] = []
        parts, reason = [], ""
        for figure, by_problem in found:
            mean = average(by_problem)
            parts.append(f"{figure.name} {show_average(mean, *PERCENT if figure.percent else ())}")
            interval = None if entry["invalid"] else _decisive(by_problem, mean)
            interval = None if interval is None else [end - figure.least for end in interval]
            if figure.quadrature is not None:
                again = figure.quadrature(values[name])
                mean = average(again)
                parts.append(f"in quadrature {show_average(mean)}")
                other = None if entry["invalid"] else _decisive(again, mean)
                reason, interval = _judge_both(interval, other), _hull(interval, other)
            own.append(interval)
        verdict = "invalid samples, so it decides nothing" if entry["invalid"] else reason or decide(own)
        lines.append(f"`{name}`: {'; '.join(parts)} ({_say_problems(len(found[0][1]))}): {verdict}")
        intervals += own
    return decide(intervals), lines or ["no quantizer has the records for it"]


def _errs_nowhere(values: Mapping[str, Any]) -> bool:
    return not any(values["static"].values()) and not any(values["decode"].values())


def _packed(entry: Summary) -> tuple[float, float]:
    """Share of tokens that are packed of keys and of values."""
    stored = entry["regimes"]["decode"]["stored"]
    return stored["k"]["packed"]["mean"], stored["v"]["packed"]["mean"]


def _describe_cache(entry: Summary) -> str:
    k, v = map(format_percent, _packed(entry))
    return f"{format_number(entry['storage']['bits'], 3)} bits, {k if k == v else f'{k}/{v}'} % packed"


def _judge_kvarn(entries: Sequence[Summary], values: Values) -> tuple[str, list[str]]:
    """KVarN beside each other 2-bit method at comparable windows.

    One that has fewer bits and accumulates more says nothing for the statement, and one that has more bits and
    accumulates less leaves it open. Both the difference decode - static and the quadrature must say so: independent
    errors add in quadrature, so the same error fed back makes a smaller difference beside a larger static error.
    """
    codes = {entry["quantizer"]: read_codes(entry["quantizer"]) for entry in entries}
    usable = [
        (entry, code)
        for entry in entries
        if (code := codes[entry["quantizer"]]) and code[1] == 2 and values[entry["quantizer"]]["extra"]
    ]
    ours = [entry for entry, _ in usable if is_published_kvarn(entry["quantizer"])]
    rivals = [entry for entry, (name, _, _) in usable if name != KVARN]
    if not ours or not rivals:
        return CANNOT_TELL, ["no 2-bit KVarN was decoded" if not ours else "no other 2-bit method was decoded"]
    intervals: list[Interval] = []
    lines = []
    for kvarn in ours:
        for rival in rivals:
            names = rival["quantizer"], kvarn["quantizer"]
            gap, other = (subtract(*(values[name][part] for name in names)) for part in ("extra", "quadrature"))
            caches = f"({_describe_cache(rival)}; {_describe_cache(kvarn)})"
            label = f"`{names[0]}` - `{names[1]}` {caches}"
            if not gap:
                lines.append(f"{label}: no problem has both")
                continue
            found, again = average(gap), average(other)
            both = _decisive(gap, found), _decisive(other, again)
            interval = _hull(*both)
            each = ", ".join(f"`{name}` {show_average(average(values[name]['quadrature'], 0.0))}" for name in names)
            line = f"{label}: {show_average(found)}; in quadrature {show_average(again)} (of {each})"
            line += f" ({_say_problems(len(gap))})"
            verdict, counts = _weigh(rival, kvarn, min(found["mean"], again["mean"]), interval)
            if counts:
                broken = rival["invalid"] or kvarn["invalid"]
                intervals.append(None if broken or verdict else interval)
                verdict = "invalid samples, so it decides nothing" if broken else verdict or _judge_both(*both)
            lines.append(f"{line}: {verdict}")
    return decide(intervals), lines


def _weigh(rival: Summary, kvarn: Summary, mean: float, interval: Interval) -> tuple[str, bool]:
    """Why a pair cannot decide, empty if it can; and whether it must then leave the statement open."""
    if max(abs(a - b) for a, b in zip(_packed(rival), _packed(kvarn), strict=True)) > WINDOWS_CLOSE:
        return "windows are not comparable", False
    return weigh_bits(rival["storage"]["bits"] - kvarn["storage"]["bits"], mean, interval)


def judge(entries: Sequence[Summary], values: Values) -> list[dict[str, Any]]:
    """The statements with verdict and figures.

    Args:
      entries: summaries of quantizers.
      values: of each, by problem over decoded positions: `static` and `decode` errors, `extra` (what accumulates)
        and `growth` of it, `quadrature` and `growth_quadrature` (the same by `quadrature` in place of `subtract`), and
        `taken` (repair -> share of the error, a norm, taken away).
    """

    def taken(values: Mapping[str, Any], first: str, second: str = "") -> dict[int, float]:
        found = values["taken"].get(first, {})
        less = values["taken"].get(second, {}) if second else dict.fromkeys(found, 0.0)
        return {problem: value - less[problem] for problem, value in found.items()}

    def taken_squared(values: Mapping[str, Any]) -> dict[int, float]:
        return {problem: 1 - (1 - share) ** 2 for problem, share in taken(values, "everything").items()}

    def judge_each(*figures: Figure) -> tuple[str, list[str]]:
        return _judge_each(entries, values, figures)

    half = format_percent(REASON)
    text = {
        "K1a": "errors accumulate under decoding: the attention output errs more where they feed back, through earlier "
        "steps and through a step's earlier layers, than where they do not",
        "K1b": "what accumulates grows with the tokens decoded",
        "K2": "KVarN accumulates least at 2 bits (at comparable windows and bits; by the difference and in quadrature)",
        "K3a": "repairing the scales of the worst 5 % of tokens takes away error, and more than of the other 95 %",
        "K3b": f"wrong token scales make up at least {half} % of the squared static error: as much is gone with all "
        "repaired (what part of the accumulated error they cause, this does not say)",
    }
    found = {
        "K1a": judge_each(Figure("decode - static:", lambda v: v["extra"])),
        "K1b": judge_each(
            Figure("later - earlier half:", lambda v: v["growth"], quadrature=lambda v: v["growth_quadrature"])
        ),
        "K2": _judge_kvarn(entries, values),
        "K3a": judge_each(
            Figure("worst 5 % of tokens:", lambda v: taken(v, "worst"), percent=True),
            Figure("that less the other 95 %:", lambda v: taken(v, "worst", "others"), percent=True),
        ),
        "K3b": judge_each(Figure("all tokens, of the squared static error:", taken_squared, REASON, percent=True)),
    }
    return [
        {"id": name, "claim": text[name], "verdict": verdict, "figure": lines}
        for name, (verdict, lines) in found.items()
    ]
