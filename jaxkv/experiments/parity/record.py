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
    """The residual stream in the rows that give the logits, by programs that also give it out."""

    bit_equal: dict[str, Count]  # tokens at which their logits have the bits of the cell's own program
    distance: dict[str, Depths]  # ||a - b|| over the root mean square of ||a|| and ||b||, by pair of cells


class ParityRecord(parts.Setting, frozen=True):
    """One problem in four cells along the tokens of JAX's cached arm, with an entry for each of these in every list.

    `choices` are each cell's argmax, and a pair's first cell is its reference. `cosine` is between what the cache does
    to the logits in the two frameworks: cached minus uncached, less its mean; None where either is zero.
    """

    FIGURES: ClassVar = ("choices", "pairs", "cosine", "layers")

    attention: str  # PyTorch's implementation
    versions: dict[str, str]  # of packages
    torch_uncached: str  # how PyTorch's uncached arm runs
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
