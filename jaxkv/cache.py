"""The KV cache as a value: taken in, given out, with explicit positions.

A decoder meets its cache in four steps, so that it does not know what a cache makes of its rows: `begin` a call,
`write` a layer's rows, `read` what its queries are to see, and `finish`. `KVCache` holds every row as it is; what else
may be done lives in `jaxkv.interventions`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from jaxkv.config import ModelConfig, Precision

EMPTY = -1  # position of a slot that holds nothing; such a slot is never visible


class LayerCache(Protocol):
    """One layer of a cache during a call."""

    def write(self, k: jax.Array, v: jax.Array, slot: jax.Array | int) -> Self:
        """Takes the call's rows k and v [B, T, K, H], after RoPE, in the cache's dtype, zeros where padding."""

    def read(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] for the call's queries, in the order of the slots."""

    def rotate_queries(self, q: jax.Array) -> jax.Array:
        """Queries [B, T, N, H] in the basis of the keys."""

    def rotate_heads(self, heads: jax.Array) -> jax.Array:
        """Outputs of the heads [B, T, N, H], out of the basis of the values."""


class Cache(Protocol):
    """A pytree between calls; during a call, which `begin` begins and `finish` ends, it gives its layers."""

    @property
    def positions(self) -> jax.Array:
        """[B, S] int32, those of the call's rows written already; -1 where a slot is empty."""

    def begin(self, positions: jax.Array, slot: jax.Array | int) -> Self:
        """Begins a call whose rows, at slots [slot, slot + T), have these positions [B, T]."""

    def layer(self, index: int) -> LayerCache:
        """The layer before its rows are written."""

    def finish(self, layers: Sequence[Any]) -> Self:
        """The new cache, from all layers after their rows are written."""


class Intervention(Protocol):
    """What is done to a cache: it makes one that does it."""

    def make_cache(
        self, config: ModelConfig, precision: Precision, batch: int, slots: int, problems: jax.Array
    ) -> Cache:
        """An empty cache; `problems` [B] key its noise, if it makes any. Raises UserError if it cannot."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """A layer's keys and values [B, S, K, H] as they were written."""

    k: jax.Array
    v: jax.Array

    def write(self, k: jax.Array, v: jax.Array, slot: jax.Array | int) -> Self:
        return dataclasses.replace(self, k=write_slots(self.k, k, slot), v=write_slots(self.v, v, slot))

    def read(self) -> tuple[jax.Array, jax.Array]:
        return self.k, self.v

    def rotate_queries(self, q: jax.Array) -> jax.Array:
        return q

    def rotate_heads(self, heads: jax.Array) -> jax.Array:
        return heads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of every layer."""

    k: tuple[jax.Array, ...]  # L arrays [B, S, K, H]
    v: tuple[jax.Array, ...]
    positions: jax.Array  # [B, S] int32, absolute, -1 where a slot is empty; under left padding not those of the slots

    def begin(self, positions: jax.Array, slot: jax.Array | int) -> Self:
        return dataclasses.replace(self, positions=write_slots(self.positions, positions, slot))

    def layer(self, index: int) -> Slots:
        return Slots(self.k[index], self.v[index])

    def finish(self, layers: Sequence[Slots]) -> Self:
        return dataclasses.replace(self, k=tuple(layer.k for layer in layers), v=tuple(layer.v for layer in layers))

    def clear(self, slot: jax.Array | int, count: int) -> Self:
        """Empties slots [slot, slot + count), which must lie inside."""
        batch, _, *shape = self.k[0].shape
        zeros = lambda buffer: write_slots(buffer, jnp.zeros((batch, count, *shape)), slot)  # noqa: E731
        empty = write_slots(self.positions, jnp.full((batch, count), EMPTY), slot)
        return dataclasses.replace(self, k=tuple(map(zeros, self.k)), v=tuple(map(zeros, self.v)), positions=empty)


def empty_cache(config: ModelConfig, precision: Precision, batch: int, slots: int) -> KVCache:
    """Returns a cache of zeros with every slot empty."""
    shape = (batch, slots, config.num_kv_heads, config.head_dim)
    k, v = (tuple(jnp.zeros(shape, precision.cache) for _ in range(config.num_layers)) for _ in "kv")
    return KVCache(k, v, jnp.full((batch, slots), EMPTY, jnp.int32))


def write_slots(buffer: jax.Array, rows: jax.Array, slot: jax.Array | int) -> jax.Array:
    """Writes rows [B, T, ...] into buffer [B, S, ...] at slots [slot, slot + T).

    `dynamic_update_slice` clamps a start that is out of range, so `slot + T <= S` must hold: `decode.make_layout` gives
    every batch slots for its prompt and all its new tokens.
    """
    return jax.lax.dynamic_update_slice_in_dim(buffer, rows.astype(buffer.dtype), slot, axis=1)


Hook = Callable[[str, jax.Array], jax.Array]  # (name, value) -> value


class Tap(Protocol):
    """Sees, and may replace, what a forward pass computes by name (models/layers.py); a pytree."""

    def watch(
        self,
        forward: Callable[[Any, Hook], tuple[jax.Array, Any]],
        cache: Any,
        positions: jax.Array,
        slot: jax.Array | int,
    ) -> tuple[jax.Array, Any, Self]:
        """Makes a call of rows at positions [B, T], the first at `slot`.

        `forward`, of a cache and a hook, gives hidden rows [B, T, D] and the new cache; so does this, and the tap with
        what it saw.
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchedCache:
    """A cache that carries a tap from call to call: whatever program it is given to is watched."""

    cache: Any
    tap: Any

    @property
    def positions(self) -> jax.Array:
        return self.cache.positions

    def clear(self, slot: jax.Array | int, count: int) -> Self:
        """As in KVCache; what was seen stays."""
        return dataclasses.replace(self, cache=self.cache.clear(slot, count))
