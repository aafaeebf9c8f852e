"""A sweep: conditions one after the other, each in its run directory, and an overview of them.

A condition that fails does not stop the others; it is named at the end. The same command goes on where a sweep stopped:
what is recorded is not run again, and what failed is tried again. The sweep's directory holds `overview.json` and
`overview.md`, replaced in one step whenever a condition begins or ends.
"""

import dataclasses
import gc
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxkv.cli import describe_memory
from jaxkv.condition import Settings, name_condition, run_path
from jaxkv.errors import UserError
from jaxkv.records import fingerprint, write_atomically
from jaxkv.study import check_writable, run_study

WAITING, RUNNING, DONE, FAILED = STATUSES = ("waiting", "running", "done", "failed")
TRACEBACK = "traceback.txt"


@dataclasses.dataclass
class Entry:
    """A condition in the overview.

    Attributes:
      name: what tells it from the others.
      experiments: what it runs.
      run: its run directory, relative to the sweep's where it lies there.
      status: one of STATUSES.
      records: how many are on disk.
      seconds: wall time of this process's work on it.
      fault: why it failed, in one line.
      mendable: whether the fault is the user's to mend; otherwise the run directory has a traceback.
    """

    name: str
    experiments: list[str]
    run: str
    status: str = WAITING
    records: int = 0
    seconds: float | None = None
    fault: str | None = None
    mendable: bool | None = None


def sweep_path(conditions: Sequence[Settings], out: str | None) -> pathlib.Path:
    """The sweep's directory: --out, or a name with a hash of its conditions."""
    if out:
        return pathlib.Path(out).expanduser()
    return pathlib.Path("runs") / f"sweep-{fingerprint({'runs': [run_path(one) for one in conditions]})[:8]}"


def run_sweep(conditions: Sequence[Settings], out: str | None) -> int:
    """Runs all conditions and prints the overview.

    Args:
      conditions: settings of each.
      out: the sweep's directory, if the user named one.

    Returns:
      Exit code: 0, 2 if only mistakes of the user made conditions fail, else 1.

    Raises:
      UserError: the sweep's directory cannot be written.
    """
    directory = sweep_path(conditions, out)
    check_writable(directory)
    paths = [run_path(one) for one in conditions]
    names = [name_condition(one) for one in conditions]
    alike = len(set(names)) < len(names)  # of several flagfiles
    entries = [
        _begin(None if alike else name, one, path, directory)
        for name, one, path in zip(names, conditions, paths, strict=True)
    ]
    for entry, one, path in zip(entries, conditions, paths, strict=True):
        entry.status, entry.records = RUNNING, _count_records(path)
        write_overview(directory, entries)
        try:
            _run_condition(entry, one, path)
        finally:
            entry.records = _count_records(path)
            write_overview(directory, entries)
    shown = Console(file=sys.stdout)
    shown.print(render_overview(entries))
    shown.print(f"overview: {directory / 'overview.md'}", highlight=False, soft_wrap=True)
    failed = [entry for entry in entries if entry.status == FAILED]
    for entry in failed:
        print(f"error: {entry.name}: {entry.fault}", file=sys.stderr)
    return 0 if not failed else 2 if all(entry.mendable for entry in failed) else 1


def _begin(name: str | None, settings: Settings, path: pathlib.Path, directory: pathlib.Path) -> Entry:
    run = str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)
    return Entry(name or run, settings["experiments"], run, records=_count_records(path))


def _run_condition(entry: Entry, settings: Settings, path: pathlib.Path) -> None:
    """Runs one condition and notes how it ended."""
    begin = time.monotonic()
    print(f"{entry.name}: {', '.join(entry.experiments)}", file=sys.stderr)
    try:
        run_study(settings)
        entry.status = DONE
        (path / TRACEBACK).unlink(missing_ok=True)
    except UserError as error:
        entry.status, entry.fault, entry.mendable = FAILED, str(error), True
    except Exception as error:
        message = describe_memory(error) or " ".join(f"{type(error).__name__}: {error}".split())[:300]
        entry.status, entry.fault, entry.mendable = FAILED, f"{message} (see {path / TRACEBACK})", False
        write_atomically(path / TRACEBACK, traceback.format_exc())
    except KeyboardInterrupt:
        entry.status = WAITING
        raise
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
    write_atomically(directory / "overview.json", json.dumps(values, indent=2) + "\n")
    lines = ["# Overview", "", ", ".join(f"{n} {status}" for status, n in counts.items() if n) + ".", ""]
    rows = [_HEADER, ["---"] * len(_HEADER), *map(_cells, entries)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    write_atomically(directory / "overview.md", "\n".join(lines) + "\n")


_HEADER = ["condition", "experiments", "status", "records", "seconds", "run"]


def _cells(entry: Entry) -> list[str]:
    seconds = "" if entry.seconds is None else f"{entry.seconds:.0f}"
    status = entry.status if entry.fault is None else f"{entry.status}: {entry.fault}"
    return [entry.name, ", ".join(entry.experiments), status, str(entry.records), seconds, entry.run]


def render_overview(entries: Sequence[Entry]) -> Table:
    """The overview as a table for a terminal; what failed is told apart from it, in full."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for name in ("condition", "experiments", "status"):
        table.add_column(name, overflow="fold")
    for name in ("records", "seconds"):
        table.add_column(name, justify="right")
    styles = {DONE: "green", FAILED: "bold red"}
    for entry in entries:
        name, experiments, _, records, seconds, _ = _cells(entry)
        status = Text(entry.status, style=styles.get(entry.status, ""))
        table.add_row(Text(name), Text(experiments), status, records, seconds)
    return table
