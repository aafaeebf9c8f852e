"""The gate: before a study, the aligned regime must give cached and uncached the same bits.

With one executable over tiles of fixed shape, the two arms make the same roundings. A difference is then no rounding:
a cached key or value is not the one that recomputation gives. The gate is sensitive where a tolerance is blind, since a
dtype cut on one path or a slot that is off by one can hide below what 16 bits scatter anyway. What both arms get wrong
alike it cannot see; that is what the tests against transformers are for.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import KVCache, empty_cache
from jaxkv.decode import Arms, Layout, Rollout, Rows, make_layout, make_rows, start_rollout
from jaxkv.errors import UserError
from jaxkv.experiments.divergence import DivergenceSpec, Item, plan_batches
from jaxkv.generate import force, run_cached_keeping


def bits(x: jax.Array) -> jax.Array:
    """The array's bits as unsigned integers: NaN equals itself, and -0 differs from +0."""
    return x if x.dtype == bool else jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two caches first differ.

    Attributes:
      tensor: 'k' or 'v'.
      layer: its layer.
      position: first absolute position at which it differs.
      max_abs: largest difference in that tensor.
    """

    tensor: str
    layer: int
    position: int
    max_abs: float


def first_cache_difference(a: KVCache, b: KVCache, first: np.ndarray, filled: np.ndarray) -> Difference | None:
    """The first tensor, in order of execution, whose bits differ; None if there is none.

    Args:
      a: a cache.
      b: another of the same shape.
      first: [B] slot of each row's position 0.
      filled: [B, S] slots that count.
    """
    for layer in range(len(a.k)):
        for tensor, x, y in (("k", a.k[layer], b.k[layer]), ("v", a.v[layer], b.v[layer])):
            wide = jnp.promote_types(x.dtype, y.dtype)
            differs = np.asarray(jnp.any(bits(x.astype(wide)) != bits(y.astype(wide)), axis=(2, 3))) & filled
            if differs.any():
                row, slot = np.argwhere(differs)[np.argmin(np.argwhere(differs)[:, 1])]
                gap = jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)) * filled[:, :, None, None]
                return Difference(tensor, layer, int(slot - first[row]), float(jnp.max(gap)))
    return None


def _uncached(arms: Arms, state: nnx.State, reference: Rollout, rows: Rows, layout: Layout) -> tuple[Rollout, KVCache]:
    forced, end = force(rows, reference), layout.prompt + layout.new_tokens
    start = start_rollout(arms, np.asarray(reference.tokens), forced, layout)
    cache = empty_cache(arms.config, arms.precision, layout.batch, layout.slots)
    # One pass over the given tokens: on a long prompt, steps would take minutes.
    return arms.tile_loop(state, start, forced, end, cache, False, True, tile=arms.tile)


def run_gate(
    cached_arms: Arms,
    uncached_arms: Arms,
    state: nnx.State,
    items: Sequence[Item],
    spec: DivergenceSpec,
    problems: int,
    new_tokens: int = 16,
) -> dict[str, Any]:
    """Runs both arms of the aligned regime on the first problems and compares every bit.

    Args:
      cached_arms: programs of the cached arm, with a tile.
      uncached_arms: those of the uncached arm; the same object unless a fault is planted.
      state: weights.
      items: the study's problems.
      spec: the study's batches.
      problems: at least so many are tried.
      new_tokens: most tokens a problem.

    Returns:
      {'problems', 'steps', 'tile', 'passed': True}.

    Raises:
      UserError: a bit differs: where, first in the cache and then in the logits.
    """
    spec = dataclasses.replace(spec, control_problems=problems, new_tokens=min(new_tokens, spec.new_tokens))
    steps = tried = 0
    for batch in plan_batches(items, spec):
        if not batch.controls:
            break
        filled = [*batch.items, *[batch.items[-1]] * (spec.batch_size - len(batch.items))]
        prompts = [list(item.prompt) for item in filled]
        layout = make_layout(prompts, spec.new_tokens, spec.bucket, cached_arms.config, cached_arms.tile)
        tokens, rows = make_rows(prompts, [item.problem for item in filled], spec.seed, layout)
        cached, cache = run_cached_keeping(cached_arms, state, tokens, rows, layout)
        uncached, recomputed = _uncached(uncached_arms, state, cached, rows, layout)
        _compare(cached, cache, uncached, recomputed, rows, layout, [item.problem for item in filled])
        steps += int(jnp.sum(cached.lengths[: len(batch.items)]))
        tried += len(batch.items)
    return {"passed": True, "problems": tried, "steps": steps, "tile": cached_arms.tile}


def _compare(
    cached: Rollout, cache: KVCache, uncached: Rollout, recomputed: KVCache, rows: Rows, layout: Layout, problems: list
) -> None:
    lengths = np.asarray(cached.lengths)
    slots = np.arange(layout.slots)
    first = np.asarray(rows.first)
    # The last token was fed to nobody; a row that broke off at once has nothing to compare.
    fed = np.where(lengths > 0, layout.prompt + lengths - 1, 0)
    filled = (slots >= first[:, None]) & (slots < fed[:, None])
    found = first_cache_difference(cache, recomputed, first, filled)
    counted = np.arange(layout.new_tokens) < lengths[:, None]
    differs = np.asarray(jnp.any(bits(cached.logits) != bits(uncached.logits), axis=-1)) & counted
    if found is None and not differs.any():
        return
    where = []
    if found is not None:
        where.append(
            f"first in {found.tensor} of layer {found.layer} at position {found.position} "
            f"(max |diff| {found.max_abs:.2g})"
        )
    if differs.any():
        row, step = np.argwhere(differs)[0]
        gap = np.max(np.abs(np.asarray(cached.logits[row, step], np.float32) - uncached.logits[row, step]))
        where.append(f"in the logits of problem {problems[row]} from step {step} on (max |diff| {gap:.2g})")
    raise UserError(
        f"the gate failed: in the aligned regime both arms round alike, yet they differ {', '.join(where)}; the cache "
        "has a bug and no figure would mean anything: report it, or run anyway with --gate=off"
    )
