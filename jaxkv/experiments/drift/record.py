"""The record of experiment 'drift': one problem. Imports neither jax nor flax.

Both arms run along the cached arm's tokens; every figure sets the cached arm's value beside the uncached one's.
"""

import itertools
from typing import ClassVar, Generic, TypeVar

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import Amount, Count, require, require_length

T = TypeVar("T")


class Segments(parts.Part, Generic[T], frozen=True):
    """Of the positions of the prompt, and of generated tokens that were fed back."""

    prompt: T
    decoded: T


class Tensors(parts.Part, Generic[T], frozen=True):
    """Of each tensor. Columns have one entry a layer, those of `resid_pre` one more, after the last layer."""

    resid_pre: T
    k: T
    v: T
    attn_out: T
    mlp_out: T


SEGMENTS, TENSORS = Segments.__struct_fields__, Tensors.__struct_fields__


class Watched(parts.Part, frozen=True):
    """Steps at which an arm so watched has the logits of the arm unwatched, bit for bit.

    The less is read, the nearer a program stays to the arm's own: `walk` watches every value, `figures` TENSORS alone.
    """

    figures: parts.Arms[Count]
    walk: parts.Arms[Count]


WATCHED = Watched.__struct_fields__


class Columns(parts.Table, frozen=True):
    """A tensor over layers."""

    relative: list[Amount]  # L2 norm of the difference over that of the uncached value, mean over positions
    cosine: list[Amount]  # 1 - cos of their angle, mean over positions
    max_abs: list[Amount]  # largest difference
    bit_equal: list[Count]  # positions at which all bits are equal

    def check(self, field: str, layers: int, places: int) -> None:
        """Raises ValueError unless there are so many layers and places."""
        require_length(field, self.relative, layers)
        for index, (equal, relative) in enumerate(zip(self.bit_equal, self.relative, strict=True)):
            fits = equal < places or (equal == places and not relative)
            require(f"{field}.bit_equal[{index}]", fits, f"{equal} of {places}, beside a difference of {relative}")


Layers = Tensors[Segments[Columns | None]]


class GridFigures(parts.Part, frozen=True):
    """As `Columns`, a row a layer and a column a bin; `bit_equal` is a share."""

    relative: list[list[Amount]]
    cosine: list[list[Amount]]
    bit_equal: list[list[parts.Share]]


class Grid(Tensors[GridFigures], frozen=True):
    """Figures by bins of positions of the text."""

    bins: list[parts.Range]


class Difference(parts.Part, frozen=True):
    """The first value, in order of execution, that differs in bits or dtype."""

    op: str
    layer: Count | None
    position: Count  # of the first place at which it differs
    dtypes: tuple[str, str]  # of the cached and the uncached arm
    max_abs: Amount  # largest difference
    relative: Amount  # L2 norm of the difference over that of the uncached value
    places: Count  # at which it differs

    def __str__(self) -> str:
        of = "" if self.layer is None else f" of layer {self.layer}"
        kinds = " beside ".join(dict.fromkeys(self.dtypes))
        size = f"max |diff| {self.max_abs:.2g}, relative {self.relative:.2g}, {self.places} rows"
        return f"first in {self.op}{of} at position {self.position} ({kinds}, {size})"


class Path(parts.Table, frozen=True):
    """Every value from the first that differs to the logits, over the decoded positions."""

    name: list[str]
    relative: list[Amount]
    max_abs: list[Amount]
    bit_equal: list[Count]


class Repeated(parts.Part, frozen=True):
    """The equal model whose K/V heads are repeated until there is one for each query head."""

    layers: Layers
    logits: parts.LogitSums


class DriftRecord(parts.Traced, frozen=True):
    """One problem, layer by layer.

    `layers`, `logits` and `grid` are of the watching that reads the less, `first` and `path` of the walk.
    """

    FIGURES: ClassVar = ("instrumented_bit_equal", "places", "layers", "logits", "grid", "first", "path", "repeated")
    LACKING: ClassVar = ("repeated",)

    heads: parts.Heads
    num_layers: Count
    instrumented_bit_equal: Watched | None  # whether watching changed a bit
    places: Segments[Count] | None  # positions compared; a segment without any has no columns
    layers: Layers | None
    logits: parts.LogitSums | None
    grid: Grid | None
    first: Segments[Difference | None] | None
    path: Path | None
    repeated: Repeated | None  # None if the model has as many K/V heads as query heads

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.instrumented_bit_equal is None or self.layers is None or self.logits is None or self.grid is None:
            return
        for name in WATCHED:
            counts = getattr(self.instrumented_bit_equal, name)
            parts.require_steps(f"instrumented_bit_equal.{name}", counts, self.steps)
        self._check_layers("layers", self.layers)
        self.logits.check("logits", self.steps)
        self._check_grid(self.grid)
        query, kv = self.heads.query, self.heads.kv
        told = f"{'missing' if self.repeated is None else 'present'} beside {kv} K/V heads of {query}"
        require("repeated", (self.repeated is None) == (query == kv), told)
        if self.repeated is not None:
            self._check_layers("repeated.layers", self.repeated.layers)
            self.repeated.logits.check("repeated.logits", self.steps)

    def _check_layers(self, field: str, layers: Layers) -> None:
        for tensor, segment in itertools.product(TENSORS, SEGMENTS):
            here, places = f"{field}.{tensor}.{segment}", getattr(self.places, segment)
            columns: Columns | None = getattr(getattr(layers, tensor), segment)
            require(here, (columns is None) == (places == 0), f"beside {places} places")
            if columns is not None:
                columns.check(here, self.num_layers + (tensor == "resid_pre"), places)

    def _check_grid(self, grid: Grid) -> None:
        parts.require_bins("grid.bins", grid.bins, sum(getattr(self.places, segment) for segment in SEGMENTS))
        for tensor, name in itertools.product(TENSORS, GridFigures.__struct_fields__):
            rows, here = getattr(getattr(grid, tensor), name), f"grid.{tensor}.{name}"
            require_length(here, rows, self.num_layers + (tensor == "resid_pre"))
            for row in rows:
                require_length(here, row, len(grid.bins))
