"""What a cache holds at the end of a run: whether it is finite, what did not fit its format, bits and bytes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import EMPTY, KVCache
from jaxkv.config import ModelConfig, Precision
from jaxkv.interventions.cache_errors import CacheError
from jaxkv.interventions.quantized_cache import QuantizedCache, cache_bytes, make_plans
from jaxkv.interventions.quantizers import CacheQuant, Window


def _map_layers(fn: Callable[[Any], Any], layers: Sequence[Any]) -> Any:
    """fn of each layer, stacked, in a loop: one layer is compiled rather than all."""
    return jax.lax.map(fn, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))


@jax.jit
def _find_nonfinite(cache: KVCache | QuantizedCache) -> tuple[jax.Array, jax.Array]:
    """By row, layer and side [B, L, 2]: the first position that is not finite, the largest integer if none; any NaN."""
    never = jnp.iinfo(jnp.int32).max
    layers, batch = len(cache.k), cache.positions.shape[0]
    first, nan = jnp.zeros((2, layers, batch), jnp.int32), jnp.zeros((2, layers, batch), bool)
    for side, stores in enumerate((cache.k, cache.v)):
        plans = [cache.plans(index)[side] if isinstance(cache, QuantizedCache) else None for index in range(layers)]
        for packed in (False, True):
            chosen = [index for index, plan in enumerate(plans) if (plan is not None) == packed]
            if not chosen:
                continue

            def look(store, plan=plans[chosen[0]]):
                x = cache.read_store(plan, store) if isinstance(cache, QuantizedCache) else store
                bad = ~jnp.all(jnp.isfinite(x), axis=(2, 3)) & (cache.positions != EMPTY)
                broken = jnp.any(jnp.isnan(x) & bad[:, :, None, None], axis=(1, 2, 3))
                return jnp.min(jnp.where(bad, cache.positions, never), axis=1), broken

            places = jnp.asarray(chosen)
            found = _map_layers(look, [stores[index] for index in chosen])
            first, nan = (whole.at[side, places].set(part) for whole, part in zip((first, nan), found, strict=True))
    return first.transpose(2, 1, 0), nan.transpose(2, 1, 0)


def find_fault(name: str, cache: Any, row: int) -> dict[str, Any] | None:
    """The first layer of a row whose keys or values are not finite, though no logit need show it; None if all are."""
    first, nan = (np.asarray(found)[row] for found in _find_nonfinite(cache))
    found = np.argwhere(first < np.iinfo(np.int32).max)
    if not len(found):
        return None
    layer, side = map(int, found[0])
    place = {"layer": layer, "op": "kv"[side], "position": int(first[layer, side])}
    return {"arm": name, "step": None} | place | {"value": "nan" if nan[layer, side] else "inf"}


@jax.jit
def _count(clean: KVCache, changed: QuantizedCache) -> jax.Array:
    written = jnp.max(changed.positions, axis=1) + 1
    counts = jnp.zeros((3, clean.positions.shape[0]), jnp.int32)
    for side, layers in enumerate((clean.k, clean.v)):
        packed = [index for index in range(len(layers)) if changed.plans(index)[side] is not None]
        if not packed:
            continue
        plan = changed.plans(packed[0])[side]  # all that pack are alike
        assert plan is not None
        end = plan.window.packed(written, changed.prompt)[1]
        count = functools.partial(plan.saturated, positions=changed.positions, end=end)
        over = jnp.sum(_map_layers(count, [layers[index] for index in packed]), axis=0)
        elements = layers[0].shape[2] * layers[0].shape[3] * len(packed)
        slots = jnp.sum(changed.packed(packed[0])[side], axis=1, dtype=jnp.int32)
        counts = counts.at[side].add(over).at[2].add(slots * elements)
    return counts.T


def count_saturated(what: CacheError | CacheQuant, clean: KVCache, changed: Any) -> np.ndarray | None:
    """Elements [B, 3] of the clean cache's keys, of its values, and of all, that are packed and lie outside the format.

    Or a scale, zero or norm that is stored of their group does (`Quantizer.saturated`). `changed` is the cache of the
    same tokens to which `what` is done. None where all that the cache's dtype holds fits.
    """
    if not isinstance(what, CacheQuant):
        return None
    methods = (changed.quant.k.quantizer, changed.quant.v.quantizer)
    if not any(method is not None and method.has_end(clean.k[0].dtype) for method in methods):
        return None
    return np.asarray(_count(clean, changed))


def describe_saturated(counts: np.ndarray | None, row: int) -> dict[str, int] | None:
    """A row of `count_saturated` as records have it (jaxkv.experiments.injection.record)."""
    return None if counts is None else dict(zip(("k", "v", "elements"), map(int, counts[row]), strict=True))


@functools.lru_cache(maxsize=256)
def _packed(window: Window, written: int, prompt: int) -> int:
    start, end = window.packed(written, prompt)
    return max(0, min(int(end), written) - start)


def measure_cache(
    what: CacheError | CacheQuant | None,
    config: ModelConfig,
    precision: Precision,
    cache: Any,
    written: int,
    prompt: int,
) -> dict[str, Any]:
    """What a record's CacheSize has of a cache of `written` tokens, of which `prompt` came at once.

    `precision.cache` is what elements are stored in that `what` does not pack.
    """
    exact = 8.0 * jnp.dtype(precision.cache).itemsize
    bits, shares = [], []
    for layer in range(config.num_layers):
        plans = (
            make_plans(what, layer, config.windowed_layers, written) if isinstance(what, CacheQuant) else (None, None)
        )
        for plan in plans:
            share = _packed(plan.window, written, prompt) / max(written, 1) if plan else 0.0
            body = plan.quantizer.bits_per_element(config.head_dim) if plan else exact
            shares.append(share)
            bits.append(share * body + (1 - share) * exact)
    return {
        "bytes": cache_bytes(cache) // cache.positions.shape[0],
        "written": written,
        "bits": float(np.mean(bits)),
        "exact_bits": exact,
        "packed": float(np.mean(shares)),
    }
