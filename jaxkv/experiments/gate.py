"""The gate: before a study, cached and uncached must agree bit for bit where nothing but a bug can part them.

Two parts, since no single one sees everything:

* **The aligned regime, with the study's weights.** One executable over tiles of fixed shape makes the same roundings in
  both arms, so a difference is none: a cached key or value is not the one that recomputation gives. It is sensitive
  where a tolerance is blind: a dtype cut on one path or a window that is off by one can hide below what 16 bits scatter
  anyway. It cannot see what both arms get wrong alike, and it does not run the plain regime's programs.
* **The plain regime's own programs, with the probe's weights** (`probe.py`), under which no sum is rounded. Prefill,
  the one-row loop and the padded forward, compiled for the study's shapes, must then agree with each other and with the
  aligned programs: in the slots they fill, their positions, keys, values and dtypes, and in the logits.

What neither sees: what all programs get wrong alike (the tests against transformers are for that), windows and
positions beyond the texts tried, and in the plain programs alone an error of queries or scores.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import EMPTY, KVCache
from jaxkv.config import DType
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments.batches import Batch, Item, RunSpec, lay_out, plan_batches
from jaxkv.experiments.first_difference import Difference, Gap, compare_values, find_first
from jaxkv.experiments.probe import probe_state, probe_tolerance
from jaxkv.rollout import Layout, Rollout, Rows, force, start_rollout


class GateError(UserError):
    """The gate failed; `found` says what differs from what, and where."""

    def __init__(self, why: str, found: str):
        super().__init__(
            f"the gate failed: {why}{found}; the cache has a bug and no figure would mean anything: report it, or run "
            "anyway with --gate=off"
        )
        self.found = found


def _set_beside(x: jax.Array, y: jax.Array, counted: np.ndarray, tolerance: float) -> Gap:
    """x and y [B, T, ...] where `counted` [B, T]; a distance within tolerance times the largest there is none."""
    gap = compare_values(x, y)
    if not tolerance or not jnp.issubdtype(x.dtype, jnp.floating):
        return gap
    largest = np.max(np.abs(np.asarray(x, np.float32))[counted], initial=0)
    return dataclasses.replace(gap, equal=gap.equal | (gap.max_abs <= tolerance * largest))  # NaN differs


def first_cache_difference(
    a: KVCache, b: KVCache, first: np.ndarray, filled: np.ndarray, tolerance: float = 0.0
) -> Difference | None:
    """The first tensor, in order of execution, whose bits or dtype differ in the slots `filled` [B, S]; None if none.

    `first` [B] is the slot of each row's position 0. Slots that only one cache has are left out. Keys and values may
    differ by `tolerance`, relative to the largest in the tensor.
    """
    slots = min(a.positions.shape[1], b.positions.shape[1])
    counted = filled[:, :slots]

    pairs = {"positions": (a.positions, b.positions)}
    for n in range(len(a.k)):
        pairs |= {f"k.{n}": (a.k[n], b.k[n]), f"v.{n}": (a.v[n], b.v[n])}
    for name, (x, y) in pairs.items():
        gap = _set_beside(x[:, :slots], y[:, :slots], counted, tolerance)
        if (found := find_first({name: gap}, counted, first[:, None])) is not None:
            return found
    return None


@dataclasses.dataclass(frozen=True)
class _Arm:
    """A rollout, the cache it ended with, and what to call it."""

    name: str
    run: Rollout
    cache: KVCache


def _compare(
    arm: _Arm, reference: _Arm, kept: DType, rows: Rows, layout: Layout, why: str, tolerance: float = 0.0
) -> None:
    """Raises UserError unless an arm and the reference agree along the same tokens, with caches of the dtype `kept`."""
    a, b = arm.run, reference.run
    problems, first = np.asarray(rows.problems), np.asarray(rows.first)
    lengths, broke = np.asarray(a.lengths), np.asarray(a.nonfinite_step)
    where = []
    # The last token was fed to nobody. A row that broke off holds NaN in its last tile, as it should.
    fed = np.where((lengths > 0) & (broke < 0), layout.prompt + lengths - 1, 0)
    slots = np.arange(layout.slots)
    kinds = {x.dtype for cache in (arm.cache, reference.cache) for x in (*cache.k, *cache.v)}
    if kinds != {jnp.dtype(kept)}:
        names = " and ".join(sorted(kind.name for kind in kinds))
        where.append(f"from the precision, whose cache is {jnp.dtype(kept).name} and theirs {names}")
    filled = (slots >= first[:, None]) & (slots < fed[:, None])
    if (found := first_cache_difference(arm.cache, reference.cache, first, filled, tolerance)) is not None:
        where.append(str(found))
    counted = np.arange(layout.new_tokens) < lengths[:, None]
    steps = min(a.choices.shape[1], b.choices.shape[1], layout.new_tokens)
    gap = _set_beside(a.logits[:, :steps], b.logits[:, :steps], counted[:, :steps], tolerance)
    differs = ~gap.equal & counted[:, :steps]
    if differs.any():
        row, step = min(np.argwhere(differs), key=lambda place: place[1])
        size = gap.max_abs[row, step]
        where.append(f"in the logits of problem {problems[row]} from step {step} on (max |diff| {size:.2g})")
    elif not tolerance:
        chosen = (np.asarray(a.choices)[:, :steps] != np.asarray(b.choices)[:, :steps]) & counted[:, :steps]
        for row, step in np.argwhere(chosen)[:1].tolist():
            where.append(f"in the token that problem {problems[row]} chooses at step {step} from equal logits")
    for row in np.flatnonzero(broke != np.asarray(b.nonfinite_step))[:1]:
        steps_of = [f"{x.name} at {n}" for x in (arm, reference) if (n := int(x.run.nonfinite_step[row])) >= 0]
        where.append(f"in the step at which problem {problems[row]} stops being finite ({', '.join(steps_of)})")
    if where:
        raise GateError(f"{why}, yet ", f"{arm.name} and {reference.name} differ {', '.join(where)}")


def _check_aligned(cached_arms: Arms, uncached_arms: Arms, state: nnx.State, batch: Batch, spec: RunSpec) -> Rollout:
    """Compares both arms of the aligned regime on a batch. Returns the cached rollout."""
    layout, tokens, rows = lay_out(batch, spec, cached_arms.config, cached_arms.tile)
    run, cache = cached_arms.run_cached_keeping(state, tokens, rows, layout)
    cached = _Arm("cached", run, cache)
    forced = force(rows, run)
    # A row that broke off is followed into the step at which it did: the other arm must break off there too.
    forced = dataclasses.replace(forced, limit=forced.limit + (run.nonfinite_step >= 0))
    # One pass over the given tokens, since on a long prompt steps would take minutes; but a pass hands the NaN of a
    # later row to earlier ones (Arms.run_forced).
    check = not np.any(np.asarray(run.nonfinite_step) >= 0)
    start = start_rollout(uncached_arms, np.asarray(run.tokens), forced, layout)
    uncached = _Arm("uncached", *uncached_arms.run_uncached_keeping(state, start, forced, layout, "padded", check))
    why = "in the aligned regime both arms round alike"
    _compare(cached, uncached, uncached_arms.precision.cache, rows, layout, why)
    return run


def _check_plain(plain: Arms, aligned: Arms, batch: Batch, spec: RunSpec, new_tokens: int) -> dict[str, Any]:
    """Compares the programs of both regimes under the probe's weights, along random tokens after a batch's prompts."""
    layout, tokens, rows = lay_out(batch, spec, plain.config)
    tolerance = probe_tolerance(plain.config, plain.precision, layout.slots)
    if tolerance is None:
        return {"passed": None, "tolerance": None, "steps": 0}
    state = probe_state(plain)
    steps = min(new_tokens, layout.new_tokens)
    drawn = np.setdiff1d(np.arange(plain.config.vocab_size), plain.stop_ids)
    given = np.random.default_rng(0).choice(drawn, (layout.batch, steps))

    def forced(tokens: np.ndarray, rows: Rows) -> tuple[np.ndarray, Rows]:
        tokens[:, layout.prompt : layout.prompt + steps] = given
        limit = jnp.full_like(rows.limit, layout.prompt + steps)
        return tokens, dataclasses.replace(rows, limit=limit, forced_until=limit)

    tokens, rows = forced(tokens, rows)
    cached = _Arm("cached", *plain.run_cached_keeping(state, tokens, rows, layout))
    start = start_rollout(plain, tokens, rows, layout)
    uncached = _Arm(
        "uncached", *plain.run_uncached_keeping(state, start, rows, layout, spec.uncached_length, check=True)
    )
    if np.any(np.asarray(uncached.run.nonfinite_step) >= 0):
        return {"passed": None, "tolerance": tolerance, "steps": 0}
    short = dataclasses.replace(spec, new_tokens=steps)
    near, near_tokens, near_rows = lay_out(batch, short, aligned.config, aligned.tile)
    near_tokens, near_rows = forced(near_tokens, near_rows)
    tiled = _Arm("cached (aligned)", *aligned.run_cached_keeping(state, near_tokens, near_rows, near))
    why = "no sum is rounded with the gate's own weights"
    for arm in (cached, tiled):
        _compare(arm, uncached, plain.precision.cache, rows, layout, why, tolerance)
    beyond = np.asarray(cached.cache.positions)[:, layout.prompt + steps - 1 :]
    for row, slot in np.argwhere(beyond != EMPTY)[:1]:
        filled = layout.prompt + steps - 1 + slot
        raise GateError("", f"cached fills slot {filled} of problem {rows.problems[row]}, where no token was fed")
    return {"passed": True, "tolerance": tolerance, "steps": steps * len(batch.items)}


def run_gate(
    cached_arms: Arms,
    uncached_arms: Arms,
    state: nnx.State,
    items: Sequence[Item],
    spec: RunSpec,
    problems: int,
    new_tokens: int = 16,
    plain: Arms | None = None,
) -> dict[str, Any]:
    """Runs the gate on the first problems and compares every bit.

    At least so many `problems` are tried, with at most `new_tokens` each. Both arms have the same programs unless a
    fault is planted. Those of the `plain` regime, if given, are checked too, on the batch with the longest prompt: it
    takes a second copy of the weights while it lasts.

    Gives {'passed': True, 'problems', 'steps', 'tile'}, and 'plain': {'passed', 'tolerance', 'steps'} if asked for,
    where passed is None and nothing was compared if the precision rounds sums to 16 bits or the probe overflows. Raises
    GateError where a bit differs.
    """
    short = dataclasses.replace(spec, control_problems=problems, new_tokens=min(new_tokens, spec.new_tokens))
    batches = [batch for batch in plan_batches(items, short) if batch.controls]
    result: dict[str, Any] = {"passed": True, "problems": 0, "steps": 0, "tile": cached_arms.tile}
    for batch in batches:
        run = _check_aligned(cached_arms, uncached_arms, state, batch, short)
        result["steps"] += int(jnp.sum(run.lengths[: len(batch.items)]))
        result["problems"] += len(batch.items)
    if plain is not None:
        longest = max(batches, key=lambda batch: max(len(item.prompt) for item in batch.items))
        result["plain"] = _check_plain(plain, cached_arms, longest, spec, new_tokens)
    return result
