"""Errors put into a plain cache: as its rows enter, once for good, or anew each time they are read.

Random numbers are drawn before the layers, in a loop, for all of them: a GPU's compiler writes each hash out in some
hundred operations, and a law that every layer drew for itself took three minutes to compile for one of 30 layers.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

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
class PerturbedLayer(Slots):
    """One layer during a call."""

    index: int
    error: CacheError
    changed: jax.Array  # [B, T] positions of the rows that it is done to
    noise: Noise  # of all layers

    def write(self, k: jax.Array, v: jax.Array, slot: jax.Array | int) -> Self:
        if not self.error.redrawn:
            k, v = self._perturb(k, "k"), self._perturb(v, "v")
        return super().write(k, v, slot)

    def read(self) -> tuple[jax.Array, jax.Array]:
        return (self._perturb(self.k, "k"), self._perturb(self.v, "v")) if self.error.redrawn else (self.k, self.v)

    def _perturb(self, x: jax.Array, side: str) -> jax.Array:
        if not self.error.touches(self.index, side):
            return x
        drawn = self.noise.get((self.index, side))
        if drawn is not None and jnp.issubdtype(drawn.dtype, jax.dtypes.prng_key):
            drawn = self.error.sample(drawn, x.shape[2:])
        return self.error.change(x, self.changed, drawn)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerturbedCache(KVCache):
    """A plain cache, with the error in it if that is frozen, and the error that is put into it."""

    error: CacheError
    problems: jax.Array  # [B] int32, keys of the noise
    seed: jax.Array  # int32 scalar
    # int32 scalar, calls so far: the prefill reads at step 0, the first decoded token at step 1. It does not depend on
    # prompts, so neither does a row's noise on its neighbours' lengths.
    calls: jax.Array
    changed: Any = None  # during a call, [B, T] positions of the rows that the error is put into
    noise: Any = None  # during a call, of all layers

    def begin(self, positions: jax.Array, slot: jax.Array | int) -> Self:
        begun = super().begin(positions, slot)
        changed = begun.positions if self.error.redrawn else positions
        noise = draw_noise(self.error, begun, changed, self.problems, self.seed, self.calls)
        return dataclasses.replace(begun, changed=changed, noise=noise)

    def layer(self, index: int) -> PerturbedLayer:
        return PerturbedLayer(self.k[index], self.v[index], index, self.error, self.changed, self.noise)

    def finish(self, layers: Sequence[Slots]) -> Self:
        return dataclasses.replace(super().finish(layers), calls=self.calls + 1, changed=None, noise=None)


@dataclasses.dataclass(frozen=True)
class Perturbation:
    """Puts `error` into the cache, with noise of a seed (jaxkv.cache.Intervention)."""

    error: CacheError
    seed: int = 0

    def make_cache(
        self, config: ModelConfig, precision: Precision, batch: int, slots: int, problems: jax.Array
    ) -> PerturbedCache:
        """An empty cache; everything in it is its own, since programs take their cache for good."""
        plain = empty_cache(config, precision, batch, slots)
        error = jax.tree.map(jnp.asarray, self.error)
        problems, seed, calls = (jnp.array(x, jnp.int32) for x in (problems, self.seed, 0))
        return PerturbedCache(plain.k, plain.v, plain.positions, error, problems, seed, calls)
