"""The record of experiment 'parity': one problem in four cells. Imports neither jax nor flax."""

import itertools
from typing import Annotated, ClassVar

from msgspec import Meta

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import Amount, Count, Tokens, require, require_length, require_names

CELLS = ("jax uncached", "jax cached", "torch uncached", "torch cached")


def name_pair(first: str, second: str) -> str:
    """The name of a pair of cells."""
    return f"{first} | {second}"


PAIRS = {name_pair(a, b): (a, b) for a, b in itertools.combinations(CELLS, 2)}
CACHE_PAIRS = {"jax": "jax uncached | jax cached", "torch": "torch uncached | torch cached"}
FRAMEWORK_PAIRS = {"uncached": "jax uncached | torch uncached", "cached": "jax cached | torch cached"}
Cosine = Annotated[float, Meta(ge=-1.000001, le=parts.LARGEST)]


class Depths(parts.Table, frozen=True):
    """A distance as the stream enters each layer and the final norm: mean and largest over the tokens."""

    mean: list[Amount]
    max: list[Amount]


class Stream(parts.Part, frozen=True):
    """The residual stream in the rows that give the logits, by programs that also give it out.

    Attributes:
      bit_equal: tokens at which their logits have the bits of the cell's own program.
      distance: ||a - b|| over the root mean square of ||a|| and ||b||, by pair of cells.
    """

    bit_equal: dict[str, Count]
    distance: dict[str, Depths]


class ParityRecord(parts.Setting, frozen=True):
    """One problem in four cells, all of which follow the tokens of JAX's cached arm.

    Attributes:
      attention: PyTorch's implementation; `versions` are of packages.
      torch_uncached: how PyTorch's uncached arm runs.
      tokens: ids; every list below has an entry for each.
      choices: each cell's argmax.
      pairs: comparisons; a pair's first cell is the reference.
      cosine: between what the cache does to the logits in the two frameworks: JAX's cached minus uncached logits and
        PyTorch's, each less its mean; None where either is zero.
    """

    FIGURES: ClassVar = ("choices", "pairs", "cosine", "layers")

    attention: str
    versions: dict[str, str]
    torch_uncached: str
    tokens: Tokens
    choices: dict[str, Tokens] | None
    pairs: dict[str, parts.Comparison] | None
    cosine: list[Cosine | None] | None
    layers: Stream | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choices is None or self.pairs is None or self.cosine is None or self.layers is None:
            return
        require_names("choices", self.choices, CELLS)
        require_names("pairs", self.pairs, PAIRS)
        require_names("layers.bit_equal", self.layers.bit_equal, CELLS)
        require_names("layers.distance", self.layers.distance, PAIRS)
        for cell, equal in self.layers.bit_equal.items():
            parts.require_most(f"layers.bit_equal.{cell}", equal, len(self.tokens))
            require_length(f"choices.{cell}", self.choices[cell], len(self.tokens))
        for pair, comparison in self.pairs.items():
            require_length(f"pairs.{pair}", comparison.flip, len(self.tokens))
        require_length("cosine", self.cosine, len(self.tokens))
        depths = {len(distance.mean) for distance in self.layers.distance.values()}
        require("layers.distance", len(depths) == 1, f"lists of unequal length: {sorted(depths)}")
