"""llama.cpp's block formats for a cache: 32 consecutive channels with an fp16 scale.

Source: ggml-org/llama.cpp, ggml-common.h and ggml-quants.c, as the `gguf` package states them in NumPy; packed bytes
and values read are equal to that package's, bit for bit (tests/test_quantizers.py). Codes are computed with the fp32
scale, reading uses it rounded to fp16. llama.cpp itself rotates keys in newer versions; that is not part of the format.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.errors import UserError, nearest
from jaxkv.interventions.quantizers import affine, base, packing

BLOCK = 32
BITS = {"q8_0": 8.5, "q5_0": 5.5, "q5_1": 6.0, "q4_0": 4.5, "q4_1": 5.0}


@dataclasses.dataclass(frozen=True)
class LlamaCpp(base.Quantizer):
    """Settings of a block format."""

    format: str = "q8_0"  # of BITS

    names, variant, usual = ("llama",), "format", "q8_0"

    def __post_init__(self):
        if self.format not in BITS:
            raise UserError(
                f"llama.cpp has no cache format '{self.format}'{nearest(self.format, list(BITS))}; known: "
                f"{', '.join(BITS)}"
            )

    @property
    def name(self) -> str:
        return self.format

    def check(self, head_dim: int, tokens: int | None = None) -> None:
        super().check(head_dim, tokens)
        if head_dim % BLOCK:
            raise UserError(
                f"{self.format} needs heads of a multiple of {BLOCK} channels, and this model's have {head_dim}"
            )

    def bits_per_element(self, head_dim: int) -> float:
        del head_dim
        return BITS[self.format]

    def quantize(self, x: jax.Array) -> base.Packed:
        blocks, low, d = self._scale(x)
        if self.format == "q8_0":
            codes = _round_half_away(blocks * _inverse(d)).astype(jnp.int8)
            parts = [_bytes(d), jax.lax.bitcast_convert_type(codes, jnp.uint8)]
        elif self.format.endswith("_0"):
            half = 2.0 ** (self._width - 1)
            parts = [_bytes(d), *self._pack(blocks * _inverse(d), half + 0.5)]
        else:
            parts = [_bytes(d), _bytes(low), *self._pack((blocks - low) * _inverse(d), 0.5)]
        return {"blocks": jnp.concatenate(parts, -1).reshape(*x.shape[:-1], -1)}

    def dequantize(self, packed: base.Packed) -> jax.Array:
        size = int(BITS[self.format] * BLOCK) // 8
        data = packed["blocks"]
        blocks = data.reshape(*data.shape[:-1], -1, size)
        d, rest = _fp16(blocks[..., :2]), blocks[..., 2:]
        if self.format == "q8_0":
            return (jax.lax.bitcast_convert_type(rest, jnp.int8) * d).reshape(*data.shape[:-1], -1)
        zero, low = jnp.float32(2 ** (self._width - 1)), jnp.float32(0)
        if self.format.endswith("_1"):
            zero, low, rest = jnp.float32(0), _fp16(rest[..., :2]), rest[..., 2:]
        nibbles = rest[..., -BLOCK // 2 :]
        codes = jnp.concatenate([nibbles & 15, nibbles >> 4], -1)
        if self._width == 5:
            codes |= packing.unpack(rest[..., : BLOCK // 8], 1).astype(jnp.uint8) << 4
        return ((codes.astype(jnp.float32) - zero) * d + low).reshape(*data.shape[:-1], -1)

    def saturated(self, x: jax.Array) -> jax.Array:
        # Here such a scale or minimum is not clipped but infinite, as in llama.cpp.
        blocks, low, d = self._scale(x)
        over = jnp.abs(d) > affine.FP16_MAX
        if self.format.endswith("_1"):
            over |= jnp.abs(low) > affine.FP16_MAX
        return base.count(over, x, blocks)

    def _scale(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Blocks [..., n, 32] of x [..., H] in fp32, their least elements and their scales [..., n, 1]."""
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
        low = jnp.min(blocks, -1, keepdims=True)
        if self.format == "q8_0":
            return blocks, low, affine.divide(jnp.max(jnp.abs(blocks), -1, keepdims=True), 127)
        if self.format.endswith("_0"):
            place = jnp.argmax(jnp.abs(blocks), -1, keepdims=True)
            return blocks, low, affine.divide(jnp.take_along_axis(blocks, place, -1), -(2.0 ** (self._width - 1)))
        return blocks, low, affine.divide(jnp.max(blocks, -1, keepdims=True) - low, 2**self._width - 1)

    @property
    def _width(self) -> int:
        return int(self.format[1])

    def _pack(self, steps: jax.Array, offset: float) -> list[jax.Array]:
        """High bits, if any, then nibbles: those of the block's first half in the low bits of each byte."""
        codes = jnp.clip(jnp.trunc(affine.pin(steps) + offset), 0, 2**self._width - 1).astype(jnp.uint8)
        nibbles = (codes[..., : BLOCK // 2] & 15) | (codes[..., BLOCK // 2 :] << 4)
        return [packing.pack(codes >> 4, 1), nibbles] if self._width == 5 else [nibbles]


def _inverse(d: jax.Array) -> jax.Array:
    return affine.pin(jnp.where(d == 0, 0, 1 / d))


def _round_half_away(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    whole = jnp.floor(size)
    return jnp.sign(x) * (whole + jnp.floor(2 * (size - whole)))


def _bytes(x: jax.Array) -> jax.Array:
    """fp16 of x [..., 1] as its two bytes [..., 2]."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint8).reshape(*x.shape[:-1], 2)


def _fp16(two: jax.Array) -> jax.Array:
    """Bytes [..., 2] as fp32 [..., 1]."""
    return jax.lax.bitcast_convert_type(two, jnp.float16)[..., None].astype(jnp.float32)
