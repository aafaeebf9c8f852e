"""The main job's figures: `keep RUN... DIR` takes small summaries out of run directories, `table DIR` prints them.

python analysis/main_job.py keep runs/smollm2-135m-fp16 analysis/main_job/h200
python analysis/main_job.py table analysis/main_job/h200
"""

import json
import pathlib
import sys
from typing import Any

from jaxkv.analysis.format import format_count, format_counted_share, format_mean, format_number
from jaxkv.analysis.gather import describe_command
from jaxkv.analysis.report import write_report
from jaxkv.records import read_run


def describe_origin(source: pathlib.Path) -> dict[str, Any]:
    """What a run directory's figures came from: command, dates, revisions, device, versions, hashes."""
    run, _ = read_run(source)
    config, sessions = run["config"], run["sessions"]
    origin = sessions[-1]["checkpoint"]
    origin = origin | {"source": pathlib.PurePath(origin["source"]).name}
    return {
        "command": describe_command((source / "run.flags").read_text()),
        "date": [session["started"][:10] for session in sessions],
        "git": [session["git"] for session in sessions],
        "device": config["device"],
        "packages": sessions[-1]["packages"],
        "variables": [session["variables"] for session in sessions],
        "compiler_options": config["compiler_options"],
        "precision": config.get("precision"),
        "checkpoint": origin,
        "data": {
            part: {field: found[field] for field in ("sha256", "rows", "characters") if field in found}
            for part in ("problems", "shots")
            if (found := config["data"].get(part))
        },
        "prompt": config["prompt"],
        "decoding": config["decoding"],
        "problems_asked": config["num_problems"],
    }


def keep(run_path: str, destination: str) -> pathlib.Path:
    """Writes DESTINATION/NAME.json: the summary with what it came from."""
    source = pathlib.Path(run_path)
    summary, provenance = write_report(source), describe_origin(source)
    path = pathlib.Path(destination) / f"{source.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": provenance, "summary": summary}, indent=1) + "\n")
    return path


def table(directory: str) -> str:
    """A Markdown table of the kept summaries."""
    head = ["run", "valid problems", "argmax flips per token", "sequences that diverge", "mean KL, nats"]
    head += ["largest logit difference", "flips at exact ties", "right: cached, uncached"]
    rows = [head, ["---"] * len(head)]
    for path in sorted(pathlib.Path(directory).glob("*.json")):
        kept = json.loads(path.read_text())
        summary, asked = kept["summary"], kept["provenance"]["problems_asked"]
        problems = summary["problems"]
        unfinished = f", unfinished: {asked} asked" if problems["total"] < asked else ""
        row = [path.stem, f"{problems['ok']} of {problems['total']}{unfinished}"]
        if summary["status"] == "ok":
            compared, right = summary["teacher_forced"], summary["accuracy"]["numeric"]
            row += [format_counted_share(compared["flips"]), format_counted_share(summary["free_running"]["diverged"])]
            row += [format_mean(compared["kl"]), format_number(compared["max_abs"]["max"])]
            row += [f"{compared['ties']['flips']} of {compared['flips']['count']}"]
            row += [f"{format_count(right['cached'])}, {format_count(right['uncached'])}"]
        else:
            why = "; ".join(f"{g['reason']} ({g['value']}), {g['samples']} samples" for g in summary["invalid"])
            row += [f"invalid: {why}", *["none counted"] * 5]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if len(arguments) >= 3 and arguments[0] == "keep":
        for run in arguments[1:-1]:
            print(keep(run, arguments[-1]))
    elif len(arguments) == 2 and arguments[0] == "table":
        print(table(arguments[1]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
