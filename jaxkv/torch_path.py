"""The divergence experiment through transformers' PyTorch models: the same two arms, the same records.

cached    a prefill of the prompt, then one token a step with transformers' DynamicCache.
uncached  `use_cache=False`, the whole prefix at each step. Its rows are those of the prefix alone (`growing`, what
          transformers' `generate` does: another shape at every step), or the prefix padded on the right to a fixed
          number of rows (`padded`) or to the next multiple of M (`bucket:M`).

Weights, token ids, left padding and positions are those of the JAX arms. Tokens are chosen by the very function of
theirs (`decode.emit`: sampler, noise, ties, stop tokens, limits), run by JAX on torch's logits: on the CPU, and on the
accelerator that JAX has where the sampler sorts them.

The uncached arm is stepped (`uncached='stepwise'`), or had by draft and check (`'draft'`), where one forward over given
tokens yields the logits of all steps that share its rows. Whether the two agree bit for bit is for torch's kernels to
say: some problems run both ways, and their records compare them (control `uncached_stepwise`). Under `growing` no two
steps share their rows; there the comparison is with one forward over `padded` rows, another shape.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv.audit import audit_rows
from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.config import Precision
from jaxkv.decode import COMPILER_OPTIONS, PAD_ID, Layout, Rollout, Rows, emit, start_rollout
from jaxkv.drafts import Forced, draft_freely, first_disagreement, step_freely
from jaxkv.errors import UserError
from jaxkv.experiments.batches import Batch, Item, RunSpec, lay_out, plan_batches
from jaxkv.experiments.divergence.run import BatchRun, Divergence, Runs, control_length
from jaxkv.experiments.driver import Line, Runner
from jaxkv.generate import force, start_forced, uncached_lengths
from jaxkv.sampling import Sampler
from jaxkv.tasks.task import Task
from jaxkv.torch_model import TorchModel, describe_origin, describe_torch, true_fp32

GROWING = "growing"
Give = Callable[[np.ndarray, int], np.ndarray]  # tokens [B, S], slot -> logits [B, V] for the slot


def segments(uncached_length: str, layout: Layout) -> list[tuple[int, int]]:
    """`generate.uncached_lengths`, and 'growing' for as many rows as the prefix has tokens."""
    return uncached_lengths("bucket:1" if uncached_length == GROWING else uncached_length, layout)


def find_host() -> jax.Device:
    """JAX's CPU, which holds the weights for torch and chooses tokens. Raises UserError if JAX may not use it."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        raise UserError("tokens are chosen by JAX on the CPU; add cpu to JAX_PLATFORMS, or unset it") from None


def find_chooser(sampler: Sampler) -> jax.Device:
    """Where JAX chooses tokens: `find_host`, or its accelerator if the sampler sorts logits.

    Sorting 8 rows of 262144 logits takes a CPU half a second, and a GPU less than the model's own step.
    """
    sorts = sampler.top_p is not None or sampler.top_k is not None
    return jax.devices()[0] if sorts else find_host()


class TorchArms:
    """Both arms through a transformers model; what rollouts and records ask of `decode.Arms` has the same names.

    Args:
      checkpoint: model.
      precision: fp16, bf16 or fp32, without overrides.
      sampler: how tokens are chosen.
      attention: 'eager' or 'sdpa'.
      device: None takes a GPU where there is one.

    Raises:
      UserError: what transformers cannot compute; torch is missing; JAX may not use the CPU.
    """

    tile = None
    keep_logits = False  # rollouts get them when they are finished

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: Precision,
        sampler: Sampler,
        attention: str = "eager",
        device: str | None = None,
    ):
        self.config, self.precision, self.sampler = checkpoint.config, precision, sampler
        self.stop_ids = tuple(checkpoint.tokenizer.eos_ids)
        self.model = TorchModel(checkpoint, precision, attention, device)
        choose = functools.partial(emit, sampler=sampler, stop_ids=self.stop_ids)
        self.emit = jax.jit(choose, compiler_options=COMPILER_OPTIONS)
        self.host, self.chooser = find_host(), find_chooser(sampler)

    def audit_pass(self, state: None, tokens: Any, first: Any, end: Any) -> dict[str, np.ndarray]:
        """As `Arms.audit_pass`: name -> [B, P], the names numbered in order of execution."""
        peaks = self.model.audit(np.asarray(tokens), np.asarray(first), np.asarray(end))
        return {f"{number:05d} {name}": peak for number, (name, peak) in enumerate(peaks.items())}

    def start(self, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
        """A rollout before its first step."""
        like: Any = self
        return start_rollout(like, tokens, rows, layout)

    def take(self, run: Rollout, rows: Rows, layout: Layout, give: Give) -> Rollout:
        """Goes on until every row has ended; logits of steps before `run.slot` stay zero. All arrays are NumPy's."""
        end, slot = layout.prompt + layout.new_tokens, int(run.slot)
        shape = (layout.batch, layout.new_tokens, self.config.vocab_size)
        logits = np.zeros(shape, np.dtype(self.precision.logits))
        while slot < end and not np.all(run.ended):
            step = give(np.asarray(run.tokens), slot)
            logits[:, slot - layout.prompt] = step
            with jax.default_device(self.chooser):
                run = self.emit(run, step, rows)
            slot += 1
        return dataclasses.replace(jax.tree.map(np.asarray, run), logits=logits)

    # What gives the logits of a slot.

    def cached(self, rows: Rows) -> Give:
        """A prefill of all slots before the first one asked for, then one row a call."""
        cache, first = None, np.asarray(rows.first)

        def give(tokens: np.ndarray, slot: int) -> np.ndarray:
            nonlocal cache
            begin = 0 if cache is None else slot - 1
            cache = self.model.new_cache() if cache is None else cache
            return self.model.logits(tokens, first, begin, slot, 1, cache)[:, 0]

        return give

    def stepped(self, rows: Rows, layout: Layout, uncached_length: str) -> Give:
        """The whole prefix at every call; slots after it hold padding tokens."""
        first, pieces = np.asarray(rows.first), segments(uncached_length, layout)

        def give(tokens: np.ndarray, slot: int) -> np.ndarray:
            length = next(length for length, end in pieces if slot < end)
            known = _fit(tokens, length)
            known[:, slot:] = PAD_ID
            return self.model.logits(known, first, 0, length, 1 if length == slot else [slot - 1])[:, 0]

        return give

    def checked(self, rows: Rows, layout: Layout, uncached_length: str) -> Give:
        """One forward over given tokens for all steps that share its rows. Every row must be forced."""
        first, pieces = np.asarray(rows.first), segments(uncached_length, layout)
        begin, until, ready = 0, 0, np.zeros((0, 0))

        def give(tokens: np.ndarray, slot: int) -> np.ndarray:
            nonlocal begin, until, ready
            if slot >= until:
                length, until = next((length, end) for length, end in pieces if slot < end)
                begin, wanted = slot, list(range(slot - 1, until - 1))
                with self.model.one_row_head():
                    ready = self.model.logits(_fit(tokens, length), first, 0, length, wanted)
            return ready[:, slot - begin]

        return give

    # Arms.

    def run_cached(self, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
        """The cached arm, free-running or forced as `rows` says."""
        return self.take(self.start(tokens, rows, layout), rows, layout, self.cached(rows))

    def run_forced(
        self, reference: Rollout, rows: Rows, layout: Layout, uncached_length: str, stepwise: bool, begin: int = 0
    ) -> Rollout:
        """The uncached arm along another rollout's tokens: step by step if asked or if numbers break.

        Choices and logits of the steps before `begin` are left out.
        """
        like: Any = self
        forced = force(rows, reference)
        start = start_forced(like, reference, forced, layout, begin)
        if not stepwise:
            run = self.take(start, forced, layout, self.checked(rows, layout, uncached_length))
            if not np.any(run.nonfinite_step >= 0):
                return run
        return self.take(start, forced, layout, self.stepped(rows, layout, uncached_length))

    def free_stepwise(self, forced: Rollout, rows: Rows, layout: Layout, uncached_length: str) -> Rollout:
        """The uncached arm's own run, stepped on from its forced run's first disagreement, with all its logits."""
        free = step_freely(_Programs(self, uncached_length), forced, rows, layout)
        return jax.tree.map(np.asarray, free)

    def free_by_drafts(self, forced: Rollout, rows: Rows, layout: Layout, uncached_length: str) -> tuple[Rollout, int]:
        """The uncached arm's own run by draft and check, and how many drafts it took beyond the first."""
        ((free, drafts),) = draft_freely(_Programs(self, uncached_length), [Forced(forced, rows, layout)])
        return jax.tree.map(np.asarray, free), drafts


@dataclasses.dataclass(frozen=True)
class _Programs:
    """`drafts.Programs` of the PyTorch arms."""

    arms: TorchArms
    uncached_length: str

    def draft(self, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
        return self.arms.run_cached(tokens, rows, layout)

    def check(self, draft: Rollout, rows: Rows, layout: Layout, begin: int) -> Rollout:
        return self.arms.run_forced(draft, rows, layout, self.uncached_length, stepwise=False, begin=begin)

    def step(self, run: Rollout, rows: Rows, layout: Layout) -> Rollout:
        return self.arms.take(run, rows, layout, self.arms.stepped(rows, layout, self.uncached_length))


def _fit(tokens: np.ndarray, length: int) -> np.ndarray:
    """A copy of tokens [B, S] cut or padded to [B, length]."""
    fitted = np.full((tokens.shape[0], length), PAD_ID, np.int32)
    shared = min(length, tokens.shape[1])
    fitted[:, :shared] = tokens[:, :shared]
    return fitted


def run_arms(arms: TorchArms, tokens: np.ndarray, rows: Rows, layout: Layout, spec: RunSpec, batch: Batch) -> Runs:
    """Runs both arms, and the controls that the batch asks for."""
    seconds: dict[str, float] = {}
    stepwise, length = spec.uncached == "stepwise", spec.uncached_length

    def timed(name: str, function: Callable[[], Any]) -> Any:
        begin = time.perf_counter()  # logits have come to the host when a run ends
        result = function()
        seconds[name] = time.perf_counter() - begin
        return result

    def cached_run(tokens: np.ndarray, rows: Rows) -> Rollout:
        return arms.run_cached(tokens, rows, layout)

    def forced_run(length: str = length) -> Rollout:
        return arms.run_forced(cached, rows, layout, length, stepwise)

    def free_run() -> tuple[Rollout, int]:
        if stepwise:
            return arms.free_stepwise(forced, rows, layout, length), 0
        return arms.free_by_drafts(forced, rows, layout, length)

    def other_form() -> Rollout:
        """The own run had the other way: along its tokens in one forward, or stepped."""
        if stepwise:
            return arms.run_forced(free, rows, layout, "padded" if length == GROWING else length, stepwise=False)
        return arms.take(arms.start(tokens, rows, layout), rows, layout, arms.stepped(rows, layout, length))

    cached = timed("cached", lambda: cached_run(tokens, rows))
    forced = timed("uncached_forced", forced_run)
    free, drafts = timed("uncached_free", free_run)
    again: dict[str, Rollout | None] = dict.fromkeys(("cached_again", "forced_again", "forced_longer", "stepwise"))
    if batch.controls:
        growing_too = dataclasses.replace(spec, uncached_length="padded" if length == GROWING else length)
        longer = f"bucket:{control_length(layout, growing_too)}"
        again["cached_again"] = timed("control_cached", lambda: cached_run(cached.tokens, force(rows, cached)))
        again["forced_again"] = timed("control_uncached", forced_run)
        again["forced_longer"] = timed("control_length", lambda: forced_run(longer))
    if batch.stepwise:
        again["stepwise"] = timed("uncached_stepwise", other_form)
    return Runs(cached, forced, free, drafts, **again, truth=None, seconds=seconds, left_out=False)


def run_batch(arms: TorchArms, batch: Batch, spec: RunSpec) -> BatchRun:
    """Runs and audits both arms on a batch, laid out as for the JAX arms but for the prefill, which has no padding."""
    like: Any = arms
    no_state: Any = None  # torch holds the weights
    with jax.default_device(arms.host), true_fp32():
        layout, tokens, rows = lay_out(batch, spec, arms.config)
        layout = dataclasses.replace(layout, prefill=layout.prompt)
        runs = run_arms(arms, tokens, rows, layout, spec, batch)
        findings = free_findings = audit_rows(like, no_state, runs.cached, rows)
        if np.any(first_disagreement(runs.forced, layout.prompt) < runs.forced.lengths):
            free_findings = audit_rows(like, no_state, runs.free, rows)
        return BatchRun(layout, jax.tree.map(np.asarray, rows), runs, findings, free_findings)


class TorchDivergence(Divergence):
    """Both arms of every problem through transformers.

    Args:
      checkpoint: model, with its tokenizer.
      precision: fp16, bf16 or fp32, without overrides.
      sampler: how tokens are chosen.
      spec: what to run. 'stepwise' with 'growing' is what transformers does; `stepwise_problems` run both forms of the
        uncached arm whichever is chosen.
      scoring: the task's scorers.
      attention: 'eager' or 'sdpa'.

    Raises:
      UserError: what transformers cannot compute.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: Precision,
        sampler: Sampler,
        spec: RunSpec,
        scoring: Task,
        attention: str = "eager",
    ):
        Runner.__init__(self, spec, {(): None})
        self.tokenizer, self.scoring = checkpoint.tokenizer, scoring
        self._given = (checkpoint, precision, sampler, attention)
        self._origin = {"framework": "torch", "attention": attention, "versions": describe_torch()["versions"]}

    def describe(self) -> dict[str, Any]:
        return describe_origin(self._origin["attention"])

    @functools.cached_property
    def arms(self) -> Any:  # type: ignore[override]
        """The arms, in which torch holds the weights."""
        return TorchArms(*self._given)

    def plan(self, items: Sequence[Item]) -> list[Batch]:
        return plan_batches(items, dataclasses.replace(self.spec, uncached="draft"))  # which would plan no `stepwise`

    def begin_together(self, todo: Sequence[tuple[Batch, Sequence[None]]]) -> list[BatchRun]:
        return [run_batch(self.arms, batch, self.spec) for batch, _ in todo]

    def record(self, item: Item, row: int, begun: BatchRun, variant: None, ran: BatchRun) -> Line:
        return super().record(item, row, begun, variant, ran) | self._origin
