"""What a chart shows, as data; `jaxkv.reporting.drawing` draws it."""

import dataclasses
import math
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis: its label, whether it is logarithmic, and its ends where they are not those of the data."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Point:
    """A point, the interval of its y where it has one, and what it says when pointed at."""

    x: float
    y: float
    interval: Sequence[float] | None = None
    said: str = ""


@dataclasses.dataclass(frozen=True)
class Series:
    """Points under a name; `colour` is an index of the page's colours, taken in turn if None."""

    name: str
    points: Sequence[Point]
    colour: int | None = None


@dataclasses.dataclass(frozen=True)
class Lines:
    """Lines through points with their intervals, as a band or as `bars`; with `steps` a value holds until the next.

    A dashed level lies at `rule`. A logarithmic axis has no place for what is not positive.
    """

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    bars: bool = False
    steps: bool = False
    rule: float | None = None

    def placed(self) -> list[tuple[str, Point]]:
        """The points that have a place, with their series' names."""
        return [
            (one.name, point)
            for one in self.series
            for point in one.points
            if (point.x > 0 or not self.x.log) and (point.y > 0 or not self.y.log)
        ]


@dataclasses.dataclass(frozen=True)
class Scatter:
    """Dots of series, the last above the others, and a dashed line; what has no place lies on the edge."""

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    line: Sequence[tuple[float, float]] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of `Intervals`: its label, a value with its interval, and what it says when pointed at."""

    label: str
    value: float
    interval: Sequence[float] | None
    said: str = ""
    colour: int = 0


@dataclasses.dataclass(frozen=True)
class Intervals:
    """A forest plot: a value with its interval in each row."""

    title: str
    rows: Sequence[Row]
    x: Axis


@dataclasses.dataclass(frozen=True)
class Cells:
    """A grid of cells, one list of `values` a row, with a `measure` over its colour bar; None stays empty.

    Of many names of `rows` and `columns` some are shown. A cell says `said` of its row, column and value when pointed
    at; `show` is printed into it. Colours go by the logarithm if `log`; several grids may share the `ends` of a scale.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    said: Callable[[str, str, float], str] | None = None
    show: Callable[[float], str] | None = None
    log: bool = False
    ends: tuple[float, float] | None = None
    x_label: str = ""
    y_label: str = ""
    measure: str = ""


@dataclasses.dataclass(frozen=True)
class Box:
    """A box of a `Diagram` with text in it; `colour` is an index of the page's colours, None for a grey one."""

    left: float
    top: float
    width: float
    height: float
    text: str = ""
    colour: int | None = None
    said: str = ""


@dataclasses.dataclass(frozen=True)
class Word:
    """A text of a `Diagram` that begins at x, its middle at y; at x in its middle if `centred`."""

    x: float
    y: float
    text: str
    centred: bool = False


@dataclasses.dataclass(frozen=True)
class Diagram:
    """Boxes, lines through points, below the boxes, and words, in pixels from the upper left, DIAGRAM wide."""

    title: str
    height: float
    boxes: Sequence[Box]
    lines: Sequence[Sequence[tuple[float, float]]] = ()
    words: Sequence[Word] = ()


DIAGRAM = 356  # pixels
Chart = Lines | Scatter | Intervals | Cells | Diagram


def limits(values: Sequence[float], log: bool = False) -> tuple[float, float]:
    """Ends of an axis that holds all values: their whole powers of ten, or from 0 or below to the largest."""
    if log:
        kept = [value for value in values if value > 0] or [0.1]
        first, last = math.floor(math.log10(min(kept))), math.ceil(math.log10(max(kept)))
        return 10.0**first, 10.0 ** max(last, first + 1)
    low, high = min(*values, 0.0, 0.0), max(values, default=1.0)
    return low, high if high > low else low + 1.0


def share_axis(panels: Sequence[Sequence[Series]], label: str, log: bool = False) -> Axis:
    """One axis for the y of several panels, intervals included, so that they can be compared."""
    points = [point for panel in panels for series in panel for point in series.points]
    ends = [end for point in points for end in (point.y, *(() if log else point.interval or ()))]
    return Axis(label, log, *limits(ends, log))
