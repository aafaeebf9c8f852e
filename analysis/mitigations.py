"""Mitigations: `keep RUN... DIR` takes small summaries out of run directories, `table FILE...` prints them.

python analysis/mitigations.py keep runs/smollm2-135m analysis/mitigations
python analysis/mitigations.py table analysis/mitigations/*.json
"""

import json
import pathlib
import sys

from main_job import describe_origin

from jaxkv.analysis.mitigations import summarize_mitigations, to_markdown
from jaxkv.records import read_lines, read_run


def keep(run_path: str, destination: str) -> pathlib.Path:
    """Writes DESTINATION/DEVICE_NAME.json: the summary with what it came from."""
    source = pathlib.Path(run_path)
    run, records = read_run(source)
    summary = summarize_mitigations(records, read_lines(source / "timing.jsonl")[0], run)
    kept = {"provenance": describe_origin(source), "summary": summary}
    path = pathlib.Path(destination) / f"{kept['provenance']['device']['platform']}_{source.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return path


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if len(arguments) >= 3 and arguments[0] == "keep":
        for run in arguments[1:-1]:
            print(keep(run, arguments[-1]))
    elif len(arguments) >= 2 and arguments[0] == "table":
        for name in arguments[1:]:
            print(to_markdown(json.loads(pathlib.Path(name).read_text())["summary"]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
