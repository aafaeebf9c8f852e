"""The uncached arm's free generation by draft and check, with the tokens and logits of recomputing every step.

The cached arm drafts, one pass of the uncached arm checks, the agreeing prefix and the uncached arm's own token after
it are kept, and the rest is drafted again. A check is in the shape of the rows' own batch, so that its bits are those
of stepping it. A draft only proposes: rows that parted are therefore drafted together across batches.

Whether drafting, checking and stepping are JAX's or PyTorch's does not matter here.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.rollout import PAD_ID, AnyArms, Layout, Rollout, Rows, make_rows, start_rollout


def first_disagreement(forced: Rollout, prompt: int) -> np.ndarray:
    """[B] the first step whose choice is not the token that was forced; the row's length if there is none."""
    n = forced.choices.shape[1]
    lengths = np.asarray(forced.lengths)[:, None]
    tokens = np.asarray(forced.tokens)[:, prompt : prompt + n]
    differs = (np.asarray(forced.choices) != tokens) & (np.arange(n) < lengths)
    return np.where(differs.any(1), differs.argmax(1), lengths[:, 0])


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What a forced uncached run has settled: each row's tokens up to its first disagreement and the choice at it."""

    tokens: np.ndarray  # [B, S], S the layout's slots
    taken: np.ndarray  # [B] tokens settled
    # [B] whether that is all of the row. A row that agrees with its draft to the end ends there, also where the draft
    # broke off at a non-finite number: such a sample is invalid, whatever this arm would have gone on to do.
    ended: np.ndarray
    broke: np.ndarray  # [B] the row's nonfinite_step if it lies in the settled part, else -1

    def start(self, arms: AnyArms, rows: Rows, layout: Layout, slot: int) -> tuple[Rollout, Rows]:
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
        """The rollout that this is once every row has ended; its logits are right where it has tokens."""
        cut = np.arange(forced.choices.shape[1]) >= self.taken[:, None]
        return dataclasses.replace(
            forced,
            tokens=jnp.asarray(self.tokens),
            choices=jnp.where(cut, PAD_ID, forced.choices),
            lengths=jnp.asarray(self.taken, jnp.int32),
            ended=jnp.asarray(self.ended),
            nonfinite_step=jnp.asarray(self.broke, jnp.int32),
        )


def recall(run: Rollout, earlier: Rollout, steps: np.ndarray) -> Rollout:
    """The rollout with the choices and logits of an earlier one in the first `steps` [B] steps."""
    known = np.arange(run.choices.shape[1]) < steps[:, None]
    logits = run.logits
    if logits.shape[1]:
        logits = jnp.where(known[:, :, None], earlier.logits, logits)
    return dataclasses.replace(run, choices=jnp.where(known, earlier.choices, run.choices), logits=logits)


def settle(arms: AnyArms, forced: Rollout, rows: Rows, layout: Layout) -> Prefix:
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
    arms: AnyArms, state: Any, forced: Rollout, rows: Rows, layout: Layout, uncached_length: str = "padded"
) -> Rollout:
    """The uncached arm's own free run, stepped on from its forced run along another arm's tokens.

    Up to its first disagreement a forced row has made the very computation of a free one. The free run therefore takes
    over the forced tokens up to there and the arm's own choice at it, and is stepped from the next slot on; the result
    is the same as stepping from the prompt (tests/test_generate.py), for a fraction of the work. `rows` are as they
    were before forcing. Returns the finished Rollout, with all its logits.
    """
    prefix = settle(arms, forced, rows, layout)
    if prefix.ended.all():
        return prefix.finish(forced)
    begin = int(min(prefix.taken[~prefix.ended]))
    run, keep = prefix.start(arms, rows, layout, layout.prompt + begin)
    stepped = arms.run_uncached(state, run, keep, layout, uncached_length)
    return recall(prefix.restore(stepped), forced, prefix.taken)


@dataclasses.dataclass(frozen=True)
class Forced:
    """A batch whose uncached arm has followed the cached one."""

    run: Rollout  # the uncached arm along the cached arm's tokens, the first draft
    rows: Rows  # the rows as they were before forcing
    layout: Layout  # of the batch


def free_by_drafts(
    arms: AnyArms, state: Any, forced: Sequence[Forced], uncached_length: str = "padded"
) -> list[tuple[Rollout, int]]:
    """The uncached arm's own free runs by draft and check; the tokens and logits are those of stepping.

    Batches are of one size, seed and number of new tokens; which are given together changes the time alone. Returns for
    each the Rollout, with all its logits, and how many drafts it took beyond the first.
    """
    batches = [_Batch(arms, state, one, uncached_length) for one in forced]
    while waiting := [batch for batch in batches if batch.free is None]:
        wanted = [(batch, row) for batch in waiting for row in np.flatnonzero(~batch.prefix.ended).tolist()]
        drafts: dict[int, dict[int, _Draft]] = {}
        for (batch, row), draft in zip(wanted, _draft_rows(arms, state, wanted), strict=True):
            drafts.setdefault(id(batch), {})[row] = draft
        for batch in waiting:
            batch.check(drafts[id(batch)])
    return [(batch.free, batch.drafts) for batch in batches if batch.free is not None]


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A row's proposal: all its new tokens, the settled ones first, and whether its numbers broke."""

    tokens: np.ndarray
    broke: bool


class _Batch:
    """What is known of a batch's free run; `free` is None until that is all."""

    def __init__(self, arms: AnyArms, state: Any, forced: Forced, uncached_length: str):
        self.arms, self.state, self.uncached_length = arms, state, uncached_length
        self.run, self.layout = forced.run, forced.layout
        self.rows: Rows = jax.tree.map(np.asarray, forced.rows)
        self.broke = np.asarray(forced.run.nonfinite_step)
        self.drafts = 0
        self.free: Rollout | None = None
        self._settle()

    def _settle(self) -> None:
        self.prefix = settle(self.arms, self.run, self.rows, self.layout)
        # A later draft ends before the step at which a row broke, so that its check does not come to it again.
        self.broke = np.where(self.prefix.ended, np.maximum(self.broke, self.prefix.broke), -1)
        if self.prefix.ended.all():
            self._finish(self.prefix.finish(self.run), self.broke)

    def _finish(self, free: Rollout, broke: np.ndarray) -> None:
        self.free = dataclasses.replace(free, nonfinite_step=jnp.asarray(broke, jnp.int32))

    def check(self, drafts: dict[int, _Draft]) -> None:
        """Takes the drafts of the open rows."""
        prompt, prefix = self.layout.prompt, self.prefix
        # Each draft settles a token, or the program does not repeat itself.
        if self.drafts > self.layout.new_tokens or any(draft.broke for draft in drafts.values()):
            free = free_stepwise(self.arms, self.state, self.run, self.rows, self.layout, self.uncached_length)
            self._finish(free, np.where(prefix.ended, self.broke, np.asarray(free.nonfinite_step)))
            return
        tokens, lengths = prefix.tokens.copy(), prefix.taken.astype(np.int32)
        for row, draft in drafts.items():
            lengths[row] = len(draft.tokens)
            tokens[row, prompt : prompt + lengths[row]] = draft.tokens
        proposal = dataclasses.replace(self.run, tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths))
        begin = int(min(prefix.taken[~prefix.ended]))
        checked = self.arms.run_forced(self.state, proposal, self.rows, self.layout, self.uncached_length, begin=begin)
        self.run = recall(checked, self.run, np.full(self.layout.batch, begin))
        self.drafts += 1
        self._settle()


def _draft_rows(arms: AnyArms, state: Any, wanted: list[tuple[_Batch, int]]) -> Iterator[_Draft]:
    """The cached arm on rows of any batches, their settled tokens forced, in batches of a shape that is in use."""
    size, new_tokens = wanted[0][0].layout.batch, wanted[0][0].layout.new_tokens
    for begin in range(0, len(wanted), size):
        group = wanted[begin : begin + size]
        filled = group + [group[-1]] * (size - len(group))
        prompts = [
            batch.prefix.tokens[row, batch.rows.first[row] : batch.layout.prompt].tolist() for batch, row in filled
        ]
        prompt = max(map(len, prompts))
        layout = Layout(
            batch=size,
            prompt=prompt,
            prefill=max(batch.layout.prefill for batch, _ in group),
            slots=max(batch.layout.slots for batch, _ in group),
            new_tokens=new_tokens,
        )
        problems = [int(batch.rows.problems[row]) for batch, row in filled]
        tokens, rows = make_rows(prompts, problems, int(group[0][0].rows.seed), layout)
        until, limit = np.full(size, prompt), np.full(size, prompt)  # what only fills the batch ends at once
        for place, (batch, row) in enumerate(group):
            own, taken = batch.layout.prompt, int(batch.prefix.taken[row])
            tokens[place, prompt : prompt + taken] = batch.prefix.tokens[row, own : own + taken]
            until[place], limit[place] = prompt + taken, prompt + int(batch.rows.limit[row]) - own
        rows = dataclasses.replace(
            rows, forced_until=jnp.asarray(until, jnp.int32), limit=jnp.asarray(limit, jnp.int32)
        )
        run = arms.run_cached(state, tokens, rows, layout)
        drafted, lengths, broke = np.asarray(run.tokens), np.asarray(run.lengths), np.asarray(run.nonfinite_step)
        for place in range(len(group)):
            yield _Draft(drafted[place, prompt : prompt + lengths[place]], bool(broke[place] >= 0))
