"""Generation with either arm, from the host: the programs of `decode.py` put together.

The uncached arm's step-by-step form runs the whole prefix at every step. Its check form gets the same logits, bit for
bit, from one pass over tokens that are given, since rows do not see what follows them and both forms are one
executable. A free uncached generation is therefore had by draft and check: the cached arm drafts, a pass checks,
the agreeing prefix and the uncached arm's own token after it are kept, and the rest is drafted again.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import EMPTY, KVCache, empty_cache
from jaxkv.decode import PAD_ID, Arms, Layout, Rollout, Rows, round_up, start_rollout
from jaxkv.errors import UserError


def run_cached(arms: Arms, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
    """The cached arm, free-running or forced as `rows` says."""
    return run_cached_keeping(arms, state, tokens, rows, layout)[0]


def run_cached_keeping(
    arms: Arms, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout
) -> tuple[Rollout, KVCache]:
    """`run_cached`, and the cache it ends with."""
    _check_tiles(arms, layout.slots)
    cache = empty_cache(arms.config, arms.precision, layout.batch, layout.slots)
    run = start_rollout(arms, tokens, rows, layout)
    logits = None
    if arms.tile is None:
        logits, cache = arms.prefill(state, jnp.asarray(tokens[:, : layout.prefill]), rows, cache)
    return _step_cached(arms, state, logits, run, rows, layout, cache)


def _check_tiles(arms: Arms, slots: int) -> None:
    """Raises ValueError if slots are no whole number of tiles: the last of them would silently never be run."""
    if arms.tile is not None and slots % arms.tile:
        raise ValueError(f"{slots} slots are not a multiple of the tile of {arms.tile} rows; give make_layout the tile")


def _step_cached(arms, state, logits, run: Rollout, rows: Rows, layout: Layout, cache: KVCache):
    end = layout.prompt + layout.new_tokens
    if arms.tile is None:
        return arms.cached_loop(state, logits, run, rows, end, cache)
    return arms.tile_loop(state, run, rows, end, cache, False, False, tile=arms.tile)


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
    """
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
    forced, tokens = force(rows, reference), np.asarray(reference.tokens)

    def start() -> Rollout:
        run = start_rollout(arms, tokens, forced, layout)
        return dataclasses.replace(
            run,
            slot=run.slot + begin,
            lengths=jnp.minimum(reference.lengths, begin),
            ended=reference.lengths <= begin,
        )

    if not stepwise:
        run = run_uncached(arms, state, start(), forced, layout, uncached_length, check=True)
        if not np.any(np.asarray(run.nonfinite_step) >= 0):
            return run
    return run_uncached(arms, state, start(), forced, layout, uncached_length)


def first_disagreement(forced: Rollout, prompt: int) -> np.ndarray:
    """[B] the first step whose choice is not the token that was forced; the row's length if there is none."""
    n = forced.choices.shape[1]
    lengths = np.asarray(forced.lengths)[:, None]
    tokens = np.asarray(forced.tokens)[:, prompt : prompt + n]
    differs = (np.asarray(forced.choices) != tokens) & (np.arange(n) < lengths)
    return np.where(differs.any(1), differs.argmax(1), lengths[:, 0])


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What a forced uncached run has settled: each row's tokens up to its first disagreement and the choice at it.

    Attributes:
      tokens: [B, S], S the layout's slots.
      taken: [B] tokens settled.
      ended: [B] whether that is all of the row. A row that agrees with its draft to the end ends there, also where the
        draft broke off at a non-finite number: such a sample is invalid, whatever this arm would have gone on to do.
      broke: [B] the row's nonfinite_step if it lies in the settled part, else -1.
    """

    tokens: np.ndarray
    taken: np.ndarray
    ended: np.ndarray
    broke: np.ndarray

    def start(self, arms: Arms, rows: Rows, layout: Layout, slot: int) -> tuple[Rollout, Rows]:
        """A rollout at `slot`, the settled part after it forced."""
        run = start_rollout(arms, self.tokens, rows, layout)
        run = dataclasses.replace(
            run,
            slot=jnp.asarray(slot, jnp.int32),
            lengths=jnp.asarray(np.where(self.ended, self.taken, slot - layout.prompt), jnp.int32),
            ended=jnp.asarray(self.ended),
            nonfinite_step=jnp.asarray(self.broke, jnp.int32),
        )
        return run, dataclasses.replace(rows, forced_until=jnp.asarray(layout.prompt + self.taken, jnp.int32))

    def restore(self, run: Rollout) -> Rollout:
        """The rollout with the tokens of rows that had ended: steps that others took have padded them."""
        tokens = run.tokens[:, : self.tokens.shape[1]]
        return dataclasses.replace(run, tokens=jnp.where(self.ended[:, None], self.tokens, tokens))

    def finish(self, forced: Rollout) -> Rollout:
        """The rollout that this is once every row has ended."""
        cut = np.arange(forced.choices.shape[1]) >= self.taken[:, None]
        return dataclasses.replace(
            forced,
            tokens=jnp.asarray(self.tokens),
            choices=jnp.where(cut, PAD_ID, forced.choices),
            lengths=jnp.asarray(self.taken, jnp.int32),
            ended=jnp.asarray(self.ended),
        )


def recall(run: Rollout, earlier: Rollout, steps: np.ndarray) -> Rollout:
    """The rollout with the choices and logits of an earlier one in the first `steps` [B] steps."""
    known = np.arange(run.choices.shape[1]) < steps[:, None]
    logits = run.logits
    if logits.shape[1]:
        logits = jnp.where(known[:, :, None], earlier.logits, logits)
    return dataclasses.replace(run, choices=jnp.where(known, earlier.choices, run.choices), logits=logits)


def settle(arms: Arms, forced: Rollout, rows: Rows, layout: Layout) -> Prefix:
    """What a forced run leaves open; `rows` are as they were before forcing."""
    prompt = layout.prompt
    agreed = first_disagreement(forced, prompt)
    tokens, choices = np.array(forced.tokens)[:, : layout.slots], np.asarray(forced.choices)
    disagrees = agreed < np.asarray(forced.lengths)
    own = choices[np.arange(len(agreed)), np.minimum(agreed, layout.new_tokens - 1)]
    taken = agreed + disagrees
    for row, step in enumerate(agreed):
        tokens[row, prompt + taken[row] :] = PAD_ID
        if disagrees[row]:
            tokens[row, prompt + step] = own[row]
    stopped = np.isin(tokens[np.arange(len(taken)), prompt + taken - 1], arms.stop_ids) & (taken > 0)
    ended = np.where(disagrees, stopped | (prompt + taken >= np.asarray(rows.limit)), True)
    return Prefix(tokens, taken, ended, np.where(disagrees, -1, np.asarray(forced.nonfinite_step)))


def free_stepwise(
    arms: Arms, state: nnx.State, forced: Rollout, rows: Rows, layout: Layout, uncached_length: str = "padded"
) -> Rollout:
    """The uncached arm's own free run, stepped on from its forced run along another arm's tokens.

    Up to its first disagreement a forced row has made the very computation of a free one. The free run therefore takes
    over the forced tokens up to there and the arm's own choice at it, and is stepped from the next slot on; the result
    is the same as stepping from the prompt (tests/test_generate.py), for a fraction of the work.

    Args:
      arms: as in the forced run.
      state: weights.
      forced: the finished forced run.
      rows: the rows as they were before forcing.
      layout: of the batch.
      uncached_length: as in the forced run.

    Returns:
      The finished Rollout, with all its logits.
    """
    prefix = settle(arms, forced, rows, layout)
    begin = int(min(prefix.taken[~prefix.ended], default=layout.new_tokens))
    run, keep = prefix.start(arms, rows, layout, layout.prompt + begin)
    if not prefix.ended.all():
        run = prefix.restore(run_uncached(arms, state, run, keep, layout, uncached_length))
    return recall(run, forced, prefix.taken)


def free_by_drafts(
    arms: Arms,
    state: nnx.State,
    forced: Rollout,
    cache: KVCache,
    rows: Rows,
    layout: Layout,
    uncached_length: str = "padded",
) -> tuple[Rollout, int]:
    """The uncached arm's own free run by draft and check; the tokens and logits are those of stepping.

    Args:
      arms: as in the forced run.
      state: weights.
      forced: the uncached run along the cached arm's tokens, the first draft.
      cache: what the cached arm ended with; drafts go on from it. Donated.
      rows: the rows as they were before forcing.
      layout: of the batch.
      uncached_length: as in the forced run.

    Returns:
      The Rollout, with all its logits, and how many drafts it took beyond the first.
    """
    run, drafts = forced, 0
    broke = np.asarray(forced.nonfinite_step)

    def broken_as(free: Rollout, steps: np.ndarray) -> Rollout:
        return dataclasses.replace(free, nonfinite_step=jnp.asarray(steps, jnp.int32))

    while True:
        prefix = settle(arms, run, rows, layout)
        # A later draft ends before the step at which a row broke, so that its check does not come to it again.
        broke = np.where(prefix.ended, np.maximum(broke, prefix.broke), -1)
        if prefix.ended.all():
            return broken_as(prefix.finish(run), broke), drafts
        # From the slot before the first open one: its token is settled, so no logits are needed for it.
        begin = int(min(prefix.taken[~prefix.ended]))
        slot = layout.prompt + begin - 1
        start, keep = prefix.start(arms, rows, layout, slot)
        cache = dataclasses.replace(cache, positions=cache.positions.at[:, slot:].set(EMPTY))
        nothing = jnp.zeros((layout.batch, arms.config.vocab_size), arms.precision.logits)
        draft, cache = _step_cached(arms, state, nothing, start, keep, layout, cache)
        draft = prefix.restore(draft)
        # Each draft settles a token, or the program does not repeat itself.
        if drafts > layout.new_tokens or np.any(np.asarray(draft.nonfinite_step)[~prefix.ended] >= 0):
            free = free_stepwise(arms, state, run, rows, layout, uncached_length)
            return broken_as(free, np.where(prefix.ended, broke, np.asarray(free.nonfinite_step))), drafts
        checked = run_forced(arms, state, draft, rows, layout, uncached_length, begin=begin)
        run = recall(checked, run, np.full(layout.batch, begin))
        drafts += 1
