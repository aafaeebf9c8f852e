"""A run's summary as a table for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from jaxkv.analysis.cause import describe_distance, read_distance
from jaxkv.analysis.format import format_cell, format_count, format_number, format_percent, format_points, format_share
from jaxkv.analysis.wording import (
    Summary,
    describe_divergence,
    describe_gate,
    describe_invalid,
    describe_missing,
    describe_sampling,
    list_comparisons,
)


def _add_row(table: Table, *cells: str) -> None:
    """Adds cells as plain text: rich would take ``[nan, nan]`` for markup."""
    table.add_row(*(Text(cell) for cell in cells))


def render_table(summary: Summary) -> Table:
    """Renders the summary for a terminal of 80 columns or more."""
    problems = summary["problems"]
    outer = Table.grid()
    outer.add_column(overflow="fold")
    sampling = "; ".join(describe_sampling(s) for s in summary["sampling"])
    _add_row(outer, f"{problems['ok']} of {problems['total']} problems valid; {sampling or 'no samples'}")
    _add_row(outer, f"gate {describe_gate(summary['gate'])}")
    if missing := describe_missing(summary):
        _add_row(outer, missing)
    if problems["invalid"]:
        _add_row(outer, f"INVALID, counted nowhere below: {describe_invalid(summary)}")
    if summary["status"] != "ok":
        _add_row(outer, "no valid sample, so nothing is said about agreement")
        return outer

    table = _make_table("teacher-forced", "argmax flips")
    for name in ("with flip", "mean KL", "max |diff|", "bit-equal"):
        table.add_column(name, justify="right")
    for label, c in list_comparisons(summary):
        equal = f"{format_percent(c['bit_equal']['rate'])} %"
        kl, worst = format_number(c["kl"]["mean"]), format_number(c["max_abs"]["max"])
        _add_row(table, label, format_share(c["flips"]), format_count(c["sequences_with_flip"]), kl, worst, equal)
    outer.add_row(table)
    if (distance := read_distance(summary)) is not None:
        _add_row(outer, f"distance to float64: {describe_distance(distance)}")
    elif summary["truth_left_out"]:
        _add_row(outer, "distance to float64: not run, since it does not fit into memory")
    if free := summary["free_running"]:
        _add_row(outer, f"free-running sequences that diverge: {describe_divergence(free)}")

    scores = _make_table("right, %")
    for name in ("cached", "uncached", "difference", "McNemar p", "labels"):
        scores.add_column(name, justify="right", no_wrap=True)
    for scorer, a in summary["accuracy"].items():
        p = format_number(a["mcnemar_p"])
        _add_row(
            scores,
            scorer,
            format_cell(a["cached"]),
            format_cell(a["uncached"]),
            format_points(a["difference"]),
            p,
            _changes(a),
        )
    outer.add_row(scores)
    _add_row(outer, "with flip: sequences. KL in nats. labels: changed answers (+ by extraction only).")
    return outer


def _make_table(*left: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for name in left:
        table.add_column(name)
    return table


def _changes(accuracy: Mapping[str, Any]) -> str:
    changes = accuracy["label_changes"]
    extraction = f" (+{changes['extraction_only']})" if changes["extraction_only"] else ""
    return f"{changes['answer_changed']}{extraction}"
