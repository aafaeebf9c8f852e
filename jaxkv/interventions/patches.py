"""Activation patches: values of one run put into another, by name and slot.

What is patched is data: one compiled program serves every layer, position and kind of value. Keys and values are
replaced as they enter the cache, so a patch of slots holds for whatever sees them later. Under grouped-query attention
they have kv heads and are patched as such.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxkv.cache import EMPTY

STATE = ("k.", "v.")  # names of values that enter the cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Patch:
    """What to put in place of a run's own values.

    Attributes:
      values: name -> [B, S, ...], the donor's value of each slot.
      masks: name -> [S] booleans, the slots at which it replaces the run's own.
      newest: bool scalar. True patches what is no key or value in a call's newest row alone and lets nothing of that
        into the cache: the call is made a second time without, and the cache keeps what that one wrote.
    """

    values: dict[str, jax.Array]
    masks: dict[str, jax.Array]
    newest: jax.Array


def make_patch(values: Mapping[str, jax.Array], where: Mapping[str, jax.Array], newest: bool = False) -> Patch:
    """A patch that replaces `where` names say so, and nothing else of `values`.

    Args:
      values: name -> [B, S, ...].
      where: name -> [S] booleans; names that are missing are left as they are.
      newest: as in Patch.

    Raises:
      ValueError: a name that has no values.
    """
    if unknown := set(where) - set(values):
        raise ValueError(f"no values to patch {', '.join(sorted(unknown))} with")
    slots = next(iter(values.values())).shape[1]
    off = jnp.zeros(slots, bool)
    masks = {name: jnp.asarray(where.get(name, off)) for name in values}
    return Patch(dict(values), masks, jnp.asarray(newest))


def patch_rows(
    patch: Patch, name: str, value: jax.Array, positions: jax.Array, slot: jax.Array | int, again: jax.Array
) -> jax.Array:
    """The rows of a named value after patching.

    Args:
      patch: what to replace.
      name: of the value.
      value: [B, T, ...] rows at slots [slot, slot + T).
      positions: [B, T] of the rows, -1 for padding.
      slot: of the first row.
      again: bool scalar, whether this is the second call of a patch of newest rows.
    """
    if name not in patch.values:
        return value
    here = jax.lax.dynamic_slice_in_dim(patch.masks[name], slot, value.shape[1])[None, :]
    if not name.startswith(STATE):
        newest = (positions == jnp.max(positions, axis=1, keepdims=True)) & (positions != EMPTY)
        here = here & jnp.where(patch.newest, newest & ~again, True)
    donor = jax.lax.dynamic_slice_in_dim(patch.values[name], slot, value.shape[1], axis=1)
    return jnp.where(jnp.expand_dims(here, tuple(range(2, value.ndim))), donor, value)
