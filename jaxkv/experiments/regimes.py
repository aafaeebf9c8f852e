"""A changed cache along given tokens, in blocks, beside a clean run's values.

One program feeds the tokens in calls of b rows and takes down, for every row fed and every layer, how far the heads'
output is from the clean run's. It serves three regimes: given the clean run's values it is `static`, without them and
with b = 1 it is decoding token by token, with other b it is `accumulated(b)`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import EMPTY, Intervention, write_slots
from jaxkv.decode import COMPILER_OPTIONS, Arms
from jaxkv.rollout import Layout, Rollout, Rows, slot_positions
from jaxkv.tracing import Trace

WATCHED = ("q", "k", "v", "attn_heads")  # what a clean run is watched for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replay:
    """What came of a run along given tokens."""

    cache: Any  # at its end
    errors: tuple[jax.Array, ...]  # L arrays [B, S], relative L2 error of the heads' output at slots fed, 0 elsewhere
    logits: jax.Array  # [B, n, V]; those of step t are at t

    def nonfinite_step(self, lengths: np.ndarray) -> np.ndarray:
        """[B] the first step whose logits are not finite, -1 if none of a row's `lengths` steps."""
        broken = ~np.asarray(jnp.all(jnp.isfinite(self.logits), axis=-1))
        broken &= np.arange(broken.shape[1]) < np.asarray(lengths)[:, None]
        return np.where(broken.any(1), broken.argmax(1), -1)


class ReplayPrograms:
    """Compiled once for the arms of the clean run, in the plain regime; the cache decides what is done to it."""

    def __init__(self, arms: Arms):
        if arms.tile is not None:
            raise ValueError("a replay is of the plain regime")
        self.arms = arms
        jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS, donate_argnames="replay")
        self._prefill = jit(self._feed_prompt, static_argnames="size")
        self._blocks = jit(self._feed_blocks, static_argnames="size")

    def _feed(
        self, model: Any, tokens, rows: Rows, slot, replay: Replay, clean, static, size: int
    ) -> tuple[jax.Array, Any, tuple[jax.Array, ...]]:
        """Hidden rows, cache and errors of a call of `size` rows from `slot` on."""
        ids = jax.lax.dynamic_slice_in_dim(tokens, slot, size, axis=1)
        # A row's last token is never fed.
        positions = slot_positions(slot + jnp.arange(size, dtype=jnp.int32), rows.first, (rows.limit - 1)[:, None])
        errors = list(replay.errors)

        def watch(name: str, value: jax.Array) -> jax.Array:
            tensor, _, layer = name.partition(".")
            if tensor not in WATCHED:
                return value
            given = jax.lax.dynamic_slice_in_dim(clean[name], slot, size, axis=1)
            if tensor == "attn_heads":
                gap, whole = (_norm(x) for x in (value.astype(jnp.float32) - given.astype(jnp.float32), given))
                error = jnp.where(positions != EMPTY, gap / jnp.where(whole > 0, whole, 1), 0)
                errors[int(layer)] = write_slots(errors[int(layer)], error, slot)
            return jnp.where(static, given, value)

        hidden, cache = model(ids, positions, replay.cache, slot, watch)
        return hidden, cache, tuple(errors)

    def _feed_prompt(self, state, tokens, rows: Rows, replay: Replay, clean, static, *, size: int) -> Replay:
        model = nnx.merge(self.arms.graphdef, state)
        prompt = dataclasses.replace(rows, limit=jnp.full_like(rows.limit, rows.prompt + 1))
        hidden, cache, errors = self._feed(model, tokens, prompt, 0, replay, clean, static, size)
        logits = model.logits(jax.lax.dynamic_slice_in_dim(hidden, rows.prompt - 1, 1, axis=1))
        return Replay(cache, errors, write_slots(replay.logits, logits, 0))

    def _feed_blocks(
        self, state, tokens, rows: Rows, begin, count, replay: Replay, clean, static, *, size: int
    ) -> Replay:
        model = nnx.merge(self.arms.graphdef, state)

        def body(index: jax.Array, replay: Replay) -> Replay:
            slot = begin + index * size
            hidden, cache, errors = self._feed(model, tokens, rows, slot, replay, clean, static, size)
            return Replay(cache, errors, write_slots(replay.logits, model.logits(hidden), slot - rows.prompt + 1))

        return jax.lax.fori_loop(0, count, body, replay)

    def run(
        self,
        state: nnx.State,
        reference: Rollout,
        forced: Rows,
        layout: Layout,
        clean: Trace,
        intervention: Intervention,
        block: int = 1,
        static: bool = False,
    ) -> Replay:
        """Feeds the prompt in one call and the tokens of the reference, the clean run, in blocks.

        `forced` are rows that follow it (rollout.force), `clean` its values of WATCHED in every layer. A call after the
        prompt has b = `block` rows, the last one what is left. `static` hands every layer the clean run's queries,
        keys, values and attention output, so that no error feeds back.
        """
        config, precision = self.arms.config, self.arms.precision
        cache = self.arms.make_cache(forced, layout, intervention)
        steps = layout.new_tokens
        replay = Replay(
            cache,
            tuple(jnp.zeros((layout.batch, layout.slots), jnp.float32) for _ in range(config.num_layers)),
            jnp.zeros((layout.batch, steps, config.vocab_size), precision.logits),
        )
        tokens, flag = jnp.asarray(reference.tokens), jnp.asarray(static)
        replay = self._prefill(state, tokens, forced, replay, clean.values, flag, size=layout.prefill)
        whole, rest = divmod(max(steps - 1, 0), block)
        begin = layout.prompt
        for count, size in ((whole, block), (1, rest)):
            if count and size:
                replay = self._blocks(state, tokens, forced, begin, count, replay, clean.values, flag, size=size)
                begin += count * size
        return replay


def _norm(x: jax.Array) -> jax.Array:
    """[B, T] L2 norm of all heads together."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(2, 3)))
