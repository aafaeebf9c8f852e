"""Is it the cached state that makes the arms part? Values of one arm, put into the other.

A patch of the residual stream at the current position alone cannot undo the keys and values that stand in the cache
already, so it is run beside the stream at all positions, K, V and both. Two controls bound what a patch can do: with
every value of the donor the recipient must have the donor's logits bit for bit, with its own it must not change.

Prefill, the one-row loop and the recomputation are compiled once each for a batch's shapes. Which layers, positions and
kinds of values are patched are arguments: a grid of layers and positions compiles nothing.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.decode import Arms
from jaxkv.drafts import first_disagreement, free_stepwise
from jaxkv.experiments import traced_runs
from jaxkv.experiments.batches import Batch, Item, RunSpec, taken
from jaxkv.experiments.driver import ArmsRunner, Condition, Line
from jaxkv.experiments.patching import record as records
from jaxkv.experiments.patching.record import COUNTS, DIRECTIONS, INTO_CACHED, PATCHES, Kind
from jaxkv.experiments.record_parts import ARMS
from jaxkv.experiments.traced_runs import Reference, count_equal, find_fault, sum_logits
from jaxkv.logits import compare_logits
from jaxkv.rollout import PAD_ID, Layout, Rollout, Rows, force
from jaxkv.tracing import Trace, list_values, make_patch, trace_cached, trace_uncached

GRID_PATCHES = (records.RESIDUAL, records.KEYS_VALUES)
Values = dict[str, jax.Array]
Where = dict[str, np.ndarray]


def select(kind: Kind, layers: Sequence[int], num_layers: int, slots: np.ndarray) -> Where:
    """Masks [S] of a patch by name, in these layers; of the residual stream `num_layers` is what leaves the last."""
    names = [f"resid_pre.{layer}" for layer in layers] if kind.residual else []
    names += [f"{part}.{layer}" for part in kind.state for layer in layers if layer < num_layers]
    names += [f"resid_pre.{num_layers}", "final_norm"] if kind.through else []
    return dict.fromkeys(names, slots)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` layers, first and last among them."""
    return sorted({round(x) for x in np.linspace(0, count - 1, min(count, most)).tolist()})


class Patcher:
    """Patched runs of both arms of a batch, all through the same three programs."""

    def __init__(self, arms: Arms, state: nnx.State, layout: Layout):
        self.arms, self.state, self.layout = arms, state, layout
        L = arms.config.num_layers
        self.names = [f"resid_pre.{layer}" for layer in range(L + 1)] + ["final_norm"]
        self.names += [f"{part}.{layer}" for part in "kv" for layer in range(L)]
        shapes = list_values(arms, layout.batch, layout.slots)
        self.nothing = {name: jnp.zeros(shapes[name].shape, shapes[name].dtype) for name in self.names}

    def run(
        self,
        arm: str,
        tokens: np.ndarray,
        rows: Rows,
        values: Values | None = None,
        where: Where | None = None,
        newest: bool = False,
    ) -> Trace:
        """A run of 'cached' or 'uncached' with `values` in place of its own at the slots `where` names them."""
        masks = {name: jnp.asarray(mask) for name, mask in (where or {}).items()}
        patch = make_patch(self.nothing if values is None else values, masks, newest)
        given = (self.arms, self.state, tokens, rows, self.layout, self.names, patch)
        return trace_cached(*given) if arm == "cached" else trace_uncached(*given, stepwise=newest)


@dataclasses.dataclass(frozen=True)
class Sides:
    """A direction of patching in a batch."""

    direction: str
    recipient: str  # arm that is patched
    base: Trace  # it, unpatched, along the cached arm's tokens
    donor: Trace  # the other arm along the same
    free: Trace | None  # the donor's own free run with its values, None if no row parts
    gaps: list[dict[str, list] | None]  # of each row, base beside donor (compare_logits); None where it broke


def open_sides(patcher: Patcher, arms: Arms, reference: Reference) -> dict[str, Sides]:
    """Both directions."""
    layout, lengths = reference.layout, np.asarray(reference.cached.lengths)
    traces = {arm: patcher.run(arm, reference.text, reference.forced) for arm in ARMS}
    broke = {f"{arm} (watched)": trace.run for arm, trace in traces.items()}
    own: dict[str, Trace | None] = dict.fromkeys(ARMS)
    if np.any(first_disagreement(reference.uncached, layout.prompt) < lengths):
        free = free_stepwise(arms, patcher.state, reference.uncached, reference.rows, layout)
        text = np.asarray(free.tokens)[:, : layout.slots]
        own["cached"] = traces["cached"]
        own["uncached"] = patcher.run("uncached", text, force(reference.rows, free))

    def open_side(direction: str) -> Sides:
        to, of = ("cached", "uncached") if direction == INTO_CACHED else ("uncached", "cached")
        base, donor = traces[to].run.logits, traces[of].run.logits
        gaps = [
            None if find_fault(reference, row, broke) else compare_logits(donor[row], base[row], int(lengths[row]))
            for row in range(layout.batch)
        ]
        return Sides(direction, to, traces[to], traces[of], own[of], gaps)

    return {direction: open_side(direction) for direction in DIRECTIONS}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What is kept of a patched run."""

    nonfinite_step: np.ndarray  # [B]
    figures: list[dict[str, Any] | None]  # of each row (record); None where it broke
    unchanged: list[int]  # of each row, steps with the bits of the unpatched run


def measure(sides: Sides, run: Rollout) -> Outcome:
    """Sets a patched run beside donor and base."""
    broke, lengths = np.asarray(run.nonfinite_step), np.asarray(sides.base.run.lengths)

    def of_row(row: int) -> dict[str, Any] | None:
        gap, steps = sides.gaps[row], int(lengths[row])
        if gap is None or broke[row] >= 0:
            return None
        found = compare_logits(sides.donor.run.logits[row], run.logits[row], steps)
        before, after = (np.asarray(x["flip"], bool) for x in (gap, found))
        return {
            "kl": float(np.sum(found["kl"])),
            "recovered": int(np.sum(before & ~after)),
            "broken": int(np.sum(~before & after)),
            "bit_equal": int(np.sum(found["bit_equal"])),
        }

    rows = range(len(broke))
    unchanged = [count_equal(run, sides.base.run, row, int(lengths[row])) for row in rows]
    return Outcome(broke, [of_row(row) for row in rows], unchanged)


@dataclasses.dataclass(frozen=True)
class Patched:
    """All runs of one patch in one direction: everywhere, freely (None if there is nothing to follow), and in parts."""

    sides: Sides
    everywhere: Outcome
    free: Rollout | None
    by_layer: dict[int, Outcome]
    bins: list[tuple[int, int]]
    grid: dict[int, list[Outcome]]  # layer -> of each bin


def run_patch(
    patcher: Patcher, sides: Sides, patch: str, reference: Reference, max_layers: int, position_bins: int
) -> Patched:
    """Runs a patch in all layers, freely where the arms part, layer by layer, and over layers and positions."""
    kind, layout, L = PATCHES[patch], reference.layout, patcher.arms.config.num_layers
    newest, forward = kind.residual == "now", sides.direction == INTO_CACHED
    values = sides.base.values if kind.itself else sides.donor.values
    every, slots = np.ones(layout.slots, bool), np.arange(layout.slots)

    def run(layers: Sequence[int], where: np.ndarray = every) -> Rollout:
        masks = select(kind, layers, L, where)
        return patcher.run(sides.recipient, reference.text, reference.forced, values, masks, newest).run

    def run_free(values: Values) -> Rollout:
        tokens = np.array(reference.text)
        tokens[:, layout.prompt :] = PAD_ID
        return patcher.run("cached", tokens, reference.rows, values, select(kind, range(L), L, every), newest).run

    everywhere, free = run(range(L)), None
    if sides.free is not None and not kind.itself:
        free = run_free(sides.free.values) if forward else everywhere
    alone = patch not in records.CONTROLS and (forward or not newest)  # else each layer takes a recomputation a step
    layers = spread(L + (bool(kind.residual) and not kind.state), max_layers) if alone else []
    grid_layers: list[int] = []
    bins: list[tuple[int, int]] = []
    if patch in GRID_PATCHES and forward and position_bins:
        grid_layers = spread(L, max(1, max_layers // 2))
        begin, end = int(np.min(reference.rows.first)), layout.prompt + int(np.max(reference.cached.lengths))
        bins = list(itertools.pairwise(np.unique(np.linspace(begin, end, position_bins + 1).astype(int)).tolist()))
    return Patched(
        sides,
        measure(sides, everywhere),
        free,
        {layer: measure(sides, run([layer])) for layer in layers},
        bins,
        {layer: [measure(sides, run([layer], (slots >= a) & (slots < b))) for a, b in bins] for layer in grid_layers},
    )


def _follow(patched: Patched, reference: Reference, row: int) -> dict[str, Any] | None:
    """How far a patched run goes along the donor's own tokens."""
    sides, run, prompt = patched.sides, patched.free, reference.layout.prompt
    parted = int(first_disagreement(reference.uncached, prompt)[row])
    if run is None or sides.free is None or parted >= int(reference.cached.lengths[row]):
        return None
    own = taken(sides.free.run, row, prompt)
    if sides.direction != INTO_CACHED:
        until = int(first_disagreement(run, prompt)[row])
        return {"steps": len(own), "parted": parted, "until": until if until < len(own) else None, "agreeing": None}
    tokens = taken(run, row, prompt)
    shared = min(len(own), len(tokens))
    same = np.equal(own[:shared], tokens[:shared])
    until = shared if same.all() else int(np.argmin(same))
    return {
        "steps": len(own),
        "parted": parted,
        "until": None if until == len(own) == len(tokens) else until,
        "agreeing": int(same[parted:].sum()),
    }


def _find_patched_fault(reference: Reference, row: int, patched: Patched | None) -> dict[str, Any] | None:
    if patched is None:
        return find_fault(reference, row, {})
    runs: dict[str, Any] = {"donor": patched.sides.donor.run, "recipient": patched.sides.base.run}
    runs |= {"patched": patched.everywhere}
    runs |= {f"patched in layer {layer}": found for layer, found in patched.by_layer.items()}
    runs |= {f"patched in part {n}": found for n, found in enumerate(itertools.chain(*patched.grid.values()))}
    return find_fault(reference, row, runs if patched.free is None else runs | {"patched (free)": patched.free})


@dataclasses.dataclass(frozen=True)
class Begun:
    """A batch before it is patched; `sides` are by direction, none where the batch broke."""

    reference: Reference
    patcher: Patcher
    sides: dict[str, Sides]


class Patching(ArmsRunner[Begun, tuple[str, str], Patched | None]):
    """Every patch of every problem, in both directions.

    At most `max_layers` are patched one at a time, spread evenly if there are more. The grid has half as many, and
    `position_bins` columns; 0 is no grid. Arms are of the plain regime, the uncached one of one padded length.
    """

    name = "patching"

    def __init__(self, arms: Arms, state: nnx.State, spec: RunSpec, max_layers: int = 16, position_bins: int = 4):
        super().__init__(arms, state, spec, {pair: pair for pair in itertools.product(DIRECTIONS, PATCHES)})
        self.max_layers, self.position_bins = max_layers, position_bins

    def describe(self) -> dict[str, Any]:
        return {"patching": {"layers": self.max_layers, "bins": self.position_bins}}

    def begin(self, batch: Batch, missing: Sequence[tuple[str, str]]) -> Begun:
        reference = traced_runs.run_reference(self.arms, self.state, batch, self.spec)
        patcher = Patcher(self.arms, self.state, reference.layout)
        return Begun(reference, patcher, {} if reference.broken else open_sides(patcher, self.arms, reference))

    def run(self, begun: Begun, variant: tuple[str, str]) -> Patched | None:
        direction, patch = variant
        if (sides := begun.sides.get(direction)) is None:
            return None
        return run_patch(begun.patcher, sides, patch, begun.reference, self.max_layers, self.position_bins)

    def record(self, item: Item, row: int, begun: Begun, variant: tuple[str, str], patched: Patched | None) -> Line:
        config, reference, (direction, patch) = self.arms.config, begun.reference, variant
        fault = _find_patched_fault(reference, row, patched)
        record: dict[str, Any] = {
            "experiment": "patching",
            "problem": item.problem,
            "key": ["patching", item.problem, direction, patch],
            "direction": direction,
            "patch": patch,
            **traced_runs.describe_row(self.arms, item, row, reference, self.spec, fault),
            "heads": {"query": config.num_query_heads, "kv": config.num_kv_heads},
            "num_layers": config.num_layers,
            **dict.fromkeys(records.PatchingRecord.FIGURES),
        }
        if fault or patched is None or (gap := patched.sides.gaps[row]) is None:
            return record
        sides, steps, first = patched.sides, record["steps"], int(reference.rows.first[row])
        pair = (sides.base.run, sides.donor.run) if direction == INTO_CACHED else (sides.donor.run, sides.base.run)
        sums = sum_logits(gap)
        record |= {
            "instrumented_bit_equal": {
                arm: count_equal(run, getattr(reference, arm), row, steps) for arm, run in zip(ARMS, pair, strict=True)
            },
            "gap": {name: sums[name] for name in ("kl", "flips", "bit_equal")},
            "all": patched.everywhere.figures[row],
            "unchanged": patched.everywhere.unchanged[row],
            "trajectory": _follow(patched, reference, row),
        }

        def column(outcomes: Iterable[Outcome], name: str) -> list[Any]:
            return [figures[name] for outcome in outcomes if (figures := outcome.figures[row]) is not None]

        if by_layer := patched.by_layer:
            columns = {name: column(by_layer.values(), name) for name in ("kl", *COUNTS)}
            record["by_layer"] = {"layer": list(by_layer), **columns}
        if patched.grid:
            record["grid"] = {
                "layer": list(patched.grid),
                "bins": [[max(a - first, 0), max(b - first, 0)] for a, b in patched.bins],
                "kl": [column(line, "kl") for line in patched.grid.values()],
            }
        return record


def make_runner(condition: Condition) -> Patching:
    """Runs a condition."""
    controls = condition.options.controls
    return Patching(condition.plain, condition.state, condition.spec, controls.patch_layers, controls.patch_bins)
