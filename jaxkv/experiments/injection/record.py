"""The record of experiment 'injection': a problem under one change of the cache. Imports neither jax nor flax."""

from typing import ClassVar

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import CLEAN, require


class InjectionRecord(parts.Setting, frozen=True):
    """A problem under a change of the cache, `change` as a command has it. The clean cached arm is "none" of seed 0.

    `seed` keys the error, not the sampler, and is 0 where nothing is drawn. `run` is the changed arm on its own,
    `free_running` its tokens beside the clean arm's, `teacher_forced` its logits along the clean arm's tokens.
    """

    KEY: ClassVar = ("problem", "change", "seed")
    FIGURES: ClassVar = ("teacher_forced", "free_running")
    LACKING: ClassVar = FIGURES

    change: str
    seed: int
    spec: parts.ErrorSpec | parts.QuantSpec | None
    run: parts.Generation
    teacher_forced: parts.Comparison | None
    free_running: parts.FreeRunning | None
    cache: parts.CacheSize
    saturated: parts.Saturated | None

    def __post_init__(self) -> None:
        super().__post_init__()
        parts.require_spec(self.change, self.spec)
        if self.status == "invalid":
            return
        require("run.stop", self.run.stop != "invalid", "'invalid' in a record with status ok")
        clean = self.change == CLEAN
        told = "the clean arm is compared with nothing; expected null" if clean else "missing"
        for name in self.FIGURES:
            require(name, (getattr(self, name) is None) == clean, told)
        tokens = len(self.run.tokens if self.teacher_forced is None else self.teacher_forced.flip)
        fed = self.prompt_tokens + max(tokens - 1, 0)  # the prompt and all but the last of the clean arm's tokens
        require("cache.written", self.cache.written == fed, f"{self.cache.written} tokens beside {fed} that were fed")
