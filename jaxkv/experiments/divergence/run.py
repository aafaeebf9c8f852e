"""Where do cached and uncached decoding part? Both arms on the same problems, teacher-forced and free-running.

The cached arm runs freely. The uncached arm then follows its tokens (teacher-forced), which gives per-step figures free
of compounding, and runs freely from its own first disagreement. On some problems three controls run beside them: each
arm against itself (rules out that a program is not deterministic) and the uncached arm against itself at another padded
length. A difference in the last shows that a shape alone, without a cache, changes the numbers. None there does not
show the contrary: two long forwards may share a kernel that one row a step does not use. On some problems the uncached
arm is also stepped by brute force and compared with its draft-and-check form. On a few problems a float64 run says how
far each arm is from the truth: by rounding both are about equally far, and an arm with a fault is not.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.audit import Finding, audit_rows
from jaxkv.checkpoints.tokenizer import AnyTokenizer
from jaxkv.config import ModelConfig
from jaxkv.drafts import Forced, first_disagreement, free_by_drafts, free_stepwise
from jaxkv.errors import describe_memory
from jaxkv.experiments import batches
from jaxkv.experiments.batches import Batch, Item, RunSpec, plan_batches, taken, timed
from jaxkv.experiments.driver import Condition, Line, Runner, Took
from jaxkv.experiments.truth import has_room, share_float64
from jaxkv.logits import compare_logits, measure_distance
from jaxkv.reporting.metrics import free_running
from jaxkv.rollout import GROWING, AnyArms, Layout, Rollout, Rows, force, round_up, start_rollout, uncached_lengths
from jaxkv.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class BatchRun:
    """A batch after both arms have run, with each row's audit.

    Attributes:
      rows: free-running.
      forced: the uncached arm along the cached one's tokens; `free` on its own, with `drafts` beyond the first.
      controls: by their names in a record, those that were asked for. `uncached_stepwise` is `free` in the other form:
        by brute force, or, where that is the run's own, checked in one pass.
      truth: the uncached float64 model along the cached arm's tokens; `left_out` where memory is too small for it.
      seconds: wall time by name.
      findings: along the cached arm's tokens; `free_findings` along `free`'s, the same where no row parted.
    """

    layout: Layout
    rows: Rows
    cached: Rollout
    forced: Rollout
    free: Rollout
    drafts: int
    controls: dict[str, Rollout]
    truth: Rollout | None
    left_out: bool
    seconds: dict[str, float]
    findings: list[Finding]
    free_findings: list[Finding]


def shared_length(uncached_length: str) -> str:
    """The length, or where each step has rows of its own, which nothing can share, the padded one."""
    return "padded" if uncached_length == GROWING else uncached_length


def control_length(layout: Layout, spec: RunSpec, tile: int | None = None) -> int:
    """Rows of the uncached arm in `uncached_other_length`: more than it has at any step of the run itself."""
    longest = max(layout.slots, uncached_lengths(shared_length(spec.uncached_length), layout)[-1][0])
    return round_up(longest + spec.bucket, tile or 1)


class ArmRuns:
    """Both arms on one batch, in two parts: what comes before the uncached arm's own run, and after it.

    Between them stands the own run, which batches share the drafts of.
    """

    def __init__(self, arms: AnyArms, state: Any, batch: Batch, spec: RunSpec):
        self.arms, self.state, self.batch, self.spec = arms, state, batch, spec
        layout, self.tokens, self.rows = batches.lay_out(batch, spec, arms.config, arms.tile)
        self.layout, self.stepwise = arms.fit(layout), spec.uncached == "stepwise"
        self.seconds: dict[str, float] = {}
        self.cached = self._timed("cached", arms.run_cached, self.tokens, self.rows, self.layout)
        self.forced = self._forced("uncached_forced")

    def _timed(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        result, self.seconds[name] = timed(function, self.state, *args)
        return result

    def _forced(self, name: str, length: str | None = None) -> Rollout:
        given = self.cached, self.rows, self.layout, length or self.spec.uncached_length, self.stepwise
        return self._timed(name, self.arms.run_forced, *given)

    def step_freely(self) -> Rollout:
        """The own run by brute force, from the first disagreement on."""
        step = functools.partial(free_stepwise, self.arms)
        return self._timed("uncached_free", step, self.forced, self.rows, self.layout, self.spec.uncached_length)

    def _other_form(self, free: Rollout) -> Rollout:
        length = self.spec.uncached_length
        if self.stepwise:
            given = free, self.rows, self.layout, shared_length(length)
            return self._timed("uncached_stepwise", self.arms.run_forced, *given)
        start = start_rollout(self.arms, self.tokens, self.rows, self.layout)
        return self._timed("uncached_stepwise", self.arms.run_uncached, start, self.rows, self.layout, length)

    def finish(self, free: Rollout, drafts: int) -> BatchRun:
        """Runs the controls that the batch asks for, and audits what ran."""
        arms, state, rows, layout, cached = self.arms, self.state, self.rows, self.layout, self.cached
        controls = {}
        if self.batch.controls:
            tokens, forced = np.asarray(cached.tokens), force(rows, cached)
            controls["cached_rerun"] = self._timed("control_cached", arms.run_cached, tokens, forced, layout)
            controls["uncached_rerun"] = self._forced("control_uncached")
            longer = f"bucket:{control_length(layout, self.spec, arms.tile)}"
            controls["uncached_other_length"] = self._forced("control_length", longer)
        if self.batch.stepwise:
            controls["uncached_stepwise"] = self._other_form(free)
        known = state is None or "float64" in arms.precision.to_json().values()
        truth, wanted = None, self.batch.truth and not known
        if wanted and has_room(state, arms.config, layout):
            follow = functools.partial(_follow_in_float64, arms.config)
            truth = self._timed("truth", follow, cached, rows, layout)
        findings = free_findings = audit_rows(arms, state, cached, rows)
        if np.any(first_disagreement(self.forced, layout.prompt) < np.asarray(self.forced.lengths)):
            free_findings = audit_rows(arms, state, free, rows)  # tokens that the other arm never took
        return BatchRun(
            layout, rows, cached, self.forced, free, drafts, controls, truth, wanted and truth is None, self.seconds,
            findings, free_findings,
        )  # fmt: skip


def _follow_in_float64(
    config: ModelConfig, state: nnx.State, reference: Rollout, rows: Rows, layout: Layout
) -> Rollout | None:
    """The float64 run; None where memory ran out all the same: the arms' own run goes on without it."""
    try:
        return share_float64(config).follow(state, reference, rows, layout)
    except (MemoryError, RuntimeError) as error:
        if describe_memory(error) is None:
            raise
        return None


def run_batches(arms: AnyArms, state: Any, together: Sequence[Batch], spec: RunSpec) -> list[BatchRun]:
    """Runs and audits both arms on batches, whose rows that part are drafted together.

    The time of their own uncached runs is shared evenly by the batches.
    """
    with arms.settings():
        begun = [ArmRuns(arms, state, batch, spec) for batch in together]
        if spec.uncached == "stepwise":
            free = [(one.step_freely(), 0) for one in begun]
        else:
            forced = [Forced(one.forced, one.rows, one.layout) for one in begun]
            free, seconds = timed(free_by_drafts, arms, state, forced, spec.uncached_length)
            for one in begun:
                one.seconds["uncached_free"] = seconds / len(begun)
        return [one.finish(*own) for one, own in zip(begun, free, strict=True)]


def run_batch(arms: AnyArms, state: Any, batch: Batch, spec: RunSpec) -> BatchRun:
    """Runs and audits both arms on a batch."""
    return run_batches(arms, state, [batch], spec)[0]


# Batches that draft together, and the bytes of logits that they may hold meanwhile.
TOGETHER, LOGITS_BYTES = 8, 4 << 30


AGAIN = {  # controls, by what a fault in them is said to be in
    "uncached_other_length": "uncached (other length)",
    "cached_rerun": "cached (again)",
    "uncached_rerun": "uncached (again)",
    "uncached_stepwise": "uncached (stepwise)",
}


def find_fault(ran: BatchRun, row: int) -> dict[str, Any] | None:
    """Where a row's numbers stopped being finite, as a record has it; None if they never did."""
    finding, free = ran.findings[row], ran.free_findings[row]
    named = {"cached": ran.cached, "uncached": ran.forced}
    named |= {arm: ran.controls[name] for name, arm in AGAIN.items() if name in ran.controls}
    steps = [(arm, run.nonfinite_step, finding) for arm, run in named.items()]
    steps.append(("uncached (free)", ran.free.nonfinite_step, free))
    newest = ran.layout.prompt - int(ran.rows.first[row]) - 1
    return batches.find_fault(row, newest, steps, [("uncached", finding), ("uncached (free)", free)])


def compare_row(arms: AnyArms, item: Item, row: int, ran: BatchRun, spec: RunSpec) -> dict[str, Any]:
    """What a row's run says without asking a task: fields of a sample, `arms` being the tokens alone."""
    layout, fault, steps = ran.layout, find_fault(ran, row), int(ran.cached.lengths[row])

    def compare(reference: Rollout | None, other: Rollout, steps: int = steps) -> dict[str, list] | None:
        if fault or reference is None:
            return None
        chosen = (np.asarray(run.choices[row, :steps]) for run in (reference, other))
        flips = np.not_equal(*chosen).tolist()
        return compare_logits(reference.logits[row], other.logits[row], steps) | {"choice_flip": flips}

    again, truth = ran.controls.get, ran.truth
    brute = again("uncached_stepwise")
    both = 0 if brute is None else int(min(brute.lengths[row], ran.free.lengths[row]))
    controls = {
        "cached_rerun": compare(again("cached_rerun"), ran.cached),
        "uncached_rerun": compare(again("uncached_rerun"), ran.forced),
        "uncached_other_length": compare(again("uncached_other_length"), ran.forced),
        "uncached_stepwise": compare(brute, ran.free, both),  # equal bits at all steps are equal tokens, up to the stop
    }
    distance = None
    if not fault and truth is not None and truth.nonfinite_step[row] < 0:
        arms_of = {"cached": ran.cached, "uncached": ran.forced}
        distance = {arm: measure_distance(truth.logits[row], run.logits[row], steps) for arm, run in arms_of.items()}
    tokens = {arm: taken(run, row, layout.prompt) for arm, run in (("cached", ran.cached), ("uncached", ran.free))}
    return {
        **batches.describe_setting(arms, item, layout, int(ran.rows.first[row]), ran.findings[row], spec, fault),
        "arms": tokens,
        "teacher_forced": compare(ran.forced, ran.cached),
        "free_running": None if fault else free_running(tokens["uncached"], tokens["cached"]),
        "controls": controls,
        "truth": distance,
        **({"truth_left_out": "memory"} if ran.left_out else {}),
    }


class Divergence(Runner[BatchRun, None, BatchRun]):
    """Both arms of every problem, with their controls; `tokenizer` makes text of tokens, which `scoring` grades.

    With PyTorch's arms 'stepwise' and 'growing' is what transformers does, and `stepwise_problems` run both forms of
    the uncached arm whichever is chosen.
    """

    name = "divergence"

    def __init__(self, arms: AnyArms, state: Any, spec: RunSpec, tokenizer: AnyTokenizer, scoring: Task):
        super().__init__(spec, {(): None})
        self.arms, self.state, self.tokenizer, self.scoring = arms, state, tokenizer, scoring
        if spec.batch_size > 1:  # drafts of a single row are joined by none
            logits = 2 * spec.batch_size * spec.new_tokens * arms.config.vocab_size
            most = LOGITS_BYTES // (logits * np.dtype(arms.precision.logits).itemsize)
            self.together = max(1, min(TOGETHER, most))

    def describe(self) -> dict[str, Any]:
        return self.arms.describe()

    def plan(self, items: Sequence[Item]) -> list[Batch]:
        # Steps would be planned beside steps by nobody, but for arms whose checks may differ from them.
        exact = self.arms.exact_checks
        return plan_batches(items, self.spec if exact else dataclasses.replace(self.spec, uncached="draft"))

    def begin_together(self, todo: Sequence[tuple[Batch, Sequence[None]]]) -> Sequence[BatchRun]:
        return run_batches(self.arms, self.state, [batch for batch, _ in todo], self.spec)

    def run(self, begun: BatchRun, variant: None) -> BatchRun:
        return begun

    def tell_time(self, begun: BatchRun, ran: BatchRun, seconds: float) -> Took:
        tokens = {"cached": int(jnp.sum(ran.cached.lengths)), "uncached_forced": int(jnp.sum(ran.forced.lengths))}
        return Took(ran.seconds, tokens, {"drafts": ran.drafts})

    def record(self, item: Item, row: int, begun: BatchRun, variant: None, ran: BatchRun) -> Line:
        found = compare_row(self.arms, item, row, ran, self.spec)
        broke = found["status"] == "invalid"
        scored = {
            arm: batches.make_arm(item, tokens, broke, self.arms.stop_ids, self.tokenizer, self.scoring)
            for arm, tokens in found["arms"].items()
        }
        return {
            "experiment": "divergence",
            "problem": item.problem,
            "key": ["divergence", item.problem],
            **found,
            "arms": scored,
            "label_change": self.scoring.label_change(scored["uncached"]["text"], scored["cached"]["text"], item.gold),
            **self.arms.origin,
        }


def make_runner(condition: Condition) -> Divergence:
    """Runs a condition, in its framework."""
    given, run = (condition.spec, condition.checkpoint.tokenizer, condition.task), condition.options.run
    if run.framework == "torch":
        from jaxkv.torch_path import TorchArms

        arms = TorchArms(condition.checkpoint, condition.precision, condition.sampler, run.attention)
        return Divergence(arms, None, *given)
    return Divergence(condition.arms, condition.state, *given)
