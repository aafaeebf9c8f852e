"""Charts drawn by altair, once, into SVG by vl-convert: a page needs no script and no network to show them.

A page holds some 15 kB a chart in place of Vega's 0.9 MB of script, and prints. Colours become the page's CSS
variables, so that a chart follows dark mode; what a mark says when it is pointed at is in its `data-tip`. Liberation
Sans comes with vl-convert, so that text has one width on every machine and the same records give the same bytes.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

import altair as alt
import vl_convert

from jaxkv.reporting.charts import (
    DIAGRAM,
    Axis,
    Cells,
    Chart,
    Diagram,
    Intervals,
    Lines,
    Point,
    Scatter,
    Series,
    limits,
)
from jaxkv.reporting.format import format_number

WIDTH, HEIGHT = 360, 250  # a phone's width
COLOURS = ("#2457a6", "#c4581b", "#2e8b57", "#8a4fa8", "#8a7400", "#a33a5c", "#2a8a9e")
INK, SOFT, LINE = "#1c1d21", "#5d6068", "#dcdde1"
# Each colour and the variable of the page that stands for it.
VARIABLES = {colour: f"var(--s{number})" for number, colour in enumerate(COLOURS)}
VARIABLES |= {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)"}
DROPPED = ("aria-hidden", "aria-roledescription", "role", "class", "pointer-events", "font-family", "stroke-miterlimit")
NAMESPACES = re.compile(r'\s(xmlns(:\w+)?|xlink:\w+)="[^"]*"')
IDS = re.compile(r'\sid="([^"]*)"')
GUIDES = ("axis", "legend", "title")
DEFAULTS = {"opacity": "1", "stroke-width": "1", "font-weight": "normal", "x2": "0", "y2": "0"}
PLACES = ("transform", "d")  # attributes that hold pixels
PIXELS = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+e-\d+")
DISC = re.compile(r"M([\d.]+),0A\1,\1,0,1,1,-\1,0A\1,\1,0,1,1,\1,0Z?")
SHIFT = re.compile(r"translate\(([-\d.]+),([-\d.]+)\)")
FONT = "Liberation Sans"
CONFIG: dict[str, Any] = {
    "font": FONT, "view": {"stroke": None}, "title": {"fontSize": 12.5, "color": INK, "offset": 8},
    "axis": {"gridColor": LINE, "titleFontWeight": "normal", "titlePadding": 7}
    | dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor"), SOFT),
    "legend": {
        "orient": "bottom", "columns": 2, "labelColor": SOFT, "titleColor": SOFT, "title": None, "labelLimit": 150,
        "symbolOpacity": 1, "gradientStrokeColor": LINE,
    },
}  # fmt: skip
Drawn = tuple[Any, int]  # altair's chart, and its height
DOT, MARK = 14, 34  # areas in square pixels


def draw(chart: Chart) -> ET.Element:
    """A chart as an SVG tree of the page's width. Raises ValueError for lines without a point that has a place."""
    spec, height = _DRAWN[type(chart)](chart)
    whole = spec.properties(
        width=WIDTH, height=height, padding=2, background="transparent",
        title=alt.Title(chart.title, anchor="start", frame="bounds", limit=WIDTH),
        autosize=alt.AutoSizeParams(type="fit", contains="padding"),
    )  # fmt: skip
    values = whole.configure(**CONFIG).to_dict(validate=False)
    name = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return _tidy(vl_convert.vegalite_to_svg(values), chart.title, f"c{name}-")


def _tidy(svg: str, said: str, prefix: str) -> ET.Element:
    """An SVG of Vega's as a page takes it: colours are variables, and only marks that say something are labelled.

    Vega numbers its ids through a whole process: here they are numbered in this chart, behind a prefix of its own.
    """
    svg = NAMESPACES.sub("", svg)
    for number, name in enumerate(dict.fromkeys(IDS.findall(svg))):
        own = f"{prefix}{number}"
        svg = svg.replace(f' id="{name}"', f' id="{own}"').replace(f'"url(#{name})"', f'"url(#{own})"')
    for colour, variable in VARIABLES.items():
        svg = svg.replace(f'"{colour}"', f'"{variable}"')
    root = ET.fromstring(svg)
    _clean(root)
    size = f"0 0 {root.get('width')} {root.get('height')}"
    root.attrib = {"viewBox": size, "role": "img", "class": "chart", "aria-label": said}
    return root


def _clean(parent: ET.Element) -> None:
    """Drops what shows nothing."""
    for child in list(parent):
        frame = child.get("class") in ("background", "foreground") and "M0,0h0" in child.get("d", "M0,0h0")
        if frame or child.get("display") == "none":
            parent.remove(child)
            continue
        label = child.attrib.pop("aria-label", None)
        if label and child.get("role") == "graphics-symbol" and child.get("aria-roledescription") not in GUIDES:
            child.set("data-tip", label)
        for name in DROPPED:
            child.attrib.pop(name, None)
        _shorten(child)
        _clean(child)
        if child.tag == "g" and not (len(child) or child.get("data-tip")):
            parent.remove(child)
        elif child.tag == "g" and not child.attrib and parent.tag == "g":
            place = list(parent).index(child)
            parent[place : place + 1] = list(child)


def _shorten(mark: ET.Element) -> None:
    """The same mark in fewer bytes: hundredths of a pixel, no attribute that is as without it, a disc as a circle."""
    for name in PLACES:
        if name in mark.attrib:
            mark.set(name, PIXELS.sub(lambda found: f"{round(float(found[0]), 2) + 0.0:g}", mark.attrib[name]))
    for name, value in DEFAULTS.items():
        if mark.get(name) == value:
            del mark.attrib[name]
    if "stroke" not in mark.attrib:
        mark.attrib.pop("stroke-width", None)
    disc, place = DISC.fullmatch(mark.get("d", "")), SHIFT.fullmatch(mark.get("transform", ""))
    if disc and place:
        rest = {name: value for name, value in mark.attrib.items() if name not in PLACES}
        mark.tag, mark.attrib = "circle", {"cx": place[1], "cy": place[2], "r": disc[1]} | rest


def _scale(axis: Axis, values: list[float], fit: bool = False) -> alt.Scale:
    """Places on an axis; `fit` ends it at the values themselves."""
    low, high = (min(values), max(values)) if fit and not axis.log else limits(values, axis.log)
    low, high = low if axis.low is None else axis.low, high if axis.high is None else axis.high
    return alt.Scale(
        type="log" if axis.log else "linear", domain=[low, high if high > low else low + 1], nice=False, clamp=True
    )


def _ticks(axis: Axis, scale: alt.Scale, **more: Any) -> alt.Axis:
    """Round numbers: some powers of ten where the axis is logarithmic."""
    if not axis.log:
        return alt.Axis(format="~r", tickCount=5, **more)
    low, high = (round(math.log10(end)) for end in scale["domain"])
    powers = range(low, high + 1, max(1, -(-(high - low + 1) // 6)))
    return alt.Axis(format="~e", values=[10.0**power for power in powers], **more)


def _across(axis: Axis, scale: alt.Scale, field: str = "x:Q", **more: Any) -> alt.X:
    return alt.X(field, title=axis.label, scale=scale, axis=_ticks(axis, scale, **more))


def _up(axis: Axis, scale: alt.Scale, field: str = "y:Q") -> alt.Y:
    return alt.Y(field, title=axis.label, scale=scale, axis=_ticks(axis, scale, domain=False, ticks=False))


def _colour(series: Sequence[Series]) -> alt.Color:
    names = [one.name for one in series]
    range_ = [COLOURS[(i if one.colour is None else one.colour) % len(COLOURS)] for i, one in enumerate(series)]
    return alt.Color("s:N", sort=None, scale=alt.Scale(domain=names, range=range_))


def _data(rows: list[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows))


def _span(point: Point, floor: float | None) -> dict[str, float]:
    """A point's interval; one that reaches 0 ends on the floor of a logarithmic axis."""
    if point.interval is None:
        return {}
    low, high = point.interval
    return {"low": low if floor is None else max(low, floor), "high": high}


def _draw_lines(chart: Lines) -> Drawn:
    placed = chart.placed()
    if not placed:
        raise ValueError(f"the chart '{chart.title}' has no point that has a place")
    ends = [end for _, p in placed for end in (p.y, *(p.interval or ())) if end > 0 or not chart.y.log]
    across, along = _scale(chart.x, [point.x for _, point in placed], fit=True), _scale(chart.y, ends)
    floor = along["domain"][0] if chart.y.log else None
    rows: list[dict[str, Any]] = []
    for name, point in placed:
        said = point.said or f"{name}: {format_number(point.y, 3)} at {format_number(point.x, 3)}"
        rows.append({"s": name, "x": point.x, "y": point.y, "said": said} | _span(point, floor))
    at, up, colour = _across(chart.x, across, grid=False), _up(chart.y, along), _colour(chart.series)
    base, bounded = _data(rows), _data([row for row in rows if "low" in row])
    bend: Any = "step-after" if chart.steps else "linear"
    band = bounded.mark_area(opacity=0.18, interpolate=bend, aria=False)
    if chart.bars:
        band = bounded.mark_rule(strokeWidth=1.2, aria=False)
    layers = [
        band.encode(x=at, y=_up(chart.y, along, "low:Q"), y2="high:Q", color=colour),
        base.mark_line(strokeWidth=1.8, interpolate=bend, aria=False).encode(x=at, y=up, color=colour),
        base.mark_circle(size=26, opacity=1).encode(x=at, y=up, color=colour, description="said:N"),
    ]
    if chart.rule is not None:
        level = _data([{"level": chart.rule}]).mark_rule(strokeDash=[4, 3], color=SOFT, aria=False)
        layers.append(level.encode(y=_up(chart.y, along, "level:Q")))
    return alt.layer(*layers), _make_room(chart.series)


def _make_room(series: Sequence[Series]) -> int:
    """The height of a chart under which a legend has two names in a row."""
    return HEIGHT + 16 * max(0, -(-len(series) // 2) - 2)


def _draw_scatter(chart: Scatter) -> Drawn:
    flat = [point for one in chart.series for point in one.points]
    across, along = (_scale(a, [getattr(p, n) for p in flat]) for a, n in ((chart.x, "x"), (chart.y, "y")))
    at, up, colour = _across(chart.x, across, grid=False), _up(chart.y, along), _colour(chart.series)
    edges = across["domain"][0], along["domain"][0]
    layers = []
    for order, one in enumerate(chart.series):
        rows = [
            {"s": one.name, "x": max(p.x, edges[0]), "y": max(p.y, edges[1]), "said": p.said} | _span(p, None)
            for p in one.points
        ]
        dots = _data(rows).mark_circle(size=MARK if order else DOT, opacity=1.0 if order else 0.55)
        layers.append(dots.encode(x=at, y=up, color=colour, description="said:N"))
        if spans := [row for row in rows if "low" in row]:
            rule = _data(spans).mark_rule(opacity=0.6, aria=False)
            layers.append(rule.encode(x=at, y=_up(chart.y, along, "low:Q"), y2="high:Q", color=colour))
    if chart.line:
        ruled = _data([{"x": x, "y": y} for x, y in chart.line])
        ruled = ruled.mark_line(strokeDash=[4, 3], color=SOFT, strokeWidth=1, aria=False, clip=True)
        layers.append(ruled.encode(x=at, y=up))
    return alt.layer(*layers), _make_room(chart.series)


def _draw_intervals(chart: Intervals) -> Drawn:
    """A row's name stands above it: long ones fit on a phone."""
    rows: list[dict[str, Any]] = []
    for index, row in enumerate(chart.rows):
        low, high = row.interval or (row.value, row.value)
        said = row.said or f"{row.label}: {format_number(row.value, 3)}"
        known = {"at": index, "name": row.label, "x": row.value, "low": low, "high": high, "said": said}
        rows.append(known | {"c": COLOURS[row.colour % len(COLOURS)]})
    scale = _scale(chart.x, [row[name] for row in rows for name in ("x", "low", "high")])
    place = alt.Y("at:O", axis=None, sort=None, scale=alt.Scale(paddingInner=0, paddingOuter=0.1))
    colour = alt.Color("c:N", scale=None, legend=None)
    at, span = (_across(chart.x, scale, field) for field in ("x:Q", "low:Q"))
    base = _data(rows)
    bars = base.mark_rule(strokeWidth=2.2, yOffset=7, y2Offset=7, aria=False)
    names = base.mark_text(align="left", dy=-5, fontSize=10.5, color=INK, limit=WIDTH - 20, aria=False)
    layers = [
        bars.encode(x=span, x2="high:Q", y=place, color=colour),
        base.mark_circle(size=52, opacity=1, yOffset=7).encode(x=at, y=place, color=colour, description="said:N"),
        names.encode(x=alt.value(2), y=place, text="name:N"),
    ]
    return alt.layer(*layers), 60 + 32 * len(rows)


def _draw_cells(chart: Cells) -> Drawn:
    found = [v for row in chart.values for v in row if v is not None and (v > 0 or not chart.log)]
    low, high = chart.ends or ((min(found), max(found)) if found else (0.1, 1.0))
    if not chart.log:
        low = min(low, 0.0)
    high = high if high > low else 10 * low if chart.log else low + 1
    middle = math.sqrt(low * high) if chart.log else (low + high) / 2  # above it a cell is dark
    cells = []
    for i, (name, row) in enumerate(zip(chart.rows, chart.values, strict=True)):
        for j, value in enumerate(row):
            if value is None or (chart.log and value <= 0):
                continue
            column = chart.columns[j]
            said = chart.said(name, column, value) if chart.said else f"{name}, {column}: {format_number(value, 3)}"
            cell = {"r": i, "c": j, "v": value, "said": said}
            if chart.show:
                cell |= {"t": chart.show(value), "ink": "#ffffff" if value > middle else "#111111"}
            cells.append(cell)
    tall = max(7.0, min(30.0 if chart.show else 14.0, 300 / max(1, len(chart.rows))))
    widest = max(map(len, chart.columns), default=1)
    every = 1 if chart.show else max(1, -(-len(chart.columns) * (widest * 6 + 6) // WIDTH))
    at = alt.X("c:O", title=chart.x_label or None, **_name_cells(chart.columns, every))
    place = alt.Y("r:O", title=chart.y_label or None, **_name_cells(chart.rows, max(1, math.ceil(10 / tall))))
    bar = alt.Legend(
        orient="top", direction="horizontal", gradientLength=170, gradientThickness=8, title=chart.measure or None,
        titleFontWeight="normal", labelLimit=60, tickCount=3, **_label_bar(low, high, chart.log),
    )  # fmt: skip
    scale = alt.Scale(type="log" if chart.log else "linear", domain=[low, high], scheme="blues", clamp=True)
    base = _data(cells).encode(x=at, y=place)
    layers = [base.mark_rect().encode(color=alt.Color("v:Q", scale=scale, legend=bar), description="said:N")]
    if chart.show:
        words = base.mark_text(fontSize=10.5, aria=False)
        layers.append(words.encode(text="t:N", color=alt.Color("ink:N", scale=None, legend=None)))
    return alt.layer(*layers).resolve_scale(color="independent"), round(90 + tall * len(chart.rows))


def _label_bar(low: float, high: float, log: bool) -> dict[str, Any]:
    """Labels of a colour bar: powers of ten, or the ends where these hold none."""
    if not log:
        return {"format": "~r"}
    decades = [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    if len(decades) < 2:
        return {"format": ".1e", "values": [low, high]}
    return {"format": "~e", "values": decades[:: -(-len(decades) // 4)]}


def _name_cells(names: Sequence[str], every: int) -> dict[str, Any]:
    axis = alt.Axis(
        values=list(range(0, len(names), every)), labelExpr=f"{json.dumps(list(names))}[datum.value]", ticks=False,
        domain=False, grid=False, labelAngle=0, labelLimit=110,
    )  # fmt: skip
    return {"axis": axis, "scale": alt.Scale(domain=list(range(len(names))), padding=0)}


def _draw_diagram(chart: Diagram) -> Drawn:
    """Coloured boxes are pale, so that their text is read on a dark page too."""
    across, along = alt.Scale(domain=[0, DIAGRAM], nice=False), alt.Scale(domain=[chart.height, 0], nice=False)
    x, y = (alt.X("x:Q", axis=None, scale=across), alt.Y("y:Q", axis=None, scale=along))
    layers = []
    if chart.lines:
        points = [
            {"n": number, "i": at, "x": point[0], "y": point[1]}
            for number, line in enumerate(chart.lines)
            for at, point in enumerate(line)
        ]
        lines = _data(points).mark_line(strokeWidth=1.4, color=SOFT, aria=False)
        layers.append(lines.encode(x=x, y=y, detail="n:N", order="i:Q"))
    boxes = [
        {"x": box.left, "y": box.top, "x2": box.left + box.width, "y2": box.top + box.height, "said": box.said}
        | {"c": SOFT if box.colour is None else COLOURS[box.colour % len(COLOURS)]}
        for box in chart.boxes
    ]
    place = _data(boxes).encode(x=x, y=y, x2="x2:Q", y2="y2:Q")
    colour = alt.Color("c:N", scale=None, legend=None)
    rect = place.mark_rect(fillOpacity=0.3, strokeWidth=0.8)
    layers.append(rect.encode(color=colour, stroke=alt.Stroke("c:N", scale=None, legend=None), description="said:N"))
    for centred in (True, False):
        words = [(w.x, w.y, w.text) for w in chart.words if w.centred == centred]
        if centred:
            words += [(b.left + b.width / 2, b.top + b.height / 2, b.text) for b in chart.boxes if b.text]
        if words:
            text = _data([dict(zip(("x", "y", "t"), word, strict=True)) for word in words])
            text = text.mark_text(align="center" if centred else "left", fontSize=10.5, color=INK, aria=False)
            layers.append(text.encode(x=x, y=y, text="t:N"))
    return alt.layer(*layers), round(chart.height) + 26


_DRAWN: dict[type, Any] = {
    Lines: _draw_lines, Scatter: _draw_scatter, Intervals: _draw_intervals, Cells: _draw_cells, Diagram: _draw_diagram,
}  # fmt: skip
