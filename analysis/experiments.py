"""Experiments beside the main job: `keep RUN... DIR` takes summaries out of run directories, `table FILE...` prints.

python analysis/experiments.py keep runs/smollm2-135m-fp16 analysis
python analysis/experiments.py table analysis/attribution/*.json
"""

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from main_job import describe_origin

from jaxkv.analysis import attribution, document, drift, mitigations, parity, patching
from jaxkv.analysis.page_parity import write_forced_parity
from jaxkv.records import read_lines, read_run


def _parity_text(summary: dict[str, Any]) -> str:
    return document.to_markdown("Parity", write_forced_parity("Four cells along the same tokens", summary))


TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "attribution": attribution.to_markdown,
    "drift": drift.to_markdown,
    "mitigations": mitigations.to_markdown,
    "parity": _parity_text,
    "patching": patching.to_markdown,
}


def summarize(experiment: str, source: pathlib.Path) -> dict[str, Any]:
    """The summary of an experiment's records in a run directory."""
    run, records = read_run(source)
    if experiment == "mitigations":
        return mitigations.summarize_mitigations(records, read_lines(source / "timing.jsonl")[0], run)
    summarizers: dict[str, Callable[..., dict[str, Any]]] = {
        "attribution": attribution.summarize_attribution,
        "drift": drift.summarize_drift,
        "parity": parity.summarize_parity,
        "patching": patching.summarize_patching,
    }
    return summarizers[experiment](records, run)


def keep(run_path: str, destination: str) -> list[pathlib.Path]:
    """Writes DESTINATION/EXPERIMENT/PLATFORM_NAME.json for each experiment of a run: the summary and its origin."""
    source, written = pathlib.Path(run_path), []
    provenance = describe_origin(source)
    for experiment in sorted({record["experiment"] for record in read_run(source)[1]} & set(TEXTS)):
        path = pathlib.Path(destination) / experiment / f"{provenance['device']['platform']}_{source.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"provenance": provenance, "summary": summarize(experiment, source)}
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
            print(TEXTS[name.parent.name](json.loads(name.read_text())["summary"]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
