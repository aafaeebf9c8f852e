"""Integer codes of b bits in bytes, low bits first.

Code j of a run of eight occupies bits [b j, b j + b) of b bytes, byte 0 first and bit 0 the lowest of it. For b = 2 and
4 that is the usual four or two codes a byte, the first in the low bits.
"""

import jax
import jax.numpy as jnp

RUN = 8  # codes packed together: the least number that fills whole bytes at every b


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes [..., n], integers in [0, 2^bits), into uint8 [..., n bits / 8]. n is a multiple of 8, bits <= 32."""
    runs = codes.astype(jnp.uint32).reshape(*codes.shape[:-1], -1, RUN)
    packed = [
        sum((_shift(runs[..., j], bits * j - 8 * byte) for j in _codes_in(byte, bits)), jnp.uint32(0)) & 255
        for byte in range(bits)
    ]
    return jnp.stack(packed, axis=-1).astype(jnp.uint8).reshape(*codes.shape[:-1], -1)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """The codes [..., n] as uint32 of what `pack` gave, uint8 [..., n bits / 8]."""
    runs = packed.astype(jnp.uint32).reshape(*packed.shape[:-1], -1, bits)
    codes = [
        sum((_shift(runs[..., byte], 8 * byte - bits * j) for byte in _bytes_of(j, bits)), jnp.uint32(0))
        & jnp.uint32(2**bits - 1)
        for j in range(RUN)
    ]
    return jnp.stack(codes, axis=-1).reshape(*packed.shape[:-1], -1)


def _shift(x: jax.Array, left: int) -> jax.Array:
    return x << left if left >= 0 else x >> -left


def _codes_in(byte: int, bits: int) -> list[int]:
    """Which codes of a run have bits in its byte."""
    return [j for j in range(RUN) if bits * j < 8 * (byte + 1) and bits * (j + 1) > 8 * byte]


def _bytes_of(code: int, bits: int) -> list[int]:
    """Which bytes of a run hold bits of its code."""
    return [byte for byte in range(bits) if code in _codes_in(byte, bits)]
