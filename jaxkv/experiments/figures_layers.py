"""Figures of drift and patching, drawn from a study's summary alone."""

from collections.abc import Mapping
from typing import Any

from jaxkv.experiments.drift.record import TENSORS
from jaxkv.experiments.patching.record import DIRECTIONS
from jaxkv.reporting.document import Figure
from jaxkv.reporting.format import format_number
from jaxkv.reporting.svg import Chart, draw_cells, limits

Study = Mapping[str, Any]
Condition = Mapping[str, Any]
LABELS = {"resid_pre": "residual", "k": "K", "v": "V", "attn_out": "attention", "mlp_out": "MLP"}


def _title(condition: Condition) -> str:
    regime = "" if condition["regime"] == "plain" else f", {condition['regime']}"
    return f"{condition['model']} {condition['precision']}{regime}"


def _find(study: Study, experiment: str) -> list[Condition]:
    return [c for c in study["conditions"] if c.get(experiment) and c[experiment]["status"] == "ok"]


def draw_drift(study: Study) -> list[Figure]:
    """Drift by layer, as it is and with K/V heads repeated, and heat maps by layer and position."""
    curves, maps, equal = [], [], []
    for condition in _find(study, "drift"):
        drift = condition["drift"]
        columns = {name: _column(drift["layers"], name) for name in TENSORS}
        if not any(value for column in columns.values() for value in column):
            equal.append(_title(condition))
            continue
        repeated = _column(drift["repeated"]["layers"], "resid_pre") if drift["repeated"] else []
        low, high = limits([v for column in (*columns.values(), repeated) for v in column], log=True)
        ends = (0, drift["num_layers"], "layer", False), (low, high, "relative L2", True)
        chart = Chart(f"{_title(condition)}: decoded positions", *ends, "Drift by layer")
        for series, (name, column) in enumerate(columns.items()):
            chart.legend(series, LABELS[name])
            chart.line(series, [(n, value) for n, value in enumerate(column) if value > 0])
        if repeated:
            chart.rule([(n, value) for n, value in enumerate(repeated) if value > 0])
        curves.append(chart.svg)
        maps += _draw_maps(condition)
    text = "Relative L2 distance of cached from uncached by layer, mean over decoded positions; residual: the stream "
    text += "entering a layer. Dashed: the residual stream of the same model with K/V heads repeated into MHA."
    if equal:
        text += f" Not drawn, since nothing differs: {'; '.join(equal)}."
    by_place = "The same by layer and position in the text (prompt first), on a logarithmic scale of its own each."
    return [Figure(d, t) for d, t in ((curves, text), (maps, by_place)) if d or (equal and t is text)]


def _column(layers: Mapping[str, Any], tensor: str) -> list[float]:
    found = layers[tensor]["decoded"]
    return [entry["mean"] for entry in found["relative"]] if found else []


def _draw_maps(condition: Condition) -> list[Any]:
    grid = condition.get("drift_grid")
    if not grid:
        return []
    columns = [str(begin) for begin, _ in grid["bins"]]
    maps = []
    for tensor in TENSORS:
        rows, last = grid[tensor], condition["drift"]["num_layers"]
        names = [str(layer) if layer < last else "out" for layer in range(len(rows))]
        title = f"{_title(condition)}: {LABELS[tensor]}"
        maps.append(draw_cells(title, names, columns, rows, format_number, log=True, x_label="position"))
    return maps


def draw_patching(study: Study) -> list[Figure]:
    """Share of the gap closed by each patch, by layer, and by layer and position."""
    bars, layers, maps, none = [], [], [], []
    for condition in _find(study, "patching"):
        for direction in DIRECTIONS:
            found = condition["patching"]["directions"][direction]
            closed = {name: f["closed"] for name, f in found.items() if f and f["closed"]}
            title = f"{_title(condition)}: {direction}"
            if not closed:
                none.append(title)
                continue
            bars.append(_draw_bars(title, closed))
            by_layer = {name: f["by_layer"] for name, f in found.items() if f and f["by_layer"]}
            if by_layer:
                layers.append(_draw_layers(title, by_layer))
            for name, f in found.items():
                if f and f["grid"]:
                    rows = [[max(0.0, value) for value in row] for row in f["grid"]["closed"]]
                    label = [str(layer) for layer in f["grid"]["layer"]]
                    bins = [str(n + 1) for n in range(f["grid"]["bins"])]
                    maps.append(
                        draw_cells(f"{title}: {name}", label, bins, rows, _percent, x_label="quarter of the text")
                    )
    text = "Share of the KL between the arms that a patch in all layers takes away, with its interval over problems; "
    text += "below 0 it moves them further apart (bars end at -100 %). 'everything' and 'itself' are the controls."
    if none:
        text += f" Not drawn, since there is no gap: {'; '.join(none)}."
    drawn = (
        (bars, text),
        (layers, "The same for one layer at a time."),
        (maps, "The same for one layer at the positions of one part of the text; nothing and less are white."),
    )
    return [Figure(d, t) for d, t in drawn if d or (none and t is text)]


def _percent(value: float) -> str:
    return f"{format_number(100 * value, 3)} %"


def _draw_bars(title: str, closed: Mapping[str, Mapping[str, Any]]) -> Any:
    """Bars are numbered, with their names below: they are too long for the axis of a phone."""
    low = -1.0 if any(entry["share"] < 0 for entry in closed.values()) else 0.0
    count = len(closed)
    axis = (0.4, count + 0.6, "patch", False), (low, 1.0, "share closed", False)
    notes = [f"{index} {name}" for index, name in enumerate(closed, start=1)]
    chart = Chart(title, *axis, "Share of the gap closed", notes, ticks=False)
    for index, (name, entry) in enumerate(closed.items(), start=1):
        chart.bar(0, index, 18, max(entry["share"], low), f"{name}: {_percent(entry['share'])}")
        if entry["interval"] is not None:
            chart.interval(index, *entry["interval"])
        chart.tick(index, str(index))
    return chart.svg


def _draw_layers(title: str, by_layer: Mapping[str, Mapping[str, Any]]) -> Any:
    points = {
        name: [(layer, entry["share"]) for layer, entry in zip(f["layer"], f["closed"], strict=True) if entry]
        for name, f in by_layer.items()
    }
    values = [share for column in points.values() for _, share in column]
    low, high = max(-1.0, min(*values, 0.0)), max(*values, 0.1)
    last = max(layer for column in points.values() for layer, _ in column)
    axes = (0, last, "layer", False), (low, high, "share closed", False)
    chart = Chart(title, *axes, "By layer", list(points), keys=True)
    for series, column in enumerate(points.values()):
        chart.line(series, column)
    return chart.svg
