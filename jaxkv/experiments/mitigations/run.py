"""What helps, and what does it cost? The same problems under several precision policies and in the aligned regime.

For every variant and problem three things are measured. Cached against uncached: both arms free-running, and the
uncached one along the cached one's tokens, as in `divergence.py`. Distance to the truth: both arms along the tokens
that the model itself takes in float64, so that all variants and both arms answer the same questions and no arm's own
choices decide what is asked. Cost: milliseconds and bytes of the cached arm.

The truth of a mitigation is the model with the weights as the checkpoint gives them. A variant that rounds its weights
is also measured against a float64 run of the rounded ones, which leaves the arithmetic alone, and the two float64 runs
against each other, which leaves the rounding of the weights alone.

Variants (`make_variants`):

fp16                    Products summed and returned in fp32 and rounded once: the project's fp16. Read narrowly, this
                        already is "fp16 with fp32 partial outputs": no partial sum of a product leaves it in fp16.
fp16+accumulation=fp16  Products returned in fp16, as a bare `einsum` of fp16 arrays is. At one row on a GPU each single
                        product is then rounded before the sum. On a CPU XLA adds in fp32 all the same.
fp16+residual=fp32      The stream between layers in fp32.
fp16 outputs fp32       "fp16 with fp32 partial outputs" read widely: whatever a product returns, and all that is made
                        of it, stays in fp32 until the next product rounds its inputs to fp16. Activations, residual
                        stream, RoPE, attention weights and logits are fp32; weights, cache and the operands of
                        every product stay fp16, so that it costs no memory and the products are those of fp16.
bf16, bf16+residual=fp32, fp32 (true: no TF32)
fp32+param=fp16         Weights in 16 bits, every operation in fp32.
fp16 aligned            fp16 with both arms through one program of fixed shape: the arms agree bit for bit. That says
                        nothing of how far both are from the truth.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.config import ModelConfig, Precision, make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError, nearest
from jaxkv.experiments.batches import Batch, Item, RunSpec, find_fault, lay_out, timed
from jaxkv.experiments.cost import measure_cost
from jaxkv.experiments.divergence.run import BatchRun, compare_row, run_batch
from jaxkv.experiments.driver import Condition, Line, Runner, Took
from jaxkv.experiments.truth import Float64Model, Truth, round_weights
from jaxkv.logits import measure_distance
from jaxkv.rollout import PAD_ID, Rollout, force, start_rollout
from jaxkv.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
      name: its key in the records.
      precision: its policy.
      tile: rows of a tile in the aligned regime; None is the plain one.
    """

    name: str
    precision: Precision
    tile: int | None = None

    @property
    def param(self) -> str:
        """Name of the dtype its weights are rounded to."""
        return jnp.dtype(self.precision.param).name


def make_variants(tile: int, names: Sequence[str] | None = None) -> list[Variant]:
    """The variants of the table, or those named.

    Args:
      tile: rows of a tile in the aligned regime.
      names: which, in the order wanted; all if None.

    Raises:
      UserError: an unknown name.
    """
    wide = dict.fromkeys(("activation", "residual", "logits"), "fp32")
    policies = [
        make_precision("fp16"),
        make_precision("fp16", accumulation="fp16"),
        make_precision("fp16", residual="fp32"),
        make_precision("bf16"),
        make_precision("bf16", residual="fp32"),
        make_precision("fp32"),
        make_precision("fp32", param="fp16"),
    ]
    variants = [Variant(policy.name, policy) for policy in policies]
    variants.insert(3, Variant("fp16 outputs fp32", make_precision("fp16", **wide)))
    variants.append(Variant("fp16 aligned", make_precision("fp16"), tile))
    known = {variant.name: variant for variant in variants}
    for name in names or ():
        if name not in known:
            raise UserError(f"unknown variant '{name}'{nearest(name, list(known))}; known: {', '.join(known)}")
    return [known[name] for name in names] if names is not None else variants


def hold(arms: Arms, state32: nnx.State) -> nnx.State:
    """The weights as the arms take them, rounded to the policy's dtype first: a CPU may hold 16-bit values in fp32."""
    return arms.prepare(round_weights(state32, arms.precision.param))


@dataclasses.dataclass(frozen=True)
class Along:
    """Both arms of a variant along the truth's tokens, and the wall time of each."""

    cached: Rollout
    uncached: Rollout
    seconds: dict[str, float]


def follow(arms: Arms, state: nnx.State, truth: Truth, batch: Batch, spec: RunSpec) -> Along:
    """Runs both arms along the truth's tokens."""
    layout, tokens, rows = lay_out(batch, spec, arms.config, arms.tile)
    end = truth.tokens.shape[1]
    tokens[:, :end], tokens[:, end:] = truth.tokens, PAD_ID
    reference = dataclasses.replace(
        start_rollout(arms, tokens, rows, layout), lengths=jnp.asarray(truth.lengths, jnp.int32)
    )
    stepwise = spec.uncached == "stepwise"
    cached, first = timed(arms.run_cached, state, tokens, force(rows, reference), layout)
    uncached, then = timed(arms.run_forced, state, reference, rows, layout, spec.uncached_length, stepwise)
    return Along(cached, uncached, {"along_cached": first, "along_uncached": then})


@dataclasses.dataclass(frozen=True)
class Begun:
    """A batch and its float64 run."""

    batch: Batch
    truth: Truth


@dataclasses.dataclass(frozen=True)
class Ran:
    """A variant's arms on their own and along the truth's tokens, and the cost where it was measured."""

    free: BatchRun
    along: Along
    cost: dict[str, Any] | None


class Mitigations(Runner[Begun, Variant, Ran]):
    """Every variant of every problem, beside a float64 run.

    Args:
      config: architecture.
      state32: weights as the checkpoint gives them, in fp32. They stay on the device; at most one variant's copy, or
        two of float64, lie beside them.
      spec: what to run; its controls and its stepwise problems are left to the divergence experiment. The aligned
        regime has the padded uncached length whatever it says.
      variants: what to compare, names apart.
      sampler: how tokens are chosen.
      stop_ids: token ids that end a row.
      repeats: timed runs for the cost, which each process measures once a variant, on the first batch it runs with it;
        0 leaves it out.
      backend: as for Arms.

    Raises:
      UserError: two variants of one name, or x64 is on already.
    """

    name = "mitigations"

    def __init__(
        self,
        config: ModelConfig,
        state32: nnx.State,
        spec: RunSpec,
        variants: Sequence[Variant],
        sampler: Sampler | None = None,
        stop_ids: tuple[int, ...] = (),
        repeats: int = 5,
        backend: str | None = None,
    ):
        if jax.config.read("jax_enable_x64"):
            raise UserError(
                "mitigations turn float64 on by themselves, for the truth alone; leave --precision=fp64 out"
            )
        names = [variant.name for variant in variants]
        if len(set(names)) < len(names):
            raise UserError(f"variants {', '.join(names)} name one twice; drop it")
        spec = dataclasses.replace(spec, control_problems=0, stepwise_problems=0, truth_problems=0)
        super().__init__(spec, {(variant.name,): variant for variant in variants})
        self.config, self.state32, self.repeats, self.backend = config, state32, repeats, backend
        self.programs = {
            v.name: Arms(config, v.precision, sampler, stop_ids, tile=v.tile, backend=backend) for v in variants
        }
        self.float64 = Float64Model(config, sampler, stop_ids)
        self.costed: set[str] = set()

    def describe(self) -> dict[str, Any]:
        variants = self.variants.values()
        return {"variants": {v.name: self._describe(v) | {"tile": v.tile} for v in variants}}

    def _describe(self, variant: Variant) -> dict[str, Any]:
        arms = self.programs[variant.name]
        return {"precision": arms.precision.to_json(), "held": arms.describe_held()}

    def _spec(self, variant: Variant) -> RunSpec:
        return self.spec if variant.tile is None else dataclasses.replace(self.spec, uncached_length="padded")

    def begin(self, batch: Batch, missing: Sequence[Variant]) -> Begun:
        layout, tokens, rows = lay_out(batch, self.spec, self.config)  # the same whatever is missing
        params = frozenset(variant.param for variant in missing)
        return Begun(batch, self.float64.run(self.state32, tokens, rows, layout, params))

    def run(self, begun: Begun, variant: Variant) -> Ran:
        arms, spec = self.programs[variant.name], self._spec(variant)
        state = hold(arms, self.state32)
        ran = run_batch(arms, state, begun.batch, spec)
        along = follow(arms, state, begun.truth, begun.batch, spec)
        cost = None
        if self.repeats and variant.name not in self.costed:
            self.costed.add(variant.name)
            layout, tokens, rows = lay_out(begun.batch, spec, self.config, variant.tile)
            cost = measure_cost(arms, state, tokens, rows, layout, self.repeats, self.backend)
        return Ran(ran, along, cost)

    def tell_time(self, begun: Begun, ran: Ran, seconds: float) -> Took:
        runs = ran.free
        tokens = {"cached": int(np.sum(runs.cached.lengths)), "uncached_forced": int(np.sum(runs.forced.lengths))}
        return Took(runs.seconds | ran.along.seconds, tokens, {"drafts": runs.drafts, "cost": ran.cost})

    def record(self, item: Item, row: int, begun: Begun, variant: Variant, ran: Ran) -> Line:
        arms, truth, along = self.programs[variant.name], begun.truth, ran.along
        found = compare_row(arms, item, row, ran.free, self._spec(variant))
        steps_of = [
            ("fp64", truth.broke[variant.param], None),
            ("cached (along fp64)", along.cached.nonfinite_step, None),
            ("uncached (along fp64)", along.uncached.nonfinite_step, None),
        ]
        newest = ran.free.layout.prompt - int(ran.free.rows.first[row]) - 1
        fault = found["invalid"] or find_fault(row, newest, steps_of)
        prompt, steps = ran.free.layout.prompt, int(truth.lengths[row])
        references = {"given": truth.given, "rounded": truth.rounded[variant.param]}

        def distances(run: Rollout) -> dict[str, Any]:
            return {name: measure_distance(logits[row], run.logits[row], steps) for name, logits in references.items()}

        return {
            "experiment": "mitigations",
            "problem": item.problem,
            "variant": variant.name,
            "key": ["mitigations", item.problem, variant.name],
            **self._describe(variant),
            **{name: found[name] for name in ("prompt_tokens", "prompt_sha256", "shapes", "sampling", "headroom")},
            "status": "invalid" if fault else "ok",
            "invalid": fault,
            "tokens": found["arms"] | {"fp64": truth.tokens[row, prompt : prompt + steps].tolist()},
            "teacher_forced": None if fault else found["teacher_forced"],
            "free_running": None if fault else found["free_running"],
            "distance": None
            if fault
            else {
                "cached": distances(along.cached),
                "uncached": distances(along.uncached),
                "weights": measure_distance(truth.given[row], references["rounded"][row], steps),
            },
        }


def make_runner(condition: Condition) -> Mitigations:
    """Runs a condition, whose weights are in fp32: variants round them to policies of their own."""
    checkpoint = condition.checkpoint
    return Mitigations(
        checkpoint.config, checkpoint.state, condition.spec, make_variants(condition.tile), condition.sampler,
        checkpoint.tokenizer.eos_ids,
    )  # fmt: skip
