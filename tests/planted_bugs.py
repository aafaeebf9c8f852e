"""Bugs planted in the models' code, for tests of what should find them: contexts in which a program is traced."""

import contextlib
from unittest import mock

import jax.numpy as jnp

from jaxkv.models import decoder, layers


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
