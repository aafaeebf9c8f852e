"""Run directories read for a study: copies dropped, parts joined, and what each of them is: condition, origin, name."""

import dataclasses
import itertools
import os
import pathlib
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from jaxkv import records
from jaxkv.errors import UserError
from jaxkv.experiments.accumulation.record import AccumulationRecord
from jaxkv.experiments.divergence.record import DEFAULT_FRAMEWORK
from jaxkv.experiments.experiment import CHANGING
from jaxkv.experiments.record_parts import Record, Shapes
from jaxkv.experiments.report_parts import Run, name_of
from jaxkv.files import read_text
from jaxkv.pieces import read_pieces

Condition = Mapping[str, Any]
Study = Mapping[str, Any]
LOCAL = ("--out=", "--compilation_cache=")  # say where, not what
PATHS = ("--checkpoint=", "--data=", "--fewshot_data=")
# What tokens are drawn by: runs that differ in any of these answer another question.
SAMPLING = ("sampler", "temperature", "top_k", "top_p", "seed", "new_tokens")
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
WIDENED = ("residual", "cache")  # parts that are of the precision unless a run says otherwise


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> list[pathlib.Path]:
    """Run directories among paths and below those that are none, each once, in order; UserError for a path without."""
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
    """Reads run directories, or all below a directory. Raises UserError: no run, another format, or corrupt records."""
    found = find_runs(paths)
    runs = []
    for path, name in zip(found, name_runs(found), strict=True):
        run, samples = records.read_run(path)
        timings = records.read_lines(path / "timing.jsonl")
        flags = path / "run.flags"
        text = read_text(flags) if flags.exists() else ""
        runs.append(Run(name, run, samples, timings, text, pieces=read_pieces(path)))
    return runs


def _merge(runs: Sequence[Run], take: Callable[[Run, Run], Run | None]) -> list[Run]:
    """The runs, each merged into the first of those before it that `take` makes one run of with it."""
    kept: list[Run] = []
    for run in runs:
        for place, other in enumerate(kept):
            if (both := take(other, run)) is not None:
                kept[place] = both
                break
        else:
            kept.append(run)
    return kept


def drop_copies(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Runs, each as the copy that has most: one run is counted once, however often it is given; and what was left out.

    A copy began in the same moment, of the same configuration, and has the same timings and records, or fewer where the
    other went on. Runs of one configuration that were made apart differ in their timings at least.
    """
    notes: list[str] = []

    def take(other: Run, run: Run) -> Run | None:
        fewer, more = sorted((run, other), key=lambda one: (len(one.records), len(one.timings)))
        if not _is_copy(fewer, more):
            return None
        notes.append(f"{run.name} is a copy of {other.name} and counts once")
        return dataclasses.replace(more, name=other.name)

    return _merge(runs, take), notes


def _is_copy(fewer: Run, more: Run) -> bool:
    begun = [[session.get("started") for session in run.run["sessions"][:1]] for run in (fewer, more)]
    return (
        fewer.run["fingerprint"] == more.run["fingerprint"]
        and begun[0] == begun[1]
        and list(fewer.records) == list(more.records)[: len(fewer.records)]
        and list(fewer.timings) == list(more.timings)[: len(fewer.timings)]
    )


def join_runs(name: str, runs: Sequence[Run]) -> Run:
    """One run of several that differ in the changes of the cache that they were asked for, which no config holds.

    Raises UserError for other conditions, a record that is not the same in all, or clean arms that took other tokens.
    """
    first = runs[0]
    found: dict[tuple, tuple[Any, str]] = {}  # what there is of a key, and the run that has it first
    for run in runs:
        if run.run["fingerprint"] != first.run["fingerprint"]:
            raise UserError(
                f"{first.name} and {run.name} are of different conditions, versions or devices (their fingerprints "
                "differ) and cannot be joined; join runs whose lists of changes differ, and nothing else"
            )
        for record in run.records:
            parts: dict[tuple, Any] = {record.key: record}
            if isinstance(record, AccumulationRecord) and record.status == "ok":
                # Its clean arm has no record of its own: the tokens of every record are the clean arm's.
                parts["accumulation", record.problem] = record.prompt_sha256, record.tokens_sha256
            for key, part in parts.items():
                same, whose = found.setdefault(key, (part, run.name))
                if same != part:
                    raise UserError(
                        f"{whose} and {run.name} have different records of {' '.join(map(str, key))}, so that their "
                        "clean arms are not the same; run them with one --compilation_cache"
                    )
    kept = [part for part, _ in found.values() if not isinstance(part, tuple)]
    sessions = [session for run in runs for session in run.run["sessions"]]
    timings = [timing for run in runs for timing in run.timings]
    return Run(name, {**first.run, "sessions": sessions}, kept, timings, first.flags, runs)


def join_parts(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Runs, those joined that were asked for changed caches alone and differ in nothing else; why others are not."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        asked = run.run["config"].get("experiments", ())
        changed = bool(asked) and set(asked) <= set(CHANGING)
        groups.setdefault(run.run["fingerprint"] if changed else f"only {run.name}", []).append(run)
    found: list[Run] = []
    notes: list[str] = []

    def take(joined: Run, run: Run) -> Run | None:
        try:
            return join_runs("", [*(joined.parts or [joined]), run])
        except UserError as error:
            notes.append(str(error).partition(";")[0])
            return None

    for members in groups.values():
        for run in _merge(members, take):
            taken = {other.name for other in (*runs, *found)}
            found.append(dataclasses.replace(run, name=_name_parts(run, taken)) if run.parts else run)
    return found, notes


def _name_parts(run: Run, taken: Container[str]) -> str:
    """What was run, as in ``smollm2-135m-fp16-greedy-injection-gsm8k``, and what tells it from names that are taken."""
    config = run.run["config"]
    sampler = (config.get("sampling") or {}).get("sampler")
    what = [name_of(config.get("model")), name_of(config.get("precision")), sampler]
    name = "-".join(part for part in (*what, *config["experiments"], config.get("task")) if part)
    longer = f"{name}-{run.run['fingerprint'][:8]}"
    names = itertools.chain([name, longer], (f"{longer}-{number}" for number in itertools.count(2)))
    return next(one for one in names if one not in taken)


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


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _find_first(run: Run) -> Record | None:
    return next((record for record in run.records if isinstance(record, Record)), None)


def describe_condition(run: Run) -> dict[str, Any]:
    """What was run: model, precision, sampler, framework, regime, device. What is not known is None."""
    config, first = run.run["config"], _find_first(run)
    shapes, sampling = getattr(first, "shapes", None), getattr(first, "sampling", None)
    drawn = asdict(sampling) if sampling else config.get("sampling") or {}
    model, device, decoding = _mapping(config.get("model")), config.get("device"), config.get("decoding") or {}
    checkpoint = _mapping(config.get("checkpoint"))
    weights = checkpoint.get("files") or checkpoint.get("source")  # hashes, or the seed of random ones
    tile = shapes.tile if isinstance(shapes, Shapes) else decoding.get("tile")
    return {
        "name": run.name,
        "model": name_of(config.get("model")),
        "weights": None if weights is None else records.fingerprint({"weights": weights}),
        "family": model.get("family"),
        "layers": model.get("num_layers"),
        "heads": {"query": model.get("num_query_heads"), "kv": model.get("num_kv_heads")},
        "precision": name_precision(config.get("precision")),
        "products": _mapping(config.get("precision")).get("accumulation"),
        **{name: drawn.get(name) for name in ("sampler", "seed", "temperature", "top_k", "top_p")},
        "framework": getattr(first, "framework", None) or config.get("framework") or DEFAULT_FRAMEWORK,
        "attention": getattr(first, "attention", None) or config.get("attention"),
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
    data, known = config.get("data"), ("sha256", "rows")
    if isinstance(data, Mapping):
        kept = {part: found for part, found in data.items() if isinstance(found, Mapping)}
        data = {part: {key: found[key] for key in known if key in found} for part, found in kept.items()}
    commands = [describe_command(part.flags) for part in run.parts or (run,)]
    return {
        "commands": list(dict.fromkeys(command for command in commands if command)),
        "parts": [part.name for part in run.parts],
        "dates": sorted({session["started"][:10] for session in sessions if "started" in session}),
        "revisions": sorted({session["git"] for session in sessions if session.get("git")}),
        "device": config.get("device"),
        "versions": (last.get("packages") or config.get("versions") or {})
        | (getattr(_find_first(run), "versions", None) or {}),
        "variables": last.get("variables") or {},
        "checkpoint": {"source": source and pathlib.PurePath(source).name, **checkpoint},
        "data": data,
        "fingerprint": run.run.get("fingerprint"),
    }


def select_valid(study: Study, experiment: str = "divergence") -> list[Any]:
    """A study's conditions with a valid sample of an experiment."""
    return [c for c in study["conditions"] if c.get(experiment) and c[experiment]["status"] == "ok"]


def list_values(conditions: Iterable[Condition], key: str) -> list[str]:
    """What conditions are of, such as their models, each once."""
    return list(dict.fromkeys(str(c[key]) for c in conditions if c[key]))


def name_precision(precision: Any) -> str | None:
    """'fp16+residual=fp32' of what run.json says of a precision; its parts count where its name leaves them out."""
    if not isinstance(precision, Mapping) or (name := precision.get("name")) is None:
        return name_of(precision)
    base = name.split("+")[0]
    parts = [(part, SHORT.get(str(precision.get(part)), base)) for part in WIDENED]
    return name + "".join(f"+{part}={own}" for part, own in parts if own != base and f"+{part}=" not in name)


def name_condition(condition: Condition, without: Sequence[str] = ()) -> str:
    """``smollm2-135m bf16 greedy, torch eager, aligned, batch 8``: by its whole policy, so that a residual stream in
    fp32 is never called fp16. `without` parts that need no telling, of 'model' and 'batch_size'.
    """
    first = [condition["precision"], condition["sampler"]]
    if "model" not in without:
        first = [condition["model"] or condition["name"], *first]
    more = [" ".join(filter(None, first))]
    if condition["framework"] != "jax":
        more.append(" ".join(filter(None, (condition["framework"], condition["attention"]))))
    if condition["regime"] != "plain":
        more.append(condition["regime"])
    if condition["batch_size"] and "batch_size" not in without:
        more.append(f"batch {condition['batch_size']}")
    return ", ".join(filter(None, more)) or condition["name"]


def name_conditions(conditions: Sequence[Condition]) -> list[str]:
    """A name for each: batch sizes only where there are several, and the directory where two are alike."""
    alike = len({c["batch_size"] for c in conditions if c.get("divergence")}) < 2
    names = [name_condition(c, ("batch_size",) if alike else ()) for c in conditions]
    return [
        f"{name} ({condition['name']})" if names.count(name) > 1 else name
        for name, condition in zip(names, conditions, strict=True)
    ]
