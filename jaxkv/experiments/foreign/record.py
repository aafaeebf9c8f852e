"""The record of experiment 'foreign': one problem decoded elsewhere (jaxkv.foreign). Imports neither jax nor flax."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.record_parts import Count, Finite, require, require_length
from jaxkv.tasks.scoring import SCORERS

Stop = Literal["eos", "length", "stop_string"]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Versions = Annotated[dict[str, Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
Listed = list[Annotated[list[tuple[Count, Finite]], Meta(min_length=1)]]  # [token id, value] pairs of each token


class ForeignSampling(parts.Part, frozen=True):
    """How tokens were chosen, as far as the engine tells."""

    sampler: parts.Sampler
    temperature: Finite
    top_k: Count | None
    top_p: Finite | None
    seed: int | None


class Top(parts.Part, frozen=True):
    """What the engine listed of each token's distribution: [token id, value] pairs, the largest value first."""

    kind: Literal["logprobs", "logits"]
    steps: Listed

    def __post_init__(self) -> None:
        check_listed(self.steps, "steps")


def check_listed(steps: Listed, field: str) -> None:
    """Raises ValueError unless the ids of each token differ and their values fall."""
    for index, pairs in enumerate(steps):
        ids, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        require(f"{field}[{index}]", len(set(ids)) == len(ids), "a token id twice")
        require(f"{field}[{index}]", values == sorted(values, reverse=True), "not in falling order")


class ForeignArm(parts.Part, frozen=True):
    """An arm's own run; what is not known is None. `scores` are of `text` beside the right answer."""

    tokens: parts.Tokens
    text: str | None
    stop: Stop | None
    scores: dict[str, parts.Score] | None
    top: Top | None

    def __post_init__(self) -> None:
        if self.top is not None:
            require_length("top.steps", self.top.steps, len(self.tokens))
        if self.scores is not None:
            for scorer in SCORERS:
                require(f"scores.{scorer}", scorer in self.scores, "missing")


class ForeignArms(parts.Part, frozen=True):
    """The arms that ran, one or both."""

    cached: ForeignArm | UnsetType = UNSET
    uncached: ForeignArm | UnsetType = UNSET


class SharedPrefix(parts.Table, frozen=True):
    """The arms' `top` at the steps at which both had the same tokens before them, the first differing one included.

    `flip` says whether their first ids differ, `margin` is the uncached arm's first value minus its second, if it has
    one, and `max_abs` the largest difference among ids that both list, None where there is none.
    """

    flip: list[bool]
    margin: list[parts.Amount | None]
    max_abs: list[parts.Amount | None]


class ForeignRecord(parts.Record, frozen=True):
    """One problem decoded elsewhere. What the engine listed is no divergence over the whole vocabulary.

    `problem` is its index in the data, as in our record of it, `versions` are those of what decides numbers, and
    `prompt_sha256` is of the ids as little-endian int32. What is not known is None. `free_running` compares both arms'
    tokens, `label_change` says what became of the label from uncached to cached, and `shared_prefix` compares what the
    engine listed where both arms list the same kind.
    """

    problem: Count
    framework: str
    versions: Versions
    device: str | None
    precision: str | None
    attention: str | None
    prompt_tokens: Count | None
    prompt_sha256: Digest
    sampling: ForeignSampling | None
    arms: ForeignArms
    free_running: parts.FreeRunning | None
    label_change: dict[str, parts.LabelChange] | None
    shared_prefix: SharedPrefix | None

    def __post_init__(self) -> None:
        super().__post_init__()
        cached, uncached, prefix = self.arms.cached, self.arms.uncached, self.shared_prefix
        require("arms", bool(cached or uncached), f"neither {' nor '.join(parts.ARMS)}")
        if self.label_change is not None:
            for scorer in SCORERS:
                require(f"label_change.{scorer}", scorer in self.label_change, "missing")
        if cached is UNSET or uncached is UNSET:
            for name in ("free_running", "shared_prefix"):
                require(name, getattr(self, name) is None, "belongs to records of two arms")
            return
        require("free_running", self.free_running is not None, "belongs to all records of two arms")
        if self.free_running is not None:
            self.free_running.check(uncached.tokens, cached.tokens)
        most = min(len(cached.tokens), len(uncached.tokens))
        if prefix is not None:
            parts.require_most("shared_prefix", len(prefix.flip), most)
