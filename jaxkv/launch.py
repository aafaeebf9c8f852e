"""The command: flags in, a run directory with records, a table and a report out.

    python -m jaxkv.launch --model=gemma2-2b --precision=fp16

Without flags it runs a small model that ships with the package on problems of its own, in fp16 and, as a control, fp32.
Lists make a grid with one run directory for each condition. The same command again does only what is missing;
`--flagfile=RUN/run.flags` replays a run.
"""

import itertools
import pathlib
from typing import Any

from absl import flags

from jaxkv.checkpoints.shipped import SHIPPED
from jaxkv.cli import run_command
from jaxkv.errors import UserError, nearest
from jaxkv.study import read_precision, run_study

EXPERIMENTS = ("divergence", "attribution", "mitigations", "doctor")
PROMPTS = ("auto", "chat", "few_shot", "zero_shot")
GRID = ("model", "precision", "sampler")  # flags whose lists make conditions
FLAGS = flags.FLAGS

_DEFINED = [
    flags.DEFINE_list("model", [], "Presets, e.g. gemma2-2b; weights from the hub unless --checkpoint is set. "
                      "tiny-gemma2, which ships with the package, if neither is set."),
    flags.DEFINE_string("checkpoint", None, "Directory, .gguf file, Orbax checkpoint, hub id, or random:SEED."),
    flags.DEFINE_string("revision", None, "Branch, tag or commit of a hub id; the commit is recorded."),
    flags.DEFINE_list("precision", ["fp16", "fp32"], "fp16, bf16, fp32 (true fp32, not TF32), fp64 (a reference)."),
    flags.DEFINE_string("residual", None, "Dtype of the residual stream, if not the precision's."),
    flags.DEFINE_string("accumulation", None, "Dtype products are returned in; the kernel may add in a wider one."),
    flags.DEFINE_string("cache", None, "Dtype of keys and values in both arms, if not the precision's."),
    flags.DEFINE_list("experiments", ["divergence"], f"Which experiments: {', '.join(EXPERIMENTS)}."),
    flags.DEFINE_string("task", None, "gsm8k or arith; arith if not set for the models that ship with the package."),
    flags.DEFINE_string("data", None, "JSONL or Parquet file with the problems; the hub's test split if not set."),
    flags.DEFINE_string("fewshot_data", None, "File with worked examples; the hub's train split if not set."),
    flags.DEFINE_string("prompt", "auto", "chat, few_shot, zero_shot, or auto: chat if the tokenizer has a template, "
                        "zero_shot for arith, else few_shot."),
    flags.DEFINE_integer("shots", None, "Worked examples in the prompt: 8 for few_shot, 0 for chat if not set."),
    flags.DEFINE_integer("shots_seed", None, "Chooses the worked examples; the first ones if not set."),
    flags.DEFINE_integer("num_problems", None, "How many problems, from the first: 100 if not set."),
    flags.DEFINE_integer("max_new_tokens", None, "Most new tokens for a problem: 256 if not set, 128 in arith."),
    flags.DEFINE_list("sampler", ["greedy"], "greedy, temperature, top_k, top_p."),
    flags.DEFINE_float("temperature", None, "0.7 if not set, 1.0 with top_p."),
    flags.DEFINE_integer("top_k", None, "50 if not set."),
    flags.DEFINE_float("top_p", None, "0.9 if not set."),
    flags.DEFINE_integer("seed", 0, "Seed of the sampling noise, which both arms share."),
    flags.DEFINE_integer("batch_size", 1, "Problems decoded together."),
    flags.DEFINE_string("padding", "equal", "equal: batches of one prompt length; left: pad on the left."),
    flags.DEFINE_integer("bucket", 64, "Prompts are padded to a multiple of this many rows; fewer shapes to compile."),
    flags.DEFINE_string("uncached_length", "padded", "Rows of an uncached step: padded (all slots) or bucket:M."),
    flags.DEFINE_string("regime", "plain", "plain, or aligned: both arms through one program of fixed shape."),
    flags.DEFINE_integer("tile", None, "Rows of a tile in the aligned regime and the gate: 16 if not set, 8 on a CPU."),
    flags.DEFINE_string("gate", "on", "on: stop if the aligned arms differ in a bit on a few problems; or off."),
    flags.DEFINE_integer("gate_problems", 2, "How many problems the gate tries."),
    flags.DEFINE_string("uncached", "draft", "draft (cached arm drafts, uncached arm checks; same bits) or stepwise."),
    flags.DEFINE_integer("stepwise_problems", 1, "With draft, brute force runs beside it on this many problems."),
    flags.DEFINE_integer("control_problems", 8, "The controls run on this many problems."),
    flags.DEFINE_string("out", None, "Run directory; runs/MODEL-PRECISION-SAMPLER-HASH if not set."),
    flags.DEFINE_string("compilation_cache", "~/.cache/jaxkv/xla", "Where to keep compiled programs, or none."),
]  # fmt: skip


def _settings() -> dict[str, Any]:
    """The flags, with what depends on other flags filled in."""
    values: dict[str, Any] = {
        holder.name: holder.default if holder.value in ("", []) else holder.value for holder in _DEFINED
    }
    if not values["model"] and values["checkpoint"] is None:
        values["model"] = ["tiny-gemma2"]
    if values["task"] is None:
        ours = values["checkpoint"] is None and all(name in SHIPPED for name in values["model"])
        values["task"] = "arith" if ours else "gsm8k"
    for name, arith, usual in (("num_problems", 100, 100), ("max_new_tokens", 128, 256)):
        if values[name] is None:
            values[name] = arith if values["task"] == "arith" else usual
    return values


def _conditions(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The grid: settings with one model, precision and sampler each, and each its directory if there are several."""
    lists = [settings[name] or [None] for name in GRID]
    for name, values in zip(GRID, lists, strict=True):
        if len(set(values)) != len(values):
            raise UserError(f"--{name}={','.join(values)} names a value twice; drop one")
    grid = [settings | dict(zip(GRID, values, strict=True)) for values in itertools.product(*lists)]
    if settings["out"] and len(grid) > 1:
        for one in grid:
            one["out"] = str(pathlib.Path(settings["out"]) / "-".join(one[name] or "model" for name in GRID))
    return grid


def _choose(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UserError(f"--{name}={value} is not known{nearest(value, list(known))}; known: {', '.join(known)}")
    return value


def _check_settings(settings: dict[str, Any]) -> None:
    """What absl's types do not check."""
    for name in settings["experiments"]:
        _choose("experiments", name, EXPERIMENTS)
    if "doctor" in settings["experiments"] and len(settings["experiments"]) > 1:
        raise UserError("--experiments=doctor examines the device, not a model; run it by itself")
    _choose("prompt", settings["prompt"], PROMPTS)
    _choose("padding", settings["padding"], ("equal", "left"))
    _choose("regime", settings["regime"], ("plain", "aligned"))
    _choose("gate", settings["gate"], ("on", "off"))
    _choose("uncached", settings["uncached"], ("draft", "stepwise"))
    for name in ("num_problems", "max_new_tokens", "batch_size", "bucket", "tile", "gate_problems"):
        if settings[name] is not None and settings[name] < 1:
            raise UserError(f"--{name}={settings[name]} must be at least 1")
    for name in ("control_problems", "stepwise_problems"):
        if settings[name] < 0:
            raise UserError(f"--{name}={settings[name]} must not be negative")
    if settings["regime"] == "aligned" and settings["uncached_length"] != "padded":
        raise UserError(
            f"--uncached_length={settings['uncached_length']} cannot be aligned: both arms need the same slots; "
            "use padded"
        )
    if not -(2**31) <= settings["seed"] < 2**31:
        raise UserError(f"--seed={settings['seed']} must fit 32 bits; choose another")


def launch(argv: list[str]) -> None:
    """Runs the command. Raises UserError on anything the user can mend."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument '{argv[1]}'; options are written --name=value")
    settings = _settings()
    _check_settings(settings)
    conditions = _conditions(settings)
    if settings["experiments"] == ["doctor"]:
        conditions = [conditions[0] | {"out": settings["out"]}]  # one device, whatever the models
    from jaxkv.models.families import get_preset
    from jaxkv.sampling import make_sampler

    for one in conditions:  # before anything slow: a typo ends here
        read_precision(one)
        make_sampler(one["sampler"], one["temperature"], one["top_k"], one["top_p"])
        if one["model"]:
            get_preset(one["model"])
    for one in conditions:
        run_study(one)


if __name__ == "__main__":
    run_command(launch)
