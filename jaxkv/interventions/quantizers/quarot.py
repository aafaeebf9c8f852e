"""QuaRot's cache: rotated heads, rounded by token.

Source: Ashkboos et al., arXiv 2404.00456, section 4, and spcl/QuaRot (quarot/transformers/kv_cache.py). K (after RoPE)
and q are rotated by the head-wise Hadamard matrix, V likewise. One fp16 scale and zero for each (token, head), the
range taken as at least 1e-5. The paper's tables clip the extremes to 0.95 of the range in their simulated runs; the
packed cache of the code does not, nor does this one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.interventions.quantizers import affine, base, packing

BITS = (2, 3, 4, 8)
LEAST_RANGE = 1e-5


@dataclasses.dataclass(frozen=True)
class QuaRot(base.Quantizer):
    """Settings of QuaRot.

    Attributes:
      bits: of a code.
      hadamard: whether heads are rotated; without it this is plain rounding by token.
    """

    bits: int = 4
    hadamard: bool = dataclasses.field(default=True, metadata={"option": "rotate"})

    own = "prompt"
    names = ("quarot",)

    def __post_init__(self):
        base.check_bits(self.bits, BITS, "QuaRot")

    @property
    def rotated(self) -> bool:
        return self.hadamard

    def bits_per_element(self, head_dim: int) -> float:
        return self.bits + 32 / head_dim

    def quantize(self, x: jax.Array) -> base.Packed:
        codes, scale, zero = affine.quantize(x.astype(jnp.float32), self.bits, -1, least_range=LEAST_RANGE)
        return {"codes": packing.pack(codes, self.bits), "scale": scale[..., 0], "zero": zero[..., 0]}

    def saturated(self, x: jax.Array) -> jax.Array:
        return base.count(affine.clips(x, self.bits, -1), x)

    def dequantize(self, packed: base.Packed) -> jax.Array:
        codes = packing.unpack(packed["codes"], self.bits)
        return affine.dequantize(codes, packed["scale"][..., None], packed["zero"][..., None])
