"""All runs at a glance: the share of sequences that part, a forest plot."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.experiments.figures import find_colour, place
from jaxkv.overview.policy import name_condition
from jaxkv.reporting.charts import Axis, Intervals, Row
from jaxkv.reporting.document import Block, Figure
from jaxkv.reporting.format import format_percent

Study = Mapping[str, Any]
Condition = Mapping[str, Any]


def draw_forest(study: Study) -> list[Block]:
    """The share of sequences that part, of each run with its interval, a panel a model."""
    panels: dict[str, list[Condition]] = defaultdict(list)
    once = {c["fingerprint"] or c["name"]: c for c in study["conditions"]}  # a run that was repeated is one row
    for condition in once.values():
        found = condition.get("divergence")
        if found and found["status"] == "ok" and found["free_running"]:
            panels[condition["model"] or condition["name"]].append(condition)
    batches = {c["batch_size"] for members in panels.values() for c in members}
    without = ("model", "batch_size") if len(batches) < 2 else ("model",)
    values = {title: [_show_row(c, without) for c in _order(members)] for title, members in panels.items()}
    high = max((end for rows in values.values() for row in rows for end in row.interval or ()), default=1.0)
    axis = Axis("share of sequences that part", low=0.0, high=min(1.0, 1.05 * high))
    charts = [Intervals(title, rows, axis) for title, rows in values.items()]
    caption = (
        "The share of sequences that part, running free, with its exact 95 % interval. Each row is named by its whole "
        "policy: precision with its overrides, sampler, framework, regime."
    )
    return [Figure(charts, caption)] if charts else []


def _order(members: Sequence[Condition]) -> list[Condition]:
    """By precision, sampler, framework and regime."""
    return sorted(members, key=lambda c: (place(c)[0], c["precision"], c["sampler"] or "", c["framework"], c["regime"]))


def _show_row(condition: Condition, without: Sequence[str]) -> Row:
    share = condition["divergence"]["free_running"]["diverged"]
    name = name_condition(condition, without)
    low, high = map(format_percent, share["interval"])
    said = f"{name}: {share['count']} of {share['total']} part, {format_percent(share['rate'])} % [{low}, {high}]"
    return Row(name, share["rate"], share["interval"], said, find_colour(condition))
