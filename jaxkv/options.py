"""Every option of the command once. Flags, run.flags and the name of a run's directory are made of these dataclasses.

A new option is a new field. Its annotation is the type in a condition that jaxkv.launch has filled in; None as the
default stands for what depends on other options. Imports nothing that takes long: registries are asked when needed.
"""

import dataclasses
import math
import pathlib
import pkgutil
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

SAMPLERS = ("greedy", "temperature", "top_k", "top_p")
# Bounds of numbers: what lies beyond is a slip of the keyboard, and would fill memory before anything else refused it.
MOST_TOKENS = 131072  # the longest context of a model that we have
MOST_PROBLEMS = 10**6
MOST_ROWS = 4096  # of a batch or a tile
SEEDS = (-(2**31), 2**31 - 1)
# Beyond them logits / temperature is infinite in float32 for large logits, or lost in the noise for all.
TEMPERATURES = (1e-4, 1e4)
DTYPES = "jaxkv.config:DTYPES"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option, as its field declares it; `list_options` fills in the last four."""

    default: Any
    help: str  # {choices} stands for those
    low: float = -math.inf  # least value of a number, or of each of several
    high: float = math.inf
    choices: tuple[str, ...] | str = ()  # of a text, or "module:name" where they stand; none if any will do
    flag: str = ""  # that of the field if not given
    axis: tuple[str, ...] | None = None  # default of a flag that lists values, each of which makes a condition
    repeated: bool = False  # the flag is given once for each of several values, which hold commas
    path: bool = False  # it may name a file, which run.flags then has in full
    incidental: bool = False  # it decides no number of a model, and is not in the name of a run's directory
    named_by: Callable[[Any], str] | None = None  # makes of each of several values what it is in that name
    group: str = ""  # field of Options that has it
    name: str = ""  # of its field
    kind: type = str  # str, int, float or bool, of each of several values
    several: bool = False

    def known(self) -> tuple[str, ...]:
        """The choices."""
        return tuple(pkgutil.resolve_name(self.choices) if isinstance(self.choices, str) else self.choices)

    def explain(self) -> str:
        """The help."""
        return self.help.replace("{choices}", ", ".join(self.known())) if "{choices}" in self.help else self.help

    def get(self, options: "Options") -> Any:
        """Its value."""
        return getattr(getattr(options, self.group), self.name)

    def items(self, options: "Options") -> tuple[Any, ...]:
        """Its values, none if it is not set."""
        value = self.get(options)
        return value if self.several else () if value is None else (value,)


def option(default: Any, *how: Any, **more: Any) -> Any:
    """A field of a group of options, as Option has it."""
    return dataclasses.field(default=default, metadata={"option": Option(default, *how, **more)})


# fmt: off
@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model."""

    name: str | None = option(
        None, "Presets, e.g. gemma2-2b or smollm2-135m; --model=? lists all. Weights from the hub unless --checkpoint "
        "is set; a model that ships with the package if neither is.", flag="model", axis=())
    checkpoint: str | None = option(None, "Directory, .gguf file, Orbax checkpoint, hub id, or random:SEED.", path=True)
    revision: str | None = option(None, "Branch, tag or commit of a hub id; the commit is recorded.")


@dataclasses.dataclass(frozen=True)
class PrecisionOptions:
    """What numbers are held and computed in. `name` is None in a condition that has policies of its own."""

    name: str | None = option(
        None, "fp16, bf16, fp32 (true fp32, not TF32), fp64 (a reference). mitigations has policies of its own and "
        "runs once, whatever is listed.", choices=DTYPES, flag="precision", axis=("fp16", "fp32"))
    residual: str | None = option(None, "Dtype of the residual stream, if not the precision's.", choices=DTYPES)
    accumulation: str | None = option(
        None, "Dtype products are returned in; the kernel may add in a wider one.", choices=DTYPES)
    cache: str | None = option(None, "Dtype of keys and values in both arms, if not the precision's.", choices=DTYPES)
    scores: str | None = option(None, "Dtype of q·k up to the softmax, if not the precision's.", choices=DTYPES)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What is run, and by which framework. `attention` is None in a condition without PyTorch."""

    framework: str = option(
        "jax", "jax, or torch: the same arms through transformers' PyTorch models.", choices=("jax", "torch"),
        axis=("jax",))
    attention: str = option(None, "With torch: eager or sdpa; eager if not set.")
    experiments: tuple[str, ...] = option(
        ("divergence",), "Which experiments: {choices}.", choices="jaxkv.experiments.experiment:NAMES")
    target: str = option(
        "here", "Lowering: what to compile for: here, cpu, or a TPU that need not be there, e.g. tpu:v5e:2x2.",
        incidental=True)


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """What is done to the cache."""

    cache_error: tuple[str, ...] = option(
        (), "With injection and perplexity: error put into the cache, e.g. normal:0,0.25; once for each.",
        repeated=True)
    cache_quant: tuple[str, ...] = option(
        (), "With injection, perplexity and accumulation: quantizer of the cache, e.g. kvarn:k2v2; once for each.",
        repeated=True)
    error_seeds: tuple[int, ...] = option((), "Seeds of the errors; 0,1,2 if not set.", *SEEDS, named_by=str)
    blocks: tuple[int, ...] = option(
        (128,), "Accumulation: tokens that are run and packed together, one regime each.", 1, MOST_TOKENS,
        named_by=str)


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Which problems or text, and how they are put to the model."""

    task: str = option(
        None, "{choices}: a generate_until task of lm-evaluation-harness or a YAML file of one. arith if not set for "
        "the models that ship with the package.", choices="jaxkv.tasks:TASKS")
    subset: str = option(
        "all", "With ifeval: all, or no_length_128: 128 without length instructions.",
        choices="jaxkv.tasks.task:SUBSETS")
    allow_code_execution: bool = option(False, "With humaneval: run the code that the model wrote.")
    context: int = option(
        256, "Perplexity: tokens that a window of the text is given. Lowering: tokens of the prompt.", 2, MOST_TOKENS)
    data: str | None = option(
        None, "File with the problems, JSONL or Parquet, or with the text of next_string and perplexity; the hub's "
        "test split if not set.", path=True)
    fewshot_data: str | None = option(None, "File with worked examples; the hub's train split if not set.", path=True)
    prompt: str = option(
        "auto", "chat, boxed (gsm8k, arith: chat with the answer in \\boxed{}), few_shot, zero_shot, or auto: chat if "
        "the tokenizer has a template, else few_shot for gsm8k and zero_shot for other tasks; always zero_shot for "
        "next_string.", choices=("auto", "chat", "boxed", "few_shot", "zero_shot"))
    shots: int | None = option(None, "Worked examples in the prompt: 8 for few_shot, 0 for others if not set.", 0, 100)
    shots_seed: int | None = option(None, "Chooses the worked examples; the first ones if not set.", *SEEDS)
    num_problems: int = option(None, "How many problems, from the first: 100 if not set.", 1, MOST_PROBLEMS)
    problems: tuple[int, ...] = option(
        (), "Which problems, by their number in the data from 0; the first ones if not set.", 0, MOST_PROBLEMS)


@dataclasses.dataclass(frozen=True)
class DecodingOptions:
    """How tokens are chosen, and the shapes in which they are computed."""

    max_new_tokens: int = option(
        None, "Most new tokens for a problem, and tokens scored in a window of perplexity: 256 if not set, or what "
        "suits the task.", 1, MOST_TOKENS)
    sampler: str = option("greedy", "{choices}.", choices=SAMPLERS, axis=("greedy",))
    temperature: float | None = option(None, "0.7 if not set, 1.0 with top_p.", *TEMPERATURES)
    top_k: int | None = option(None, "50 if not set.", 1, MOST_PROBLEMS)
    top_p: float | None = option(None, "0.9 if not set.", 1e-06, 1.0)
    seed: int = option(0, "Seed of the sampling noise, which both arms share.", *SEEDS)
    batch_size: int = option(1, "Problems decoded together.", 1, MOST_ROWS)
    padding: str = option(
        "equal", "equal: batches of one prompt length; left: pad on the left.", choices=("equal", "left"))
    bucket: int = option(
        64, "Prompts are padded to a multiple of this many rows; fewer shapes to compile.", 1, MOST_TOKENS)
    uncached_length: str = option(
        None, "Rows of an uncached step: padded (all slots), bucket:M or, with torch, growing (the prefix alone). "
        "padded if not set; growing with torch and stepwise.")


@dataclasses.dataclass(frozen=True)
class ControlOptions:
    """What rules other explanations out, and how far that is taken."""

    regime: str = option(
        "plain", "plain, or aligned: both arms through one program of fixed shape.", choices=("plain", "aligned"))
    tile: int | None = option(
        None, "Rows of a tile in the aligned regime and the gate: 16 if not set, 8 on a CPU.", 1, MOST_ROWS)
    gate: str = option(
        "on", "on: stop if the aligned arms differ in a bit on a few problems; full: also the plain programs, with "
        "weights that nothing rounds and that take a second copy; or off.", choices=("on", "full", "off"))
    gate_problems: int = option(2, "How many problems the gate tries.", 1, MOST_PROBLEMS)
    uncached: str = option(
        None, "draft (cached arm drafts, uncached arm checks; same bits in JAX) or stepwise. draft if not set; "
        "stepwise with torch.", choices=("draft", "stepwise"))
    stepwise_problems: int = option(1, "Both forms of the uncached arm run on this many problems.", 0, MOST_PROBLEMS)
    control_problems: int = option(8, "The controls run on this many problems.", 0, MOST_PROBLEMS)
    truth_problems: int = option(
        2, "Each arm's distance to float64 on this many problems, if it fits.", 0, MOST_PROBLEMS)
    patch_layers: int = option(16, "Patching: most layers that are patched one at a time; 0 for none.", 0, 1000)
    patch_bins: int = option(4, "Patching: position bins of the layer-by-position grid; 0 for no grid.", 0, 1000)
    doctor_seconds: float | None = option(
        None, "The doctor begins no compilation after this, and 12 s sooner none that only fills a table up; what is "
        "missing then is listed. Chosen for a minute in all if not set: where kernels are autotuned, on a GPU, a whole "
        "table takes minutes.", 0.0, 86400.0, incidental=True)
    tree_seconds: float = option(
        60.0, "Lowering: no order of a sum is looked for after so long; 0 for none at all.", 0.0, 86400.0,
        incidental=True)


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """Where things are kept, and flagfiles in the place of one condition."""

    out: str | None = option(
        None, "Run directory, or that of a sweep; a name with a hash under runs/ if not set.", incidental=True)
    compilation_cache: str = option("~/.cache/jaxkv/xla", "Where to keep compiled programs, or none.", incidental=True)
    conditions: tuple[str, ...] = option(
        (), "Flagfiles, each a condition or a grid of them, run one after the other in one process; flags beside this "
        "one hold for all and override theirs.", incidental=True)
    verbose: bool = option(False, "-v: everything that the report has for a terminal.", incidental=True)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one condition. run.flags has them in this order."""

    model: ModelOptions = ModelOptions()
    precision: PrecisionOptions = PrecisionOptions()
    run: RunOptions = RunOptions()
    cache: CacheOptions = CacheOptions()
    data: DataOptions = DataOptions()
    decoding: DecodingOptions = DecodingOptions()
    controls: ControlOptions = ControlOptions()
    output: OutputOptions = OutputOptions()


def list_options(cls: type) -> tuple[Option, ...]:
    """The options of a class whose fields are groups, in order."""
    found = []
    for group, members in typing.get_type_hints(cls).items():
        hints = typing.get_type_hints(members)
        for field in dataclasses.fields(members):
            hint, given = hints[field.name], field.metadata["option"]
            inner = [kind for kind in typing.get_args(hint) if kind not in (types.NoneType, Ellipsis)]
            found.append(
                dataclasses.replace(
                    given, group=group, name=field.name, flag=given.flag or field.name,
                    kind=inner[0] if inner else hint, several=typing.get_origin(hint) is tuple,
                )
            )  # fmt: skip
    return tuple(found)


OPTIONS = list_options(Options)


def make_options(values: Sequence[Any]) -> Options:
    """Options of their values, in the order of OPTIONS."""
    given: dict[str, dict[str, Any]] = {}
    for one, value in zip(OPTIONS, values, strict=True):
        given.setdefault(one.group, {})[one.name] = value
    kinds = typing.get_type_hints(Options)
    return Options(**{group: kinds[group](**parts) for group, parts in given.items()})


def to_flagfile(options: Options) -> str:
    """A flagfile that gives these options again, from any directory."""
    lines = []
    for one in OPTIONS:
        texts = [str(value) for value in one.items(options)]
        if one.path:
            texts = [str(path.resolve()) if (path := pathlib.Path(t).expanduser()).exists() else t for t in texts]
        if one.several and not one.repeated and texts:
            texts = [",".join(texts)]
        lines += [f"--{one.flag}={text}\n" for text in texts]
    return "".join(lines)


def name_values(options: Options) -> dict[str, Any]:
    """All that decides numbers, by flag, as the name of a run's directory has it in its hash."""
    found = {}
    for one in OPTIONS:
        if not one.incidental:
            value = one.get(options)
            found[one.flag] = value if one.named_by is None else [one.named_by(item) for item in value]
    return found
