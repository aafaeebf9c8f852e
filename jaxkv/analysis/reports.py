"""The report of a run directory, experiment by experiment, from its records alone."""

import pathlib
from typing import Any

from msgspec import to_builtins

from jaxkv import records
from jaxkv.analysis import doctor
from jaxkv.analysis.experiments import EXPERIMENTS
from jaxkv.analysis.gather import Run, read_runs
from jaxkv.analysis.report import write_summary
from jaxkv.errors import UserError
from jaxkv.experiments.doctor.record import DoctorRecord

Shown = tuple[Any, str]  # what a terminal shows, and the name of the file


def _report(path: pathlib.Path, run: Run, name: str) -> Shown:
    if name == "doctor":
        if not (found := run.of(DoctorRecord)):
            raise UserError(f"{path}: the device was not examined to the end; run the same command again")
        record = to_builtins(found[0])
        records.write_atomically(path / "report.md", doctor.to_markdown(record))
        return doctor.render(record), "report.md"
    experiment = EXPERIMENTS[name]
    summary = experiment.summarize(run)
    if name == "divergence":
        write_summary(path, summary)
    records.write_atomically(path / experiment.file, experiment.write(summary, run.run))
    if experiment.page is not None:
        records.write_atomically((path / experiment.file).with_suffix(".html"), experiment.page(summary))
    return experiment.render(summary), experiment.file


def report_run(path: pathlib.Path) -> list[Shown]:
    """Writes the report of every experiment that a run directory has records of; of divergence if it has none yet.

    Raises:
      UserError: not a run directory, corrupt records, or not writable.
    """
    (run,) = read_runs([path])
    there = run.experiments | set(run.run["config"].get("experiments", ()))
    names = [name for name in (*EXPERIMENTS, "doctor") if name in there] or ["divergence"]
    return [_report(path, run, name) for name in names]
