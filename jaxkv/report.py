"""`python -m jaxkv.report RUN`: rebuilds summary.json and report.md from the records of a run; needs no jax."""

import argparse
import sys

from rich.console import Console

from jaxkv.analysis.report import render_table, write_report
from jaxkv.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m jaxkv.report", description=__doc__)
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run directory")
    try:
        for path in parser.parse_args(arguments).run:
            Console().print(render_table(write_report(path)))
            print(f"{path}/report.md")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
