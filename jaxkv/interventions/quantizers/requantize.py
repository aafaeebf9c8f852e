"""A cache that packs its whole history again at every turn, as transformers' QuantizedCache does.

Source: transformers, cache_utils.py (QuantizedLayer, its quanto backend) and optimum-quanto's grouping: asymmetric
round to nearest between a group's extremes, scale and zero in 16 bits. The whole prompt is packed at once; later tokens
wait, and when 128 do, everything is read back, joined with them and packed anew.

Whether that hurts depends on the groups. Packing what was read is a fixed point as long as groups hold the same
elements: so it is with groups of channels (transformers' default, `axis_key=0`), and with groups of tokens counted from
a row's first token, but for the last one while it fills. When groups shift between turns, as they do where they are
counted from the end and the tokens of a turn are no multiple of them, each turn adds error. transformers counts groups
through a flattened [B, K, S, H], where one may straddle heads and even rows; here each (row, head) is grouped for
itself.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv.errors import UserError
from jaxkv.interventions.quantizers import affine, base, packing


@dataclasses.dataclass(frozen=True)
class Requantize(affine.Uniform):
    """Settings of repeated packing."""

    group: int = 64  # elements that share a scale
    every: int = 128  # tokens that wait before all is packed again
    axis: Literal["token", "channel"] = "token"  # a group: channels of one token, or one channel of consecutive tokens
    anchor: Literal["start", "end"] = "start"  # whether groups of tokens are counted from the first or from the last

    own = "step"
    whole_history = True
    names = ("hf",)

    def __post_init__(self):
        base.check_bits(self.bits, "repeated packing")
        if self.group < 2 or self.every < 1:
            raise UserError(
                f"groups of {self.group} every {self.every} tokens pack nothing; use e.g. group=64,every=128"
            )

    @property
    def name(self) -> str:
        return "hf"

    @property
    def window(self) -> base.Window:
        return base.Window(block=self.every, from_prompt=True)

    def check(self, head_dim: int, tokens: int | None = None) -> None:
        super().check(head_dim, tokens)
        if self.axis == "token" and head_dim % min(self.group, head_dim):
            raise UserError(f"groups of {self.group} channels do not divide a head of {head_dim}; use another group")
        if self.axis == "channel" and tokens is not None and self.group > tokens:
            raise UserError(f"a group of {self.group} tokens does not fit a context of {tokens}; use a smaller group")

    def bits_per_element(self, head_dim: int) -> float:
        return self.bits + 32 / (self.group if self.axis == "channel" else min(self.group, head_dim))

    def quantize(self, x: jax.Array, length: jax.Array | None = None) -> base.Packed:
        """Packs a history x [B, S, K, H] of `length` [B] tokens each (None: S); what comes after them is not looked at.

        With `axis='channel'` S is a multiple of the group, and groups from the end take one more group of auxiliaries.
        """
        if self.axis == "token":
            return super().quantize(x)
        moved, filled, shift = self._tokens(x.astype(jnp.float32), length)
        codes, scale, zero = affine.quantize(moved, self.bits, 2, filled=filled)
        codes = self._back(codes, shift, x.shape[1])
        packed = {"codes": packing.pack(codes, self.bits), "scale": scale[:, :, 0], "zero": zero[:, :, 0]}
        return packed if self.anchor == "start" else packed | {"shift": shift.astype(jnp.int32)}

    def saturated(self, x: jax.Array, length: jax.Array | None = None) -> jax.Array:
        """As in Quantizer, of the last turn's groups; x and length as `quantize` takes them."""
        if self.axis == "token":
            return super().saturated(x)
        moved, filled, shift = self._tokens(x, length)
        over = jnp.broadcast_to(affine.clips(moved, self.bits, 2, filled), moved.shape)
        return base.count(self._back(over, shift, x.shape[1]), x)

    def dequantize(self, packed: base.Packed) -> jax.Array:
        if self.axis == "token":
            return super().dequantize(packed)
        codes = packing.unpack(packed["codes"], self.bits)
        B, S = codes.shape[:2]
        shift = packed.get("shift", jnp.zeros(B, jnp.int32))
        place = (jnp.arange(S)[None] + shift[:, None]) // self.group
        return affine.dequantize(codes, _take(packed["scale"], place), _take(packed["zero"], place))

    def groups(self, x: jax.Array) -> tuple[jax.Array, int]:
        return x.reshape(*x.shape[:-1], -1, min(self.group, x.shape[-1])), -1

    def _tokens(self, x: jax.Array, length: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Groups of tokens [B, n, group, K, H] of x [B, S, K, H], which of them are filled, and each row's shift."""
        B, S, K, H = x.shape
        length = jnp.full(B, S) if length is None else length
        shift = self._shift(length)
        slots = S + (self.group if self.anchor == "end" else 0)
        tokens = jnp.arange(slots)[None] - shift[:, None]
        filled = ((tokens >= 0) & (tokens < length[:, None])).reshape(B, -1, self.group, 1, 1)
        return _take(x, jnp.clip(tokens, 0, S - 1)).reshape(B, -1, self.group, K, H), filled, shift

    def _back(self, groups: jax.Array, shift: jax.Array, tokens: int) -> jax.Array:
        """[B, tokens, K, H] of groups [B, n, group, K, H] as `_tokens` makes them."""
        B, n, group, K, H = groups.shape
        return _take(groups.reshape(B, n * group, K, H), jnp.arange(tokens)[None] + shift[:, None])

    def _shift(self, length: jax.Array) -> jax.Array:
        """Empty slots before the first token that make the last one end a group."""
        return -length % self.group if self.anchor == "end" else jnp.zeros_like(length)


def _take(x: jax.Array, places: jax.Array) -> jax.Array:
    """x [B, S, ...] at places [B, n] of its second axis."""
    return jax.vmap(lambda row, place: row[place])(x, places)
