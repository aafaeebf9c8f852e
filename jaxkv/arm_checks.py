"""Is a difference between the arms rounding or a fault? What fp32, float64 and the aligned arms say on one prompt.

The same rules as those of a study (jaxkv.experiments.divergence.cause), with fp32 in the place of float64 where it
tells: by rounding a difference falls from 16 bits to fp32 as the dtypes' units do, and both arms are about equally far
from fp32. Where that leaves a doubt, and in fp32 itself, float64 is run.
"""

import concurrent.futures
import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.comparison import Checks, Wider
from jaxkv.config import make_precision
from jaxkv.experiments.divergence import cause
from jaxkv.experiments.gate import GateError, run_gate
from jaxkv.experiments.record_parts import ARMS
from jaxkv.experiments.record_parts import Comparison as StepColumns
from jaxkv.experiments.truth import has_room, share_float64
from jaxkv.logits import compare_logits, measure_distance
from jaxkv.prompt_model import PromptRun, make_arms
from jaxkv.rollout import Layout, Rollout, Rows, force

TILE = 8  # rows of a tile in the aligned arms
FEWEST = 16  # steps that the aligned arms run, and as many more as it takes to the place where texts part


@dataclasses.dataclass(frozen=True)
class Difference:
    """Both arms along the cached one's tokens, step by step, and the step that is asked about."""

    cached: Rollout
    uncached: Rollout
    rows: Rows
    layout: Layout
    columns: StepColumns
    step: int

    def measure(self, truth: jax.Array, arms: tuple[Rollout, Rollout]) -> cause.Distance | None:
        """The distance of arms to true logits [n, V]."""
        steps = len(self.columns.flip)
        with jax.enable_x64(True):
            wide = truth.astype(jnp.float64)
        told = {n: measure_distance(wide, one.logits[0], steps) for n, one in zip(ARMS, arms, strict=True)}
        return cause.measure_distance([{"truth": told}])


def explain(run: PromptRun, found: Difference) -> tuple[str, Checks]:
    """The verdict, one of jaxkv.experiments.divergence.cause, and what it is made of."""
    differs = not all(found.columns.bit_equal)
    own = falls = said = wide = None
    beside = ""
    distances: list[cause.Distance | None] = []
    arms = (found.cached, found.uncached)
    if differs and run.model.precision.name != "fp32":
        with run.phase("both arms in fp32, and aligned"), concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(_run_wide, run, found)  # one is traced while the other computes
            aligned, fault = _run_aligned(run, found.step)
            wide = asked.result()
    else:
        with run.phase("aligned arms"):
            aligned, fault = _run_aligned(run, found.step)
    if wide is not None:
        apart = compare_logits(wide[1].logits[0], wide[0].logits[0], len(found.columns.flip))
        name = run.model.precision.name.partition("+")[0]
        falls = cause.falls(name, float(np.mean(found.columns.mean_abs)), float(np.mean(apart["mean_abs"])))
        said = _describe_wide(run, found, wide, apart)
        own, beside = found.measure(wide[1].logits[0], arms), "fp32"
        distances = [own]
    if differs and not (falls and own is not None and not own.doubtful) and _fits(run, found.layout):
        with run.phase("float64"):
            model = share_float64(run.model.checkpoint.config)
            truth = model.follow(run.model.state, found.cached, found.rows, found.layout).logits[0]
        own, beside = found.measure(truth, arms), "float64"
        distances = [own, *([] if wide is None else [found.measure(truth, wide)])]
    evidence = cause.Evidence(
        differs=differs, aligned=False if fault else bool(aligned) or None,
        distances=[one for one in distances if one is not None], wide=bool(distances),
        falls=[] if wide is None else [falls], full_gate=False, strays=False,
    )  # fmt: skip
    return cause.decide(evidence), Checks(
        aligned, fault, said, falls, None if own is None else f"to {beside}: {cause.describe_distance(own)}"
    )


def _describe_wide(
    run: PromptRun, found: Difference, wide: tuple[Rollout, Rollout], apart: Mapping[str, list]
) -> Wider:
    """What fp32 makes of the two tokens at which the texts part, or else of its own top two."""
    step = found.step
    first, second = (int(one.choices[0, step]) for one in (found.cached, found.uncached))
    before = [*run.item.prompt, *run.take(found.cached)[:step]]
    parted = first != second
    picks = [int(one.choices[0, step] if parted else jnp.argmax(one.logits[0, step])) for one in wide]
    named = (run.model.name_token(before, picks[0]), run.model.name_token(before, picks[1]))
    if not parted:
        return Wider(named, apart["margin"][step], apart["shift"][step])
    gaps = [run.measure_gap(one, step, (first, second)).size for one in wide]
    return Wider(named, gaps[0], gaps[1] - gaps[0])


def _fits(run: PromptRun, layout: Layout) -> bool:
    return has_room(run.model.state, run.model.checkpoint.config, layout)


def _run_aligned(run: PromptRun, step: int) -> tuple[int | None, str | None]:
    """Steps of which the aligned arms agree in every bit, or where they differ."""
    arms = run.model.arms(run.sampler, TILE)
    try:
        found = run_gate(arms, arms, run.model.state, [run.item], run.spec, 1, max(FEWEST, step + 1))
    except GateError as error:
        return None, error.found
    return found["steps"], None


def _run_wide(run: PromptRun, found: Difference) -> tuple[Rollout, Rollout] | None:
    """Both arms in fp32 with the weights as they were rounded, along the same tokens; None if numbers break off."""
    arms = make_arms(run.model.checkpoint, make_precision("fp32"), run.sampler)
    state, tokens = arms.prepare(run.model.state), np.asarray(found.cached.tokens)
    cached = arms.run_cached(state, tokens, force(found.rows, found.cached), found.layout)
    uncached = arms.run_forced(state, found.cached, found.rows, found.layout, run.spec.uncached_length)
    both = jax.block_until_ready((cached, uncached))
    return both if all(int(one.nonfinite_step[0]) < 0 for one in both) else None
