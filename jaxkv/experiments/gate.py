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
from jaxkv.decode import Arms, Layout, Rollout, Rows, make_layout, make_rows, start_rollout
from jaxkv.errors import UserError
from jaxkv.experiments.batches import Batch, Item, RunSpec, plan_batches
from jaxkv.experiments.probe import probe_state, probe_tolerance
from jaxkv.generate import force, run_cached_keeping, run_uncached_keeping


def bits(x: jax.Array) -> jax.Array:
    """The array's bits as unsigned integers: NaN equals itself, and -0 differs from +0."""
    return x if x.dtype == bool else jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two caches first differ.

    Attributes:
      tensor: 'positions', 'k' or 'v'.
      layer: its layer, None for positions.
      position: first absolute position at which it differs.
      max_abs: largest difference in that tensor.
      dtypes: the two dtypes, None if they are equal.
    """

    tensor: str
    layer: int | None
    position: int
    max_abs: float
    dtypes: tuple[str, str] | None = None

    def __str__(self) -> str:
        of = "" if self.layer is None else f" of layer {self.layer}"
        kinds = "" if self.dtypes is None else f", {self.dtypes[0]} beside {self.dtypes[1]}"
        return f"first in {self.tensor}{of} at position {self.position} (max |diff| {self.max_abs:.2g}{kinds})"


def _differs(x: jax.Array, y: jax.Array, filled: np.ndarray, tolerance: float) -> tuple[np.ndarray, float]:
    """Which places [B, T] of x and y [B, T, ...] differ where `filled`, and by how much at most."""
    rest = tuple(range(2, x.ndim))
    exact = jnp.promote_types(x.dtype, y.dtype)
    wide = jnp.promote_types(exact, jnp.float32)
    gap = jnp.abs(x.astype(wide) - y.astype(wide))
    unequal = bits(x.astype(exact)) != bits(y.astype(exact))
    if tolerance and jnp.issubdtype(exact, jnp.floating):
        counted = jnp.where(jnp.expand_dims(filled, rest), jnp.abs(x.astype(wide)), 0)
        unequal &= ~(gap <= tolerance * jnp.max(counted))  # NaN differs
    largest = jnp.max(jnp.where(jnp.expand_dims(filled, rest), gap, 0)) if gap.size else 0.0
    return np.asarray(jnp.any(unequal, axis=rest)) & filled, float(largest)


def first_cache_difference(
    a: KVCache, b: KVCache, first: np.ndarray, filled: np.ndarray, tolerance: float = 0.0
) -> Difference | None:
    """The first tensor, in order of execution, whose bits or dtype differ; None if there is none.

    Args:
      a: a cache.
      b: another; slots that only one of them has are left out.
      first: [B] slot of each row's position 0.
      filled: [B, S] slots that count.
      tolerance: keys and values may differ by so much, relative to the largest in the tensor.
    """
    slots = min(a.positions.shape[1], b.positions.shape[1])
    filled = filled[:, :slots]
    places = np.arange(slots) - first[:, None]
    tensors: list[tuple[str, int | None, jax.Array, jax.Array]] = [("positions", None, a.positions, b.positions)]
    for n in range(len(a.k)):
        tensors += [("k", n, a.k[n], b.k[n]), ("v", n, a.v[n], b.v[n])]
    for tensor, layer, x, y in tensors:
        dtypes = None if x.dtype == y.dtype else (x.dtype.name, y.dtype.name)
        differs, gap = _differs(x[:, :slots], y[:, :slots], filled, tolerance)
        if differs.any() or (dtypes and filled.any()):
            where = differs if differs.any() else filled
            return Difference(tensor, layer, int(places[where].min()), gap, dtypes)
    return None


@dataclasses.dataclass(frozen=True)
class _Arm:
    """A rollout, the cache it ended with, and what to call it."""

    name: str
    run: Rollout
    cache: KVCache


def _compare(
    arm: _Arm,
    reference: _Arm,
    kept: DType,
    rows: Rows,
    layout: Layout,
    problems: Sequence[int],
    why: str,
    tolerance: float = 0.0,
) -> None:
    """Raises UserError unless an arm and the reference agree along the same tokens, with caches of the dtype `kept`."""
    a, b = arm.run, reference.run
    lengths, broke = np.asarray(a.lengths), np.asarray(a.nonfinite_step)
    first = np.asarray(rows.first)
    where = []
    # The last token was fed to nobody. A row that broke off holds NaN in its last tile, as it should.
    fed = np.where((lengths > 0) & (broke < 0), layout.prompt + lengths - 1, 0)
    slots = np.arange(layout.slots)
    kinds = {x.dtype for cache in (arm.cache, reference.cache) for x in (*cache.k, *cache.v)}
    if kinds != {jnp.dtype(kept)}:
        names = " and ".join(sorted(kind.name for kind in kinds))
        where.append(f"from the precision, whose cache is {jnp.dtype(kept).name} and theirs {names}")
    found = first_cache_difference(
        arm.cache, reference.cache, first, (slots >= first[:, None]) & (slots < fed[:, None]), tolerance
    )
    if found is not None:
        where.append(str(found))
    counted = np.arange(layout.new_tokens) < lengths[:, None]
    steps = min(a.choices.shape[1], b.choices.shape[1], layout.new_tokens)
    differs, _ = _differs(a.logits[:, :steps], b.logits[:, :steps], counted[:, :steps], tolerance)
    if differs.any():
        row, step = min(np.argwhere(differs), key=lambda place: place[1])
        gap = np.max(np.abs(np.asarray(a.logits[row, step], np.float32) - np.asarray(b.logits[row, step], np.float32)))
        where.append(f"in the logits of problem {problems[row]} from step {step} on (max |diff| {gap:.2g})")
    elif not tolerance:
        chosen = (np.asarray(a.choices)[:, :steps] != np.asarray(b.choices)[:, :steps]) & counted[:, :steps]
        for row, step in np.argwhere(chosen)[:1].tolist():
            where.append(f"in the token that problem {problems[row]} chooses at step {step} from equal logits")
    for row in np.flatnonzero(broke != np.asarray(b.nonfinite_step))[:1]:
        steps_of = [f"{x.name} at {n}" for x in (arm, reference) if (n := int(x.run.nonfinite_step[row])) >= 0]
        where.append(f"in the step at which problem {problems[row]} stops being finite ({', '.join(steps_of)})")
    if where:
        raise UserError(
            f"the gate failed: {why}, yet {arm.name} and {reference.name} differ {', '.join(where)}; the cache has a "
            "bug and no figure would mean anything: report it, or run anyway with --gate=off"
        )


def _lay_out(batch: Batch, spec: RunSpec, arms: Arms) -> tuple[Layout, np.ndarray, Rows, list[int]]:
    filled = [*batch.items, *[batch.items[-1]] * (spec.batch_size - len(batch.items))]
    prompts, problems = [list(item.prompt) for item in filled], [item.problem for item in filled]
    layout = make_layout(prompts, spec.new_tokens, spec.bucket, arms.config, arms.tile)
    return layout, *make_rows(prompts, problems, spec.seed, layout), problems


def _check_aligned(cached_arms: Arms, uncached_arms: Arms, state: nnx.State, batch: Batch, spec: RunSpec) -> Rollout:
    """Compares both arms of the aligned regime on a batch. Returns the cached rollout."""
    layout, tokens, rows, problems = _lay_out(batch, spec, cached_arms)
    run, cache = run_cached_keeping(cached_arms, state, tokens, rows, layout)
    cached = _Arm("cached", run, cache)
    forced = force(rows, run)
    # A row that broke off is followed into the step at which it did: the other arm must break off there too.
    forced = dataclasses.replace(forced, limit=forced.limit + (run.nonfinite_step >= 0))
    # One pass over the given tokens, since on a long prompt steps would take minutes; but a pass hands the NaN of a
    # later row to earlier ones (generate.run_forced).
    check = not np.any(np.asarray(run.nonfinite_step) >= 0)
    start = start_rollout(uncached_arms, np.asarray(run.tokens), forced, layout)
    uncached = _Arm("uncached", *run_uncached_keeping(uncached_arms, state, start, forced, layout, "padded", check))
    why = "in the aligned regime both arms round alike"
    _compare(cached, uncached, uncached_arms.precision.cache, rows, layout, problems, why)
    return run


def _check_plain(plain: Arms, aligned: Arms, batch: Batch, spec: RunSpec, new_tokens: int) -> dict[str, Any]:
    """Compares the programs of both regimes under the probe's weights, along random tokens after a batch's prompts."""
    layout, tokens, rows, problems = _lay_out(batch, spec, plain)
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
    cached = _Arm("cached", *run_cached_keeping(plain, state, tokens, rows, layout))
    start = start_rollout(plain, tokens, rows, layout)
    uncached = _Arm(
        "uncached", *run_uncached_keeping(plain, state, start, rows, layout, spec.uncached_length, check=True)
    )
    if np.any(np.asarray(uncached.run.nonfinite_step) >= 0):
        return {"passed": None, "tolerance": tolerance, "steps": 0}
    short = dataclasses.replace(spec, new_tokens=steps)
    near, near_tokens, near_rows, _ = _lay_out(batch, short, aligned)
    near_tokens, near_rows = forced(near_tokens, near_rows)
    tiled = _Arm("cached (aligned)", *run_cached_keeping(aligned, state, near_tokens, near_rows, near))
    why = "no sum is rounded with the gate's own weights"
    for arm in (cached, tiled):
        _compare(arm, uncached, plain.precision.cache, rows, layout, problems, why, tolerance)
    beyond = np.asarray(cached.cache.positions)[:, layout.prompt + steps - 1 :]
    for row, slot in np.argwhere(beyond != EMPTY)[:1]:
        raise UserError(
            f"the gate failed: cached fills slot {layout.prompt + steps - 1 + slot} of problem {problems[row]}, where "
            "no token was fed; the cache has a bug and no figure would mean anything: report it, or run anyway with "
            "--gate=off"
        )
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

    Args:
      cached_arms: programs of the aligned cached arm, with a tile.
      uncached_arms: those of the uncached arm; the same object unless a fault is planted.
      state: weights.
      items: the study's problems.
      spec: the study's batches.
      problems: at least so many are tried.
      new_tokens: most tokens a problem.
      plain: programs of the plain regime. If given they are checked too, on the batch with the longest prompt, which
        takes a second copy of the weights while it lasts.

    Returns:
      {'passed': True, 'problems', 'steps', 'tile'}, and 'plain': {'passed', 'tolerance', 'steps'} if asked for, where
      passed is None and nothing was compared if the precision rounds sums to 16 bits or the probe overflows.

    Raises:
      UserError: a bit differs: where, first in the cache and then in the logits.
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
