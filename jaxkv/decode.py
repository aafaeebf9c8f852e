"""The two arms: decoding with a KV cache and without one, each a jitted on-device loop over the same forward.

A run lays its tokens out in one buffer [B, S]: slots [0, prompt) hold the prompts, later slots what is generated, and
row b's prompt starts at slot `first[b]` (above 0 only under left padding). A token at slot s has absolute position
s - first[b]. Step t of an arm yields the logits for slot `prompt + t`.

cached    `prefill` fills the cache with the prompt at a padded number of rows, then each step runs one row.
uncached  each step runs the whole prefix, padded on the right to a fixed number of rows, from an empty cache. Padding
          rows have position -1: they write zeros and no row sees them. The head runs on the last row alone, as in
          transformers' `generate`.
aligned   both arms run one compiled program, `tile_loop`, over tiles of a fixed number of rows against a fixed number
          of slots. The cached arm runs the last tile at each step, the uncached one all tiles from an empty cache.

The plain uncached arm is `tile_loop` too, with one tile over all rows. The program can give the logits of every row of
a tile, each by the same one-row head. Rows do not see what follows them, so a whole draft is checked in one pass and
yields, bit for bit, what stepping through it would (`uncached.py`).

Arms choose tokens through `emit`. A row may be forced: up to slot `forced_until[b]` the buffer's own tokens are kept,
and what the arm would have chosen is recorded beside them. Teacher forcing and free running are the same compiled
program, so a free run may start from a forced run's first disagreement and still be that arm's own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import EMPTY, Cache, Intervention, KVCache, clear_slots, empty_cache
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.models.alignment import Alignment
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


def make_layout(
    prompts: list[list[int]], new_tokens: int, bucket: int, config: ModelConfig, tile: int | None = None
) -> Layout:
    """Shapes for a batch of prompts: the longest prompt rounded up to `bucket` rows, and room for `new_tokens`.

    Rounding keeps the number of distinct shapes, and so of compilations, small. With a `tile`, slots are a multiple
    of it.

    Raises:
      UserError: an empty prompt, one with an id that has no embedding (XLA would clamp it), or a prompt and its new
        tokens that do not fit the model's context.
    """
    longest = max(map(len, prompts))
    if not min(map(len, prompts)):
        raise UserError("a prompt has no tokens; give it text, or a tokenizer that adds BOS")
    if longest + new_tokens > config.context_length:
        raise UserError(
            f"a prompt of {longest} tokens and {new_tokens} new ones exceed the context of {config.context_length} "
            f"of {config.name}; use fewer shots (--shots) or a smaller --max_new_tokens"
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


class Arms:
    """The compiled programs of one model: prefill, the loops, and the audit.

    Args:
      config: architecture.
      precision: policy.
      sampler: how tokens are chosen.
      stop_ids: token ids that end a row.
      keep_logits: whether rollouts record logits.
      tile: rows of a tile in the aligned regime; None is the plain regime.
      compiler_options: XLA options of every program.
      backend: platform that the programs are for; None is JAX's default one.
      intervention: what is done to the cached arm's cache; None leaves it clean.

    Attributes:
      held: the policy with which weights and operands are really held (Precision.widened on a CPU).

    Raises:
      ValueError: the policy has float64 parts and JAX would make them float32.
      UserError: an intervention in the aligned regime.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        sampler: Sampler | None = None,
        stop_ids: tuple[int, ...] = (),
        keep_logits: bool = True,
        tile: int | None = None,
        compiler_options: dict[str, Any] | None = None,
        backend: str | None = None,
        intervention: Intervention | None = None,
    ):
        if intervention is not None and tile is not None:
            raise UserError(
                "a changed cache has no aligned regime, in which rows of a tile are written again; leave --regime at "
                "plain"
            )
        if "float64" in precision.to_json().values() and not jax.config.read("jax_enable_x64"):
            raise ValueError(f"{precision.name} has float64 parts, float32 to JAX unless jax_enable_x64 is set")
        self.config, self.precision = config, precision
        self.held = precision.widened() if (backend or jax.default_backend()) == "cpu" else precision
        self.graphdef, self.abstract_state = abstract_decoder(config, self.held)
        self.sampler, self.stop_ids, self.keep_logits = sampler or Sampler(), tuple(stop_ids), keep_logits
        self.tile, self.intervention = tile, intervention
        options = COMPILER_OPTIONS | (compiler_options or {})
        jit = functools.partial(jax.jit, compiler_options=options)
        self.prefill = jit(self._prefill, donate_argnames="cache")
        self.cached_loop = jit(self._cached_loop, donate_argnames=("cache", "run"))
        self.tile_loop = jit(self._tile_loop, static_argnames="tile", donate_argnames=("cache", "run"))
        self.audit_pass = jit(self._audit_pass)

    def describe_held(self) -> dict[str, str]:
        """Dtypes in which weights and operands lie on the device."""
        return {part: self.held.to_json()[part] for part in ("param", "operand")}

    def prepare(self, state: nnx.State) -> nnx.State:
        """Weights in the form the programs take: as they are, or on a CPU widened once (Precision.widened)."""
        return jax.tree.map(lambda leaf, want: leaf.astype(want.dtype), state, self.abstract_state)

    def prepare_in_place(self, state: nnx.State) -> nnx.State:
        """As `prepare`, one weight after another and each in the place of the one given, so that one copy is held.

        Widened weights are the same values: other arms, of another policy too, can be prepared from them.
        """
        held, wanted = nnx.to_flat_state(state), nnx.to_flat_state(self.abstract_state)
        for leaf, want in zip(held.leaves, wanted.leaves, strict=True):
            leaf.set_value(leaf[...].astype(want.dtype).block_until_ready())
        return state

    # The programs. Each is a pure function of (prepared weights, arrays).

    def _prefill(
        self, state, tokens, rows: Rows, cache: Cache, alignment: Alignment | None = None
    ) -> tuple[jax.Array, Any]:
        """Runs tokens [B, P], the first rows.prompt of them real. Returns the last real row's logits [B, V]."""
        model = nnx.merge(self.graphdef, state)
        positions = slot_positions(jnp.arange(tokens.shape[1], dtype=jnp.int32), rows.first, rows.prompt)
        hidden, cache = model(tokens, positions, cache, 0, alignment=alignment)
        slot = rows.prompt - 1
        last = jax.lax.dynamic_slice_in_dim(hidden, slot, 1, axis=1)
        return model.logits(last, alignment=alignment, slot=slot)[:, 0], cache

    def _cached_loop(
        self, state, logits, run: Rollout, rows: Rows, end, cache: Cache, alignment: Alignment | None = None
    ) -> tuple[Rollout, Any]:
        """Fills slots [run.slot, end) from `logits`, which are those of run.slot. Returns the cache for going on."""
        model = nnx.merge(self.graphdef, state)

        def body(carry):
            run, cache = carry
            slot = run.slot - 1
            token = jax.lax.dynamic_slice_in_dim(run.tokens, slot, 1, axis=1)
            hidden, cache = model(token, (slot - rows.first)[:, None], cache, slot, alignment=alignment)
            return self._emit(run, model.logits(hidden, alignment=alignment, slot=slot)[:, 0], rows), cache

        def more(carry):
            return (carry[0].slot < end) & ~jnp.all(carry[0].ended)

        return jax.lax.while_loop(more, body, (self._emit(run, logits, rows), cache))

    def _tile_loop(
        self,
        state,
        run: Rollout,
        rows: Rows,
        end,
        cache: KVCache,
        recompute,
        whole,
        *,
        tile: int,
        alignment: Alignment | None = None,
    ) -> tuple[Rollout, KVCache]:
        """Fills slots [run.slot, end) from forwards over tiles of `tile` rows.

        One executable serves every arm that must agree with another bit for bit, so what it is used for are arguments:

        Args:
          state: weights.
          run: [B, at least S] tokens; slots before run.slot are given.
          rows: of the batch.
          end: int32 scalar, at most S.
          cache: S slots, a multiple of `tile`; the tiles before that of run.slot - 1 must be in it unless it is empty.
          recompute: bool scalar. True empties the cache and runs every tile at each step (the uncached arm by steps).
            False runs the last tile alone, or on an empty cache all of them once.
          whole: bool scalar. True takes the tokens up to `end` as given (every row must be forced) and yields the
            logits of all rows of a tile after one run of it (the check of a draft).
          tile: rows of a forward.
          alignment: what is computed in tiles of its own, None for nothing.
        """
        model = nnx.merge(self.graphdef, state)
        B, tiles = run.tokens.shape[0], cache.positions.shape[1] // tile
        offsets = jnp.arange(tile, dtype=jnp.int32)

        def step(carry):
            run, cache = carry
            last = (run.slot - 1) // tile  # the tile of the newest token
            known = jnp.where(whole, end, run.slot)  # slots before it hold tokens

            def forward(index, carry):
                first_slot = index * tile
                tokens = jax.lax.dynamic_slice_in_dim(run.tokens, first_slot, tile, axis=1)
                positions = slot_positions(first_slot + offsets, rows.first, known)
                hidden, cache = model(tokens, positions, carry[0], first_slot, alignment=alignment)
                return cache, hidden

            def give(run):
                slot = run.slot - 1
                row = jax.lax.dynamic_slice_in_dim(hidden, slot - last * tile, 1, axis=1)
                return self._emit(run, model.logits(row, alignment=alignment, slot=slot)[:, 0], rows)

            if tiles == 1:  # it overwrites every slot
                cache, hidden = forward(0, (cache, None))
            else:
                begin = jnp.where(recompute | jnp.all(cache.positions == EMPTY), 0, last)
                cache = jax.lax.fori_loop(
                    0, jnp.where(recompute, tiles, 0), lambda i, cache: clear_slots(cache, i * tile, tile), cache
                )
                hidden = jnp.zeros((B, tile, self.config.model_dim), self.precision.activation)
                cache, hidden = jax.lax.fori_loop(begin, last + 1, forward, (cache, hidden))
            until = jnp.where(whole, jnp.minimum((last + 1) * tile + 1, end), run.slot + 1)
            run = jax.lax.while_loop(lambda run: (run.slot < until) & ~jnp.all(run.ended), give, run)
            return run, cache

        def more(carry):
            return (carry[0].slot < end) & ~jnp.all(carry[0].ended)

        return jax.lax.while_loop(more, step, (run, cache))

    def _emit(self, run, logits, rows):
        return emit(run, logits, rows, self.sampler, self.stop_ids)

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
            peak = _peak(magnitude, tuple(a for a in range(value.ndim) if a not in (0, row_axis)))
            largest[name] = jnp.where(positions != EMPTY, peak, 0).astype(jnp.float32)
            return value

        cache = empty_cache(self.config, self.precision, B, P)
        hidden, _ = model(tokens, positions, cache, 0, record)

        def head(row):  # [B, D]; a few rows at a time, since all of [B, P, V] may not fit
            seen: dict[str, jax.Array] = {}
            model.logits(row[:, None], lambda name, value: seen.setdefault(name, value))
            return {name: _peak(jnp.abs(value.astype(jnp.float32)), (1, 2)) for name, value in seen.items()}

        for name, peak in jax.lax.map(head, jnp.swapaxes(hidden, 0, 1), batch_size=16).items():
            largest[name] = jnp.where(positions != EMPTY, peak.T, 0)
        # Dicts come out of jit sorted by key; numbers keep the order of execution.
        return {f"{number:05d} {name}": peak for number, (name, peak) in enumerate(largest.items())}


def _peak(magnitude: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The largest, NaN if one is: XLA's maximum on a CPU drops NaN where it is vectorized."""
    return jnp.where(jnp.any(jnp.isnan(magnitude), axis=axes), jnp.nan, jnp.max(magnitude, axis=axes))


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
