"""A KV cache that is truly packed: an intervention on the cache's value, made of a `CacheQuant`.

Rows enter rotated, where the method rotates; whole blocks are packed as they fill, and every read dequantizes. What a
call's own rows see of themselves is the method's (`Quantizer.own`): as they are, or as they have been packed. Where
they are seen as they are, so is all that waited when the call began.

A prefill is a call of several rows, or the first one. A block fills at one step of many, so that step alone runs the
quantizer; storage is updated in place. A quantizer that changes nothing changes no bit of a run.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import EMPTY, write_slots
from jaxkv.config import ModelConfig, Precision
from jaxkv.interventions.quantized_side import SidePlan, SideStore, Turn
from jaxkv.interventions.quantizers.base import Packed, nbytes
from jaxkv.interventions.quantizers.spec import CacheQuant

Store = SideStore | jax.Array  # an array [B, S, K, H] holds the rows of each slot as they are
Pair = tuple[Any, Any]  # of keys and of values


def make_plans(quant: CacheQuant, layer: int, num_layers: int, slots: int) -> tuple[SidePlan | None, SidePlan | None]:
    """How keys and values of a layer are stored; None where they stay as they are."""

    def plan(side):
        if side.quantizer is None or layer in side.quantizer.exact_layers(num_layers):
            return None
        return SidePlan(side, slots)

    return plan(quant.k), plan(quant.v)


@dataclasses.dataclass(frozen=True)
class QuantizedLayer:
    """One layer during a call (LayerCache).

    Attributes:
      plans: of keys and values, None for a side that is not quantized.
      stores: what is stored of them.
      turn: the call.
      views: what the call's queries see, [B, S, K, H] each, once its rows are written.
      ends: [B] up to which position what they see is packed; None where nothing is.
    """

    plans: Pair
    stores: Pair
    turn: Turn
    views: Pair | None = None
    ends: Pair | None = None

    def write(self, k: jax.Array, v: jax.Array, slot: jax.Array | int) -> "QuantizedLayer":
        """As in LayerCache."""
        rows = self.rotate_rows(k, v)
        sides = zip(self.plans, self.stores, rows, self._pack(rows), strict=True)
        written = [self._write_side(*side, slot) for side in sides]
        stores, views, ends = zip(*written, strict=True)
        return dataclasses.replace(self, stores=stores, views=views, ends=ends)

    def read(self) -> tuple[jax.Array, jax.Array]:
        """As in LayerCache."""
        assert self.views is not None
        return self.views

    def rotate_queries(self, q: jax.Array) -> jax.Array:
        """As in LayerCache."""
        return _rotate(self.plans[0], q)

    def rotate_heads(self, heads: jax.Array) -> jax.Array:
        """As in LayerCache."""
        return _rotate(self.plans[1], heads)

    def rotate_rows(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows in the bases in which they are stored."""
        return _rotate(self.plans[0], k), _rotate(self.plans[1], v)

    def _pack(self, rows: Pair) -> tuple[Packed, Packed]:
        """What each side may write to its packed storage."""
        sides = list(zip(self.plans, self.stores, rows, strict=True))
        waiting = [plan is not None and plan.waits for plan in self.plans]
        packed = [
            {} if plan is None or wait else plan.pack(store, x, self.turn)
            for (plan, store, x), wait in zip(sides, waiting, strict=True)
        ]
        if any(waiting):  # one branch for both sides: it costs a GPU a halt
            chosen = [side for side, wait in zip(sides, waiting, strict=True) if wait]
            due = jnp.any(jnp.stack([plan.due(self.turn) for plan, _, _ in chosen]))
            late = iter(
                jax.lax.cond(
                    due,
                    lambda: [plan.pack(store, x, self.turn) for plan, store, x in chosen],
                    lambda: [plan.blocks(store, self.turn) for plan, store, _ in chosen],
                )
            )
            packed = [next(late) if wait else part for part, wait in zip(packed, waiting, strict=True)]
        return packed[0], packed[1]

    def _write_side(
        self, plan: SidePlan | None, store: Any, rows: jax.Array, blocks: Packed, slot: jax.Array | int
    ) -> tuple[Store, jax.Array, jax.Array | None]:
        """The new store, what the call sees of it, and up to where that is packed."""
        if plan is None:
            slots = write_slots(store, rows, slot)
            return slots, slots, None
        turn, own = self.turn, plan.quantizer.own
        new = plan.write(store, rows, blocks, turn)
        begin, end = plan.ends(turn)
        if own == "step" or (own == "prompt" and rows.shape[1] > 1):
            return new, write_slots(plan.read(store, turn, begin), rows, slot), begin
        view = plan.read(new, turn, end)
        if own == "prompt":
            seen = jax.lax.dynamic_slice_in_dim(view, slot, 1, axis=1)
            view = write_slots(view, jnp.where((turn.before == 0)[:, None, None, None], rows, seen), slot)
        return new, view, end


def _rotate(plan: SidePlan | None, x: jax.Array) -> jax.Array:
    return x if plan is None else plan.quantizer.rotate(x)


@dataclasses.dataclass(frozen=True)
class QuantizedCall:
    """A QuantizedCache during a call (CacheCall)."""

    cache: "QuantizedCache"
    turn: Turn

    @property
    def positions(self) -> jax.Array:
        """As in CacheCall."""
        return self.turn.keys

    def layer(self, index: int) -> QuantizedLayer:
        """As in CacheCall."""
        return QuantizedLayer(self.cache.plans(index), (self.cache.k[index], self.cache.v[index]), self.turn)

    def finish(self, layers: Sequence[QuantizedLayer]) -> "QuantizedCache":
        """As in CacheCall."""
        k, v = zip(*(layer.stores for layer in layers), strict=True)
        return dataclasses.replace(self.cache, k=k, v=v, positions=self.turn.keys, prompt=self.turn.prompt)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedCache:
    """Keys (after RoPE) and values of every layer, packed.

    Attributes:
      k: L stores.
      v: L stores.
      positions: [B, S] int32, -1 where a slot is empty.
      prompt: [B] int32, tokens that a row's first call brought.
      quant: what is done, by methods that know the dtype of what they pack.
    """

    k: tuple[Store, ...]
    v: tuple[Store, ...]
    positions: jax.Array
    prompt: jax.Array
    quant: CacheQuant = dataclasses.field(metadata={"static": True})

    def plans(self, index: int) -> tuple[SidePlan | None, SidePlan | None]:
        """How a layer is stored."""
        return make_plans(self.quant, index, len(self.k), self.positions.shape[1])

    def begin(self, positions: jax.Array, slot: jax.Array | int) -> QuantizedCall:
        """As in Cache."""
        keys = write_slots(self.positions, positions, slot)
        before, after = _count(self.positions), _count(keys)
        return QuantizedCall(self, Turn(positions, keys, before, after, jnp.where(before == 0, after, self.prompt)))

    def read(self, index: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] of a layer as a later call would see them, rotated back, in fp32."""
        written = _count(self.positions)
        turn = Turn(self.positions[:, :0], self.positions, written, written, self.prompt)

        def side(plan, store):
            if plan is None:
                return store.astype(jnp.float32)
            return _rotate(plan, plan.read(store, turn, plan.ends(turn)[1]).astype(jnp.float32))

        k, v = map(side, self.plans(index), (self.k[index], self.v[index]))
        return k, v

    def packed(self, index: int) -> tuple[jax.Array, jax.Array]:
        """Which slots [B, S] of a layer's keys and of its values are packed."""
        written = _count(self.positions)[:, None]

        def side(plan):
            if plan is None:
                return jnp.zeros(self.positions.shape, bool)
            begin, end = plan.window.packed(written, self.prompt[:, None])
            return (self.positions >= begin) & (self.positions < end) & (self.positions != EMPTY)

        k, v = map(side, self.plans(index))
        return k, v


def _count(positions: jax.Array) -> jax.Array:
    """[B] tokens written: positions are consecutive from 0."""
    return jnp.max(positions, axis=1) + 1


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Packs the cache as `quant` says (jaxkv.cache.Intervention)."""

    quant: CacheQuant

    def make_cache(
        self,
        config: ModelConfig,
        precision: Precision,
        batch: int,
        slots: int,
        problems: jax.Array | None = None,
        seed: jax.Array | None = None,
    ) -> QuantizedCache:
        """An empty cache.

        Raises:
          UserError: the head dim or the cache's dtype does not suit the method, or the context is over before
            anything is packed.
        """
        del problems, seed
        self.quant.check(config.head_dim, config.context_length)
        quant = self.quant.stored_as(precision.cache)
        shape = (config.num_kv_heads, config.head_dim)

        def make(plan: SidePlan | None) -> Store:
            if plan is None:
                return jnp.zeros((batch, slots, *shape), precision.cache)
            return plan.make(batch, *shape, precision.cache)

        plans = [make_plans(quant, layer, config.num_layers, slots) for layer in range(config.num_layers)]
        return QuantizedCache(
            k=tuple(make(k) for k, _ in plans),
            v=tuple(make(v) for _, v in plans),
            positions=jnp.full((batch, slots), EMPTY, jnp.int32),
            prompt=jnp.zeros(batch, jnp.int32),
            quant=quant,
        )


def cache_bytes(cache: Any) -> int:
    """Bytes of all keys and values with scales, windows and pending rows, counted; of a cache or of its shapes."""
    return nbytes((cache.k, cache.v))


def effective_bits(cache: Any, config: ModelConfig) -> float:
    """Bits per element of a cache, counted from the sizes of its arrays: all of them over all its slots."""
    elements = 2 * config.num_layers * cache.positions.size * config.num_kv_heads * config.head_dim
    return 8 * cache_bytes(cache) / elements
