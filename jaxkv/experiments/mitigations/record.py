"""The record of experiment 'mitigations': one problem under one variant. Imports neither jax nor flax."""

from typing import Any, ClassVar

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import ARMS, Distance, require, require_length


class Held(parts.Part, frozen=True):
    """Dtypes in which weights and operands lie on the device."""

    param: str
    operand: str


class ArmTokens(parts.Arms[parts.Tokens], frozen=True):
    """Each arm's own tokens; `fp64` are those of the cached arm in float64."""

    fp64: parts.Tokens


class References(parts.Part, frozen=True):
    """An arm's distance from a float64 run of the weights as given, and as rounded to the variant's param dtype."""

    given: Distance
    rounded: Distance


REFERENCES = References.__struct_fields__


class Distances(parts.Arms[References], frozen=True):
    """Distances along the fp64 tokens; `weights` is that between the two float64 runs."""

    weights: Distance


class MitigationsRecord(parts.Setting, frozen=True):
    """One problem under one variant, whose policy is `precision` (jaxkv.config.Precision.to_json).

    `teacher_forced`: cached against uncached logits along the cached arm's tokens; `free_running`: the arms' own.
    """

    KEY: ClassVar = ("problem", "variant")
    FIGURES: ClassVar = ("teacher_forced", "free_running", "distance")

    variant: str
    precision: dict[str, Any]
    held: Held
    tokens: ArmTokens
    teacher_forced: parts.Comparison | None
    free_running: parts.FreeRunning | None
    distance: Distances | None

    def __post_init__(self) -> None:
        super().__post_init__()
        require("precision.name", isinstance(self.precision.get("name"), str), "missing")
        if self.teacher_forced is None or self.free_running is None or self.distance is None:
            return
        require_length("teacher_forced", self.teacher_forced.flip, len(self.tokens.cached))
        self.free_running.check(self.tokens.uncached, self.tokens.cached)
        found = {f"{arm}.{name}": getattr(getattr(self.distance, arm), name) for arm in ARMS for name in REFERENCES}
        for name, distance in (found | {"weights": self.distance.weights}).items():
            require_length(f"distance.{name}", distance.flip, len(self.tokens.fp64))
