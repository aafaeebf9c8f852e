"""Speed and memory of the arms. Each part of a benchmark runs in a process of its own: none holds another's memory.

    python -m jaxkv.benchmark --model=llama2-7b --precision=fp16 --prompt_tokens=512 --new_tokens=128
    python -m jaxkv.benchmark aligned --model=llama2-7b --tiles=4,8,16,32
    python -m jaxkv.benchmark uncached --checkpoint=MODEL.gguf --data=gsm8k_test.jsonl --batch_size=16
    python -m jaxkv.benchmark quantized --model=llama2-7b --quant=kvarn:k2v2

The first, `decode`, times the cached arm's on-device loop beside the device's copy bandwidth and transformers;
`aligned` the loop in tiles; `uncached` a generation without a cache, by draft and check, by steps and in transformers,
beside one with it; `quantized` the loop over a clean and a packed cache, the packing itself, and the memory of both.
Weights are random, since speed depends on shapes alone; `uncached` takes real ones, which decide how often arms part.
"""

import dataclasses
import datetime
import functools
import json
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable
from statistics import median_high
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from jaxkv.checkpoints import load
from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.checkpoints.fill import flat_paths
from jaxkv.checkpoints.hf_config import transformers_config
from jaxkv.cli import define, run_command
from jaxkv.config import ModelConfig, Precision, make_precision
from jaxkv.decode import COMPILER_OPTIONS, Arms
from jaxkv.errors import UserError
from jaxkv.experiments.batches import Item, RunSpec, plan_batches, timed
from jaxkv.experiments.cost import measure_cost, time_runs
from jaxkv.experiments.divergence.run import run_batches
from jaxkv.interventions.quantized_cache import Quantization, cache_bytes, effective_bits, make_plans
from jaxkv.interventions.quantized_side import SidePlan
from jaxkv.interventions.quantizers import parse_cache_quant
from jaxkv.models.decoder import Decoder
from jaxkv.models.families import get_preset
from jaxkv.options import list_options, option
from jaxkv.provenance import environment, git_revision
from jaxkv.rollout import Layout, Rows, make_layout, make_rows, start_rollout
from jaxkv.tasks import load_task
from jaxkv.tasks.gsm8k import PromptSpec
from jaxkv.torch_model import TorchModel, describe_torch, import_torch
from jaxkv.writing import write_atomically

FLAGS = flags.FLAGS
BLOCKS_A_RUN = 8  # blocks that one timed loop packs
Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured: the flags of the same names. Properties raise UserError where a name is unknown or misfits."""

    precision: str = option("fp16", "Precisions: fp16, bf16, fp32.", axis=("fp16",))
    model: str = option("llama2-7b", "Preset whose shapes to run, e.g. tiny-llama2 on a CPU.")
    prompt_tokens: int = option(512, "Tokens in the prompt.", 1)
    new_tokens: int = option(128, "Tokens to generate.", 2)
    repeats: int = option(3, "Timed runs; the median counts.", 1)
    tiles: tuple[str, ...] = option((), "Also time the aligned regime's cached step with tiles of so many rows.")
    quant: str = option("kvarn:k2v2", "What is done to the cache, as --cache_quant of jaxkv.launch.")
    memory_tokens: int = option(32768, "Slots of the caches whose memory is measured.", 1)
    checkpoint: str | None = option(None, "As in jaxkv.launch.")
    data: str | None = option(None, "JSONL or Parquet file with GSM8K problems; the hub's test split if not set.")
    fewshot_data: str | None = option(None, "File with worked examples; the hub's train split if not set.")
    shots: int = option(0, "Worked examples in a prompt; 0 is the chat template, or none.", 0)
    batch_size: int = option(16, "Problems decoded together.", 1)
    batches: int = option(3, "Timed batches, after one to compile and warm up.", 1)

    @property
    def policy(self) -> Precision:
        """How it is computed."""
        return make_precision(self.precision)

    @property
    def config(self) -> ModelConfig:
        """The preset's architecture, its context long enough for what is asked."""
        config = get_preset(self.model)
        longest = max(config.context_length, self.prompt_tokens + self.new_tokens, self.memory_tokens)
        return dataclasses.replace(config, context_length=longest)

    @property
    def changed(self) -> Quantization:
        """Makes the packed cache."""
        spec = parse_cache_quant(self.quant)
        spec.check(self.config.head_dim, self.config.context_length)
        return Quantization(spec.stored_as(self.policy.cache))

    def arms(self, tile: int | None = None) -> Arms:
        """Arms that keep no logits."""
        return Arms(self.config, self.policy, keep_logits=False, tile=tile)

    def prompt(self, tile: int | None = None) -> tuple[np.ndarray, Rows, Layout]:
        """A batch of one random prompt: its token buffer, rows and shapes."""
        prompt = np.random.default_rng(0).integers(3, self.config.vocab_size, self.prompt_tokens).tolist()
        layout = make_layout([prompt], self.new_tokens, self.prompt_tokens, self.config, tile)
        return *make_rows([prompt], [0], 0, layout), layout

    def load(self) -> tuple[Checkpoint, list[list[int]]]:
        """The checkpoint and the prompts of the first problems, of which the first batch is there to warm up."""
        if self.checkpoint is None:
            raise UserError("this benchmark needs real weights; give --checkpoint")
        model = load(self.checkpoint, precision=self.policy)
        style: Any = "few_shot" if self.shots else "chat" if model.tokenizer.has_chat_template else "zero_shot"
        spec = PromptSpec(style, self.shots, None)
        task = load_task("gsm8k", data=self.data, fewshot_data=self.fewshot_data, spec=spec)
        encode: Any = model.tokenizer.chat if spec.is_chat else model.tokenizer.encode
        problems = task.problems[: (self.batches + 1) * self.batch_size]
        return model, [encode(task.prompt(problem)) for problem in problems]


def copy_bandwidth(bytes_each: int) -> float:
    """Bytes a second of a device-to-device copy, read plus written: the best of ten, by a memory copy or a kernel."""
    source = jnp.arange(bytes_each // 4, dtype=jnp.uint32)
    copies = (jax.jit(lambda x: x ^ jnp.uint32(1)), lambda x: jnp.array(x, copy=True))
    return 2e3 * source.nbytes / min(min(time_runs(copy, 10, lambda: (source,))) for copy in copies)


def time_steps(work: Work, packed: bool = False) -> Figures:
    """Times the cached arm's loop, plain and in tiles, beside the copy bandwidth and the bytes that a step reads."""
    arms, change = work.arms(), work.changed if packed else None
    bandwidth = copy_bandwidth(1 << 32 if jax.default_backend() != "cpu" else 1 << 29)
    state = arms.prepare(nnx.split(Decoder(work.config, work.policy, nnx.Rngs(0)))[1])

    def measure(tile: int | None = None) -> Figures:
        given = work.arms(tile=tile) if tile else arms
        return measure_cost(given, state, *work.prompt(tile), work.repeats, change=change)

    cost = measure()
    step, weights = median_high(cost["ms_a_token"]), cost["bytes"]["weights"]
    if not work.config.tie_embeddings:
        weights -= flat_paths(state)["embed"].get_value().nbytes  # one row of it is read
    _, rows, layout = work.prompt()
    cache = cache_bytes(jax.eval_shape(lambda: arms.make_cache(rows, layout, change)))
    return {
        "ms_a_step": step,
        "tokens_a_second": 1e3 / step,
        "aligned_ms_a_step": {tile: median_high(measure(int(tile))["ms_a_token"]) for tile in work.tiles},
        "prefill_ms": median_high(cost["prefill_ms"]),
        "copy_bandwidth_gb_s": bandwidth / 1e9,
        "weight_bytes": weights,
        "cache_bytes": cache,
        "weights_share_of_copy_bandwidth": 1e3 * weights / step / bandwidth,
        "weights_and_cache_share_of_copy_bandwidth": 1e3 * (weights + cache) / step / bandwidth,
    }


def torch_generate(net: Any, ids: Any, mask: Any, new_tokens: int, **options: Any) -> None:
    """Runs transformers' generate to its end; every row takes all its tokens."""
    net.generation_config.eos_token_id = None
    options |= {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    with import_torch().inference_mode():
        net.generate(ids, attention_mask=mask, **options).cpu()


def time_transformers(work: Work) -> Figures:
    """Times transformers' generate: a static cache and torch.compile on a GPU, its defaults on a CPU."""
    torch = import_torch()
    import transformers

    gpu = torch.cuda.is_available()
    torch.set_float32_matmul_precision("highest")
    config = transformers_config(get_preset(work.model))
    with torch.device("cuda" if gpu else "cpu"):
        dtype = getattr(torch, jnp.dtype(work.policy.param).name)
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        ids = torch.randint(3, config.vocab_size, (1, work.prompt_tokens))
    options = {"cache_implementation": "static"} if gpu else {}

    def generate(count: int) -> float:
        run = functools.partial(torch_generate, net, ids, torch.ones_like(ids), count, **options)
        run()  # one run more to warm up, for torch.compile
        return median_high(time_runs(run, work.repeats))

    step = (generate(work.new_tokens) - generate(1)) / (work.new_tokens - 1)
    found = {"attention": net.config._attn_implementation, "ms_a_step": step, "tokens_a_second": 1e3 / step}
    return found | ({"engine": "transformers (static cache, torch.compile)"} if gpu else {})


def time_uncached(work: Work) -> Figures:
    """Seconds a batch of the cached arm and of the uncached one by draft and check and by steps.

    All batches draft together, as a study's do; `check` is the part of it that checks the first drafts. The first draft
    is the cached arm's own generation, which a study has anyway: the figure is given with it and without. Raises
    UserError if draft and check took other tokens than stepping.
    """
    model, prompts = work.load()
    arms = Arms(model.config, work.policy)
    state = arms.prepare(model.state)
    items = [Item(number, tuple(prompt), "") for number, prompt in enumerate(prompts)]
    longest = max(map(len, prompts))
    spec = RunSpec(
        work.new_tokens, batch_size=work.batch_size, padding="left", bucket=longest, control_problems=0,
        stepwise_problems=len(items),
    )  # fmt: skip
    batches = plan_batches(items, spec)
    run_batches(arms, state, batches[:1], spec)
    runs = [ran.runs for ran in run_batches(arms, state, batches[1:], spec)]
    if any(run.stepwise is None or not np.array_equal(run.free.tokens, run.stepwise.tokens) for run in runs):
        raise UserError("draft and check gave other tokens than stepping; report it")
    taken = {name: sum(run.seconds[name] for run in runs) / len(runs) for name in runs[0].seconds}
    seconds = {"cached": taken["cached"], "check": taken["uncached_forced"]}
    seconds["uncached_by_drafts"] = drafts = taken["uncached_free"] + seconds["check"]
    seconds["uncached_stepwise"] = taken["uncached_stepwise"]
    parted = [np.any(run.free.tokens != run.cached.tokens, axis=1) for run in runs]
    return {
        "longest_prompt": longest,
        "seconds_a_batch": seconds,
        "rows_that_part": int(np.sum(parted)),
        "most_drafts_of_a_batch": 1 + max(run.drafts for run in runs),
        "drafts_over_cached": drafts / seconds["cached"],
        "drafts_with_the_first_over_cached": 1 + drafts / seconds["cached"],
        "stepwise_over_drafts": seconds["uncached_stepwise"] / drafts,
    }


def time_uncached_transformers(work: Work) -> Figures:
    """Seconds a batch of transformers' generate with use_cache=False, and with its DynamicCache.

    Two batches, one to warm up: the time depends on shapes alone, since every row takes all its tokens.
    """
    torch = import_torch()
    checkpoint, found = work.load()
    batches = [found[i : i + work.batch_size] for i in range(0, len(found), work.batch_size)]
    attention = "eager" if checkpoint.config.attn_softcap is not None else "sdpa"
    model = TorchModel(checkpoint, work.policy, attention)
    seconds: dict[str, float] = {}
    for name, cache in (("uncached", False), ("cached", True)):
        for prompts in batches[:2]:  # the time of the second stays
            layout = make_layout(prompts, work.new_tokens, 1, checkpoint.config)
            tokens, rows = make_rows(prompts, [0] * len(prompts), 0, layout)
            mask = np.arange(layout.prompt) >= np.asarray(rows.first)[:, None]
            ids, seen = (torch.tensor(x, device=model.device).long() for x in (tokens[:, : layout.prompt], mask))
            run = functools.partial(torch_generate, model.net, ids, seen, work.new_tokens, use_cache=cache)
            _, seconds[name] = timed(run)
    return {"attention": attention, "seconds_a_batch": seconds}


def plan_blocks(work: Work) -> tuple[list[SidePlan], int]:
    """Plans of the sides of layers that are packed, and tokens of a block; UserError if not all have the same."""
    quant, windows = work.changed.quant, work.config.windowed_layers
    plans = [make_plans(quant, layer, windows, 1 << 20) for layer in range(work.config.num_layers)]
    used = [plan for pair in plans for plan in pair if plan is not None]
    blocks = {plan.window.block for plan in used}
    if len(blocks) != 1:
        raise UserError(
            f"--quant={work.quant} packs {' and '.join(map(str, sorted(blocks))) or 'no'} tokens at a time, and one "
            "block is timed; give a method with one, or --parts without tile"
        )
    return used, next(iter(blocks))


def time_blocks(work: Work) -> Figures:
    """Milliseconds to pack one full block of keys and one of values in every layer that the method quantizes.

    As a decode step does it: layer after layer, fp16 rows in, codes and scales written to packed storage. Blocks are
    those of the method's windows (a KVarN tile of 128 tokens). Each round's rows differ, so that none can be reused.
    """
    config, (used, block) = work.config, plan_blocks(work)
    shape = (1, block, config.num_kv_heads, config.head_dim)
    keys = jax.random.split(jax.random.key(0), len(used))
    rows = [jax.random.normal(key, shape, jnp.float32).astype(work.policy.cache) for key in keys]

    def room(leaf):
        return jnp.zeros((1, BLOCKS_A_RUN * leaf.shape[1], *leaf.shape[2:]), leaf.dtype)

    empty = [jax.tree.map(room, jax.eval_shape(plan.quantizer.quantize, x)) for plan, x in zip(used, rows, strict=True)]

    def loop(storage, rows, count):
        def body(index, storage):
            factor = 1 + index.astype(jnp.float32) / 16
            written = []
            for plan, x, held in zip(used, rows, storage, strict=True):
                packed = plan.quantizer.quantize((x.astype(jnp.float32) * factor).astype(x.dtype))
                put = jax.lax.dynamic_update_slice_in_dim
                written.append({n: put(held[n], leaf, index * leaf.shape[1], 1) for n, leaf in packed.items()})
            return written

        return jax.lax.fori_loop(0, count, body, storage)

    run = jax.jit(loop, donate_argnums=0, compiler_options=COMPILER_OPTIONS)
    total = median_high(time_runs(run, work.repeats, lambda: (jax.tree.map(jnp.copy, empty), rows, BLOCKS_A_RUN)))
    milliseconds = total / BLOCKS_A_RUN
    return {"block": block, "ms_a_block": milliseconds, "ms_a_token": milliseconds / block, "packings": len(used)}


def measure_memory(work: Work) -> Figures:
    """Bytes of both caches at `memory_tokens` slots: counted, held on the device, and of a compiled decode program."""
    config, slots = work.config, work.memory_tokens
    layout = Layout(1, slots // 2, slots // 2, slots, slots - slots // 2)
    tokens, rows = make_rows([[1] * layout.prompt], [0], 0, layout)
    device = jax.local_devices()[0]
    found: Figures = {}
    arms = work.arms()
    for name, change in (("plain", None), ("packed", work.changed)):
        make = functools.partial(arms.make_cache, rows, layout, change)
        shapes = jax.eval_shape(make)
        figures: Figures = {"counted": cache_bytes(shapes), "bits": effective_bits(shapes, config)}
        if device.memory_stats() is not None:
            before = device.memory_stats()["bytes_in_use"]
            cache = jax.block_until_ready(make())
            figures["held"] = device.memory_stats()["bytes_in_use"] - before
            del cache
        logits = jax.ShapeDtypeStruct((1, config.vocab_size), work.policy.logits)
        run = jax.eval_shape(functools.partial(start_rollout, arms, tokens, rows, layout))
        program = arms.cached_loop.lower(arms.abstract_state, logits, run, rows, jnp.int32(slots), shapes).compile()
        memory = program.memory_analysis()
        for figure in ("argument", "output", "alias", "temp"):
            figures[f"program_{figure}"] = int(getattr(memory, f"{figure}_size_in_bytes"))
        found[name] = figures
    return found | {"packed_over_plain": found["packed"]["counted"] / found["plain"]["counted"]}


def compare_caches(found: dict[str, Figures]) -> Figures:
    """What a packed cache and its packing cost beside a plain step, as far as they were measured."""
    figures = {"packed_over_plain_step": ("packed", "ms_a_step"), "packing_over_plain_step": ("tile", "ms_a_token")}
    known = {name: pair for name, pair in figures.items() if {"plain", pair[0]} <= found.keys()}
    return {name: found[part][figure] / found["plain"]["ms_a_step"] for name, (part, figure) in known.items()}


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One of the benchmarks: its measurements, the fields of `Work` that are its flags, and defaults of its own."""

    parts: dict[str, Callable[[Work], Figures]]
    fields: tuple[str, ...]
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)


_SHAPE = ("model", "prompt_tokens", "new_tokens", "repeats")
_PROMPTS = ("checkpoint", "data", "fewshot_data", "shots", "batch_size", "batches", "new_tokens")
BENCHMARKS = {
    "decode": Benchmark({"jaxkv": time_steps, "transformers": time_transformers}, (*_SHAPE, "tiles")),
    "aligned": Benchmark({"jaxkv": time_steps}, (*_SHAPE, "tiles"), {"tiles": ("4", "8", "16", "32")}),
    "uncached": Benchmark(
        {"jaxkv": time_uncached, "transformers": time_uncached_transformers}, _PROMPTS, {"new_tokens": 256}
    ),
    "quantized": Benchmark(
        {
            "plain": time_steps,
            "packed": functools.partial(time_steps, packed=True),
            "tile": time_blocks,
            "memory": measure_memory,
        },
        (*_SHAPE, "quant", "memory_tokens"),
        {"new_tokens": 257},
    ),
}


@dataclasses.dataclass(frozen=True)
class _Groups:
    work: Work = Work()


def define_flags(benchmark: Benchmark) -> None:
    """Defines a benchmark's flags."""
    for one in list_options(_Groups):
        if one.flag in ("precision", *benchmark.fields):
            define(dataclasses.replace(one, default=benchmark.defaults.get(one.flag, one.default)))
    if "tiles" in benchmark.fields:
        rule = "give numbers of rows, e.g. 4,8"
        flags.register_validator("tiles", lambda tiles: all(t.isdecimal() and int(t) for t in tiles), rule)
    flags.DEFINE_list("parts", list(benchmark.parts), "What to measure.")
    flags.DEFINE_alias("engines", "parts")
    flags.DEFINE_string("out", None, "JSON file for the figures.")
    flags.DEFINE_string("worker", None, "Internal: run one part in this process and print JSON.")


def describe_engine(part: str) -> Figures:
    """What computed a part in this process, and on what."""
    if part == "transformers":
        return {"engine": part} | describe_torch()
    return {"engine": "jaxkv", "device": jax.devices()[0].device_kind, "versions": {"jax": jax.__version__}}


def run_worker(part: str, precision: str) -> Figures:
    """Measures one part in a process of its own. Raises UserError if it failed."""
    command = [sys.executable, "-m", "jaxkv.benchmark", *sys.argv[1:], f"--precision={precision}", f"--worker={part}"]
    # In a worker of transformers JAX at most reads the weights; it must not take the GPU's memory for that.
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if part == "transformers" else {}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | variables)
    if done.returncode:
        raise UserError(f"the benchmark of {part} in {precision} failed with exit code {done.returncode}; see above")
    return json.loads(done.stdout.strip().splitlines()[-1])


def write_figures(path: str, results: Any) -> None:
    """Writes results as JSON, with the command, date, revision and versions behind them; UserError if it cannot."""
    content = {
        "command": shlex.join(["python", "-m", "jaxkv.benchmark", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "git": git_revision(),
        **environment(),
        "results": results,
    }
    write_atomically(pathlib.Path(path), json.dumps(content, indent=1) + "\n")


def main(name: str, argv: list[str]) -> None:
    """Prints the figures of each part, and writes them if asked."""
    if argv[1:] not in ([], [name]):
        raise UserError(f"'{argv[-1]}' is no benchmark; give one first: {', '.join(BENCHMARKS)}")
    benchmark, joined = BENCHMARKS[name], name == "quantized"  # its parts make one result
    if unknown := [part for part in FLAGS.parts if part not in benchmark.parts]:
        raise UserError(f"--parts has no '{unknown[0]}' in {name}; known: {', '.join(benchmark.parts)}")
    results: list[Figures] = []
    asked: list[Figures] = [
        {"precision": precision} | {field: FLAGS[field].value for field in benchmark.fields}
        for precision in FLAGS.precision
    ]
    for settings in asked if "tile" in FLAGS.parts else ():
        plan_blocks(Work(**settings))  # before the parts that come first
    for settings in asked:
        precision = settings["precision"]
        if FLAGS.worker:
            found = benchmark.parts[FLAGS.worker](Work(**settings))
            print(json.dumps(describe_engine(FLAGS.worker) | found))
            return
        found = {}
        for part in FLAGS.parts:
            found[part] = run_worker(part, precision)
            print(f"{precision} {part}: {json.dumps(found[part], indent=1)}", flush=True)
        results += [settings | found | compare_caches(found)] if joined else [settings | x for x in found.values()]
    if FLAGS.out:
        write_figures(FLAGS.out, results[0] if joined and len(results) == 1 else results)


def start(arguments: list[str]) -> None:
    """The verb `bench`."""
    sys.argv = ["jaxkv bench", *arguments]  # workers are given them too
    named = arguments[0] if arguments and arguments[0] in BENCHMARKS else "decode"
    define_flags(BENCHMARKS[named])
    run_command(functools.partial(main, named))


if __name__ == "__main__":
    start(sys.argv[1:])
