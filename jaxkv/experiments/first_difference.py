"""Which value differs first? Two runs over the same tokens, value by value in order of execution.

In the aligned regime both arms round alike, so the first value that differs names a bug: the layer, the operation and
the position where it enters. In the plain regime it names the first rounding that differs, and the list of all values
from there to the logits shows how it grows.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.decode import Arms
from jaxkv.logits import bits
from jaxkv.models.layers import ATTENTION_SHAPED
from jaxkv.rollout import Layout, Rows
from jaxkv.tracing import Trace, list_values

ATTENTION_BYTES = 4 << 30  # values [B, S, K, G, S] are not recorded beyond so many bytes an arm


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far one named value is apart in two runs, at each slot."""

    dtypes: tuple[str, str]  # of the two
    relative: np.ndarray  # [B, S] L2 norm of the difference over that of the second; 1 beside a second of zeros
    # [B, S] 1 - cos of the angle between the two, as half the squared distance of the unit vectors: it does not cancel.
    cosine: np.ndarray
    max_abs: np.ndarray  # [B, S] largest difference
    equal: np.ndarray  # [B, S] whether every bit is the same


@jax.jit
def _measure(a: jax.Array, b: jax.Array, seen: jax.Array | None) -> dict[str, jax.Array]:
    axes = tuple(range(2, a.ndim))
    exact = jnp.promote_types(a.dtype, b.dtype)
    same = bits(a.astype(exact)) == bits(b.astype(exact))
    x, y = a.astype(jnp.float64), b.astype(jnp.float64)
    if seen is not None:
        # Keys after the query are whatever each arm has there, and what both mask would drown the rest of a norm.
        masked = (x == y) & (jnp.abs(y) >= float(jnp.finfo(exact).max))
        counted = seen[:, :, None, None, :] & ~masked
        x, y, same = jnp.where(counted, x, 0), jnp.where(counted, y, 0), same | ~counted
    gap = jnp.abs(x - y)
    norm = lambda z: jnp.sqrt(jnp.sum(jnp.square(z), axis=axes, keepdims=True))  # noqa: E731
    size, other, distance = norm(y), norm(x), norm(gap)
    unit = lambda z, n: jnp.where(n > 0, z / jnp.where(n > 0, n, 1), 0)  # noqa: E731
    equal = jnp.all(same, axis=axes)
    relative = jnp.where(size > 0, distance / jnp.where(size > 0, size, 1), distance > 0)
    turned = jnp.square(norm(unit(x, other) - unit(y, size))) / 2
    flat = lambda z: z.reshape(z.shape[:2])  # noqa: E731
    return {
        "relative": flat(relative),
        "cosine": jnp.where(equal, 0.0, flat(turned)),  # a compiler may divide the two unlike
        "max_abs": jnp.max(gap, axis=axes),
        "equal": equal,
    }


def compare_values(a: jax.Array, b: jax.Array, seen: jax.Array | None = None) -> Gap:
    """Sets values [B, S] or [B, S, ...] side by side; of attention-shaped ones the keys `seen` [B, S, S] count."""
    if a.ndim == 2:
        a, b = a[:, :, None], b[:, :, None]
    with jax.enable_x64(True):
        found = jax.device_get(_measure(a, b, seen))
    return Gap(dtypes=(a.dtype.name, b.dtype.name), **found)


def compare_traces(a: Trace, b: Trace, rows: Rows, layout: Layout) -> dict[str, Gap]:
    """Gaps of `positions`, every value both recorded, and `logits`, in order of execution; `b` is what a relative
    difference is relative to. The logits of step t are those of the row at slot prompt - 1 + t; other rows have none
    and count as equal."""
    slots = np.arange(layout.slots)
    seen = (slots[None, None, :] <= slots[None, :, None]) & (slots >= np.asarray(rows.first)[:, None])[:, None, :]
    gaps = {"positions": compare_values(a.positions, b.positions)}
    for name, value in a.values.items():
        if name in b.values:
            keys = jnp.asarray(seen) if name.startswith(ATTENTION_SHAPED) else None
            gaps[name] = compare_values(value, b.values[name], keys)
    steps = min(a.run.logits.shape[1], b.run.logits.shape[1], layout.slots - layout.prompt + 1)
    found = compare_values(a.run.logits[:, :steps], b.run.logits[:, :steps])

    def spread(column: np.ndarray, fill: Any) -> np.ndarray:
        full = np.full((layout.batch, layout.slots), fill, column.dtype)
        full[:, layout.prompt - 1 : layout.prompt - 1 + steps] = column
        return full

    gaps["logits"] = Gap(
        found.dtypes, spread(found.relative, 0), spread(found.cosine, 0), spread(found.max_abs, 0),
        spread(found.equal, True),
    )  # fmt: skip
    return gaps


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first value of two runs that differs."""

    op: str  # its name without the layer, e.g. 'k'
    layer: int | None  # None for positions, final_norm and logits
    position: int  # the first absolute position at which it differs
    dtypes: tuple[str, str]  # of the value in the two runs
    max_abs: float  # its largest difference
    relative: float  # the largest relative L2 difference of a row
    places: int  # how many rows differ in it

    def __str__(self) -> str:
        of = "" if self.layer is None else f" of layer {self.layer}"
        kinds = " beside ".join(dict.fromkeys(self.dtypes))
        size = f"max |diff| {self.max_abs:.2g}, relative {self.relative:.2g}, {self.places} rows"
        return f"first in {self.op}{of} at position {self.position} ({kinds}, {size})"

    def to_json(self) -> dict[str, Any]:
        """Plain values for a record."""
        return dataclasses.asdict(self) | {"dtypes": list(self.dtypes)}


def split_name(name: str) -> tuple[str, int | None]:
    """'k.3' -> ('k', 3); 'logits' -> ('logits', None)."""
    op, _, layer = name.partition(".")
    return op, int(layer) if layer else None


def find_first(
    gaps: Mapping[str, Gap], counted: np.ndarray, first: int | np.ndarray, row: int | slice = slice(None)
) -> Difference | None:
    """The first value in order of execution, which gaps are in, that differs in bits or dtype; None if there is none.

    Of one row of the batch slots [S] are `counted` and `first` is that of position 0; of all rows [B, S] and [B, 1].
    """
    for name, gap in gaps.items():
        differs = counted & (~gap.equal[row] | (gap.dtypes[0] != gap.dtypes[1]))
        if differs.any():
            places = np.broadcast_to(np.arange(differs.shape[-1]) - first, differs.shape)[differs]
            return Difference(
                *split_name(name), int(places.min()), gap.dtypes, float(gap.max_abs[row][differs].max()),
                float(gap.relative[row][differs].max()), int(differs.sum()),
            )  # fmt: skip
    return None


def names_that_fit(arms: Arms, layout: Layout) -> list[str]:
    """All values of a decoder in order of execution, without the attention-shaped ones where they are too large."""
    shapes = list_values(arms, layout.batch, layout.slots)
    large = [name for name in shapes if name.startswith(ATTENTION_SHAPED)]
    size = sum(int(np.prod(shapes[name].shape)) * shapes[name].dtype.itemsize for name in large)
    return [name for name in shapes if size <= ATTENTION_BYTES or name not in large]


def fed_slots(rows: Rows, layout: Layout, lengths: jax.Array, row: int) -> np.ndarray:
    """[S] the slots of a row whose tokens were fed to the model: all but the last that was taken."""
    slots = np.arange(layout.slots)
    return (slots >= int(rows.first[row])) & (slots < layout.prompt + max(int(lengths[row]) - 1, 0))
