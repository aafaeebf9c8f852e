"""`python -m jaxkv.report RUN...`: reports from the records of runs alone; needs no jax.

One run directory gets report.html, report.md and summary.json of all its experiments. Several, or a directory that
holds several (a sweep), are one study: the same files go to --out. Runs that differ in their changes of the cache alone
are joined.
"""

from jaxkv import stopping

if __name__ == "__main__":
    stopping.watch()

import argparse
import contextlib
import pathlib
import sys
from typing import Any

from rich.console import Console

from jaxkv.errors import UserError
from jaxkv.files import read_json
from jaxkv.overview.gather import find_runs
from jaxkv.overview.page import FILES, report_run, write_study
from jaxkv.overview.papers import PAPERS, list_verdicts, read_asked
from jaxkv.reporting.document import to_terminal
from jaxkv.writing import new_directories


def _check_out(out: pathlib.Path) -> None:
    """Raises UserError if a study's report would overwrite files that are none."""
    there, ours = [name for name in FILES if (out / name).exists()], (out / "run.json").exists()
    with contextlib.suppress(UserError):
        ours = ours or read_json(out / "summary.json", dict[str, Any]).get("experiment") == "study"
    if there and not ours:
        raise UserError(f"{out / there[0]} is not of a report of ours; choose another --out, or move it")


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxkv.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run directory, or one that holds run directories")
    parser.add_argument(
        "--out", metavar="DIR", help="where a study's report goes; the one directory given, or study-report if not set"
    )
    known = ", ".join(PAPERS)
    parser.add_argument(
        "--claims", metavar="PAPER,...", default="", help=f"judge claims of papers, of {known}; none if not set"
    )
    options = parser.parse_args(arguments)
    console = Console()
    try:
        asked = read_asked(options.claims)
        found = find_runs(options.run)
        if len(found) == 1 and options.out is None and (pathlib.Path(options.run[0]) / "run.json").exists():
            out = found[0]
            console.print(report_run(out, asked))
        else:
            out = pathlib.Path(options.out or (options.run[0] if len(options.run) == 1 else "study-report"))
            _check_out(out)
            with new_directories(out):
                study = write_study(options.run, out, asked)
                console.print(to_terminal(list_verdicts(study, asked)))
        for name in FILES:
            console.print(f"{out / name}", highlight=False, soft_wrap=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
