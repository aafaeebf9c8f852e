"""Errors put into a plain cache: as its rows enter, once for good, or anew each time they are read.

Random numbers are drawn before the layers, in a loop, for all of them: a GPU's compiler writes each hash out in some
hundred operations, and a law that every layer drew for itself took three minutes to compile for one of 30 layers.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkv.cache import KVCache, Slots, empty_cache
from jaxkv.config import ModelConfig, Precision
from jaxkv.interventions.cache_errors import CacheError, make_keys, site_number

MOST_DRAWN = 1 << 27  # numbers that are held at once, 512 MiB; of more, the keys alone
Noise = dict[tuple[int, str], jax.Array]  # of a layer's side: numbers [B, T, K, H], or keys [B, T]


def draw_noise(
    error: CacheError, plain: KVCache, positions: jax.Array, problems: jax.Array, seed: jax.Array, step: jax.Array
) -> Noise:
    """What the rows at positions [B, T] of every layer and side that the error touches are changed by."""
    if not error.random or not (sites := error.list_sites(len(plain.k))):
        return {}
    shape = plain.k[0].shape[2:]
    whole = len(sites) * positions.size * math.prod(shape) <= MOST_DRAWN

    def draw(site):
        keys = make_keys(site, positions, problems, seed, step if error.redrawn else None)
        return error.sample(keys, shape) if whole else keys

    # Two turns, so that it stays a loop: what it makes is then not made again wherever it is used.
    half = -(-len(sites) // 2)
    numbers = jnp.asarray([site_number(*site) for site in sites + sites[: 2 * half - len(sites)]])
    made = jax.lax.map(jax.vmap(draw), numbers.reshape(2, half))
    return {site: made[index // half, index % half] for index, site in enumerate(sites)}


@dataclasses.dataclass(frozen=True)
class PerturbedLayer:
    """One layer during a call (jaxkv.cache.LayerCache).

    Attributes:
      slots: what is held.
      index: of the layer.
      error: what is done.
      positions: [B, T] of the rows that it is done to.
      noise: of all layers.
    """

    slots: Slots
    index: int
    error: CacheError
    positions: jax.Array
    noise: Noise

    def write(self, k: jax.Array, v: jax.Array, slot: jax.Array | int) -> "PerturbedLayer":
        """As in LayerCache."""
        if not self.error.redrawn:
            k, v = self._perturb(k, "k"), self._perturb(v, "v")
        return dataclasses.replace(self, slots=self.slots.write(k, v, slot))

    def read(self) -> tuple[jax.Array, jax.Array]:
        """As in LayerCache."""
        k, v = self.slots.read()
        if not self.error.redrawn:
            return k, v
        return self._perturb(k, "k"), self._perturb(v, "v")

    def rotate_queries(self, q: jax.Array) -> jax.Array:
        """Leaves them as they are."""
        return q

    def rotate_heads(self, heads: jax.Array) -> jax.Array:
        """Leaves them as they are."""
        return heads

    def _perturb(self, x: jax.Array, side: str) -> jax.Array:
        if not self.error.touches(self.index, side):
            return x
        drawn = self.noise.get((self.index, side))
        if drawn is not None and jnp.issubdtype(drawn.dtype, jax.dtypes.prng_key):
            drawn = self.error.sample(drawn, x.shape[2:])
        return self.error.change(x, self.positions, drawn)


@dataclasses.dataclass(frozen=True)
class PerturbedCall:
    """A PerturbedCache during a call (jaxkv.cache.CacheCall).

    Attributes:
      cache: before the call.
      plain: with the call's positions.
      changed: [B, T] positions of the rows that the error is put into.
      noise: of all layers.
    """

    cache: "PerturbedCache"
    plain: KVCache
    changed: jax.Array
    noise: Noise

    @property
    def positions(self) -> jax.Array:
        """As in CacheCall."""
        return self.plain.positions

    def layer(self, index: int) -> PerturbedLayer:
        """As in CacheCall."""
        return PerturbedLayer(self.plain.layer(index), index, self.cache.error, self.changed, self.noise)

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
        plain = self.plain.begin(positions, slot)
        changed = plain.positions if self.error.redrawn else positions
        noise = draw_noise(self.error, plain, changed, self.problems, self.seed, self.calls)
        return PerturbedCall(self, plain, changed, noise)


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
