"""What an arm costs: milliseconds of prefill and of a cached step, and bytes."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import Intervention
from jaxkv.decode import Arms
from jaxkv.rollout import Layout, Rows, start_rollout


def time_runs(run: Callable[..., Any], repeats: int, prepare: Callable[[], Any] = tuple) -> list[float]:
    """Milliseconds of each run after one to warm up, waited for; `prepare` makes its arguments, and does not count."""
    times = []
    for _ in range(repeats + 1):
        arguments = jax.block_until_ready(prepare())
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(1e3 * (time.perf_counter() - begin))
    return times[1:]


def _peak(compiled: Any) -> int | None:
    """Most bytes a compiled program holds at once, arguments included; None where the backend does not say."""
    try:
        return int(compiled.memory_analysis().peak_memory_in_bytes) or None
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def measure_cost(
    arms: Arms,
    state: nnx.State,
    tokens: np.ndarray,
    rows: Rows,
    layout: Layout,
    repeats: int,
    backend: str | None = None,
    change: Intervention | None = None,
) -> dict[str, Any]:
    """Times the cached arm on a batch of free-running rows, logits not kept and no token ending a row.

    `arms` has the policy and regime to time; its prefill program is used as it is. `tokens` [B, S] hold the prompts.
    Gives prefill_ms, in the aligned regime with the first token, and ms_a_token (a step's time over the batch's rows),
    lists of `repeats` values; the latter is None where fewer than two tokens can be had. `bytes` has weights and cache
    as they are held, weights_as_stored in the policy's param dtype, and the decode program's peak.
    """
    given = (arms.config, arms.precision, arms.sampler, (), False, arms.tile)
    lean = Arms(*given, backend=backend, attention=arms.attention)
    end = layout.prompt + layout.new_tokens
    prompt, lengths = jnp.asarray(tokens[:, : layout.prefill]), []

    def cache():
        return lean.make_cache(rows, layout, change)

    def start():
        return start_rollout(lean, tokens, rows, layout)

    if arms.tile is None:
        logits = jnp.zeros((layout.batch, arms.config.vocab_size), arms.precision.logits)
        decode = lean.cached_loop.lower(state, logits, start(), rows, end, cache()).compile()

        def prefill():
            return arms.prefill(state, prompt, rows, cache(), None)  # as the arms call it, so compiled already

        def begin():
            logits, filled = prefill()
            return state, logits, start(), rows, end, filled
    else:
        decode = lean.tile_loop.lower(state, start(), rows, end, cache(), False, False, tile=arms.tile).compile()

        def prefill():
            return decode(state, start(), rows, layout.prompt + 1, cache(), False, False)

        def begin():
            run, filled = prefill()
            return state, run, rows, end, filled, False, False

    def decode_all(*arguments):
        run, filled = decode(*arguments)
        lengths.append(run.lengths)
        return run, filled

    prefill_ms, loop_ms = time_runs(prefill, repeats), time_runs(decode_all, repeats, begin)
    steps = layout.new_tokens - 1
    whole = steps > 0 and int(jnp.min(lengths[-1])) == layout.new_tokens
    leaves, held = jax.tree.leaves(state), jax.tree.leaves(cache())
    return {
        "prefill_ms": prefill_ms,
        "ms_a_token": [ms / steps / layout.batch for ms in loop_ms] if whole else None,
        "shapes": {"batch": layout.batch, "prompt": layout.prompt, "prefill": layout.prefill, "slots": layout.slots},
        "bytes": {
            "weights": sum(leaf.nbytes for leaf in leaves),
            "weights_as_stored": sum(leaf.size for leaf in leaves) * jnp.dtype(arms.precision.param).itemsize,
            "cache": sum(leaf.nbytes for leaf in held),
            "program_peak": _peak(decode),
        },
    }
