"""What every quantizer is, and how a cache is to use one.

A quantizer is a frozen dataclass of settings with pure functions over keys or values [B, S, K, H], one side (K or V) of
one layer. They trace under jit and vmap, look at one (row, head) at a time, and give it the same bits whatever stands
beside it. A cache uses it so:

* `k = quantizer.rotate(k)` as rows enter, packed or not, and `q = k_quantizer.rotate(q)` on the way to the scores, so
  that q k is kept. Values are rotated as they enter too, and the heads' outputs once: `v_quantizer.rotate(heads)`. The
  rotation is its own inverse, and the identity for methods without one. `quantize` and `dequantize` know nothing of it.
* Positions, not slots, decide what is packed: with left padding a row's tiles would else depend on its neighbours.
  Position p belongs to tile `(p - window.first) // granularity`. Storage has slots for the positions from `first` on.
* After a row's tokens [0, n) are written, `window.packed(n, prompt)` says which positions [start, end) are packed. The
  rest, the first tokens, the recent and the pending ones, are read from 16-bit storage. `end` moves by whole `block`s.
* Storage is `jax.eval_shape(quantizer.quantize, ShapeDtypeStruct([B, S, K, H]))`, S a multiple of the granularity.
  Every leaf has tokens or tiles on axis 1, in proportion: the part of a leaf for tokens [a, b) is [a L / S, b L / S) of
  its L entries. So `quantize` of new whole tiles gives leaves that are written there, and `dequantize` reads any whole
  tiles.
* A method with `whole_history` (requantize.py) instead takes all it holds, dequantized, and what is new, at each turn.
* `own` says whether the rows of a running step are read exact ('step'), only those of a prefill ('prompt'), or
  packed like all others ('none'), as the method's public code does it.
* Layers in `exact_layers(L)` are not quantized at all.

A quantizer is a pytree. Its `traced` fields are leaves, so that methods that differ in these alone share one compiled
program; all others are static.

How `--cache_quant` writes it follows from its fields (spec.py); a field's metadata may give it another name there
(`option`) and a word for None (`none`).
"""

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxkv.errors import UserError
from jaxkv.interventions.quantizers import hadamard

Packed = dict[str, jax.Array]
Side = Literal["k", "v"]
Own = Literal["none", "prompt", "step"]
Words = tuple[tuple[str, Any], ...]  # text and the value that it stands for


def register_tree(cls: type, traced: tuple[str, ...]) -> None:
    """Makes a frozen dataclass a pytree whose children are the `traced` fields.

    `jax.tree_util.register_dataclass` would run its checks again, on tracers.
    """

    def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        names = [field.name for field in dataclasses.fields(x)]
        static = tuple((name, getattr(x, name)) for name in names if name not in traced)
        return tuple(getattr(x, name) for name in traced), static

    def unflatten(static: tuple[tuple[str, Any], ...], leaves: Iterable[Any]) -> Any:
        x: Any = object.__new__(cls)
        for name, value in (*static, *zip(traced, leaves, strict=True)):
            object.__setattr__(x, name, value)
        return x

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


@dataclasses.dataclass(frozen=True)
class Window:
    """Which positions of a row are packed."""

    first: int = 0  # tokens from position 0 on that stay in 16 bits (attention sinks)
    recent: int = 0  # newest tokens that always stay
    block: int = 1  # tokens that are packed at a time; fewer wait
    from_prompt: bool = False  # whether the whole prompt is packed at once and blocks are counted from its end

    def packed(self, written: Any, prompt: Any = 0) -> tuple[Any, Any]:
        """Positions [start, end) that are packed once positions [0, written) are written; ints or int arrays."""
        base = jnp.minimum(prompt, written) if self.from_prompt else self.first
        return self.first, jnp.maximum(base, base + (written - base - self.recent) // self.block * self.block)


@dataclasses.dataclass(frozen=True)
class Quantizer(abc.ABC):
    """Settings of one method on one side, and its functions. See the module's text for how a cache calls them."""

    side: Side  # several methods treat the two differently

    own: ClassVar[Own] = "none"
    whole_history: ClassVar[bool] = False
    traced: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[tuple[str, ...]]  # in a spec
    variant: ClassVar[str | None] = "bits"  # the field that follows a name's colon; None if nothing does
    usual: ClassVar[str] = "4"  # what usually follows it; 'k2v2' where the usual form names both sides' bits
    aliases: ClassVar[tuple[tuple[str, str, Words], ...]] = ()  # another name, its field, and what words stand for

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        register_tree(cls, cls.traced)

    @classmethod
    def named(cls, name: str) -> dict[str, Any]:
        """The fields that one of `names` decides."""
        del name
        return {}

    @property
    def granularity(self) -> int:
        """Tokens that must be packed together: 1, or a tile."""
        return 1

    @property
    def rotated(self) -> bool | jax.Array:
        """Whether the cache holds rotated heads: the field `hadamard`, if any; an array where that is traced."""
        return getattr(self, "hadamard", False)

    @property
    def window(self) -> Window:
        """The windows the method comes with."""
        return Window(block=self.granularity)

    @abc.abstractmethod
    def quantize(self, x: jax.Array) -> Packed:
        """Packs x [B, S, K, H], S a multiple of the granularity, rotated if the method rotates."""

    @abc.abstractmethod
    def dequantize(self, packed: Packed) -> jax.Array:
        """What a reader sees: fp32 [B, S, K, H], still rotated."""

    @abc.abstractmethod
    def bits_per_element(self, head_dim: int) -> float:
        """Bits of storage per element with all auxiliaries, outside windows."""

    def stored_as(self, dtype: Any) -> "Quantizer":
        """The method for a cache of this dtype, which a few need to know. Raises UserError if it does not suit."""
        del dtype
        return self

    def rotate(self, x: jax.Array) -> jax.Array:
        """x [..., H] in the basis in which the cache holds it, and back."""
        if isinstance(self.rotated, bool):
            return hadamard.rotate(x) if self.rotated else x
        if not hadamard.exists(x.shape[-1]):  # `check` has refused a rotation
            return x
        return jnp.where(self.rotated, hadamard.rotate(x), x)

    def saturated(self, x: jax.Array) -> jax.Array:
        """Elements of x, as `quantize` takes it, that the format cannot hold: int32 [B, S, K].

        They lie outside it, or a stored scale, zero or norm of theirs does and is clipped.
        """
        return jnp.zeros(x.shape[:-1], jnp.int32)

    def has_end(self, dtype: Any) -> bool:
        """Whether finite values of this dtype may not fit; most methods hold whatever fp16 does."""
        return bool(jnp.finfo(dtype).max > jnp.finfo(jnp.float16).max)

    def exact_layers(self, num_layers: int) -> frozenset[int]:
        """Layers that the method leaves in 16 bits."""
        del num_layers
        return frozenset()

    def check(self, head_dim: int, tokens: int | None = None) -> None:
        """Raises UserError if heads of this size, or a context of so many tokens, do not suit the method."""
        if self.rotated and not hadamard.exists(head_dim):
            raise UserError(
                f"{self.name} rotates heads by a Hadamard matrix, which exists here for head dims that are powers of "
                f"two (64, 128, 256), and this model's is {head_dim}; choose a method without a rotation, e.g. "
                "kivi:k2v2 or kvarn:k2v2,rotate=off"
            )
        if head_dim % 8:
            raise UserError(f"{self.name} packs codes of 8 channels together, and the head dim is {head_dim}")
        if tokens is not None and self.granularity > tokens:
            raise UserError(
                f"a tile of {self.granularity} tokens ({self.name}) does not fit a context of {tokens}; use a smaller "
                "tile, group or window"
            )

    @property
    def name(self) -> str:
        """For messages."""
        return type(self).__name__.lower()


def nbytes(packed: Any) -> int:
    """Bytes of packed storage, counted; of arrays or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(packed))


def count(over: jax.Array, x: jax.Array, grouped: jax.Array | None = None) -> jax.Array:
    """Elements of x [B, S, K, H] for which `over` holds: int32 [B, S, K].

    `over` broadcasts to x, or to `grouped`, which has the elements of x in their order with axes split.
    """
    shape = x.shape if grouped is None else grouped.shape
    return jnp.sum(jnp.broadcast_to(over, shape).reshape(x.shape), -1, dtype=jnp.int32)


def check_bits(bits: int, who: str, known: tuple[int, ...] = (2, 3, 4, 8)) -> None:
    """Raises UserError unless the method has this width."""
    if bits not in known:
        raise UserError(f"{who} has no {bits}-bit codes; known: {', '.join(map(str, known))}")


def split_error(x: jax.Array, approximation: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Squared error of each vector [..., H] in two parts that add up to it (arXiv 2606.03458, equation 3).

    They are that of the norm, (|x| - |x'|)^2, and that of the direction, 2 |x| |x'| (1 - cos), each [...], in fp32.
    """
    x, y = x.astype(jnp.float32), approximation.astype(jnp.float32)
    total = jnp.sum(jnp.square(x - y), axis=-1)
    norm = jnp.square(jnp.linalg.norm(x, axis=-1) - jnp.linalg.norm(y, axis=-1))
    return norm, jnp.maximum(total - norm, 0)
