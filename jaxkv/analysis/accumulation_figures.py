"""Curves of what a quantized cache does along a text, drawn from the summary alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.analysis.document import Figure
from jaxkv.analysis.format import format_percent
from jaxkv.analysis.svg import Chart, limits

Summary = Mapping[str, Any]
Point = tuple[float, float, Sequence[float] | None]  # x, y and the interval of y
SERIES = 6  # colours there are
STATIC, DECODE = "static", "decode"
REPAIRED = {"worst": "worst 5 %", "others": "other 95 %", "everything": "all"}


def _middle(place: Mapping[str, Any]) -> float:
    return (place["begin"] + place["end"] - 1) / 2


def _points(places: Sequence[Mapping[str, Any]], figure: Callable[[Any], Any]) -> list[Point]:
    """Of the places that have the figure, a mean or a share with its interval."""
    found = [(_middle(place), figure(place)) for place in places]
    return [(x, entry["mean"] if "mean" in entry else entry["rate"], entry["interval"]) for x, entry in found if entry]


def _draw(
    title: str, series: Mapping[str, Sequence[Point]], x: str, y: str, *, log: bool = False, high: float | None = None
) -> Any:
    """One panel, a line a series with intervals, a little apart so that they can be seen; None without points."""
    kept = {name: [p for p in points if not log or p[1] > 0] for name, points in series.items()}
    flat = [point for points in kept.values() for point in points]
    if not flat:
        return None
    ends = [end for _, value, span in flat for end in (value, *(span or ())) if end > 0 or not log]
    across = min(p[0] for p in flat), max(p[0] for p in flat)
    across = across if across[0] < across[1] else (across[0] - 0.5, across[0] + 0.5)
    up = limits(ends, log)
    if high is not None:
        up = max(0.0, min(ends) - 0.05), high
    said = "; ".join(f"{name}: {len(points)} points" for name, points in kept.items())
    chart = Chart(title, (*across, x, False), (*up, y, log), said, notes=list(kept), keys=True)
    if across[0] < 0 < across[1]:
        chart.rule([(0, up[0]), (0, up[1])])
    step = 0.009 * (across[1] - across[0])
    for index, points in enumerate(kept.values()):
        shift = step * (index - (len(kept) - 1) / 2)
        for at, _, span in points:
            if span is not None:
                chart.interval(at + shift, max(span[0], up[0]), max(span[1], up[0]), index)
        if len(points) > 1:
            chart.line(index, [(at + shift, value) for at, value, _ in points])
        chart.dots(index, [(at + shift, value) for at, value, _ in points], "mark")
    return chart.svg


def _drawn_regimes(summary: Summary) -> list[str]:
    """As many as there are colours."""
    regimes = summary["regimes"]
    return regimes if len(regimes) <= SERIES else [*regimes[: SERIES - 1], regimes[-1]]


def _draw_errors(summary: Summary) -> list[Figure]:
    """Error by position over the whole text and over what is decoded, and what of it accumulates."""
    regimes = _drawn_regimes(summary)
    whole: list[Any] = []
    decoded: list[Any] = []
    extra: list[Any] = []
    for entry in summary["quantizers"]:
        curves = {regime: entry["regimes"][regime]["curve"] for regime in regimes if regime in entry["regimes"]}
        after = {name: [place for place in curve if place["begin"] >= 0] for name, curve in curves.items()}
        error = "relative error"
        for panels, shown in ((whole, curves), (decoded, after)):
            series = {name: _points(curve, lambda place: place["error"]) for name, curve in shown.items()}
            panels.append(_draw(entry["quantizer"], series, "position after the prompt", error))
        fed = {
            f"{name} - static": _points(curve, lambda place: place["extra"])
            for name, curve in after.items()
            if name != STATIC
        }
        extra.append(_draw(entry["quantizer"], fed, "position after the prompt", "difference"))
    text = "Relative L2 error of the attention output by position, mean over layers."
    figures = (
        (whole, f"{text} The prompt lies left of 0."),
        (decoded, "The same over decoded positions."),
        (extra, "What accumulates: the error minus that of `static`, by position, problem by problem."),
    )
    bars = " Bars are 95 % intervals over problems, the series drawn a little apart."
    return [
        Figure(drawn, caption + bars)
        for panels, caption in figures
        if (drawn := [panel for panel in panels if panel is not None])
    ]


def _chunks(entries: Sequence[Summary]) -> list[Sequence[Summary]]:
    return [entries[begin : begin + SERIES] for begin in range(0, len(entries), SERIES)]


def _draw_logits(summary: Summary) -> list[Figure]:
    """KL and agreement of the decoding run by position, all quantizers together."""
    found = [e for e in summary["quantizers"] if DECODE in e["regimes"] and e["regimes"][DECODE]["logits"]]
    panels = []
    for chunk in _chunks(found):
        curves = {entry["quantizer"]: entry["regimes"][DECODE]["logits"]["curve"] for entry in chunk}
        kl = {name: _points(curve, lambda place: place["kl"]) for name, curve in curves.items()}
        same = {name: _points(curve, lambda place: place["agreement"]) for name, curve in curves.items()}
        at = "position after the prompt"
        panels.append(_draw("KL(clean to quantized)", kl, at, "mean KL, nats", log=True))
        panels.append(_draw("Same top token", same, at, "share of steps", high=1.0))
    text = (
        "`decode` beside the clean run along its tokens, by the position of the token a step follows, the prompt's "
        "last at -1. Bars are 95 % intervals over problems. A KL of 0 has no place on the axis."
    )
    drawn = [panel for panel in panels if panel is not None]
    return [Figure(drawn, text)] if drawn else []


def _draw_norms(summary: Summary) -> list[Figure]:
    """Share of norm error by layer, of keys and of values."""
    found = [entry for entry in summary["quantizers"] if STATIC in entry["regimes"]]
    panels = []
    for chunk in _chunks(found):
        for side in ("k", "v"):
            columns = {e["quantizer"]: e["regimes"][STATIC]["stored"][side]["norm_share_by_layer"] for e in chunk}
            series = {
                name: [(layer, share["mean"], share["interval"]) for layer, share in enumerate(shares) if share]
                for name, shares in columns.items()
            }
            panels.append(_draw(f"{side.upper()} in the cache", series, "layer", "norm share, E_M"))
    text = (
        "Share of the squared error of what is packed that is of norms (E_M), not of directions, in `static`, where "
        "the quantizer alone errs. Bars are 95 % intervals over problems."
    )
    drawn = [panel for panel in panels if panel is not None]
    return [Figure(drawn, text)] if drawn else []


def _draw_repairs(summary: Summary) -> list[Figure]:
    """What each repair takes away of the error."""
    panels = []
    for entry in summary["quantizers"]:
        taken = entry["repair"] and {name: e for name in REPAIRED if (e := entry["repair"]["taken"][name])}
        if not taken:
            continue
        ends = [end for e in taken.values() for end in (e["mean"], *(e["interval"] or ()))]
        low, high = max(-1.0, min(*ends, 0.0)), max(*ends, 0.1)
        axis = (0.4, len(taken) + 0.6, "scales repaired", False), (low, high, "share taken away", False)
        chart = Chart(entry["quantizer"], *axis, "Share of the error that a repair takes away", ticks=False)
        for index, (name, e) in enumerate(taken.items(), start=1):
            chart.bar(0, index, 34, max(e["mean"], low), f"{REPAIRED[name]}: {format_percent(e['mean'])} %")
            if e["interval"] is not None:
                chart.interval(index, max(e["interval"][0], low), max(e["interval"][1], low))
            chart.tick(index, REPAIRED[name])
        panels.append(chart.svg)
    text = (
        "Share of the attention output's error at decoded positions, in `static`, that goes when an oracle gives the "
        "worst 5 % of packed tokens, the other 95 %, or all their norms back; below 0 the error grows (bars end at "
        "-1). Intervals are 95 %, over problems."
    )
    return [Figure(panels, text)] if panels else []


def draw_accumulation(summary: Summary) -> list[Figure]:
    """All figures of a run."""
    return [*_draw_errors(summary), *_draw_logits(summary), *_draw_norms(summary), *_draw_repairs(summary)]
