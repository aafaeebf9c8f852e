"""Storage of one side (K or V) of one layer of a quantized cache.

Positions, not slots, say where a row lies, so that left padding changes nothing in it. A row is in one of three places:
its first tokens in `first`, whole blocks in `packed`, and the newest ones, which wait for their block or always stay,
in a ring `recent`. Attention reads in the order of the slots, as it does from a plain cache: then a quantizer that
changes nothing changes no bit of the run.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxkv.cache import EMPTY
from jaxkv.interventions.quantizers.base import Packed, Quantizer, Window
from jaxkv.interventions.quantizers.requantize import Requantize
from jaxkv.interventions.quantizers.spec import SideQuant


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a call adds, the same for every layer."""

    rows: jax.Array  # [B, T] positions of the call's rows, -1 for padding
    keys: jax.Array  # [B, S] positions of all slots once they are written
    before: jax.Array  # [B] tokens a row had
    after: jax.Array  # [B] tokens it has then
    prompt: jax.Array  # [B] tokens that its first call brought

    @property
    def offset(self) -> jax.Array:
        """[B] position of the row with index 0, were it none of padding; rows of a call are consecutive."""
        index = jnp.arange(self.rows.shape[1], dtype=jnp.int32)
        return jnp.max(jnp.where(self.rows == EMPTY, jnp.iinfo(jnp.int32).min, self.rows - index), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SideStore:
    """What is stored."""

    first: jax.Array  # [B, F, K, H] in the cache's dtype, positions from 0 on
    recent: jax.Array  # [B, W, K, H] in the cache's dtype; position p from F on is entry (p - F) % W
    packed: Packed  # leaves [B, ...] of the quantizer for C positions from F on; no leaves if C is 0


def _by_row(fn: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """fn of each row's arrays; a single row is spared the gathers and scatters that a batch needs."""
    if arrays[0].shape[0] == 1:
        return fn(*(x[0] for x in arrays))[None]
    return jax.vmap(fn)(*arrays)


def take(x: jax.Array, places: jax.Array) -> jax.Array:
    """x [B, n, ...] at places [B, m] of its second axis, clipped to it."""
    return _by_row(lambda x, places: x[jnp.clip(places, 0, x.shape[0] - 1)], x, places)


def _cut(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Entries [start, start + count) of x [B, n, ...], start [B]."""
    return _by_row(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, count), x, start)


def _put(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    """x [B, n, ...] with part [B, m, ...] at start [B]."""
    return _by_row(lambda x, part, start: jax.lax.dynamic_update_slice_in_dim(x, part, start, 0), x, part, start)


def _where(mask: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """x where the mask [B] or [B, n], else y; both [B, n, ...]."""
    return jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, y)


@dataclasses.dataclass(frozen=True)
class SidePlan:
    """How a side of S slots is stored: sizes and functions."""

    quant: SideQuant  # what is done to it; it has a quantizer
    slots: int  # S

    @property
    def quantizer(self) -> Quantizer:
        assert self.quant.quantizer is not None
        return self.quant.quantizer

    @property
    def window(self) -> Window:
        return self.quant.window

    @property
    def first(self) -> int:
        """F."""
        return min(self.window.first, self.slots)

    @property
    def recent(self) -> int:
        """W: as many as may wait when a call has ended."""
        return min(self.window.recent + self.window.block - 1, self.slots - self.first)

    @property
    def capacity(self) -> int:
        """C: the most positions that can be packed."""
        rest = self.slots - self.first
        if self.window.from_prompt:
            method = self.quantizer
            group = method.group if isinstance(method, Requantize) and method.axis == "channel" else 1
            return -(-rest // group) * group
        return max(0, rest - self.window.recent) // self.window.block * self.window.block

    @property
    def waits(self) -> bool:
        """Whether most calls of one row pack nothing."""
        return self.window.block > 1 and self.capacity > 0

    def make(self, batch: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> SideStore:
        """Empty storage."""
        empty = lambda n: jnp.zeros((batch, n, kv_heads, head_dim), dtype)  # noqa: E731
        shapes = {}
        if self.capacity:
            like = jax.ShapeDtypeStruct((batch, self.capacity, kv_heads, head_dim), dtype)
            shapes = jax.eval_shape(self.quantizer.quantize, like)
        packed = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        return SideStore(empty(self.first), empty(self.recent), packed)

    def ends(self, turn: Turn) -> tuple[jax.Array, jax.Array]:
        """[B] the position up to which a row is packed before a call, and after it."""
        old, new = (self.window.packed(written, turn.prompt)[1] for written in (turn.before, turn.after))
        return old, new

    def due(self, turn: Turn) -> jax.Array:
        """Whether the call completes a block of any row."""
        old, new = self.ends(turn)
        return jnp.any(new > old)

    def blocks(self, store: SideStore, turn: Turn) -> Packed:
        """The part of the packed storage that the call may write, as it is."""
        if self.quantizer.whole_history or not store.packed:
            return store.packed
        start, count = self._reach(turn)
        return {name: self._cut_leaf(leaf, start, count) for name, leaf in store.packed.items()}

    def pack(self, store: SideStore, rows: jax.Array, turn: Turn) -> Packed:
        """That part, packed anew; what is not due in it means nothing."""
        if not store.packed:
            return {}
        if isinstance(self.quantizer, Requantize):
            old, new = self.ends(turn)
            places = jnp.broadcast_to(self.first + jnp.arange(self.capacity), (rows.shape[0], self.capacity))
            held = self.quantizer.dequantize(store.packed)
            given = self._exact(store, rows, turn, places).astype(jnp.float32)
            history = _where(places < old[:, None], held, given)
            return self.quantizer.quantize(history, jnp.maximum(new - self.first, 0))
        start, count = self._reach(turn)
        places = self.first + start[:, None] + jnp.arange(count)
        return self.quantizer.quantize(self._exact(store, rows, turn, places))

    def write(self, store: SideStore, rows: jax.Array, blocks: Packed, turn: Turn) -> SideStore:
        """The storage with a call's rows [B, T, K, H], rotated, and what `pack` made of them."""
        old, new = self.ends(turn)
        packed = store.packed
        if self.quantizer.whole_history:
            due = new > old
            packed = {name: _where(due, blocks[name], leaf) for name, leaf in packed.items()}
        elif packed:
            start, count = self._reach(turn)
            places = self.first + start[:, None] + jnp.arange(count)
            due = (places >= old[:, None]) & (places < new[:, None])
            packed = {name: self._put_leaf(leaf, blocks[name], due, start) for name, leaf in packed.items()}
        return SideStore(self._keep_first(store.first, rows, turn), self._keep_recent(store.recent, rows, turn), packed)

    def read(self, store: SideStore, turn: Turn, end: jax.Array) -> jax.Array:
        """[B, S, K, H] in the cache's dtype, packed up to `end` [B]; zeros in empty slots."""
        places, dtype = turn.keys, store.recent.dtype
        if store.packed:
            x = take(self.quantizer.dequantize(store.packed).astype(dtype), places - self.first)
        else:
            x = jnp.zeros((*places.shape, *store.recent.shape[2:]), dtype)
        if self.recent:
            x = _where(places >= end[:, None], take(store.recent, (places - self.first) % self.recent), x)
        if self.first:
            x = _where(places < self.first, take(store.first, places), x)
        return _where(places != EMPTY, x, jnp.zeros_like(x))

    def saturated(self, x: jax.Array, positions: jax.Array, end: jax.Array) -> jax.Array:
        """[B] elements of rows x [B, S, K, H] at positions [B, S], packed up to `end` [B], that do not fit."""
        if not self.capacity:
            return jnp.zeros(x.shape[0], jnp.int32)
        places = self.first + jnp.arange(self.capacity)
        rows = take(self.quantizer.rotate(x), jnp.argmax(positions == 0, axis=1)[:, None] + places)
        if isinstance(self.quantizer, Requantize):
            over = self.quantizer.saturated(rows, jnp.maximum(end - self.first, 0))
        else:
            over = self.quantizer.saturated(rows)
        return jnp.sum(jnp.where((places < end[:, None])[:, :, None], over, 0), axis=(1, 2))

    def _reach(self, turn: Turn) -> tuple[jax.Array, int]:
        """First entry [B] and number of the positions that the call may pack."""
        block = self.window.block
        count = min(self.capacity, -(-turn.rows.shape[1] // block) * block)
        return jnp.clip(self.ends(turn)[0] - self.first, 0, self.capacity - count), count

    def _cut_leaf(self, leaf: jax.Array, start: jax.Array, count: int) -> jax.Array:
        """Entries of a leaf for `count` tokens from `start` [B] on, whole tiles."""
        tokens = self.capacity // leaf.shape[1]
        return _cut(leaf, start // tokens, count // tokens)

    def _put_leaf(self, leaf: jax.Array, part: jax.Array, due: jax.Array, start: jax.Array) -> jax.Array:
        """The leaf with the entries from `start` [B] on replaced where the tokens are due [B, n]."""
        tokens = self.capacity // leaf.shape[1]
        old = _cut(leaf, start // tokens, part.shape[1])
        return _put(leaf, _where(due[:, ::tokens], part, old), start // tokens)

    def _exact(self, store: SideStore, rows: jax.Array, turn: Turn, places: jax.Array) -> jax.Array:
        """The rows at places [B, n] from F on that wait or are new."""
        new = take(rows, places - turn.offset[:, None])
        if not self.recent:
            return new
        return _where(places >= turn.before[:, None], new, take(store.recent, (places - self.first) % self.recent))

    def _keep_first(self, held: jax.Array, rows: jax.Array, turn: Turn) -> jax.Array:
        """The first tokens with those that are new."""
        if not self.first:
            return held
        if rows.shape[1] == 1:
            wanted = (turn.rows != EMPTY) & (turn.rows < self.first)
            return self._keep_one(held, rows, wanted, turn.rows[:, 0])
        places = jnp.broadcast_to(jnp.arange(self.first), (rows.shape[0], self.first))
        new = (places >= turn.before[:, None]) & (places < turn.after[:, None])
        return _where(new, take(rows, places - turn.offset[:, None]), held)

    def _keep_recent(self, held: jax.Array, rows: jax.Array, turn: Turn) -> jax.Array:
        """The ring with the newest positions in it."""
        if not self.recent:
            return held
        if rows.shape[1] == 1:
            place = turn.rows - self.first
            return self._keep_one(held, rows, (turn.rows != EMPTY) & (place >= 0), place[:, 0] % self.recent)
        newest = turn.after[:, None] - 1
        places = newest - (newest - self.first - jnp.arange(self.recent)) % self.recent
        new = (places >= jnp.maximum(turn.before, self.first)[:, None]) & (turn.after > turn.before)[:, None]
        return _where(new, take(rows, places - turn.offset[:, None]), held)

    def _keep_one(self, held: jax.Array, row: jax.Array, wanted: jax.Array, entry: jax.Array) -> jax.Array:
        """`held` with row [B, 1, K, H] at entry [B], where wanted [B, 1]."""
        entry = jnp.clip(entry, 0, held.shape[1] - 1)
        return _put(held, _where(wanted, row, _cut(held, entry, 1)), entry)
