"""The arms' own programs, recording named values on the way, and replacing some of them.

A traced decoder carries its records in the cache it is handed: prefill, the one-row loop and the recomputation run as
they are, and what they would have thrown away comes out with the cache. Reading a value may still make XLA fuse its
neighbours otherwise, so whoever uses a trace compares its logits with those of the untraced arm.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import Cache, KVCache, empty_cache, write_slots
from jaxkv.decode import Arms, Layout, Rollout, Rows, start_rollout
from jaxkv.interventions.patches import Patch, patch_rows
from jaxkv.models.alignment import Alignment
from jaxkv.models.decoder import Decoder
from jaxkv.models.layers import ATTENTION_SHAPED, Hook, no_hook


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TracedCache(KVCache):
    """A cache that also holds what was seen.

    Attributes:
      seen: name -> [B, S, ...], the value of the row at each slot; attention-shaped values as [B, S, K, G, S].
      patch: what to replace, None for nothing.
    """

    seen: dict[str, jax.Array]
    patch: Patch | None


def rows_first(name: str, value: jax.Array) -> jax.Array:
    """A named value as [B, T, ...]."""
    return jnp.moveaxis(value, 3, 1) if name.startswith(ATTENTION_SHAPED) else value


class TracedDecoder(Decoder):
    """A Decoder that records in a TracedCache; with any other cache it is a plain one."""

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache,
        slot: jax.Array | int,
        hook: Hook = no_hook,
        alignment: Alignment | None = None,
    ) -> tuple[jax.Array, Any]:
        """As in Decoder."""
        if not isinstance(cache, TracedCache):
            return super().__call__(tokens, positions, cache, slot, hook, alignment)
        patch = cache.patch

        def run(cache: TracedCache, again: jax.Array | bool) -> tuple[jax.Array, TracedCache]:
            seen = dict(cache.seen)

            def watch(name: str, value: jax.Array) -> jax.Array:
                value = hook(name, value)
                if patch is not None:
                    value = patch_rows(patch, name, value, positions, slot, jnp.asarray(again))
                if name in seen:
                    seen[name] = write_slots(seen[name], rows_first(name, value), slot)
                return value

            hidden, after = Decoder.__call__(self, tokens, positions, cache, slot, watch, alignment)
            return hidden, dataclasses.replace(cache, k=after.k, v=after.v, positions=after.positions, seen=seen)

        if patch is None:
            return run(cache, False)

        def once(index: jax.Array, carry: tuple[jax.Array, TracedCache]) -> tuple[jax.Array, TracedCache]:
            hidden, cache = run(dataclasses.replace(carry[1], patch=patch), index > 0)
            return jnp.where(index > 0, carry[0], hidden), dataclasses.replace(cache, patch=None)

        start = jnp.zeros((*tokens.shape, self.config.model_dim), self.precision.activation)
        hidden, bare = jax.lax.fori_loop(
            0, 1 + patch.newest.astype(jnp.int32), once, (start, dataclasses.replace(cache, patch=None))
        )
        return hidden, dataclasses.replace(bare, patch=patch)


class TracedArms(Arms):
    """The programs of `arms`, compiled anew around a traced decoder; they take the same prepared weights.

    Raises:
      ValueError: the arms have an intervention; what is recorded lies in a plain cache.
    """

    def __init__(self, arms: Arms):
        if arms.intervention is not None:
            raise ValueError("values are traced in plain caches; give arms without an intervention")
        super().__init__(arms.config, arms.precision, arms.sampler, arms.stop_ids, tile=arms.tile)
        self.held = arms.held
        model = nnx.eval_shape(lambda: TracedDecoder(arms.config, arms.held, nnx.Rngs(0)))
        self.graphdef, self.abstract_state = nnx.split(model)
        self._listed: dict[tuple[int, int], dict[str, jax.ShapeDtypeStruct]] = {}

    def list_values(self, batch: int, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Named values of the decoder up to `final_norm`, in order of execution, as a TracedCache holds them."""
        if (batch, slots) not in self._listed:
            self._listed[batch, slots] = self._list_values(batch, slots)
        return self._listed[batch, slots]

    def _list_values(self, batch: int, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        order: dict[str, None] = {}

        def forward(state: nnx.State) -> dict[str, jax.Array]:
            seen: dict[str, jax.Array] = {}

            def record(name: str, value: jax.Array) -> jax.Array:
                order[name] = None
                seen[name] = rows_first(name, value)
                return value

            row = jnp.zeros((batch, 1), jnp.int32)
            nnx.merge(self.graphdef, state)(row, row, empty_cache(self.config, self.precision, batch, slots), 0, record)
            return seen

        found = jax.eval_shape(forward, self.abstract_state)
        return {name: jax.ShapeDtypeStruct((batch, slots, *found[name].shape[2:]), found[name].dtype) for name in order}

    def make_cache(self, layout: Layout, names: Sequence[str], patch: Patch | None) -> TracedCache:
        """An empty cache that will record `names`; the patch is copied, since programs take their cache for good."""
        bare = empty_cache(self.config, self.precision, layout.batch, layout.slots)
        shapes = self.list_values(layout.batch, layout.slots)
        seen = {name: jnp.zeros(shapes[name].shape, shapes[name].dtype) for name in names}
        return TracedCache(bare.k, bare.v, bare.positions, seen, jax.tree.map(jnp.copy, patch))


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run of an arm and what was seen on the way.

    Attributes:
      run: the finished rollout.
      values: name -> [B, S, ...] in order of execution; slots that no token was fed to hold what they like.
      positions: [B, S] of the cache it ended with.
    """

    run: Rollout
    values: dict[str, jax.Array]
    positions: jax.Array


def _finish(run: Rollout, cache: KVCache, names: Sequence[str]) -> Trace:
    assert isinstance(cache, TracedCache)
    return Trace(run, {name: cache.seen[name] for name in names}, cache.positions)


def trace_cached(
    arms: TracedArms,
    state: nnx.State,
    tokens: np.ndarray,
    rows: Rows,
    layout: Layout,
    names: Sequence[str],
    patch: Patch | None = None,
) -> Trace:
    """The cached arm, free-running or forced as `rows` says, in the regime of `arms`."""
    cache, run = arms.make_cache(layout, names, patch), start_rollout(arms, tokens, rows, layout)
    end = layout.prompt + layout.new_tokens
    if arms.tile is None:
        logits, cache = arms.prefill(state, jnp.asarray(tokens[:, : layout.prefill]), rows, cache)
        run, cache = arms.cached_loop(state, logits, run, rows, end, cache)
    else:
        run, cache = arms.tile_loop(state, run, rows, end, cache, False, False, tile=arms.tile)
    return _finish(run, cache, names)


def trace_uncached(
    arms: TracedArms,
    state: nnx.State,
    tokens: np.ndarray,
    rows: Rows,
    layout: Layout,
    names: Sequence[str],
    patch: Patch | None = None,
    stepwise: bool = False,
) -> Trace:
    """The uncached arm at its padded length along given tokens, in the regime of `arms`.

    One pass yields the values of every step: rows do not see what follows them, so a row of the pass over the whole
    text has the bits of the same row in the recomputation of its own step (numerics: rows do not see the future).

    Args:
      arms: programs.
      state: weights.
      tokens: [B, S] the text.
      rows: of the batch, all forced (generate.force).
      layout: of the batch.
      names: what to record.
      patch: what to replace.
      stepwise: whether to recompute at each step all the same, which a patch of newest rows needs.
    """
    cache, run = arms.make_cache(layout, names, patch), start_rollout(arms, tokens, rows, layout)
    end, tile = layout.prompt + layout.new_tokens, arms.tile or layout.slots
    run, cache = arms.tile_loop(state, run, rows, end, cache, stepwise, not stepwise, tile=tile)
    return _finish(run, cache, names)
