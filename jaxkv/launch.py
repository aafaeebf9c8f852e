"""The command: flags in, a run directory with records, a table and a report out.

    python -m jaxkv.launch --model=gemma2-2b --precision=fp16

Without flags it runs a small model that ships with the package on problems of its own, in fp16 and, as a control, fp32.
Lists make a sweep with one run directory for each condition, and an overview of them; so does a list of flagfiles, for
conditions that differ in more. The same command again does only what is missing; `--flagfile=RUN/run.flags` replays a
run.
"""

import copy
import itertools
import os
import pathlib
from typing import Any

from absl import flags

from jaxkv.analysis.gather import CHANGED
from jaxkv.catalog import EXPERIMENTS
from jaxkv.checkpoints.shipped import SHIPPED
from jaxkv.cli import run_command
from jaxkv.condition import OWN_PRECISIONS, PARTS, TEXT_EXPERIMENT, name_condition, read_precision
from jaxkv.errors import UserError, nearest
from jaxkv.models.families import public_presets
from jaxkv.study import run_study
from jaxkv.sweep import run_sweep

NAMES = (*EXPERIMENTS, "doctor")
PROMPTS = ("auto", "chat", "boxed", "few_shot", "zero_shot")
GRID = ("framework", "model", "precision", "sampler")  # flags whose lists make conditions
NEW_TOKENS = 256
NEW_TOKENS_OF = {
    "arith": 128, "ifeval": 100, "next_string": 8, "math500": 1024, "aime24": 1024, "humaneval": 512,
}  # fmt: skip
FLAGS = flags.FLAGS

_DEFINED = [
    flags.DEFINE_list("model", [], "Presets, e.g. gemma2-2b; weights from the hub unless --checkpoint is set. "
                      f"tiny-gemma2, which ships with the package, if neither is set. {public_presets()}."),
    flags.DEFINE_string("checkpoint", None, "Directory, .gguf file, Orbax checkpoint, hub id, or random:SEED."),
    flags.DEFINE_string("revision", None, "Branch, tag or commit of a hub id; the commit is recorded."),
    flags.DEFINE_list("precision", ["fp16", "fp32"], "fp16, bf16, fp32 (true fp32, not TF32), fp64 (a reference). "
                      "mitigations has policies of its own and runs once, whatever is listed."),
    flags.DEFINE_string("residual", None, "Dtype of the residual stream, if not the precision's."),
    flags.DEFINE_string("accumulation", None, "Dtype products are returned in; the kernel may add in a wider one."),
    flags.DEFINE_string("cache", None, "Dtype of keys and values in both arms, if not the precision's."),
    flags.DEFINE_string("scores", None, "Dtype of q·k up to the softmax, if not the precision's."),
    flags.DEFINE_list("framework", ["jax"], "jax, or torch: the same arms through transformers' PyTorch models."),
    flags.DEFINE_string("attention", None, "With torch: eager or sdpa; eager if not set."),
    flags.DEFINE_list("experiments", ["divergence"], f"Which experiments: {', '.join(NAMES)}."),
    flags.DEFINE_multi_string("cache_error", [], "With injection and perplexity: error put into the cache, e.g. "
                              "normal:0,0.25; once for each."),
    flags.DEFINE_multi_string("cache_quant", [], "With injection, perplexity and accumulation: quantizer of the "
                              "cache, e.g. kvarn:k2v2; once for each."),
    flags.DEFINE_list("error_seeds", [], "Seeds of the errors; 0,1,2 if not set."),
    flags.DEFINE_list("blocks", ["128"], "Accumulation: tokens that are run and packed together, one regime each."),
    flags.DEFINE_string("task", None, "gsm8k, arith, ifeval, next_string, math500, aime24 or humaneval; arith if not "
                        "set for the models that ship with the package."),
    flags.DEFINE_string("subset", "all", "With ifeval: all, or no_length_128: 128 without length instructions."),
    flags.DEFINE_bool("allow_code_execution", False, "With humaneval: run the code that the model wrote."),
    flags.DEFINE_integer("context", 256, "Perplexity: tokens that a window of the text is given.", lower_bound=2),
    flags.DEFINE_string("data", None, "File with the problems, JSONL or Parquet, or with the text of next_string and "
                        "perplexity; the hub's test split if not set."),
    flags.DEFINE_string("fewshot_data", None, "File with worked examples; the hub's train split if not set."),
    flags.DEFINE_string("prompt", "auto", "chat, boxed (gsm8k, arith: chat with the answer in \\boxed{}), few_shot, "
                        "zero_shot, or auto: chat if the tokenizer has a template, else few_shot for gsm8k and "
                        "zero_shot for other tasks; always zero_shot for next_string."),
    flags.DEFINE_integer("shots", None, "Worked examples in the prompt: 8 for few_shot, 0 for others if not set."),
    flags.DEFINE_integer("shots_seed", None, "Chooses the worked examples; the first ones if not set."),
    flags.DEFINE_integer("num_problems", None, "How many problems, from the first: 100 if not set."),
    flags.DEFINE_list("problems", [], "Which problems, by their number in the data from 0; the first ones if not set."),
    flags.DEFINE_integer("max_new_tokens", None, "Most new tokens for a problem, and tokens scored in a window of "
                         "perplexity: 256 if not set, or what suits the task."),
    flags.DEFINE_list("sampler", ["greedy"], "greedy, temperature, top_k, top_p."),
    flags.DEFINE_float("temperature", None, "0.7 if not set, 1.0 with top_p."),
    flags.DEFINE_integer("top_k", None, "50 if not set."),
    flags.DEFINE_float("top_p", None, "0.9 if not set."),
    flags.DEFINE_integer("seed", 0, "Seed of the sampling noise, which both arms share."),
    flags.DEFINE_integer("batch_size", 1, "Problems decoded together."),
    flags.DEFINE_string("padding", "equal", "equal: batches of one prompt length; left: pad on the left."),
    flags.DEFINE_integer("bucket", 64, "Prompts are padded to a multiple of this many rows; fewer shapes to compile."),
    flags.DEFINE_string("uncached_length", None, "Rows of an uncached step: padded (all slots), bucket:M or, with "
                        "torch, growing (the prefix alone). padded if not set; growing with torch and stepwise."),
    flags.DEFINE_string("regime", "plain", "plain, or aligned: both arms through one program of fixed shape."),
    flags.DEFINE_integer("tile", None, "Rows of a tile in the aligned regime and the gate: 16 if not set, 8 on a CPU."),
    flags.DEFINE_string("gate", "on", "on: stop if the aligned arms differ in a bit on a few problems; full: also the "
                        "plain programs, with weights that nothing rounds and that take a second copy; or off."),
    flags.DEFINE_integer("gate_problems", 2, "How many problems the gate tries."),
    flags.DEFINE_string("uncached", None, "draft (cached arm drafts, uncached arm checks; same bits in JAX) or "
                        "stepwise. draft if not set; stepwise with torch."),
    flags.DEFINE_integer("stepwise_problems", 1, "Both forms of the uncached arm run on this many problems."),
    flags.DEFINE_integer("control_problems", 8, "The controls run on this many problems."),
    flags.DEFINE_integer("truth_problems", 2, "Each arm's distance to float64 on this many problems, if it fits."),
    flags.DEFINE_integer("patch_layers", 16, "Patching: most layers that are patched one at a time; 0 for none.",
                         lower_bound=0),
    flags.DEFINE_integer("patch_bins", 4, "Patching: position bins of the layer-by-position grid; 0 for no grid.",
                         lower_bound=0),
    flags.DEFINE_float("doctor_seconds", None, "The doctor begins no compilation after this, and 12 s sooner none that "
                       "only fills a table up; what is missing then is listed. Chosen for a minute in all if not set: "
                       "where kernels are autotuned, on a GPU, a whole table takes minutes.", lower_bound=0.0),
    flags.DEFINE_string("out", None, "Run directory, or that of a sweep; a name with a hash under runs/ if not set."),
    flags.DEFINE_string("compilation_cache", "~/.cache/jaxkv/xla", "Where to keep compiled programs, or none."),
    flags.DEFINE_list("conditions", [], "Flagfiles, each a condition or a grid of them, run one after the other in "
                      "one process; flags beside this one hold for all and override theirs."),
]  # fmt: skip


def _settings(found: flags.FlagValues = FLAGS) -> dict[str, Any]:
    """The flags, with what depends on other flags filled in."""
    values: dict[str, Any] = {
        holder.name: holder.default if found[holder.name].value in ("", []) else found[holder.name].value
        for holder in _DEFINED
    }
    if not values["model"] and values["checkpoint"] is None:
        values["model"] = ["tiny-gemma2"]
    if values["task"] is None:
        ours = values["checkpoint"] is None and all(name in SHIPPED for name in values["model"])
        values["task"] = "arith" if ours else "gsm8k"
    if values["max_new_tokens"] is None:
        text = values["experiments"] == [TEXT_EXPERIMENT]
        values["max_new_tokens"] = NEW_TOKENS if text else NEW_TOKENS_OF.get(values["task"], NEW_TOKENS)
    if values["problems"]:
        values["problems"] = _read_problems(values["problems"], values["num_problems"])
        values["num_problems"] = len(values["problems"])
    elif values["num_problems"] is None:
        values["num_problems"] = 100
    return values


def _read_problems(texts: list[str], count: int | None) -> list[int]:
    """The numbers of --problems. Raises UserError."""
    wrong = next((text for text in texts if not text.strip().isdecimal()), None)
    if wrong is not None:
        raise UserError(f"--problems={','.join(texts)}: '{wrong}' is no number of a problem; write 0,3,17")
    numbers = [int(text) for text in texts]
    if len(set(numbers)) != len(numbers):
        raise UserError(f"--problems={','.join(texts)} names a problem twice; drop one")
    if count not in (None, len(numbers)):
        raise UserError(f"--num_problems={count} and --problems of {len(numbers)} say different things; drop one")
    return numbers


def _forget(found: flags.FlagValues) -> None:
    """Takes back what was parsed, so that another command may be."""
    found.unparse_flags()
    for holder in _DEFINED:
        found[holder.name].unparse()


def _read_flagfiles(files: list[str]) -> list[dict[str, Any]]:
    """Settings of each flagfile with the command's own flags after it, and a directory of its own in --out.

    Raises:
      UserError: a file that cannot be read, holds what is no flag or --conditions, or is called as another is.
    """
    names = [pathlib.PurePath(file).stem for file in files]
    if len(set(names)) != len(names):
        raise UserError(f"--conditions={','.join(files)}: two are called alike, and so would their runs; rename one")
    shared = [FLAGS[holder.name] for holder in _DEFINED if holder.name != "conditions"]
    given = [line for flag in shared if flag.present for line in flag.serialize().split("\n")]
    read = []
    for file, name in zip(files, names, strict=True):
        found = copy.deepcopy(FLAGS)
        _forget(found)
        try:
            found(["launch", f"--flagfile={file}", *given])
        except flags.Error as error:
            raise UserError(f"--conditions={file}: {error}") from error
        if found["conditions"].present:
            raise UserError(f"--conditions={file}: names --conditions itself; list all flagfiles in the command")
        settings = _settings(found)
        read.append(settings | {"out": str(pathlib.Path(settings["out"]) / name) if settings["out"] else None})
    return read


def _conditions(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The grid: settings with one framework, model, precision and sampler each, and each its directory if several.

    Mitigations have precisions of their own: they are a condition for each model and sampler.
    """
    lists = {name: settings[name] or [None] for name in GRID}
    for name, values in lists.items():
        if len(set(values)) != len(values):
            raise UserError(f"--{name}={','.join(values)} names a value twice; drop one")
    grid = []
    own = [name for name in settings["experiments"] if name == OWN_PRECISIONS]
    rest = [name for name in settings["experiments"] if name != OWN_PRECISIONS]
    for experiments, axes in ((rest, lists), (own, lists | {"precision": [None]})):
        for values in itertools.product(*axes.values()) if experiments else ():
            one = settings | {"experiments": experiments} | dict(zip(axes, values, strict=True))
            grid.append(_fill(one))
    if settings["out"] and len(grid) > 1:
        for one in grid:
            one["out"] = str(pathlib.Path(settings["out"]) / name_condition(one))
    return grid


def _fill(one: dict[str, Any]) -> dict[str, Any]:
    """A condition with what its framework decides filled in."""
    torch = one["framework"] == "torch"
    one["attention"] = (one["attention"] or "eager") if torch or "parity" in one["experiments"] else None
    one["uncached"] = one["uncached"] or ("stepwise" if torch else "draft")
    growing = torch and one["uncached"] == "stepwise"
    one["uncached_length"] = one["uncached_length"] or ("growing" if growing else "padded")
    return one


def _choose(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UserError(f"--{name}={value} is not known{nearest(value, list(known))}; known: {', '.join(known)}")
    return value


def _check_settings(settings: dict[str, Any]) -> None:
    """What absl's types do not check."""
    for name in settings["experiments"]:
        _choose("experiments", name, NAMES)
    for name in settings["framework"]:
        _choose("framework", name, ("jax", "torch"))
    _choose("prompt", settings["prompt"], PROMPTS)
    _choose("padding", settings["padding"], ("equal", "left"))
    _choose("regime", settings["regime"], ("plain", "aligned"))
    _choose("gate", settings["gate"], ("on", "full", "off"))
    _choose("uncached", settings["uncached"] or "draft", ("draft", "stepwise"))
    for name in ("num_problems", "max_new_tokens", "batch_size", "bucket", "tile", "gate_problems"):
        if settings[name] is not None and settings[name] < 1:
            raise UserError(f"--{name}={settings[name]} must be at least 1")
    for name in ("control_problems", "stepwise_problems", "truth_problems"):
        if settings[name] < 0:
            raise UserError(f"--{name}={settings[name]} must not be negative")
    if not -(2**31) <= settings["seed"] < 2**31:
        raise UserError(f"--seed={settings['seed']} must fit 32 bits; choose another")
    _check_combinations(settings)


def _check_combinations(settings: dict[str, Any]) -> None:
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


def _check_changes(settings: dict[str, Any]) -> None:
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


def _check_condition(one: dict[str, Any]) -> None:
    """Finds out before anything slow what is wrong with one condition."""
    from jaxkv.models.families import get_preset
    from jaxkv.sampling import make_sampler

    precision = read_precision(one)
    make_sampler(one["sampler"], one["temperature"], one["top_k"], one["top_p"])
    preset = get_preset(one["model"]) if one["model"] else None
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


def launch(argv: list[str]) -> None:
    """Runs the command. Raises UserError on anything the user can mend, SystemExit if conditions of a sweep failed."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument '{argv[1]}'; options are written --name=value")
    files = FLAGS["conditions"].value
    conditions = []
    for settings in _read_flagfiles(files) if files else [_settings()]:
        _check_settings(settings)
        found = _conditions(settings)
        if settings["experiments"] == ["doctor"]:
            found = [found[0] | {"out": settings["out"]}]  # one device, whatever the models
        conditions += found
    for one in conditions:
        _check_condition(one)
    if len(conditions) == 1:
        run_study(conditions[0])
    elif code := run_sweep(conditions, FLAGS["out"].value):
        raise SystemExit(code)


if __name__ == "__main__":
    run_command(launch)
