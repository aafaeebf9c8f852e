"""Decode speed of the cached arm, beside the device's copy bandwidth and transformers, all in one run.

    python -m jaxkv.benchmark --model=llama2-7b --precision=fp16 --prompt_tokens=512 --new_tokens=128

Weights are random: speed depends on shapes alone. Each engine runs in a process of its own, so that neither holds the
other's memory.
"""

import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from jaxkv.cli import run_command
from jaxkv.errors import UserError
from jaxkv.provenance import environment, git_revision

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the command's flags."""
    flags.DEFINE_string("model", "llama2-7b", "Preset whose shapes to run.")
    flags.DEFINE_list("precision", ["fp16"], "Precisions: fp16, bf16, fp32.")
    flags.DEFINE_integer("prompt_tokens", 512, "Tokens in the prompt.", lower_bound=1)
    flags.DEFINE_integer("new_tokens", 128, "Tokens to generate.", lower_bound=2)
    flags.DEFINE_integer("repeats", 3, "Timed runs; the median counts.", lower_bound=1)
    flags.DEFINE_list("engines", ["jaxkv", "transformers"], f"What to time: {', '.join(_TIMERS)}.")
    flags.DEFINE_list("tiles", [], "Also time the aligned regime's cached step with tiles of so many rows.")
    flags.DEFINE_string("out", None, "JSON file for the figures.")
    flags.DEFINE_string("worker", None, "Internal: run one engine in this process and print JSON.")


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median wall time of `run`, which must wait for its own result, after one run to warm up."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def copy_bandwidth(bytes_each: int) -> float:
    """Bytes a second of a device-to-device copy, read plus written: the best of ten, by a memory copy or a kernel."""
    import jax
    import jax.numpy as jnp

    source = jnp.arange(bytes_each // 4, dtype=jnp.uint32)
    best = float("inf")
    for copy in (jax.jit(lambda x: x ^ jnp.uint32(1)), lambda x: jnp.array(x, copy=True)):
        jax.block_until_ready(copy(source))
        for _ in range(10):
            begin = time.perf_counter()
            jax.block_until_ready(copy(source))
            best = min(best, time.perf_counter() - begin)
    return 2 * source.nbytes / best


def time_jaxkv(
    model: str, precision_name: str, prompt_tokens: int, new_tokens: int, repeats: int, tiles: Sequence[int] = ()
) -> dict[str, Any]:
    """Times the cached arm's on-device loop; see `main` for the figures."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from jaxkv.cache import empty_cache
    from jaxkv.checkpoints.fill import flat_paths
    from jaxkv.config import make_precision
    from jaxkv.decode import Arms, make_layout, make_rows, start_rollout
    from jaxkv.models.decoder import Decoder
    from jaxkv.models.families import get_preset

    config, precision = get_preset(model), make_precision(precision_name)
    bandwidth = copy_bandwidth(1 << 32 if jax.default_backend() != "cpu" else 1 << 29)
    arms = Arms(config, precision, keep_logits=False)
    state = arms.prepare(nnx.split(Decoder(config, precision, nnx.Rngs(0)))[1])
    prompt = np.random.default_rng(0).integers(3, config.vocab_size, prompt_tokens).tolist()
    layout = make_layout([prompt], new_tokens, prompt_tokens, config)
    tokens, rows = make_rows([prompt], [0], 0, layout)
    end = layout.prompt + new_tokens

    def prefill():
        cache = empty_cache(config, precision, 1, layout.slots)
        return jax.block_until_ready(arms.prefill(state, jnp.asarray(tokens[:, : layout.prefill]), rows, cache))

    loops = []

    def run():
        logits, cache = prefill()
        start = jax.block_until_ready(start_rollout(arms, tokens, rows, layout))
        begin = time.perf_counter()
        jax.block_until_ready(arms.cached_loop(state, logits, start, rows, end, cache))
        loops.append(time.perf_counter() - begin)

    def time_aligned(tile: int) -> float:
        """Seconds a step of the aligned cached arm."""
        arms = Arms(config, precision, keep_logits=False, tile=tile)
        layout = make_layout([prompt], new_tokens, prompt_tokens, config, tile)
        tokens, rows = make_rows([prompt], [0], 0, layout)
        loops = []

        def run():
            cache = empty_cache(config, precision, 1, layout.slots)
            start = start_rollout(arms, tokens, rows, layout)
            first = arms.tile_loop(state, start, rows, layout.prompt + 1, cache, False, False, tile=tile)
            jax.block_until_ready(first)
            begin = time.perf_counter()
            jax.block_until_ready(arms.tile_loop(state, first[0], rows, end, first[1], False, False, tile=tile))
            loops.append(time.perf_counter() - begin)

        median_seconds(run, repeats)
        return sorted(loops[1:])[repeats // 2] / (new_tokens - 1)

    median_seconds(run, repeats)
    step = sorted(loops[1:])[repeats // 2] / (new_tokens - 1)
    weights = sum(x.nbytes for x in jax.tree.leaves(state))
    if not config.tie_embeddings:
        weights -= flat_paths(state)["embed"].get_value().nbytes  # one row of it is read
    cache = (
        2
        * config.num_layers
        * layout.slots
        * config.num_kv_heads
        * config.head_dim
        * jnp.dtype(precision.cache).itemsize
    )
    return {
        "engine": "jaxkv",
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__},
        "ms_a_step": 1e3 * step,
        "tokens_a_second": 1 / step,
        "aligned_ms_a_step": {tile: 1e3 * time_aligned(tile) for tile in tiles},
        "prefill_ms": 1e3 * median_seconds(prefill, repeats),
        "copy_bandwidth_gb_s": bandwidth / 1e9,
        "weight_bytes": weights,
        "cache_bytes": cache,
        "weights_share_of_copy_bandwidth": weights / step / bandwidth,
        "weights_and_cache_share_of_copy_bandwidth": (weights + cache) / step / bandwidth,
    }


def time_transformers(
    model: str, precision: str, prompt_tokens: int, new_tokens: int, repeats: int, tiles: Sequence[int] = ()
) -> dict[str, Any]:
    """Times transformers' generate: a static cache and torch.compile on a GPU, its defaults on a CPU."""
    del tiles
    import torch
    import transformers

    from jaxkv.checkpoints.hf_config import transformers_config
    from jaxkv.models.families import get_preset

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    torch.set_float32_matmul_precision("highest")
    config = transformers_config(get_preset(model))
    with torch.device(device):
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    net.generation_config.eos_token_id = None
    ids = torch.randint(3, config.vocab_size, (1, prompt_tokens), device=device)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    if device == "cuda":
        options["cache_implementation"] = "static"

    def generate(count: int) -> float:
        def run():
            with torch.inference_mode():
                net.generate(ids, min_new_tokens=count, max_new_tokens=count, **options)
            if device == "cuda":
                torch.cuda.synchronize()

        run()
        return median_seconds(run, repeats)

    step = (generate(new_tokens) - generate(1)) / (new_tokens - 1)
    return {
        "engine": "transformers (static cache, torch.compile)" if device == "cuda" else "transformers",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "attention": net.config._attn_implementation,
        "ms_a_step": 1e3 * step,
        "tokens_a_second": 1 / step,
    }


_TIMERS = {"jaxkv": time_jaxkv, "transformers": time_transformers}


def run_worker(module: str, name: str, arguments: Sequence[str], **variables: str) -> dict[str, Any]:
    """Runs a module in a process of its own and returns the JSON that it prints last.

    Args:
      module: its name.
      name: what it measures, for the error.
      arguments: of its command line.
      **variables: of its environment, beside this process's.

    Raises:
      UserError: it failed.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | variables)
    if done.returncode:
        raise UserError(f"the benchmark of {name} failed with exit code {done.returncode}; see above")
    return json.loads(done.stdout.strip().splitlines()[-1])


def write_figures(path: str, module: str, results: Any) -> None:
    """Writes a benchmark's results as JSON, with the command, date, revision and versions that they come from.

    Raises:
      UserError: the file cannot be written.
    """
    content = {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "git": git_revision(),
        **environment(),
        "results": results,
    }
    try:
        pathlib.Path(path).write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give --out another path") from error


def _run_engine(engine: str, precision: str) -> dict[str, Any]:
    arguments = [f"--{name}={FLAGS[name].value}" for name in ("model", "prompt_tokens", "new_tokens", "repeats")]
    arguments += [f"--worker={engine}", f"--precision={precision}", f"--tiles={','.join(FLAGS.tiles)}"]
    return run_worker("jaxkv.benchmark", f"{engine} in {precision}", arguments)


def main(argv: list[str]) -> None:
    """Prints a line per engine and precision."""
    del argv
    if FLAGS.worker:
        print(
            json.dumps(
                _TIMERS[FLAGS.worker](
                    FLAGS.model,
                    FLAGS.precision[0],
                    FLAGS.prompt_tokens,
                    FLAGS.new_tokens,
                    FLAGS.repeats,
                    [int(tile) for tile in FLAGS.tiles],
                )
            )
        )
        return
    results = []
    for precision in FLAGS.precision:
        for engine in FLAGS.engines:
            result = {"model": FLAGS.model, "precision": precision} | _run_engine(engine, precision)
            result |= {"prompt_tokens": FLAGS.prompt_tokens, "new_tokens": FLAGS.new_tokens}
            results.append(result)
            line = f"{FLAGS.model} {precision} {result['engine']}: {result['ms_a_step']:.2f} ms a step"
            if "copy_bandwidth_gb_s" in result and result["device"] != "cpu":  # there fresh pages bound it, not memory
                line += (
                    f", {result['weights_share_of_copy_bandwidth']:.3f} of the copy bandwidth "
                    f"({result['copy_bandwidth_gb_s']:.0f} GB/s) for the weights alone, "
                    f"{result['weights_and_cache_share_of_copy_bandwidth']:.3f} with the cache"
                )
            for tile, milliseconds in result.get("aligned_ms_a_step", {}).items():
                line += f"; aligned at tile {tile} {milliseconds:.2f} ms"
            print(line, flush=True)
    if FLAGS.out:
        write_figures(FLAGS.out, "jaxkv.benchmark", results)


if __name__ == "__main__":
    define_flags()
    run_command(main)
