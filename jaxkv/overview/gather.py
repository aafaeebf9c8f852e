"""Run directories read for a study, and what each of them is: condition, origin, command."""

import dataclasses
import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from jaxkv import records
from jaxkv.errors import UserError
from jaxkv.experiments.divergence.record import DEFAULT_FRAMEWORK
from jaxkv.experiments.record_parts import Record, Rows, Shapes
from jaxkv.experiments.report_parts import Run, name_of
from jaxkv.files import read_text
from jaxkv.overview.policy import name_precision
from jaxkv.pieces import read_pieces

LOCAL = ("--out=", "--compilation_cache=")  # say where, not what
PATHS = ("--checkpoint=", "--data=", "--fewshot_data=")


# What tokens are drawn by: runs that differ in any of these answer another question.
SAMPLING = ("sampler", "temperature", "top_k", "top_p", "seed", "new_tokens")


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> list[pathlib.Path]:
    """Run directories among paths and below those that are none themselves, each once, in order.

    Raises:
      UserError: a path without a run.
    """
    found: list[pathlib.Path] = []
    for path in map(pathlib.Path, paths):
        if not path.is_dir():
            raise UserError(f"{path} is not a directory; give run directories, or one that holds them")
        inside = [path] if (path / "run.json").exists() else sorted(p.parent for p in path.rglob("run.json"))
        if not inside:
            raise UserError(f"{path} is not a run directory and holds none (there is no run.json); check the path")
        found += [run for run in inside if run.resolve() not in {other.resolve() for other in found}]
    return found


def name_runs(paths: Sequence[pathlib.Path]) -> list[str]:
    """Short names that are all different: the last part of each path, or as many as it takes."""
    whole = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, whole), default=1) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return names


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Reads run directories, or all below a directory.

    Raises:
      UserError: no run, another format, or corrupt records.
    """
    found = find_runs(paths)
    runs = []
    for path, name in zip(found, name_runs(found), strict=True):
        run, samples = records.read_run(path)
        timings = records.read_lines(path / "timing.jsonl")
        flags = path / "run.flags"
        text = read_text(flags) if flags.exists() else ""
        runs.append(Run(name, run, samples, timings, text, pieces=read_pieces(path)))
    return runs


def drop_copies(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Runs without those that are copies of others: one run is counted once, however often it is given.

    A copy began in the same moment, of the same configuration, and has the same timings and records, or fewer where the
    other went on. Runs of one configuration that were made apart differ in their timings at least.

    Returns:
      The runs, each as the copy that has most, and the names of what was left out.
    """
    kept: list[Run] = []
    notes: list[str] = []
    for run in runs:
        for place, other in enumerate(kept):
            fewer, more = sorted((run, other), key=lambda one: (len(one.records), len(one.timings)))
            if _is_copy(fewer, more):
                kept[place] = dataclasses.replace(more, name=other.name)
                notes.append(f"{run.name} is a copy of {other.name} and counts once")
                break
        else:
            kept.append(run)
    return kept, notes


def _is_copy(fewer: Run, more: Run) -> bool:
    begun = [[session.get("started") for session in run.run["sessions"][:1]] for run in (fewer, more)]
    return (
        fewer.run["fingerprint"] == more.run["fingerprint"]
        and begun[0] == begun[1]
        and list(fewer.records) == list(more.records)[: len(fewer.records)]
        and list(fewer.timings) == list(more.timings)[: len(fewer.timings)]
    )


def describe_command(flags: str) -> str | None:
    """The command of a flagfile, files named without their directories; None without flags."""
    words = []
    for line in flags.splitlines():
        if line.startswith(PATHS):
            name, _, value = line.partition("=")
            line = f"{name}={value if value.startswith('random:') else pathlib.PurePath(value).name}"
        if line and not line.startswith(LOCAL):
            words.append(shlex.quote(line))
    return " ".join(["python -m jaxkv.launch", *words]) if words else None


def _name_weights(checkpoint: Any) -> str | None:
    """What tells weights apart: the hashes of their files, or the seed of random ones; None if nothing is known."""
    if not isinstance(checkpoint, Mapping):
        return None
    found = checkpoint.get("files") or checkpoint.get("source")
    return None if found is None else records.fingerprint({"weights": found})


def _find_first(run: Run) -> Record | None:
    return next((record for record in run.records if isinstance(record, Record)), None)


def _find_setting(run: Run) -> tuple[Rows | None, dict[str, Any], str | None, str | None]:
    """Shapes, sampling, framework and attention of the first record that has them; sampling else of the run."""
    first = _find_first(run)
    shapes, sampling = getattr(first, "shapes", None), getattr(first, "sampling", None)
    known = asdict(sampling) if sampling else run.run["config"].get("sampling") or {}
    return shapes, known, getattr(first, "framework", None), getattr(first, "attention", None) or None


def describe_condition(run: Run) -> dict[str, Any]:
    """What was run: model, precision, sampler, framework, regime, device. What is not known is None."""
    config = run.run["config"]
    shapes, sampling, framework, attention = _find_setting(run)
    model, precision = config.get("model"), config.get("precision")
    parts = precision if isinstance(precision, Mapping) else {}
    device = config.get("device")
    decoding = config.get("decoding") or {}
    tile = shapes.tile if isinstance(shapes, Shapes) else decoding.get("tile")
    heads = (model.get("num_query_heads"), model.get("num_kv_heads")) if isinstance(model, Mapping) else (None, None)
    return {
        "name": run.name,
        "model": name_of(model),
        "weights": _name_weights(config.get("checkpoint")),
        "family": model.get("family") if isinstance(model, Mapping) else None,
        "layers": model.get("num_layers") if isinstance(model, Mapping) else None,
        "heads": {"query": heads[0], "kv": heads[1]},
        "precision": name_precision(precision),
        "products": parts.get("accumulation"),
        "sampler": sampling.get("sampler"),
        "seed": sampling.get("seed"),
        **{name: sampling.get(name) for name in ("temperature", "top_k", "top_p")},
        "framework": framework or config.get("framework") or DEFAULT_FRAMEWORK,
        "attention": attention or config.get("attention"),
        "regime": "plain" if tile is None else "aligned",
        "uncached": shapes.uncached if isinstance(shapes, Shapes) else None,
        "new_tokens": decoding.get("new_tokens"),
        "stop_ids": decoding.get("stop_ids") or [],
        "batch_size": decoding.get("batch_size"),
        "padding": decoding.get("padding"),
        "device": device.get("kind") if isinstance(device, Mapping) else device,
        "fingerprint": run.run.get("fingerprint"),
    }


def describe_origin(run: Run) -> dict[str, Any]:
    """Where a run's figures came from: commands, parts, dates, revisions, versions, hashes."""
    config, sessions = run.run["config"], run.run["sessions"]
    last = sessions[-1] if sessions else {}
    checkpoint = dict(last.get("checkpoint") or config.get("checkpoint") or {})
    source = checkpoint.pop("source", None)
    versions = getattr(_find_first(run), "versions", None)
    data = config.get("data")
    commands = [describe_command(part.flags) for part in run.parts or (run,)]
    return {
        "commands": list(dict.fromkeys(command for command in commands if command)),
        "parts": [part.name for part in run.parts],
        "dates": sorted({session["started"][:10] for session in sessions if "started" in session}),
        "revisions": sorted({session["git"] for session in sessions if session.get("git")}),
        "device": config.get("device"),
        "versions": (last.get("packages") or config.get("versions") or {}) | (versions or {}),
        "variables": last.get("variables") or {},
        "checkpoint": {"source": source and pathlib.PurePath(source).name, **checkpoint},
        "data": {
            part: {key: found[key] for key in ("sha256", "rows") if key in found}
            for part, found in data.items()
            if isinstance(found, Mapping)
        }
        if isinstance(data, Mapping)
        else data,
        "fingerprint": run.run.get("fingerprint"),
    }
