"""What is wrong with conditions, found out before anything slow: options, models, changes of the cache, and data."""

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from jaxkv.condition import (
    asked,
    check_lengths,
    is_of,
    load_problems,
    needs_torch,
    prompt_spec,
    read_precision,
    read_sampler,
)
from jaxkv.errors import UserError, nearest
from jaxkv.experiments.experiment import EXPERIMENTS, Experiment
from jaxkv.models.attention import OTHERS
from jaxkv.options import OPTIONS, CacheOptions, Options, PrecisionOptions
from jaxkv.tasks import find_module
from jaxkv.tasks.continuation import load_text
from jaxkv.tasks.sources import ROW_FILES
from jaxkv.tasks.task import PromptSpec

_ARTICLES = {"text": "a text", "programs": "programs", "device": "a device", "elsewhere": "other engines"}
TEXTS = ("next_string",)  # tasks that are made of a text


def check_choices(grid: Sequence[Options]) -> None:
    """Raises UserError on a value that is none of those known."""
    for option, options in itertools.product(OPTIONS, grid):
        known = option.known()
        for value in option.items(options) if known else ():
            if value not in known and f"{value.partition(':')[0]}:NAME" not in known:
                raise UserError(
                    f"--{option.flag}={value} is not known{nearest(value, list(known))}; known: {', '.join(known)}"
                )


def check_options(grid: Sequence[Options]) -> None:
    """Raises UserError on options that say different things, before what depends on the framework is filled in."""
    for one in grid:
        if (fault := next(_find_conflicts(one), None)) is not None:
            raise UserError(fault)
    attention = grid[0].run.attention
    if attention is not None and attention not in OTHERS and not any(map(needs_torch, grid)):
        raise UserError(f"--attention={attention} has no effect without --framework=torch or parity; drop it")


def _find_conflicts(options: Options) -> Iterator[str]:
    """What options say against each other."""
    experiments = asked(options)
    aligned, length = options.controls.regime == "aligned", options.decoding.uncached_length or "padded"
    if not re.fullmatch(r"padded|growing|bucket:[1-9][0-9]{0,5}", length):
        yield f"--uncached_length={length} is not understood; use padded or bucket:M, e.g. bucket:64"
    if aligned and length != "padded":
        yield f"--uncached_length={length} cannot be aligned: both arms need the same slots; use padded"
    if aligned and options.run.framework == "torch":
        yield "--regime=aligned is not there in PyTorch; with --framework=torch use plain"
    for one in experiments:
        if one.of != "problems" and len(experiments) > 1:
            yield f"--experiments={one.name} is of {_ARTICLES[one.of]}, the others of problems; run it by itself"
        if one.policies:
            yield from _find_other_policies(one.name, options.precision, aligned)
        if one.one_length and length != "padded":
            yield f"--uncached_length={length}: {one.name} looks at one padded length; drop it"
        if one.plain and aligned:
            yield f"--regime=aligned: {one.name} explains the plain regime, and has nothing to explain here; drop it"
        if options.run.framework == "torch" and one.torch != "instead":
            yield f"--experiments={one.name} runs in JAX alone; with --framework=torch use divergence"
    yield from _find_idle_changes(experiments, options.cache, aligned)


def _find_other_policies(name: str, precision: PrecisionOptions, aligned: bool) -> Iterator[str]:
    """What cannot be asked of an experiment that has policies of its own."""
    if precision.name == "fp64":
        yield (
            f"--precision=fp64 has no place in {name}, which turn float64 on by themselves, for the truth alone; "
            "drop it"
        )
    for part, value in dataclasses.asdict(dataclasses.replace(precision, name=None)).items():
        if value is not None:
            yield f"--{part}={value}: {name} compare policies of their own; drop it"
    if aligned:
        yield f"--regime=aligned: {name} have the aligned regime as one of their variants; drop it"


def _find_idle_changes(experiments: Sequence[Experiment], cache: CacheOptions, aligned: bool) -> Iterator[str]:
    """What options of a changed cache say against others."""
    for flag in ("cache_error", "cache_quant", "error_seeds"):
        users = [one.name for one in EXPERIMENTS.values() if flag in one.changes]
        if getattr(cache, flag) and not any(one.name in users for one in experiments):
            yield f"--{flag} has no effect without --experiments={' or '.join(users)}; drop it"
    for one in experiments:  # a text may be read with the clean cache alone
        if aligned and one.changes and (one.of != "text" or cache.cache_quant or cache.cache_error):
            yield f"--regime=aligned: a changed cache has no aligned regime; use plain with {one.name}"


def check_condition(options: Options) -> None:
    """Finds out before anything slow what is wrong with one condition. Raises UserError."""
    from jaxkv.models.families import get_preset

    precision, cache = read_precision(options.precision), options.cache
    length, framework = options.decoding.uncached_length, options.run.framework
    if length == "growing" and framework != "torch":
        raise UserError("--uncached_length=growing is of --framework=torch; in JAX use padded or bucket:M")
    read_sampler(options)
    preset = get_preset(options.model.name) if options.model.name else None
    if preset is not None and not is_of(options, "device"):
        check_lengths(options, preset)
    if is_of(options, "programs") and (preset is None or options.model.checkpoint is not None):
        raise UserError("lowering takes its shapes from a preset and needs no weights; give --model=PRESET alone")
    if any(one.changes for one in asked(options)):
        from jaxkv.experiments.changes import make_changes

        make_changes(cache.cache_error, cache.cache_quant, preset, precision)
    if needs_torch(options):
        from jaxkv.torch_model import check_torch, import_torch

        import_torch()
        check_torch(preset, precision, options.run.attention)
        # Before JAX starts: it would otherwise take most of a GPU's memory, which torch needs.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def check_data(conditions: Sequence[Options]) -> None:
    """Reads the data that conditions ask for, each once, where it lies in a file.

    Raises UserError on a file that is missing, of another kind or broken, or has fewer problems than are asked for.
    """
    seen = set()
    for one in conditions:
        data = (one.run.experiments, one.data)
        if data not in seen and not is_of(one, "device", "programs"):
            seen.add(data)
            _check_files(one)
            _read_data(one)


def _check_files(options: Options) -> None:
    data = options.data
    text = is_of(options, "text") or data.task in TEXTS
    for flag, name, is_text in (("data", data.data, text), ("fewshot_data", data.fewshot_data, False)):
        if name is None:
            continue
        path = pathlib.Path(name).expanduser()
        if not path.is_file():
            told = "is a directory, not a file" if path.is_dir() else "does not exist"
            raise UserError(f"--{flag}={name}: {told}; check the path")
        if not is_text and not path.name.endswith(ROW_FILES):
            raise UserError(f"--{flag}={name}: '{path.suffix}' is no kind of file that is read; use .jsonl or .parquet")


def _read_data(options: Options) -> None:
    """Loads the task as far as no file of the hub and no tokenizer is needed for it."""
    data = options.data
    if is_of(options, "text"):
        if data.data is not None:
            load_text(data.data)
        return
    if data.data is None and data.task != "arith":
        find_module(data.task)
        return
    spec = prompt_spec(data, False)
    if spec.shots and data.fewshot_data is None and data.task != "arith":
        spec = PromptSpec("zero_shot")  # the examples are the hub's
    load_problems(data, spec)
