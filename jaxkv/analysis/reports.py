"""The report of a run directory, experiment by experiment, from its records alone."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxkv import records
from jaxkv.analysis import attribution, doctor, document, drift, mitigations, parity, patching, report
from jaxkv.analysis.page_parity import write_forced_parity
from jaxkv.errors import UserError

Shown = tuple[Any, str]  # what a terminal shows, and the name of the file


def _write(path: pathlib.Path, name: str, text: str, shown: Any) -> Shown:
    records.write_atomically(path / name, text)
    return shown, name


def _report_divergence(path: pathlib.Path, run: Mapping[str, Any], samples: Sequence[Mapping]) -> Shown:
    del run, samples
    return report.render_table(report.write_report(path)), "report.md"


def _report_attribution(path: pathlib.Path, run: Mapping[str, Any], samples: Sequence[Mapping]) -> Shown:
    summary = attribution.summarize_attribution(samples, run)
    return _write(path, "attribution.md", attribution.to_markdown(summary), attribution.render_attribution(summary))


def _report_mitigations(path: pathlib.Path, run: Mapping[str, Any], samples: Sequence[Mapping]) -> Shown:
    timings, _ = records.read_lines(path / "timing.jsonl")
    summary = mitigations.summarize_mitigations(samples, timings, run)
    return _write(path, "mitigations.md", mitigations.to_markdown(summary), mitigations.render(summary))


def _report_drift(path: pathlib.Path, run: Mapping[str, Any], samples: Sequence[Mapping]) -> Shown:
    summary = drift.summarize_drift(samples, run)
    return _write(path, "drift.md", drift.to_markdown(summary), drift.render_drift(summary))


def _report_patching(path: pathlib.Path, run: Mapping[str, Any], samples: Sequence[Mapping]) -> Shown:
    summary = patching.summarize_patching(samples, run)
    return _write(path, "patching.md", patching.to_markdown(summary), patching.render_patching(summary))


def _report_parity(path: pathlib.Path, run: Mapping[str, Any], samples: Sequence[Mapping]) -> Shown:
    blocks = write_forced_parity(
        "Four cells along the tokens of JAX's cached arm", parity.summarize_parity(samples, run)
    )
    return _write(path, "parity.md", document.to_markdown("Parity", blocks), _render(blocks))


def _render(blocks: Sequence[document.Block]) -> Group:
    """Sentences and tables for a terminal."""
    shown: list[Any] = []
    for block in blocks:
        if isinstance(block, document.Bullets):
            shown += [Text(line) for line in block.items]
        elif isinstance(block, document.Heading | document.Paragraph):
            shown.append(Text(block.text))
        elif isinstance(block, document.Fold):
            shown.append(_render(block.blocks))
        elif isinstance(block, document.Table):
            table = Table(*block.header, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
            for row in block.rows:
                table.add_row(*(Text(str(cell)) for cell in row))
            shown.append(table)
    return Group(*shown)


def _report_doctor(path: pathlib.Path, run: Mapping[str, Any], samples: Sequence[Mapping]) -> Shown:
    del run
    record = next(r for r in samples if r.get("experiment") == "doctor")
    records.VALIDATORS["doctor"](record)
    return _write(path, "report.md", doctor.to_markdown(record), doctor.render(record))


REPORTS: dict[str, Callable[[pathlib.Path, Mapping[str, Any], Sequence[Mapping]], Shown]] = {
    "divergence": _report_divergence,
    "attribution": _report_attribution,
    "mitigations": _report_mitigations,
    "drift": _report_drift,
    "patching": _report_patching,
    "parity": _report_parity,
    "doctor": _report_doctor,
}


def report_run(path: pathlib.Path) -> list[Shown]:
    """Writes the report of every experiment that a run directory has records of; of divergence if it has none yet.

    Raises:
      UserError: not a run directory, corrupt records, or not writable.
    """
    run, samples = records.read_run(path)
    there = {record.get("experiment") for record in samples} | set(run["config"].get("experiments", ()))
    names = [name for name in REPORTS if name in there] or ["divergence"]
    try:
        return [REPORTS[name](path, run, samples) for name in names]
    except ValueError as error:
        raise UserError(f"{path / 'samples.jsonl'}: {error}; was it written by another version?") from error
