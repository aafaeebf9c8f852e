"""The KV cache as a value: taken in, given out, with explicit positions."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.config import ModelConfig, Precision

EMPTY = -1  # position of a slot that holds nothing; such a slot is never visible


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of every layer.

    Attributes:
      k: L arrays [B, S, K, H].
      v: L arrays [B, S, K, H].
      positions: [B, S] int32, the absolute position of each slot, -1 where empty. Slots and positions differ
        under left padding.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    positions: jax.Array


def empty_cache(config: ModelConfig, precision: Precision, batch: int, slots: int) -> KVCache:
    """Returns a cache of zeros with every slot empty."""
    shape = (batch, slots, config.num_kv_heads, config.head_dim)
    return KVCache(
        k=tuple(jnp.zeros(shape, precision.cache) for _ in range(config.num_layers)),
        v=tuple(jnp.zeros(shape, precision.cache) for _ in range(config.num_layers)),
        positions=jnp.full((batch, slots), EMPTY, jnp.int32),
    )


def write_slots(buffer: jax.Array, rows: jax.Array, slot: jax.Array | int) -> jax.Array:
    """Writes rows [B, T, ...] into buffer [B, S, ...] at slots [slot, slot + T).

    `dynamic_update_slice` clamps a start that is out of range, so `slot + T <= S` must hold: `decode.make_layout` gives
    every batch slots for its prompt and all its new tokens.
    """
    return jax.lax.dynamic_update_slice_in_dim(buffer, rows.astype(buffer.dtype), slot, axis=1)


def clear_slots(cache: KVCache, slot: jax.Array | int, count: int) -> KVCache:
    """Empties slots [slot, slot + count), which must lie inside."""
    zeros = lambda buffer: write_slots(buffer, jnp.zeros((buffer.shape[0], count, *buffer.shape[2:])), slot)  # noqa: E731
    empty = jnp.full((cache.positions.shape[0], count), EMPTY)
    return dataclasses.replace(
        cache,
        k=tuple(map(zeros, cache.k)),
        v=tuple(map(zeros, cache.v)),
        positions=write_slots(cache.positions, empty, slot),
    )
