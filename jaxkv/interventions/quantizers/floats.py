"""8-bit floats, e4m3 and e5m2, with a static scale or one for each (token, head).

Source: Micikevicius et al., arXiv 2209.05433, for the formats; scales as JAX serving code (MaxText) and vLLM take them:
a static one multiplies what is read, a dynamic one maps the largest magnitude to the format's largest number. Values
are clipped before the cast, which does not saturate in JAX (465 becomes NaN in e4m3), and `saturated` counts them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.errors import UserError, nearest
from jaxkv.interventions.quantizers import affine, base

SMALLEST, LARGEST = (float(x) for x in (jnp.finfo(jnp.float32).tiny, jnp.finfo(jnp.float32).max))  # normal
FORMATS = {"e4m3": (jnp.float8_e4m3fn, 448.0), "e5m2": (jnp.float8_e5m2, 57344.0)}


@dataclasses.dataclass(frozen=True)
class Float8(base.Quantizer):
    """Settings of an 8-bit float."""

    format: str = "e4m3"  # of FORMATS
    # Static, such that fp32 holds it and the largest number read, or None for one for each (token, head), stored as the
    # largest magnitude in fp16.
    scale: float | None = dataclasses.field(default=1.0, metadata={"none": "token"})

    names, variant, usual = ("fp8",), "format", "e4m3"

    def __post_init__(self):
        if self.format not in FORMATS:
            raise UserError(
                f"there is no 8-bit float '{self.format}'{nearest(self.format, list(FORMATS))}; known: e4m3, e5m2"
            )
        most = LARGEST / FORMATS[self.format][1]
        if self.scale is not None and not SMALLEST <= self.scale <= most:
            raise UserError(
                f"a static scale of {self.scale:g} holds nothing in fp32, where {self.format} takes {SMALLEST:.2g} to "
                f"{most:.2g}; use such a number or scale=token"
            )

    @property
    def name(self) -> str:
        return f"fp8 {self.format}"

    def bits_per_element(self, head_dim: int) -> float:
        return 8 + (16 / head_dim if self.scale is None else 0)

    def quantize(self, x: jax.Array) -> base.Packed:
        dtype, most = FORMATS[self.format]
        x = x.astype(jnp.float32)
        if self.scale is not None:
            return {"codes": jnp.clip(affine.divide(x, self.scale), -most, most).astype(dtype)}
        amax = affine.to_fp16(jnp.max(jnp.abs(x), -1, keepdims=True))
        wide = amax.astype(jnp.float32)
        scaled = x * jnp.where(wide > 0, most / wide, 0)
        return {"codes": jnp.clip(scaled, -most, most).astype(dtype), "amax": amax[..., 0]}

    def dequantize(self, packed: base.Packed) -> jax.Array:
        values = packed["codes"].astype(jnp.float32)
        if self.scale is not None:
            return values * self.scale
        return values * affine.divide(packed["amax"].astype(jnp.float32), FORMATS[self.format][1])[..., None]

    def has_end(self, dtype: Any) -> bool:
        return self.scale is not None or super().has_end(dtype)

    def saturated(self, x: jax.Array) -> jax.Array:
        size = jnp.abs(x.astype(jnp.float32))
        if self.scale is None:
            return base.count(jnp.max(size, -1, keepdims=True) > affine.FP16_MAX, x)
        return base.count(size > FORMATS[self.format][1] * self.scale, x)
