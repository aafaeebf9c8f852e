"""`python -m jaxkv.report RUN...`: reports from the records of runs alone; needs no jax.

One run directory gets its tables rebuilt: report.md and summary.json, and a file for each other experiment it has.
Several, or a directory that holds several (a sweep), are one study: report.html, report.md and summary.json, with the
claims judged, go to --out. Runs that differ in their changes of the cache alone are joined.
"""

from jaxkv import stopping

if __name__ == "__main__":
    stopping.watch()

import argparse
import pathlib
import sys
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxkv.analysis.gather import find_runs
from jaxkv.analysis.page import write_study
from jaxkv.analysis.page_changes import changes_alone, list_statements
from jaxkv.analysis.reports import report_run
from jaxkv.errors import UserError
from jaxkv.files import read_json
from jaxkv.writing import new_directories

STUDY_FILES = ("report.html", "report.md", "summary.json")


def _make_table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=name in ("verdict", "runs"))
    return table


def render_claims(study: dict[str, Any]) -> Group:
    """The verdicts for a terminal: of the claims, and of the statements on changed caches by number of runs."""
    tables = []
    if not changes_alone(study):
        claims = _make_table("", "claim", "verdict", "figure")
        for claim in study["claims"]:
            figure = "\n".join(claim["figure"][:3]) + ("\n..." if len(claim["figure"]) > 3 else "")
            claims.add_row(*(Text(cell) for cell in (claim["id"], claim["claim"], claim["verdict"], figure)))
        tables.append(claims)
    if found := list_statements(study):
        statements = _make_table("", "statement", "runs")
        for text, _, runs in found:
            number, _, statement = text.partition(": ")
            total = sum(map(len, runs.values()))
            said = "\n".join(f"{verdict}: {len(names)} of {total}" for verdict, names in runs.items())
            statements.add_row(*(Text(cell) for cell in (number, statement, said)))
        tables.append(statements)
    return Group(*tables)


def _check_out(out: pathlib.Path) -> None:
    """Raises UserError if a study's report would overwrite files that are none."""
    there = [name for name in STUDY_FILES if (out / name).exists()]
    if there and not _is_study(out / "summary.json") and not (out / "run.json").exists():
        raise UserError(f"{out / there[0]} is not of a report of ours; choose another --out, or move it")


def _is_study(path: pathlib.Path) -> bool:
    try:
        return read_json(path, dict[str, Any]).get("experiment") == "study"
    except UserError:
        return False


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxkv.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run directory, or one that holds run directories")
    parser.add_argument(
        "--out", metavar="DIR", help="where a study's report goes; the one directory given, or study-report if not set"
    )
    options = parser.parse_args(arguments)
    console = Console()
    try:
        found = find_runs(options.run)
        if len(found) == 1 and options.out is None and (pathlib.Path(options.run[0]) / "run.json").exists():
            for shown, name in report_run(found[0]):
                console.print(shown)
                console.print(f"{found[0] / name}", highlight=False, soft_wrap=True)
            return 0
        out = pathlib.Path(options.out or (options.run[0] if len(options.run) == 1 else "study-report"))
        _check_out(out)
        with new_directories(out):
            console.print(render_claims(write_study(options.run, out)))
        for name in STUDY_FILES:
            console.print(f"{out / name}", highlight=False, soft_wrap=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
