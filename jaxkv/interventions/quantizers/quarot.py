"""QuaRot's cache: rotated heads, rounded by token.

Source: Ashkboos et al., arXiv 2404.00456, section 4, and spcl/QuaRot (quarot/transformers/kv_cache.py). K (after RoPE)
and q are rotated by the head-wise Hadamard matrix, V likewise. One fp16 scale and zero for each (token, head), the
range taken as at least 1e-5. The paper's tables clip the extremes to 0.95 of the range in their simulated runs; the
packed cache of the code does not, nor does this one.
"""

import dataclasses

from jaxkv.interventions.quantizers import affine, base


@dataclasses.dataclass(frozen=True)
class QuaRot(affine.Uniform):
    """Settings of QuaRot."""

    # Without it this is plain rounding by token.
    hadamard: bool = dataclasses.field(default=True, metadata={"option": "rotate"})

    own = "prompt"
    names = ("quarot",)
    least_range = 1e-5

    def __post_init__(self):
        base.check_bits(self.bits, "QuaRot")

    def bits_per_element(self, head_dim: int) -> float:
        return self.bits + 32 / head_dim
