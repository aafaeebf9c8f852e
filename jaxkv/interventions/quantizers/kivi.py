"""KIVI: keys by channel over a group of tokens, values by token over a group of channels.

Source: Liu et al., arXiv 2402.02750, section 3.3, and jy-yuan/KIVI. Asymmetric round to nearest with fp16 scale and
zero. Pending keys are packed a window at a time, once that many wait; values keep exactly the last window in 16 bits.
The public code divides a constant group by 0; here its scale is 0 and its codes are 0.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.errors import UserError
from jaxkv.interventions.quantizers import affine, base, packing

BITS = (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True)
class Kivi(base.Quantizer):
    """Settings of KIVI.

    Attributes:
      bits: of a code.
      group: tokens (K) or channels (V) that share a scale; a V group is at most the head.
      residual: R, tokens of the 16-bit window.
      hadamard: whether heads are rotated, which KIVI does not do.
    """

    bits: int = 2
    group: int = 32
    residual: int = dataclasses.field(default=128, metadata={"option": "window"})
    hadamard: bool = dataclasses.field(default=False, metadata={"option": "rotate"})

    own = "step"
    names, usual = ("kivi",), "k2v2"

    def __post_init__(self):
        base.check_bits(self.bits, BITS, "KIVI")
        if self.group < 2:
            raise UserError(f"a KIVI group of {self.group} saves nothing; use 32 or 128")
        if self.residual < 1 or self.residual % self.group:
            raise UserError(
                f"KIVI packs its window of {self.residual} tokens in groups of {self.group}; make the window a "
                f"multiple of the group, e.g. window={max(1, round(self.residual / self.group)) * self.group}"
            )

    @property
    def rotated(self) -> bool:
        return self.hadamard

    @property
    def granularity(self) -> int:
        return self.group if self.side == "k" else 1

    @property
    def window(self) -> base.Window:
        return base.Window(block=self.residual) if self.side == "k" else base.Window(recent=self.residual)

    def check(self, head_dim: int, tokens: int | None = None) -> None:
        super().check(head_dim, tokens)
        if self.side == "v" and head_dim % min(self.group, head_dim):
            raise UserError(
                f"KIVI groups of {self.group} channels do not divide a head of {head_dim}; use another group"
            )

    def bits_per_element(self, head_dim: int) -> float:
        return self.bits + 32 / (self.group if self.side == "k" else min(self.group, head_dim))

    def quantize(self, x: jax.Array) -> base.Packed:
        groups, axis = self._groups(x.astype(jnp.float32))
        codes, scale, zero = affine.quantize(groups, self.bits, axis)
        scale, zero = jnp.squeeze(scale, axis), jnp.squeeze(zero, axis)
        return {"codes": packing.pack(codes.reshape(x.shape), self.bits), "scale": scale, "zero": zero}

    def saturated(self, x: jax.Array) -> jax.Array:
        groups, axis = self._groups(x)
        return base.count(affine.clips(groups, self.bits, axis), x, groups)

    def dequantize(self, packed: base.Packed) -> jax.Array:
        codes = packing.unpack(packed["codes"], self.bits)
        grouped, axis = self._groups(codes)
        scale, zero = (jnp.expand_dims(packed[leaf], axis) for leaf in ("scale", "zero"))
        return affine.dequantize(grouped, scale, zero).reshape(codes.shape)

    def _groups(self, x: jax.Array) -> tuple[jax.Array, int]:
        """x [B, S, K, H] with an axis for the elements of a group, and which one."""
        B, S, K, H = x.shape
        if self.side == "k":
            return x.reshape(B, -1, self.group, K, H), 2
        return x.reshape(B, S, K, -1, min(self.group, H)), -1
