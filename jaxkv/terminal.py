"""What a terminal shows of finished runs: a sentence first, a table of few lines, the controls in one line."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group

from jaxkv.experiments.divergence.wording import LABELS
from jaxkv.experiments.record_parts import find_headline
from jaxkv.experiments.reports import REPORTS
from jaxkv.overview.claims_layers import diagnose
from jaxkv.overview.first_screen import describe
from jaxkv.overview.gather import describe_condition, name_conditions, read_runs
from jaxkv.reporting.document import Block, Paragraph, Table, to_terminal
from jaxkv.reporting.format import format_count, format_number, format_percent

MOST = 8  # rows of a table


def show_briefly(paths: Sequence[pathlib.Path]) -> Group | None:
    """Runs in few lines of 80 columns; None if they do more than compare the arms. Raises UserError as `read_runs`."""
    runs = read_runs(paths)
    if any(run.run["config"]["experiments"] != ["divergence"] or not run.records for run in runs):
        return None
    conditions = [describe_condition(one) | {"divergence": REPORTS["divergence"].summarize(one)} for one in runs]
    screen = describe(conditions, diagnose({"conditions": conditions}), runs)
    valid = [
        (name, one["divergence"])
        for name, one in zip(name_conditions(conditions), conditions, strict=True)
        if one["divergence"]["status"] == "ok"
    ]
    blocks: list[Block] = [Paragraph(f"{screen.status.value[0].upper()}{screen.status.value[1:]}: {screen.means}")]
    if valid:
        usual = " greedy" if all(name.endswith(" greedy") for name, _ in valid) else ""
        rows = [_make_row(name.removesuffix(usual), summary) for name, summary in valid[:MOST]]
        blocks.append(Table(["run", "texts that part", "tokens that flip", "mean KL", "right*"], rows))
        blocks.append(Paragraph("* answers with the cache / without it"))
    if len(valid) > MOST:
        blocks.append(Paragraph(f"{len(valid) - MOST} more are in the report"))
    blocks += [Paragraph(line) for line in (_say_controls([summary for _, summary in valid]), screen.todo) if line]
    return to_terminal(blocks)


def _make_row(name: str, summary: Mapping[str, Any]) -> list[str]:
    free, forced = summary["free_running"], summary["teacher_forced"]
    right = summary["accuracy"][find_headline(summary["accuracy"])]
    counts = [right[arm]["count"] for arm in ("cached", "uncached")]
    flips = forced["flips"]
    return [
        name,
        format_count(free["diverged"]) if free else "-",
        f"{flips['count']} of {flips['total']}" if not flips["count"] else f"{format_percent(flips['rate'])} %",
        format_number(forced["kl"]["mean"]),
        f"{counts[0]}/{counts[1]} of {summary['problems']['ok']}",
    ]


def _say_controls(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The gate and every control of all runs, in a line: those without a flip together, the others by name."""
    gates = [one["gate"] for one in summaries if one["gate"] and one["gate"].get("passed")]
    said = [f"aligned arms bit-equal in {len(gates)} of {len(summaries)} runs"] if gates else []
    sums = {}
    for name, label in LABELS.items():
        found = [control["flips"] for one in summaries if (control := one["controls"].get(name))]
        if found:
            sums[label] = (sum(f["count"] for f in found), sum(f["total"] for f in found))
    said += [f"{label}: {count} of {total} flip" for label, (count, total) in sums.items() if count]
    if quiet := [total for count, total in sums.values() if not count]:
        said.append(f"{len(quiet)} others: 0 of {sum(quiet)} flip")
    return f"controls: {'; '.join(said)}" if said else ""
