"""Symmetric integers with one abs-max scale for each (token, head), as JAX serving code has them.

Source: MaxText (inference/kv_quant.py): codes are rint(x * bound / amax) with a bound of 127.5 (7.5 at 4 bits), not
clipped before the cast; amax is stored. The largest element then drifts: the bound itself rounds to 128, which
saturates at 127 if it is positive, so it is read as 127/127.5 of itself, or as 128/127.5 if it is negative (14/15 and
16/15 at 4 bits), again at each repacking. `bound='whole'` divides by 127 and has none of this.

There is no floor under the scale: a cache of small values is as good as one of large values.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv.interventions.quantizers import affine, base, packing


@dataclasses.dataclass(frozen=True)
class Integer(base.Quantizer):
    """Settings of a symmetric integer."""

    bits: int = 8  # 8 or 4; 2 for comparison's sake
    bound: Literal["whole", "half"] = "whole"  # 2^(b-1) - 1, or half a step more

    names, variant = ("int8", "int4", "int2"), None

    @classmethod
    def named(cls, name: str) -> dict[str, int]:
        return {"bits": int(name.removeprefix("int"))}

    def __post_init__(self):
        base.check_bits(self.bits, "a symmetric integer", (2, 4, 8))

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def _bound(self) -> float:
        return 2 ** (self.bits - 1) - (1 if self.bound == "whole" else 0.5)

    def bits_per_element(self, head_dim: int) -> float:
        return self.bits + 16 / head_dim

    def quantize(self, x: jax.Array) -> base.Packed:
        x = x.astype(jnp.float32)
        amax = affine.to_fp16(jnp.max(jnp.abs(x), -1, keepdims=True))
        wide, half = amax.astype(jnp.float32), 2 ** (self.bits - 1)
        codes = jnp.clip(jnp.round(x * jnp.where(wide > 0, self._bound / wide, 0)), -half, half - 1).astype(jnp.int32)
        return {"codes": packing.pack(codes & (2 * half - 1), self.bits), "amax": amax[..., 0]}

    def saturated(self, x: jax.Array) -> jax.Array:
        return base.count(jnp.max(jnp.abs(x.astype(jnp.float32)), -1, keepdims=True) > affine.FP16_MAX, x)

    def dequantize(self, packed: base.Packed) -> jax.Array:
        codes = packing.unpack(packed["codes"], self.bits).astype(jnp.int32)
        half = 2 ** (self.bits - 1)
        signed = jnp.where(codes < half, codes, codes - 2 * half)
        return signed.astype(jnp.float32) * affine.divide(packed["amax"].astype(jnp.float32), self._bound)[..., None]
