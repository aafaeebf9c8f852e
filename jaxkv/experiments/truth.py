"""The float64 run of a model, against which every other precision is measured.

float64 does not exist in JAX unless x64 is on, and with x64 on some programs of narrower policies would be traced
otherwise. It is therefore on inside these functions alone, never across a `yield`; what comes out are arrays.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.config import DType, ModelConfig, make_precision
from jaxkv.decode import Arms
from jaxkv.rollout import Layout, Rollout, Rows, force
from jaxkv.sampling import Sampler


def round_weights(state: nnx.State, dtype: DType) -> nnx.State:
    """The weights rounded once to a dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), state)


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the float64 model says of a batch.

    Every arm is measured along its own `tokens` [B, prompt + n] from the given weights, `lengths` [B] of them. `given`
    are their float64 logits [B, n, V], `rounded` those of the weights rounded to a param dtype of this name, and
    `broke` [B] the step at which that run, or the given weights' own, was not finite, -1 if none.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    given: jax.Array
    rounded: dict[str, jax.Array]
    broke: dict[str, np.ndarray]


class Float64Model:
    """A model's programs in float64. The cached arm runs: in float64 the arms differ by 1e-13 or so."""

    def __init__(self, config: ModelConfig, sampler: Sampler | None, stop_ids: tuple[int, ...]):
        with jax.enable_x64(True):
            self._arms = Arms(config, make_precision("fp64"), sampler, stop_ids)

    def _run(self, program: str, state: nnx.State, *args: Any) -> Rollout:
        with jax.enable_x64(True):
            return jax.block_until_ready(getattr(self._arms, program)(round_weights(state, jnp.float64), *args))

    def run(self, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout, params: frozenset[str]) -> Truth:
        """Runs the checkpoint's weights freely, and those rounded to dtypes of these names along its tokens."""
        own = jnp.dtype(jax.tree.leaves(state)[0].dtype).name
        given = self._run("run_cached", state, tokens, rows, layout)
        runs, path = {own: given}, np.asarray(given.tokens)
        for name in sorted(params - {own}):
            narrow = round_weights(state, jnp.dtype(name))
            runs[name] = self._run("run_cached", narrow, path, force(rows, given), layout)
        return Truth(
            tokens=path[:, : layout.prompt + layout.new_tokens],
            lengths=np.asarray(given.lengths),
            given=given.logits,
            rounded={name: run.logits for name, run in runs.items()},
            broke={name: np.maximum(given.nonfinite_step, run.nonfinite_step) for name, run in runs.items()},
        )

    def follow(self, state: nnx.State, reference: Rollout, rows: Rows, layout: Layout) -> Rollout:
        """The uncached float64 model along another run's tokens, in one pass; `state` and `rows` are that run's."""
        return self._run("run_forced", state, reference, rows, layout)


@functools.lru_cache(maxsize=4)
def share_float64(config: ModelConfig) -> Float64Model:
    """The float64 model of an architecture, whose programs conditions of one process share."""
    return Float64Model(config, None, ())


def has_room(state: nnx.State, config: ModelConfig, layout: Layout) -> bool:
    """Whether float64 weights, logits and four times a layer's scores fit beside what is there; False if unknown."""
    weights = sum(leaf.size for leaf in jax.tree.leaves(state))
    logits = layout.batch * layout.new_tokens * config.vocab_size
    scores = layout.batch * config.num_query_heads * layout.slots**2
    return 8 * (1.2 * weights + logits + 4 * scores) < _free_bytes()


def _free_bytes() -> int:
    """Of JAX's default device; 0 where that cannot be found out."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        try:
            told = pathlib.Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()
        except (OSError, IndexError):
            return 0
        return int(told[0]) * 1024
    found = device.memory_stats() or {}
    return found.get("bytes_limit", 0) - found.get("bytes_in_use", 0)
