"""What a run's quantizers say of the statements of the KVarN study (arXiv 2606.03458).

How each statement is judged is told by `rules.KVARN`. A quantizer with invalid samples decides nothing.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.methods import KVARN, is_published_kvarn, read_codes, weigh_bits
from jaxkv.reporting import statistics
from jaxkv.reporting.format import format_interval, format_number, format_percent
from jaxkv.reporting.rules import (
    CANNOT_TELL,
    DOES_NOT_HOLD,
    HALF,
    HOLDS,
    OPEN,
    Evidence,
    Found,
    decide,
    hold_all,
    lies_above,
)

Summary = Mapping[str, Any]
Values = Mapping[str, Mapping[str, Any]]  # quantizer -> figure -> problem -> value
WINDOWS_CLOSE = 0.05  # windows are comparable where the packed shares of both sides are this near
PERCENT = (format_percent, " %")


def average(values: Mapping[int, float], least: float = -math.inf, most: float = math.inf) -> Any:
    """Mean over problems with its interval by Student's t, and their number.

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
    ends = statistics.paired_interval(column)
    return {
        "mean": float(column.mean()),
        "interval": ends and [max(least, ends[0]), min(most, ends[1])],
        "problems": len(column),
        "bound": statistics.zero_upper_bound(len(column)) if len(column) > 1 and not column.any() else None,
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
    return format_interval(entry["mean"], entry["interval"], show, unit)


def _weigh_values(values: Mapping[int, float], least: float = 0.0) -> Evidence:
    """Evidence that the mean over problems is above a threshold.

    None of values that are all alike: theirs is a spread that nobody has seen.
    """
    column = np.asarray([values[problem] for problem in sorted(values)], np.float64)
    if np.ptp(column) <= 1e-9 * abs(column.mean()):
        return OPEN
    return lies_above(statistics.estimate_paired(column, np.zeros(len(column))), least)


def _both(difference: Evidence, quadrature: Evidence) -> Evidence:
    """Evidence of a verdict that both measures give."""
    return Evidence(max(difference.supports, quadrature.supports), max(difference.refutes, quadrature.refutes))


def _say_both(difference: Evidence, quadrature: Evidence) -> str:
    """A verdict where both measures have the same one, else why there is none."""
    if difference.verdict == quadrature.verdict:
        return difference.verdict
    return (
        f"{CANNOT_TELL}, since the static errors differ so that the two measures disagree (difference: "
        f"{difference.verdict}; quadrature: {quadrature.verdict})"
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


def _judge_each(entries: Sequence[Summary], values: Values, figures: Sequence[Figure]) -> Found:
    """Whether every figure lies above its threshold for every quantizer."""
    decided: list[Evidence] = []
    lines = []
    for entry in entries:
        name = entry["quantizer"]
        found = [(figure, by_problem) for figure in figures if (by_problem := figure.choose(values[name]))]
        if not found:
            continue
        if _errs_nowhere(values[name]):
            lines.append(f"`{name}` errs at no decoded position and says nothing")
            continue
        own: list[Evidence] = []
        parts, reason = [], ""
        for figure, by_problem in found:
            mean = average(by_problem)
            parts.append(f"{figure.name} {show_average(mean, *PERCENT if figure.percent else ())}")
            evidence = OPEN if entry["invalid"] else _weigh_values(by_problem, figure.least)
            if figure.quadrature is not None:
                again = figure.quadrature(values[name])
                parts.append(f"in quadrature {show_average(average(again))}")
                other = OPEN if entry["invalid"] else _weigh_values(again)
                reason, evidence = _say_both(evidence, other), _both(evidence, other)
            own.append(evidence)
        verdict = "invalid samples, so it decides nothing" if entry["invalid"] else reason or hold_all(own).verdict
        lines.append(f"`{name}`: {'; '.join(parts)} ({_say_problems(len(found[0][1]))}): {verdict}")
        decided += own
    return (hold_all(decided) if decided else None), lines or ["no quantizer has the records for it"]


def _errs_nowhere(values: Mapping[str, Any]) -> bool:
    return not any(values["static"].values()) and not any(values["decode"].values())


def _packed(entry: Summary) -> tuple[float, float]:
    """Share of tokens that are packed of keys and of values."""
    stored = entry["regimes"]["decode"]["stored"]
    return stored["k"]["packed"]["mean"], stored["v"]["packed"]["mean"]


def _describe_cache(entry: Summary) -> str:
    k, v = map(format_percent, _packed(entry))
    return f"{format_number(entry['storage']['bits'], 3)} bits, {k if k == v else f'{k}/{v}'} % packed"


def _why_left_out(entry: Summary, values: Values) -> str:
    """Why a quantizer is not set beside KVarN; empty if it is."""
    code = read_codes(entry["quantizer"])
    if code is None:
        return "its sides differ, or its format has no bits of a code"
    if code[1] != 2:
        return f"its codes have {code[1]} bits"
    if code[0] == KVARN and not is_published_kvarn(entry["quantizer"]):
        return "it is a form of KVarN that its authors do not have"
    return "" if values[entry["quantizer"]]["extra"] else "it has no problem in both regimes"


def _judge_kvarn(entries: Sequence[Summary], values: Values) -> Found:
    """KVarN beside each other 2-bit method at comparable windows.

    One that has fewer bits and accumulates more says nothing for the statement, and one that has more bits and
    accumulates less leaves it open. Both the difference decode - static and the quadrature must say so: independent
    errors add in quadrature, so the same error fed back makes a smaller difference beside a larger static error.
    """
    reasons = {entry["quantizer"]: _why_left_out(entry, values) for entry in entries}
    usable = [entry for entry in entries if not reasons[entry["quantizer"]]]
    ours = [entry for entry in usable if is_published_kvarn(entry["quantizer"])]
    rivals = [entry for entry in usable if entry not in ours]
    left_out = [f"`{name}` is not compared: {why}" for name, why in reasons.items() if why]
    if not ours or not rivals:
        said = "no 2-bit KVarN was decoded" if not ours else "no other 2-bit method was decoded"
        return None, [said, *left_out]
    decided: list[Evidence] = []
    lines = []
    for kvarn, rival in itertools.product(ours, rivals):
        names = rival["quantizer"], kvarn["quantizer"]
        line = f"`{names[0]}` - `{names[1]}` ({_describe_cache(rival)}; {_describe_cache(kvarn)})"
        gap, other = (subtract(*(values[name][part] for name in names)) for part in ("extra", "quadrature"))
        if not gap:
            lines.append(f"{line}: no problem has both")
            continue
        found, again = average(gap), average(other)
        each = ", ".join(f"`{name}` {show_average(average(values[name]['quadrature'], 0.0))}" for name in names)
        line += f": {show_average(found)}; in quadrature {show_average(again)} (of {each}) ({_say_problems(len(gap))})"
        measures = _weigh_values(gap), _weigh_values(other)
        evidence = _both(*measures)
        verdict, counts = _weigh(rival, kvarn, min(found["mean"], again["mean"]), evidence)
        if counts:
            broken = rival["invalid"] or kvarn["invalid"]
            decided.append(OPEN if broken or verdict else evidence)
            verdict = "invalid samples, so it decides nothing" if broken else verdict or _say_both(*measures)
        lines.append(f"{line}: {verdict}")
    return (hold_all(decided) if decided else None), [*lines, *left_out]


def _weigh(rival: Summary, kvarn: Summary, mean: float, evidence: Evidence) -> tuple[str, bool]:
    """Why a pair cannot decide, empty if it can; and whether it must then leave the statement open."""
    if max(abs(a - b) for a, b in zip(_packed(rival), _packed(kvarn), strict=True)) > WINDOWS_CLOSE:
        return "windows are not comparable", False
    worse = evidence.verdict == HOLDS
    return weigh_bits(rival["storage"]["bits"] - kvarn["storage"]["bits"], mean, worse)


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

    def judge_each(*figures: Figure) -> Found:
        return _judge_each(entries, values, figures)

    found: dict[str, Found] = {
        "K1a": judge_each(Figure("decode - static:", lambda v: v["extra"])),
        "K1b": judge_each(
            Figure("later - earlier half:", lambda v: v["growth"], quadrature=lambda v: v["growth_quadrature"])
        ),
        "K2": _judge_kvarn(entries, values),
        "K3a": judge_each(
            Figure("worst 5 % of tokens:", lambda v: taken(v, "worst"), percent=True),
            Figure("that less the other 95 %:", lambda v: taken(v, "worst", "others"), percent=True),
        ),
        "K3b": judge_each(Figure("all tokens, of the squared static error:", taken_squared, HALF, percent=True)),
    }
    return decide(found, (HOLDS, DOES_NOT_HOLD))
