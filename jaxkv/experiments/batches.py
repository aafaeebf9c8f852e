"""What the experiments share: problems laid out in batches, and the fields that all their records have."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jaxkv.audit import Finding
from jaxkv.checkpoints.tokenizer import AnyTokenizer, cut_turn
from jaxkv.config import ModelConfig
from jaxkv.provenance import hash_tokens
from jaxkv.rollout import AnyArms, Layout, Rollout, Rows, make_layout, make_rows
from jaxkv.tasks.task import Task

R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Item:
    """One problem as the model sees it; `problem`, its index in the data, keys the record and the sampling noise."""

    problem: int
    prompt: tuple[int, ...]
    gold: str


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """What is run, apart from model and data: the options of these names.

    `bucket` pads prompts to a multiple of so many rows in the prefill, and the arms' buffers with them. The controls,
    brute force (`stepwise_problems`) and float64 (`truth_problems`) run on the first batches that hold so many
    problems.
    """

    new_tokens: int
    seed: int = 0
    batch_size: int = 1
    padding: str = "equal"
    bucket: int = 64
    uncached_length: str = "padded"
    control_problems: int = 8
    uncached: str = "draft"
    stepwise_problems: int = 1
    truth_problems: int = 0


@dataclasses.dataclass(frozen=True)
class Batch:
    """Items run together. `items` may be fewer than the batch's rows: the last is then repeated to fill it."""

    items: tuple[Item, ...]
    controls: bool
    stepwise: bool
    truth: bool = False


def plan_batches(items: Sequence[Item], spec: RunSpec) -> list[Batch]:
    """Groups items into batches by the data alone, so that a resumed run makes the same ones."""
    groups: dict[int | None, list[Item]] = {}
    for item in items:
        groups.setdefault(None if spec.padding == "left" else len(item.prompt), []).append(item)
    size = spec.batch_size
    chunks = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
    chunks.sort(key=lambda chunk: items.index(chunk[0]))
    batches, seen = [], 0
    for chunk in chunks:
        brute = spec.uncached == "draft" and seen < spec.stepwise_problems
        controls, truth = seen < spec.control_problems, seen < spec.truth_problems
        batches.append(Batch(tuple(chunk), controls, brute, truth))
        seen += len(chunk)
    return batches


def lay_out(
    batch: Batch, spec: RunSpec, config: ModelConfig, tile: int | None = None
) -> tuple[Layout, np.ndarray, Rows]:
    """Layout, token buffer [B, S] and rows of a batch, filled to the batch size."""
    filled = [*batch.items, *[batch.items[-1]] * (spec.batch_size - len(batch.items))]
    prompts = [list(item.prompt) for item in filled]
    layout = make_layout(prompts, spec.new_tokens, spec.bucket, config, tile)
    return layout, *make_rows(prompts, [item.problem for item in filled], spec.seed, layout)


def describe_setting(
    arms: AnyArms,
    item: Item,
    layout: Layout,
    left_pad: int,
    finding: Finding,
    spec: RunSpec,
    fault: dict[str, Any] | None,
) -> dict[str, Any]:
    """Fields of a row's record that say what was run and if it is valid (jaxkv.experiments.record_parts.Setting)."""
    return {
        "prompt_tokens": len(item.prompt),
        "prompt_sha256": hash_tokens(item.prompt),
        "shapes": {
            "batch": layout.batch,
            "prefill": layout.prefill,
            "slots": layout.slots,
            "uncached": spec.uncached_length,
            "left_pad": left_pad,
            "tile": arms.tile,
        },
        "sampling": arms.sampler.to_json() | {"seed": spec.seed},
        "status": "invalid" if fault else "ok",
        "invalid": fault,
        "headroom": finding.headroom,
    }


def make_arm(
    item: Item, tokens: list[int], broke: bool, stop_ids: Sequence[int], tokenizer: AnyTokenizer, scoring: Task
) -> dict[str, Any]:
    """An arm's own run as a record has it, all tokens and the first turn's text; `broke` where one was not finite."""
    turn = cut_turn(tokens, {*tokenizer.turn_ends, *stop_ids})
    text, cut = scoring.cut(tokenizer.decode_new(item.prompt, turn))
    stop = "eos" if tokens and tokens[-1] in stop_ids else "stop_string" if cut or turn != tokens else "length"
    return {
        "tokens": tokens,
        "text": text,
        "stop": "invalid" if broke else stop,
        "scores": scoring.score(text, item.gold),
    }


def find_fault(
    row: int,
    newest: int,
    runs: Iterable[tuple[str, Any, Finding | None]],
    audits: Iterable[tuple[str, Finding]] = (),
) -> dict[str, Any] | None:
    """Where a row's numbers stopped being finite, as a record has it; None if they never did.

    Each of `runs` is an arm, the step [B] whose logits were not finite, -1 if none (None of an arm that did not run),
    and an audit of the same tokens, which says in what the fault began; `audits` are of what none of these logits
    shows. The first step's logits are computed from the token at position `newest`.
    """
    for arm, steps, finding in runs:
        step = -1 if steps is None else int(steps[row])
        if step >= 0:
            logits = {"layer": None, "op": "logits", "position": newest + step, "value": "nan"}
            return {"arm": arm, "step": step} | logits | ((finding and finding.invalid) or {})
    for arm, finding in audits:
        if finding.invalid is not None:
            return {"arm": arm, "step": None} | finding.invalid
    return None


def timed(function: Callable[..., R], *args: Any) -> tuple[R, float]:
    """What a function gives, waited for, and the seconds that took."""
    begin = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return result, time.perf_counter() - begin


def taken(run: Rollout, row: int, prompt: int) -> list[int]:
    """A row's own tokens after a prompt of so many slots."""
    return np.asarray(run.tokens[row, prompt : prompt + int(run.lengths[row])]).tolist()
