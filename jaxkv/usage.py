"""What the commands print for -h: examples first, then flags by what they are about. Imports nothing that is slow."""

import ast
import dataclasses
import importlib.metadata
import os
import pathlib
import sys
import textwrap
from collections.abc import Iterator, Sequence

from jaxkv.errors import UserError
from jaxkv.options import OPTIONS, Option, Options, list_options, option

WIDTH, INDENT = 80, 28


@dataclasses.dataclass(frozen=True)
class Verb:
    """One of `jaxkv VERB`: `start` is "module:function" that takes the arguments and may return an exit code.

    `before` are arguments that it always has, `slow` says whether its imports take seconds, and `lost` what a line on
    Ctrl-C says is lost; the usual one if None.
    """

    start: str
    brief: str
    before: tuple[str, ...] = ()
    slow: bool = True
    lost: str | None = None


_NOTHING = "nothing is written; run it again"
VERBS = {
    "compare": Verb("jaxkv.compare_prompts:start", "a prompt with the cache and without it: where texts part, and why",
                    lost=_NOTHING),
    "run": Verb("jaxkv.launch:start", "a study of many problems, with controls, records and a report"),
    "report": Verb("jaxkv.report:main", "reports from the records of runs", slow=False),
    "doctor": Verb("jaxkv.launch:start", "what changes a row's bits on this device", ("--experiments=doctor",)),
    "lowering": Verb("jaxkv.launch:start", "what each arm is compiled to here or on a TPU: which kernels, which order",
                     ("--experiments=lowering",)),
    "convert": Verb("jaxkv.checkpoints.convert:start", "a checkpoint to our own format", lost=_NOTHING),
    "export": Verb("jaxkv.checkpoints.export:start", "a checkpoint to a directory for transformers", lost=_NOTHING),
    "bench": Verb("jaxkv.benchmark:start", "speed and memory of the arms", lost=_NOTHING),
    "import": Verb("jaxkv.foreign:main", "results of other engines as a run directory", slow=False),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AskOptions:
    """What is compared, and how it is told."""

    file: str | None = option(None, "Prompt in a file, or prompts in a .jsonl file with a field `prompt` a line.")
    beside: str | None = option(
        None, "Compare with precision:fp32, cache_quant:SPEC, cache_error:SPEC or framework:torch instead of no cache.",
        flag="with")  # fmt: skip
    raw: bool = option(False, "The prompt as it stands, without the model's chat template.")
    fail_if: str | None = option(
        None,
        "Exit with code 1 if so, e.g. 'flips>0.1%': flips, bits (shares of tokens), diverged (of texts), kl (mean).",
    )
    json: bool = option(False, "Records, one line of JSON a prompt, in place of text.")
    verbose: bool = option(False, "-v: both texts in full, and more figures.")


@dataclasses.dataclass(frozen=True)
class _Ask:
    ask: AskOptions = AskOptions()


ASK_OPTIONS = list_options(_Ask)
_SHARED = (
    "model", "checkpoint", "revision", "precision", "residual", "accumulation", "cache", "scores", "max_new_tokens",
    "sampler", "temperature", "top_k", "top_p", "seed", "bucket", "compilation_cache",
)  # fmt: skip
_DEFAULTS = {"precision": "bf16", "sampler": "greedy", "max_new_tokens": 64, "model": None}
COMPARE_OPTIONS = ASK_OPTIONS + tuple(
    dataclasses.replace(one, axis=None, default=_DEFAULTS.get(one.flag, one.default))
    for one in OPTIONS
    if one.flag in _SHARED
)

_FLAGS_OF = {
    "doctor": ("doctor_seconds", "out", "compilation_cache"),
    "lowering": (
        "model", "precision", "residual", "accumulation", "cache", "scores", "target", "context", "max_new_tokens",
        "batch_size", "bucket", "regime", "tile", "tree_seconds", "out",
    ),
}  # fmt: skip

_EXAMPLES = {
    "compare": """\
jaxkv compare "Natalia sold clips to 48 of her friends. How many are left?"
jaxkv compare - --model=smollm2-135m --checkpoint=model.gguf < prompt.txt
jaxkv compare "2 + 2 =" --with=precision:fp32
jaxkv compare "2 + 2 =" --with=cache_quant:kvarn:k2v2 --max-new-tokens=128
jaxkv compare --file=prompts.jsonl --fail-if='flips>0.1%' --json
Exit codes: 0; 1 if --fail-if holds or memory runs out; 2 after a mistake, and
for a fault of the cache or numbers that are not finite.""",
    "run": """\
jaxkv run
jaxkv run --model=gemma2-2b --precision=bf16,fp32
jaxkv run --model=smollm2-135m --checkpoint=model.gguf --data=gsm8k.jsonl
jaxkv run --experiments=injection --precision=fp16 --cache-quant=kvarn:k2v2
jaxkv run --flagfile=paper
The same command again does only what is missing; --flagfile=RUN/run.flags
replays a run.""",
    "doctor": """\
jaxkv doctor
jaxkv doctor --doctor-seconds=150 --out=doctor-h100""",
    "lowering": """\
jaxkv lowering --model=gemma2-2b --precision=fp16
jaxkv lowering --model=gemma2-2b --precision=bf16 --target=tpu:v5e:2x2
No weights, no device of that kind and no data are needed.""",
}


def main_help() -> str:
    """Of `jaxkv` alone."""
    lines = ["Does the KV cache change what a model says, where, and why?", ""]
    lines += [
        '  jaxkv compare "2 + 2 ="',
        "  jaxkv run",
        "  jaxkv report runs/NAME",
        "",
        "Verbs; `jaxkv VERB -h` says more:",
    ]
    return "\n".join([*lines, *(f"  {name:9}{verb.brief}" for name, verb in VERBS.items())])


def verb_help(name: str) -> str:
    """Of one verb."""
    if name not in _EXAMPLES:
        return _explain_module(name)
    head = f"jaxkv {name}: {VERBS[name].brief}\n\n{textwrap.indent(_EXAMPLES[name], '  ')}\n"
    shown = {"compare": COMPARE_OPTIONS, "run": OPTIONS}.get(name)
    if shown is None:
        shown = tuple(one for one in OPTIONS if one.flag in _FLAGS_OF[name])
    return "\n".join([head, *_explain(shown)])


def _explain(options: Sequence[Option]) -> Iterator[str]:
    """Flags in the groups of options, each group under the first line of its class."""
    groups = {field.name: field.default for field in (*dataclasses.fields(_Ask), *dataclasses.fields(Options))}
    for group, members in groups.items():
        if not (shown := [one for one in options if one.group == group]):
            continue
        yield f"{(members.__doc__ or '').partition('.')[0]}:"
        for one in shown:
            name = f"  --{one.flag.replace('_', '-')}"
            default = one.axis or one.default
            told = ", ".join(map(str, default)) if isinstance(default, tuple) else default
            usual = f" [{told}]" if told not in (None, "", False) else ""
            lines = textwrap.wrap(one.explain() + usual, WIDTH - INDENT)
            first = f"{name:{INDENT}}{lines[0]}" if len(name) < INDENT else f"{name}\n{' ' * INDENT}{lines[0]}"
            yield "\n".join([first, *(" " * INDENT + line for line in lines[1:])])
        yield ""


def _explain_module(name: str) -> str:
    """What its module says of itself, read and not run."""
    module = VERBS[name].start.partition(":")[0]
    path = pathlib.Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or VERBS[name].brief
    return told.replace(f"python -m {module}", f"jaxkv {name}")


def help_and_exit(name: str) -> None:
    """Prints a verb's help and exits with code 0 if the command line asks for it; --helpfull is absl's own."""
    if {"-h", "-help", "--help"} & set(sys.argv[1:]):
        show(verb_help(name))
        sys.exit(0)


def show(text: str) -> None:
    """Prints, also for a reader that closes early, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def version() -> str:
    """Of this installation. Raises UserError in a checkout that was never installed."""
    try:
        return importlib.metadata.version("jaxkv")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "jaxkv is not installed, so that its version is not known; pip install . in the checkout"
        ) from None
