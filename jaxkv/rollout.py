"""What the arms of either framework share: a batch's layout in slots, how a rollout grows by a token, what arms are.

A run lays its tokens out in one buffer [B, S]: slots [0, prompt) hold the prompts, later slots what is generated, and
row b's prompt starts at slot `first[b]` (above 0 only under left padding). A token at slot s has absolute position
s - first[b]. Step t of an arm yields the logits for slot `prompt + t`.

Arms choose tokens through `emit`. A row may be forced: up to slot `forced_until[b]` the buffer's own tokens are kept,
and what the arm would have chosen is recorded beside them. Teacher forcing and free running are the same compiled
program, so a free run may start from a forced run's first disagreement and still be that arm's own.
"""

import contextlib
import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import EMPTY
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.sampling import Sampler, choose

PAD_ID = 0  # written to rows that have ended; such slots are never read back
GROWING = "growing"  # uncached length of PyTorch's arms alone: the rows of the prefix, as transformers' `generate` has


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """What an arm has produced so far; also the state its loop carries."""

    slot: jax.Array  # int32 scalar, the next slot to fill
    tokens: jax.Array  # [B, S] int32 prompt and generated tokens
    choices: jax.Array  # [B, n] int32, what the arm chose at each step, also where it was forced to take another token
    logits: jax.Array  # [B, n, V] in the logits dtype, or [B, 0, V] if they are not kept
    lengths: jax.Array  # [B] int32, tokens taken, the stop token included
    ended: jax.Array  # [B] whether the row has met a stop token, its limit or a non-finite logit
    nonfinite_step: jax.Array  # [B] int32, the step whose logits were not finite, -1 if none; the row stops there


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What the rows of a batch are."""

    first: jax.Array  # [B] int32, slot of the first prompt token (number of left-padding slots)
    prompt: jax.Array  # int32 scalar, slot of the first generated token
    forced_until: jax.Array  # [B] int32, slots before it keep the buffer's token
    limit: jax.Array  # [B] int32, the slot at which a row ends at the latest
    problems: jax.Array  # [B] int32, keys of the sampling noise
    seed: jax.Array  # int32 scalar


def slot_positions(slots: jax.Array, first: jax.Array, end: jax.Array | int) -> jax.Array:
    """Absolute positions [B, T] of slots [T]: s - first[b] within [first[b], end), -1 elsewhere."""
    positions = slots[None, :] - first[:, None]
    return jnp.where((positions >= 0) & (slots[None, :] < end), positions, EMPTY).astype(jnp.int32)


def emit(run: Rollout, logits: jax.Array, rows: Rows, sampler: Sampler, stop_ids: tuple[int, ...]) -> Rollout:
    """Records a step's logits [B, V], chooses, and fills the slot of every row that has not ended."""
    step = run.slot - rows.prompt
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    choice = choose(logits, sampler, rows.seed, rows.problems, run.slot - rows.first)
    held = jax.lax.dynamic_slice_in_dim(run.tokens, run.slot, 1, axis=1)[:, 0]
    token = jnp.where(run.slot < rows.forced_until, held, choice)
    broke = ~run.ended & ~finite
    live = ~run.ended & finite
    stopped = functools.reduce(jnp.logical_or, [token == s for s in stop_ids], jnp.zeros_like(live))
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return Rollout(
        slot=run.slot + 1,
        tokens=put(run.tokens, jnp.where(live, token, PAD_ID)[:, None], run.slot),
        choices=put(run.choices, jnp.where(live, choice, PAD_ID)[:, None], step),
        logits=put(run.logits, logits[:, None], step) if run.logits.shape[1] else run.logits,
        lengths=run.lengths + live,
        ended=run.ended | broke | stopped | (run.slot + 1 >= rows.limit),
        nonfinite_step=jnp.where(broke, step, run.nonfinite_step),
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes of a batch; part of what an arm is."""

    batch: int  # B
    prompt: int  # slot of the first generated token (the longest prompt)
    prefill: int  # rows of the cached arm's prefill, at least `prompt`
    slots: int  # S of the cache, and rows of the padded uncached arm
    new_tokens: int  # most tokens to generate


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def make_layout(
    prompts: list[list[int]], new_tokens: int, bucket: int, config: ModelConfig, tile: int | None = None
) -> Layout:
    """Shapes for a batch of prompts: the longest rounded up to `bucket` rows, which keeps compilations few, and room.

    With a `tile`, slots are a multiple of it. Raises UserError on an empty prompt, one with an id that has no embedding
    (XLA would clamp it), or a prompt and its new tokens that do not fit the model's context.
    """
    longest = max(map(len, prompts))
    if not min(map(len, prompts)):
        raise UserError("a prompt has no tokens; give it text, or a tokenizer that adds BOS")
    if longest + new_tokens > config.context_length:
        raise UserError(
            f"a prompt of {longest} tokens and {new_tokens} new ones exceed the context of {config.context_length} "
            f"of {config.name}; use a shorter prompt (or fewer --shots) or a smaller --max_new_tokens"
        )
    if odd := sorted({i for prompt in prompts for i in prompt if not 0 <= i < config.vocab_size}):
        raise UserError(
            f"a prompt has token {odd[0]}, but {config.name} has {config.vocab_size} rows of embeddings; "
            "use the tokenizer that belongs to these weights"
        )
    prefill = round_up(longest, bucket)
    return Layout(len(prompts), longest, prefill, round_up(prefill + new_tokens, tile or 1), new_tokens)


def make_rows(prompts: list[list[int]], problems: list[int], seed: int, layout: Layout) -> tuple[np.ndarray, Rows]:
    """Left-pads prompts into the token buffer [B, S] and describes the rows, free-running to the layout's end."""
    tokens = np.full((layout.batch, layout.slots), PAD_ID, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, layout.prompt - len(prompt) : layout.prompt] = prompt
    end = layout.prompt + layout.new_tokens
    return tokens, Rows(
        first=jnp.asarray([layout.prompt - len(p) for p in prompts], jnp.int32),
        prompt=jnp.asarray(layout.prompt, jnp.int32),
        forced_until=jnp.zeros(layout.batch, jnp.int32),
        limit=jnp.full(layout.batch, end, jnp.int32),
        problems=jnp.asarray(problems, jnp.int32),
        seed=jnp.asarray(seed, jnp.int32),
    )


class AnyArms(Protocol):
    """Both arms of a model: JAX's (`decode.Arms`) or PyTorch's (`torch_path.TorchArms`).

    `state` are the weights as `decode.Arms.prepare` gives them; PyTorch's arms hold their own and are given None.
    """

    config: ModelConfig  # architecture
    precision: Precision  # policy
    sampler: Sampler  # how tokens are chosen
    stop_ids: tuple[int, ...]  # token ids that end a row
    tile: int | None  # rows of a tile in the aligned regime; None is the plain regime
    keep_logits: bool  # whether a rollout holds logits from its start; PyTorch's gets them when it is finished
    exact_checks: bool  # whether one pass over given tokens has the bits of steps by construction
    origin: dict[str, Any]  # fields that records of these arms have beside those of others

    def settings(self) -> contextlib.AbstractContextManager[Any]:
        """What must be set while the arms run."""

    def describe(self) -> dict[str, Any]:
        """What decides their numbers, beside what is asked, for the config of a run directory."""

    def fit(self, layout: Layout) -> Layout:
        """The layout as these arms have it."""

    def run_cached(self, state: Any, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
        """The cached arm, free-running or forced as `rows` says."""

    def run_uncached(
        self, state: Any, run: Rollout, rows: Rows, layout: Layout, uncached_length: str = "padded"
    ) -> Rollout:
        """The uncached arm step by step, from where `run` stands to its end. `run` is donated."""

    def run_forced(
        self,
        state: Any,
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

    def audit_pass(self, state: Any, tokens: Any, first: Any, end: Any) -> dict[str, Any]:
        """Largest magnitude of every named value in each row, along tokens [B, P] in one uncached forward.

        Args:
          state: weights.
          tokens: [B, P].
          first: [B] slot of the first token.
          end: [B] slot after the last.

        Returns:
          name -> [B, P] float32, 0 in padding rows; NaN and inf show as themselves. Names begin with their number in
          order of execution, since dicts come out of jit sorted.
        """


def start_rollout(arms: AnyArms, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
    """A rollout before its first step. Rows whose limit is the first slot have ended already."""
    n = layout.new_tokens
    kept = n if arms.keep_logits else 0
    return Rollout(
        slot=jnp.array(layout.prompt, jnp.int32),  # a copy: the loops donate the rollout, not the rows
        tokens=jnp.array(tokens, jnp.int32),
        choices=jnp.full((layout.batch, n), PAD_ID, jnp.int32),
        logits=jnp.zeros((layout.batch, kept, arms.config.vocab_size), arms.precision.logits),
        lengths=jnp.zeros(layout.batch, jnp.int32),
        ended=rows.limit <= rows.prompt,
        nonfinite_step=jnp.full(layout.batch, -1, jnp.int32),
    )


def force(rows: Rows, reference: Rollout) -> Rows:
    """Rows that follow the reference's tokens for as long as it went."""
    return dataclasses.replace(rows, forced_until=rows.limit, limit=rows.prompt + reference.lengths)


def start_forced(arms: AnyArms, reference: Rollout, forced: Rows, layout: Layout, begin: int = 0) -> Rollout:
    """A rollout along another one's tokens before step `begin`; `forced` are rows from `force`."""
    run = start_rollout(arms, np.asarray(reference.tokens), forced, layout)
    return dataclasses.replace(
        run,
        slot=run.slot + begin,
        lengths=jnp.minimum(reference.lengths, begin),
        ended=jnp.asarray(reference.lengths <= begin),
    )


def uncached_lengths(uncached_length: str, layout: Layout) -> list[tuple[int, int]]:
    """The padded lengths of the uncached arm: (rows, end slot) segments in order.

    'padded' is layout.slots rows at every step, 'bucket:M' the prefix rounded up to M. Raises UserError otherwise.
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
