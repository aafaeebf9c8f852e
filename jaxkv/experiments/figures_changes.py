"""Figures of changed caches and of quantized ones along a text, drawn from a summary alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.experiments.accumulation.summary import DECODE, STATIC
from jaxkv.experiments.injection.claims import SCOPE
from jaxkv.experiments.record_parts import CLEAN
from jaxkv.reporting.charts import Axis, Intervals, Lines, Point, Row, Series
from jaxkv.reporting.document import Figure
from jaxkv.reporting.format import format_percent

Summary = Mapping[str, Any]
SERIES = 6  # colours there are
PLAIN = {"kind": "mul", "correlate": "none", "draw": "write", "side": "kv"} | dict.fromkeys(SCOPE)
AFTER = "position after the prompt"
BARS = "Bars are 95 % intervals over problems."
REPAIRED = {"worst": "worst 5 %", "others": "other 95 %", "everything": "all"}


def _show(panels: Sequence[Lines | Intervals], text: str) -> list[Figure]:
    """A figure of the panels in which a point has a place; none without one."""
    drawn = [panel for panel in panels if isinstance(panel, Intervals) or panel.placed()]
    return [Figure(drawn, text)] if drawn else []


def name_method(entry: Summary) -> str:
    """The method of a quantized cache: of both sides where they differ."""
    names = [entry["spec"][side]["method"] if entry["spec"][side] else "16 bit" for side in ("k", "v")]
    return names[0] if names[0] == names[1] else f"{names[0]}/{names[1]}"


def _name_law(entry: Summary) -> str:
    spec = entry["spec"]
    return str(spec["law"]) if spec["sign"] == "any" else f"{spec['law']}, sign kept"


def _is_plain(spec: Summary) -> bool:
    """Whether an error has no mean and no option but its sign's: those differ in law and size alone."""
    return spec["family"] == "error" and not spec["mean"] and all(spec[name] == value for name, value in PLAIN.items())


def _group(entries: Sequence[Summary], name: Callable[[Summary], str]) -> dict[str, list[Summary]]:
    """Entries by name, no more groups than there are colours."""
    groups: dict[str, list[Summary]] = {}
    for entry in entries:
        groups.setdefault(name(entry), []).append(entry)
    if len(groups) > SERIES:
        rest = [groups.pop(name) for name in list(groups)[SERIES - 1 :]]
        groups["others"] = [entry for members in rest for entry in members]
    return groups


def draw_injection(summary: Summary) -> list[Figure]:
    """Score and KL against bits of quantized caches, and against the size of injected errors."""
    primary = summary["primary"]
    control = next((c["score"].get(primary) for c in summary["changes"] if c["change"] == CLEAN), None)
    usable = [c for c in summary["changes"] if c["spec"] and c["kl"] and c["score"].get(primary)]

    def draw(groups: Mapping[str, list[Summary]], x: Axis, key: Callable[[Summary], float], text: str) -> list[Figure]:
        def panel(title: str, y: Axis, find: Callable[[Summary], Summary], rule: float | None = None) -> Lines:
            series = [
                Series(name, [Point(key(c), find(c)["mean"], find(c)["interval"]) for c in sorted(members, key=key)])
                for name, members in groups.items()
            ]
            return Lines(title, series, x, y, bars=True, rule=rule)

        panels = [
            panel("Score", Axis(f"score ({primary})"), lambda c: c["score"][primary], control and control["mean"]),
            panel("KL(clean to changed)", Axis("mean KL, nats", log=True), lambda c: c["kl"]),
        ]
        return _show(panels, f"{text} The dashed line is the clean cache's score; bars are 95 % intervals.")

    return [
        *draw(
            _group([c for c in usable if c["spec"]["family"] == "quant"], name_method),
            Axis("bits per element, whole cache"),
            lambda c: c["cache"]["bits"],
            "Quantized caches: score and KL against bits per element of the whole cache, windows counted.",
        ),
        *draw(
            _group([c for c in usable if _is_plain(c["spec"])], _name_law),
            Axis("standard deviation of e", log=True),
            lambda c: c["spec"]["std"],
            "Errors of mean 0, put into all of K and V once, one a channel: score and KL against their size.",
        ),
    ]


def _points(places: Sequence[Summary], figure: str) -> list[Point]:
    """Of the places that have the figure, a mean or a share with its interval."""
    found = [((place["begin"] + place["end"] - 1) / 2, place[figure]) for place in places]
    return [Point(x, e["mean"] if "mean" in e else e["rate"], e["interval"]) for x, e in found if e]


def _lines(title: str, series: Mapping[str, Sequence[Point]], x: str, y: Axis, first: int = 0) -> Lines:
    """A line a series with its intervals, in the page's colours from the `first` on."""
    lines = [Series(name, points, colour) for colour, (name, points) in enumerate(series.items(), start=first)]
    return Lines(title, lines, Axis(x), y, bars=True)


def _draw_errors(summary: Summary) -> list[Figure]:
    """Error by position in the prompt and after it, and what of it accumulates."""
    regimes = summary["regimes"]
    if len(regimes) > SERIES:
        regimes = [*regimes[: SERIES - 1], regimes[-1]]
    panels: dict[str, list[Lines]] = {"prompt": [], "decoded": [], "extra": []}
    exact = []
    for entry in summary["quantizers"]:
        name = entry["quantizer"]
        curves = {regime: entry["regimes"][regime]["curve"] for regime in regimes if regime in entry["regimes"]}
        prompt = {regime: _points([p for p in curve if p["begin"] < 0], "error") for regime, curve in curves.items()}
        after = {regime: [p for p in curve if p["begin"] >= 0] for regime, curve in curves.items()}
        decoded = {regime: _points(places, "error") for regime, places in after.items()}
        fed = {f"{regime} - static": _points(places, "extra") for regime, places in after.items() if regime != STATIC}
        panels["decoded"].append(_lines(name, decoded, AFTER, Axis("relative error")))
        panels["extra"].append(_lines(name, fed, AFTER, Axis("difference"), first=int(STATIC in curves)))
        if any(point.y for points in prompt.values() for point in points):
            panels["prompt"].append(_lines(name, prompt, AFTER, Axis("relative error")))
        else:
            exact.append(f"`{name}`")
    without = f" Not drawn, since nothing differs in the prompt: {', '.join(exact)}." if exact else ""
    texts = {
        "decoded": "Relative error of the attention output after the prompt, mean over layers.",
        "extra": "What accumulates: the error minus that of `static`, problem by problem.",
        "prompt": f"Relative error of the attention output in the prompt, counted back from its end.{without}",
    }
    return [figure for name, text in texts.items() for figure in _show(panels[name], f"{text} {BARS}")]


def _chunks(entries: Sequence[Summary]) -> list[Sequence[Summary]]:
    return [entries[begin : begin + SERIES] for begin in range(0, len(entries), SERIES)]


def _draw_logits(summary: Summary) -> list[Figure]:
    """KL and agreement of the decoding run by position, all quantizers together."""
    found = [e for e in summary["quantizers"] if DECODE in e["regimes"] and e["regimes"][DECODE]["logits"]]
    panels = []
    for chunk in _chunks(found):
        curves = {entry["quantizer"]: entry["regimes"][DECODE]["logits"]["curve"] for entry in chunk}
        kl, same = ({name: _points(c, figure) for name, c in curves.items()} for figure in ("kl", "agreement"))
        ends = [end for points in same.values() for p in points for end in (p.y, *(p.interval or ()))]
        share = Axis("share of steps", low=max(0.0, min(ends, default=1.0) - 0.05), high=1.0)
        panels.append(_lines("KL(clean to quantized)", kl, AFTER, Axis("mean KL, nats", log=True)))
        panels.append(_lines("Same top token", same, AFTER, share))
    text = (
        "`decode` beside the clean run along its tokens, by the position of the token a step follows, the prompt's "
        f"last at -1. A KL of 0 has no place on the axis, and an interval that reaches 0 ends on it. {BARS}"
    )
    return _show(panels, text)


def _draw_norms(summary: Summary) -> list[Figure]:
    """Share of norm error by layer, of keys and of values."""
    panels = []
    for chunk in _chunks([entry for entry in summary["quantizers"] if STATIC in entry["regimes"]]):
        for side in ("k", "v"):
            columns = {e["quantizer"]: e["regimes"][STATIC]["stored"][side]["norm_share_by_layer"] for e in chunk}
            series = {
                name: [Point(layer, share["mean"], share["interval"]) for layer, share in enumerate(shares) if share]
                for name, shares in columns.items()
            }
            panels.append(_lines(f"{side.upper()} in the cache", series, "layer", Axis("norm share, E_M")))
    text = (
        "Share of the squared error of what is packed that is of norms (E_M), not of directions, in `static`, where "
        f"the quantizer alone errs. {BARS}"
    )
    return _show(panels, text)


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
    return _show(panels, text)


def draw_accumulation(summary: Summary) -> list[Figure]:
    """All figures of a run."""
    return [*_draw_errors(summary), *_draw_logits(summary), *_draw_norms(summary), *_draw_repairs(summary)]
