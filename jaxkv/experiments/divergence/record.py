"""The record of experiment 'divergence': one problem decoded by both arms. Imports neither jax nor flax."""

from typing import ClassVar, Final, Literal

from msgspec import UNSET, UnsetType

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import ARMS, Comparison, require, require_length, require_most

DEFAULT_FRAMEWORK: Final = "jax"


class Controls(parts.Part, frozen=True):
    """Comparisons that should find nothing: of an arm run again, run in programs of another length, and step by step.

    The last sets the uncached arm's own run by draft and check beside brute force, as far as both go.
    """

    cached_rerun: Comparison | None
    uncached_rerun: Comparison | None
    uncached_other_length: Comparison | None
    uncached_stepwise: Comparison | None


CONTROLS = Controls.__struct_fields__


class DivergenceRecord(parts.Setting, frozen=True, kw_only=True, omit_defaults=True):
    """One problem decoded by both arms.

    Attributes:
      framework: what ran them.
      attention: PyTorch's implementation; of its path alone, as are `versions` (package -> version).
      arms: the arms' own runs, scored alike.
      teacher_forced: cached against uncached logits along the cached arm's tokens.
      free_running: the arms' own tokens compared.
      truth: distances to a float64 run along the cached arm's tokens, where one was made; `truth_left_out` says why one
        that was asked for is missing.
      label_change: what became of the label from uncached to cached, by scorer.
    """

    FIGURES: ClassVar = ("teacher_forced", "free_running")
    LACKING: ClassVar = FIGURES

    framework: Literal["jax", "torch"] = DEFAULT_FRAMEWORK
    attention: str | UnsetType = UNSET
    versions: dict[str, str] | UnsetType = UNSET
    arms: parts.Arms[parts.Generation]
    teacher_forced: Comparison | None
    free_running: parts.FreeRunning | None
    controls: Controls
    truth: parts.Arms[parts.Distance] | UnsetType | None = UNSET
    truth_left_out: str | UnsetType = UNSET
    label_change: dict[str, parts.LabelChange]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("attention", "versions") if self.framework != DEFAULT_FRAMEWORK else ():
            require(name, getattr(self, name) is not UNSET, "missing")
        cached, uncached = self.arms.cached, self.arms.uncached
        parts.require_names("arms.uncached.scores", uncached.scores, cached.scores)
        along = {"teacher_forced": self.teacher_forced}
        along |= {f"controls.{name}": getattr(self.controls, name) for name in CONTROLS}
        if self.status == "invalid":
            for name, comparison in along.items():
                require(name, comparison is None, parts.NO_AGREEMENT)
            return
        if (brute := along.pop("controls.uncached_stepwise")) is not None:
            require_most("controls.uncached_stepwise", len(brute.flip), len(uncached.tokens))
        columns = {name: comparison.flip for name, comparison in along.items() if comparison is not None}
        for arm in ARMS:
            stop = getattr(self.arms, arm).stop
            require(f"arms.{arm}.stop", stop != "invalid", "'invalid' in a sample with status ok")
            if self.truth:
                columns[f"truth.{arm}"] = getattr(self.truth, arm).flip
        for name, column in columns.items():
            require_length(name, column, len(cached.tokens))
        if self.free_running is not None:
            self.free_running.check(uncached.tokens, cached.tokens)
        for scorer, score in cached.scores.items():
            same = score.correct == uncached.scores[scorer].correct
            told = self.label_change.get(scorer, "missing")
            fits = told != "missing" and (told == "same") == same
            require(f"label_change.{scorer}", fits, f"{told} beside the scores of the arms")
