"""A quantized cache whose worst token scales an oracle corrects.

Quantization changes a token's vector in norm and in direction. The scale error of a packed token of a kv head is
| |x'| - |x| | / |x|, x the row that entered and x' what is read of it. Of each (row, kv head, side) the worst tokens
are the `SHARE` of its packed ones, rounded up, with the largest scale error. A repaired token is read as x' |x| / |x'|:
the oracle gives it its norm back and leaves its direction as it is. If scales are the culprit, repairing the worst ones
takes away much of the attention output's error, and repairing all the others takes away little.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxkv.cache import EMPTY, KVCache, Slots, empty_cache
from jaxkv.config import ModelConfig, Precision
from jaxkv.interventions.quantized_cache import Quantization, QuantizedCache, QuantizedLayer

SHARE = 0.05
CHOICES = ("nothing", "worst", "others", "everything")


def repair_tokens(view: jax.Array, exact: jax.Array, packed: jax.Array, choice: jax.Array | int) -> jax.Array:
    """What is read after the repair of a view [B, S, K, H] of the exact rows, [B, S, K, H] too, that entered.

    Slots [B, S] that are not packed are read exactly; `choice` is an index of CHOICES, which tokens are repaired.
    """
    size, wrong = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (exact, view))
    error = jnp.where(packed[:, :, None], jnp.abs(wrong - size) / jnp.where(size > 0, size, 1), -1.0)
    count = jnp.ceil(SHARE * jnp.sum(packed, axis=1)).astype(jnp.int32)  # [B]
    last = jnp.clip(count - 1, 0)[:, None, None]
    least = jnp.take_along_axis(-jnp.sort(-error, axis=1), last, axis=1)  # [B, 1, K]
    worst = packed[:, :, None] & (error >= least)
    chosen = jnp.stack([jnp.zeros_like(worst), worst, packed[:, :, None] & ~worst, packed[:, :, None] | worst])[choice]
    factor = jnp.where(chosen & (wrong > 0), size / jnp.where(wrong > 0, wrong, 1), 1)
    return jnp.where(chosen[..., None], view.astype(jnp.float32) * factor[..., None], view).astype(view.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepairedLayer(QuantizedLayer):
    """One layer during a call, with the rows as they entered, rotated, and the choice."""

    exact: Slots
    choice: jax.Array

    def write(self, k: jax.Array, v: jax.Array, slot: jax.Array | int) -> Self:
        exact = self.exact.write(*self.rotate_rows(k, v), slot)
        return dataclasses.replace(super().write(k, v, slot), exact=exact)

    def read(self) -> tuple[jax.Array, jax.Array]:
        k, v = map(self._repair, range(2), super().read(), self.exact.read())
        return k, v

    def _repair(self, side: int, view: jax.Array, exact: jax.Array) -> jax.Array:
        assert self.ends is not None
        plan, end, keys = self.plans[side], self.ends[side], self.turn.keys
        if plan is None:
            return view
        held = (keys >= plan.first) & (keys < end[:, None]) & (keys != EMPTY)
        return repair_tokens(view, exact, held, self.choice)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RepairedCache(QuantizedCache):
    """A quantized cache beside the rows that entered it."""

    exact: KVCache  # what the oracle knows, rotated as what is packed
    choice: jax.Array  # int32 scalar, index of CHOICES

    def layer(self, index: int) -> RepairedLayer:
        return RepairedLayer(**vars(super().layer(index)), exact=self.exact.layer(index), choice=self.choice)

    def finish(self, layers: Sequence[Any]) -> Self:
        exact = dataclasses.replace(self.exact, positions=self.positions).finish([layer.exact for layer in layers])
        return dataclasses.replace(super().finish(layers), exact=exact)


@dataclasses.dataclass(frozen=True)
class Repair(Quantization):
    """Quantizes as `quant` says and repairs the `choice` of tokens (jaxkv.cache.Intervention)."""

    choice: str

    def make_cache(
        self, config: ModelConfig, precision: Precision, batch: int, slots: int, problems: jax.Array | None = None
    ) -> RepairedCache:
        """An empty cache. Raises UserError as `Quantization` does."""
        packed = super().make_cache(config, precision, batch, slots, problems)
        choice = jnp.asarray(CHOICES.index(self.choice), jnp.int32)
        return RepairedCache(**vars(packed), exact=empty_cache(config, precision, batch, slots), choice=choice)
