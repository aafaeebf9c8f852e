"""How far do cached and uncached values part, layer by layer and position by position?

Both arms run along the cached arm's tokens. Cached values of the prompt are those of the prefill, later ones those of
the one-row steps. Uncached values are those of one pass over the whole text at the padded length: rows do not see what
follows them, so they are the values that the recomputation of each step has for its rows.

The control for grouped-query attention is the same model with each K/V head repeated until every query head has its
own: equal mathematics in multi-head form. What differs between the two is not the weights, nor what they compute.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from msgspec import structs

from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import ModelConfig
from jaxkv.decode import Arms
from jaxkv.experiments import traced_runs
from jaxkv.experiments.batches import Batch, Item, RunSpec
from jaxkv.experiments.drift.record import SEGMENTS, TENSORS, WATCHED, DriftRecord
from jaxkv.experiments.driver import ArmsRunner, Condition, Line, Took
from jaxkv.experiments.first_difference import Gap, compare_traces, fed_slots, find_first, names_that_fit, split_name
from jaxkv.experiments.record_parts import ARMS
from jaxkv.experiments.traced_runs import Reference, count_equal, find_fault, shorten, sum_logits
from jaxkv.logits import compare_logits
from jaxkv.rollout import Rollout
from jaxkv.tracing import trace_cached, trace_uncached

GRID_CELLS = 1140  # layers times bins: a record's grid then stays near 120 kB


def repeat_kv_heads(config: ModelConfig, state: nnx.State) -> tuple[ModelConfig, nnx.State]:
    """The mathematically equal model with as many K/V heads as query heads: each is repeated for its G queries."""
    groups = config.num_query_heads // config.num_kv_heads
    wide = dataclasses.replace(config, name=f"{config.name}-repeated", num_kv_heads=config.num_query_heads)
    leaves = {path: leaf[...] for path, leaf in flat_paths(state).items()}
    for path, leaf in leaves.items():
        if path.endswith(("attn/k", "attn/v", "attn/k_bias", "attn/v_bias")):
            leaves[path] = jnp.repeat(leaf, groups, axis=0)
    return wide, with_leaves(state, leaves)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Both arms watched along one text: rollouts, gaps, and the wall time of each arm. The values are let go."""

    cached: Rollout
    uncached: Rollout
    gaps: dict[str, Gap]
    seconds: dict[str, float]


def trace_pair(arms: Arms, state: nnx.State, reference: Reference, names: Sequence[str]) -> Pair:
    """Traces both arms along the reference's tokens."""
    given = (arms, state, reference.text, reference.forced, reference.layout, names)
    seconds, traces = {}, {}
    for arm, trace in (("cached", trace_cached), ("uncached_forced", trace_uncached)):
        begin = time.perf_counter()
        traces[arm] = trace(*given)
        jax.block_until_ready((traces[arm].run, traces[arm].values))
        seconds[arm] = time.perf_counter() - begin
    cached, uncached = traces.values()
    return Pair(cached.run, uncached.run, compare_traces(cached, uncached, reference.rows, reference.layout), seconds)


def _of_layers(gaps: Mapping[str, Gap], tensor: str) -> list[Gap]:
    return [gap for name, gap in gaps.items() if split_name(name)[0] == tensor]


def _measure(gaps: Sequence[Gap], row: int, counted: np.ndarray) -> dict[str, list]:
    """The columns of a record over the positions counted, [S] booleans."""
    return {
        "relative": [shorten(gap.relative[row][counted].mean()) for gap in gaps],
        "cosine": [shorten(gap.cosine[row][counted].mean()) for gap in gaps],
        "max_abs": [shorten(gap.max_abs[row][counted].max()) for gap in gaps],
        "bit_equal": [int(gap.equal[row][counted].sum()) for gap in gaps],
    }


def _measure_layers(gaps: Mapping[str, Gap], row: int, segments: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {
        tensor: {
            name: _measure(_of_layers(gaps, tensor), row, counted) if counted.any() else None
            for name, counted in segments.items()
        }
        for tensor in TENSORS
    }


def plan_bins(places: Mapping[str, int], layers: int) -> list[list[int]]:
    """Bins [begin, end) of positions, none across the end of the prompt; a bin a position if they fit a record."""
    room = max(2, GRID_CELLS // (layers + 1))
    total, bins, begin = sum(places.values()), [], 0
    for count in places.values():
        parts = count if total <= room else min(count, room // 2)
        edges = np.linspace(begin, begin + count, parts + 1).astype(int).tolist()
        bins += [list(pair) for pair in itertools.pairwise(edges)]
        begin += count
    return bins


def _measure_grid(gaps: Mapping[str, Gap], row: int, first: int, places: Mapping[str, int], layers: int) -> dict:
    bins = plan_bins(places, layers)

    def means(columns: list[np.ndarray]) -> list[list[float]]:
        return [[shorten(column[row, first + a : first + b].mean()) for a, b in bins] for column in columns]

    grid: dict[str, Any] = {"bins": bins}
    for tensor in TENSORS:
        found = _of_layers(gaps, tensor)
        grid[tensor] = {
            "relative": means([gap.relative for gap in found]),
            "cosine": means([gap.cosine for gap in found]),
            "bit_equal": means([gap.equal for gap in found]),
        }
    return grid


def _measure_logits(uncached: Rollout, cached: Rollout, row: int, steps: int) -> dict[str, Any]:
    found = sum_logits(compare_logits(uncached.logits[row], cached.logits[row], steps))
    return found | {"max_abs": shorten(found["max_abs"])}


def _list_path(gaps: Mapping[str, Gap], row: int, counted: np.ndarray, begin: str | None) -> dict[str, list]:
    """Every value from `begin` to the logits; nothing if there is none to begin with."""
    names = list(gaps)
    shown = names[names.index(begin) :] if begin else []
    found = _measure([gaps[name] for name in shown], row, counted)
    return {"name": shown} | {figure: found[figure] for figure in ("relative", "max_abs", "bit_equal")}


class Drift(ArmsRunner[Reference, None, dict[str, Pair]]):
    """Both arms of every problem in either regime, watched, at one padded length."""

    name = "drift"

    def __init__(self, arms: Arms, state: nnx.State, spec: RunSpec):
        super().__init__(arms, state, spec, {(): None})

    @functools.cached_property
    def _repeated(self) -> tuple[Arms, nnx.State] | None:
        arms = self.arms
        if arms.config.num_kv_heads == arms.config.num_query_heads:
            return None
        config, wide = repeat_kv_heads(arms.config, self.state)
        given = (config, arms.precision, arms.sampler, arms.stop_ids)
        return Arms(*given, tile=arms.tile, attention=arms.attention), wide

    def begin(self, batch: Batch, missing: Sequence[None]) -> Reference:
        return traced_runs.run_reference(self.arms, self.state, batch, self.spec)

    def run(self, reference: Reference, variant: None) -> dict[str, Pair]:
        if reference.broken:
            return {}
        every = names_that_fit(self.arms, reference.layout)
        few = [name for name in every if split_name(name)[0] in TENSORS]
        pairs = {"figures": trace_pair(self.arms, self.state, reference, few)}
        pairs["walk"] = trace_pair(self.arms, self.state, reference, every)
        if self._repeated is not None:
            pairs["repeated"] = trace_pair(*self._repeated, reference, few)
        return pairs

    def tell_time(self, reference: Reference, pairs: Mapping[str, Pair], seconds: float) -> Took:
        of_arms = pairs["figures"].seconds if pairs else {}
        return Took(of_arms, dict.fromkeys(of_arms, int(jnp.sum(reference.cached.lengths))))

    def record(self, item: Item, row: int, reference: Reference, variant: None, pairs: Mapping[str, Pair]) -> Line:
        config, layout = self.arms.config, reference.layout
        watched = {f"cached ({name})": pair.cached for name, pair in pairs.items()}
        watched |= {f"uncached ({name})": pair.uncached for name, pair in pairs.items()}
        fault = find_fault(reference, row, watched)
        record: dict[str, Any] = {
            "experiment": "drift",
            "problem": item.problem,
            "key": ["drift", item.problem],
            **traced_runs.describe_row(self.arms, item, row, reference, self.spec, fault),
            "heads": {"query": config.num_query_heads, "kv": config.num_kv_heads},
            "num_layers": config.num_layers,
            **dict.fromkeys(DriftRecord.FIGURES),
        }
        if fault or not pairs:
            return record
        pair, walk, repeated = pairs["figures"], pairs["walk"], pairs.get("repeated")
        steps, first = record["steps"], int(reference.rows.first[row])
        fed = fed_slots(reference.rows, layout, reference.cached.lengths, row)
        of_prompt = np.arange(layout.slots) < layout.prompt
        segments = dict(zip(SEGMENTS, (fed & of_prompt, fed & ~of_prompt), strict=True))
        places = {name: int(counted.sum()) for name, counted in segments.items()}
        differences = {name: find_first(walk.gaps, counted, first, row) for name, counted in segments.items()}
        begin = differences["decoded"]
        name = None if begin is None else begin.op if begin.layer is None else f"{begin.op}.{begin.layer}"
        record |= {
            "instrumented_bit_equal": {
                name: {arm: count_equal(getattr(pairs[name], arm), getattr(reference, arm), row, steps) for arm in ARMS}
                for name in WATCHED
            },
            "places": places,
            "layers": _measure_layers(pair.gaps, row, segments),
            "logits": _measure_logits(pair.uncached, pair.cached, row, steps),
            "grid": _measure_grid(pair.gaps, row, first, places, config.num_layers),
            "first": {name: found and structs.asdict(found) for name, found in differences.items()},
            "path": _list_path(walk.gaps, row, segments["decoded"], name),
        }
        if repeated is not None:
            record["repeated"] = {
                "layers": _measure_layers(repeated.gaps, row, segments),
                "logits": _measure_logits(repeated.uncached, repeated.cached, row, steps),
            }
        return record


def make_runner(condition: Condition) -> Drift:
    """Runs a condition."""
    return Drift(condition.arms, condition.state, condition.spec)
