"""Error put into keys and values on purpose, as a pure function of the rows.

Source of the recipe: Shebel, "Effect of KV Cache Error on Inference Accuracy" (May 2025): every component of K and V is
multiplied by 1 + e, once, as it enters the cache. What is added here separates what that recipe mixes: mean against
variance, variance against sign flips, error of the values against error of a token's scale, once against at each read.

A component x becomes

* kind 'mul': x (1 + e). The sign flips where e < -1.
* kind 'add': x + r e, r the root mean square of the (token, head) row that x stands in.
* laws 'truncate' and 'round': x with fewer bits of mantissa, cut towards zero or rounded to nearest, ties to even. The
  first shrinks every value (a bias), the second has the same grid without it.

`e` is drawn from a law with mean m and standard deviation s: 'uniform' on [low, high), 'normal', or 'points', m - s or
m + s with equal chances. `sign` 'keep' draws 1 + e from the log-normal law of mean 1 + m and standard deviation s
instead: same mean and variance, hence the same expected squared error, and 1 + e > 0. Its shape is another one, so the
same option on a law that flips nothing, such as U(-1, 1), is the control for shape; and 'points' with s <= 1 + m is
a second law without flips, of bounded error. `correlate` 'token' draws one e for all channels of a (token, head). The
expected squared error of a row is |x|^2 E[e^2] (r^2 H E[e^2] for 'add') whether its channels share e or not.

Noise is counter-based, as in `jaxkv.sampling`: e depends on (seed, problem, layer, side, position, head, channel) and,
if redrawn, on the step of the read, and on nothing else. A row therefore gets the same error whatever stands beside it
in the call, the batch or the cache. All is computed in fp32 (fp64 for fp64 caches) and rounded once to the cache's
dtype. Where e is 0 the row's own bits are kept.
"""

import dataclasses
import functools
import math
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxkv.cache import EMPTY
from jaxkv.errors import UserError

Ranges = tuple[tuple[int, int | None], ...]  # inclusive; None is open
SIDES = ("k", "v")
DRAWN = ("uniform", "normal", "points")
CUT = ("truncate", "round")
SCOPES = ("layers", "heads", "positions")


def _inside(ranges: Ranges | None, value: Any) -> Any:
    """Whether an int, or each of an array, lies in one of the ranges; None has all."""
    if ranges is None:
        return value == value
    hits = [(value >= low) & (True if high is None else value <= high) for low, high in ranges]
    return functools.reduce(lambda a, b: a | b, hits)


def site_number(layer: int, side: str) -> int:
    """What keys the noise of a layer's side."""
    return 2 * layer + SIDES.index(side)


def make_keys(
    site: jax.Array, positions: jax.Array, problems: jax.Array, seed: jax.Array | int, read_step: Any = None
) -> jax.Array:
    """Keys [B, T] of the noise at a `site_number` and absolute positions [B, T], -1 where a slot is empty.

    `read_step`, an int32 scalar, counts reads, for errors redrawn at each; None is for those frozen at write.
    """
    base = jax.random.key(seed, impl="threefry2x32")

    def make(problem, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(base, problem), site), position)
        return key if read_step is None else jax.random.fold_in(key, read_step)

    return jax.vmap(jax.vmap(make, in_axes=(None, 0)))(problems, positions)


def _write_number(value: Any) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _write_ranges(ranges: Ranges) -> str:
    return ",".join(str(low) if low == high else f"{low}-{'' if high is None else high}" for low, high in ranges)


def _round_now(x: jax.Array) -> jax.Array:
    """x as it is, behind a bound that keeps a compiler from merging how it was made with what follows.

    Products would else be contracted with sums and reordered among themselves in some programs and not in others.
    """
    largest = jnp.finfo(x.dtype).max
    return jnp.clip(x, -largest, largest)


def _draw_normal(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return _round_now(jax.random.normal(key, shape, jnp.float32))


def _row_rms(x: jax.Array) -> jax.Array:
    """Root mean square over the last axis, kept as 1; added up in halves, in one order in every program."""
    total, size = _round_now(jnp.square(x)), x.shape[-1]
    while (n := total.shape[-1]) > 1:
        half = n // 2
        pairs = total[..., :half] + total[..., half : 2 * half]
        total = jnp.concatenate([pairs, total[..., 2 * half :]], axis=-1)
    return jnp.sqrt(total / size)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("numbers",),
    meta_fields=("law", "bits", "kind", "sign", "correlate", "draw", "side", "layers", "heads", "positions"),
)
@dataclasses.dataclass(frozen=True)
class CacheError:
    """What is done to a cache; see the module's text. As text, the shortest spec that gives it.

    A pytree whose leaves are the law's numbers: programs that take it as an argument serve every level of one law.
    """

    law: str  # of DRAWN or CUT
    numbers: tuple[float, ...] = ()  # (low, high) of 'uniform', (mean, std) of 'normal' and 'points', nothing otherwise
    bits: int | None = None  # of mantissa that 'truncate' and 'round' keep, the leading one not counted
    kind: Literal["mul", "add"] = "mul"
    sign: Literal["any", "keep"] = "any"  # 'keep' for 1 + e > 0
    correlate: Literal["none", "token"] = "none"  # 'token' for one e a (token, head)
    draw: Literal["write", "read"] = "write"  # frozen as rows enter the cache, or anew each time they are read
    side: Literal["kv", "k", "v"] = "kv"
    layers: Ranges | None = None  # those changed; None is all. Ranges of both ends inclusive
    heads: Ranges | None = None  # kv heads changed
    positions: Ranges | None = None  # absolute positions changed

    def __str__(self) -> str:
        numbers = self.numbers if self.random else (self.bits,)
        words = [f"{self.law}:{','.join(map(_write_number, numbers))}"]
        for name in (*CHOICES, *SCOPES):
            value = getattr(self, name)
            if value != getattr(CacheError, name):
                words.append(f"{name}={value if name in CHOICES else _write_ranges(value)}")
        return ";".join(words)

    @property
    def redrawn(self) -> bool:
        """Whether rows are to be changed at each read instead of once."""
        return self.draw == "read"

    @property
    def random(self) -> bool:
        """Whether the seed matters."""
        return self.law in DRAWN

    def moments(self) -> tuple[Any, Any]:
        """Mean and standard deviation of e; (0, 0) for the laws that draw nothing."""
        if not self.random:
            return 0.0, 0.0
        a, b = self.numbers
        return ((a + b) / 2, (b - a) / math.sqrt(12)) if self.law == "uniform" else (a, b)

    def flip_share(self) -> float:
        """Probability that a component changes its sign; 0 for 'add', where it depends on the component."""
        if not self.random or self.kind == "add" or self.sign == "keep":
            return 0.0
        a, b = self.numbers
        if self.law == "uniform":
            return min(1.0, max(0.0, (-1 - a) / (b - a))) if b > a else float(a < -1)
        if self.law == "points":
            return (float(a - b < -1) + float(a + b < -1)) / 2
        return 0.5 * math.erfc((1 + a) / (b * math.sqrt(2))) if b else float(a < -1)

    def check(self, num_layers: int | None = None, num_kv_heads: int | None = None) -> None:
        """Raises UserError if the parts do not go together, or a model has no such layer or head."""
        if not self.random:
            drawn = ("kind", "sign", "correlate", "draw")
            given = [name for name in drawn if getattr(self, name) != getattr(CacheError, name)]
            if given:
                raise UserError(
                    f"{self.law} draws nothing, so {given[0]}={getattr(self, given[0])} has no effect on it"
                )
            if self.bits is None or not 0 <= self.bits <= 52:
                raise UserError(f"{self.law} keeps 0 to 52 bits of mantissa, not {self.bits}")
        elif not all(abs(number) < 1e30 for number in self.numbers):
            raise UserError(f"the numbers of {self.law} must be finite and below 1e30")
        elif self.law == "uniform" and self.numbers[0] > self.numbers[1]:
            raise UserError("uniform takes its lower end first")
        elif self.law != "uniform" and self.numbers[1] < 0:
            raise UserError(f"the standard deviation of {self.law} must be at least 0")
        if self.sign == "keep" and self.kind == "add":
            raise UserError("sign=keep is for kind=mul: a sum cannot keep the sign of small values at equal variance")
        if self.sign == "keep" and self.moments()[0] <= -1:
            raise UserError(f"sign=keep needs a mean above -1, and that of {self.law} here is {self.moments()[0]:g}")
        for name, ranges, count in (("layers", self.layers, num_layers), ("heads", self.heads, num_kv_heads)):
            last = max((low if high is None else high for low, high in ranges or ()), default=0)
            if count is not None and last >= count:
                raise UserError(f"{name} go from 0 to {count - 1} in this model, and {last} is asked for")

    def describe(self) -> dict[str, Any]:
        """What a record says of it, in plain values."""
        mean, std = self.moments()
        return {"family": "error", "mean": mean, "std": std, "flip_share": self.flip_share()} | vars(self)

    def touches(self, layer: int, side: str) -> bool:
        """Whether any row of a layer's keys ('k') or values ('v') is changed."""
        return side in self.side and bool(_inside(self.layers, layer))

    def change(self, rows: jax.Array, positions: jax.Array, drawn: jax.Array | None) -> jax.Array:
        """Rows [B, T, K, H] of a site that is touched with their error, as they enter the cache or, redrawn, lie in it.

        Those of empty slots, whose position in [B, T] is -1, or out of scope keep their bits. `drawn` is what `sample`
        gave for the site, None for laws that draw nothing.
        """
        wide = jnp.promote_types(rows.dtype, jnp.float32)
        x = rows.astype(wide)
        if drawn is not None:
            e = drawn.astype(wide)
            changed = x * e if self.kind == "mul" else x + _round_now(_row_rms(x) * e)
            untouched = e == (1 if self.kind == "mul" else 0)
        else:
            changed, untouched = self._cut(x), jnp.zeros((), bool)
        here = (positions != EMPTY) & _inside(self.positions, positions)
        heads = jnp.asarray(_inside(self.heads, jnp.arange(rows.shape[2])))
        here = here[:, :, None, None] & heads[None, None, :, None] & ~untouched
        return jnp.where(here, changed.astype(rows.dtype), rows)

    def sample(self, keys: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """1 + e for 'mul', e for 'add', of keys [B, T] and heads of shape (K, H): [B, T, K, H] in fp32.

        Channels that share it have it once, [B, T, K, 1].
        """
        heads, channels = shape
        shared = (heads, 1 if self.correlate == "token" else channels)
        return jax.vmap(jax.vmap(lambda key: self._sample_one(key, shared)))(keys)

    def list_sites(self, num_layers: int) -> list[tuple[int, str]]:
        """Layers and sides of which rows are changed."""
        return [(layer, side) for layer in range(num_layers) for side in SIDES if self.touches(layer, side)]

    def _cut(self, x: jax.Array) -> jax.Array:
        info = jnp.finfo(x.dtype)
        if self.bits is None or self.bits >= info.nmant:
            return x
        if self.law == "round":
            return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=self.bits)
        word = jnp.dtype(f"uint{info.bits}")
        kept = jax.lax.bitcast_convert_type(x, word) >> (info.nmant - self.bits) << (info.nmant - self.bits)
        return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(kept, x.dtype), x)

    def _sample_one(self, key: jax.Array, shape: tuple[int, int]) -> jax.Array:
        single = functools.partial(jnp.asarray, dtype=jnp.float32)
        # The barrier keeps a compiler from folding what is made of them, which rounds otherwise than running it does.
        a, b, mean, std = jax.lax.optimization_barrier(tuple(map(single, (*self.numbers, *self.moments()))))
        origin = single(1.0 if self.kind == "mul" else 0.0)
        if self.sign == "keep":
            # Log-normal of mean M and variance s^2: exp(t z - t^2 / 2) M with t^2 = log(1 + (s / M)^2).
            center = origin + mean
            t = jnp.sqrt(jnp.log1p(_round_now(jnp.square(std / center))))
            exponent = _round_now(t * _draw_normal(key, shape)) - _round_now(jnp.square(t)) / 2
            return center * jnp.exp(_round_now(exponent))
        if self.law == "uniform":
            return (origin + a) + _round_now((b - a) * jax.random.uniform(key, shape, jnp.float32))
        if self.law == "points":
            return jnp.where(jax.random.bernoulli(key, 0.5, shape), origin + (a + b), origin + (a - b))
        return (origin + a) + _round_now(b * _draw_normal(key, shape))


# What a field of few words may be, its default first.
CHOICES: dict[str, tuple[str, ...]] = {
    field.name: typing.get_args(field.type)
    for field in dataclasses.fields(CacheError)
    if typing.get_origin(field.type) is Literal
}
