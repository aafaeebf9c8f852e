"""Figures of drift and patching, as charts on shared axes."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.experiments.drift.record import TENSORS
from jaxkv.experiments.figures import show_panels
from jaxkv.experiments.patching.record import DIRECTIONS
from jaxkv.reporting.charts import Axis, Cells, Intervals, Lines, Point, Row, Series, share_axis
from jaxkv.reporting.document import Block
from jaxkv.reporting.format import format_number

Study = Mapping[str, Any]
Condition = Mapping[str, Any]
LABELS = {"resid_pre": "residual", "k": "K", "v": "V", "attn_out": "attention", "mlp_out": "MLP"}


def _title(condition: Condition) -> str:
    regime = "" if condition["regime"] == "plain" else f", {condition['regime']}"
    return f"{condition['model']} {condition['precision']}{regime}"


def _find(study: Study, experiment: str) -> list[Condition]:
    return [c for c in study["conditions"] if c.get(experiment) and c[experiment]["status"] == "ok"]


def draw_drift(study: Study) -> list[Block]:
    """Drift by layer, as it is and with K/V heads repeated, and heat maps by layer and position of one scale."""
    curves, maps, equal = {}, [], []
    for condition in _find(study, "drift"):
        drift = condition["drift"]
        columns = {LABELS[name]: _column(drift["layers"], name) for name in TENSORS}
        if not any(value for column in columns.values() for value in column):
            equal.append(_title(condition))
            continue
        if drift["repeated"]:
            columns["residual, heads repeated"] = _column(drift["repeated"]["layers"], "resid_pre")
        curves[f"{_title(condition)}: decoded positions"] = [
            Series(name, [Point(n, value) for n, value in enumerate(column)]) for name, column in columns.items()
        ]
        maps += _make_maps(condition)
    axis = share_axis(list(curves.values()), "relative L2", log=True)
    values = [v for _, _, _, rows in maps for row in rows for v in row if v > 0]
    ends = (min(values), max(values)) if values else None
    text = (
        "Relative L2 distance of cached from uncached by layer, mean over decoded positions; residual: the stream "
        "entering a layer; heads repeated: of the same model with its K/V heads repeated into MHA."
    )
    return [
        *show_panels(
            [Lines(title, series, Axis("layer"), axis) for title, series in curves.items()],
            text,
            f"Not drawn, since nothing differs: {'; '.join(equal)}." if equal else "",
        ),
        *show_panels(
            [
                Cells(
                    title, names, columns, rows, log=True, ends=ends, x_label="position in the text, the prompt first",
                    y_label="layer", measure="relative L2",
                    said=lambda row, column, v: f"layer {row}, from position {column}: {format_number(v, 3)}",
                )
                for title, names, columns, rows in maps
            ],
            "The same by layer and position in the text, all on one logarithmic scale.",
        ),
        *_draw_tokens(study),
    ]  # fmt: skip


def _draw_tokens(study: Study) -> list[Block]:
    """Drift of the residual stream in one text of each run, by layer and token."""
    found = [(_title(c), c["drift_tokens"]) for c in _find(study, "drift") if c.get("drift_tokens")]
    values = [v for _, grid in found for row in grid["rows"] for v in row if v > 0]
    charts = [
        Cells(
            f"{title}: problem {grid['problem']}", _name_layers(grid["rows"]),
            [" ".join(text.split())[:10] or "↵" for text in grid["texts"]], grid["rows"], log=True,
            ends=(min(values), max(values)), x_label="token", y_label="layer", measure="relative L2",
            said=lambda row, column, v: f"layer {row}, at ‘{column}’: {format_number(v, 3)}",
        )
        for title, grid in found
    ]  # fmt: skip
    return show_panels(charts, "The residual stream's drift in one text, by layer and decoded token.")


def _name_layers(rows: Sequence[Any]) -> list[str]:
    """The residual stream has a row more than there are layers: what leaves the last."""
    return [*map(str, range(len(rows) - 1)), "out"]


def _column(layers: Mapping[str, Any], tensor: str) -> list[float]:
    found = layers[tensor]["decoded"]
    return [entry["mean"] for entry in found["relative"]] if found else []


def _make_maps(condition: Condition) -> list[tuple[str, list[str], list[str], Any]]:
    """Title, rows, columns and values of a map for each tensor."""
    grid, last = condition.get("drift_grid"), condition["drift"]["num_layers"]
    if not grid:
        return []
    columns = [str(begin) for begin, _ in grid["bins"]]
    names = [str(layer) if layer < last else "out" for layer in range(last + 1)]
    return [
        (f"{_title(condition)}: {LABELS[tensor]}", names[: len(grid[tensor])], columns, grid[tensor])
        for tensor in TENSORS
    ]


def draw_patching(study: Study) -> list[Block]:
    """Share of the gap closed by each patch, by layer, and by layer and position."""
    bars, layers, maps, none = [], {}, [], []
    for condition in _find(study, "patching"):
        for direction in DIRECTIONS:
            found = condition["patching"]["directions"][direction]
            closed = {name: f["closed"] for name, f in found.items() if f and f["closed"]}
            title = f"{_title(condition)}: {direction}"
            if not closed:
                none.append(title)
                continue
            rows = [
                Row(
                    name,
                    max(e["share"], -1.0),
                    e["interval"] and [max(-1.0, end) for end in e["interval"]],
                    _tell(name, e["share"]),
                )
                for name, e in closed.items()
            ]
            bars.append(Intervals(title, rows, Axis("share of the gap closed")))
            by_layer = {name: f["by_layer"] for name, f in found.items() if f and f["by_layer"]}
            if by_layer:
                layers[title] = [Series(name, _list_layers(f)) for name, f in by_layer.items()]
            maps += [_make_map(f"{title}: {name}", f["grid"]) for name, f in found.items() if f and f["grid"]]
    axis = share_axis(list(layers.values()), "share closed")
    text = (
        "Share of the KL between the arms that a patch in all layers takes away, with its interval over problems; "
        "below 0 it moves them further apart (ends at -100 %). 'everything' and 'itself' are the controls."
    )
    return [
        *show_panels(bars, text, f"Not drawn, since there is no gap: {'; '.join(none)}." if none else ""),
        *show_panels(
            [Lines(title, series, Axis("layer"), axis) for title, series in layers.items()],
            "The same for one layer at a time.",
        ),
        *show_panels(
            maps, "The same for one layer at the positions of one part of the text; less than nothing counts as none."
        ),
    ]


def _tell(name: str, share: float) -> str:
    return f"{name}: {format_number(100 * share, 3)} %"


def _list_layers(found: Mapping[str, Any]) -> list[Point]:
    pairs = zip(found["layer"], found["closed"], strict=True)
    return [Point(layer, max(-1.0, entry["share"])) for layer, entry in pairs if entry]


def _make_map(title: str, grid: Mapping[str, Any]) -> Cells:
    rows = [[max(0.0, value) for value in row] for row in grid["closed"]]
    bins = [str(n + 1) for n in range(grid["bins"])]
    return Cells(
        title, [str(layer) for layer in grid["layer"]], bins, rows, ends=(0.0, 1.0), x_label="part of the text",
        y_label="layer", measure="share closed", said=lambda row, column, v: _tell(f"layer {row}, part {column}", v),
    )  # fmt: skip
