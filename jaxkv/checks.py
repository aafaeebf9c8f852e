"""What is wrong with a command, found out before anything slow: flags one by one, against each other, and the data."""

import os
import pathlib
import re
from collections.abc import Sequence

from jaxkv.analysis.gather import CHANGED
from jaxkv.catalog import EXPERIMENTS
from jaxkv.condition import PARTS, TEXT_EXPERIMENT, Settings, check_count, check_lengths, prompt_spec, read_precision
from jaxkv.config import DTYPES
from jaxkv.errors import UserError, nearest
from jaxkv.sampling import KINDS, make_sampler
from jaxkv.tasks import TASKS, load_task
from jaxkv.tasks.continuation import load_text
from jaxkv.tasks.sources import ROW_FILES
from jaxkv.tasks.task import SUBSETS, PromptSpec

NAMES = (*EXPERIMENTS, "doctor")
PROMPTS = ("auto", "chat", "boxed", "few_shot", "zero_shot")
TEXTS = ("next_string",)  # tasks that are made of a text
# Flags that decide what data is read.
DATA = ("experiments", "task", "data", "fewshot_data", "subset", "prompt", "shots", "problems", "num_problems")


def _choose(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UserError(f"--{name}={value} is not known{nearest(value, list(known))}; known: {', '.join(known)}")
    return value


def check_settings(settings: Settings) -> None:
    """What absl's types do not check."""
    for name in settings["experiments"]:
        _choose("experiments", name, NAMES)
    for name in settings["framework"]:
        _choose("framework", name, ("jax", "torch"))
    for name in settings["sampler"]:
        _choose("sampler", name, KINDS)
    for name in settings["precision"]:
        _choose("precision", name, tuple(DTYPES))
    for part in PARTS:
        if settings[part] is not None:
            _choose(part, settings[part], tuple(DTYPES))
    _choose("task", settings["task"], tuple(TASKS))
    _choose("subset", settings["subset"], SUBSETS)
    _choose("prompt", settings["prompt"], PROMPTS)
    _choose("padding", settings["padding"], ("equal", "left"))
    _choose("regime", settings["regime"], ("plain", "aligned"))
    _choose("gate", settings["gate"], ("on", "full", "off"))
    _choose("uncached", settings["uncached"] or "draft", ("draft", "stepwise"))
    length = settings["uncached_length"] or "padded"
    if not re.fullmatch(r"padded|growing|bucket:[1-9][0-9]{0,5}", length):
        raise UserError(f"--uncached_length={length} is not understood; use padded or bucket:M, e.g. bucket:64")
    _check_combinations(settings)


def _check_combinations(settings: Settings) -> None:
    """What flags say against each other."""
    experiments, length = settings["experiments"], settings["uncached_length"] or "padded"
    if "doctor" in experiments and len(experiments) > 1:
        raise UserError("--experiments=doctor examines the device, not a model; run it by itself")
    if settings["regime"] == "aligned" and length != "padded":
        raise UserError(f"--uncached_length={length} cannot be aligned: both arms need the same slots; use padded")
    if "mitigations" in experiments:
        if "fp64" in settings["precision"]:
            raise UserError(
                "--precision=fp64 has no place in mitigations, which turn float64 on by themselves, for the truth "
                "alone; drop it"
            )
        for name in PARTS:
            if settings[name] is not None:
                raise UserError(f"--{name}={settings[name]}: mitigations compare policies of their own; drop it")
        if settings["regime"] == "aligned":
            raise UserError("--regime=aligned: mitigations have the aligned regime as one of their variants; drop it")
    if "attribution" in experiments and (settings["regime"] == "aligned" or length != "padded"):
        flag = "--regime=aligned" if settings["regime"] == "aligned" else f"--uncached_length={length}"
        raise UserError(f"{flag}: attribution explains the plain regime at one padded length; drop it")
    _check_changes(settings)
    for name in ("drift", "patching", "parity"):
        if name in experiments and length != "padded":
            raise UserError(f"--uncached_length={length}: {name} looks at one padded length; drop it")
        if name in experiments and name != "drift" and settings["regime"] == "aligned":
            raise UserError(f"--regime=aligned leaves {name} nothing to explain; drop it")
    if "torch" not in settings["framework"]:
        if settings["attention"] is not None and "parity" not in experiments:
            raise UserError(
                f"--attention={settings['attention']} has no effect without --framework=torch or parity; drop it"
            )
        return
    if experiments != ["divergence"]:
        odd = next(name for name in experiments if name != "divergence")
        raise UserError(f"--experiments={odd} runs in JAX alone; with --framework=torch use divergence")
    if settings["regime"] == "aligned":
        raise UserError("--regime=aligned is not there in PyTorch; with --framework=torch use plain")


def _check_changes(settings: Settings) -> None:
    """What flags of a changed cache say against others."""
    experiments = settings["experiments"]
    if TEXT_EXPERIMENT in experiments and len(experiments) > 1:
        raise UserError("--experiments=perplexity reads a text, the others problems; run it by itself")
    users = {"cache_error": CHANGED[:2], "cache_quant": CHANGED, "error_seeds": CHANGED[:2]}
    for name, wanted in users.items():
        if settings[name] and not set(experiments) & set(wanted):
            raise UserError(f"--{name} has no effect without --experiments={' or '.join(wanted)}; drop it")
    changing = next((name for name in CHANGED if name in experiments), None)
    if (
        changing
        and settings["regime"] == "aligned"
        and (changing != TEXT_EXPERIMENT or settings["cache_quant"] or settings["cache_error"])
    ):
        raise UserError(f"--regime=aligned: a changed cache has no aligned regime; use plain with {changing}")


def check_condition(one: Settings) -> None:
    """Finds out before anything slow what is wrong with one condition."""
    from jaxkv.models.families import get_preset

    precision = read_precision(one)
    if one["uncached_length"] == "growing" and one["framework"] != "torch":
        raise UserError("--uncached_length=growing is of --framework=torch; in JAX use padded or bucket:M")
    make_sampler(one["sampler"], one["temperature"], one["top_k"], one["top_p"])
    preset = get_preset(one["model"]) if one["model"] else None
    if preset is not None and one["experiments"] != ["doctor"]:
        check_lengths(one, preset)
    if set(CHANGED) & set(one["experiments"]):
        from jaxkv.experiments.accumulation import read_blocks
        from jaxkv.experiments.changes import make_changes, read_seeds

        make_changes(one["cache_error"], one["cache_quant"], preset, precision)
        read_blocks(one["blocks"])
        if one["error_seeds"]:
            read_seeds(one["error_seeds"])
    if one["framework"] == "torch" or "parity" in one["experiments"]:
        from jaxkv.torch_model import check_torch, import_torch

        import_torch()
        check_torch(preset, precision, one["attention"])
        # Before JAX starts: it would otherwise take most of a GPU's memory, which torch needs.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def check_data(conditions: Sequence[Settings]) -> None:
    """Reads the data that conditions ask for, each once, where it lies in a file.

    Raises:
      UserError: a file that is missing, of another kind or broken, or has fewer problems than are asked for.
    """
    seen = []
    for one in conditions:
        asked = [one[name] for name in DATA]
        if asked not in seen and one["experiments"] != ["doctor"]:
            seen.append(asked)
            _check_files(one)
            _read_data(one)


def _check_files(one: Settings) -> None:
    text = one["experiments"] == [TEXT_EXPERIMENT] or one["task"] in TEXTS
    for flag in ("data", "fewshot_data"):
        if one[flag] is None:
            continue
        path = pathlib.Path(one[flag]).expanduser()
        if not path.is_file():
            told = "is a directory, not a file" if path.is_dir() else "does not exist"
            raise UserError(f"--{flag}={one[flag]}: {told}; check the path")
        if not (text and flag == "data") and not path.name.endswith(ROW_FILES):
            raise UserError(
                f"--{flag}={one[flag]}: '{path.suffix}' is no kind of file that is read; use .jsonl or .parquet"
            )


def _read_data(one: Settings) -> None:
    """Loads the task as far as no file of the hub and no tokenizer is needed for it."""
    if one["experiments"] == [TEXT_EXPERIMENT]:
        if one["data"] is not None:
            load_text(one["data"])
        return
    if one["data"] is None and one["task"] != "arith":
        return
    spec = prompt_spec(one, False)
    if spec.shots and one["fewshot_data"] is None and one["task"] != "arith":
        spec = PromptSpec("zero_shot")  # the examples are the hub's
    task = load_task(
        one["task"], data=one["data"], fewshot_data=one["fewshot_data"], spec=spec, subset=one["subset"],
        allow_code_execution=one["allow_code_execution"],
    )  # fmt: skip
    check_count(one, len(task.problems))
