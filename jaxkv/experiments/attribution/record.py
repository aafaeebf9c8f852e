"""The record of experiment 'attribution': one problem, one variant. Imports neither jax nor flax."""

from typing import ClassVar

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import Count, require

OP_CLASSES = ("norms", "qkv", "rope", "scores", "attention", "output", "mlp", "head")
PROGRAMS = ("prefill", "decode", "recompute")
PLAIN, FENCED, ALL = "none", "fenced", "all"
ALONE = {name: f"{name} alone" for name in (*OP_CLASSES, *PROGRAMS)}
ALL_BUT = {name: f"all but {name}" for name in OP_CLASSES}
Aligned = dict[str, list[str]] | None


def _everywhere(*classes: str) -> dict[str, list[str]]:
    return {program: list(classes) for program in PROGRAMS}


VARIANTS: dict[str, Aligned] = {  # name -> what each program aligns, in the order of the table
    PLAIN: None,
    FENCED: _everywhere(),
    **{ALONE[name]: _everywhere(name) for name in OP_CLASSES},
    **{ALL_BUT[name]: _everywhere(*(c for c in OP_CLASSES if c != name)) for name in OP_CLASSES},
    **{ALONE[name]: _everywhere() | {name: list(OP_CLASSES)} for name in PROGRAMS},
    ALL: _everywhere(*OP_CLASSES),
}


class AttributionRecord(parts.Sample, frozen=True):
    """One problem under one variant of VARIANTS, along the tokens of the plain cached arm.

    `teacher_forced` sets the variant's cached logits beside its uncached ones. `moved` counts the steps at which an
    arm's have other bits than in the variant 'fenced', whose operations are cut apart alike and none aligned.
    """

    KEY: ClassVar = ("problem", "variant")
    FIGURES: ClassVar = ("teacher_forced", "moved")

    variant: str
    aligned: Aligned  # the classes that each program computes in tiles; None for the plain programs
    tile: Count
    tokens_sha256: str
    steps: Count
    shapes: parts.Rows
    teacher_forced: parts.Comparison | None
    moved: parts.Arms[Count] | None

    def __post_init__(self) -> None:
        require("variant", self.variant in VARIANTS, f"'{self.variant}' is not one of {', '.join(VARIANTS)}")
        super().__post_init__()
        fits = self.aligned == VARIANTS[self.variant]
        require("aligned", fits, f"not what variant '{self.variant}' aligns: {self.aligned!r:.60}")
        if self.teacher_forced is None or self.moved is None:
            return
        parts.require_length("teacher_forced", self.teacher_forced.flip, self.steps)
        parts.require_steps("moved", self.moved, self.steps if self.variant != FENCED else 0)
