"""Bit masking: the top bits of each stored float are kept, the rest become zero.

Source: Shebel, "Effect of KV Cache Error on Inference Accuracy" (May 2025). A truncation, so every value moves towards
zero. With all bits of the stored float it is the identity. The stored float is that of the cache, so the method must
know its dtype (`stored_as`) before it packs.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxkv.errors import UserError
from jaxkv.interventions.quantizers import base, packing

STORED = {"fp16": (jnp.float16, jnp.uint16), "bf16": (jnp.bfloat16, jnp.uint16), "fp32": (jnp.float32, jnp.uint32)}


def _width(of: str) -> int:
    return 8 * jnp.dtype(STORED[of][0]).itemsize


@dataclasses.dataclass(frozen=True)
class Mask(base.Quantizer):
    """Settings of bit masking."""

    bits: int = 8  # kept, sign and exponent included
    of: Literal["fp16", "bf16", "fp32"] | None = None  # the float they are of; None until `stored_as` says the cache's

    names, usual = ("mask",), "8"

    def __post_init__(self):
        if self.of is not None and self.of not in STORED:
            raise UserError(f"bits can be masked of {', '.join(STORED)}, not of '{self.of}'")
        of = self.of or "fp32"
        if not 1 <= self.bits <= _width(of):
            raise UserError(f"{of} has {_width(of)} bits, of which {self.bits} cannot be kept; keep 1 to {_width(of)}")

    def stored_as(self, dtype: Any) -> "Mask":
        if self.of is not None:
            return self
        known = {jnp.dtype(stored): name for name, (stored, _) in STORED.items()}
        if jnp.dtype(dtype) not in known:
            raise UserError(f"a cache of {jnp.dtype(dtype)} has no bits to mask; say of={'|'.join(STORED)}")
        of = known[jnp.dtype(dtype)]
        if self.bits > _width(of):
            raise UserError(
                f"the cache holds {of}, which has {_width(of)} bits, of which {self.bits} cannot be kept; keep 1 to "
                f"{_width(of)}, or say of=fp32"
            )
        return dataclasses.replace(self, of=of)  # type: ignore[arg-type]

    @property
    def _stored(self) -> tuple[Any, Any, int]:
        """The float, the integer of its size, and its bits."""
        if self.of is None:
            raise ValueError("which float is masked is not known yet: use what stored_as gives")
        return *STORED[self.of], _width(self.of)

    def bits_per_element(self, head_dim: int) -> float:
        del head_dim
        return self.bits

    def quantize(self, x: jax.Array) -> base.Packed:
        dtype, unsigned, width = self._stored
        words = jax.lax.bitcast_convert_type(x.astype(dtype), unsigned)
        return {"codes": packing.pack(words >> (width - self.bits), self.bits)}

    def has_end(self, dtype: Any) -> bool:
        return bool(jnp.finfo(dtype).max > jnp.finfo(self._stored[0]).max)

    def saturated(self, x: jax.Array) -> jax.Array:
        return base.count(jnp.isfinite(x) & jnp.isinf(x.astype(self._stored[0])), x)

    def dequantize(self, packed: base.Packed) -> jax.Array:
        dtype, unsigned, width = self._stored
        words = packing.unpack(packed["codes"], self.bits).astype(unsigned) << (width - self.bits)
        return jax.lax.bitcast_convert_type(words, dtype).astype(jnp.float32)
