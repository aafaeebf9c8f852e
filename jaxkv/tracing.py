"""The arms' own programs, recording named values on the way, and replacing some of them.

The records lie in the cache that a program is handed (jaxkv.cache.WatchedCache): prefill, the one-row loop and the
recomputation run as they are, and what they would have thrown away comes out with the cache. Reading a value may still
make XLA fuse its neighbours otherwise, so whoever uses a trace compares its logits with those of the untraced arm.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import EMPTY, Hook, KVCache, WatchedCache, empty_cache, write_slots
from jaxkv.config import ModelConfig, Precision
from jaxkv.decode import Arms
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.layers import ATTENTION_SHAPED
from jaxkv.rollout import Layout, Rollout, Rows, start_rollout

STATE = ("k.", "v.")  # names of values that enter the cache


def rows_first(name: str, value: jax.Array) -> jax.Array:
    """A named value as [B, T, ...]."""
    return jnp.moveaxis(value, 3, 1) if name.startswith(ATTENTION_SHAPED) else value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Patch:
    """Activation patch: what to put in place of a run's own values, by name and slot.

    It is data: one compiled program serves every layer, position and kind of value. Keys and values are replaced as
    they enter the cache, so a patch of slots holds for whatever sees them later. Under grouped-query attention they
    have kv heads and are patched as such.
    """

    values: dict[str, jax.Array]  # name -> [B, S, ...], the donor's value of each slot
    masks: dict[str, jax.Array]  # name -> [S] booleans, the slots at which it replaces the run's own
    # bool scalar. True patches what is no key or value in a call's newest row alone and lets nothing of that into the
    # cache: the call is made a second time without, and the cache keeps what that one wrote.
    newest: jax.Array


def make_patch(values: Mapping[str, jax.Array], where: Mapping[str, jax.Array], newest: bool = False) -> Patch:
    """A patch with values, name -> [B, S, ...], at slots `where`, name -> [S]; names that are missing there stay.

    Raises ValueError on a name that has no values.
    """
    if unknown := set(where) - set(values):
        raise ValueError(f"no values to patch {', '.join(sorted(unknown))} with")
    off = jnp.zeros(next(iter(values.values())).shape[1], bool)
    masks = {name: jnp.asarray(where.get(name, off)) for name in values}
    return Patch(dict(values), masks, jnp.asarray(newest))


def patch_rows(
    patch: Patch, name: str, value: jax.Array, positions: jax.Array, slot: jax.Array | int, again: jax.Array
) -> jax.Array:
    """The rows [B, T, ...] of a named value, at slots from `slot` on and positions [B, T], after patching.

    `again` is a bool scalar, whether this is the second call of a patch of newest rows.
    """
    if name not in patch.values:
        return value
    here = jax.lax.dynamic_slice_in_dim(patch.masks[name], slot, value.shape[1])[None, :]
    if not name.startswith(STATE):
        newest = (positions == jnp.max(positions, axis=1, keepdims=True)) & (positions != EMPTY)
        here = here & jnp.where(patch.newest, newest & ~again, True)
    donor = jax.lax.dynamic_slice_in_dim(patch.values[name], slot, value.shape[1], axis=1)
    return jnp.where(jnp.expand_dims(here, tuple(range(2, value.ndim))), donor, value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recorder:
    """Keeps what is seen, after it has replaced what is asked (jaxkv.cache.Tap)."""

    seen: dict[str, jax.Array]  # name -> [B, S, ...], of the row at each slot; attention-shaped ones [B, S, K, G, S]
    patch: Patch | None  # what to replace, None for nothing

    def watch(
        self,
        forward: Callable[[KVCache, Hook], tuple[jax.Array, KVCache]],
        cache: KVCache,
        positions: jax.Array,
        slot: jax.Array | int,
    ) -> tuple[jax.Array, KVCache, "Recorder"]:
        # A patch of newest rows makes the call a second time.
        patch = self.patch

        def run(cache: KVCache, seen: dict[str, jax.Array], again: jax.Array | bool) -> tuple[Any, Any, Any]:
            seen = dict(seen)

            def record(name: str, value: jax.Array) -> jax.Array:
                if patch is not None:
                    value = patch_rows(patch, name, value, positions, slot, jnp.asarray(again))
                if name in seen:
                    seen[name] = write_slots(seen[name], rows_first(name, value), slot)
                return value

            return *forward(cache, record), seen

        if patch is None:
            hidden, cache, seen = run(cache, self.seen, False)
            return hidden, cache, Recorder(seen, None)

        def once(index: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            hidden, cache, seen = run(*carry[1:], index > 0)
            return jnp.where(index > 0, carry[0], hidden), cache, seen

        shape = jax.eval_shape(run, cache, self.seen, jnp.asarray(False))[0]
        start = (jnp.zeros(shape.shape, shape.dtype), cache, self.seen)
        hidden, cache, seen = jax.lax.fori_loop(0, 1 + patch.newest.astype(jnp.int32), once, start)
        return hidden, cache, Recorder(seen, patch)


@functools.lru_cache(maxsize=16)
def _list_values(config: ModelConfig, precision: Precision) -> dict[str, jax.ShapeDtypeStruct]:
    """Named values up to `final_norm` of one row over one slot, in order of execution."""
    graphdef, state = abstract_decoder(config, precision)
    order: list[str] = []

    def forward(state: nnx.State) -> dict[str, jax.Array]:
        seen: dict[str, jax.Array] = {}

        def record(name: str, value: jax.Array) -> jax.Array:
            order.append(name)
            seen[name] = rows_first(name, value)
            return value

        row = jnp.zeros((1, 1), jnp.int32)
        nnx.merge(graphdef, state)(row, row, empty_cache(config, precision, 1, 1), 0, record)
        return seen

    found = jax.eval_shape(forward, state)
    return {name: found[name] for name in order}


def list_values(arms: Arms, batch: int, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Named values of the decoder up to `final_norm`, in order of execution, as a Recorder keeps them."""
    return {
        name: jax.ShapeDtypeStruct(
            (batch, slots, *value.shape[2:-1], slots if name.startswith(ATTENTION_SHAPED) else value.shape[-1]),
            value.dtype,
        )
        for name, value in _list_values(arms.config, arms.held).items()
    }


def watched_cache(arms: Arms, rows: Rows, layout: Layout, names: Sequence[str], patch: Patch | None) -> WatchedCache:
    """An empty cache that will record `names`; the patch is copied, since programs take their cache for good."""
    shapes = list_values(arms, layout.batch, layout.slots)
    seen = {name: jnp.zeros(shapes[name].shape, shapes[name].dtype) for name in names}
    return WatchedCache(arms.make_cache(rows, layout), Recorder(seen, jax.tree.map(jnp.copy, patch)))


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run of an arm and what was seen on the way."""

    run: Rollout  # the finished rollout
    values: dict[str, jax.Array]  # name -> [B, S, ...] in order of execution; slots never fed hold what they like
    positions: jax.Array  # [B, S] of the cache it ended with


def _finish(ended: tuple[Rollout, WatchedCache], names: Sequence[str]) -> Trace:
    run, cache = ended
    return Trace(run, {name: cache.tap.seen[name] for name in names}, cache.positions)


def trace_cached(
    arms: Arms,
    state: nnx.State,
    tokens: np.ndarray,
    rows: Rows,
    layout: Layout,
    names: Sequence[str],
    patch: Patch | None = None,
) -> Trace:
    """The cached arm, free-running or forced as `rows` says, in the regime of `arms`."""
    cache = watched_cache(arms, rows, layout, names, patch)
    return _finish(arms.run_cached_keeping(state, tokens, rows, layout, cache), names)


def trace_uncached(
    arms: Arms,
    state: nnx.State,
    tokens: np.ndarray,
    rows: Rows,
    layout: Layout,
    names: Sequence[str],
    patch: Patch | None = None,
    stepwise: bool = False,
) -> Trace:
    """The uncached arm at its padded length along given tokens [B, S], all forced, in the regime of `arms`.

    One pass yields the values of every step: rows do not see what follows them, so a row of the pass over the whole
    text has the bits of the same row in the recomputation of its own step (numerics: rows do not see the future).
    `stepwise` recomputes at each step all the same, which a patch of newest rows needs.
    """
    cache, run = watched_cache(arms, rows, layout, names, patch), start_rollout(arms, tokens, rows, layout)
    return _finish(arms.run_uncached_keeping(state, run, rows, layout, check=not stepwise, cache=cache), names)
