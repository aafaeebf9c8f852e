"""The figures of how far the arms are apart, of several runs at once, as charts on shared axes."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.experiments.parity.record import CACHE_PAIRS, CELLS, FRAMEWORK_PAIRS, name_pair
from jaxkv.experiments.report_parts import base_precision
from jaxkv.reporting.charts import Axis, Cells, Chart, Lines, Point, Scatter, Series, share_axis
from jaxkv.reporting.document import Block, Figure, Fold
from jaxkv.reporting.format import format_number, format_percent

Study = Mapping[str, Any]
Condition = Mapping[str, Any]
PRECISIONS = ("fp16", "bf16", "fp32", "fp64")
SERIES = 6  # colours that a panel has
SHOWN = 3  # panels of a figure; more are folded


def show_panels(charts: Sequence[Chart], caption: str, left_out: str = "") -> list[Block]:
    """A figure of the first panels, and the others behind a line; what is not drawn is said."""
    caption = f"{caption} {left_out}".strip()
    if not charts:
        return [Figure((), caption)] if left_out else []
    blocks: list[Block] = [Figure(charts[:SHOWN], caption)]
    if more := charts[SHOWN:]:
        blocks.append(Fold(f"{len(more)} more panel{'s' * (len(more) > 1)} of this figure", [Figure(more, caption)]))
    return blocks


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
NO_STEP = "Not drawn, since no step differs"
NO_TEXT = "Not drawn, since no sequence parts (bounds in the table)"


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
    return show_panels(charts, caption, f"{without}: {'; '.join(equal)}." if equal else "")


def _draw_margins(panels: Mapping[str, Sequence[Condition]]) -> list[Block]:
    """Margin against perturbation of 16-bit conditions, flips marked."""
    charts, drawn = [], set()
    for title, members in panels.items():
        for condition in members:
            found = condition["curves"]["margins"]
            kind = tuple(condition[part] for part in ("model", "precision", "framework", "regime"))
            points = {name: [_show_margin(entry) for entry in found[name]] for name in ("others", "flips")}
            if base_precision(condition) not in ("fp16", "bf16") or kind in drawn:
                continue
            if not any(p.x for p in points["others"] + points["flips"]):
                continue  # every step has equal bits
            drawn.add(kind)
            every = f", 1 in {found['every']}" if found["every"] > 1 else ""
            flips = points["flips"]
            series = [Series(f"no flip{every}", points["others"], 0), Series(f"flip ({len(flips)})", flips, 1)]
            charts.append((len(points["flips"]), f"{title}, {condition['precision']}", series))
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
    found = [c for c in study["conditions"] if (c.get("parity") or {}).get("status") == "ok"]
    titles = [f"{c['model']} {c['precision']}, {c['sampler']}" for c in found]
    means = [{pair: v["kl"]["mean"] for pair, v in c["parity"]["pairs"].items() if v} for c in found]
    kl = [
        _make_matrix(title, list(CELLS), values, format_number, "mean KL, nats", log=True)
        for title, values in zip(titles, means, strict=True)
    ]
    by_layer = [_list_layers(c["parity"]["layers"]["mean"]) for c in found]
    axis = share_axis(by_layer, "relative distance", log=True)
    layers = [
        Lines(title, [one for one in series if any(p.y for p in one.points)], Axis("layer"), axis)
        for title, series in zip(titles, by_layer, strict=True)
        if any(p.y for one in series for p in one.points)
    ]
    without = f"Not drawn, since no pair parts (bounds below): {'; '.join(same)}." if same else ""
    return [
        *show_panels(
            _share_ends(matrices), "Share of sequences that part, running free, between every pair of cells.", without
        ),
        *show_panels(
            _share_ends(kl),
            "Mean KL in nats between every pair of cells along the same tokens; the row is the reference.",
        ),
        *show_panels(
            layers, "Distance of the residual stream entering each layer, relative to its norm; last: the norm."
        ),
    ]


def _share_ends(panels: Sequence[Cells]) -> list[Cells]:
    """The panels on one scale."""
    values = [v for panel in panels for row in panel.values for v in row if v is not None and (v > 0 or not panel.log)]
    ends = (min(values), max(values)) if values else None
    return [dataclasses.replace(panel, ends=ends) for panel in panels]


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


def _list_layers(means: Mapping[str, Sequence[float]]) -> list[Series]:
    shown = {
        "cache, JAX": means[CACHE_PAIRS["jax"]],
        "cache, torch": means[CACHE_PAIRS["torch"]],
        "framework": means[FRAMEWORK_PAIRS["uncached"]],
    }
    return [
        Series(name, [Point(layer, value) for layer, value in enumerate(column)], colour)
        for colour, (name, column) in enumerate(shown.items())
    ]
