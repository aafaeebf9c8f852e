"""The record of experiment 'patching': one problem, one direction, one patch. Imports neither jax nor flax.

"A into B": values of arm A replace those of B. Both run along the cached arm's tokens.
"""

import dataclasses
from typing import ClassVar, Literal

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import Amount, Count, require, require_length, require_most

DIRECTIONS = INTO_CACHED, INTO_UNCACHED = "uncached into cached", "cached into uncached"


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a patch replaces.

    The residual stream 'now' is that at the newest position of each step, which leaves no trace in the cache, and
    'everywhere' that at all positions, prompt included.
    """

    residual: str | None
    state: tuple[str, ...] = ()  # of 'k' and 'v', at all positions
    through: bool = False  # the stream after the last layer and after the final norm as well
    itself: bool = False  # by the recipient's own values


RESIDUAL_NOW, RESIDUAL, KEYS, VALUES, KEYS_VALUES = "residual now", "residual", "K", "V", "K and V"
EVERYTHING, ITSELF = "everything", "itself"
PATCHES = {
    RESIDUAL_NOW: Kind("now"),
    RESIDUAL: Kind("everywhere"),
    KEYS: Kind(None, ("k",)),
    VALUES: Kind(None, ("v",)),
    KEYS_VALUES: Kind(None, ("k", "v")),
    "residual now, K and V": Kind("now", ("k", "v")),
    "residual, K and V": Kind("everywhere", ("k", "v")),
    EVERYTHING: Kind("everywhere", ("k", "v"), through=True),
    ITSELF: Kind("everywhere", ("k", "v"), through=True, itself=True),
}
CONTROLS = (EVERYTHING, ITSELF)
COUNTS = ("recovered", "broken", "bit_equal")


class Gap(parts.Part, frozen=True):
    """The unpatched B beside A: the sum over steps of KL(A || B) in nats, argmax flips, steps with equal logits."""

    kl: Amount
    flips: Count
    bit_equal: Count


class Patched(parts.Part, frozen=True):
    """The patched B beside A: of the flips in `gap` how many are `recovered`; `broken` are flips the patch makes."""

    kl: Amount
    recovered: Count
    broken: Count
    bit_equal: Count


class ByLayer(parts.Table, frozen=True):
    """As `Patched`, one layer at a time: of the residual stream what enters it, and as layer L what leaves the last."""

    layer: list[Count]
    kl: list[Amount]
    recovered: list[Count]
    broken: list[Count]
    bit_equal: list[Count]


class Grid(parts.Part, frozen=True):
    """KL with one layer patched at the positions of one bin, a row a layer."""

    layer: list[Count]
    bins: list[parts.Range]
    kl: list[list[Amount]]

    def __post_init__(self) -> None:
        require_length("kl", self.kl, len(self.layer))
        for row in self.kl:
            require_length("kl", row, len(self.bins))


class Trajectory(parts.Part, frozen=True):
    """B running free, patched in all layers with the values of A's own free run of `steps` tokens.

    Into uncached, `until` comes from following A's tokens, which is the same up to there.
    """

    steps: Count
    parted: Count  # where the unpatched B first departs from A's tokens
    until: Count | None  # where the patched one does, None if never
    agreeing: Count | None  # of A's tokens from `parted` on, those that are met; None into uncached

    def __post_init__(self) -> None:
        require_most("agreeing", self.agreeing or 0, max(self.steps - self.parted, 0))


class PatchingRecord(parts.Traced, frozen=True):
    """One problem, one direction, one patch of PATCHES.

    `instrumented_bit_equal` counts the steps at which an arm's program that can be patched, unpatched, has the logits
    of its own.
    """

    KEY: ClassVar = ("problem", "direction", "patch")
    FIGURES: ClassVar = ("instrumented_bit_equal", "gap", "all", "unchanged", "by_layer", "grid", "trajectory")
    LACKING: ClassVar = ("by_layer", "grid", "trajectory")

    direction: Literal["uncached into cached", "cached into uncached"]
    patch: str
    heads: parts.Heads
    num_layers: Count
    instrumented_bit_equal: parts.Arms[Count] | None
    gap: Gap | None
    all: Patched | None  # layers 0 to L - 1 at once
    unchanged: Count | None  # steps at which the patched B has the bits of the unpatched
    by_layer: ByLayer | None
    grid: Grid | None
    trajectory: Trajectory | None  # None where A and B generate the same tokens

    def __post_init__(self) -> None:
        require("patch", self.patch in PATCHES, f"'{self.patch}' is not one of {', '.join(PATCHES)}")
        super().__post_init__()
        if self.instrumented_bit_equal is None or self.gap is None or self.all is None or self.unchanged is None:
            return
        steps, flips = self.steps, self.gap.flips
        parts.require_steps("instrumented_bit_equal", self.instrumented_bit_equal, steps)
        require_most("gap.flips", flips, steps)
        require_most("gap.bit_equal", self.gap.bit_equal, steps - flips)
        require_most("unchanged", self.unchanged, steps)
        for name, most in zip(COUNTS, (flips, steps - flips, steps), strict=True):
            require_most(f"all.{name}", getattr(self.all, name), most)
            require_most(f"by_layer.{name}", max(getattr(self.by_layer, name, ()), default=0), most)
        require_most("by_layer.layer", max(self.by_layer.layer if self.by_layer else (), default=0), self.num_layers)
        missing = self.trajectory is not None and self.trajectory.agreeing is None
        require("trajectory.agreeing", not missing or self.direction == INTO_UNCACHED, "missing")
