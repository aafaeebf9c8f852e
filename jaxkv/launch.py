"""The command: flags in, a run directory with records, a table and a report out.

    python -m jaxkv.launch --model=gemma2-2b --precision=fp16

Without flags it runs a small model that ships with the package on problems of its own, in fp16 and, as a control, fp32.
Lists make a sweep with one run directory for each condition, and an overview of them; so does a list of flagfiles, for
conditions that differ in more. The same command again does only what is missing; `--flagfile=RUN/run.flags` replays a
run.
"""

from jaxkv import stopping

if __name__ == "__main__":
    stopping.watch()  # before the imports below, which take seconds

import copy
import itertools
import math
import pathlib
from typing import Any

from absl import flags

from jaxkv.checkpoints.shipped import SHIPPED
from jaxkv.checks import NAMES, check_condition, check_data, check_settings
from jaxkv.cli import parse_flags, read_flagfile, run_command
from jaxkv.condition import OWN_PRECISIONS, TEXT_EXPERIMENT, name_condition
from jaxkv.errors import UserError
from jaxkv.models.families import public_presets
from jaxkv.sampling import TEMPERATURES
from jaxkv.study import run_study
from jaxkv.sweep import run_sweep

GRID = ("framework", "model", "precision", "sampler")  # flags whose lists make conditions
NEW_TOKENS = 256
NEW_TOKENS_OF = {
    "arith": 128, "ifeval": 100, "next_string": 8, "math500": 1024, "aime24": 1024, "humaneval": 512,
}  # fmt: skip
FLAGS = flags.FLAGS

# Bounds of numbers: what lies beyond is a slip of the keyboard, and would fill memory before anything else refused it.
MOST_TOKENS = 131072  # the longest context of a model that we have
MOST_PROBLEMS = 10**6
MOST_ROWS = 4096  # of a batch or a tile
SEEDS = (-(2**31), 2**31 - 1)


class _Items(flags.ListParser):
    """A list without empty items; of whole numbers, kept as text, where there are bounds."""

    def __init__(self, bounds: tuple[int, int] | None):
        super().__init__()
        self._bounds = bounds

    def parse(self, argument: str | list[str]) -> list[str]:
        items = super().parse(argument)
        if isinstance(argument, str):
            if "" in (items or [""]):
                raise ValueError("an item is empty; drop the comma too many, or leave the flag out")
            for item in items if self._bounds else ():
                self._check(item)
        return items

    def _check(self, item: str) -> None:
        low, high = self._bounds or SEEDS
        number = item.removeprefix("-")
        if not (number.isascii() and number.isdecimal() and len(number) < 20 and low <= int(item) <= high):
            raise ValueError(f"'{item:.30}' is no whole number in the range [{low}, {high}]")


class _Number(flags.FloatParser):
    """A float in bounds; NaN lies in none."""

    def convert(self, argument: Any) -> float:
        value = super().convert(argument)
        if math.isnan(value):
            raise ValueError("not a number")
        return value


def _define_list(name: str, default: list[str], help: str, bounds: tuple[int, int] | None = None) -> flags.FlagHolder:
    return flags.DEFINE(_Items(bounds), name, default, help, serializer=flags.CsvListSerializer(","))


def _define_integer(name: str, default: int | None, bounds: tuple[int, int], help: str) -> flags.FlagHolder:
    return flags.DEFINE_integer(name, default, help, *bounds)


def _define_float(name: str, bounds: tuple[float, float], help: str) -> flags.FlagHolder:
    return flags.DEFINE(_Number(*bounds), name, None, help, serializer=flags.ArgumentSerializer())


_DEFINED = [
    _define_list("model", [], "Presets, e.g. gemma2-2b; weights from the hub unless --checkpoint is set. "
                 f"tiny-gemma2, which ships with the package, if neither is set. {public_presets()}."),
    flags.DEFINE_string("checkpoint", None, "Directory, .gguf file, Orbax checkpoint, hub id, or random:SEED."),
    flags.DEFINE_string("revision", None, "Branch, tag or commit of a hub id; the commit is recorded."),
    _define_list("precision", ["fp16", "fp32"], "fp16, bf16, fp32 (true fp32, not TF32), fp64 (a reference). "
                 "mitigations has policies of its own and runs once, whatever is listed."),
    flags.DEFINE_string("residual", None, "Dtype of the residual stream, if not the precision's."),
    flags.DEFINE_string("accumulation", None, "Dtype products are returned in; the kernel may add in a wider one."),
    flags.DEFINE_string("cache", None, "Dtype of keys and values in both arms, if not the precision's."),
    flags.DEFINE_string("scores", None, "Dtype of q·k up to the softmax, if not the precision's."),
    _define_list("framework", ["jax"], "jax, or torch: the same arms through transformers' PyTorch models."),
    flags.DEFINE_string("attention", None, "With torch: eager or sdpa; eager if not set."),
    _define_list("experiments", ["divergence"], f"Which experiments: {', '.join(NAMES)}."),
    flags.DEFINE_multi_string("cache_error", [], "With injection and perplexity: error put into the cache, e.g. "
                              "normal:0,0.25; once for each."),
    flags.DEFINE_multi_string("cache_quant", [], "With injection, perplexity and accumulation: quantizer of the "
                              "cache, e.g. kvarn:k2v2; once for each."),
    _define_list("error_seeds", [], "Seeds of the errors; 0,1,2 if not set.", SEEDS),
    _define_list("blocks", ["128"], "Accumulation: tokens that are run and packed together, one regime each.",
                 (1, MOST_TOKENS)),
    flags.DEFINE_string("task", None, "gsm8k, arith, ifeval, next_string, math500, aime24 or humaneval; arith if "
                        "not set for the models that ship with the package."),
    flags.DEFINE_string("subset", "all", "With ifeval: all, or no_length_128: 128 without length instructions."),
    flags.DEFINE_bool("allow_code_execution", False, "With humaneval: run the code that the model wrote."),
    _define_integer("context", 256, (2, MOST_TOKENS), "Perplexity: tokens that a window of the text is given."),
    flags.DEFINE_string("data", None, "File with the problems, JSONL or Parquet, or with the text of next_string "
                        "and perplexity; the hub's test split if not set."),
    flags.DEFINE_string("fewshot_data", None, "File with worked examples; the hub's train split if not set."),
    flags.DEFINE_string("prompt", "auto", "chat, boxed (gsm8k, arith: chat with the answer in \\boxed{}), few_shot, "
                        "zero_shot, or auto: chat if the tokenizer has a template, else few_shot for gsm8k and "
                        "zero_shot for other tasks; always zero_shot for next_string."),
    _define_integer("shots", None, (0, 100), "Worked examples in the prompt: 8 for few_shot, 0 for others if not "
                    "set."),
    _define_integer("shots_seed", None, SEEDS, "Chooses the worked examples; the first ones if not set."),
    _define_integer("num_problems", None, (1, MOST_PROBLEMS), "How many problems, from the first: 100 if not set."),
    _define_list("problems", [], "Which problems, by their number in the data from 0; the first ones if not set.",
                 (0, MOST_PROBLEMS)),
    _define_integer("max_new_tokens", None, (1, MOST_TOKENS), "Most new tokens for a problem, and tokens scored in "
                    "a window of perplexity: 256 if not set, or what suits the task."),
    _define_list("sampler", ["greedy"], "greedy, temperature, top_k, top_p."),
    _define_float("temperature", TEMPERATURES, "0.7 if not set, 1.0 with top_p."),
    _define_integer("top_k", None, (1, MOST_PROBLEMS), "50 if not set."),
    _define_float("top_p", (1e-06, 1.0), "0.9 if not set."),
    _define_integer("seed", 0, SEEDS, "Seed of the sampling noise, which both arms share."),
    _define_integer("batch_size", 1, (1, MOST_ROWS), "Problems decoded together."),
    flags.DEFINE_string("padding", "equal", "equal: batches of one prompt length; left: pad on the left."),
    _define_integer("bucket", 64, (1, MOST_TOKENS), "Prompts are padded to a multiple of this many rows; fewer "
                    "shapes to compile."),
    flags.DEFINE_string("uncached_length", None, "Rows of an uncached step: padded (all slots), bucket:M or, with "
                        "torch, growing (the prefix alone). padded if not set; growing with torch and stepwise."),
    flags.DEFINE_string("regime", "plain", "plain, or aligned: both arms through one program of fixed shape."),
    _define_integer("tile", None, (1, MOST_ROWS), "Rows of a tile in the aligned regime and the gate: 16 if not "
                    "set, 8 on a CPU."),
    flags.DEFINE_string("gate", "on", "on: stop if the aligned arms differ in a bit on a few problems; full: also "
                        "the plain programs, with weights that nothing rounds and that take a second copy; or off."),
    _define_integer("gate_problems", 2, (1, MOST_PROBLEMS), "How many problems the gate tries."),
    flags.DEFINE_string("uncached", None, "draft (cached arm drafts, uncached arm checks; same bits in JAX) or "
                        "stepwise. draft if not set; stepwise with torch."),
    _define_integer("stepwise_problems", 1, (0, MOST_PROBLEMS), "Both forms of the uncached arm run on this many "
                    "problems."),
    _define_integer("control_problems", 8, (0, MOST_PROBLEMS), "The controls run on this many problems."),
    _define_integer("truth_problems", 2, (0, MOST_PROBLEMS), "Each arm's distance to float64 on this many "
                    "problems, if it fits."),
    _define_integer("patch_layers", 16, (0, 1000), "Patching: most layers that are patched one at a time; 0 for "
                    "none."),
    _define_integer("patch_bins", 4, (0, 1000), "Patching: position bins of the layer-by-position grid; 0 for no "
                    "grid."),
    _define_float("doctor_seconds", (0.0, 86400.0), "The doctor begins no compilation after this, and 12 s sooner "
                  "none that only fills a table up; what is missing then is listed. Chosen for a minute in all if "
                  "not set: where kernels are autotuned, on a GPU, a whole table takes minutes."),
    flags.DEFINE_string("out", None, "Run directory, or that of a sweep; a name with a hash under runs/ if not "
                        "set."),
    flags.DEFINE_string("compilation_cache", "~/.cache/jaxkv/xla", "Where to keep compiled programs, or none."),
    _define_list("conditions", [], "Flagfiles, each a condition or a grid of them, run one after the other in one "
                 "process; flags beside this one hold for all and override theirs."),
]  # fmt: skip


def _settings(found: flags.FlagValues = FLAGS) -> dict[str, Any]:
    """The flags, with what depends on other flags filled in."""
    for holder in _DEFINED:
        if found[holder.name].present and found[holder.name].value == "":
            raise UserError(f"--{holder.name}= is empty; give a value or drop the flag")
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
            odd = parse_flags(["launch", *read_flagfile(file), *given], found)[1:]
        except UserError as error:
            raise UserError(f"--conditions={file}: {error}") from error
        if odd:
            raise UserError(f"--conditions={file}: '{odd[0]}' is no flag; write one flag a line as --name=value")
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


def launch(argv: list[str]) -> None:
    """Runs the command. Raises UserError on anything the user can mend, SystemExit if conditions of a sweep failed."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument '{argv[1]}'; options are written --name=value")
    files = FLAGS["conditions"].value
    conditions = []
    for settings in _read_flagfiles(files) if files else [_settings()]:
        check_settings(settings)
        found = _conditions(settings)
        if settings["experiments"] == ["doctor"]:
            found = [found[0] | {"out": settings["out"]}]  # one device, whatever the models
        conditions += found
    for one in conditions:
        check_condition(one)
    check_data(conditions)
    if len(conditions) == 1:
        run_study(conditions[0])
    elif code := run_sweep(conditions, FLAGS["out"].value):
        raise SystemExit(code)


if __name__ == "__main__":
    run_command(launch)
