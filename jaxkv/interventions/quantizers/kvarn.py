"""KVarN: tiles of tokens whose rows and columns are brought to equal spread before they are rounded.

Source: Muller et al., arXiv 2606.03458, section 3.3 and algorithm 1; what the paper leaves open follows the authors'
serving code (huawei-csl/KVarN on vLLM). Heads are rotated by a Hadamard matrix. A K tile has channels as rows and
tokens as columns, a V tile tokens as rows and channels as columns. Its columns and rows are divided in turn by their
standard deviations, within bounds, and the scales of the most even pass are taken. Then each row is rounded to nearest
between its extremes.

The recipe adds up logs of scales. Here scales are multiplied, the same in exact arithmetic, and a power of two passes
through without rounding. A pass counts as more even if it is so by 1e-4 of the imbalance: passes that have converged
differ by less, in the last bits, and which of them is taken would be chance, though they round a tile differently.

A row's own scale drops out of that rounding: the recipe folds it into the row's step and zero, which come out the same
without it, up to rounding. So it is not applied here; the rows matter through the columns' scales alone. What is read
is `(code * step_row + zero_row) * scale_column`.

The floor of -0.3 on the logs is SINQ's (arXiv 2509.22944), where spreads are divided by the smallest one first and no
log is below 0. KVarN divides by 1 instead, so the floor forbids raising a spread below exp(-0.3) = 0.74: a tile of
small values cannot be balanced and is rounded plainly. `floor=None` takes all bounds away, `target='min'` divides by
the smallest spread; either makes the method equivariant under scaling, by a power of two bit for bit.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxkv.errors import UserError
from jaxkv.interventions.quantizers import affine, base, packing

CEILING = 10.0  # upper bound of the log of a scale
MOST_PASSES = 1000
GAIN = 1e-4  # part of the imbalance that a pass must take away to be taken
LEAST_STD, MOST_STD = 1e-3, 1e3  # bounds of what one pass divides by
TINY = 1e-8  # least spread an imbalance is measured against


def _store_e4m3(x: jax.Array) -> jax.Array:
    return jnp.clip(x, 0, 448.0).astype(jnp.float8_e4m3fn)


def _store_e5m3(x: jax.Array) -> jax.Array:
    """The upper 8 of the lower 15 bits of an fp16: no sign, 5 bits of exponent, 3 of mantissa, rounded to nearest."""
    bits = jax.lax.bitcast_convert_type(affine.to_fp16(x), jnp.uint16)
    rounded = (bits + 63 + ((bits >> 7) & 1)) >> 7
    return jnp.minimum(rounded, 0xF7).astype(jnp.uint8)  # 0xF8 would be infinity


def _load_e5m3(stored: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(stored.astype(jnp.uint16) << 7, jnp.float16).astype(jnp.float32)


AUXILIARIES = {
    "fp16": affine.FP16,
    "e4m3": affine.Auxiliary(8, _store_e4m3, lambda stored: stored.astype(jnp.float32), 448.0),
    "e5m3": affine.Auxiliary(8, _store_e5m3, _load_e5m3, 61440.0),
}


@dataclasses.dataclass(frozen=True)
class KVarN(base.Quantizer):
    """Settings of KVarN. The defaults are the paper's, but for the imbalance, which is the serving code's."""

    bits: int = 2  # of a code
    tile: int = 128  # tokens of a tile
    passes: int = 8  # over columns and rows, at most 1000. 0 is plain rounding
    # Lower bound of the scales' logs, below the upper one of 10; None lifts all bounds.
    floor: float | None = dataclasses.field(default=-0.3, metadata={"none": "none"})
    target: Literal["one", "min"] = "one"  # what spreads are brought to: 1, or the tile's smallest spread
    criterion: Literal["std", "variance"] = "std"  # what imbalance compares: the serving code's, or the paper's
    keep: Literal["best", "last"] = "best"  # the scales of the most even pass, none included, or of the last
    # How scales are stored; None becomes 'e5m3' below 8 bits and 'fp16' from there on. The paper says FP8, the serving
    # code has fp16. e4m3 ends at 2^-9 and loses a cache of small values; e5m3, an fp16 without sign and low bits, is as
    # precise and has fp16's range. At 8 bits an 8-bit scale would more than double the error of real values. Zeros are
    # fp16.
    aux: Literal["e5m3", "e4m3", "fp16"] | None = None
    hadamard: bool = dataclasses.field(default=True, metadata={"option": "rotate"})  # whether heads are rotated

    own = "prompt"
    traced = ("passes", "hadamard")
    names, usual = ("kvarn",), "k2v2"
    aliases = (("normalize", "passes", (("on", 8), ("off", 0))),)

    def __post_init__(self):
        base.check_bits(self.bits, "KVarN")
        if self.aux is None:
            object.__setattr__(self, "aux", "e5m3" if self.bits < 8 else "fp16")
        if self.tile < 2:
            raise UserError(f"a KVarN tile of {self.tile} tokens has no spread; use at least 2")
        if not 0 <= self.passes <= MOST_PASSES:
            raise UserError(f"KVarN makes 0 to {MOST_PASSES} passes, not {self.passes}; 8 are usual")
        if self.floor is not None and not -math.inf < self.floor < CEILING:
            raise UserError(
                f"a floor of {self.floor:g} under KVarN's log scales is no finite number below their ceiling of "
                f"{CEILING:g}; use e.g. floor=-0.3, or floor=none for no bounds"
            )

    @property
    def auxiliary(self) -> affine.Auxiliary:
        """How scales are stored."""
        assert self.aux is not None
        return AUXILIARIES[self.aux]

    @property
    def granularity(self) -> int:
        return self.tile

    @property
    def window(self) -> base.Window:
        return base.Window(first=128, block=self.tile)

    def bits_per_element(self, head_dim: int) -> float:
        scale = self.auxiliary.bits
        row, column = (self.tile, head_dim) if self.side == "k" else (head_dim, self.tile)
        return self.bits + (scale + 16) / row + scale / column

    def quantize(self, x: jax.Array) -> base.Packed:
        B, _, K, H = x.shape
        even, scales, axis = self._even(x)
        column = self.auxiliary.store(scales)
        codes, step, zero = affine.quantize(even, self.bits, 2 if axis == -1 else -1, scales=self.auxiliary)
        return {
            "codes": packing.pack(codes.reshape(x.shape), self.bits),
            "step": step.reshape(B, -1, K, *([H] if axis == -1 else [])),
            "zero": zero.reshape(B, -1, K, *([H] if axis == -1 else [])),
            "column": column.reshape(B, -1, K, *([] if axis == -1 else [H])),
        }

    def dequantize(self, packed: base.Packed) -> jax.Array:
        codes = packing.unpack(packed["codes"], self.bits)
        B, S, K, H = codes.shape
        tiles = codes.reshape(B, S // self.tile, self.tile, K, H)
        rows, columns = (1, self.tile) if self.side == "k" else (self.tile, 1)
        spread = lambda leaf, n: leaf.reshape(B, -1, n, K, leaf.size // (leaf.shape[1] * B * K))  # noqa: E731
        load = self.auxiliary.load
        even = affine.dequantize(tiles, load(spread(packed["step"], rows)), spread(packed["zero"], rows))
        scale = load(spread(packed["column"], columns))
        return (even * jnp.where(scale > 0, scale, 1)).reshape(codes.shape)

    def has_end(self, dtype: Any) -> bool:
        return self.aux != "fp16" or super().has_end(dtype)  # the others end before fp16

    def saturated(self, x: jax.Array) -> jax.Array:
        even, column, axis = self._even(x)
        over = affine.clips(even, self.bits, 2 if axis == -1 else -1, scales=self.auxiliary)
        over |= column > self.auxiliary.most
        return base.count(over, x, even)

    def _even(self, x: jax.Array) -> tuple[jax.Array, jax.Array, int]:
        """Tiles [B, n, G, K, H] over the scales of their columns as stored, those before, and the axis of a column."""
        B, S, K, H = x.shape
        tiles = x.astype(jnp.float32).reshape(B, S // self.tile, self.tile, K, H)
        axis = -1 if self.side == "k" else 2  # along a column: K's channels, V's tokens
        column = self.balance(tiles, axis)
        scale = self.auxiliary.load(self.auxiliary.store(column))
        return tiles / jnp.where(scale > 0, scale, 1), column, axis

    def balance(self, tiles: jax.Array, axis: int) -> jax.Array:
        """Scales of the columns of tiles [B, n, G, K, H], with size 1 along `axis`, the one along a column."""
        other = 2 if axis == -1 else -1
        along, across = _std(tiles, axis), _std(tiles, other)
        target = jnp.float32(1)
        if self.target == "min":
            least = [jnp.min(jnp.where(std > 0, std, jnp.inf), (2, 4), keepdims=True) for std in (along, across)]
            target = jnp.minimum(*least)
            target = jnp.where(jnp.isfinite(target), target, 1)

        def grow(scale, std):
            if self.floor is None:
                return scale * jnp.where(std > 0, std / target, 1)
            grown = scale * jnp.clip(std / target, LEAST_STD, MOST_STD)
            return jnp.clip(grown, math.exp(self.floor), math.exp(CEILING))

        def one_pass(_, carry):
            column, row, along, best, least = carry
            column = grow(column, along)
            row = grow(row, _std(tiles / column / row, other))
            current = tiles / column / row
            along, across = _std(current, axis), _std(current, other)
            imbalance = self._imbalance(along, across)
            better = (imbalance < least * (1 - GAIN)) | (self.keep == "last")
            return column, row, along, jnp.where(better, column, best), jnp.where(better, imbalance, least)

        column, row = jnp.ones_like(along), jnp.ones_like(across)
        start = (column, row, along, column, self._imbalance(along, across))
        return jax.lax.fori_loop(0, self.passes, one_pass, start)[3]

    def _imbalance(self, *stds: jax.Array) -> jax.Array:
        """Largest over smallest spread of the columns plus that of the rows, [B, n, 1, K, 1]."""
        ratio = jnp.float32(0)
        for std in stds:
            spread = affine.square(std) if self.criterion == "variance" else std
            if self.floor is None:  # a bound would not scale with the tile; constant rows cannot be balanced anyway
                least = jnp.min(jnp.where(spread > 0, spread, jnp.inf), (2, 4), keepdims=True)
            else:
                least = jnp.maximum(jnp.min(spread, (2, 4), keepdims=True), TINY)
            ratio += jnp.max(spread, (2, 4), keepdims=True) / least
        return ratio


def _std(x: jax.Array, axis: int) -> jax.Array:
    """Sample standard deviation (n - 1), the axis kept."""
    squares = affine.square(x - jnp.mean(x, axis, keepdims=True))
    return jnp.sqrt(jnp.sum(squares, axis, keepdims=True) / (x.shape[axis] - 1))
