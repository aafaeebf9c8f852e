"""Experiments beside the main job: summaries out of run directories, and their tables.

python analysis/experiments.py keep runs/smollm2-135m-fp16 analysis       # a file for each experiment of each run
python analysis/experiments.py join NAME runs/part-1 runs/part-2 analysis  # runs that differ in the changes asked for
python analysis/experiments.py table analysis/attribution/*.json
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from main_job import describe_origin

from jaxkv.analysis.experiments import EXPERIMENTS
from jaxkv.analysis.gather import read_runs
from jaxkv.analysis.joining import join_runs
from jaxkv.errors import UserError


def join_origins(sources: Sequence[pathlib.Path]) -> dict[str, Any]:
    """What the figures of runs joined into one came from: of several, each command, all dates and revisions."""
    origins = [describe_origin(source) for source in sources]
    provenance = dict(origins[0])
    if len(origins) > 1:
        provenance["command"] = [origin["command"] for origin in origins]
        for part in ("date", "git"):
            provenance[part] = sorted({value for origin in origins for value in origin[part]})
    return provenance


def keep(name: str, sources: Sequence[pathlib.Path], destination: str) -> list[pathlib.Path]:
    """Writes DESTINATION/EXPERIMENT/PLATFORM_NAME.json for each experiment of runs: the summary and its origin."""
    run, written = join_runs(name, read_runs(sources)), []
    provenance = join_origins(sources)
    for experiment in sorted({record["experiment"] for record in run.records} & set(EXPERIMENTS) - {"divergence"}):
        path = pathlib.Path(destination) / experiment / f"{provenance['device']['platform']}_{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"provenance": provenance, "summary": EXPERIMENTS[experiment].summarize(run)}
        path.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
        written.append(path)
    return written


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    command, *rest = arguments or [""]
    if command == "keep" and len(rest) >= 2:
        for source in map(pathlib.Path, rest[:-1]):
            print(*keep(source.name, [source], rest[-1]), sep="\n")
    elif command == "join" and len(rest) >= 3:
        print(*keep(rest[0], list(map(pathlib.Path, rest[1:-1])), rest[-1]), sep="\n")
    elif command == "table" and rest:
        for name in map(pathlib.Path, rest):
            print(EXPERIMENTS[name.parent.name].write(json.loads(name.read_text())["summary"], {}))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
