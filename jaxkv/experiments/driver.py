"""The one loop of all experiments: which records of a batch are missing, how they are run, and what that took.

A batch is run whole if any of its problems lacks a record, so that its shape, and with it every bit, is that of an
undisturbed run.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from flax import nnx

from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.config import ModelConfig, Precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Batch, Item, RunSpec, plan_batches
from jaxkv.experiments.experiment import EXPERIMENTS
from jaxkv.models.attention import OTHERS
from jaxkv.options import Options
from jaxkv.sampling import Sampler

Key = tuple[str | int, ...]
Line = dict[str, Any]  # of samples.jsonl or timing.jsonl
Begun = TypeVar("Begun")  # what the variants of a batch share
Variant = TypeVar("Variant")
Ran = TypeVar("Ran")  # what came of a variant


@dataclasses.dataclass(frozen=True)
class Condition:
    """One set of options with model and problems loaded. Programs and prepared weights are made when first asked for.

    Attributes:
      options: of the condition.
      precision: policy.
      checkpoint: model.
      task: problems with prompts and scores (Task), or a text in windows (Text).
      items: the problems as token ids, of a text the windows' contexts.
      spec: how they are run.
      sampler: how tokens are chosen.
      tile: rows of a tile in the aligned regime.
    """

    options: Options
    precision: Precision
    checkpoint: Checkpoint
    task: Any
    items: list[Item]
    spec: RunSpec
    sampler: Sampler
    tile: int

    @functools.cached_property
    def plain(self) -> Arms:
        """Arms of the plain regime."""
        return self._make_arms(None)

    @functools.cached_property
    def aligned(self) -> Arms:
        """Arms of the aligned one."""
        return self._make_arms(self.tile)

    def _make_arms(self, tile: int | None) -> Arms:
        attention = self.options.run.attention  # or PyTorch's alone
        return share_arms(
            self.checkpoint.config, self.precision, self.sampler, tuple(self.checkpoint.tokenizer.eos_ids), tile,
            attention if attention in OTHERS else "eager",
        )  # fmt: skip

    @property
    def arms(self) -> Arms:
        """Arms of the regime asked for."""
        return self.aligned if self.options.controls.regime == "aligned" else self.plain

    @functools.cached_property
    def state(self) -> nnx.State:
        """Weights as the arms take them, which the checkpoint then holds too: two copies may not fit."""
        return self.arms.prepare_in_place(self.checkpoint.state)


@functools.lru_cache(maxsize=4)  # two regimes, fp32 beside them and another precision: all that one comparison asks for
def share_arms(
    config: ModelConfig,
    precision: Precision,
    sampler: Sampler,
    stop_ids: tuple[int, ...],
    tile: int | None,
    attention: str = "eager",
) -> Arms:
    """Arms that conditions of one process share if they would compile the same: a program is compiled once for all."""
    return Arms(config, precision, sampler, stop_ids, tile=tile, attention=attention)


@dataclasses.dataclass(frozen=True)
class Took:
    """Wall time and tokens by what ran, and what else a line of timing.jsonl has."""

    seconds: Mapping[str, float]
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Examination:
    """An experiment that gives one record, of programs or a device, before it is run.

    Attributes:
      config: all that decides its figures, for run.json.
      run: makes the record.
      doing: what it does, for who waits.
    """

    config: dict[str, Any]
    run: Callable[[], Line]
    doing: str


class Runner(Generic[Begun, Variant, Ran]):
    """Runs an experiment of a condition: which variants there are, and how a batch of problems is run.

    Attributes:
      name: of the experiment.
      grows: whether more variants may be asked of a run directory later; its sessions then say which were.
      together: most batches that are begun together.
      variants: by what a record's key has after the problem; each has one record a problem.
    """

    name: ClassVar[str]
    grows: ClassVar[bool] = False
    together: int = 1

    def __init__(self, spec: RunSpec, variants: Mapping[Key, Variant]):
        self.spec, self.variants = spec, variants

    def describe(self) -> dict[str, Any]:
        """What else decides its numbers, for the config of a run directory."""
        return {}

    def plan(self, items: Sequence[Item]) -> list[Batch]:
        """The batches, whatever is missing of them."""
        return plan_batches(items, self.spec)

    def begin(self, batch: Batch, missing: Sequence[Variant]) -> Begun:
        """Runs what all variants of a batch share."""
        raise NotImplementedError

    def begin_together(self, todo: Sequence[tuple[Batch, Sequence[Variant]]]) -> Sequence[Begun]:
        """`begin` of each batch, with the variants that it lacks."""
        return [self.begin(*one) for one in todo]

    def run(self, begun: Begun, variant: Variant) -> Ran:
        """Runs one variant of a batch."""
        raise NotImplementedError

    def tell_time(self, begun: Begun, ran: Ran, seconds: float) -> Took:
        """What a variant took, `seconds` in all."""
        del begun, ran
        return Took({"run": seconds})

    def record(self, item: Item, row: int, begun: Begun, variant: Variant, ran: Ran) -> Line:
        """The record of one row of a batch."""
        raise NotImplementedError


class ArmsRunner(Runner[Begun, Variant, Ran]):
    """Runs an experiment on one model.

    Attributes:
      arms: its programs, which keep logits.
      state: their prepared weights.
    """

    def __init__(self, arms: Arms, state: nnx.State, spec: RunSpec, variants: Mapping[Key, Variant]):
        super().__init__(spec, variants)
        self.arms, self.state = arms, state


def run_missing(
    runner: Runner[Begun, Variant, Ran], items: Sequence[Item], done: frozenset[Key] = frozenset()
) -> Iterator[tuple[list[Line], Line]]:
    """Yields, batch by batch and variant by variant, the records not yet done and their timing.

    Args:
      runner: of an experiment.
      items: the problems.
      done: (problem, *key of the variant) of the records that are there.

    Raises:
      UserError: a prompt that does not fit the context.
    """

    def lacks(batch: Batch, key: Key) -> list[tuple[int, Item]]:
        return [(row, item) for row, item in enumerate(batch.items) if (item.problem, *key) not in done]

    def run_group(group: Sequence[tuple[Batch, list[Key]]]) -> Iterator[tuple[list[Line], Line]]:
        begun = runner.begin_together([(batch, [runner.variants[key] for key in keys]) for batch, keys in group])
        for (batch, keys), shared in zip(group, begun, strict=True):
            for key in keys:
                yield run_variant(batch, key, shared)

    def run_variant(batch: Batch, key: Key, shared: Begun) -> tuple[list[Line], Line]:
        variant, start = runner.variants[key], time.perf_counter()
        ran = runner.run(shared, variant)
        took = runner.tell_time(shared, ran, time.perf_counter() - start)
        records = [runner.record(item, row, shared, variant, ran) for row, item in lacks(batch, key)]
        about: Line = {"experiment": runner.name, "problems": [item.problem for item in batch.items]}
        about |= dict(zip(EXPERIMENTS[runner.name].record.KEY[1:], key, strict=True))
        return records, about | {"seconds": took.seconds, "tokens": took.tokens, **took.more}

    # Functions of their own, so that logits and caches of what is done are gone before the next is run.
    todo = [(batch, [key for key in runner.variants if lacks(batch, key)]) for batch in runner.plan(items)]
    todo = [(batch, keys) for batch, keys in todo if keys]
    for first in range(0, len(todo), runner.together):
        yield from run_group(todo[first : first + runner.together])
