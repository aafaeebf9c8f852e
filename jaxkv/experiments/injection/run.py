"""What does a model make of a changed cache? The clean cached arm against the same arm with its cache changed.

Weights, tokens and the sampler's noise are the same. The clean arm runs freely. The changed arm then follows its tokens
(teacher-forced: figures per step, free of compounding) and runs freely from the prompt (what a user would get). Seeds,
and the levels of one law of error, are values in the cache, so they share a program; each quantizer compiles its own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxkv.checkpoints.tokenizer import AnyTokenizer
from jaxkv.decode import Arms
from jaxkv.experiments import batches, cache_measures
from jaxkv.experiments.batches import Batch, Item, RunSpec
from jaxkv.experiments.changes import SEED_ERRORS, SEED_QUANTS, Change, list_runs, read_changes
from jaxkv.experiments.driver import ArmsRunner, Condition, Key, Line, Took
from jaxkv.experiments.traced_runs import Reference, make_reference
from jaxkv.logits import compare_logits
from jaxkv.reporting.metrics import free_running
from jaxkv.rollout import Layout, Rollout, Rows
from jaxkv.tasks.task import Task

Runs = Mapping[Key, tuple[Change, int]]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A rollout with the cache it ends with, and its wall time."""

    run: Rollout
    cache: Any
    seconds: float


@dataclasses.dataclass(frozen=True)
class Begun:
    """The clean arm on a batch, which every change is compared with, and the batch's buffer [B, S]."""

    reference: Reference
    clean: Arm
    tokens: np.ndarray


@dataclasses.dataclass(frozen=True)
class Changed:
    """A changed arm on a batch: along the clean arm's tokens, and free; what its quantizer could not hold, [B, 3]."""

    forced: Arm
    free: Arm
    saturated: np.ndarray | None


class Injection(ArmsRunner[Begun, tuple[Change, int], Changed | None]):
    """Every problem under every change and seed; of the clean change there is nothing but the reference."""

    name = "injection"
    grows = True

    def __init__(self, arms: Arms, state: nnx.State, spec: RunSpec, runs: Runs, tokenizer: AnyTokenizer, scoring: Task):
        super().__init__(arms, state, spec, runs)
        self.tokenizer, self.scoring = tokenizer, scoring

    def _run(self, change: Change, seed: int, tokens: np.ndarray, rows: Rows, layout: Layout) -> Arm:
        empty = self.arms.make_cache(rows, layout, change.intervention(seed))
        (run, cache), seconds = batches.timed(self.arms.run_cached_keeping, self.state, tokens, rows, layout, empty)
        return Arm(run, cache, seconds)

    def begin(self, batch: Batch, missing: Sequence[tuple[Change, int]]) -> Begun:
        layout, tokens, rows = batches.lay_out(batch, self.spec, self.arms.config)
        clean = self._run(Change(None), 0, tokens, rows, layout)
        return Begun(make_reference(self.arms, self.state, layout, rows, clean.run), clean, tokens)

    def run(self, begun: Begun, variant: tuple[Change, int]) -> Changed | None:
        (change, seed), reference = variant, begun.reference
        if change.what is None:
            return None
        forced = self._run(change, seed, reference.text, reference.forced, reference.layout)
        free = self._run(change, seed, begun.tokens, reference.rows, reference.layout)
        return Changed(forced, free, cache_measures.count_saturated(change.what, begun.clean.cache, forced.cache))

    def tell_time(self, begun: Begun, changed: Changed | None, seconds: float) -> Took:
        runs = {"clean": begun.clean} if changed is None else {"forced": changed.forced, "free": changed.free}
        tokens = {name: int(np.sum(arm.run.lengths)) for name, arm in runs.items()}
        return Took({name: arm.seconds for name, arm in runs.items()}, tokens)

    def _find_fault(self, begun: Begun, changed: Changed | None, row: int) -> dict[str, Any] | None:
        """Where a row's numbers stopped being finite: the clean arm's, then the changed one's and its caches'."""
        newest, clean = begun.reference.newest(row), [("clean", begun.clean.run.nonfinite_step, None)]
        fault = batches.find_fault(row, newest, clean, [("clean", begun.reference.findings[row])])
        if fault is not None or changed is None:
            return fault
        arms = {"changed (along clean)": changed.forced, "changed": changed.free}
        fault = batches.find_fault(row, newest, [(name, arm.run.nonfinite_step, None) for name, arm in arms.items()])
        for name, arm in arms.items():
            fault = fault or cache_measures.find_fault(name, arm.cache, row)
        return fault

    def record(self, item: Item, row: int, begun: Begun, variant: tuple[Change, int], changed: Changed | None) -> Line:
        arms, reference, clean, (change, seed) = self.arms, begun.reference, begun.clean, variant
        steps, prompt, layout = int(clean.run.lengths[row]), len(item.prompt), reference.layout
        fault = self._find_fault(begun, changed, row)
        own = clean if changed is None else changed.free
        tokens, left_pad = batches.taken(own.run, row, layout.prompt), int(reference.rows.first[row])
        compared = free = None
        if fault is None and changed is not None:
            compared = compare_logits(clean.run.logits[row], changed.forced.run.logits[row], steps)
            free = free_running(batches.taken(clean.run, row, layout.prompt), tokens)
        written = prompt + max(steps - 1, 0)  # the last token of a run is fed to nobody
        return {
            "experiment": "injection",
            "problem": item.problem,
            "change": change.name,
            "seed": seed,
            "key": ["injection", item.problem, change.name, seed],
            "spec": change.describe(arms.config.head_dim),
            **batches.describe_setting(arms, item, layout, left_pad, reference.findings[row], self.spec, fault),
            "run": batches.make_arm(item, tokens, fault is not None, arms.stop_ids, self.tokenizer, self.scoring),
            "teacher_forced": compared,
            "free_running": free,
            "cache": cache_measures.measure_cache(change.what, arms.config, arms.precision, own.cache, written, prompt),
            "saturated": cache_measures.describe_saturated(changed.saturated if changed else None, row),
        }


def make_runner(condition: Condition) -> Injection:
    """Runs a condition: the changes that it asks for, or the seed study's."""
    checkpoint = condition.checkpoint
    runs = list_runs(*read_changes(condition.options.cache, checkpoint.config, SEED_ERRORS, SEED_QUANTS))
    return Injection(condition.arms, condition.state, condition.spec, runs, checkpoint.tokenizer, condition.task)
