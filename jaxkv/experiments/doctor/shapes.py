"""Does a row's result depend on what it is computed with? Rows, tiles of rows, and how results are compared.

Rows come from a pool and keep their content and their position whatever program computes them; what changes is only
the program's shape (B batch, T rows, S slots), or the rows in their company. What computes is a parameter throughout.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

Results = dict[str, np.ndarray]  # operation -> [rows, n]


def bits(x: np.ndarray) -> np.ndarray:
    """The array's bits as unsigned integers: -0 and +0 differ."""
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def compare_bits(reference: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """How two results of one dtype differ.

    Returns:
      elements: how many were compared. nonfinite: how many of them are not finite in either. differ: how many have
      other bits. max_ulp: largest difference in units in the last place of the larger of the two elements and the
      root mean square of the reference, below which a unit would only tell of cancellation. The last two are None if
      anything is not finite, since NaN is no agreement.

    Raises:
      ValueError: the shapes or dtypes differ.
    """
    if reference.shape != other.shape or reference.dtype != other.dtype:
        raise ValueError(f"not comparable: {reference.shape} {reference.dtype}, {other.shape} {other.dtype}")
    a, b = reference.astype(np.float64), other.astype(np.float64)
    nonfinite = int(np.count_nonzero(~(np.isfinite(a) & np.isfinite(b))))
    figure = {"elements": int(a.size), "nonfinite": nonfinite, "differ": None, "max_ulp": None}
    if nonfinite or not a.size:
        return figure
    info = jnp.finfo(reference.dtype)
    size = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.sqrt(np.mean(a * a)))
    ulp = np.ldexp(float(info.eps), np.frexp(np.maximum(size, float(info.tiny)))[1] - 1)
    differ = int(np.count_nonzero(bits(reference) != bits(other)))
    return figure | {"differ": differ, "max_ulp": float(np.max(np.abs(a - b) / ulp))}


def merge_figures(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One figure for several comparisons: counts added, the largest difference kept."""
    total = {name: sum(f[name] for f in figures) for name in ("elements", "nonfinite")}
    if total["nonfinite"]:
        return total | {"differ": None, "max_ulp": None}
    return total | {"differ": sum(f["differ"] for f in figures), "max_ulp": max(f["max_ulp"] for f in figures)}


@dataclasses.dataclass(frozen=True, order=True)
class Shape:
    """Shape of a program, and which operations it has: 'rows' (all but attention) or 'slots' (those over slots)."""

    batch: int
    rows: int
    slots: int
    operations: str = "rows"

    def __str__(self) -> str:
        return f"{self.operations} {self.batch}x{self.rows}, {self.slots} slots"


@dataclasses.dataclass(frozen=True)
class Pool:
    """Where rows come from: `tested` rows, whose results are compared, and two sets of others to fill a tile with.

    Attributes:
      tested: how many rows are compared.
      most: rows of the largest tile.
      filled: slots that hold a history, which every row sees.
    """

    tested: int
    most: int
    filled: int

    @property
    def size(self) -> int:
        return self.tested + 2 * self.most

    def filler(self, variant: int, columns: np.ndarray) -> np.ndarray:
        """Ids of filling rows for tile columns."""
        return self.tested + variant * self.most + columns

    def offsets(self, ids: np.ndarray) -> np.ndarray:
        """Position of each row after the history."""
        return np.where(ids < self.tested, ids, (ids - self.tested) % self.most)


@dataclasses.dataclass(frozen=True)
class Tile:
    """The rows of one call.

    Attributes:
      ids: [B, T] rows of the pool.
      slots: S.
      causal: whether rows see each other, as in decoding, or the history alone, so that a row computed in another tile
        has the same inputs to the bit.
    """

    ids: np.ndarray
    slots: int
    causal: bool = False


Run = Callable[[Tile], Results]  # but [B, T, n]


def cover_tested(shape: Shape, pool: Pool) -> list[Tile]:
    """Tiles that cover the tested rows once, filled up with other rows where they are larger."""
    width = shape.batch * shape.rows
    columns = np.arange(max(width, pool.tested))
    ids = np.where(columns < pool.tested, columns, pool.filler(0, columns))
    return [Tile(chunk.reshape(shape.batch, shape.rows), shape.slots) for chunk in ids.reshape(-1, width)]


def compute_tested(run: Run, shape: Shape, pool: Pool) -> Results:
    """Results of the tested rows, computed at this shape."""
    parts = [run(tile) for tile in cover_tested(shape, pool)]
    joined = {key: np.concatenate([p[key].reshape(-1, p[key].shape[-1]) for p in parts]) for key in parts[0]}
    return {key: value[: pool.tested] for key, value in joined.items()}


def compare_results(reference: Results, others: Mapping[int, Results]) -> dict[str, dict[str, Any]]:
    """Figures by operation and by what was varied, each against the reference."""
    return {
        key: {str(label): compare_bits(values, other[key]) for label, other in others.items() if key in other}
        for key, values in reference.items()
    }


def compare_company(run: Run, shape: Shape, pool: Pool) -> dict[str, dict[str, Any]]:
    """Two calls of one program, in which some rows keep their content and the others get new.

    In a batch the first row is kept and its neighbours change, with their histories. Otherwise rows see each other
    causally, the first rows are kept and what follows them changes.
    """
    width = shape.batch * shape.rows
    kept = 1 if shape.batch > 1 else min(pool.tested, width // 2)
    columns = np.arange(width)
    found = []
    for variant in (0, 1):
        ids = np.where(columns < kept, columns, pool.filler(variant, columns))
        results = run(Tile(ids.reshape(shape.batch, shape.rows), shape.slots, causal=shape.batch == 1))
        found.append({key: value.reshape(width, -1)[:kept] for key, value in results.items()})
    return {key: compare_bits(found[0][key], found[1][key]) for key in found[0]}


def compare_places(results: np.ndarray) -> dict[str, Any]:
    """Does exp or tanh of a number depend on its place in the vector? Takes results [rows, 2 n] of `exp_tanh`."""
    exp, tanh = np.split(results, 2, axis=1)
    back = [np.concatenate([np.roll(part[i], -i) for part in (exp, tanh)]) for i in range(len(results))]
    return compare_bits(np.stack([back[0]] * len(back)), np.stack(back))


def hash_array(x: np.ndarray) -> str:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
