"""The record of experiment 'accumulation': one problem, one quantizer, one regime. Imports neither jax nor flax.

The quantized run follows the clean cached run's tokens. In `static` every layer is handed the clean run's queries,
keys, values and attention output, so errors do not feed back. In `accumulated:B` the tokens after the prompt are run B
at a time, and everything later sees them as they were packed. `decode` runs them one by one.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import Amount, Count, require, require_length, require_most

FIGURES = ("attention_error", "logits", "stored", "repair", "instrumented_bit_equal")
Grid = list[list[Amount | None]]  # a row a layer, a column a bin


def _require_beside(field: str, column: Sequence[Any], counts: Sequence[int]) -> None:
    """Raises ValueError unless a column has a figure exactly where something was counted."""
    for index, (value, count) in enumerate(zip(column, counts, strict=True)):
        require(f"{field}[{index}]", (value is None) == (count == 0), f"{value} beside a count of {count}")


class Storage(parts.Part, frozen=True):
    """The cache's arrays for the batch at its `slots`, windows included, and bits per element."""

    bytes: Count
    clean_bytes: Count
    slots: Count
    bits: parts.Finite


class AttentionError(parts.Part, frozen=True):
    """Mean over positions of |a' - a| / |a|: the heads' output before projection, of the quantized and clean run."""

    error: Grid


class Logits(parts.Part, frozen=True):
    """Next-token distributions along the clean run's tokens, by the bin of the token that they follow.

    `kl` is the mean KL(clean || quantized) in nats, `agree` the steps with the same top token, of so many in `places`;
    both None without steps. Over all steps: `kl_sum`, `agree_sum`, `bit_equal` (all logits have the same bits).
    """

    kl: list[Amount | None]
    agree: list[Count | None]
    places: list[Count]
    kl_sum: Amount
    agree_sum: Count
    bit_equal: Count

    def check(self, steps: int, bins: int) -> None:
        """Raises ValueError unless the bins have the steps there are."""
        require_length("logits.places", self.places, bins)
        require("logits.places", sum(self.places) == steps, f"{sum(self.places)} of {steps} steps")
        for name in ("kl", "agree"):
            require_length(f"logits.{name}", getattr(self, name), bins)
            _require_beside(f"logits.{name}", getattr(self, name), self.places)
        for index, (agree, places) in enumerate(zip(self.agree, self.places, strict=True)):
            require_most(f"logits.agree[{index}]", agree or 0, places)
        require_most("logits.agree_sum", self.agree_sum, steps)
        require_most("logits.bit_equal", self.bit_equal, steps)


class Stored(parts.Table, frozen=True):
    """How the `packed` tokens that the cache holds at the end read beside the clean run's, a layer an entry.

    `relative`: L2 error over all of them relative to the clean ones' norm; `norm_share`: share of the squared error
    that is of norms (E_M) rather than of directions (E_D).
    """

    packed: list[Count]
    relative: list[Amount | None]
    norm_share: list[parts.Share | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_beside("relative", self.relative, self.packed)
        _require_beside("norm_share", self.norm_share, self.packed)


SIDES = parts.Sides.__struct_fields__


class Repair(parts.Part, frozen=True):
    """The error when an oracle corrects the norms of no token, the worst 5 %, the other 95 %, or all."""

    nothing: Grid
    worst: Grid
    others: Grid
    everything: Grid


REPAIRS = Repair.__struct_fields__


class Watched(parts.Part, frozen=True):
    """Steps at which a run that was watched has the logits of the arm unwatched; `changed` is of `decode` alone."""

    clean: Count
    changed: Count | None


class AccumulationRecord(parts.Traced, frozen=True):
    """One problem under one quantizer in one regime; `logits` of `decode` are the arm's, `repair` is in `static` alone.

    `bins` are positions of the text, up to the last token fed; none crosses the end of the prompt.
    """

    KEY: ClassVar = ("problem", "quantizer", "regime")
    FIGURES: ClassVar = ("bins", *FIGURES)
    LACKING: ClassVar = ("repair",)

    num_layers: Count
    quantizer: str
    regime: Annotated[str, Meta(pattern=r"^(static|decode|accumulated:[1-9][0-9]*)$")]
    storage: Storage
    saturated: parts.Saturated | None
    bins: list[parts.Range] | None
    attention_error: AttentionError | None
    logits: Logits | None
    stored: parts.Sides[Stored] | None
    repair: Repair | None
    instrumented_bit_equal: Watched | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bins is None or self.attention_error is None or self.logits is None or self.stored is None:
            return
        parts.require_bins("bins", self.bins, self.prompt_tokens + max(0, self.steps - 1))
        self.logits.check(self.steps, len(self.bins))
        for side in SIDES:
            require_length(f"stored.{side}.packed", getattr(self.stored, side).packed, self.num_layers)
        grids = {"attention_error.error": self.attention_error.error}
        if self.repair is not None:
            require("repair", self.regime == "static", f"present in regime {self.regime}")
            grids |= {f"repair.{name}": getattr(self.repair, name) for name in REPAIRS}
        for name, grid in grids.items():
            require_length(name, grid, self.num_layers)
            for layer, row in enumerate(grid):
                require_length(f"{name}[{layer}]", row, len(self.bins))
        if (watched := self.instrumented_bit_equal) is not None:
            field, fits = "instrumented_bit_equal", (watched.changed is not None) == (self.regime == "decode")
            require(f"{field}.changed", fits, f"{watched.changed} in regime {self.regime}")
            require_most(f"{field}.clean", watched.clean, self.steps)
            require_most(f"{field}.changed", watched.changed or 0, self.steps)
