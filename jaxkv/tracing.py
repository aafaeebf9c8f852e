"""The arms' own programs, recording named values on the way, and replacing some of them.

The records lie in the cache that a program is handed (jaxkv.cache.WatchedCache): prefill, the one-row loop and the
recomputation run as they are, and what they would have thrown away comes out with the cache. Reading a value may still
make XLA fuse its neighbours otherwise, so whoever uses a trace compares its logits with those of the untraced arm.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import Hook, KVCache, WatchedCache, empty_cache, write_slots
from jaxkv.config import ModelConfig, Precision
from jaxkv.decode import Arms
from jaxkv.interventions.patches import Patch, patch_rows
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.layers import ATTENTION_SHAPED
from jaxkv.rollout import Layout, Rollout, Rows, start_rollout


def rows_first(name: str, value: jax.Array) -> jax.Array:
    """A named value as [B, T, ...]."""
    return jnp.moveaxis(value, 3, 1) if name.startswith(ATTENTION_SHAPED) else value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recorder:
    """Keeps what is seen, after it has replaced what is asked (jaxkv.cache.Tap).

    Attributes:
      seen: name -> [B, S, ...], the value of the row at each slot; attention-shaped values as [B, S, K, G, S].
      patch: what to replace, None for nothing.
    """

    seen: dict[str, jax.Array]
    patch: Patch | None

    def watch(
        self,
        forward: Callable[[KVCache, Hook], tuple[jax.Array, KVCache]],
        cache: KVCache,
        positions: jax.Array,
        slot: jax.Array | int,
    ) -> tuple[jax.Array, KVCache, "Recorder"]:
        """As in Tap. A patch of newest rows makes the call a second time."""
        patch = self.patch

        def run(cache: KVCache, seen: dict[str, jax.Array], again: jax.Array | bool) -> tuple[Any, Any, Any]:
            seen = dict(seen)

            def record(name: str, value: jax.Array) -> jax.Array:
                if patch is not None:
                    value = patch_rows(patch, name, value, positions, slot, jnp.asarray(again))
                if name in seen:
                    seen[name] = write_slots(seen[name], rows_first(name, value), slot)
                return value

            return *forward(cache, record), seen

        if patch is None:
            hidden, cache, seen = run(cache, self.seen, False)
            return hidden, cache, Recorder(seen, None)

        def once(index: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            hidden, cache, seen = run(*carry[1:], index > 0)
            return jnp.where(index > 0, carry[0], hidden), cache, seen

        shape = jax.eval_shape(run, cache, self.seen, jnp.asarray(False))[0]
        start = (jnp.zeros(shape.shape, shape.dtype), cache, self.seen)
        hidden, cache, seen = jax.lax.fori_loop(0, 1 + patch.newest.astype(jnp.int32), once, start)
        return hidden, cache, Recorder(seen, patch)


@functools.lru_cache(maxsize=16)
def _list_values(config: ModelConfig, precision: Precision) -> dict[str, jax.ShapeDtypeStruct]:
    """Named values up to `final_norm` of one row over one slot, in order of execution."""
    graphdef, state = abstract_decoder(config, precision)
    order: list[str] = []

    def forward(state: nnx.State) -> dict[str, jax.Array]:
        seen: dict[str, jax.Array] = {}

        def record(name: str, value: jax.Array) -> jax.Array:
            order.append(name)
            seen[name] = rows_first(name, value)
            return value

        row = jnp.zeros((1, 1), jnp.int32)
        nnx.merge(graphdef, state)(row, row, empty_cache(config, precision, 1, 1), 0, record)
        return seen

    found = jax.eval_shape(forward, state)
    return {name: found[name] for name in order}


def list_values(arms: Arms, batch: int, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Named values of the decoder up to `final_norm`, in order of execution, as a Recorder keeps them."""
    return {
        name: jax.ShapeDtypeStruct(
            (batch, slots, *value.shape[2:-1], slots if name.startswith(ATTENTION_SHAPED) else value.shape[-1]),
            value.dtype,
        )
        for name, value in _list_values(arms.config, arms.held).items()
    }


def watched_cache(arms: Arms, rows: Rows, layout: Layout, names: Sequence[str], patch: Patch | None) -> WatchedCache:
    """An empty cache that will record `names`; the patch is copied, since programs take their cache for good."""
    shapes = list_values(arms, layout.batch, layout.slots)
    seen = {name: jnp.zeros(shapes[name].shape, shapes[name].dtype) for name in names}
    return WatchedCache(arms.make_cache(rows, layout), Recorder(seen, jax.tree.map(jnp.copy, patch)))


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run of an arm and what was seen on the way.

    Attributes:
      run: the finished rollout.
      values: name -> [B, S, ...] in order of execution; slots that no token was fed to hold what they like.
      positions: [B, S] of the cache it ended with.
    """

    run: Rollout
    values: dict[str, jax.Array]
    positions: jax.Array


def _finish(ended: tuple[Rollout, WatchedCache], names: Sequence[str]) -> Trace:
    run, cache = ended
    return Trace(run, {name: cache.tap.seen[name] for name in names}, cache.positions)


def trace_cached(
    arms: Arms,
    state: nnx.State,
    tokens: np.ndarray,
    rows: Rows,
    layout: Layout,
    names: Sequence[str],
    patch: Patch | None = None,
) -> Trace:
    """The cached arm, free-running or forced as `rows` says, in the regime of `arms`."""
    cache = watched_cache(arms, rows, layout, names, patch)
    return _finish(arms.run_cached_keeping(state, tokens, rows, layout, cache), names)


def trace_uncached(
    arms: Arms,
    state: nnx.State,
    tokens: np.ndarray,
    rows: Rows,
    layout: Layout,
    names: Sequence[str],
    patch: Patch | None = None,
    stepwise: bool = False,
) -> Trace:
    """The uncached arm at its padded length along given tokens, in the regime of `arms`.

    One pass yields the values of every step: rows do not see what follows them, so a row of the pass over the whole
    text has the bits of the same row in the recomputation of its own step (numerics: rows do not see the future).

    Args:
      arms: programs.
      state: weights.
      tokens: [B, S] the text.
      rows: of the batch, all forced (rollout.force).
      layout: of the batch.
      names: what to record.
      patch: what to replace.
      stepwise: whether to recompute at each step all the same, which a patch of newest rows needs.
    """
    cache, run = watched_cache(arms, rows, layout, names, patch), start_rollout(arms, tokens, rows, layout)
    return _finish(arms.run_uncached_keeping(state, run, rows, layout, check=not stepwise, cache=cache), names)
