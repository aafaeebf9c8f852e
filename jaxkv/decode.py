"""The two arms: decoding with a KV cache and without one, each a jitted on-device loop over the same forward.

A run lays its tokens out in one buffer [B, S]: slots [0, prompt) hold the prompts, later slots what is generated, and
row b's prompt starts at slot `first[b]` (above 0 only under left padding). A token at slot s has absolute position
s - first[b]. Step t of an arm yields the logits for slot `prompt + t`.

cached    `prefill` fills the cache with the prompt at a padded number of rows, then each step runs one row.
uncached  each step runs the whole prefix, padded on the right to a fixed number of rows, from an empty cache. Padding
          rows have position -1: they write zeros and no row sees them. The head runs on the last row alone, as in
          transformers' `generate`.

Both arms choose tokens through `_emit`. A row may be forced: up to slot `forced_until[b]` the buffer's own tokens are
kept, and what the arm would have chosen is recorded beside them. Teacher forcing and free running are the same
compiled program, so a free run may start from a forced run's first disagreement and still be that arm's own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import EMPTY, KVCache, empty_cache
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.layers import ATTENTION_SHAPED, visible
from jaxkv.sampling import Sampler, choose

PAD_ID = 0  # written to rows that have ended; such slots are never read back

# XLA may otherwise drop narrowing casts inside fusions, which would make 16-bit arms not 16-bit.
COMPILER_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """What an arm has produced so far; also the state its loop carries.

    Attributes:
      slot: int32 scalar, the next slot to fill.
      tokens: [B, S] int32 prompt and generated tokens.
      choices: [B, n] int32, what the arm chose at each step, also where it was forced to take another token.
      logits: [B, n, V] in the logits dtype, or [B, 0, V] if they are not kept.
      lengths: [B] int32, tokens taken, the stop token included.
      ended: [B] whether the row has met a stop token, its limit or a non-finite logit.
      nonfinite_step: [B] int32, the step whose logits were not finite, -1 if none; the row stops there.
    """

    slot: jax.Array
    tokens: jax.Array
    choices: jax.Array
    logits: jax.Array
    lengths: jax.Array
    ended: jax.Array
    nonfinite_step: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What the rows of a batch are.

    Attributes:
      first: [B] int32, slot of the first prompt token (number of left-padding slots).
      prompt: int32 scalar, slot of the first generated token.
      forced_until: [B] int32, slots before it keep the buffer's token.
      limit: [B] int32, the slot at which a row ends at the latest.
      problems: [B] int32, keys of the sampling noise.
      seed: int32 scalar.
    """

    first: jax.Array
    prompt: jax.Array
    forced_until: jax.Array
    limit: jax.Array
    problems: jax.Array
    seed: jax.Array


def slot_positions(slots: jax.Array, first: jax.Array, end: jax.Array | int) -> jax.Array:
    """Absolute positions [B, T] of slots [T]: s - first[b] within [first[b], end), -1 elsewhere."""
    positions = slots[None, :] - first[:, None]
    return jnp.where((positions >= 0) & (slots[None, :] < end), positions, EMPTY).astype(jnp.int32)


def _emit(run: Rollout, logits: jax.Array, rows: Rows, sampler: Sampler, stop_ids: tuple[int, ...]) -> Rollout:
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


class Arms:
    """The compiled programs of one model: prefill, both loops, and the audit.

    Args:
      config: architecture.
      precision: policy.
      sampler: how tokens are chosen.
      stop_ids: token ids that end a row.
      keep_logits: whether rollouts record logits.
      compiler_options: XLA options of every program.
      backend: platform that the programs are for; None is JAX's default one.

    Attributes:
      held: the policy with which weights and operands are really held (Precision.widened on a CPU).

    Raises:
      ValueError: the policy has float64 parts and JAX would make them float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        sampler: Sampler | None = None,
        stop_ids: tuple[int, ...] = (),
        keep_logits: bool = True,
        compiler_options: dict[str, Any] | None = None,
        backend: str | None = None,
    ):
        if "float64" in precision.to_json().values() and not jax.config.read("jax_enable_x64"):
            raise ValueError(f"{precision.name} has float64 parts, float32 to JAX unless jax_enable_x64 is set")
        self.config, self.precision = config, precision
        self.held = precision.widened() if (backend or jax.default_backend()) == "cpu" else precision
        self.graphdef, self.abstract_state = abstract_decoder(config, self.held)
        self.sampler, self.stop_ids, self.keep_logits = sampler or Sampler(), tuple(stop_ids), keep_logits
        options = COMPILER_OPTIONS | (compiler_options or {})
        jit = functools.partial(jax.jit, compiler_options=options)
        self.prefill = jit(self._prefill, donate_argnames="cache")
        self.cached_loop = jit(self._cached_loop, donate_argnames=("cache", "run"))
        self.uncached_loop = jit(self._uncached_loop, static_argnames="padded", donate_argnames="run")
        self.audit_pass = jit(self._audit_pass)

    def prepare(self, state: nnx.State) -> nnx.State:
        """Weights in the form the programs take: as they are, or on a CPU widened once (Precision.widened)."""
        return jax.tree.map(lambda leaf, want: leaf.astype(want.dtype), state, self.abstract_state)

    # The programs. Each is a pure function of (prepared weights, arrays).

    def _prefill(self, state, tokens, rows: Rows, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Runs tokens [B, P], the first rows.prompt of them real. Returns the last real row's logits [B, V]."""
        model = nnx.merge(self.graphdef, state)
        positions = slot_positions(jnp.arange(tokens.shape[1], dtype=jnp.int32), rows.first, rows.prompt)
        hidden, cache = model(tokens, positions, cache, 0)
        last = jax.lax.dynamic_slice_in_dim(hidden, rows.prompt - 1, 1, axis=1)
        return model.logits(last)[:, 0], cache

    def _cached_loop(self, state, logits, run: Rollout, rows: Rows, end, cache: KVCache) -> tuple[Rollout, KVCache]:
        """Fills slots [run.slot, end) from `logits`, which are those of run.slot. Returns the cache for going on."""
        model = nnx.merge(self.graphdef, state)

        def body(carry):
            run, cache = carry
            slot = run.slot - 1
            token = jax.lax.dynamic_slice_in_dim(run.tokens, slot, 1, axis=1)
            hidden, cache = model(token, (slot - rows.first)[:, None], cache, slot)
            return self._emit(run, model.logits(hidden)[:, 0], rows), cache

        def more(carry):
            return (carry[0].slot < end) & ~jnp.all(carry[0].ended)

        return jax.lax.while_loop(more, body, (self._emit(run, logits, rows), cache))

    def _uncached_loop(self, state, run: Rollout, rows: Rows, end, padded: int) -> Rollout:
        """Fills slots [run.slot, end), each from a forward over the whole prefix padded to `padded` rows."""
        model = nnx.merge(self.graphdef, state)
        slots = jnp.arange(padded, dtype=jnp.int32)

        def body(run):
            cache = empty_cache(self.config, self.precision, run.tokens.shape[0], padded)
            positions = slot_positions(slots, rows.first, run.slot)
            hidden, _ = model(run.tokens[:, :padded], positions, cache, 0)
            last = jax.lax.dynamic_slice_in_dim(hidden, run.slot - 1, 1, axis=1)
            return self._emit(run, model.logits(last)[:, 0], rows)

        return jax.lax.while_loop(lambda run: (run.slot < end) & ~jnp.all(run.ended), body, run)

    def _emit(self, run, logits, rows):
        return _emit(run, logits, rows, self.sampler, self.stop_ids)

    def _audit_pass(self, state, tokens, first, end) -> dict[str, jax.Array]:
        """Largest magnitude of every named value in each row: name -> [B, P] float32, 0 in padding rows.

        NaN and inf show as themselves. Products with keys that a row does not see do not count. Names are in order of
        execution.

        Args:
          state: weights.
          tokens: [B, P].
          first: [B] slot of the first token.
          end: [B] slot after the last.
        """
        model = nnx.merge(self.graphdef, state)
        B, P = tokens.shape
        positions = slot_positions(jnp.arange(P, dtype=jnp.int32), first, end[:, None])
        largest: dict[str, jax.Array] = {}

        def record(name, value):
            row_axis = 3 if name.startswith(ATTENTION_SHAPED) else 1
            magnitude = jnp.abs(value.astype(jnp.promote_types(value.dtype, jnp.float32)))
            if name.startswith(("qk.", "scores.")):
                seen = visible(positions, positions, self.config.layer_window(int(name.split(".")[1])))
                magnitude = jnp.where(seen[:, None, None], magnitude, 0)
            peak = jnp.max(magnitude, axis=tuple(a for a in range(value.ndim) if a not in (0, row_axis)))
            largest[name] = jnp.where(positions != EMPTY, peak, 0).astype(jnp.float32)
            return value

        cache = empty_cache(self.config, self.precision, B, P)
        hidden, _ = model(tokens, positions, cache, 0, record)

        def head(row):  # [B, D]; a few rows at a time, since all of [B, P, V] may not fit
            seen: dict[str, jax.Array] = {}
            model.logits(row[:, None], lambda name, value: seen.setdefault(name, value))
            return {name: jnp.max(jnp.abs(value.astype(jnp.float32)), axis=(1, 2)) for name, value in seen.items()}

        for name, peak in jax.lax.map(head, jnp.swapaxes(hidden, 0, 1), batch_size=16).items():
            largest[name] = jnp.where(positions != EMPTY, peak.T, 0)
        # Dicts come out of jit sorted by key; numbers keep the order of execution.
        return {f"{number:05d} {name}": peak for number, (name, peak) in enumerate(largest.items())}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes of a batch; part of what an arm is.

    Attributes:
      batch: B.
      prompt: slot of the first generated token (the longest prompt).
      prefill: rows of the cached arm's prefill, at least `prompt`.
      slots: S of the cache, and rows of the padded uncached arm.
      new_tokens: most tokens to generate.
    """

    batch: int
    prompt: int
    prefill: int
    slots: int
    new_tokens: int


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def make_layout(prompts: list[list[int]], new_tokens: int, bucket: int, config: ModelConfig) -> Layout:
    """Shapes for a batch of prompts: the longest prompt rounded up to `bucket` rows, and room for `new_tokens`.

    Rounding keeps the number of distinct shapes, and so of compilations, small.

    Raises:
      UserError: an empty prompt, or a prompt and its new tokens that do not fit the model's context.
    """
    longest = max(map(len, prompts))
    if not min(map(len, prompts)):
        raise UserError("a prompt has no tokens; give it text, or a tokenizer that adds BOS")
    if longest + new_tokens > config.context_length:
        raise UserError(
            f"a prompt of {longest} tokens and {new_tokens} new ones exceed the context of {config.context_length} "
            f"of {config.name}; use fewer shots (--shots) or a smaller --max_new_tokens"
        )
    prefill = round_up(longest, bucket)
    return Layout(len(prompts), longest, prefill, prefill + new_tokens, new_tokens)


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


def start_rollout(arms: Arms, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
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


def run_cached(arms: Arms, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
    """The cached arm, free-running or forced as `rows` says."""
    cache = empty_cache(arms.config, arms.precision, layout.batch, layout.slots)
    logits, cache = arms.prefill(state, jnp.asarray(tokens[:, : layout.prefill]), rows, cache)
    run = start_rollout(arms, tokens, rows, layout)
    return arms.cached_loop(state, logits, run, rows, layout.prompt + layout.new_tokens, cache)[0]


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
    arms: Arms, state: nnx.State, run: Rollout, rows: Rows, layout: Layout, uncached_length: str = "padded"
) -> Rollout:
    """Takes the uncached arm from where `run` stands to its end. `run` is donated."""
    segments = uncached_lengths(uncached_length, layout)
    # Widened once, for the longest: a forced run and a free one then share their programs at every length.
    missing = max(0, segments[-1][0] - run.tokens.shape[1])
    run = dataclasses.replace(run, tokens=jnp.pad(run.tokens, ((0, 0), (0, missing))))
    for padded, end in segments:
        run = arms.uncached_loop(state, run, rows, end, padded=padded)
    return run


def force(rows: Rows, reference: Rollout) -> Rows:
    """Rows that follow the reference's tokens for as long as it went."""
    return dataclasses.replace(rows, forced_until=rows.limit, limit=rows.prompt + reference.lengths)


def first_disagreement(forced: Rollout, prompt: int) -> np.ndarray:
    """[B] the first step whose choice is not the token that was forced; the row's length if there is none."""
    n = forced.choices.shape[1]
    lengths = np.asarray(forced.lengths)[:, None]
    tokens = np.asarray(forced.tokens)[:, prompt : prompt + n]
    differs = (np.asarray(forced.choices) != tokens) & (np.arange(n) < lengths)
    return np.where(differs.any(1), differs.argmax(1), lengths[:, 0])


def free_after_forced(
    arms: Arms, state: nnx.State, forced: Rollout, rows: Rows, layout: Layout, uncached_length: str = "padded"
) -> Rollout:
    """The uncached arm's own free run, from its forced run along another arm's tokens.

    Up to its first disagreement a forced row has made the very computation of a free one. The free run therefore takes
    over the forced tokens up to there and the arm's own choice at it, and is stepped from the next slot on; the result
    is the same as stepping from the prompt (tests/test_decode.py), for a fraction of the work.

    Args:
      arms: as in the forced run.
      state: weights.
      forced: the finished forced run.
      rows: the rows as they were before forcing.
      layout: of the batch.
      uncached_length: as in the forced run.

    Returns:
      A Rollout without logits before the take-over.
    """
    prompt = layout.prompt
    agreed = first_disagreement(forced, prompt)
    tokens, choices = np.array(forced.tokens), np.asarray(forced.choices)
    lengths, broke = np.asarray(forced.lengths), np.asarray(forced.nonfinite_step)
    disagrees = agreed < lengths
    own = choices[np.arange(len(agreed)), np.minimum(agreed, layout.new_tokens - 1)]
    taken = agreed + disagrees
    for row, step in enumerate(agreed):
        tokens[row, prompt + taken[row] :] = PAD_ID
        if disagrees[row]:
            tokens[row, prompt + step] = own[row]
    stopped = np.isin(tokens[np.arange(len(taken)), prompt + taken - 1], arms.stop_ids) & (taken > 0)
    ended = np.where(disagrees, stopped | (prompt + taken >= np.asarray(rows.limit)), True)
    begin = int(min(taken[~ended], default=layout.new_tokens))
    run = start_rollout(arms, tokens, rows, layout)
    run = dataclasses.replace(
        run,
        slot=jnp.asarray(prompt + begin, jnp.int32),
        lengths=jnp.asarray(np.where(ended, taken, np.minimum(begin, taken)), jnp.int32),
        ended=jnp.asarray(ended),
        nonfinite_step=jnp.asarray(np.where(disagrees, -1, broke), jnp.int32),
    )
    if ended.all():
        return run
    keep = dataclasses.replace(rows, forced_until=jnp.asarray(prompt + taken, jnp.int32))
    run = run_uncached(arms, state, run, keep, layout, uncached_length)
    # A row that has ended is padded with every step the others still take.
    return dataclasses.replace(run, tokens=jnp.where(ended[:, None], tokens, run.tokens))
