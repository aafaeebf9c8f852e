"""TurboQuant as it is served: keys by a codebook for rotated unit vectors, values by token.

Source: Zandieh et al., arXiv 2504.19874, in the form vLLM serves (pull request 38479): a Hadamard rotation in place of
a random one, and no residual sketch. Of a key its norm is kept in fp16; each coordinate of the rotated unit vector
takes the nearest of 2^b levels that are best for N(0, 1/H) (Lloyd 1982, Max 1960). All its presets below 8 bits bring
the vector that is read back to unit length first ('nc'). Values are rounded by token, not rotated. The first and last
two layers stay exact.

The paper itself has one method for both sides, no exact layers and no correction of the norm: `values='codebook',
unit=False, edges=0` is its algorithm 1 but for the rotation, which is random there. Its runs on LongBench split the
channels in two sets of different widths (2.5 and 3.5 bits), which is not done here.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError
from jaxkv.interventions.quantizers import affine, base, packing


@functools.cache
def lloyd_max(bits: int) -> np.ndarray:
    """The 2^bits levels that minimise the mean square error of a standard normal variable, ascending, float64.

    Each level is the mean of the normal law between the midpoints to its neighbours. Newton's method solves that from
    the levels that are best in the limit of many: quantiles of N(0, 3) (Panter and Dite 1951).
    """
    from scipy.special import ndtr, ndtri

    n = 2**bits
    levels = np.sqrt(3) * ndtri((np.arange(n) + 0.5) / n)
    density = lambda x: np.exp(-np.square(x) / 2) / np.sqrt(2 * np.pi)  # noqa: E731
    for _ in range(50):
        edges = np.concatenate([[-40.0], (levels[1:] + levels[:-1]) / 2, [40.0]])
        low, high = edges[:-1], edges[1:]
        mass = np.where(levels > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))  # no cancellation in a tail
        means = (density(low) - density(high)) / mass
        below, above = density(low) * (means - low) / mass / 2, density(high) * (high - means) / mass / 2
        slope = np.eye(n) - np.diag(below + above) - np.diag(below[1:], -1) - np.diag(above[:-1], 1)
        step = np.linalg.solve(slope, levels - means)
        levels = levels - step
        if np.max(np.abs(step)) < 1e-11:
            break
    return (levels - levels[::-1]) / 2


@dataclasses.dataclass(frozen=True)
class TurboQuant(affine.Uniform):
    """Settings of TurboQuant."""

    unit: bool = True  # whether a key's levels are brought to unit length when read ('nc' of the served presets)
    edges: int = 2  # layers at either end that stay exact, at most half of all
    values: Literal["uniform", "codebook"] = "uniform"  # how they are stored: by token, or rotated, as keys are
    # Whether what the codebook is for is rotated.
    hadamard: bool = dataclasses.field(default=True, metadata={"option": "rotate"})

    own = "prompt"
    names = ("turboquant",)

    def __post_init__(self):
        base.check_bits(self.bits, "TurboQuant")
        if self.edges < 0:
            raise UserError(f"TurboQuant cannot leave {self.edges} layers exact at either end; use edges=0 or more")

    @property
    def coded(self) -> bool:
        """Whether this side is stored by the codebook."""
        return self.side == "k" or self.values == "codebook"

    @property
    def rotated(self) -> bool:
        return self.coded and self.hadamard

    def exact_layers(self, num_layers: int) -> frozenset[int]:
        edge = min(self.edges, num_layers // 2)
        return frozenset(range(edge)) | frozenset(range(num_layers - edge, num_layers))

    def bits_per_element(self, head_dim: int) -> float:
        return self.bits + (16 if self.coded else 32) / head_dim

    def quantize(self, x: jax.Array) -> base.Packed:
        if not self.coded:
            return super().quantize(x)
        x = x.astype(jnp.float32)
        norm = jnp.sqrt(jnp.sum(affine.square(x), -1, keepdims=True))
        unit = x / jnp.where(norm > 0, norm, 1)
        levels = lloyd_max(self.bits) * x.shape[-1] ** -0.5
        midpoints = jnp.asarray((levels[1:] + levels[:-1]) / 2, jnp.float32)
        codes = jnp.searchsorted(midpoints, unit, side="right", method="scan_unrolled")
        return {"codes": packing.pack(codes, self.bits), "norm": affine.to_fp16(norm[..., 0])}

    def has_end(self, dtype: Any) -> bool:
        return self.coded or super().has_end(dtype)  # a norm may exceed its elements' dtype

    def saturated(self, x: jax.Array) -> jax.Array:
        if not self.coded:
            return super().saturated(x)
        squares = affine.square(x.astype(jnp.float32))
        return base.count(jnp.sqrt(jnp.sum(squares, -1, keepdims=True)) > affine.FP16_MAX, x)

    def dequantize(self, packed: base.Packed) -> jax.Array:
        if not self.coded:
            return super().dequantize(packed)
        codes = packing.unpack(packed["codes"], self.bits)
        unit = jnp.asarray(lloyd_max(self.bits) * codes.shape[-1] ** -0.5, jnp.float32)[codes]
        if self.unit:
            unit = unit / jnp.sqrt(jnp.sum(affine.square(unit), -1, keepdims=True))
        return unit * packed["norm"].astype(jnp.float32)[..., None]
