"""Which operations make cached and uncached decoding part?

The plain cached arm computes one row a step, the uncached one all rows. A class of operations that is aligned is
computed in tiles of one number of rows (models/alignment.py), so that its results for a row no longer depend on how
many rows a call has. Both arms are run along the plain cached arm's tokens with no class aligned, each alone, all but
each, and all; and with all of them in the prefill, the decoding steps or the recomputation alone.

'none' is the plain programs themselves. In 'fenced' every class is cut off from its neighbours in the way that aligning
needs, and none is aligned: it tells what the cutting alone does to the numbers. All variants but 'none' are one
compiled program each for prefill, decoding and recomputation; what is aligned is an argument. A study therefore
compiles three plain programs, three of these, and the audit, for each distinct pair of prefill rows and slots.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.decode import Arms
from jaxkv.experiments import traced_runs
from jaxkv.experiments.attribution.record import FENCED, VARIANTS
from jaxkv.experiments.batches import Batch, Item, RunSpec, lay_out, timed
from jaxkv.experiments.driver import ArmsRunner, Condition, Line, Took
from jaxkv.experiments.traced_runs import Reference, count_equal, find_fault
from jaxkv.logits import compare_logits
from jaxkv.models.alignment import Alignments, align
from jaxkv.rollout import Layout, Rollout, Rows, force


@dataclasses.dataclass(frozen=True)
class Pair:
    """Both arms along one sequence of tokens, and the wall time of each."""

    cached: Rollout
    uncached: Rollout
    seconds: dict[str, float]


def run_pair(arms: Arms, state: nnx.State, reference: Rollout, rows: Rows, layout: Layout, align: Alignments) -> Pair:
    """Both arms along the reference's tokens."""
    forced, tokens = force(rows, reference), np.asarray(reference.tokens)
    keeping = functools.partial(arms.run_cached_keeping, align=align)
    (cached, _), cached_seconds = timed(keeping, state, tokens, forced, layout)
    uncached, uncached_seconds = timed(functools.partial(arms.run_forced, align=align), state, reference, rows, layout)
    return Pair(cached, uncached, {"cached": cached_seconds, "uncached_forced": uncached_seconds})


@dataclasses.dataclass(frozen=True)
class Begun:
    """A batch along the plain cached arm, and the variant that others are set beside; all of them where it broke."""

    reference: Reference
    fenced: Pair


class Attribution(ArmsRunner[Begun, str, Pair]):
    """Every variant (of record.VARIANTS) of every problem, in tiles of `tile` rows.

    Arms are of the plain regime, the uncached one of one padded length (Experiment.plain, one_length).
    """

    name = "attribution"

    def __init__(
        self, arms: Arms, state: nnx.State, spec: RunSpec, tile: int, variants: Sequence[str] = tuple(VARIANTS)
    ):
        super().__init__(arms, state, spec, {(name,): name for name in variants})
        self.tile = tile

    def begin(self, batch: Batch, missing: Sequence[str]) -> Begun:
        layout, tokens, rows = lay_out(batch, self.spec, self.arms.config)
        cached = self.arms.run_cached(self.state, tokens, rows, layout)
        reference = traced_runs.make_reference(self.arms, self.state, layout, rows, cached)
        return Begun(reference, Pair(cached, cached, {}) if reference.broken else self._run(reference, FENCED))

    def _run(self, reference: Reference, variant: str) -> Pair:
        given = self.arms, self.state, reference.cached, reference.rows, reference.layout
        return run_pair(*given, align(self.tile, VARIANTS[variant]))

    def run(self, begun: Begun, variant: str) -> Pair:
        return begun.fenced if begun.reference.broken or variant == FENCED else self._run(begun.reference, variant)

    def tell_time(self, begun: Begun, pair: Pair, seconds: float) -> Took:
        return Took(pair.seconds, dict.fromkeys(pair.seconds, int(jnp.sum(begun.reference.cached.lengths))))

    def record(self, item: Item, row: int, begun: Begun, variant: str, pair: Pair) -> Line:
        reference, fenced = begun.reference, begun.fenced
        fault = find_fault(reference, row, {"cached": pair.cached, "uncached": pair.uncached})
        described = traced_runs.describe_row(self.arms, item, row, reference, self.spec, fault)
        steps = described["steps"]
        compared = moved = None
        if fault is None:
            compared = compare_logits(pair.uncached.logits[row], pair.cached.logits[row], steps)
            moved = {
                "cached": steps - count_equal(pair.cached, fenced.cached, row, steps),
                "uncached": steps - count_equal(pair.uncached, fenced.uncached, row, steps),
            }
        return {
            "experiment": "attribution",
            "problem": item.problem,
            "key": ["attribution", item.problem, variant],
            "variant": variant,
            "aligned": VARIANTS[variant],
            "tile": self.tile,
            **{name: described[name] for name in ("prompt_tokens", "prompt_sha256", "tokens_sha256", "steps")},
            "shapes": {name: described["shapes"][name] for name in ("batch", "prefill", "slots", "left_pad")},
            **{name: described[name] for name in ("sampling", "status", "invalid")},
            "teacher_forced": compared,
            "moved": moved,
        }


def make_runner(condition: Condition) -> Attribution:
    """Runs a condition."""
    return Attribution(condition.plain, condition.state, condition.spec, condition.tile)
