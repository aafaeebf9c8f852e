"""What a generation without a cache costs: by draft and check, by steps, and in transformers, beside one with a cache.

    python -m jaxkv.benchmark_uncached --checkpoint=MODEL.gguf --data=gsm8k_test.jsonl --precision=fp16 --batch_size=16

Prompts are those of GSM8K problems, left-padded; every row takes all its tokens, whatever it says. How often arms part,
and so how much is drafted again, depends on the weights, which is why these are real ones.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from absl import flags

from jaxkv.benchmark import run_worker, write_figures
from jaxkv.cli import run_command
from jaxkv.errors import UserError

FLAGS = flags.FLAGS
SHAPE = ("shots", "precision", "batch_size", "batches", "new_tokens")
WORKLOAD = ("checkpoint", "data", "fewshot_data", *SHAPE)
Batches = list[list[list[int]]]


def define_flags() -> None:
    """Defines the command's flags."""
    flags.DEFINE_string("checkpoint", None, "As in jaxkv.launch.", required=True)
    flags.DEFINE_string("data", None, "JSONL or Parquet file with GSM8K problems; the hub's test split if not set.")
    flags.DEFINE_string("fewshot_data", None, "File with worked examples; the hub's train split if not set.")
    flags.DEFINE_integer("shots", 0, "Worked examples in a prompt; 0 is the chat template, or none.", lower_bound=0)
    flags.DEFINE_string("precision", "fp16", "fp16, bf16 or fp32.")
    flags.DEFINE_integer("batch_size", 16, "Problems decoded together.", lower_bound=1)
    flags.DEFINE_integer("batches", 3, "Timed batches, after one to compile and warm up.", lower_bound=1)
    flags.DEFINE_integer("new_tokens", 256, "Tokens to generate.", lower_bound=2)
    flags.DEFINE_list("engines", list(_TIMERS), f"What to time: {', '.join(_TIMERS)}.")
    flags.DEFINE_string("out", None, "JSON file for the figures.")
    flags.DEFINE_string("worker", None, "Internal: run one engine in this process and print JSON.")


@dataclasses.dataclass(frozen=True)
class Workload:
    """A checkpoint in a precision and the prompts put to it.

    Attributes:
      checkpoint: model.
      precision: policy.
      batches: the prompts, the first batch being there to warm up.
      new_tokens: tokens that each row takes.
    """

    checkpoint: Any
    precision: Any
    batches: Batches
    new_tokens: int


def load_workload(
    checkpoint: str,
    data: str | None,
    fewshot_data: str | None,
    shots: int,
    precision: str,
    batch_size: int,
    batches: int,
    new_tokens: int,
) -> Workload:
    """Loads the model and the prompts of the first problems."""
    from jaxkv.checkpoints import load
    from jaxkv.config import make_precision
    from jaxkv.tasks import load_task
    from jaxkv.tasks.gsm8k import PromptSpec

    policy = make_precision(precision)
    model = load(checkpoint, precision=policy)
    style: Any = "few_shot" if shots else "chat" if model.tokenizer.has_chat_template else "zero_shot"
    task = load_task("gsm8k", data=data, fewshot_data=fewshot_data, spec=PromptSpec(style, shots, None))
    prompts = []
    for problem in task.problems[: (batches + 1) * batch_size]:
        prompt = task.prompt(problem)
        prompts.append(model.tokenizer.encode(prompt) if isinstance(prompt, str) else model.tokenizer.chat(prompt))
    grouped = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    return Workload(model, policy, grouped, new_tokens)


def time_jaxkv(work: Workload) -> dict[str, Any]:
    """Seconds a batch of the cached arm and of the uncached one by draft and check and by steps.

    All batches draft together, as a study's do; `check` is the part of it that checks the first drafts.

    The first draft is the cached arm's own generation, which a study has anyway: the figure is given with it and
    without.

    Raises:
      UserError: draft and check took other tokens than stepping.
    """
    import jax
    import numpy as np

    from jaxkv.decode import Arms, make_layout, make_rows, start_rollout
    from jaxkv.drafts import Forced, free_by_drafts
    from jaxkv.generate import run_cached, run_forced, run_uncached

    config = work.checkpoint.config
    arms = Arms(config, work.precision)
    state = arms.prepare(work.checkpoint.state)
    totals: dict[str, float] = dict.fromkeys(("cached", "check", "uncached_by_drafts", "uncached_stepwise"), 0.0)
    longest = max(len(prompt) for batch in work.batches for prompt in batch)

    def timed(name: str, run: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter()
        result = jax.block_until_ready(run(arms, state, *args))
        totals[name] += time.perf_counter() - begin
        return result

    def generate(batches: Batches) -> tuple[list[Any], list[Any], list[Any]]:
        """The cached runs, the uncached ones by drafts with their counts, and those by steps."""
        cached, forced, stepped = [], [], []
        for prompts in batches:
            layout = make_layout(prompts, work.new_tokens, longest, config)
            tokens, rows = make_rows(prompts, list(range(len(prompts))), 0, layout)
            cached.append(timed("cached", run_cached, tokens, rows, layout))
            forced.append(Forced(timed("check", run_forced, cached[-1], rows, layout), rows, layout))
            start = start_rollout(arms, tokens, rows, layout)
            stepped.append(timed("uncached_stepwise", run_uncached, start, rows, layout))
        return cached, timed("uncached_by_drafts", free_by_drafts, forced), stepped

    generate(work.batches[:1])
    totals |= dict.fromkeys(totals, 0.0)
    cached, free, stepped = generate(work.batches[1:])
    for (own, _), brute in zip(free, stepped, strict=True):
        if not np.array_equal(own.tokens, brute.tokens):
            raise UserError("draft and check gave other tokens than stepping; report it")
    pairs = zip(free, cached, strict=True)
    parted = [np.any(np.asarray(own.tokens) != np.asarray(c.tokens), axis=1) for (own, _), c in pairs]
    totals["uncached_by_drafts"] += totals["check"]
    seconds = {name: total / len(cached) for name, total in totals.items()}
    return {
        "engine": "jaxkv",
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__},
        "longest_prompt": longest,
        "seconds_a_batch": seconds,
        "rows_that_part": int(np.sum(parted)),
        "most_drafts_of_a_batch": 1 + max(count for _, count in free),
        "drafts_over_cached": seconds["uncached_by_drafts"] / seconds["cached"],
        "drafts_with_the_first_over_cached": 1 + seconds["uncached_by_drafts"] / seconds["cached"],
        "stepwise_over_drafts": seconds["uncached_stepwise"] / seconds["uncached_by_drafts"],
    }


def time_transformers(work: Workload) -> dict[str, Any]:
    """Seconds a batch of transformers' generate with use_cache=False, and with its DynamicCache.

    Two batches, one to warm up: the time depends on shapes alone, since every row takes all its tokens.
    """
    import numpy as np
    import transformers

    from jaxkv.torch_model import TorchModel, import_torch

    torch = import_torch()
    attention = "eager" if work.checkpoint.config.attn_softcap is not None else "sdpa"
    model = TorchModel(work.checkpoint, work.precision, attention)
    model.net.generation_config.eos_token_id = None
    seconds: dict[str, float] = {}
    for name, cache in (("uncached", False), ("cached", True)):
        times = []
        for prompts in work.batches[:2]:
            longest = max(map(len, prompts))
            ids = np.zeros((len(prompts), longest), np.int64)
            mask = np.zeros_like(ids)
            for row, prompt in enumerate(prompts):
                ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
            begin = time.perf_counter()
            with torch.inference_mode():
                model.net.generate(
                    torch.tensor(ids, device=model.device),
                    attention_mask=torch.tensor(mask, device=model.device),
                    min_new_tokens=work.new_tokens,
                    max_new_tokens=work.new_tokens,
                    do_sample=False,
                    pad_token_id=0,
                    use_cache=cache,
                ).cpu()
            times.append(time.perf_counter() - begin)
        seconds[name] = sum(times[1:]) / (len(times) - 1)
    return {
        "engine": "transformers",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "attention": attention,
        "seconds_a_batch": seconds,
    }


_TIMERS: dict[str, Callable[[Workload], dict[str, Any]]] = {"jaxkv": time_jaxkv, "transformers": time_transformers}


def _run_engine(engine: str) -> dict[str, Any]:
    arguments = [f"--{name}={FLAGS[name].value}" for name in WORKLOAD if FLAGS[name].value is not None]
    # In the worker of transformers JAX only reads the weights; it must not take the GPU's memory for that.
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if engine == "transformers" else {}
    return run_worker("jaxkv.benchmark_uncached", engine, [f"--worker={engine}", *arguments], **variables)


def main(argv: list[str]) -> None:
    """Prints a line per engine."""
    del argv
    if FLAGS.worker:
        settings: dict[str, Any] = {name: FLAGS[name].value for name in WORKLOAD}
        print(json.dumps(_TIMERS[FLAGS.worker](load_workload(**settings))))
        return
    results = []
    for engine in FLAGS.engines:
        shape = {name: FLAGS[name].value for name in SHAPE}
        figures = _run_engine(engine)
        results.append(shape | figures)
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in figures["seconds_a_batch"].items())
        print(f"{engine}, {FLAGS.precision}, {FLAGS.shots} shots, batch of {FLAGS.batch_size}: {seconds}", flush=True)
    if FLAGS.out:
        write_figures(FLAGS.out, "jaxkv.benchmark_uncached", results)


if __name__ == "__main__":
    define_flags()
    run_command(main)
