"""Rounding to a uniform grid between a group's extremes, which five of the methods share.

Codes are computed from the scale and zero that a reader will find, already rounded to their stored dtype. Products of a
code of at most 8 bits and a 16-bit scale are exact in fp32, so a read has the same bits however XLA fuses it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

FP16_MAX = 65504.0


def divide(x: jax.Array, by: float) -> jax.Array:
    """x / by, truly divided, and rounded before it is used.

    XLA makes a division by a constant a product with its rounded inverse, and a barrier does not stop it: the divisor
    must not be a constant. It also makes 1 / (x / by) one division, by / x; the bound stops that.
    """
    return pin(x / jnp.where(jnp.isnan(x), jnp.nan, jnp.asarray(by, x.dtype)))


def to_fp16(x: jax.Array) -> jax.Array:
    """x rounded to fp16 without becoming infinite."""
    return jnp.clip(x, -FP16_MAX, FP16_MAX).astype(jnp.float16)


def pin(x: jax.Array) -> jax.Array:
    """x, if finite. XLA rewrites nothing across the bounds: not a product and its sum into one rounding either."""
    most = jnp.finfo(x.dtype).max
    return jnp.clip(x, -most, most)


def square(x: jax.Array) -> jax.Array:
    """x * x, rounded before it is summed. Fused with the sum it would be at some shapes only."""
    return pin(x * x)


@dataclasses.dataclass(frozen=True)
class Auxiliary:
    """How a scale is stored.

    Attributes:
      bits: of storage.
      store: non-negative fp32 to storage.
      load: back to fp32.
      most: the largest that can be stored; more is clipped to it.
    """

    bits: int
    store: Callable[[jax.Array], jax.Array]
    load: Callable[[jax.Array], jax.Array]
    most: float


FP16 = Auxiliary(16, to_fp16, lambda stored: stored.astype(jnp.float32), FP16_MAX)


def _extremes(x: jax.Array, axis: int, filled: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Least and largest element of each group, 0 where none is filled, with `axis` kept at 1."""
    low, high = x, x
    if filled is not None:
        low, high = jnp.where(filled, x, jnp.inf), jnp.where(filled, x, -jnp.inf)
    low, high = jnp.min(low, axis, keepdims=True), jnp.max(high, axis, keepdims=True)
    if filled is not None:
        empty = ~jnp.any(filled, axis, keepdims=True)
        low, high = jnp.where(empty, 0, low), jnp.where(empty, 0, high)
    return low, high


def quantize(
    x: jax.Array,
    bits: int,
    axis: int,
    least_range: float = 0.0,
    filled: jax.Array | None = None,
    scales: Auxiliary = FP16,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Asymmetric round to nearest over one axis.

    Args:
      x: any shape, fp32.
      bits: of a code.
      axis: over which one scale and one zero are shared.
      least_range: the range is taken to be at least this, before the division.
      filled: which elements count, None for all; the codes of others mean nothing.
      scales: how the scale is stored.

    Returns:
      Codes in [0, 2^bits), the stored scale and the fp16 zero with `axis` kept at 1. A constant group has scale 0 and
      codes 0.
    """
    top = 2**bits - 1
    low, high = _extremes(x, axis, filled)
    stored = scales.store(divide(jnp.maximum(high - low, least_range), top))
    scale, zero = scales.load(stored), to_fp16(low)
    steps = (x - zero.astype(jnp.float32)) / jnp.where(scale > 0, scale, 1)
    return jnp.where(scale > 0, jnp.clip(jnp.round(steps), 0, top), 0), stored, zero


def clips(x: jax.Array, bits: int, axis: int, filled: jax.Array | None = None, scales: Auxiliary = FP16) -> jax.Array:
    """Whether `quantize` clips a group's scale or zero; `axis` kept at 1."""
    low, high = _extremes(x.astype(jnp.float32), axis, filled)
    return (divide(high - low, 2**bits - 1) > scales.most) | (jnp.abs(low) > FP16_MAX)


def dequantize(codes: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
    """zero + scale * code in fp32."""
    return codes.astype(jnp.float32) * scale.astype(jnp.float32) + zero.astype(jnp.float32)
