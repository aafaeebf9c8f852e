"""Numbers as text: shares with intervals, means, differences."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def format_number(value: float, digits: int = 2) -> str:
    """Two significant digits, all digits of large whole parts, exponents only where needed: 0.26, 25, 100, 2.0e-05."""
    value = float(value)
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 1e6:
        return f"{value:.{digits}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_share(entry: Mapping[str, Any] | None, what: str = "") -> str:
    """A share with its interval, ``0.26 % [0.1, 0.5]``; a count of 0 or of all with its bound; ``-`` for None.

    The bound is of the share of what the trials, called `what`, cluster in: ``0 of 939 in 8 sequences (95 % upper bound
    31 % of sequences)``.
    """
    if entry is None:
        return "-"
    for name in ("upper", "lower"):
        if f"{name}_bound" in entry:
            said = f"95 % {name} bound {format_bound(entry)}"
            clustered = entry.get("clusters") not in (None, entry["total"])
            inside = f" in {entry['clusters']} {entry['unit']}" if clustered else ""
            return f"{_count(entry, what)}{inside} ({said})"
    return format_interval(entry["rate"], entry["interval"], format_percent, " %")


def format_interval(
    value: float, interval: Sequence[float] | None, show: Callable[[float], str] = format_number, unit: str = ""
) -> str:
    """A figure in its unit, and its interval if it has one: ``0.26 % [0.1, 0.5]``."""
    return f"{show(value)}{unit}" + ("" if interval is None else f" [{', '.join(map(show, interval))}]")


def format_part(value: float, interval: Sequence[float] | None) -> str:
    """A ratio in percent that is no share of a whole and may leave 0 to 100 %: ``-12.5 % [-40, 15]``."""
    return format_interval(value, interval, lambda part: format_number(100 * part, 3), " %")


def format_percent(rate: float) -> str:
    """A share in percent, without the sign. Less than all never becomes 100."""
    text = format_number(100 * rate)
    if text != "100" or rate == 1:
        return text
    return f"{100 * rate:.2f}" if rate < 0.99995 else ">99.99"


def format_bound(entry: Mapping[str, Any]) -> str:
    """The bound of a share of 0 or 1, ``31 % of sequences``; of trials that are independent ``31 %``."""
    text = f"{format_percent(entry.get('upper_bound', entry.get('lower_bound')))} %"
    return text if entry.get("clusters") in (None, entry["total"]) else f"{text} of {entry['unit']}"


def format_count(entry: Mapping[str, Any] | None) -> str:
    """``3 of 1152``; ``-`` for None."""
    return "-" if entry is None else _count(entry)


def _count(entry: Mapping[str, Any], what: str = "") -> str:
    return f"{entry['count']} of {entry['total']}" + (f" {what}" if what else "")


def format_counted_share(entry: Mapping[str, Any] | None, what: str = "") -> str:
    """``3 of 1152 (0.26 % [0.1, 0.5])``, or the bound as in `format_share`, whose arguments it has."""
    text = format_share(entry, what)
    return text if entry is None or " of " in text else f"{_count(entry, what)} ({text})"


def format_mean(entry: Mapping[str, Any]) -> str:
    """A mean with its interval, in its own unit; of nothing but zeros without."""
    return format_interval(entry["mean"], entry["interval"] if entry["max"] else None)


def say_count(number: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def format_points(entry: Mapping[str, Any]) -> str:
    """A difference of two shares with its interval, in percentage points, signed."""
    return format_interval(entry["mean"], entry["interval"], lambda value: f"{100 * value:+.1f}")


def format_cell(entry: Mapping[str, Any]) -> str:
    """Accuracy in percent without the sign; its interval is also given at 0 and at 100."""
    return format_interval(entry["rate"], entry["interval"], format_percent)


def format_expected(entry: Mapping[str, Any]) -> str:
    """An expected share with its interval; only the upper bound if it rests on a count of 0."""
    if "upper_bound" in entry:
        return f"at most {format_percent(entry['upper_bound'])} % (95 % upper bound)"
    return format_interval(entry["rate"], entry["interval"], format_percent, " %")
