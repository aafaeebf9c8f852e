"""The report of a run directory: all its experiments, from its records alone."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group

from jaxkv import records
from jaxkv.experiments.divergence.report import show_value
from jaxkv.experiments.reports import REPORTS
from jaxkv.overview.gather import read_runs
from jaxkv.overview.study import summarize_run
from jaxkv.reporting.document import Block, Code, Heading, Only, Paragraph, Table, to_html, to_markdown, to_terminal

FILES = ("report.html", "report.md", "summary.json")


def write_files(path: pathlib.Path, title: str, blocks: Sequence[Block], summary: Mapping[str, Any]) -> None:
    """Writes report.html, report.md and summary.json. Raises UserError if the directory cannot be written."""
    text = json.dumps(records.to_plain(summary), allow_nan=False, separators=(",", ":")) + "\n"
    for name, content in zip(FILES, (to_html(title, blocks), to_markdown(title, blocks), text), strict=True):
        records.write_atomically(path / name, content)


def write_run(summary: Mapping[str, Any], run: Mapping[str, Any]) -> list[Block]:
    """A section for each experiment of a run, and where its figures come from.

    Args:
      summary: of `summarize_run`; the experiments in it are shown.
      run: content of run.json.
    """
    names, alone = [name for name in REPORTS if name in summary], {"conditions": [summary], "parity": ()}
    blocks: list[Block] = []
    for name in names:
        title = Heading(REPORTS[name].title, name=name)
        blocks.append(title if len(names) > 1 else Only("page", [title]))
        blocks += [*REPORTS[name].write(summary[name]), *REPORTS[name].draw(alone)]
    return [*blocks, Only("page", _write_provenance(run))]


def _write_provenance(run: Mapping[str, Any]) -> list[Block]:
    session = run["sessions"][-1] if run["sessions"] else {}
    tables = [
        [[name, show_value(value)] for name, value in sorted(records.flatten(values).items())]
        for values in (session, run["config"])
    ]
    return [
        Heading("Provenance", name="provenance"),
        Paragraph("Replay or finish the run, RUN being its directory:"),
        Code("python -m jaxkv.launch --flagfile=RUN/run.flags\npython -m jaxkv.report RUN"),
        Paragraph(f"Configuration fingerprint: `{run['fingerprint']}`."),
        Table(["what", "value"], tables[0], f"Last of {len(run['sessions'])} session(s)"),
        Table(["key", "value"], tables[1], "Configuration"),
    ]


def report_run(path: str | os.PathLike[str]) -> Group:
    """Writes the report of every experiment that a run directory has records of; of divergence if it has none yet.

    Returns:
      What a terminal shows of it.

    Raises:
      UserError: not a run directory, corrupt records, or not writable.
    """
    (run,) = read_runs([path])
    there = run.experiments | set(run.run["config"].get("experiments", ()))
    summary = summarize_run(run, there & set(REPORTS) or {"divergence"})
    blocks = write_run(summary, run.run)
    title = ", ".join(str(summary[name]) for name in ("model", "precision", "device") if summary[name])
    write_files(pathlib.Path(path), title or "Report", blocks, summary)
    return to_terminal(blocks)
