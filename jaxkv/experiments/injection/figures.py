"""Curves of what changed caches do, drawn from the summary alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.experiments.injection.claims import SCOPE
from jaxkv.experiments.record_parts import CLEAN
from jaxkv.reporting.charts import Axis, Lines, Point, Series
from jaxkv.reporting.document import Figure

Summary = Mapping[str, Any]
SERIES = 6  # colours there are
PLAIN = {"kind": "mul", "correlate": "none", "draw": "write", "side": "kv"} | dict.fromkeys(SCOPE)


def name_method(entry: Summary) -> str:
    """The method of a quantized cache: of both sides where they differ."""
    names = [entry["spec"][side]["method"] if entry["spec"][side] else "16 bit" for side in ("k", "v")]
    return names[0] if names[0] == names[1] else f"{names[0]}/{names[1]}"


def _group(entries: Sequence[Summary], name: Any) -> list[tuple[str, list[Summary]]]:
    groups: dict[str, list[Summary]] = {}
    for entry in entries:
        groups.setdefault(name(entry), []).append(entry)
    ranked = list(groups.items())
    rest = [entry for _, members in ranked[SERIES - 1 :] for entry in members]
    return ranked if len(ranked) <= SERIES else [*ranked[: SERIES - 1], ("others", rest)]


def _draw(
    title: str,
    groups: Sequence[tuple[str, Sequence[Summary]]],
    x: tuple[str, Any, bool],
    y: tuple[str, Any, bool],
    interval: Any,
    control: float | None = None,
) -> Lines | None:
    """One panel: a line through each group's points, with their intervals. x and y are (label, value, log)."""
    series = [
        Series(name, [Point(x[1](entry), y[1](entry), interval(entry)) for entry in sorted(members, key=x[1])])
        for name, members in groups
    ]
    kept = [p for one in series for p in one.points if (p.x > 0 or not x[2]) and (p.y > 0 or not y[2])]
    return Lines(title, series, Axis(x[0], x[2]), Axis(y[0], y[2]), bars=True, rule=control) if kept else None


def _is_plain(spec: Summary) -> bool:
    """Whether an error has no mean and no option but its sign's: those differ in law and size alone."""
    return spec["family"] == "error" and not spec["mean"] and all(spec[name] == value for name, value in PLAIN.items())


def draw_injection(summary: Summary) -> list[Figure]:
    """Score and KL against bits of quantized caches, and against the size of injected errors."""
    primary = summary["primary"]
    control = next((c["score"].get(primary) for c in summary["changes"] if c["change"] == CLEAN), None)
    level = control["mean"] if control else None
    usable = [c for c in summary["changes"] if c["spec"] and c["kl"] and c["score"].get(primary)]
    quants = _group([c for c in usable if c["spec"]["family"] == "quant"], name_method)
    errors = _group(
        [c for c in usable if _is_plain(c["spec"])],
        lambda c: c["spec"]["law"] if c["spec"]["sign"] == "any" else f"{c['spec']['law']}, sign kept",
    )
    score = (f"score ({primary})", lambda c: c["score"][primary]["mean"], False)
    kl = ("mean KL, nats", lambda c: c["kl"]["mean"], True)
    bits = ("bits per element, whole cache", lambda c: c["cache"]["bits"], False)
    size = ("standard deviation of e", lambda c: c["spec"]["std"], True)
    figures = []
    for groups, x, what in (
        (quants, bits, "Quantized caches: score and KL against bits per element of the whole cache, windows counted."),
        (
            errors,
            size,
            "Errors of mean 0, put into all of K and V once, one a channel: score and KL against their size.",
        ),
    ):
        panels = [
            _draw("Score", groups, x, score, lambda c: c["score"][primary]["interval"], level),
            _draw("KL(clean to changed)", groups, x, kl, lambda c: c["kl"]["interval"]),
        ]
        drawn = [panel for panel in panels if panel is not None]
        if drawn:
            figures.append(
                Figure(drawn, f"{what} The dashed line is the clean cache's score; bars are 95 % intervals.")
            )
    return figures
