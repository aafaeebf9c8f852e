"""A KV cache that is truly packed: an intervention on the cache's value, made of a `CacheQuant`.

Rows enter rotated, where the method rotates; whole blocks are packed as they fill, and every read dequantizes. What a
call's own rows see of themselves is the method's (`Quantizer.own`): as they are, or as they have been packed. Where
they are seen as they are, so is all that waited when the call began.

A prefill is a call of several rows, or the first one. A block fills at one step of many, so that step alone runs the
quantizer; storage is updated in place. Where a call of several rows sees them as they are, no layer waits for another's
packing: all are packed when it ends, in one loop, which is compiled once rather than for each layer. A quantizer that
changes nothing changes no bit of a run.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxkv.cache import EMPTY, write_slots
from jaxkv.config import ModelConfig, Precision
from jaxkv.interventions.quantized_side import SidePlan, SideStore, Turn
from jaxkv.interventions.quantizers.base import Packed, nbytes
from jaxkv.interventions.quantizers.spec import CacheQuant

Store = SideStore | jax.Array  # an array [B, S, K, H] holds the rows of each slot as they are
Pair = tuple[Any, Any]  # of keys and of values
Plans = tuple[SidePlan | None, SidePlan | None]


def make_plans(quant: CacheQuant, layer: int, windowed: Sequence[bool], slots: int) -> Plans:
    """How keys and values of a layer are stored, in a model whose layers are windowed or not; None for as they are."""
    k, v = (SidePlan(side, slots) if side.packs(layer, windowed) else None for side in (quant.k, quant.v))
    return k, v


@dataclasses.dataclass(frozen=True)
class QuantizedLayer:
    """One layer during a call (LayerCache)."""

    plans: Plans
    stores: Pair
    turn: Turn
    rows: Pair = (None, None)  # once written, those of the sides that are packed when the call ends, None for others
    views: Pair | None = None  # what the call's queries see, [B, S, K, H] each, once its rows are written
    ends: Pair | None = None  # [B] up to which position what they see is packed; None where nothing is

    def write(self, k: jax.Array, v: jax.Array, slot: jax.Array | int) -> Self:
        rows = self.rotate_rows(k, v)
        sides = zip(self.plans, self.stores, rows, self._pack(rows), strict=True)
        written = [self._write_side(*side, slot) for side in sides]
        stores, views, ends = zip(*written, strict=True)
        late_k, late_v = (x if _packs_late(plan, x) else None for plan, x in zip(self.plans, rows, strict=True))
        return dataclasses.replace(self, stores=stores, rows=(late_k, late_v), views=views, ends=ends)

    def read(self) -> tuple[jax.Array, jax.Array]:
        assert self.views is not None
        return self.views

    def rotate_queries(self, q: jax.Array) -> jax.Array:
        return _rotate(self.plans[0], q)

    def rotate_heads(self, heads: jax.Array) -> jax.Array:
        return _rotate(self.plans[1], heads)

    def rotate_rows(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows in the bases in which they are stored."""
        return _rotate(self.plans[0], k), _rotate(self.plans[1], v)

    def _pack(self, rows: Pair) -> tuple[Packed, Packed]:
        """What each side may write to its packed storage, nothing yet where that is left for later."""
        turn = self.turn
        now: dict[int, Any] = {}
        waiting: dict[int, Any] = {}
        for index, (plan, store, x) in enumerate(zip(self.plans, self.stores, rows, strict=True)):
            if plan is not None and not _packs_late(plan, x):
                (waiting if plan.waits else now)[index] = plan, store, x
        packed = {index: plan.pack(store, x, turn) for index, (plan, store, x) in now.items()}
        if waiting:  # one branch for both sides: it costs a GPU a halt
            packed |= jax.lax.cond(
                jnp.any(jnp.stack([plan.due(turn) for plan, _, _ in waiting.values()])),
                lambda: {index: plan.pack(store, x, turn) for index, (plan, store, x) in waiting.items()},
                lambda: {index: plan.blocks(store, turn) for index, (plan, store, _) in waiting.items()},
            )
        return packed.get(0, {}), packed.get(1, {})

    def _write_side(
        self, plan: SidePlan | None, store: Any, rows: jax.Array, blocks: Packed, slot: jax.Array | int
    ) -> tuple[Store, jax.Array, jax.Array | None]:
        """The new store, what the call sees of it, and up to where that is packed."""
        if plan is None:
            slots = write_slots(store, rows, slot)
            return slots, slots, None
        turn, own = self.turn, plan.quantizer.own
        new = store if _packs_late(plan, rows) else plan.write(store, rows, blocks, turn)
        begin, end = plan.ends(turn)
        if own == "step" or (own == "prompt" and rows.shape[1] > 1):
            return new, write_slots(plan.read(store, turn, begin), rows, slot), begin
        view = plan.read(new, turn, end)
        if own == "prompt":
            seen = jax.lax.dynamic_slice_in_dim(view, slot, 1, axis=1)
            view = write_slots(view, jnp.where((turn.before == 0)[:, None, None, None], rows, seen), slot)
        return new, view, end


def _packs_late(plan: SidePlan | None, rows: jax.Array) -> bool:
    """Whether rows [B, T, K, H] are packed when the call ends: nobody in it sees them packed."""
    return plan is not None and plan.quantizer.own != "none" and rows.shape[1] > 1


def _pack_late(layers: Sequence[tuple[SidePlan | None, Store, Any]], turn: Turn) -> tuple[Store, ...]:
    """The storage of one side of all layers, of plan, store and rows each, with what was left for the end of a call."""
    new = [store for _, store, _ in layers]
    late = [index for index, (_, _, rows) in enumerate(layers) if rows is not None]
    if not late:
        return tuple(new)
    plan = layers[late[0]][0]  # all that pack are alike
    assert plan is not None

    def add(given: tuple[SideStore, jax.Array]) -> SideStore:
        store, x = given
        if not plan.waits:
            return plan.write(store, x, plan.pack(store, x, turn), turn)
        blocks = jax.lax.cond(plan.due(turn), lambda: plan.pack(store, x, turn), lambda: plan.blocks(store, turn))
        return plan.write(store, x, blocks, turn)

    written = jax.lax.map(add, jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[index][1:] for index in late)))
    for place, index in enumerate(late):
        new[index] = jax.tree.map(lambda leaf, place=place: leaf[place], written)
    return tuple(new)


def _rotate(plan: SidePlan | None, x: jax.Array) -> jax.Array:
    return x if plan is None else plan.quantizer.rotate(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedCache:
    """Keys (after RoPE) and values of every layer, packed."""

    k: tuple[Store, ...]  # of L layers
    v: tuple[Store, ...]
    positions: jax.Array  # [B, S] int32, -1 where a slot is empty
    prompt: jax.Array  # [B] int32, tokens that a row's first call brought
    quant: CacheQuant  # what is done, by methods that know the dtype of what they pack
    windowed: tuple[bool, ...] = dataclasses.field(metadata={"static": True})  # ModelConfig.windowed_layers
    turn: Any = None  # the call, during one

    def plans(self, index: int) -> Plans:
        """How a layer is stored."""
        return make_plans(self.quant, index, self.windowed, self.positions.shape[1])

    def begin(self, positions: jax.Array, slot: jax.Array | int) -> Self:
        keys = write_slots(self.positions, positions, slot)
        before, after = _count(self.positions), _count(keys)
        prompt = jnp.where(before == 0, after, self.prompt)
        return dataclasses.replace(
            self, positions=keys, prompt=prompt, turn=Turn(positions, keys, before, after, prompt)
        )

    def layer(self, index: int) -> QuantizedLayer:
        return QuantizedLayer(self.plans(index), (self.k[index], self.v[index]), self.turn)

    def finish(self, layers: Sequence[Any]) -> Self:
        k, v = (
            _pack_late([(x.plans[side], x.stores[side], x.rows[side]) for x in layers], self.turn) for side in (0, 1)
        )
        return dataclasses.replace(self, k=k, v=v, turn=None)

    def read(self, index: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] of a layer as a later call would see them, rotated back, in fp32."""
        k, v = map(self.read_store, self.plans(index), (self.k[index], self.v[index]))
        return k, v

    def read_store(self, plan: SidePlan | None, store: Store) -> jax.Array:
        """As `read`, of one side of a layer."""
        if not isinstance(store, SideStore):
            return store.astype(jnp.float32)
        assert plan is not None
        written = _count(self.positions)
        turn = Turn(self.positions[:, :0], self.positions, written, written, self.prompt)
        return _rotate(plan, plan.read(store, turn, plan.ends(turn)[1]).astype(jnp.float32))

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
        self, config: ModelConfig, precision: Precision, batch: int, slots: int, problems: jax.Array | None = None
    ) -> QuantizedCache:
        """An empty cache.

        Raises UserError if the head dim or the cache's dtype does not suit the method, or the context is over before
        anything is packed.
        """
        del problems
        windowed = config.windowed_layers
        self.quant.check(config.head_dim, config.context_length, windowed)
        quant = jax.tree.map(jnp.asarray, self.quant.stored_as(precision.cache))
        shape = (config.num_kv_heads, config.head_dim)

        def make(plan: SidePlan | None) -> Store:
            if plan is None:
                return jnp.zeros((batch, slots, *shape), precision.cache)
            return plan.make(batch, *shape, precision.cache)

        plans = [make_plans(quant, layer, windowed, slots) for layer in range(config.num_layers)]
        k, v = (tuple(map(make, side)) for side in zip(*plans, strict=True))
        positions, prompt = jnp.full((batch, slots), EMPTY, jnp.int32), jnp.zeros(batch, jnp.int32)
        return QuantizedCache(k, v, positions, prompt, quant, windowed)


def cache_bytes(cache: Any) -> int:
    """Bytes of all keys and values with scales, windows and pending rows, counted; of a cache or of its shapes."""
    return nbytes((cache.k, cache.v))


def effective_bits(cache: Any, config: ModelConfig) -> float:
    """Bits per element of a cache, counted from the sizes of its arrays: all of them over all its slots."""
    elements = 2 * config.num_layers * cache.positions.size * config.num_kv_heads * config.head_dim
    return 8 * cache_bytes(cache) / elements
