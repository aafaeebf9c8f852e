"""How well does either arm predict a text? Teacher-forced negative log likelihood, through the cache and without it.

A window's context is the prompt; its scored tokens are fed one by one, as in generation, so that each is predicted from
keys and values that went through the cache: one pass over the text would hide what a changed cache does.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.checkpoints.tokenizer import AnyTokenizer
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments import cache_measures
from jaxkv.experiments.batches import Batch, Item, RunSpec, lay_out, timed
from jaxkv.experiments.cache_measures import count_saturated, describe_saturated, measure_cache
from jaxkv.experiments.changes import Change, list_runs, read_changes
from jaxkv.experiments.driver import ArmsRunner, Condition, Key, Line, Took
from jaxkv.experiments.perplexity.record import FIGURES
from jaxkv.experiments.traced_runs import Reference, describe_row, find_fault, make_reference, sum_logits
from jaxkv.logits import compare_logits
from jaxkv.tasks.perplexity import Window

Runs = Mapping[Key, tuple[Change, int]]


def tokenize(tokenizer: AnyTokenizer, text: str) -> tuple[list[int], list[int]]:
    """Token ids of a text without BOS, and for each how many characters it and those before it stand for."""
    if not hasattr(tokenizer, "hf"):  # bytes
        ids = list(text.encode())
        starts = np.array([(byte & 0xC0) != 0x80 for byte in ids], bool)
        return ids, np.cumsum(starts).tolist()
    found = tokenizer.hf(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = np.maximum.accumulate([end for _, end in found["offset_mapping"]] or [0])
    return list(found["input_ids"]), ends.tolist()


@functools.partial(jax.jit, static_argnames="batch")
def _score(logits: jax.Array, tokens: jax.Array, batch: int = 8) -> jax.Array:
    """-ln p of tokens [n] under logits [n, V], in float64."""

    def step(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        row = pair[0].astype(jnp.float64)
        return jax.nn.logsumexp(row) - row[pair[1]]

    return jax.lax.map(step, (logits, tokens), batch_size=batch)


def score_tokens(logits: jax.Array, tokens: Sequence[int]) -> list[float]:
    """Negative log likelihood in nats of tokens [n] under the first n of logits [m, V], computed in float64."""
    padded = np.zeros(logits.shape[0], np.int32)
    padded[: len(tokens)] = tokens
    with jax.enable_x64(True):
        return np.asarray(_score(logits, jnp.asarray(padded)))[: len(tokens)].tolist()


@dataclasses.dataclass(frozen=True)
class Ran:
    """A batch of windows under one change: both arms, the cached one's cache at its end, and the seconds of what ran.

    `saturated` is [B, 3], what the cache could not hold (cache_measures.count_saturated).
    """

    both: Reference
    cache: Any
    seconds: dict[str, float]
    saturated: np.ndarray | None = None


class Perplexity(ArmsRunner[Ran, tuple[Change, int], Ran]):
    """Every window of a text under every change and seed. The arms as they are run once a batch, whatever is asked for.

    A window has at most `spec.new_tokens` scored. Raises UserError for one that exceeds the model's context, or a text
    with a stop token in it.
    """

    name = "perplexity"
    grows = True

    def __init__(self, arms: Arms, state: nnx.State, spec: RunSpec, runs: Runs, windows: Sequence[Window]):
        super().__init__(arms, state, spec, runs)
        self.windows, stops, config = {window.index: window for window in windows}, set(arms.stop_ids), arms.config
        for window in windows:
            if (longest := len(window.context) + spec.new_tokens) > config.context_length:
                raise UserError(
                    f"a window of {longest} tokens exceeds the context of {config.context_length} of {config.name}; "
                    "use a shorter context or stride"
                )
            if stops & set(window.scored[:-1]):
                raise UserError(
                    f"window {window.index} holds a token that ends a text ({min(stops & set(window.scored))}); take "
                    "spelled-out special tokens out of the text"
                )

    def begin(self, batch: Batch, missing: Sequence[tuple[Change, int]]) -> Ran:
        arms, state, spec = self.arms, self.state, self.spec
        layout, tokens, rows = lay_out(batch, spec, arms.config, arms.tile)
        scored = [self.windows[item.problem].scored for item in batch.items]
        scored += scored[-1:] * (spec.batch_size - len(scored))
        for row, text in enumerate(scored):
            tokens[row, layout.prompt : layout.prompt + len(text)] = text
        limit = jnp.asarray([layout.prompt + len(text) for text in scored], jnp.int32)
        rows = dataclasses.replace(rows, forced_until=limit, limit=limit)
        (cached, cache), first = timed(arms.run_cached_keeping, state, tokens, rows, layout)
        how = (spec.uncached_length, spec.uncached == "stepwise")
        uncached, then = timed(arms.run_forced, state, cached, rows, layout, *how)
        both = make_reference(arms, state, layout, rows, cached, uncached)
        return Ran(both, cache, {"cached": first, "uncached": then})

    def run(self, clean: Ran, variant: tuple[Change, int]) -> Ran:
        (change, seed), both = variant, clean.both
        if change.what is None:
            return clean
        empty = self.arms.make_cache(both.forced, both.layout, change.intervention(seed))
        given = (self.state, both.text, both.forced, both.layout, empty)
        (cached, cache), seconds = timed(self.arms.run_cached_keeping, *given)
        saturated = count_saturated(change.what, clean.cache, cache)
        return Ran(dataclasses.replace(both, cached=cached), cache, {"cached": seconds}, saturated)

    def tell_time(self, clean: Ran, ran: Ran, seconds: float) -> Took:
        scored = int(np.sum(ran.both.cached.lengths))
        return Took(ran.seconds, dict.fromkeys(ran.seconds, scored))

    def record(self, item: Item, row: int, clean: Ran, variant: tuple[Change, int], ran: Ran) -> Line:
        arms, both, window, (change, seed) = self.arms, ran.both, self.windows[item.problem], variant
        context, tokens = len(window.context), len(window.scored)
        fault = find_fault(both, row, {})
        if fault is None and change.what is not None:
            fault = cache_measures.find_fault("cached", ran.cache, row)
        written = context + tokens - 1  # the last token is fed to nobody
        record: dict[str, Any] = {
            "experiment": "perplexity",
            "problem": window.index,
            "change": change.name,
            "seed": seed,
            "key": ["perplexity", window.index, change.name, seed],
            "spec": change.describe(arms.config.head_dim),
            **describe_row(arms, item, row, both, self.spec, fault),
            "tokens": tokens,
            "bytes": window.bytes,
            "words": window.words,
            **dict.fromkeys(FIGURES),
            "cache": measure_cache(change.what, arms.config, arms.precision, ran.cache, written, context),
            "saturated": describe_saturated(ran.saturated, row),
        }
        if fault:
            return record
        runs = {"cached": both.cached, "uncached": both.uncached}
        return record | {
            "nats": {arm: float(np.sum(score_tokens(run.logits[row], window.scored))) for arm, run in runs.items()},
            "logits": sum_logits(compare_logits(both.uncached.logits[row], both.cached.logits[row], tokens)),
        }


def make_runner(condition: Condition) -> Perplexity:
    """Runs a condition: the changes that it asks for beside the clean cache."""
    runs = list_runs(*read_changes(condition.options.cache, condition.checkpoint.config))
    return Perplexity(condition.arms, condition.state, condition.spec, runs, condition.task.windows)
