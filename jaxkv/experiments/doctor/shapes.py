"""Does a row's result depend on what it is computed with? Rows, tiles of rows, and how results are compared.

Rows come from a pool and keep their content and their position whatever program computes them; what changes is only
the program's shape (B batch, T rows, S slots), or the rows in their company. What computes is a parameter throughout.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.models.families import get_preset

Results = dict[str, np.ndarray]  # operation -> [rows, n]


def compare_bits(reference: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """How many elements of two results of one dtype have other bits, so that -0 is not +0, and by how much at most.

    `max_ulp` is in units in the last place of the larger of the two elements and the root mean square of the reference,
    below which a unit would only tell of cancellation. Where anything is not finite both figures are None, since NaN is
    no agreement. Raises ValueError where the shapes or dtypes differ.
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
    one, two = (np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in (reference, other))
    return figure | {"differ": int(np.count_nonzero(one != two)), "max_ulp": float(np.max(np.abs(a - b) / ulp))}


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


def _one_layer() -> ModelConfig:
    return dataclasses.replace(get_preset("smollm2-135m"), num_layers=1)


def default_workers() -> int:
    """Programs compiled at a time; on a GPU few, since XLA times kernels under a lock and none may be late."""
    return min(3 if jax.default_backend() == "gpu" else 4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class DoctorSpec:
    """What is measured, and the pool that rows come from.

    Of the pool the `tested` rows are compared, and two sets of others fill a tile up. What is not compiled in time is
    listed as missing.
    """

    dtypes: tuple[str, ...] = ("fp16", "bf16", "fp32")  # of the policies
    rows: tuple[int, ...] = (1, 4, 8, 16, 64, 256)  # row counts; the first is what the others are compared with
    slots: tuple[int, ...] = (128, 256, 512, 1024)  # slot counts at one row, likewise
    batches: tuple[int, ...] = (2, 8)  # batch sizes of one row each, compared with a row alone
    filled: int = 100  # slots that hold a history, whatever the number of slots
    tested: int = 16  # rows that are compared, a multiple of every smaller row count and batch size
    process_rows: tuple[int, ...] = (1, 16)  # row counts whose results a second process computes too
    config: ModelConfig = dataclasses.field(default_factory=_one_layer)
    wide: tuple[int, int] = (4096, 1024)  # inputs and outputs of the long matmul
    seed: int = 0  # of all contents
    workers: int = dataclasses.field(default_factory=default_workers)
    seconds: float = 44.0  # how long compilations may begin so that all is done in about a minute
    child_seconds: float = 50.0  # a second process that takes longer is given up; it runs beside this one

    def to_json(self) -> dict[str, Any]:
        """Plain values, which msgspec makes an equal spec of again."""
        return msgspec.json.decode(msgspec.json.encode(self))

    @property
    def pool_size(self) -> int:
        return self.tested + 2 * max(self.rows)

    def filler(self, variant: int, columns: np.ndarray) -> np.ndarray:
        """Ids of filling rows for tile columns."""
        return self.tested + variant * max(self.rows) + columns

    def offsets(self, ids: np.ndarray) -> np.ndarray:
        """Position of each row after the history."""
        return np.where(ids < self.tested, ids, (ids - self.tested) % max(self.rows))

    def row_shape(self, rows: int, batch: int = 1) -> Shape:
        """Shape of a program that computes `rows` rows; all have slots enough for the largest."""
        return Shape(batch, rows, -(-(self.filled + max(self.rows)) // 128) * 128)

    def slot_shape(self, slots: int) -> Shape:
        return Shape(1, 1, slots, "slots")


@dataclasses.dataclass(frozen=True)
class Tile:
    """The rows of one call.

    They see each other if `causal`, as in decoding, else the history alone, so that a row computed in another tile has
    the same inputs to the bit.
    """

    ids: np.ndarray  # [B, T] rows of the pool
    slots: int
    causal: bool = False


Run = Callable[[Tile], Results]  # but [B, T, n]


def cover_tested(shape: Shape, spec: DoctorSpec) -> list[Tile]:
    """Tiles that cover the tested rows once, filled up with other rows where they are larger."""
    width = shape.batch * shape.rows
    columns = np.arange(max(width, spec.tested))
    ids = np.where(columns < spec.tested, columns, spec.filler(0, columns))
    return [Tile(chunk.reshape(shape.batch, shape.rows), shape.slots) for chunk in ids.reshape(-1, width)]


def compute_tested(run: Run, shape: Shape, spec: DoctorSpec) -> Results:
    """Results of the tested rows, computed at this shape."""
    parts = [run(tile) for tile in cover_tested(shape, spec)]
    joined = {key: np.concatenate([p[key].reshape(-1, p[key].shape[-1]) for p in parts]) for key in parts[0]}
    return {key: value[: spec.tested] for key, value in joined.items()}


def compare_company(run: Run, shape: Shape, spec: DoctorSpec) -> dict[str, dict[str, Any]]:
    """Two calls of one program, in which some rows keep their content and the others get new.

    In a batch the first row is kept and its neighbours change, with their histories. Otherwise rows see each other
    causally, the first rows are kept and what follows them changes.
    """
    width = shape.batch * shape.rows
    kept = 1 if shape.batch > 1 else min(spec.tested, width // 2)
    columns = np.arange(width)
    found = []
    for variant in (0, 1):
        ids = np.where(columns < kept, columns, spec.filler(variant, columns))
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
