"""Bit masking: the top bits of each stored float are kept, the rest become zero.

Source: Shebel, "Effect of KV Cache Error on Inference Accuracy" (May 2025). A truncation, so every value moves towards
zero. With all bits of the stored float it is the identity.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.errors import UserError
from jaxkv.interventions.quantizers import base, packing

STORED = {"fp16": (jnp.float16, jnp.uint16), "bf16": (jnp.bfloat16, jnp.uint16), "fp32": (jnp.float32, jnp.uint32)}


@dataclasses.dataclass(frozen=True)
class Mask(base.Quantizer):
    """Settings of bit masking.

    Attributes:
      bits: kept, sign and exponent included.
      of: the float they are kept of: 'fp16', 'bf16' or 'fp32'.
    """

    bits: int = 8
    of: str = "fp16"

    def __post_init__(self):
        if self.of not in STORED:
            raise UserError(f"bits can be masked of {', '.join(STORED)}, not of '{self.of}'")
        if not 1 <= self.bits <= self._width:
            raise UserError(
                f"{self.of} has {self._width} bits, of which {self.bits} cannot be kept; keep 1 to {self._width}"
            )

    @property
    def _width(self) -> int:
        return 8 * jnp.dtype(STORED[self.of][0]).itemsize

    def bits_per_element(self, head_dim: int) -> float:
        del head_dim
        return self.bits

    def quantize(self, x: jax.Array) -> base.Packed:
        dtype, unsigned = STORED[self.of]
        words = jax.lax.bitcast_convert_type(x.astype(dtype), unsigned)
        return {"codes": packing.pack(words >> (self._width - self.bits), self.bits)}

    def dequantize(self, packed: base.Packed) -> jax.Array:
        dtype, unsigned = STORED[self.of]
        words = packing.unpack(packed["codes"], self.bits).astype(unsigned) << (self._width - self.bits)
        return jax.lax.bitcast_convert_type(words, dtype).astype(jnp.float32)
