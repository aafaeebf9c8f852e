"""Charts as SVG trees, small enough for a phone: axes, lines, dots, bars, grids of cells.

Colours are classes (`s0` to `s5` a series, `h` a cell whose opacity is its value) that the page's style sets from CSS
variables, so that a chart follows dark mode and prints: what matplotlib would write as fixed colours.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from xml.etree import ElementTree as ET

from jaxkv.reporting.document import add
from jaxkv.reporting.format import format_number

WIDTH, HEIGHT = 360, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 40, 36
SHORT = 24  # characters of a note that leave room for another beside it


def make_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if rough <= m * power * (1 + 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Values to pixels; `log` takes positive values alone.

    Attributes:
      low, high: of the values.
      begin, end: in pixels.
      log: powers of ten at equal distances.
    """

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies; values outside are put on the nearer end."""
        ends = self.low, self.high, min(max(value, self.low), self.high)
        low, high, at = map(math.log10, ends) if self.log else ends
        share = 0.5 if high == low else (at - low) / (high - low)
        return round(self.begin + share * (self.end - self.begin), 2)

    def ticks(self) -> list[float]:
        """Round values to label."""
        if not self.log:
            return make_ticks(self.low, self.high)
        low, high = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        step = max(1, math.ceil((high - low + 1) / 5))
        return [10.0**power for power in range(low, high + 1, step)]


def limits(values: Sequence[float], log: bool = False) -> tuple[float, float]:
    """Ends of an axis that holds all values: whole powers of ten, or from 0 (or below) to the largest."""
    if log:
        kept = [value for value in values if value > 0]
        if not kept:
            return 0.1, 1.0
        powers = math.floor(math.log10(min(kept))), math.ceil(math.log10(max(kept)))
        return 10.0 ** powers[0], 10.0 ** max(powers[1], powers[0] + 1)
    low, high = min(*values, 0.0, 0.0), max(values, default=1.0)
    return low, high if high > low else low + 1.0


def label_tick(value: float, log: bool) -> str:
    """``1e-5`` on a log axis where it is shorter, else the number."""
    if log and not 1e-2 <= value <= 1e3:
        return f"1e{round(math.log10(value))}"
    if abs(value) < 1e-3:
        return f"{value:g}"  # 0.0005, not 5.00e-04
    return format_number(value, 3)


class Chart:
    """One panel with a title, a legend and axes.

    Args:
      title: above the panel; also what a screen reader is told, with `said`.
      x, y: (low, high, label, log) of each axis.
      said: what the chart shows, for those who cannot see it.
      notes: lines of text under the panel, two to a row if they are short; with `keys`, the names of series 0, 1, ...,
        or of those that `keys` numbers.
      ticks: whether x has labelled ticks.
    """

    def __init__(
        self,
        title: str,
        x: tuple[float, float, str, bool],
        y: tuple[float, float, str, bool],
        said: str = "",
        notes: Sequence[str] = (),
        ticks: bool = True,
        keys: bool | Sequence[int] = False,
    ):
        floor = HEIGHT - BOTTOM
        self.x = Scale(x[0], x[1], LEFT, WIDTH - RIGHT, x[3])
        self.y = Scale(y[0], y[1], floor, TOP, y[3])
        columns = 1 if any(len(note) > SHORT for note in notes) else 2
        self.svg = start_svg(title, HEIGHT + 14 * -(-len(notes) // columns), said)
        self._legend = float(LEFT)
        for tick in self.y.ticks():
            at = str(self.y.place(tick))
            add(self.svg, "line", class_="grid", x1=str(LEFT), x2=str(WIDTH - RIGHT), y1=at, y2=at)
            write(self.svg, LEFT - 5, self.y.place(tick) + 3.5, label_tick(tick, y[3]), "end")
        for tick in self.x.ticks() if ticks else ():
            write(self.svg, self.x.place(tick), floor + 14, label_tick(tick, x[3]), "middle")
        base = str(self.y.place(0) if not y[3] and y[0] < 0 else floor)
        add(self.svg, "line", class_="axis", x1=str(LEFT), x2=str(WIDTH - RIGHT), y1=base, y2=base)
        write(self.svg, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x[2], "middle", "label")
        up = write(self.svg, 0, 0, y[2], "middle", "label")
        up.set("transform", f"translate(11 {(TOP + floor) / 2}) rotate(-90)")
        for index, note in enumerate(notes):
            left, line = LEFT + (index % columns) * 150, HEIGHT + 11 + 14 * (index // columns)
            if keys:
                self._swatch(index if keys is True else keys[index], left, line)
                left += 13
            squeeze(write(self.svg, left, line, note), 5.3, WIDTH - left)

    def legend(self, series: int, name: str) -> None:
        """A swatch and a name, after those before it."""
        self._swatch(series, self._legend, 32)
        write(self.svg, self._legend + 13, 32, name)
        self._legend += 13 + 5.6 * len(name) + 11

    def _swatch(self, series: int, x: float, line: float) -> None:
        add(self.svg, "rect", class_=f"fill s{series}", x=f"{x:.1f}", y=f"{line - 8:.1f}", width="9", height="9")

    def tick(self, x: float, text: str) -> None:
        """A label under the x axis."""
        write(self.svg, self.x.place(x), HEIGHT - BOTTOM + 14, text, "middle")

    def line(self, series: int, points: Sequence[tuple[float, float]], steps: bool = False) -> None:
        """A line through points; `steps` holds each value until the next."""
        parts: list[str] = []
        for index, (x, y) in enumerate(points):
            at = f"{self.x.place(x)} {self.y.place(y)}"
            if steps and index:
                parts.append(f"H{self.x.place(x)}V{self.y.place(y)}")
            else:
                parts.append(f"{'L' if index else 'M'}{at}")
        add(self.svg, "path", class_=f"line s{series}", d="".join(parts))

    def rule(self, points: Sequence[tuple[float, float]]) -> None:
        """A dashed line of reference."""
        d = "L".join(f"{self.x.place(x)} {self.y.place(y)}" for x, y in points)
        add(self.svg, "path", class_="rule", d=f"M{d}")

    def dots(self, series: int, points: Sequence[tuple[float, float]], kind: str = "dot") -> None:
        """Dots, one path for all: `kind` 'dot' or the larger 'mark'."""
        d = "".join(f"M{self.x.place(x)} {self.y.place(y)}h0" for x, y in points)
        if d:
            add(self.svg, "path", class_=f"{kind} s{series}", d=d)

    def bar(self, series: int, x: float, width: float, value: float, said: str = "") -> None:
        """A bar from 0 or the floor of the axis, `width` in pixels, centred at x."""
        top, floor = sorted((self.y.place(value), self.y.place(max(0.0, self.y.low))))
        at = {"x": str(self.x.place(x) - width / 2), "y": str(top), "width": str(width)}
        rect = add(self.svg, "rect", class_=f"fill s{series}", height=str(round(max(floor - top, 0.5), 1)), **at)
        if said:
            add(rect, "title", said)

    def interval(self, x: float, low: float, high: float, series: int | None = None) -> None:
        """A vertical line from low to high, in the colour of a series if one is given."""
        at, kind = str(self.x.place(x)), "interval" if series is None else f"interval s{series}"
        add(self.svg, "line", class_=kind, x1=at, x2=at, y1=str(self.y.place(low)), y2=str(self.y.place(high)))


def start_svg(title: str, height: int, said: str = "", width: int = WIDTH) -> ET.Element:
    """An empty drawing with its title."""
    svg = ET.Element("svg", {"viewBox": f"0 0 {width} {height}", "role": "img", "class": "chart"})
    svg.set("aria-label", f"{title}. {said}" if said else title)
    squeeze(write(svg, 0, 13, title, kind="title"), 6.9, width)
    return svg


def squeeze(text: ET.Element, advance: float, width: float) -> None:
    """Narrows a text that would not fit; `advance` is a character's mean width in pixels."""
    if len(text.text or "") * advance > width:
        text.set("textLength", f"{width:.0f}")
        text.set("lengthAdjust", "spacingAndGlyphs")


def write(parent: ET.Element, x: float, y: float, text: str, anchor: str = "", kind: str = "") -> ET.Element:
    """Text at a place."""
    return add(parent, "text", text, x=str(round(x, 1)), y=str(round(y, 1)), text_anchor=anchor, class_=kind)


def draw_cells(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    show: Callable[[float], str],
    *,
    print_values: bool = False,
    log: bool = False,
    x_label: str = "",
) -> ET.Element:
    """A grid of cells, the stronger the larger the value, on dark paper too; None stays empty.

    Args:
      title: above.
      rows, columns: names; of many, some are shown.
      values: one list a row.
      show: a value as text: for the legend, the cells' tooltips, and inside them with `print_values`.
      log: shades by the logarithm.
      x_label: under the columns.
    """
    left = 8 + min(110, round(6.1 * max(map(len, rows), default=0)))
    size = (WIDTH - left - 4) / max(1, len(columns))
    tall = max(7.0, min(34.0 if print_values else 16.0, 300 / max(1, len(rows))))
    floor = TOP + tall * len(rows)
    svg = start_svg(title, round(floor + 34))
    found = [v for row in values for v in row if v is not None and (v > 0 or not log)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    if not log:
        low = min(low, 0.0)
    shade = Scale(low, high, 0.06, 1.0, log)
    every_row = max(1, math.ceil(9 / tall))
    every_column = max(1, math.ceil(7.0 * max(map(len, columns), default=1) / size))
    for i, (name, row) in enumerate(zip(rows, values, strict=True)):
        if i % every_row == 0:
            write(svg, left - 5, TOP + tall * (i + 0.5) + 3.5, name, "end")
        for j, value in enumerate(row):
            place = {"x": f"{left + j * size:.1f}", "y": f"{TOP + i * tall:.1f}"}
            rect = add(svg, "rect", class_="h", width=f"{size + 0.3:.1f}", height=f"{tall + 0.3:.1f}", **place)
            empty = value is None or (log and value <= 0)
            share = 0.0 if value is None or empty or not value else shade.place(value)
            rect.set("fill-opacity", f"{share:.2f}")
            if value is not None:
                add(rect, "title", f"{name}, {columns[j]}: {show(value)}")
                if print_values:
                    kind = "in dark" if share > 0.55 else "in"
                    write(svg, left + (j + 0.5) * size, TOP + (i + 0.5) * tall + 4, show(value), "middle", kind)
    for j, name in enumerate(columns):
        if j % every_column == 0:
            write(svg, left + (j + 0.5) * size, floor + 13, name, "middle")
    scale = f"faint {show(low)}, strong {show(high)}" if found else "nothing differs"
    write(svg, 0, 29, scale, kind="label")
    if x_label:
        write(svg, (left + WIDTH) / 2, floor + 28, x_label, "middle", "label")
    return svg
