"""`python -m jaxkv.experiments.doctor` prints the table; `--hashes` is how it starts itself as a second process."""

import argparse
import json
import pathlib
import sys

from jaxkv.experiments.doctor import run


def main(arguments: list[str] | None = None) -> None:
    """Prints the table, or the second process's hashes."""
    parser = argparse.ArgumentParser(prog="python -m jaxkv.experiments.doctor", description=run.__doc__)
    parser.add_argument("--hashes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the record here")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="write the report here")
    options = parser.parse_args(arguments)
    if options.hashes:
        print(json.dumps(run.compute_hashes(run.DoctorSpec.from_json(json.load(sys.stdin)))))
        return
    from rich.console import Console

    from jaxkv.experiments.doctor.findings import conclude
    from jaxkv.experiments.doctor.report import write_doctor
    from jaxkv.records import to_plain
    from jaxkv.reporting.document import to_markdown, to_terminal

    record = to_plain(run.run_doctor())
    blocks = write_doctor(record | {"conclusions": conclude(record)})
    if options.json:
        options.json.write_text(json.dumps(record, allow_nan=False, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(to_markdown("The device", blocks))
    Console().print(to_terminal(blocks))


if __name__ == "__main__":
    main()
