"""Curves of what a quantized cache does along a text, drawn from the summary alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.reporting.charts import Axis, Intervals, Lines, Point, Row, Series
from jaxkv.reporting.document import Figure
from jaxkv.reporting.format import format_percent

Summary = Mapping[str, Any]
SERIES = 6  # colours there are
STATIC, DECODE = "static", "decode"
AFTER = "position after the prompt"
BARS = "Bars are 95 % intervals over problems."
REPAIRED = {"worst": "worst 5 %", "others": "other 95 %", "everything": "all"}


def _middle(place: Mapping[str, Any]) -> float:
    return (place["begin"] + place["end"] - 1) / 2


def _points(places: Sequence[Mapping[str, Any]], figure: Callable[[Any], Any]) -> list[Point]:
    """Of the places that have the figure, a mean or a share with its interval."""
    found = [(_middle(place), figure(place)) for place in places]
    return [Point(x, e["mean"] if "mean" in e else e["rate"], e["interval"]) for x, e in found if e]


def _draw(
    title: str,
    series: Mapping[str, Sequence[Point]],
    x: str,
    y: str,
    *,
    log: bool = False,
    high: float | None = None,
    first: int = 0,
) -> Lines | None:
    """One panel, a line a series with intervals; None without a point that has a place.

    Args:
      title: above.
      series: points of each, in the order of their colours.
      x, y: what the axes have.
      log: of y; points at 0 have no place.
      high: where y ends, for figures that cannot be above.
      first: the first series' colour.
    """
    flat = [point for points in series.values() for point in points]
    if not any(point.y > 0 or not log for point in flat):
        return None
    ends = [end for point in flat for end in (point.y, *(point.interval or ()))]
    axis = Axis(y, log) if high is None else Axis(y, log, max(0.0, min(ends) - 0.05), high)
    kept = [Series(name, points, colour) for colour, (name, points) in enumerate(series.items(), start=first)]
    return Lines(title, kept, Axis(x), axis, bars=True)


def _drawn_regimes(summary: Summary) -> list[str]:
    """As many as there are colours."""
    regimes = summary["regimes"]
    return regimes if len(regimes) <= SERIES else [*regimes[: SERIES - 1], regimes[-1]]


def _draw_errors(summary: Summary) -> list[Figure]:
    """Error by position in the prompt and after it, and what of it accumulates."""
    regimes = _drawn_regimes(summary)
    panels: dict[str, list[Lines | None]] = {"prompt": [], "decoded": [], "extra": []}
    exact = []
    for entry in summary["quantizers"]:
        name = entry["quantizer"]
        curves = {regime: entry["regimes"][regime]["curve"] for regime in regimes if regime in entry["regimes"]}
        for segment in ("prompt", "decoded"):
            series = {
                regime: _points([p for p in curve if (p["begin"] < 0) == (segment == "prompt")], lambda p: p["error"])
                for regime, curve in curves.items()
            }
            if segment == "prompt" and not any(point.y for points in series.values() for point in points):
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
                name: [Point(layer, share["mean"], share["interval"]) for layer, share in enumerate(shares) if share]
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
        rows = [
            Row(
                REPAIRED[name], max(-1.0, e["mean"]), e["interval"] and [max(-1.0, end) for end in e["interval"]],
                f"{REPAIRED[name]}: {format_percent(e['mean'])} %",
            )
            for name, e in taken.items()
        ]  # fmt: skip
        panels.append(Intervals(entry["quantizer"], rows, Axis("share taken away")))
    text = (
        "Share of the attention output's error at decoded positions, in `static`, that goes when an oracle gives the "
        "worst 5 % of packed tokens, the other 95 %, or all their norms back; below 0 the error grows (ends at "
        "-1). Intervals are 95 %, over problems."
    )
    return [Figure(panels, text)] if panels else []


def draw_accumulation(summary: Summary) -> list[Figure]:
    """All figures of a run."""
    return [*_draw_errors(summary), *_draw_logits(summary), *_draw_norms(summary), *_draw_repairs(summary)]
