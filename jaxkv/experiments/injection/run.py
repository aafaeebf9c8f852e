"""What does a model make of a changed cache? The clean cached arm against the same arm with its cache changed.

Weights, tokens and the sampler's noise are the same. The clean arm runs freely. The changed arm then follows its tokens
(teacher-forced: figures per step, free of compounding) and runs freely from the prompt (what a user would get: tokens,
text, scores). The clean arm is the change 'none', once a problem.

All runs go through the programs of one `Arms`: what differs is the cache they are given. Seeds, and the levels of one
law of error, are values in that cache, so they share a program; each quantizer compiles its own.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxkv.audit import Finding, audit_rows
from jaxkv.compare import compare_logits
from jaxkv.decode import Arms, Layout, Rollout, Rows
from jaxkv.experiments.batches import (
    Decoding,
    Item,
    RunSpec,
    Scoring,
    describe_setting,
    lay_out,
    logits_fault,
    make_arm,
    plan_batches,
)
from jaxkv.experiments.cache_measures import count_saturated, describe_saturated, find_fault, measure_cache
from jaxkv.experiments.changes import Change, change_cache, list_missing, list_runs
from jaxkv.generate import force, run_cached_keeping
from jaxkv.reporting.metrics import free_running


@dataclasses.dataclass(frozen=True)
class Arm:
    """A rollout with the cache it ends with."""

    run: Rollout
    cache: Any
    seconds: float


def _run(arms: Arms, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout) -> Arm:
    begin = time.perf_counter()
    run, cache = jax.block_until_ready(run_cached_keeping(arms, state, tokens, rows, layout))
    return Arm(run, cache, time.perf_counter() - begin)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The clean arm on a batch, which every change is compared with.

    Attributes:
      layout: shapes.
      tokens: the batch's buffer [B, S].
      rows: free-running.
      clean: the arm.
      findings: audits of its rows.
    """

    layout: Layout
    tokens: np.ndarray
    rows: Rows
    clean: Arm
    findings: list[Finding]

    def taken(self, run: Rollout, row: int) -> list[int]:
        """A row's own tokens."""
        begin = self.layout.prompt
        return np.asarray(run.tokens[row, begin : begin + int(run.lengths[row])]).tolist()

    def fault(self, row: int) -> dict[str, Any] | None:
        """Where the clean arm's numbers stopped being finite."""
        audit = self.findings[row].invalid
        fault = self.logits_fault("clean", self.clean, row)
        return fault or (None if audit is None else {"arm": "clean", "step": None} | audit)

    def logits_fault(self, name: str, arm: Arm, row: int) -> dict[str, Any] | None:
        """The step at which an arm's logits stopped being finite."""
        step = int(arm.run.nonfinite_step[row])
        newest = self.layout.prompt - int(self.rows.first[row]) - 1
        return None if step < 0 else logits_fault(name, step, newest + step)


def run_reference(arms: Arms, state: nnx.State, layout: Layout, tokens: np.ndarray, rows: Rows) -> Reference:
    """Runs and audits the clean arm."""
    clean = _run(change_cache(arms, None), state, tokens, rows, layout)
    return Reference(layout, tokens, rows, clean, audit_rows(arms, state, clean.run, rows))


@dataclasses.dataclass(frozen=True)
class Changed:
    """A changed arm on a batch: along the clean arm's tokens, and free; what its quantizer could not hold, [B, 3]."""

    forced: Arm
    free: Arm
    saturated: np.ndarray | None


def run_change(arms: Arms, state: nnx.State, change: Change, seed: int, reference: Reference) -> Changed:
    """Runs a changed arm beside the clean one."""
    changed = change_cache(arms, change.intervention(seed))
    layout, clean = reference.layout, reference.clean
    along = np.asarray(clean.run.tokens)
    forced = _run(changed, state, along, force(reference.rows, clean.run), layout)
    free = _run(changed, state, reference.tokens, reference.rows, layout)
    assert change.what is not None
    saturated = count_saturated(change.what, clean.cache, forced.cache)
    return Changed(forced, free, saturated)


def make_record(
    arms: Arms,
    item: Item,
    row: int,
    change: Change,
    seed: int,
    reference: Reference,
    changed: Changed | None,
    spec: RunSpec,
    tokenizer: Decoding,
    scoring: Scoring,
) -> dict[str, Any]:
    """A problem under one change (jaxkv.experiments.injection.record); `changed` is None for the clean one."""
    clean = reference.clean
    steps, prompt = int(clean.run.lengths[row]), len(item.prompt)
    fault = reference.fault(row)
    own = clean if changed is None else changed.free
    if fault is None and changed is not None:
        fault = reference.logits_fault("changed (along clean)", changed.forced, row)
        fault = fault or reference.logits_fault("changed", changed.free, row)
        fault = fault or find_fault("changed (along clean)", changed.forced.cache, row)
        fault = fault or find_fault("changed", changed.free.cache, row)
    tokens = reference.taken(own.run, row)
    compared = free = None
    if fault is None and changed is not None:
        compared = compare_logits(clean.run.logits[row], changed.forced.run.logits[row], steps)
        free = free_running(reference.taken(clean.run, row), tokens)
    return {
        "experiment": "injection",
        "problem": item.problem,
        "change": change.name,
        "seed": seed,
        "key": ["injection", item.problem, change.name, seed],
        "spec": change.describe(arms.config.head_dim),
        **describe_setting(
            arms, item, reference.layout, int(reference.rows.first[row]), reference.findings[row], spec, fault
        ),
        "run": make_arm(item, tokens, fault is not None, arms.stop_ids, tokenizer, scoring),
        "teacher_forced": compared,
        "free_running": free,
        # The last token of a run is fed to nobody.
        "cache": measure_cache(change.what, arms.config, arms.precision, own.cache, prompt + max(steps - 1, 0), prompt),
        "saturated": describe_saturated(changed.saturated if changed else None, row),
    }


def run_injection(
    arms: Arms,
    state: nnx.State,
    items: Sequence[Item],
    spec: RunSpec,
    changes: Sequence[Change],
    seeds: Sequence[int],
    tokenizer: Decoding,
    scoring: Scoring,
    done: frozenset[tuple[int, str, int]] = frozenset(),
) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Yields, batch by batch and change by change, the records not yet done and their timing.

    Args:
      arms: compiled programs of the plain regime; they must keep logits.
      state: weights.
      items: the problems.
      spec: what to run; what it says of the uncached arm, of controls and of stepwise problems has no place here.
      changes: from `make_changes`.
      seeds: of the errors, different ones.
      tokenizer: makes text of new tokens.
      scoring: the task's scorers.
      done: (problem, change, seed) that have a record; a batch is run whole if any of its problems lacks one.

    Raises:
      UserError: the aligned regime, or a prompt that does not fit the context.
    """
    wanted = list_runs(changes, seeds)
    for batch in plan_batches(items, spec):
        missing = list_missing(wanted, (item.problem for item in batch.items), done)
        if not missing:
            continue
        reference = run_reference(arms, state, *lay_out(batch, spec, arms.config))
        for change, seed in missing:
            changed = None if change.what is None else run_change(arms, state, change, seed, reference)
            records = [
                make_record(arms, item, row, change, seed, reference, changed, spec, tokenizer, scoring)
                for row, item in enumerate(batch.items)
                if (item.problem, change.name, seed) not in done
            ]
            runs = {"clean": reference.clean} if changed is None else {"forced": changed.forced, "free": changed.free}
            yield (
                records,
                {
                    "experiment": "injection",
                    "change": change.name,
                    "seed": seed,
                    "problems": [item.problem for item in batch.items],
                    "seconds": {name: arm.seconds for name, arm in runs.items()},
                    "tokens": {name: int(np.sum(arm.run.lengths)) for name, arm in runs.items()},
                },
            )
