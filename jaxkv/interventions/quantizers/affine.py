"""Rounding to a uniform grid between a group's extremes, which five of the methods share.

Codes are computed from the scale and zero that a reader will find, already rounded to their stored dtype. Products of a
code of at most 8 bits and a 16-bit scale are exact in fp32, so a read has the same bits however XLA fuses it.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxkv.interventions.quantizers import base, packing

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
    """How a scale is stored."""

    bits: int  # of storage
    store: Callable[[jax.Array], jax.Array]  # non-negative fp32 to storage
    load: Callable[[jax.Array], jax.Array]  # back to fp32
    most: float  # the largest that can be stored; more is clipped to it


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
    """Asymmetric round to nearest of fp32 x; one scale and one zero are shared over an axis.

    A group's range is taken to be at least `least_range` before the division. Elements that are not `filled` (None: all
    are) do not count, and their codes mean nothing. Returns codes in [0, 2^bits), the stored scale and the fp16 zero,
    with `axis` kept at 1. A constant group has scale 0 and codes 0.
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


@dataclasses.dataclass(frozen=True)
class Uniform(base.Quantizer):
    """A method that stores codes, and the fp16 scale and zero of each group of elements."""

    bits: int = 4  # of a code

    least_range: ClassVar[float] = 0.0  # of a group

    def groups(self, x: jax.Array) -> tuple[jax.Array, int]:
        """x [B, S, K, H] with an axis for the elements of a group, and which one: the last, if heads are groups."""
        return x, -1

    def quantize(self, x: jax.Array) -> base.Packed:
        groups, axis = self.groups(x.astype(jnp.float32))
        codes, scale, zero = quantize(groups, self.bits, axis, self.least_range)
        scale, zero = jnp.squeeze(scale, axis), jnp.squeeze(zero, axis)
        return {"codes": packing.pack(codes.reshape(x.shape), self.bits), "scale": scale, "zero": zero}

    def saturated(self, x: jax.Array) -> jax.Array:
        groups, axis = self.groups(x)
        return base.count(clips(groups, self.bits, axis), x, groups)

    def dequantize(self, packed: base.Packed) -> jax.Array:
        codes = packing.unpack(packed["codes"], self.bits)
        grouped, axis = self.groups(codes)
        scale, zero = (jnp.expand_dims(packed[leaf], axis) for leaf in ("scale", "zero"))
        return dequantize(grouped, scale, zero).reshape(codes.shape)
