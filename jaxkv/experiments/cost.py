"""What an arm costs: milliseconds of prefill and of a cached step, and bytes."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import empty_cache
from jaxkv.decode import Arms, Layout, Rows, start_rollout


def _time(run: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    """Milliseconds of each repeat after one to warm up, and the last result."""
    result = jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = jax.block_until_ready(run())
        times.append(1e3 * (time.perf_counter() - begin))
    return times, result


def _peak(compiled: Any) -> int | None:
    """Most bytes a compiled program holds at once, arguments included; None where the backend does not say."""
    try:
        return int(compiled.memory_analysis().peak_memory_in_bytes) or None
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def measure_cost(
    arms: Arms, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout, repeats: int, backend: str | None
) -> dict[str, Any]:
    """Times the cached arm on a batch, logits not kept and no token ending a row.

    Args:
      arms: the policy, sampler and regime to time; its prefill program is used as it is.
      state: prepared weights.
      tokens: [B, S] token buffer with the prompts.
      rows: of the batch, free-running.
      layout: of the batch.
      repeats: timed runs, after one to warm up.
      backend: as that of `arms`.

    Returns:
      prefill_ms and ms_a_token (a step's time over the batch's rows), lists of `repeats` values; ms_a_token is None
      where fewer than two tokens can be had. In the aligned regime prefill_ms includes the first token. `bytes` has
      weights and cache as they are held, weights_as_stored in the policy's param dtype, and the decode program's peak.
    """
    lean = Arms(arms.config, arms.precision, arms.sampler, (), False, arms.tile, backend=backend)
    end = layout.prompt + layout.new_tokens
    prompt = jnp.asarray(tokens[:, : layout.prefill])

    def cache():
        return empty_cache(arms.config, arms.precision, layout.batch, layout.slots)

    def start():
        return start_rollout(lean, tokens, rows, layout)

    if arms.tile is None:
        decode = lean.cached_loop.lower(
            state, jnp.zeros((layout.batch, arms.config.vocab_size), arms.precision.logits), start(), rows, end, cache()
        ).compile()

        def prefill():
            return arms.prefill(state, prompt, rows, cache())

        def begin():
            return (*prefill(), start())

        def loop(made):
            logits, filled, run = made
            return decode(state, logits, run, rows, end, filled)
    else:
        decode = lean.tile_loop.lower(state, start(), rows, end, cache(), False, False, tile=arms.tile).compile()

        def prefill():
            return decode(state, start(), rows, layout.prompt + 1, cache(), False, False)

        begin = prefill

        def loop(made):
            run, filled = made
            return decode(state, run, rows, end, filled, False, False)

    prefill_ms, _ = _time(prefill, repeats)
    loop_ms, run = [], None
    for _ in range(repeats + 1):
        made = jax.block_until_ready(begin())
        before = time.perf_counter()
        run = jax.block_until_ready(loop(made))[0]
        loop_ms.append(1e3 * (time.perf_counter() - before))
    assert run is not None
    steps = layout.new_tokens - 1
    whole = steps > 0 and int(jnp.min(run.lengths)) == layout.new_tokens
    leaves, held = jax.tree.leaves(state), jax.tree.leaves(cache())
    return {
        "prefill_ms": prefill_ms,
        "ms_a_token": [ms / steps / layout.batch for ms in loop_ms[1:]] if whole else None,
        "shapes": {"batch": layout.batch, "prompt": layout.prompt, "prefill": layout.prefill, "slots": layout.slots},
        "bytes": {
            "weights": sum(leaf.nbytes for leaf in leaves),
            "weights_as_stored": sum(leaf.size for leaf in leaves) * jnp.dtype(arms.precision.param).itemsize,
            "cache": sum(leaf.nbytes for leaf in held),
            "program_peak": _peak(decode),
        },
    }
