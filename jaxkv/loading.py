"""A condition with its model and problems loaded, as its experiments take it."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.status import Status

from jaxkv import checkpoints
from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.checkpoints.tokenizer import check_ids
from jaxkv.condition import check_lengths, is_of, load_problems, prompt_spec, read_precision, read_sampler
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.experiments.driver import Condition
from jaxkv.experiments.perplexity.run import tokenize
from jaxkv.models.families import get_preset
from jaxkv.options import Options
from jaxkv.rollout import Layout, make_layout, uncached_lengths
from jaxkv.tasks.continuation import load_text
from jaxkv.tasks.perplexity import Window, plan_windows
from jaxkv.tasks.task import Task

LOG_SECONDS = 30.0  # between lines about a download in a log


def load_condition(options: Options, console: Console) -> Condition:
    """Loads model and problems. Raises UserError if they do not fit together, or on what else the user can mend."""
    asked, data = options.model, options.data
    precision, sampler = read_precision(options.precision), read_sampler(options)
    preset = get_preset(asked.name) if asked.name else None
    source: Any = asked.checkpoint or asked.name
    with console.status(f"loading {source}") as status, _weights_device(options):
        checkpoint = checkpoints.load(
            source, precision=precision, config=preset, revision=asked.revision, tell=_teller(console, status)
        )
    task: Task | Text
    with console.status("loading the problems"):
        if is_of(options, "text"):
            task, items = _load_windows(options, checkpoint)
        else:
            task = load_problems(data, prompt_spec(data, checkpoint.tokenizer.has_chat_template))
            items = _items(task, checkpoint, data.problems or range(data.num_problems))
    decoding, controls = options.decoding, options.controls
    spec = RunSpec(
        new_tokens=decoding.max_new_tokens, seed=decoding.seed, batch_size=decoding.batch_size,
        padding=decoding.padding, bucket=decoding.bucket, uncached_length=decoding.uncached_length,
        control_problems=controls.control_problems, uncached=controls.uncached,
        stepwise_problems=controls.stepwise_problems, truth_problems=controls.truth_problems,
    )  # fmt: skip
    check_lengths(options, checkpoint.config)
    longest = max(items, key=lambda item: len(item.prompt))
    layout = make_layout([list(longest.prompt)], spec.new_tokens, spec.bucket, checkpoint.config)
    _check_uncached(options, layout)
    tile = controls.tile or (8 if jax.default_backend() == "cpu" else 16)
    return Condition(options, precision, checkpoint, task, items, spec, sampler, tile)


def _teller(console: Console, status: Status) -> Callable[[str], None]:
    """Shows how far a download is: beside the spinner, or in a log as a line now and then."""
    if console.is_terminal:
        return status.update
    last = -LOG_SECONDS

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            console.print(text, highlight=False, soft_wrap=True)

    return tell


def _weights_device(options: Options) -> contextlib.AbstractContextManager:
    """Where JAX holds the weights: beside torch, which has a copy of its own, out of its way."""
    if options.run.framework != "torch":
        return contextlib.nullcontext()
    from jaxkv.torch_path import find_host

    return jax.default_device(find_host())


def _check_uncached(options: Options, layout: Layout) -> None:
    """Raises UserError on an uncached length that is none of the framework's."""
    if options.run.framework == "torch":
        from jaxkv.torch_path import segments

        segments(options.decoding.uncached_length, layout)
    else:
        uncached_lengths(options.decoding.uncached_length, layout)


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in windows, in the place of a task."""

    windows: list[Window]
    provenance: dict[str, Any]


def _load_windows(options: Options, checkpoint: Checkpoint) -> tuple[Text, list[Item]]:
    """The text's windows, and each as an item whose prompt is what it is given."""
    tokenizer = checkpoint.tokenizer
    text, origin = load_text(options.data.data)
    ids, ends = tokenize(tokenizer, text)
    check_ids(ids, checkpoint.config.vocab_size, tokenizer.vocab_size, "the text")
    context, stride = options.data.context, options.decoding.max_new_tokens
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    windows = plan_windows(text, ids, ends, context, stride, bos)[: options.data.num_problems]
    cut = {"context": context, "stride": stride, "bos": bos is not None}
    items = [Item(window.index, window.context, "") for window in windows]
    return Text(windows, {"problems": origin, "shots": None, "prompt": cut}), items


def _items(task: Task, checkpoint: Checkpoint, chosen: Sequence[int]) -> list[Item]:
    """The chosen problems as token ids."""
    tokenizer = checkpoint.tokenizer
    items = []
    for problem in (task.problems[index] for index in chosen):
        prompt = task.prompt(problem)
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt)
        check_ids(ids, checkpoint.config.vocab_size, tokenizer.vocab_size, f"the prompt of problem {problem.index}")
        items.append(Item(problem.index, tuple(ids), problem.answer))
    return items
