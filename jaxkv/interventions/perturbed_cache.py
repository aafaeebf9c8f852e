"""Errors put into a plain cache: as its rows enter, once for good, or anew each time they are read."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache, Slots, empty_cache
from jaxkv.config import ModelConfig, Precision
from jaxkv.interventions.cache_errors import CacheError


@dataclasses.dataclass(frozen=True)
class PerturbedLayer:
    """One layer during a call (jaxkv.cache.LayerCache).

    Attributes:
      slots: what is held.
      index: of the layer.
      rows: [B, T] positions of the call's rows.
      keys: [B, S] positions of all slots once they are written.
      cache: the cache before the call.
    """

    slots: Slots
    index: int
    rows: jax.Array
    keys: jax.Array
    cache: "PerturbedCache"

    def write(self, k: jax.Array, v: jax.Array, slot: jax.Array | int) -> "PerturbedLayer":
        """As in LayerCache."""
        if not self.cache.error.redrawn:
            k, v = (self._perturb(x, side, self.rows, None) for x, side in ((k, "k"), (v, "v")))
        return dataclasses.replace(self, slots=self.slots.write(k, v, slot))

    def read(self) -> tuple[jax.Array, jax.Array]:
        """As in LayerCache."""
        k, v = self.slots.read()
        if not self.cache.error.redrawn:
            return k, v
        return self._perturb(k, "k", self.keys, self.cache.calls), self._perturb(v, "v", self.keys, self.cache.calls)

    def rotate_queries(self, q: jax.Array) -> jax.Array:
        """Leaves them as they are."""
        return q

    def rotate_heads(self, heads: jax.Array) -> jax.Array:
        """Leaves them as they are."""
        return heads

    def _perturb(self, x: jax.Array, side: str, positions: jax.Array, step: jax.Array | None) -> jax.Array:
        keys = {"problems": self.cache.problems, "seed": self.cache.seed}
        return self.cache.error.perturb(x, layer=self.index, side=side, positions=positions, read_step=step, **keys)


@dataclasses.dataclass(frozen=True)
class PerturbedCall:
    """A PerturbedCache during a call (jaxkv.cache.CacheCall)."""

    cache: "PerturbedCache"
    plain: KVCache
    rows: jax.Array

    @property
    def positions(self) -> jax.Array:
        """As in CacheCall."""
        return self.plain.positions

    def layer(self, index: int) -> PerturbedLayer:
        """As in CacheCall."""
        return PerturbedLayer(self.plain.layer(index), index, self.rows, self.positions, self.cache)

    def finish(self, layers: Sequence[PerturbedLayer]) -> "PerturbedCache":
        """As in CacheCall."""
        plain = self.plain.finish([layer.slots for layer in layers])
        return dataclasses.replace(self.cache, plain=plain, calls=self.cache.calls + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerturbedCache:
    """A plain cache and the error that is put into it.

    Attributes:
      plain: what is held; with the error in it if that is frozen.
      error: what is done.
      problems: [B] int32, keys of the noise.
      seed: int32 scalar.
      calls: int32 scalar, calls so far: the prefill reads at step 0, the first decoded token at step 1. It does not
        depend on prompts, so neither does a row's noise on its neighbours' lengths.
    """

    plain: KVCache
    error: CacheError
    problems: jax.Array
    seed: jax.Array
    calls: jax.Array

    @property
    def positions(self) -> jax.Array:
        """As in jaxkv.cache.Cache."""
        return self.plain.positions

    def begin(self, positions: jax.Array, slot: jax.Array | int) -> PerturbedCall:
        """As in jaxkv.cache.Cache."""
        return PerturbedCall(self, self.plain.begin(positions, slot), positions)


@dataclasses.dataclass(frozen=True)
class Perturbation:
    """Puts `error` into the cache (jaxkv.cache.Intervention)."""

    error: CacheError

    def make_cache(
        self,
        config: ModelConfig,
        precision: Precision,
        batch: int,
        slots: int,
        problems: jax.Array,
        seed: jax.Array,
    ) -> PerturbedCache:
        """An empty cache; everything in it is its own, since programs take their cache for good."""
        return PerturbedCache(
            plain=empty_cache(config, precision, batch, slots),
            error=jax.tree.map(jnp.asarray, self.error),
            problems=jnp.array(problems, jnp.int32),
            seed=jnp.array(seed, jnp.int32),
            calls=jnp.zeros((), jnp.int32),
        )
