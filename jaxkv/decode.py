"""JAX's two arms: decoding with a KV cache and without one, each a jitted on-device loop over the same forward.

cached    `prefill` fills the cache with the prompt at a padded number of rows, then each step runs one row.
uncached  each step runs the whole prefix, padded on the right to a fixed number of rows, from an empty cache. Padding
          rows have position -1: they write zeros and no row sees them. The head runs on the last row alone, as in
          transformers' `generate`.
aligned   both arms run one compiled program, `tile_loop`, over tiles of a fixed number of rows against a fixed number
          of slots. The cached arm runs the last tile at each step, the uncached one all tiles from an empty cache.

The plain uncached arm is `tile_loop` too, with one tile over all rows. The program can give the logits of every row of
a tile, each by the same one-row head. Rows do not see what follows them, so a whole draft is checked in one pass and
yields, bit for bit, what stepping through it would (`drafts.py` makes a free generation of it).
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import EMPTY, Cache, Intervention, KVCache, empty_cache
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.models.alignment import PLAIN, Alignment, Alignments
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.layers import ATTENTION_SHAPED, visible
from jaxkv.rollout import (
    Layout,
    Rollout,
    Rows,
    emit,
    force,
    slot_positions,
    start_forced,
    start_rollout,
    uncached_lengths,
)
from jaxkv.sampling import Sampler

# XLA may otherwise drop narrowing casts inside fusions, which would make 16-bit arms not 16-bit.
COMPILER_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}


class Arms:
    """The compiled programs of one model (prefill, the loops and the audit), and both arms made of them.

    Args as in AnyArms, and `backend`, the platform that the programs are for (None: JAX's default one). `held` is the
    policy with which weights and operands are really held (Precision.held_on). Raises ValueError if the policy
    has float64 parts and JAX would make them float32.
    """

    exact_checks = True

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        sampler: Sampler | None = None,
        stop_ids: tuple[int, ...] = (),
        keep_logits: bool = True,
        tile: int | None = None,
        backend: str | None = None,
        attention: str = "eager",
    ):
        if "float64" in precision.to_json().values() and not jax.config.read("jax_enable_x64"):
            raise ValueError(f"{precision.name} has float64 parts, float32 to JAX unless jax_enable_x64 is set")
        self.config, self.precision = config, precision
        self.held = precision.held_on(backend or jax.default_backend())
        self.graphdef, self.abstract_state = abstract_decoder(config, self.held, attention)
        self.sampler, self.stop_ids, self.keep_logits = sampler or Sampler(), tuple(stop_ids), keep_logits
        self.tile, self.attention, self.origin = tile, attention, dict[str, Any]()
        jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
        self.prefill = jit(self._prefill, donate_argnames="cache")
        self.cached_loop = jit(self._cached_loop, donate_argnames=("cache", "run"))
        self.tile_loop = jit(self._tile_loop, static_argnames="tile", donate_argnames=("cache", "run"))
        self.audit_pass = jit(self._audit_pass)

    def describe_held(self) -> dict[str, str]:
        """Dtypes in which weights and operands lie on the device."""
        return {part: self.held.to_json()[part] for part in ("param", "operand")}

    def prepare(self, state: nnx.State) -> nnx.State:
        """Weights as the programs take them: as they are, or on a CPU widened once (Precision.widened)."""
        return jax.tree.map(lambda leaf, want: leaf.astype(want.dtype), state, self.abstract_state)

    def prepare_in_place(self, state: nnx.State) -> nnx.State:
        """As `prepare`, one weight after another and each in the place of the one given, so that one copy is held.

        Widened weights are the same values: other arms, of another policy too, can be prepared from them.
        """
        held, wanted = nnx.to_flat_state(state), nnx.to_flat_state(self.abstract_state)
        for leaf, want in zip(held.leaves, wanted.leaves, strict=True):
            leaf.set_value(leaf[...].astype(want.dtype).block_until_ready())
        return state

    # The arms, as AnyArms has them.

    def settings(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def describe(self) -> dict[str, Any]:
        return {}

    def fit(self, layout: Layout) -> Layout:
        return layout

    def make_cache(self, rows: Rows, layout: Layout, change: Intervention | None = None) -> Any:
        """An empty cache for a batch: a KVCache, or what a change of it makes.

        Raises UserError if it cannot be made, as in the aligned regime, where rows of a tile are written again.
        """
        if change is None:
            return empty_cache(self.config, self.precision, layout.batch, layout.slots)
        if self.tile is not None:
            raise UserError("a changed cache has no aligned regime; leave --regime at plain")
        return change.make_cache(self.config, self.precision, layout.batch, layout.slots, rows.problems)

    def run_cached(self, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
        return self.run_cached_keeping(state, tokens, rows, layout)[0]

    def run_cached_keeping(
        self,
        state: nnx.State,
        tokens: np.ndarray,
        rows: Rows,
        layout: Layout,
        cache: Any = None,
        align: Alignments = PLAIN,
    ) -> tuple[Rollout, Any]:
        """`run_cached`, from an empty cache that is donated (None: a clean one), and the cache it ends with.

        `align` is what the programs of the plain regime align.
        """
        _check_tiles(self.tile, layout.slots)
        cache = self.make_cache(rows, layout) if cache is None else cache
        run, end = start_rollout(self, tokens, rows, layout), layout.prompt + layout.new_tokens
        if self.tile is not None:
            # An argument that is given and one that is left out would be two programs, compiled apart.
            return self.tile_loop(state, run, rows, end, cache, False, False, tile=self.tile, alignment=align.recompute)
        prompt = jnp.asarray(tokens[:, : layout.prefill])
        logits, cache = self.prefill(state, prompt, rows, cache, align.prefill)
        return self.cached_loop(state, logits, run, rows, end, cache, align.decode)

    def run_uncached(
        self, state: nnx.State, run: Rollout, rows: Rows, layout: Layout, uncached_length: str = "padded"
    ) -> Rollout:
        return self.run_uncached_keeping(state, run, rows, layout, uncached_length)[0]

    def run_uncached_keeping(
        self,
        state: nnx.State,
        run: Rollout,
        rows: Rows,
        layout: Layout,
        uncached_length: str = "padded",
        check: bool = False,
        cache: Any = None,
        align: Alignments = PLAIN,
    ) -> tuple[Rollout, Any]:
        """`run_uncached`, and what the last forward wrote: the keys and values of every token fed to it.

        With `check` all rows are forced, and one pass over their tokens takes the place of one for each step. What
        follows a row may be given to it as NaN times zero: a rollout with a `nonfinite_step` is not to be trusted,
        `run_forced` steps through it instead. `cache` is an empty one that records what it is given, donated, at the
        padded length alone; `align` what the program of the plain regime aligns.
        """
        segments = uncached_lengths(uncached_length, layout)
        # Widened once, for the longest: a forced run and a free one then share their programs at every length.
        missing = max(0, segments[-1][0] - run.tokens.shape[1])
        run = dataclasses.replace(run, tokens=jnp.pad(run.tokens, ((0, 0), (0, missing))))
        for padded, end in segments:
            _check_tiles(self.tile, padded)
            held = empty_cache(self.config, self.precision, layout.batch, padded) if cache is None else cache
            tile = padded if self.tile is None else self.tile
            run, held = self.tile_loop(
                state, run, rows, end, held, not check, check, tile=tile, alignment=align.recompute
            )
            if padded < segments[-1][0] and np.all(np.asarray(run.ended)):
                break
        return run, held

    def run_forced(
        self,
        state: nnx.State,
        reference: Rollout,
        rows: Rows,
        layout: Layout,
        uncached_length: str = "padded",
        stepwise: bool = False,
        begin: int = 0,
        align: Alignments = PLAIN,
    ) -> Rollout:
        forced = force(rows, reference)
        for check in (False,) if stepwise else (True, False):
            start = start_forced(self, reference, forced, layout, begin)
            run, _ = self.run_uncached_keeping(state, start, forced, layout, uncached_length, check, align=align)
            if not np.any(np.asarray(run.nonfinite_step) >= 0):
                break
        return run

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

        return jax.lax.while_loop(lambda carry: _goes_on(carry[0], end), body, (self._emit(run, logits, rows), cache))

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
        """Fills slots [run.slot, end), end at most S, from forwards over tiles of `tile` rows.

        One executable serves every arm that must agree with another bit for bit, so what it is used for are arguments:

        * `cache`, of S slots, a multiple of `tile`, holds the tiles before that of run.slot - 1 unless it is empty.
        * `recompute`, if true, empties the cache and runs every tile at each step (the uncached arm by steps); else the
          last tile alone is run, or on an empty cache all of them once.
        * `whole`, if true, takes the tokens up to `end` as given (every row must be forced) and yields the logits of
          all rows of a tile after one run of it (the check of a draft).
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
                    0, jnp.where(recompute, tiles, 0), lambda i, cache: cache.clear(i * tile, tile), cache
                )
                hidden = jnp.zeros((B, tile, self.config.model_dim), self.precision.activation)
                cache, hidden = jax.lax.fori_loop(begin, last + 1, forward, (cache, hidden))
            until = jnp.where(whole, jnp.minimum((last + 1) * tile + 1, end), run.slot + 1)
            return jax.lax.while_loop(lambda run: _goes_on(run, until), give, run), cache

        return jax.lax.while_loop(lambda carry: _goes_on(carry[0], end), step, (run, cache))

    def _emit(self, run, logits, rows):
        return emit(run, logits, rows, self.sampler, self.stop_ids)

    def _audit_pass(self, state, tokens, first, end) -> dict[str, jax.Array]:
        # Products with keys that a row does not see do not count.
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
        return {f"{number:05d} {name}": peak for number, (name, peak) in enumerate(largest.items())}


def _goes_on(run: Rollout, end) -> jax.Array:
    """Whether a row may still take a token before slot `end`."""
    return (run.slot < end) & ~jnp.all(run.ended)


def _check_tiles(tile: int | None, slots: int) -> None:
    """Raises ValueError if slots are no whole number of tiles: the last of them would silently never be run."""
    if tile is not None and slots % tile:
        raise ValueError(f"{slots} slots are not a multiple of the tile of {tile} rows; give make_layout the tile")


def _peak(magnitude: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The largest, NaN if one is: XLA's maximum on a CPU drops NaN where it is vectorized."""
    return jnp.where(jnp.any(jnp.isnan(magnitude), axis=axes), jnp.nan, jnp.max(magnitude, axis=axes))
