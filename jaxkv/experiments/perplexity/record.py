"""The record of experiment 'perplexity': one window of a text. Imports neither jax nor flax."""

from typing import Annotated, ClassVar

from msgspec import Meta

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import Count, require

FIGURES = ("nats", "logits")


class PerplexityRecord(parts.Traced, frozen=True):
    """One window of a text under one change of the cached arm's cache, as in 'injection'. `sampling` decides nothing.

    `problem` is the window's place, `tokens` those scored after the `prompt_tokens` given; `bytes` and `words` are what
    they stand for in the text. `nats` is the sum of -ln p over them: an arm is fed the text's own tokens, cached one by
    one through the cache, uncached by recomputing each prefix. The last token of a window is fed to nobody.
    """

    KEY: ClassVar = ("problem", "change", "seed")
    FIGURES: ClassVar = FIGURES

    change: str
    seed: int
    spec: parts.ErrorSpec | parts.QuantSpec | None
    tokens: Annotated[int, Meta(gt=0)]
    bytes: Count
    words: Count
    nats: parts.Arms[parts.Amount] | None
    logits: parts.LogitSums | None
    cache: parts.CacheSize
    saturated: parts.Saturated | None

    def __post_init__(self) -> None:
        super().__post_init__()
        parts.require_spec(self.change, self.spec)
        if self.nats is None or self.logits is None:
            return
        require("steps", self.steps == self.tokens, f"{self.steps} beside {self.tokens} tokens to score")
        self.logits.check("logits", self.tokens)
        fits = self.logits.bit_equal < self.tokens or self.nats.cached == self.nats.uncached
        require("nats", fits, "the arms differ although all their logits are equal")
