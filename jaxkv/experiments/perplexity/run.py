"""How well does either arm predict a text? Teacher-forced negative log likelihood, through the cache and without it.

A window's context is the prompt; its scored tokens are fed to the cached arm one by one, as in generation, so that each
is predicted from keys and values that went through the cache. What a changed cache does to perplexity shows here, which
one pass over the text would hide. The uncached arm is fed the same tokens.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.audit import audit_rows
from jaxkv.checkpoints.tokenizer import AnyTokenizer
from jaxkv.compare import compare_logits
from jaxkv.config import ModelConfig
from jaxkv.decode import Arms, Layout, Rows, make_layout, make_rows
from jaxkv.errors import UserError
from jaxkv.experiments import cache_measures
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.experiments.changes import Change, change_cache, list_missing, list_runs
from jaxkv.experiments.perplexity.record import FIGURES
from jaxkv.experiments.traced_runs import Reference, describe_row, find_fault
from jaxkv.generate import force, run_cached_keeping, run_forced
from jaxkv.tasks.perplexity import Window


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


def lay_out_windows(
    windows: Sequence[Window], spec: RunSpec, config: ModelConfig, tile: int | None = None
) -> tuple[Layout, np.ndarray, Rows]:
    """Layout, token buffer [B, S] with the scored tokens in it, and rows that are forced along them.

    Fewer windows than rows of a batch: the last is repeated.

    Raises:
      UserError: a window that does not fit the context.
    """
    filled = [*windows, *[windows[-1]] * (spec.batch_size - len(windows))]
    contexts = [list(window.context) for window in filled]
    if (longest := len(contexts[0]) + spec.new_tokens) > config.context_length:
        raise UserError(
            f"a window of {longest} tokens exceeds the context of {config.context_length} of {config.name}; use a "
            "shorter context or stride"
        )
    layout = make_layout(contexts, spec.new_tokens, spec.bucket, config, tile)
    tokens, rows = make_rows(contexts, [window.index for window in filled], spec.seed, layout)
    limits = []
    for row, window in enumerate(filled):
        end = layout.prompt + len(window.scored)
        tokens[row, layout.prompt : end] = window.scored
        limits.append(end)
    limit = jnp.asarray(limits, jnp.int32)
    return layout, tokens, Rows(rows.first, rows.prompt, limit, limit, rows.problems, rows.seed)


@dataclasses.dataclass(frozen=True)
class Ran:
    """A batch of windows under one change of the cache.

    Attributes:
      both: the arms.
      cache: what the cached one ends with.
      saturated: [B, 3] elements that its quantizer's format cannot hold (cache_measures.count_saturated), or None.
    """

    both: Reference
    cache: Any
    saturated: np.ndarray | None = None


def run_windows(arms: Arms, state: nnx.State, windows: Sequence[Window], spec: RunSpec) -> tuple[Ran, dict[str, float]]:
    """Both arms along a batch of windows, audited, and the wall time of each."""
    layout, tokens, rows = lay_out_windows(windows, spec, arms.config, arms.tile)
    begin = time.perf_counter()
    cached, cache = jax.block_until_ready(run_cached_keeping(arms, state, tokens, rows, layout))
    middle = time.perf_counter()
    stepwise = spec.uncached == "stepwise"
    uncached = jax.block_until_ready(run_forced(arms, state, cached, rows, layout, spec.uncached_length, stepwise))
    seconds = {"cached": middle - begin, "uncached": time.perf_counter() - middle}
    findings = audit_rows(arms, state, cached, rows)
    text = np.asarray(cached.tokens)
    return Ran(Reference(layout, rows, force(rows, cached), text, cached, uncached, findings), cache), seconds


def run_changed(arms: Arms, state: nnx.State, change: Change, seed: int, clean: Ran) -> tuple[Ran, dict[str, float]]:
    """The cached arm with a changed cache in place of the clean one, and its wall time."""
    assert change.what is not None
    changed, both = change_cache(arms, change.intervention(seed)), clean.both
    begin = time.perf_counter()
    cached, cache = jax.block_until_ready(run_cached_keeping(changed, state, both.text, both.forced, both.layout))
    seconds = {"cached": time.perf_counter() - begin}
    saturated = cache_measures.count_saturated(change.what, clean.cache, cache)
    return Ran(dataclasses.replace(both, cached=cached), cache, saturated), seconds


def make_record(
    arms: Arms, window: Window, row: int, ran: Ran, spec: RunSpec, change: Change, seed: int
) -> dict[str, Any]:
    """The record of one window (jaxkv.experiments.perplexity.record)."""
    both, context, tokens = ran.both, len(window.context), len(window.scored)
    fault = find_fault(both, row, {})
    if fault is None and change.what is not None:
        fault = cache_measures.find_fault("cached", ran.cache, row)
    item = Item(window.index, window.context, "")
    written = context + tokens - 1  # the last token is fed to nobody
    record: dict[str, Any] = {
        "experiment": "perplexity",
        "problem": window.index,
        "change": change.name,
        "seed": seed,
        "key": ["perplexity", window.index, change.name, seed],
        "spec": change.describe(arms.config.head_dim),
        **describe_row(arms, item, row, both, spec, fault),
        "tokens": tokens,
        "bytes": window.bytes,
        "words": window.words,
        **dict.fromkeys(FIGURES),
        "cache": cache_measures.measure_cache(change.what, arms.config, arms.precision, ran.cache, written, context),
        "saturated": cache_measures.describe_saturated(ran.saturated, row),
    }
    if fault:
        return record
    found = compare_logits(both.uncached.logits[row], both.cached.logits[row], tokens)
    runs = {"cached": both.cached, "uncached": both.uncached}
    return record | {
        "nats": {arm: float(np.sum(score_tokens(run.logits[row], window.scored))) for arm, run in runs.items()},
        "logits": {
            "kl": float(np.sum(found["kl"])),
            "flips": int(np.sum(found["flip"])),
            "max_abs": float(np.max(found["max_abs"])),
            "bit_equal": int(np.sum(found["bit_equal"])),
        },
    }


def run_perplexity(
    arms: Arms,
    state: nnx.State,
    windows: Sequence[Window],
    spec: RunSpec,
    changes: Sequence[Change] = (Change(None),),
    seeds: Sequence[int] = (0,),
    done: frozenset[tuple[int, str, int]] = frozenset(),
) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Yields, batch by batch and change by change, the records not yet done and their timing.

    Args:
      arms: the programs, of either regime; they must keep logits.
      state: prepared weights.
      windows: all of one context length (jaxkv.tasks.perplexity.plan_windows).
      spec: what to run; of it count new_tokens, at least the tokens scored in a window, batch_size, bucket,
        uncached_length and uncached.
      changes: of the cached arm's cache. The arms as they are run once a batch, whatever is asked for.
      seeds: of the errors.
      done: (window, change, seed) that have a record; a batch is run whole if any of its windows lacks one.

    Raises:
      UserError: a window that does not fit the context, a text with a stop token in it, or a change in the aligned
        regime.
    """
    stops = set(arms.stop_ids)
    for window in windows:
        if stops & set(window.scored[:-1]):
            raise UserError(
                f"window {window.index} holds a token that ends a text ({min(stops & set(window.scored))}); take "
                "spelled-out special tokens out of the text"
            )
    wanted = list_runs(changes, seeds)
    for begin in range(0, len(windows), spec.batch_size):
        batch = windows[begin : begin + spec.batch_size]
        missing = list_missing(wanted, (window.index for window in batch), done)
        if not missing:
            continue
        clean, clean_seconds = run_windows(arms, state, batch, spec)
        for change, seed in missing:
            ran, seconds = clean, clean_seconds
            if change.what is not None:
                ran, seconds = run_changed(arms, state, change, seed, clean)
            records = [
                make_record(arms, window, row, ran, spec, change, seed)
                for row, window in enumerate(batch)
                if (window.index, change.name, seed) not in done
            ]
            yield (
                records,
                {
                    "change": change.name,
                    "seed": seed,
                    "problems": [window.index for window in batch],
                    "seconds": seconds,
                    "tokens": dict.fromkeys(seconds, sum(len(window.scored) for window in batch)),
                },
            )
