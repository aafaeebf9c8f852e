"""What a run's quantizers say of the statements of the KVarN study (arXiv 2606.03458).

How each statement is judged is told by `rules.KVARN`. A quantizer with invalid samples decides nothing.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.methods import KVARN, is_published_kvarn, read_codes, weigh_bits
from jaxkv.reporting import rules, statistics
from jaxkv.reporting.format import format_interval, format_number, format_percent

Summary = Mapping[str, Any]
ByProblem = Mapping[int, float]
Values = Mapping[str, Mapping[str, ByProblem]]  # quantizer -> figure -> problem -> value, over decoded positions
WINDOWS_CLOSE = 0.05  # windows are comparable where the packed shares of both sides are this near
PERCENT = (format_percent, " %")
INVALID = "invalid samples, so it decides nothing"


def average(values: ByProblem, least: float = -math.inf, most: float = math.inf) -> Any:
    """Mean over problems with its interval by Student's t, cut at `least` and `most`; None without problems.

    Where every value is exactly 0, `bound` is the share of problems that could still have another (95 %, exact).
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


def combine(
    first: ByProblem, second: ByProblem, how: Callable[[float, float], float] = operator.sub
) -> dict[int, float]:
    """The difference of the problems that have both, or what else `how` makes of two values."""
    return {problem: how(first[problem], second[problem]) for problem in sorted(first.keys() & second.keys())}


def quadrature(first: float, second: float) -> float:
    """sqrt(first^2 - second^2), 0 where second is larger: the independent error that makes `first` of `second`."""
    return math.sqrt(max(0.0, first**2 - second**2))


def show_average(entry: Summary | None, show: Callable[[float], str] = format_number, unit: str = "") -> str:
    """A mean with its interval, ``-`` for None; of zeros alone, the bound."""
    if entry is None:
        return "-"
    if entry["bound"] is not None:
        return f"0{unit} (bound {format_percent(entry['bound'])} %)"
    return format_interval(entry["mean"], entry["interval"], show, unit)


def _weigh(values: ByProblem, least: float = 0.0) -> rules.Evidence:
    """Evidence that the mean is above a threshold; none of values all alike, whose spread nobody has seen."""
    column = np.asarray([values[problem] for problem in sorted(values)], np.float64)
    if np.ptp(column) <= 1e-9 * abs(column.mean()):
        return rules.OPEN
    return rules.lies_above(statistics.estimate_paired(column, np.zeros(len(column))), least)


def _weigh_both(difference: ByProblem, squares: ByProblem) -> tuple[rules.Evidence, str]:
    """Evidence of a verdict that both measures give; that verdict, or why there is none."""
    first, second = _weigh(difference), _weigh(squares)
    verdict = first.verdict
    if verdict != second.verdict:
        verdict = (
            f"{rules.CANNOT_TELL}, since the static errors differ so that the two measures disagree (difference: "
            f"{first.verdict}; quadrature: {second.verdict})"
        )
    return rules.Evidence(max(first.supports, second.supports), max(first.refutes, second.refutes)), verdict


def _say_problems(count: int) -> str:
    return f"{count} problem{'' if count == 1 else 's'}" + (", no interval" if count == 1 else "")


@dataclasses.dataclass(frozen=True)
class Figure:
    """What must lie above `least` for every quantizer, and in quadrature too where there is such a figure."""

    text: str
    name: str
    least: float = 0.0
    percent: bool = False
    quadrature: str = ""


ON_EACH = {  # statements on every quantizer by itself
    "K1a": (Figure("decode - static:", "extra"),),
    "K1b": (Figure("later - earlier half:", "growth", quadrature="growth_quadrature"),),
    "K3a": (
        Figure("worst 5 % of tokens:", "worst", percent=True),
        Figure("that less the other 95 %:", "worst_less_others", percent=True),
    ),
    "K3b": (Figure("all tokens, of the squared static error:", "squared", rules.HALF, percent=True),),
}


def _judge_each(entries: Sequence[Summary], values: Values, figures: Sequence[Figure]) -> rules.Found:
    """Whether every figure lies above its threshold for every quantizer."""
    decided: list[rules.Evidence] = []
    lines = []
    for entry in entries:
        name = entry["quantizer"]
        by_problem = values[name]
        found = [figure for figure in figures if by_problem[figure.name]]
        if not found:
            continue
        if not any(by_problem["static"].values()) and not any(by_problem["decode"].values()):
            lines.append(f"`{name}` errs at no decoded position and says nothing")
            continue
        own: list[rules.Evidence] = []
        parts, reason = [], ""
        for figure in found:
            shown = show_average(average(by_problem[figure.name]), *PERCENT if figure.percent else ())
            parts.append(f"{figure.text} {shown}")
            evidence = _weigh(by_problem[figure.name], figure.least)
            if figure.quadrature:
                parts.append(f"in quadrature {show_average(average(by_problem[figure.quadrature]))}")
                evidence, reason = _weigh_both(by_problem[figure.name], by_problem[figure.quadrature])
            own.append(rules.OPEN if entry["invalid"] else evidence)
        verdict = INVALID if entry["invalid"] else reason or rules.hold_all(own).verdict
        lines.append(f"`{name}`: {'; '.join(parts)} ({_say_problems(len(by_problem[found[0].name]))}): {verdict}")
        decided += own
    return (rules.hold_all(decided) if decided else None), lines or ["no quantizer has the records for it"]


def _packed(entry: Summary) -> list[float]:
    """Share of tokens that are packed of keys and of values."""
    return [side["packed"]["mean"] for side in entry["regimes"]["decode"]["stored"].values()]


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


def _judge_kvarn(entries: Sequence[Summary], values: Values) -> rules.Found:
    """KVarN beside each other 2-bit method at comparable windows; bits count as in `weigh_bits`.

    Both the difference decode - static and the quadrature must say so: independent errors add in quadrature, so the
    same error fed back makes a smaller difference beside a larger static error.
    """
    reasons = {entry["quantizer"]: _why_left_out(entry, values) for entry in entries}
    usable = [entry for entry in entries if not reasons[entry["quantizer"]]]
    ours = [entry for entry in usable if is_published_kvarn(entry["quantizer"])]
    rivals = [entry for entry in usable if entry not in ours]
    left_out = [f"`{name}` is not compared: {why}" for name, why in reasons.items() if why]
    if not ours or not rivals:
        said = "no 2-bit KVarN was decoded" if not ours else "no other 2-bit method was decoded"
        return None, [said, *left_out]
    decided: list[rules.Evidence] = []
    lines = []
    for kvarn, rival in itertools.product(ours, rivals):
        names = rival["quantizer"], kvarn["quantizer"]
        line = f"`{names[0]}` - `{names[1]}` ({_describe_cache(rival)}; {_describe_cache(kvarn)})"
        theirs, own = (values[name] for name in names)
        gap, squares = (combine(theirs[part], own[part]) for part in ("extra", "quadrature"))
        if not gap:
            lines.append(f"{line}: no problem has both")
            continue
        found, again = average(gap), average(squares)
        each = ", ".join(f"`{name}` {show_average(average(values[name]['quadrature'], 0.0))}" for name in names)
        line += f": {show_average(found)}; in quadrature {show_average(again)} (of {each}) ({_say_problems(len(gap))})"
        evidence, verdict = _weigh_both(gap, squares)
        why, counts = "windows are not comparable", False
        if max(abs(a - b) for a, b in zip(_packed(rival), _packed(kvarn), strict=True)) <= WINDOWS_CLOSE:
            more, worse = rival["storage"]["bits"] - kvarn["storage"]["bits"], min(found["mean"], again["mean"])
            why, counts = weigh_bits(more, worse, evidence.verdict == rules.HOLDS)
        if counts and (rival["invalid"] or kvarn["invalid"]):
            why = INVALID
        if counts:
            decided.append(rules.OPEN if why else evidence)
        lines.append(f"{line}: {why or verdict}")
    return (rules.hold_all(decided) if decided else None), [*lines, *left_out]


def judge(entries: Sequence[Summary], values: Values) -> list[dict[str, Any]]:
    """The statements with verdict and figures, from the summaries of quantizers and their figures by problem."""
    found = {name: _judge_each(entries, values, figures) for name, figures in ON_EACH.items()}
    return rules.decide(found | {"K2": _judge_kvarn(entries, values)}, (rules.HOLDS, rules.DOES_NOT_HOLD))
