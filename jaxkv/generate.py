"""Generation with either arm, from the host: the programs of `decode.py` put together.

The uncached arm's step-by-step form runs the whole prefix at every step. Its check form gets the same logits, bit for
bit, from one pass over tokens that are given, since rows do not see what follows them and both forms are one
executable (`drafts.py` makes a free generation of it).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import KVCache, empty_cache
from jaxkv.decode import Arms, Layout, Rollout, Rows, round_up, start_rollout
from jaxkv.errors import UserError


def run_cached(arms: Arms, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
    """The cached arm, free-running or forced as `rows` says."""
    return run_cached_keeping(arms, state, tokens, rows, layout)[0]


def run_cached_keeping(
    arms: Arms, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout
) -> tuple[Rollout, Any]:
    """`run_cached`, and the cache it ends with: a KVCache, or what the intervention of `arms` made."""
    _check_tiles(arms, layout.slots)
    cache = make_cache(arms, rows, layout)
    run, end = start_rollout(arms, tokens, rows, layout), layout.prompt + layout.new_tokens
    if arms.tile is not None:
        return arms.tile_loop(state, run, rows, end, cache, False, False, tile=arms.tile)
    logits, cache = arms.prefill(state, jnp.asarray(tokens[:, : layout.prefill]), rows, cache)
    return arms.cached_loop(state, logits, run, rows, end, cache)


def make_cache(arms: Arms, rows: Rows, layout: Layout) -> Any:
    """An empty cache for a batch: a KVCache, or what the intervention of `arms` makes; UserError if it cannot."""
    if arms.intervention is None:
        return empty_cache(arms.config, arms.precision, layout.batch, layout.slots)
    return arms.intervention.make_cache(
        arms.config, arms.precision, layout.batch, layout.slots, rows.problems, rows.seed
    )


def _check_tiles(arms: Arms, slots: int) -> None:
    """Raises ValueError if slots are no whole number of tiles: the last of them would silently never be run."""
    if arms.tile is not None and slots % arms.tile:
        raise ValueError(f"{slots} slots are not a multiple of the tile of {arms.tile} rows; give make_layout the tile")


def uncached_lengths(uncached_length: str, layout: Layout) -> list[tuple[int, int]]:
    """The padded lengths of the uncached arm: (rows, end slot) segments in order.

    Args:
      uncached_length: 'padded' for layout.slots rows at every step, or 'bucket:M' for the prefix rounded up to M.
      layout: of the batch.

    Raises:
      UserError: neither form.
    """
    end = layout.prompt + layout.new_tokens
    if uncached_length == "padded":
        return [(layout.slots, end)]
    kind, _, size = uncached_length.partition(":")
    if kind != "bucket" or not size.isdecimal() or not int(size):
        raise UserError(
            f"--uncached_length={uncached_length} is not understood; use padded or bucket:M, e.g. bucket:64"
        )
    step = int(size)
    rows = range(round_up(layout.prompt, step), round_up(end - 1, step) + 1, step)
    return [(r, min(r + 1, end)) for r in rows]


def run_uncached(
    arms: Arms,
    state: nnx.State,
    run: Rollout,
    rows: Rows,
    layout: Layout,
    uncached_length: str = "padded",
    check: bool = False,
) -> Rollout:
    """Takes the uncached arm from where `run` stands to its end; see `run_uncached_keeping`."""
    return run_uncached_keeping(arms, state, run, rows, layout, uncached_length, check)[0]


def run_uncached_keeping(
    arms: Arms,
    state: nnx.State,
    run: Rollout,
    rows: Rows,
    layout: Layout,
    uncached_length: str = "padded",
    check: bool = False,
) -> tuple[Rollout, KVCache]:
    """Takes the uncached arm from where `run` stands to its end. `run` is donated.

    Args:
      arms: programs.
      state: weights.
      run: where to start.
      rows: of the batch; with `check` all forced.
      layout: of the batch.
      uncached_length: see `uncached_lengths`.
      check: one pass over the given tokens instead of one for each step. What follows a row may be given to it as
        NaN times zero: a rollout with a `nonfinite_step` is not to be trusted, `run_forced` steps through it instead.

    Returns:
      The finished rollout, and what the last forward wrote: the keys and values of every token fed to it.

    Raises:
      ValueError: the arms have an intervention, for which there is no cache here. Arms without it are the clean run.
    """
    if arms.intervention is not None:
        raise ValueError("the uncached arm has no cache to change; run it with arms that have no intervention")
    segments = uncached_lengths(uncached_length, layout)
    # Widened once, for the longest: a forced run and a free one then share their programs at every length.
    missing = max(0, segments[-1][0] - run.tokens.shape[1])
    run = dataclasses.replace(run, tokens=jnp.pad(run.tokens, ((0, 0), (0, missing))))
    for padded, end in segments:
        _check_tiles(arms, padded)
        cache = empty_cache(arms.config, arms.precision, layout.batch, padded)
        tile = padded if arms.tile is None else arms.tile
        run, cache = arms.tile_loop(state, run, rows, end, cache, not check, check, tile=tile)
        if padded < segments[-1][0] and np.all(np.asarray(run.ended)):
            break
    return run, cache


def force(rows: Rows, reference: Rollout) -> Rows:
    """Rows that follow the reference's tokens for as long as it went."""
    return dataclasses.replace(rows, forced_until=rows.limit, limit=rows.prompt + reference.lengths)


def start_forced(arms: Arms, reference: Rollout, forced: Rows, layout: Layout, begin: int = 0) -> Rollout:
    """A rollout along another one's tokens before step `begin`; `forced` are rows from `force`."""
    run = start_rollout(arms, np.asarray(reference.tokens), forced, layout)
    return dataclasses.replace(
        run,
        slot=run.slot + begin,
        lengths=jnp.minimum(reference.lengths, begin),
        ended=jnp.asarray(reference.lengths <= begin),
    )


def run_forced(
    arms: Arms,
    state: nnx.State,
    reference: Rollout,
    rows: Rows,
    layout: Layout,
    uncached_length: str = "padded",
    stepwise: bool = False,
    begin: int = 0,
) -> Rollout:
    """The uncached arm along another rollout's tokens: in one pass, or step by step if asked or if numbers break.

    Choices and logits of the steps before `begin` are left out.
    """
    forced = force(rows, reference)
    if not stepwise:
        run = start_forced(arms, reference, forced, layout, begin)
        run = run_uncached(arms, state, run, forced, layout, uncached_length, check=True)
        if not np.any(np.asarray(run.nonfinite_step) >= 0):
            return run
    run = start_forced(arms, reference, forced, layout, begin)
    return run_uncached(arms, state, run, forced, layout, uncached_length)
