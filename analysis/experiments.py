"""Experiments beside the main job: `keep RUN... DIR` takes summaries out of run directories, `table FILE...` prints.

python analysis/experiments.py keep runs/smollm2-135m-fp16 analysis
python analysis/experiments.py table analysis/attribution/*.json
"""

import json
import pathlib
import sys

from main_job import describe_origin

from jaxkv.analysis.experiments import EXPERIMENTS
from jaxkv.analysis.gather import read_runs


def keep(run_path: str, destination: str) -> list[pathlib.Path]:
    """Writes DESTINATION/EXPERIMENT/PLATFORM_NAME.json for each experiment of a run: the summary and its origin."""
    source, written = pathlib.Path(run_path), []
    provenance, (run,) = describe_origin(source), read_runs([source])
    for name in sorted({record["experiment"] for record in run.records} & set(EXPERIMENTS) - {"divergence"}):
        path = pathlib.Path(destination) / name / f"{provenance['device']['platform']}_{source.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"provenance": provenance, "summary": EXPERIMENTS[name].summarize(run)}
        path.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
        written.append(path)
    return written


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if len(arguments) >= 3 and arguments[0] == "keep":
        for run in arguments[1:-1]:
            print(*keep(run, arguments[-1]), sep="\n")
    elif len(arguments) >= 2 and arguments[0] == "table":
        for name in map(pathlib.Path, arguments[1:]):
            print(EXPERIMENTS[name.parent.name].write(json.loads(name.read_text())["summary"], {}))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
