"""The figures of several runs at once, as charts on shared axes: how far the arms are apart, and where."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.experiments.drift.record import TENSORS
from jaxkv.experiments.parity.record import CACHE_PAIRS, CELLS, FRAMEWORK_PAIRS, name_pair
from jaxkv.experiments.patching.record import DIRECTIONS
from jaxkv.experiments.report_parts import base_precision
from jaxkv.reporting.charts import Axis, Cells, Chart, Intervals, Lines, Point, Row, Scatter, Series, share_axis
from jaxkv.reporting.document import Block, Figure, Fold
from jaxkv.reporting.format import format_number, format_percent

Study = Mapping[str, Any]
Condition = Mapping[str, Any]
PRECISIONS = ("fp16", "bf16", "fp32", "fp64")
SERIES = 6  # colours that a panel has
SHOWN = 3  # panels of a figure; more are folded


def show_panels(charts: Sequence[Chart], caption: str, left_out: Sequence[str] = (), why: str = "") -> list[Block]:
    """A figure of the first panels, and the others behind a line; what is not drawn is said, and why."""
    caption = f"{caption} Not drawn, since {why}: {'; '.join(left_out)}." if left_out else caption
    if not charts:
        return [Figure((), caption)] if left_out else []
    blocks: list[Block] = [Figure(charts[:SHOWN], caption)]
    if more := charts[SHOWN:]:
        blocks.append(Fold(f"{len(more)} more panel{'s' * (len(more) > 1)} of this figure", [Figure(more, caption)]))
    return blocks


def find_valid(study: Study, experiment: str) -> list[Condition]:
    """Conditions that have valid samples of an experiment."""
    return [c for c in study["conditions"] if c.get(experiment) and c[experiment]["status"] == "ok"]


def share_ends(panels: Sequence[Cells]) -> list[Cells]:
    """The panels on one scale."""
    values = [v for panel in panels for row in panel.values for v in row if v is not None and (v > 0 or not panel.log)]
    ends = (min(values), max(values)) if values else None
    return [dataclasses.replace(panel, ends=ends) for panel in panels]


def place(condition: Condition) -> tuple[int, str]:
    base = base_precision(condition)
    return PRECISIONS.index(base) if base in PRECISIONS else len(PRECISIONS), condition["name"]


def group_panels(study: Study) -> dict[str, list[Condition]]:
    """Conditions with curves by panel: model, sampler, framework, regime; precisions are its series.

    Batch sizes have panels of their own where there are several, the larger first, since they ask more problems.
    """
    panels: dict[str, list[Condition]] = defaultdict(list)
    drawn = [c for c in study["conditions"] if c.get("curves") and c["curves"]["kl"]]
    several = len({c["batch_size"] for c in drawn}) > 1
    for condition in sorted(drawn, key=lambda c: -(c["batch_size"] or 0)):
        parts = [condition["model"] or condition["name"], condition["sampler"]]
        parts += [part for part in (condition["framework"], condition["regime"]) if part not in ("jax", "plain")]
        parts += [f"batch {condition['batch_size']}"] if several and condition["batch_size"] else []
        members = panels[", ".join(filter(None, parts))]
        if condition["fingerprint"] not in [other["fingerprint"] for other in members]:  # a repeat adds nothing
            members.append(condition)
    return {title: sorted(members, key=place)[:SERIES] for title, members in panels.items()}


def _name_series(condition: Condition, members: Sequence[Condition]) -> str:
    """The precision, and the directory where that is not enough."""
    names = [c["precision"] for c in members]
    return condition["name"] if names.count(condition["precision"]) > 1 else condition["precision"] or condition["name"]


def find_colour(condition: Condition, members: Sequence[Condition] = ()) -> int:
    """One colour a precision in all panels; another where a panel has two of one."""
    own = base_precision(condition)
    same = [c for c in members if base_precision(c) == own] or [condition]
    place = PRECISIONS.index(own) if own in PRECISIONS else 3
    return place if condition is same[0] else 3 + list(members).index(condition) % 3


def draw_divergence(study: Study) -> list[Block]:
    """Where the arms part: by step, by token, and margin against perturbation."""
    panels = group_panels(study)
    return [
        *_draw_curves(panels, _kl, Axis("step"), "mean KL, nats", log=True, caption=BY_STEP, without=NO_STEP),
        *_draw_curves(panels, _parted, Axis("token"), "share parted", steps=True, caption=BY_TOKEN, without=NO_TEXT),
        *_draw_margins(panels),
    ]


BY_STEP = (
    "KL(uncached to cached) by step, teacher-forced: means over sequences in bins of steps, with their 95 % bands. "
    "Steps without any difference have no place on the axis."
)
BY_TOKEN = "Running free: the share of sequences whose two arms have parted by a token, with its exact 95 % band."
NO_STEP, NO_TEXT = "no step differs", "no sequence parts (bounds in the table)"


def _kl(condition: Condition) -> list[Point]:
    return [Point(b["step"], b["mean"], b["interval"] if b["mean"] else None) for b in condition["curves"]["kl"]]


def _parted(condition: Condition) -> list[Point]:
    return [Point(token, share, tuple(ends)) for token, share, *ends in condition["curves"]["diverged"]]


def _draw_curves(
    panels: Mapping[str, Sequence[Condition]],
    make: Callable[[Condition], list[Point]],
    x: Axis,
    y: str,
    *,
    caption: str,
    without: str,
    log: bool = False,
    steps: bool = False,
) -> list[Block]:
    """A panel of each group in which something differs, all on one axis."""
    drawn, equal = {}, []
    for title, members in panels.items():
        found = [Series(_name_series(c, members), make(c), find_colour(c, members)) for c in members]
        kept = [one for one in found if any(point.y for point in one.points)]
        still = [one.name for one in found if one not in kept]
        equal += [f"{title}{f' {chr(44).join(still)}' if kept else ''}"] if still else []
        if kept:
            drawn[title] = kept
    axis = share_axis(list(drawn.values()), y, log)
    charts = [Lines(title, series, x, axis, steps=steps) for title, series in drawn.items()]
    return show_panels(charts, caption, equal, without)


def _draw_margins(panels: Mapping[str, Sequence[Condition]]) -> list[Block]:
    """Margin against perturbation of 16-bit conditions, flips marked."""
    charts, drawn = [], set()
    for title, members in panels.items():
        for condition in members:
            found = condition["curves"]["margins"]
            kind = tuple(condition[part] for part in ("model", "precision", "framework", "regime"))
            others, flips = ([_show_margin(entry) for entry in found[name]] for name in ("others", "flips"))
            differs = any(p.x for p in [*others, *flips])  # else every step has equal bits
            if base_precision(condition) not in ("fp16", "bf16") or kind in drawn or not differs:
                continue
            drawn.add(kind)
            every = f", 1 in {found['every']}" if found["every"] > 1 else ""
            series = [Series(f"no flip{every}", others, 0), Series(f"flip ({len(flips)})", flips, 1)]
            charts.append((len(flips), f"{title}, {condition['precision']}", series))
    flat = [p for _, _, series in charts for one in series for p in one.points]
    if not flat:
        return []
    moved = share_axis([[Series("", [Point(0, p.x) for p in flat])]], "largest logit difference", True)
    margin = share_axis([[Series("", flat)]], "margin", True)
    ends = max(moved.low or 0, (margin.low or 0) / 2), min(moved.high or 1, (margin.high or 1) / 2)
    line = [(end, 2 * end) for end in ends] if ends[0] < ends[1] else []
    order = sorted(charts, key=lambda chart: -chart[0])
    return show_panels(
        [Scatter(title, series, moved, margin, line) for _, title, series in order],
        "Margin of the uncached arm (top logit minus second) against the largest logit difference, one dot a step. "
        "Below the dashed line (margin = twice the difference) a flip is possible; above it, it is not. Exact ties "
        "lie on the floor, steps without a difference on the left edge. One condition of each model and precision.",
    )


def _show_margin(entry: Sequence[float]) -> Point:
    moved, margin, problem, step = entry
    size = f"margin {format_number(margin, 3)}, difference {format_number(moved, 3)}"
    return Point(moved, margin, None, f"problem {problem:.0f}, step {step:.0f}: {size}")


def name_group(group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """Model, precision and sampler of a group of cells, and its batch size where there are several."""
    several = len({g["batch_size"] for g in groups}) > 1 and group["batch_size"]
    batch = f", batch {group['batch_size']}" if several else ""
    return f"{group['model']} {group['precision']}, {group['sampler']}{batch}"


PARTED = "Share of sequences that part, running free, between every pair of cells."
KL = "Mean KL in nats between every pair of cells along the same tokens; the row is the reference."
LAYERS = "Distance of the residual stream entering each layer, relative to its norm; last: the norm."


def draw_parity(study: Study) -> list[Block]:
    """Matrices of cells: sequences that part, KL, and the residual stream by layer."""
    matrices, same = [], []
    for group in study["parity"]:
        shares = {pair: found["diverged"]["rate"] for pair, found in group["pairs"].items()}
        title = name_group(group, study["parity"])
        if any(shares.values()):
            cells = list(group["cells"])
            matrices.append(_make_matrix(title, cells, shares, lambda v: f"{format_percent(v)} %", "share parted"))
        else:
            same.append(f"{title} ({group['problems']} problems)")
    kl, by_layer = [], []
    for c in find_valid(study, "parity"):
        title = f"{c['model']} {c['precision']}, {c['sampler']}"
        means = {pair: v["kl"]["mean"] for pair, v in c["parity"]["pairs"].items() if v}
        kl.append(_make_matrix(title, list(CELLS), means, format_number, "mean KL, nats", log=True))
        by_layer.append((title, _list_distances(c["parity"]["layers"]["mean"])))
    axis = share_axis([series for _, series in by_layer], "relative distance", log=True)
    layers = [
        Lines(title, [one for one in series if any(p.y for p in one.points)], Axis("layer"), axis)
        for title, series in by_layer
        if any(p.y for one in series for p in one.points)
    ]
    return [
        *show_panels(share_ends(matrices), PARTED, same, "no pair parts (bounds below)"),
        *show_panels(share_ends(kl), KL),
        *show_panels(layers, LAYERS),
    ]


def _make_matrix(
    title: str,
    cells: Sequence[str],
    pairs: Mapping[str, float],
    show: Callable[[float], str],
    measure: str,
    log: bool = False,
) -> Cells:
    values = [[pairs.get(name_pair(a, b), pairs.get(name_pair(b, a))) for b in cells] for a in cells]
    short = [cell.replace("uncached", "−").replace("cached", "+") for cell in cells]
    return Cells(
        title, list(cells), short, values, show=show, log=log, x_label="+ cached, − uncached", measure=measure,
        said=lambda a, b, value: f"{a} to {b.replace('−', 'uncached').replace('+', 'cached')}: {show(value)}",
    )  # fmt: skip


def _list_distances(means: Mapping[str, Sequence[float]]) -> list[Series]:
    shown = {
        "cache, JAX": means[CACHE_PAIRS["jax"]],
        "cache, torch": means[CACHE_PAIRS["torch"]],
        "framework": means[FRAMEWORK_PAIRS["uncached"]],
    }
    return [
        Series(name, [Point(layer, value) for layer, value in enumerate(column)], colour)
        for colour, (name, column) in enumerate(shown.items())
    ]


LABELS = {"resid_pre": "residual", "k": "K", "v": "V", "attn_out": "attention", "mlp_out": "MLP"}


def _title(condition: Condition) -> str:
    regime = "" if condition["regime"] == "plain" else f", {condition['regime']}"
    return f"{condition['model']} {condition['precision']}{regime}"


def draw_drift(study: Study) -> list[Block]:
    """Drift by layer, as it is and with K/V heads repeated, and heat maps by layer and position of one scale."""
    curves, maps, equal = {}, [], []
    for condition in find_valid(study, "drift"):
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
        maps += _map_positions(condition)
    axis = share_axis(list(curves.values()), "relative L2", log=True)
    charts = [Lines(title, series, Axis("layer"), axis) for title, series in curves.items()]
    tokens = [_map_tokens(c) for c in find_valid(study, "drift") if c.get("drift_tokens")]
    text = (
        "Relative L2 distance of cached from uncached by layer, mean over decoded positions; residual: the stream "
        "entering a layer; heads repeated: of the same model with its K/V heads repeated into MHA."
    )
    return [
        *show_panels(charts, text, equal, "nothing differs"),
        *show_panels(share_ends(maps), "The same by layer and position in the text, all on one logarithmic scale."),
        *show_panels(share_ends(tokens), "The residual stream's drift in one text, by layer and decoded token."),
    ]


def _make_map(title: str, columns: list[str], rows: Sequence[Sequence[float]], layers: int, x: str, at: str) -> Cells:
    """Drift by layer and column; the residual stream has a row more than there are layers: what leaves the last."""
    names = [*map(str, range(layers)), "out"][: len(rows)]
    return Cells(
        title, names, columns, rows, log=True, x_label=x, y_label="layer", measure="relative L2",
        said=lambda row, column, v: f"layer {row}, {at.format(column)}: {format_number(v, 3)}",
    )  # fmt: skip


def _map_positions(condition: Condition) -> list[Cells]:
    """A map for each tensor."""
    if not (grid := condition.get("drift_grid")):
        return []
    columns, layers = [str(begin) for begin, _ in grid["bins"]], condition["drift"]["num_layers"]
    x, at = "position in the text, the prompt first", "from position {}"
    return [_make_map(f"{_title(condition)}: {LABELS[n]}", columns, grid[n], layers, x, at) for n in TENSORS]


def _map_tokens(condition: Condition) -> Cells:
    """The residual stream in one text."""
    grid = condition["drift_tokens"]
    columns = [" ".join(text.split())[:10] or "↵" for text in grid["texts"]]
    title = f"{_title(condition)}: problem {grid['problem']}"
    return _make_map(title, columns, grid["rows"], len(grid["rows"]) - 1, "token", "at ‘{}’")


def _column(layers: Mapping[str, Any], tensor: str) -> list[float]:
    found = layers[tensor]["decoded"]
    return [entry["mean"] for entry in found["relative"]] if found else []


def draw_patching(study: Study) -> list[Block]:
    """Share of the gap closed by each patch, by layer, and by layer and position."""
    bars, layers, maps, none = [], {}, [], []
    for condition in find_valid(study, "patching"):
        for direction in DIRECTIONS:
            found = condition["patching"]["directions"][direction]
            closed = {name: f["closed"] for name, f in found.items() if f and f["closed"]}
            title = f"{_title(condition)}: {direction}"
            if not closed:
                none.append(title)
                continue
            rows = [_make_row(name, entry) for name, entry in closed.items()]
            bars.append(Intervals(title, rows, Axis("share of the gap closed")))
            by_layer = {name: f["by_layer"] for name, f in found.items() if f and f["by_layer"]}
            if by_layer:
                layers[title] = [Series(name, _list_layers(f)) for name, f in by_layer.items()]
            maps += [_map_parts(f"{title}: {name}", f["grid"]) for name, f in found.items() if f and f["grid"]]
    axis = share_axis(list(layers.values()), "share closed")
    text = (
        "Share of the KL between the arms that a patch in all layers takes away, with its interval over problems; "
        "below 0 it moves them further apart (ends at -100 %). 'everything' and 'itself' are the controls."
    )
    return [
        *show_panels(bars, text, none, "there is no gap"),
        *show_panels(
            [Lines(title, series, Axis("layer"), axis) for title, series in layers.items()],
            "The same for one layer at a time.",
        ),
        *show_panels(
            maps, "The same for one layer at the positions of one part of the text; less than nothing counts as none."
        ),
    ]


def _make_row(name: str, entry: Mapping[str, Any]) -> Row:
    interval = entry["interval"] and [max(-1.0, end) for end in entry["interval"]]
    return Row(name, max(entry["share"], -1.0), interval, _tell(name, entry["share"]))


def _tell(name: str, share: float) -> str:
    return f"{name}: {format_number(100 * share, 3)} %"


def _list_layers(found: Mapping[str, Any]) -> list[Point]:
    pairs = zip(found["layer"], found["closed"], strict=True)
    return [Point(layer, max(-1.0, entry["share"])) for layer, entry in pairs if entry]


def _map_parts(title: str, grid: Mapping[str, Any]) -> Cells:
    rows = [[max(0.0, value) for value in row] for row in grid["closed"]]
    bins = [str(n + 1) for n in range(grid["bins"])]
    return Cells(
        title, [str(layer) for layer in grid["layer"]], bins, rows, ends=(0.0, 1.0), x_label="part of the text",
        y_label="layer", measure="share closed", said=lambda row, column, v: _tell(f"layer {row}, part {column}", v),
    )  # fmt: skip
