"""Do errors of a quantized cache accumulate under decoding, and are wrong token scales the reason?

The question is that of Muller et al., arXiv 2606.03458 (KVarN). Of the regimes that record.py tells, `static` against
`decode` is what accumulates; accumulated(1) and decode are one thing, by two programs. In `static` an oracle repairs
token scales too (jaxkv.interventions.repaired_cache).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import KVCache
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments import traced_runs
from jaxkv.experiments.accumulation.record import FIGURES
from jaxkv.experiments.batches import Batch, Item, RunSpec
from jaxkv.experiments.cache_measures import count_saturated, describe_saturated
from jaxkv.experiments.changes import read_changes
from jaxkv.experiments.driver import ArmsRunner, Condition, Key, Line, Took
from jaxkv.experiments.regimes import WATCHED, Replay, ReplayPrograms
from jaxkv.experiments.traced_runs import Reference
from jaxkv.interventions.quantized_cache import Quantization, cache_bytes, effective_bits
from jaxkv.interventions.quantizers import CacheQuant, split_error
from jaxkv.interventions.repaired_cache import CHOICES, Repair
from jaxkv.logits import compare_logits
from jaxkv.rollout import Rollout
from jaxkv.tracing import Trace, trace_cached

ACCUMULATED = ("kvarn:k2v2", "kivi:k2v2", "quarot:2")  # the 2-bit methods of the seed study, if none is asked for
SEGMENT_BINS = 12  # of the prompt, and of what is decoded
Bins = list[list[int]]


def list_regimes(blocks: Sequence[int]) -> dict[str, int | None]:
    """Regime -> rows of a call, None for `static`. Raises UserError for a block of no tokens."""
    if min(blocks, default=1) < 1:
        raise UserError(f"blocks of {min(blocks)} tokens accumulate nothing; use 1 or more")
    return {"static": None} | {f"accumulated:{block}": block for block in blocks} | {"decode": 1}


def plan_bins(prompt: int, decoded: int) -> Bins:
    """Bins [begin, end) of positions, none across the end of the prompt."""
    bins: Bins = []
    for begin, count in ((0, prompt), (prompt, decoded)):
        edges = np.linspace(begin, begin + count, min(count, SEGMENT_BINS) + 1).astype(int).tolist()
        bins += [list(pair) for pair in itertools.pairwise(edges)]
    return bins


@dataclasses.dataclass(frozen=True)
class Ran:
    """One regime of a batch.

    The watched run; what it packed beside the clean run's values (`_measure_stored`), and what its format cannot hold
    of those ([B, 3], cache_measures.count_saturated); the arm itself, in `decode`; the attention errors of repaired
    runs, in `static`: choice -> L arrays [B, S]; [B] the first step whose logits were not finite, -1 if none.
    """

    replay: Replay
    stored: Mapping[str, np.ndarray]
    saturated: np.ndarray | None
    arm: Rollout | None
    repairs: Mapping[str, Sequence[np.ndarray]]
    nonfinite_step: np.ndarray


def _mean_by_bin(errors: Sequence[Any], row: int, first: int, bins: Bins) -> list[list[float]]:
    """Of L arrays [B, S] in one row, whose text begins at slot `first`."""
    texts = [np.asarray(error)[row, first:] for error in errors]
    return [[traced_runs.shorten(text[begin:end].mean()) for begin, end in bins] for text in texts]


def _measure_logits(clean: jax.Array, changed: jax.Array, steps: int, prompt: int, bins: Bins) -> dict[str, Any]:
    """Figures of one row's logits [n, V]; step t follows the token at position prompt - 1 + t."""
    found = compare_logits(clean, changed, steps)
    kl, agree = np.asarray(found["kl"]), ~np.asarray(found["flip"], bool)
    places = prompt - 1 + np.arange(steps)
    inside = [(places >= a) & (places < b) for a, b in bins]
    return {
        "kl": [traced_runs.shorten(kl[here].mean()) if here.any() else None for here in inside],
        "agree": [int(agree[here].sum()) if here.any() else None for here in inside],
        "places": [int(here.sum()) for here in inside],
        "kl_sum": float(kl.sum()),
        "agree_sum": int(agree.sum()),
        "bit_equal": int(np.sum(found["bit_equal"])),
    }


@jax.jit
def _split(clean: jax.Array, read: jax.Array, packed: jax.Array) -> jax.Array:
    """[B, 4] of a side of a layer: packed tokens, sums of squared norms, of E_M and of E_D over them."""
    norm, direction = split_error(clean, read)
    size = jnp.sum(jnp.square(clean.astype(jnp.float32)), axis=-1)
    sums = [jnp.sum(jnp.where(packed[:, :, None], x, 0), axis=(1, 2)) for x in (size, norm, direction)]
    return jnp.stack([jnp.sum(packed, axis=1).astype(jnp.float32), *sums], axis=1)


def _measure_stored(cache: Any, clean: Trace, num_layers: int) -> dict[str, np.ndarray]:
    """Side -> [L, B, 4], as `_split` has it."""
    found: dict[str, list[np.ndarray]] = {"k": [], "v": []}
    for layer in range(num_layers):
        for side, read, packed in zip("kv", cache.read(layer), cache.packed(layer), strict=True):
            found[side].append(np.asarray(_split(clean.values[f"{side}.{layer}"], read, packed), np.float64))
    return {side: np.stack(values) for side, values in found.items()}


def _describe_stored(sums: np.ndarray) -> dict[str, list]:
    """Of one row: sums [L, 4]."""
    columns: dict[str, list] = {"packed": [], "relative": [], "norm_share": []}
    for packed, size, norm, direction in sums.tolist():
        total = norm + direction
        columns["packed"].append(int(packed))
        columns["relative"].append(traced_runs.shorten(np.sqrt(total / size) if size else 0.0) if packed else None)
        columns["norm_share"].append(traced_runs.shorten(norm / total if total else 0.0) if packed else None)
    return columns


@dataclasses.dataclass(frozen=True)
class Begun:
    """A batch along the clean cached arm, and that run's values."""

    reference: Reference
    clean: Trace


class Accumulation(ArmsRunner[Begun, tuple[CacheQuant, str], Ran]):
    """Every problem under every quantizer and regime; programs are compiled once for a quantizer and a batch's shapes.

    Arms are of the plain regime. Raises UserError for a quantizer that does not suit the model, a block of no tokens.
    """

    name = "accumulation"

    def __init__(
        self, arms: Arms, state: nnx.State, spec: RunSpec, quants: Sequence[CacheQuant], blocks: Sequence[int] = (128,)
    ):
        self.regimes = list_regimes(blocks)
        variants: dict[Key, tuple[CacheQuant, str]]
        variants = {(str(quant), regime): (quant, regime) for quant in quants for regime in self.regimes}
        super().__init__(arms, state, spec, variants)
        self.programs = ReplayPrograms(arms)

    def begin(self, batch: Batch, missing: Sequence[tuple[CacheQuant, str]] = ()) -> Begun:
        reference = traced_runs.run_reference(self.arms, self.state, batch, self.spec)
        names = [f"{tensor}.{layer}" for layer in range(self.arms.config.num_layers) for tensor in WATCHED]
        given = (self.arms, self.state, reference.text, reference.forced, reference.layout, names)
        return Begun(reference, trace_cached(*given))

    def run(self, begun: Begun, variant: tuple[CacheQuant, str]) -> Ran:
        reference, clean, (quant, regime) = begun.reference, begun.clean, variant
        given = (self.state, reference.cached, reference.forced, reference.layout, clean)
        block, lengths = self.regimes[regime], np.asarray(reference.cached.lengths)
        replay = self.programs.run(*given, Quantization(quant), block or 1, static=block is None)
        broken, arm, repairs = replay.nonfinite_step(lengths), None, {}
        if regime == "decode":
            cache = self.arms.make_cache(reference.forced, reference.layout, Quantization(quant))
            along = reference.text, reference.forced, reference.layout
            arm, _ = self.arms.run_cached_keeping(self.state, *along, cache)
            broken = np.where(broken < 0, np.asarray(arm.nonfinite_step), broken)
        if block is None:
            for choice in CHOICES:
                repaired = self.programs.run(*given, Repair(quant, choice), static=True)
                repairs[choice] = [np.asarray(error) for error in repaired.errors]
        layers, dtype = range(self.arms.config.num_layers), self.arms.precision.cache
        k, v = (tuple(clean.values[f"{side}.{layer}"].astype(dtype) for layer in layers) for side in "kv")
        saturated = count_saturated(quant, KVCache(k, v, clean.positions), replay.cache)
        return Ran(replay, _measure_stored(replay.cache, clean, len(layers)), saturated, arm, repairs, broken)

    def tell_time(self, begun: Begun, ran: Ran, seconds: float) -> Took:
        return Took({"run": seconds}, {"run": int(jnp.sum(begun.reference.cached.lengths))})

    def record(self, item: Item, row: int, begun: Begun, variant: tuple[CacheQuant, str], ran: Ran) -> Line:
        reference, clean, quant, regime = begun.reference, begun.clean, str(variant[0]), variant[1]
        arms, layers = self.arms, self.arms.config.num_layers
        fault = traced_runs.find_fault(reference, row, {"clean (watched)": clean.run, f"{quant} ({regime})": ran})
        cache = ran.replay.cache
        plain = 2 * layers * cache.positions.size * arms.config.num_kv_heads * arms.config.head_dim
        record = {
            "experiment": "accumulation",
            "problem": item.problem,
            "key": ["accumulation", item.problem, quant, regime],
            **traced_runs.describe_row(arms, item, row, reference, self.spec, fault),
            "num_layers": layers,
            "quantizer": quant,
            "regime": regime,
            "storage": {
                "bytes": cache_bytes(cache),
                "clean_bytes": plain * jnp.dtype(arms.precision.cache).itemsize,
                "slots": reference.layout.slots,
                "bits": effective_bits(cache, arms.config),
            },
            "saturated": describe_saturated(ran.saturated, row),
            "bins": None,
            **dict.fromkeys(FIGURES),
        }
        if fault:
            return record
        steps, first, prompt = record["steps"], int(reference.rows.first[row]), len(item.prompt)
        bins = plan_bins(prompt, steps - 1)
        changed = ran.replay.logits if ran.arm is None else ran.arm.logits
        return record | {
            "bins": bins,
            "attention_error": {"error": _mean_by_bin(ran.replay.errors, row, first, bins)},
            "logits": _measure_logits(reference.cached.logits[row], changed[row], steps, prompt, bins),
            "stored": {side: _describe_stored(sums[:, row]) for side, sums in ran.stored.items()},
            "repair": {choice: _mean_by_bin(errors, row, first, bins) for choice, errors in ran.repairs.items()}
            or None,
            "instrumented_bit_equal": {
                "clean": traced_runs.count_equal(clean.run, reference.cached, row, steps),
                "changed": None if ran.arm is None else traced_runs.count_equal(ran.replay, ran.arm, row, steps),
            },
        }


def make_runner(condition: Condition) -> Accumulation:
    """Runs a condition: the quantizers that it asks for, or the seed study's."""
    changes, _ = read_changes(condition.options.cache, condition.checkpoint.config, quants=ACCUMULATED)
    quants = [change.what for change in changes if isinstance(change.what, CacheQuant)]
    return Accumulation(condition.plain, condition.state, condition.spec, quants, condition.options.cache.blocks)
