"""What is wrong with a condition, found out before anything slow: its model, its changes of the cache and its data.

What options say against each other stands beside them, in jaxkv.options.
"""

import os
import pathlib
from collections.abc import Sequence

from jaxkv.condition import check_count, check_lengths, prompt_spec, read_precision, read_sampler, reads_text
from jaxkv.errors import UserError
from jaxkv.options import CHANGED, DOCTOR, Options, needs_torch
from jaxkv.tasks import load_task
from jaxkv.tasks.continuation import load_text
from jaxkv.tasks.sources import ROW_FILES
from jaxkv.tasks.task import PromptSpec

TEXTS = ("next_string",)  # tasks that are made of a text


def check_condition(options: Options) -> None:
    """Finds out before anything slow what is wrong with one condition. Raises UserError."""
    from jaxkv.models.families import get_preset

    precision, cache = read_precision(options.precision), options.cache
    length, framework = options.decoding.uncached_length, options.run.framework
    if length == "growing" and framework != "torch":
        raise UserError("--uncached_length=growing is of --framework=torch; in JAX use padded or bucket:M")
    read_sampler(options)
    preset = get_preset(options.model.name) if options.model.name else None
    if preset is not None and options.run.experiments != (DOCTOR,):
        check_lengths(options, preset)
    if set(CHANGED) & set(options.run.experiments):
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

    Raises:
      UserError: a file that is missing, of another kind or broken, or has fewer problems than are asked for.
    """
    seen = set()
    for one in conditions:
        asked = (one.run.experiments, one.data)
        if asked not in seen and one.run.experiments != (DOCTOR,):
            seen.add(asked)
            _check_files(one)
            _read_data(one)


def _check_files(options: Options) -> None:
    data = options.data
    text = reads_text(options) or data.task in TEXTS
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
    if reads_text(options):
        if data.data is not None:
            load_text(data.data)
        return
    if data.data is None and data.task != "arith":
        return
    spec = prompt_spec(data, False)
    if spec.shots and data.fewshot_data is None and data.task != "arith":
        spec = PromptSpec("zero_shot")  # the examples are the hub's
    task = load_task(
        data.task, data=data.data, fewshot_data=data.fewshot_data, spec=spec, subset=data.subset,
        allow_code_execution=data.allow_code_execution,
    )  # fmt: skip
    check_count(data, len(task.problems))
