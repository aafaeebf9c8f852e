"""A sweep: conditions one after the other, each in its run directory, and an overview of them.

A condition that fails does not stop the others. The same command goes on where a sweep stopped, and tries again what
failed. The overview is replaced in one step whenever a condition begins or ends; at the end there is a report of all.
"""

import contextlib
import dataclasses
import gc
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence

import msgspec
from rich.console import Console

from jaxkv import stopping
from jaxkv.condition import name_condition, run_path
from jaxkv.errors import UserError, describe_memory
from jaxkv.files import read_json
from jaxkv.options import Options
from jaxkv.overview.page import write_study
from jaxkv.records import fingerprint, refuse_foreign, write_atomically
from jaxkv.reporting.document import Paragraph, Table, to_markdown, to_terminal
from jaxkv.study import run_study
from jaxkv.terminal import show_briefly
from jaxkv.writing import Busy, is_locked, new_directories, take_lock

WAITING, RUNNING, ELSEWHERE, DONE, FAILED = "waiting", "running", "running elsewhere", "done", "failed"
STATUSES = (WAITING, RUNNING, ELSEWHERE, DONE, FAILED)
TRACEBACK = "traceback.txt"
OVERVIEW, SWEEP_LOCK = "overview.json", "sweep.lock"
_COLUMNS = ["condition", "experiments", "status", "records", "seconds", "run"]


@dataclasses.dataclass
class Entry:
    """A condition in the overview."""

    name: str  # what tells it from the others
    experiments: list[str]
    run: str  # its directory, relative to the sweep's where it lies there
    status: str = WAITING  # one of STATUSES
    records: int = 0  # on disk
    seconds: float | None = None  # wall time of this process's work on it
    fault: str | None = None  # why it failed, in one line
    mendable: bool | None = None  # by the user; otherwise the run directory has a traceback


class _Overview(msgspec.Struct):
    conditions: list[Entry]


def sweep_path(conditions: Sequence[Options], out: str | None) -> pathlib.Path:
    """The sweep's directory: --out, or a name with a hash of its conditions."""
    if out:
        return pathlib.Path(out).expanduser()
    return pathlib.Path("runs") / f"sweep-{fingerprint({'runs': [run_path(one) for one in conditions]})[:8]}"


def run_sweep(conditions: Sequence[Options], out: str | None) -> int:
    """Runs all conditions and prints the overview; `out` is the sweep's directory, if the user named one.

    Returns 0, 2 if only mistakes of the user made conditions fail, else 1. Raises UserError if the directory cannot be
    written, holds files that are not ours, or another process has it.
    """
    directory = sweep_path(conditions, out)
    with new_directories(directory):
        refuse_foreign(directory, "sweep's directory", OVERVIEW, "run.json")
        with take_lock(directory, SWEEP_LOCK):
            for leftover in directory.glob("overview.*.tmp"):
                leftover.unlink(missing_ok=True)
            return _run_all(conditions, directory)


def _run_all(conditions: Sequence[Options], directory: pathlib.Path) -> int:
    names = [name_condition(one) for one in conditions]
    alike = len(set(names)) < len(names)  # of several flagfiles
    work = []
    for name, one in zip(names, conditions, strict=True):
        path = run_path(one)
        run = str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)
        work.append((Entry(run if alike else name, list(one.run.experiments), run), one, path))
    entries = [entry for entry, _, _ in work]
    others = _read_others(directory, entries)

    def show() -> None:
        for entry, _, path in work:
            entry.records = _count_records(path)
        write_overview(directory, [*entries, *others])

    def stop() -> None:
        for entry in entries:  # it may have been interrupted anywhere
            entry.status = WAITING if entry.status == RUNNING else entry.status
        show()

    with stopping.at_end(stop), contextlib.ExitStack() as last:
        last.callback(stop)
        for entry, one, path in (*work, *work):
            if entry.status in (WAITING, ELSEWHERE):  # the second time is for those that another process had
                entry.status = RUNNING
                show()
                _run_condition(entry, one, path)
    shown = Console(file=sys.stdout)
    runs = [path for entry, _, path in work if entry.records and (path / "run.json").exists()]
    finished = all(entry.status == DONE for entry in [*entries, *others]) and not conditions[0].output.verbose
    brief = show_briefly(runs) if runs and finished else None
    shown.print(brief or to_terminal([_make_table([*entries, *others], brief=True)]))
    shown.print(f"overview: {directory / 'overview.md'}", highlight=False, soft_wrap=True)
    if runs:
        write_study(runs, directory)
        shown.print(f"report: {directory / 'report.html'}", highlight=False, soft_wrap=True)
    return _tell_faults(entries)


def _tell_faults(entries: Sequence[Entry]) -> int:
    """Names what failed, a fault of several conditions once. Returns the exit code."""
    failed = [entry for entry in entries if entry.fault is not None]
    for fault in dict.fromkeys(entry.fault for entry in failed):
        told = ", ".join(entry.name for entry in failed if entry.fault == fault)
        print(f"error: {told}: {fault}", file=sys.stderr)
    return 0 if not failed else 2 if all(entry.mendable for entry in failed) else 1


def _read_others(directory: pathlib.Path, entries: Sequence[Entry]) -> list[Entry]:
    """What an earlier overview says of conditions that are not of this command, as far as it is still true."""
    path = directory / OVERVIEW
    if not path.exists():
        return []
    runs = {entry.run for entry in entries}
    others = [entry for entry in read_json(path, _Overview, "delete it").conditions if entry.run not in runs]
    for entry in others:
        if entry.status in (RUNNING, ELSEWHERE):
            entry.status = ELSEWHERE if is_locked(directory / entry.run) else WAITING
    return [entry for entry in others if (directory / entry.run).exists()]


def _run_condition(entry: Entry, options: Options, path: pathlib.Path) -> None:
    """Runs one condition and notes how it ended."""
    begin = time.monotonic()
    print(f"{entry.name}: {', '.join(entry.experiments)}", file=sys.stderr)
    try:
        run_study(options, alone=False)
        entry.status, entry.fault, entry.mendable = DONE, None, None
        (path / TRACEBACK).unlink(missing_ok=True)
    except UserError as error:
        entry.status = ELSEWHERE if isinstance(error, Busy) else FAILED
        entry.fault, entry.mendable = str(error), True
    except Exception as error:
        if stopping.stopped():
            raise
        message = describe_memory(error) or " ".join(f"{type(error).__name__}: {error}".split())[:300]
        entry.status, entry.fault, entry.mendable = FAILED, f"{message} (see {path / TRACEBACK})", False
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / TRACEBACK, traceback.format_exc())
    entry.seconds = round(time.monotonic() - begin, 1)
    gc.collect()  # programs and weights lie in cycles, and the next condition needs their memory


def _count_records(path: pathlib.Path) -> int:
    try:
        return (path / "samples.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def write_overview(directory: pathlib.Path, entries: Sequence[Entry]) -> None:
    """Writes overview.json and overview.md. Raises UserError if the directory cannot be written."""
    counts = {status: sum(entry.status == status for entry in entries) for status in STATUSES}
    values = {"counts": counts, "conditions": [dataclasses.asdict(entry) for entry in entries]}
    write_atomically(directory / OVERVIEW, json.dumps(values, indent=2) + "\n")
    said = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
    table = _make_table(entries, brief=False)
    write_atomically(directory / "overview.md", to_markdown("Overview", [Paragraph(f"{said}."), table]))


def _make_table(entries: Sequence[Entry], brief: bool) -> Table:
    """The overview; in brief for a terminal, where what failed is told apart from it, in full."""
    rows = []
    for entry in entries:
        seconds = "" if entry.seconds is None else f"{entry.seconds:.0f}"
        status = entry.status if brief or entry.fault is None else f"{entry.status}: {entry.fault}"
        rows.append([entry.name, ", ".join(entry.experiments), status, str(entry.records), seconds, entry.run])
    columns = _COLUMNS[:-1] if brief else _COLUMNS
    return Table(columns, [row[: len(columns)] for row in rows])
