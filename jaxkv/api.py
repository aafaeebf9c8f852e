"""What `import jaxkv` offers in a notebook or a script. Strings are those of the command's flags.

model = jaxkv.load("smollm2-135m", checkpoint="smollm2.gguf", precision="bf16")
found = jaxkv.compare(model, "Natalia sold clips to 48 of her friends. How many are left?")
print(found)                  # a sentence, the place where the texts part, and why
found.first_divergence, found.steps
"""

import dataclasses
import pathlib
from typing import Any, TypedDict, Unpack, overload

import jax
import msgspec
from jax.experimental.compilation_cache import compilation_cache as programs

from jaxkv import records
from jaxkv.comparison import Comparison
from jaxkv.errors import UserError, nearest
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.options import OPTIONS
from jaxkv.prompt_model import Model, PromptRun, Tell, load_model
from jaxkv.rollout import start_rollout
from jaxkv.sampling import make_sampler
from jaxkv.side_by_side import compare_prompt

COMPILATION_CACHE = "~/.cache/jaxkv/xla"


def load(
    model: str | None = None,
    checkpoint: str | None = None,
    *,
    precision: str = "bf16",
    revision: str | None = None,
    compilation_cache: str | None = COMPILATION_CACHE,
    tell: Tell | None = None,
    **parts: str | None,
) -> Model:
    """Reads a model.

    Args:
      model: name of a preset, e.g. 'smollm2-135m'; found out from the checkpoint if not given. A small one
        that ships with jaxkv if neither is.
      checkpoint: directory, .gguf file, Orbax checkpoint, hub id or 'random:SEED'; the preset's own if not given.
      precision: 'fp16', 'bf16' or 'fp32' (true fp32).
      revision: branch, tag or commit of a hub id.
      compilation_cache: where compiled programs of this process are kept from now on; 'none' for nowhere, None for
        where JAX is set to keep them.
      tell: called with how far a download is.
      **parts: parts of the precision that have another dtype: residual, accumulation, cache, scores.

    Raises:
      UserError: anything the user can mend.
    """
    if compilation_cache is not None:
        _keep_programs(compilation_cache)
    return load_model(model, checkpoint, precision, revision, tell, **parts)


def _keep_programs(directory: str) -> None:
    """Has JAX keep compiled programs in a directory, also where it has begun to in another."""
    wanted = None if directory == "none" else str(pathlib.Path(directory).expanduser())
    config: Any = jax.config
    if wanted != config.jax_compilation_cache_dir:
        config.update("jax_compilation_cache_dir", wanted)
        programs.reset_cache()
    if wanted is not None:
        least = min(0.5, config.jax_persistent_cache_min_compile_time_secs)
        config.update("jax_persistent_cache_min_compile_time_secs", least)


class Asked(TypedDict, total=False):
    """How a prompt is run.

    Attributes:
      max_new_tokens: most tokens to generate: 64 if not given.
      sampler: 'greedy' (if not given), 'temperature', 'top_k' or 'top_p', with noise that both sides share.
      temperature: 0.7 if not given, 1.0 with top_p.
      top_k: 50 if not given.
      top_p: 0.9 if not given.
      seed: of the noise: 0 if not given.
      bucket: prompts are padded to a multiple of this many rows: 64 if not given.
      chat: whether a prompt is put as a message of the model's chat template: if it has one, if not given.
      tell: called with the name of each phase.
    """

    max_new_tokens: int
    sampler: str
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int
    bucket: int
    chat: bool | None
    tell: Tell | None


def _start(model: Model, prompt: str, asked: Asked) -> PromptRun:
    if odd := sorted(set(asked) - set(Asked.__annotations__)):
        known = list(Asked.__annotations__)
        raise UserError(f"{odd[0]} is not known{nearest(odd[0], known)}; known: {', '.join(known)}")
    for option in OPTIONS:
        value: Any = asked.get(option.flag)
        if option.kind is int and value is not None and not option.low <= value <= option.high:
            raise UserError(f"{option.flag}={value} is out of range; give one from {option.low} to {option.high}")
    sampler = make_sampler(
        asked.get("sampler", "greedy"), asked.get("temperature"), asked.get("top_k"), asked.get("top_p")
    )
    spec = RunSpec(asked.get("max_new_tokens", 64), seed=asked.get("seed", 0), bucket=asked.get("bucket", 64))
    item = Item(0, model.encode(prompt, asked.get("chat")), "")
    return PromptRun(model, prompt, item, spec, sampler, asked.get("tell") or (lambda phase: None))


@overload
def compare(model: Model, prompts: str, beside: str | None = None, **asked: Unpack[Asked]) -> Comparison: ...
@overload
def compare(
    model: Model, prompts: list[str], beside: str | None = None, **asked: Unpack[Asked]
) -> list[Comparison]: ...
def compare(
    model: Model, prompts: str | list[str], beside: str | None = None, **asked: Unpack[Asked]
) -> Comparison | list[Comparison]:
    """Runs each prompt with the cache and without it, or in two other ways.

    Args:
      model: from `load`.
      prompts: one prompt or several.
      beside: 'precision:fp32', 'cache_quant:kvarn:k2v2', 'cache_error:normal:0,0.25' or 'framework:torch' compares the
        cached arm with one that differs in this alone; None compares it with no cache.
      **asked: as in Asked.

    Returns:
      A Comparison, or a list of them for a list of prompts.

    Raises:
      UserError: anything the user can mend.
    """
    if isinstance(prompts, str):
        return compare_prompt(_start(model, prompts, asked), beside)
    return [compare_prompt(_start(model, prompt, asked), beside) for prompt in prompts]


def generate(model: Model, prompt: str, cache: bool = True, **asked: Unpack[Asked]) -> str:
    """The text that a model writes with its cache, or by recomputing the prefix at every step.

    Args are those of `compare`. Raises UserError where a number is not finite.
    """
    run = _start(model, prompt, asked)
    arms, (layout, tokens, rows) = model.arms(run.sampler), run.lay_out()
    if cache:
        done = arms.run_cached(model.state, tokens, rows, layout)
    else:
        done = arms.run_uncached(model.state, start_rollout(arms, tokens, rows, layout), rows, layout)
    if (step := int(done.nonfinite_step[0])) >= 0:
        raise UserError(f"{model.name}: the logits of token {step + 1} are not finite; use a wider precision")
    return model.decode(run.item.prompt, run.take(done))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory as it was read.

    Attributes:
      path: of the directory.
      config: what decides the numbers, as run.json has it.
      records: of samples.jsonl, typed (jaxkv.experiments.NAME.record).
    """

    path: pathlib.Path
    config: dict[str, Any]
    records: list[Any]

    @property
    def samples(self) -> Any:
        """A pandas frame with a row for each record; nested fields have dotted names, columns of steps stay lists."""
        import pandas

        return pandas.json_normalize([msgspec.to_builtins(record) for record in self.records])


def read_run(path: str | pathlib.Path) -> Run:
    """Reads a run directory that `jaxkv run` left. Raises UserError on one that is none or is broken."""
    run, found = records.read_run(pathlib.Path(path).expanduser())
    return Run(pathlib.Path(path), run["config"], list(found))
