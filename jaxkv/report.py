"""`python -m jaxkv.report RUN...`: reports from the records of runs alone; needs no jax.

One run directory gets its tables rebuilt: report.md and summary.json, and a file for each other experiment it has.
Several, or a directory that holds several (a sweep), are one study: report.html, report.md and summary.json, with the
claims judged, go to --out.
"""

import argparse
import pathlib
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxkv import records
from jaxkv.analysis import attribution, doctor, mitigations
from jaxkv.analysis.gather import find_runs
from jaxkv.analysis.page import write_study
from jaxkv.analysis.report import render_table, write_report
from jaxkv.errors import UserError


def rebuild_run(path: pathlib.Path, console: Console) -> None:
    """Writes and prints the reports of one run directory, one for each experiment it has.

    Raises:
      UserError: not a run directory, corrupt records, or not writable.
    """
    run, samples = records.read_run(path)
    experiments = {record.get("experiment") for record in samples}
    done: list[tuple[Any, str]] = []
    if "divergence" in experiments or not experiments & {"attribution", "doctor", "mitigations"}:
        done.append((render_table(write_report(path)), "report.md"))
    try:
        if "attribution" in experiments:
            summary = attribution.summarize_attribution(samples, run)
            records.write_atomically(path / "attribution.md", attribution.to_markdown(summary))
            done.append((attribution.render_attribution(summary), "attribution.md"))
        if "mitigations" in experiments:
            timings, _ = records.read_lines(path / "timing.jsonl")
            summary = mitigations.summarize_mitigations(samples, timings, run)
            records.write_atomically(path / "mitigations.md", mitigations.to_markdown(summary))
            done.append((mitigations.render(summary), "mitigations.md"))
        for record in samples:
            if record.get("experiment") == "doctor":
                records.VALIDATORS["doctor"](record)
                records.write_atomically(path / "report.md", doctor.to_markdown(record))
                done.append((doctor.render(record), "report.md"))
    except ValueError as error:
        raise UserError(f"{path / 'samples.jsonl'}: {error}; was it written by another version?") from error
    for shown, name in done:
        console.print(shown)
        console.print(f"{path / name}", highlight=False, soft_wrap=True)


def render_claims(study: dict[str, Any]) -> Table:
    """The verdicts for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in ("", "claim", "verdict", "figure"):
        table.add_column(name, no_wrap=name == "verdict")
    for claim in study["claims"]:
        figure = "\n".join(claim["figure"][:3]) + ("\n..." if len(claim["figure"]) > 3 else "")
        table.add_row(*(Text(cell) for cell in (claim["id"], claim["claim"], claim["verdict"], figure)))
    return table


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
            rebuild_run(found[0], console)
            return 0
        out = pathlib.Path(options.out or (options.run[0] if len(options.run) == 1 else "study-report"))
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}; choose another --out") from error
        console.print(render_claims(write_study(options.run, out)))
        for name in ("report.html", "report.md", "summary.json"):
            console.print(f"{out / name}", highlight=False, soft_wrap=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
