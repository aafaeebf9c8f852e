"""What a quantized cache costs: time of a step with it, the quantizer's own work, and memory at a long context.

    python -m jaxkv.benchmark_quantized --model=llama2-7b --precision=fp16 --quant=kvarn:k2v2

Weights are random: speed depends on shapes alone. Each part runs in a process of its own, so that none holds another's
memory: `plain` and `packed` time the cached arm's on-device loop over a clean and over the quantized cache, `tile`
times the packing of one full block of every layer's keys and values, written to storage, in an on-device loop, and
`memory` allocates both caches and asks the compiler what a decode program holds.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from jaxkv.benchmark import median_seconds, run_worker, write_figures
from jaxkv.cli import run_command
from jaxkv.errors import UserError

FLAGS = flags.FLAGS
BLOCKS_A_RUN = 8  # blocks that one timed loop packs


def define_flags() -> None:
    """Defines the command's flags."""
    flags.DEFINE_string("model", "llama2-7b", "Preset whose shapes to run, e.g. tiny-llama2 on a CPU.")
    flags.DEFINE_string("precision", "fp16", "fp16, bf16 or fp32.")
    flags.DEFINE_string("quant", "kvarn:k2v2", "What is done to the cache, as --cache_quant of jaxkv.launch.")
    flags.DEFINE_integer("prompt_tokens", 512, "Tokens in the prompt.", lower_bound=1)
    flags.DEFINE_integer("new_tokens", 257, "Tokens to generate.", lower_bound=2)
    flags.DEFINE_integer("memory_tokens", 32768, "Slots of the caches whose memory is measured.", lower_bound=1)
    flags.DEFINE_integer("repeats", 3, "Timed runs; the median counts.", lower_bound=1)
    flags.DEFINE_list("parts", list(_PARTS), f"What to measure: {', '.join(_PARTS)}.")
    flags.DEFINE_string("out", None, "JSON file for the figures.")
    flags.DEFINE_string("worker", None, "Internal: run one part in this process and print JSON.")


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured.

    Attributes:
      config: architecture, its context long enough for what is asked.
      precision: policy.
      changed: makes the quantized cache.
      prompt_tokens: of the prompt.
      new_tokens: to generate.
      memory_tokens: slots of the caches whose memory is measured.
      repeats: timed runs.
    """

    config: Any
    precision: Any
    changed: Any
    prompt_tokens: int
    new_tokens: int
    memory_tokens: int
    repeats: int


def make_work(
    model: str, precision: str, quant: str, prompt_tokens: int, new_tokens: int, memory_tokens: int, repeats: int
) -> Work:
    """Reads names. Raises UserError where one is unknown or does not suit another."""
    from jaxkv.config import make_precision
    from jaxkv.interventions.quantized_cache import Quantization
    from jaxkv.interventions.quantizers import parse_cache_quant
    from jaxkv.models.families import get_preset

    config = get_preset(model)
    longest = max(config.context_length, prompt_tokens + new_tokens, memory_tokens)
    config = dataclasses.replace(config, context_length=longest)
    spec, found = parse_cache_quant(quant), make_precision(precision)
    spec.check(config.head_dim, longest)
    changed = Quantization(spec.stored_as(found.cache))
    return Work(config, found, changed, prompt_tokens, new_tokens, memory_tokens, repeats)


def make_arms(work: Work, changed: bool) -> tuple[Any, Any]:
    """Arms with a clean or the quantized cache, and random weights."""
    from flax import nnx

    from jaxkv.models.decoder import Decoder

    arms = _lean_arms(work, changed)
    return arms, arms.prepare(nnx.split(Decoder(work.config, work.precision, nnx.Rngs(0)))[1])


def time_steps(work: Work, changed: bool) -> dict[str, Any]:
    """Milliseconds of a decode step: an on-device loop over all new tokens, prefill not counted."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxkv.decode import make_layout, make_rows, start_rollout
    from jaxkv.generate import make_cache

    arms, state = make_arms(work, changed)
    prompt = np.random.default_rng(0).integers(3, work.config.vocab_size, work.prompt_tokens).tolist()
    layout = make_layout([prompt], work.new_tokens, work.prompt_tokens, work.config)
    tokens, rows = make_rows([prompt], [0], 0, layout)
    loops = []

    def run():
        logits, cache = arms.prefill(
            state, jnp.asarray(tokens[:, : layout.prefill]), rows, make_cache(arms, rows, layout)
        )
        start = jax.block_until_ready((start_rollout(arms, tokens, rows, layout), logits, cache))
        begin = time.perf_counter()
        jax.block_until_ready(arms.cached_loop(state, logits, start[0], rows, layout.prompt + work.new_tokens, cache))
        loops.append(time.perf_counter() - begin)

    median_seconds(run, work.repeats)
    # The loop takes one step less than it fills slots: the first comes from the prefill's logits.
    return {"ms_a_step": 1e3 * sorted(loops[1:])[work.repeats // 2] / (work.new_tokens - 1)}


def time_blocks(work: Work) -> dict[str, Any]:
    """Milliseconds to pack one full block of keys and one of values in every layer that the method quantizes.

    As a decode step does it: layer after layer, fp16 rows in, codes and scales written to packed storage. Blocks are
    those of the method's windows (a KVarN tile of 128 tokens). Each round's rows differ, so that none can be reused.
    """
    import jax
    import jax.numpy as jnp

    from jaxkv.decode import COMPILER_OPTIONS
    from jaxkv.interventions.quantized_cache import make_plans

    config = work.config
    windowed = config.windowed_layers
    plans = [make_plans(work.changed.quant, layer, windowed, 1 << 20) for layer in range(config.num_layers)]
    used = [plan for pair in plans for plan in pair if plan is not None]
    blocks = {plan.window.block for plan in used}
    if len(blocks) != 1:
        raise UserError(f"keys and values are packed {sorted(blocks)} tokens at a time; give --quant with one block")
    (block,) = blocks
    shape = (1, block, config.num_kv_heads, config.head_dim)
    keys = jax.random.split(jax.random.key(0), len(used))
    rows = [jax.random.normal(key, shape, jnp.float32).astype(work.precision.cache) for key in keys]
    empty = [
        jax.tree.map(
            lambda leaf: jnp.zeros((1, BLOCKS_A_RUN * leaf.shape[1], *leaf.shape[2:]), leaf.dtype),
            jax.eval_shape(plan.quantizer.quantize, x),
        )
        for plan, x in zip(used, rows, strict=True)
    ]

    def loop(rows, storage, count):
        def body(index, storage):
            factor = 1 + index.astype(jnp.float32) / 16
            written = []
            for plan, x, held in zip(used, rows, storage, strict=True):
                packed = plan.quantizer.quantize((x.astype(jnp.float32) * factor).astype(x.dtype))
                put = jax.lax.dynamic_update_slice_in_dim
                written.append({n: put(held[n], leaf, index * leaf.shape[1], 1) for n, leaf in packed.items()})
            return written

        return jax.lax.fori_loop(0, count, body, storage)

    run = jax.jit(loop, donate_argnums=1, compiler_options=COMPILER_OPTIONS)
    times = []

    def timed():
        storage = jax.block_until_ready(jax.tree.map(jnp.copy, empty))
        begin = time.perf_counter()
        jax.block_until_ready(run(rows, storage, BLOCKS_A_RUN))
        times.append(time.perf_counter() - begin)

    median_seconds(timed, work.repeats)
    milliseconds = 1e3 * sorted(times[1:])[work.repeats // 2] / BLOCKS_A_RUN
    return {"block": block, "ms_a_block": milliseconds, "ms_a_token": milliseconds / block, "packings": len(used)}


def measure_memory(work: Work) -> dict[str, Any]:
    """Bytes of both caches at `memory_tokens` slots: counted, held on the device, and of a compiled decode program."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxkv.cache import empty_cache
    from jaxkv.decode import Layout, make_rows, start_rollout
    from jaxkv.interventions.quantized_cache import cache_bytes, effective_bits

    config, slots = work.config, work.memory_tokens
    makers: dict[str, Callable[[], Any]] = {
        "plain": lambda: empty_cache(config, work.precision, 1, slots),
        "packed": lambda: work.changed.make_cache(config, work.precision, 1, slots),
    }
    layout = Layout(1, slots // 2, slots // 2, slots, slots - slots // 2)
    tokens, rows = make_rows([np.ones(layout.prompt, np.int32).tolist()], [0], 0, layout)
    device, found = jax.local_devices()[0], {}
    for name, make in makers.items():
        shapes = jax.eval_shape(make)
        figures: dict[str, Any] = {"counted": cache_bytes(shapes), "bits": effective_bits(shapes, config)}
        if device.memory_stats() is not None:
            before = device.memory_stats()["bytes_in_use"]
            cache = jax.block_until_ready(make())
            figures["held"] = device.memory_stats()["bytes_in_use"] - before
            del cache
        arms = _lean_arms(work, name == "packed")
        logits = jax.ShapeDtypeStruct((1, config.vocab_size), work.precision.logits)
        run = jax.eval_shape(lambda arms=arms: start_rollout(arms, tokens, rows, layout))
        program = arms.cached_loop.lower(arms.abstract_state, logits, run, rows, jnp.int32(slots), shapes).compile()
        memory = program.memory_analysis()
        for figure in ("argument", "output", "alias", "temp"):
            figures[f"program_{figure}"] = int(getattr(memory, f"{figure}_size_in_bytes"))
        found[name] = figures
    return found


def _lean_arms(work: Work, changed: bool) -> Any:
    from jaxkv.decode import Arms

    return Arms(work.config, work.precision, keep_logits=False, intervention=work.changed if changed else None)


_PARTS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "plain": lambda work: time_steps(work, changed=False),
    "packed": lambda work: time_steps(work, changed=True),
    "tile": time_blocks,
    "memory": measure_memory,
}


def describe(results: dict[str, Any]) -> list[str]:
    """Lines of text for what was measured."""
    lines = []
    plain, packed, tile = (results.get(part) for part in ("plain", "packed", "tile"))
    if plain:
        lines.append(f"plain cache: {plain['ms_a_step']:.3f} ms a step")
    if packed:
        slower = f", {packed['ms_a_step'] / plain['ms_a_step']:.2f} times the plain one" if plain else ""
        lines.append(f"packed cache: {packed['ms_a_step']:.3f} ms a step{slower}, packing and reads included")
    if tile:
        share = f", {100 * tile['ms_a_token'] / plain['ms_a_step']:.2f} % of a plain step" if plain else ""
        lines.append(
            f"packing: {tile['ms_a_block']:.3f} ms for {tile['block']} tokens of all layers, "
            f"{tile['ms_a_token']:.4f} ms a token{share}"
        )
    if "memory" in results:
        clean, changed = results["memory"]["plain"], results["memory"]["packed"]
        for figure, words in (("counted", "counted"), ("held", "held on the device")):
            if figure in clean:
                share = changed[figure] / clean[figure]
                lines.append(f"memory {words}: {changed[figure]} bytes of {clean[figure]}, {share:.4f}")
        lines.append(
            f"bits of the whole cache: {changed['bits']:.3f}; decode program's scratch: "
            f"{changed['program_temp']} bytes beside {clean['program_temp']}"
        )
    return lines


def main(argv: Sequence[str]) -> None:
    """Prints a line for every figure."""
    del argv
    names = ("model", "precision", "quant", "prompt_tokens", "new_tokens", "memory_tokens", "repeats")
    values: dict[str, Any] = {name: FLAGS[name].value for name in names}
    work = make_work(**values)
    if FLAGS.worker:
        import jax

        print(json.dumps({"device": jax.devices()[0].device_kind} | _PARTS[FLAGS.worker](work)))
        return
    if unknown := [part for part in FLAGS.parts if part not in _PARTS]:
        raise UserError(f"--parts has no '{unknown[0]}'; known: {', '.join(_PARTS)}")
    arguments = [f"--{name}={value}" for name, value in values.items()]
    results: dict[str, Any] = dict(values)
    for part in FLAGS.parts:
        results[part] = run_worker("jaxkv.benchmark_quantized", part, [*arguments, f"--worker={part}"])
    print("\n".join(describe(results)))
    if FLAGS.out:
        write_figures(FLAGS.out, "jaxkv.benchmark_quantized", results)


if __name__ == "__main__":
    define_flags()
    run_command(main)
