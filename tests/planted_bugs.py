"""Bugs planted in the models' code, for tests of what should find them: contexts in which a program is traced."""

import contextlib
import copy
import functools
from unittest import mock

import jax.numpy as jnp

from jaxkv.cache import Slots
from jaxkv.decode import Arms
from jaxkv.experiments.truth import share_float64
from jaxkv.models import decoder, layers


@contextlib.contextmanager
def planted(program, bug):
    """Has every plain program of a name ('prefill', 'cached_loop', 'tile_loop') traced under a bug.

    As code with the bug would: the float64 run, which goes through `tile_loop`, has it too.
    """
    original = getattr(Arms, f"_{program}")

    @functools.wraps(original)
    def call(self, *args, **named):
        with bug() if self.tile is None else contextlib.nullcontext():
            return original(self, *args, **named)

    share_float64.cache_clear()
    try:
        with mock.patch.object(Arms, f"_{program}", call):
            yield
    finally:
        share_float64.cache_clear()


def planted_arms(arms, program, bug):
    """The arms with one program traced under a bug."""
    traced = getattr(Arms(arms.config, arms.precision, arms.sampler, arms.stop_ids, tile=arms.tile), program)

    def call(*args, **named):
        with bug():
            return traced(*args, **named)

    result = copy.copy(arms)
    setattr(result, program, call)
    return result


@contextlib.contextmanager
def input_not_cast():
    """The first layer's attention gets its normed input as it was computed."""
    norm, layer = layers.RMSNorm.__call__, decoder.DecoderLayer.__call__
    wide = []

    def call_layer(self, *args, **kwargs):
        wide[:] = [self.attn_norm] if self.layer == 0 else []
        return layer(self, *args, **kwargs)

    def call_norm(self, x, out):
        return norm(self, x, jnp.float32 if any(self is one for one in wide) else out)

    with (
        mock.patch.object(layers.RMSNorm, "__call__", call_norm),
        mock.patch.object(decoder.DecoderLayer, "__call__", call_layer),
    ):
        yield


def patched_call(change):
    """Patches the decoder's call: `change(tokens, positions, cache, slot)` gives the arguments to use instead."""
    original = decoder.Decoder.__call__

    def call(self, tokens, positions, cache, slot, *hook, **named):
        return original(self, *change(tokens, positions, cache, slot), *hook, **named)

    return mock.patch.object(decoder.Decoder, "__call__", call)


def positions_off():
    """RoPE and mask one position further."""
    return patched_call(lambda tokens, at, cache, slot: (tokens, jnp.where(at >= 0, at + 1, at), cache, slot))


def rotation_off():
    original = decoder.rope_table
    return mock.patch.object(decoder, "rope_table", lambda p, *rest: original(p + 1, *rest))


def window_off():
    original = layers.visible
    return mock.patch.object(layers, "visible", lambda q, k, window: original(q, k, window and window + 1))


def first_key_lost():
    original = layers.visible

    def visible(q, k, window):
        return original(q, k, window) & ((k[:, None, :] != 0) | (q[:, :, None] == 0))

    return mock.patch.object(layers, "visible", visible)


def softcap_lost():
    return mock.patch.object(layers, "softcap", lambda x, cap, wide: x)


def patched_values(name, change):
    """Values whose name begins so are changed, `change(value, positions)`, by the hook that every value passes."""
    original = decoder.Decoder.__call__

    def call(self, tokens, positions, cache, slot, hook=layers.no_hook, **named):
        def watch(here, value):
            return hook(here, change(value, positions) if here.startswith(name) else value)

        return original(self, tokens, positions, cache, slot, watch, **named)

    return mock.patch.object(decoder.Decoder, "__call__", call)


def scaled(name, factor):
    return patched_values(name, lambda value, _: value * factor)


def narrowed(name):
    """Cut to bf16 and widened again."""
    return patched_values(name, lambda value, _: value.astype(jnp.bfloat16).astype(value.dtype))


def lost(name, position):
    """Zeros at a position."""
    return patched_values(name, lambda value, at: jnp.where((at == position)[:, :, None, None], 0, value))


def narrow_norm():
    """Every norm computed in bf16."""
    original = layers.RMSNorm.__call__

    def call(self, x, out):
        return original(self, x.astype(jnp.bfloat16), out)

    return mock.patch.object(layers.RMSNorm, "__call__", call)


@contextlib.contextmanager
def narrow_k_norm():
    """Keys alone normed in bf16, where a model norms its heads."""
    attention, norm = layers.Attention.__call__, layers.RMSNorm.__call__
    keys = []

    def attend(self, *args, **named):
        keys[:] = [self.k_norm]
        return attention(self, *args, **named)

    def call(self, x, out):
        return norm(self, x.astype(jnp.bfloat16) if any(self is one for one in keys) else x, out)

    with (
        mock.patch.object(layers.Attention, "__call__", attend),
        mock.patch.object(layers.RMSNorm, "__call__", call),
    ):
        yield


def narrow_cache():
    """Rows written to the cache in bf16, and kept in its own dtype."""
    original = Slots.write

    def write(self, k, v, slot):
        k, v = (x.astype(jnp.bfloat16).astype(x.dtype) for x in (k, v))
        return original(self, k, v, slot)

    return mock.patch.object(Slots, "write", write)
