"""Curves of what a quantized cache does along a text, drawn from the summary alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.reporting.document import Figure
from jaxkv.reporting.format import format_percent
from jaxkv.reporting.svg import Chart, limits

Summary = Mapping[str, Any]
Point = tuple[float, float, Sequence[float] | None]  # x, y and the interval of y
SERIES = 6  # colours there are
STATIC, DECODE = "static", "decode"
AFTER = "position after the prompt"
BARS = "Bars are 95 % intervals over problems, the series drawn a little apart."
REPAIRED = {"worst": "worst 5 %", "others": "other 95 %", "everything": "all"}


def _middle(place: Mapping[str, Any]) -> float:
    return (place["begin"] + place["end"] - 1) / 2


def _points(places: Sequence[Mapping[str, Any]], figure: Callable[[Any], Any]) -> list[Point]:
    """Of the places that have the figure, a mean or a share with its interval."""
    found = [(_middle(place), figure(place)) for place in places]
    return [(x, entry["mean"] if "mean" in entry else entry["rate"], entry["interval"]) for x, entry in found if entry]


def _draw(
    title: str,
    series: Mapping[str, Sequence[Point]],
    x: str,
    y: str,
    *,
    log: bool = False,
    high: float | None = None,
    first: int = 0,
) -> Any:
    """One panel, a line a series with intervals, a little apart so that they can be seen; None without points.

    Args:
      title: above.
      series: points of each, in the order of their colours.
      x, y: what the axes have.
      log: of y; points at 0 have no place.
      high: where y ends, for figures that cannot be above.
      first: the first series' colour.
    """
    kept = {name: [p for p in points if not log or p[1] > 0] for name, points in series.items()}
    flat = [point for points in kept.values() for point in points]
    if not flat:
        return None
    ends = [y for _, value, interval in flat for y in (value, *(interval or ())) if y > 0 or not log]
    begin, end = min(p[0] for p in flat), max(p[0] for p in flat)
    span = end - begin or 1.0
    across = begin - 0.04 * span, end + 0.04 * span
    up = limits(ends, log)
    if high is not None:
        up = max(0.0, min(ends) - 0.05), high
    said = "; ".join(f"{name}: {len(points)} points" for name, points in kept.items())
    colours = range(first, first + len(kept))
    chart = Chart(title, (*across, x, False), (*up, y, log), said, notes=list(kept), keys=colours)
    for index, (colour, points) in enumerate(zip(colours, kept.values(), strict=True)):
        shift = 0.009 * span * (index - (len(kept) - 1) / 2)
        for at, _, interval in points:
            if interval is not None:
                chart.interval(at + shift, max(interval[0], up[0]), max(interval[1], up[0]), colour)
        if len(points) > 1:
            chart.line(colour, [(at + shift, value) for at, value, _ in points])
        chart.dots(colour, [(at + shift, value) for at, value, _ in points], "mark")
    return chart.svg


def _drawn_regimes(summary: Summary) -> list[str]:
    """As many as there are colours."""
    regimes = summary["regimes"]
    return regimes if len(regimes) <= SERIES else [*regimes[: SERIES - 1], regimes[-1]]


def _draw_errors(summary: Summary) -> list[Figure]:
    """Error by position in the prompt and after it, and what of it accumulates."""
    regimes = _drawn_regimes(summary)
    panels: dict[str, list[Any]] = {"prompt": [], "decoded": [], "extra": []}
    exact = []
    for entry in summary["quantizers"]:
        name = entry["quantizer"]
        curves = {regime: entry["regimes"][regime]["curve"] for regime in regimes if regime in entry["regimes"]}
        for segment in ("prompt", "decoded"):
            series = {
                regime: _points([p for p in curve if (p["begin"] < 0) == (segment == "prompt")], lambda p: p["error"])
                for regime, curve in curves.items()
            }
            if segment == "prompt" and not any(value for points in series.values() for _, value, _ in points):
                exact.append(f"`{name}`")
            else:
                panels[segment].append(_draw(name, series, AFTER, "relative error"))
        fed = {
            f"{regime} - static": _points([p for p in curve if p["begin"] >= 0], lambda p: p["extra"])
            for regime, curve in curves.items()
            if regime != STATIC
        }
        panels["extra"].append(_draw(name, fed, AFTER, "difference", first=int(STATIC in curves)))
    without = f" Not drawn, since nothing differs in the prompt: {', '.join(exact)}." if exact else ""
    texts = {
        "decoded": f"Relative error of the attention output after the prompt, mean over layers. {BARS}",
        "extra": f"What accumulates: the error minus that of `static`, problem by problem. {BARS}",
        "prompt": f"Relative error of the attention output in the prompt, counted back from its end.{without} {BARS}",
    }
    drawn = {name: [panel for panel in panels[name] if panel is not None] for name in texts}
    return [Figure(drawn[name], text) for name, text in texts.items() if drawn[name]]


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
        panels.append(_draw("KL(clean to quantized)", kl, AFTER, "mean KL, nats", log=True))
        panels.append(_draw("Same top token", same, AFTER, "share of steps", high=1.0))
    text = (
        "`decode` beside the clean run along its tokens, by the position of the token a step follows, the prompt's "
        f"last at -1. A KL of 0 has no place on the axis, and an interval that reaches 0 ends on it. {BARS}"
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
        f"the quantizer alone errs. {BARS}"
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
