"""KIVI: keys by channel over a group of tokens, values by token over a group of channels.

Source: Liu et al., arXiv 2402.02750, section 3.3, and jy-yuan/KIVI. Asymmetric round to nearest with fp16 scale and
zero. Pending keys are packed a window at a time, once that many wait; values keep exactly the last window in 16 bits.
The public code divides a constant group by 0; here its scale is 0 and its codes are 0.
"""

import dataclasses

import jax

from jaxkv.errors import UserError
from jaxkv.interventions.quantizers import affine, base


@dataclasses.dataclass(frozen=True)
class Kivi(affine.Uniform):
    """Settings of KIVI."""

    bits: int = 2  # of a code
    group: int = 32  # tokens (K) or channels (V) that share a scale; a V group is at most the head
    residual: int = dataclasses.field(default=128, metadata={"option": "window"})  # R, tokens of the 16-bit window
    hadamard: bool = dataclasses.field(default=False, metadata={"option": "rotate"})  # which KIVI does not do

    own = "step"
    names, usual = ("kivi",), "k2v2"

    def __post_init__(self):
        base.check_bits(self.bits, "KIVI")
        if self.group < 2:
            raise UserError(f"a KIVI group of {self.group} saves nothing; use 32 or 128")
        if self.residual < 1 or self.residual % self.group:
            raise UserError(
                f"KIVI packs its window of {self.residual} tokens in groups of {self.group}; make the window a "
                f"multiple of the group, e.g. window={max(1, round(self.residual / self.group)) * self.group}"
            )

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

    def groups(self, x: jax.Array) -> tuple[jax.Array, int]:
        B, S, K, H = x.shape
        if self.side == "k":
            return x.reshape(B, -1, self.group, K, H), 2
        return x.reshape(B, S, K, -1, min(self.group, H)), -1
