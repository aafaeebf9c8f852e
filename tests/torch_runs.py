"""Runs of the PyTorch path for tests."""

import dataclasses
import types

import numpy as np
from small_models import SAMPLERS
from test_divergence import Scoring

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Item, RunSpec, lay_out, plan_batches
from jaxkv.experiments.divergence.run import Divergence
from jaxkv.experiments.driver import run_missing
from jaxkv.records import to_record
from jaxkv.rollout import GROWING
from jaxkv.torch_path import TorchArms

NEW = 14
LENGTHS = (9, 12, 12, 7)  # longer than the window, or soon to be
SPEC = RunSpec(
    NEW, seed=3, batch_size=2, padding="left", bucket=8, uncached_length=GROWING, control_problems=2,
    uncached="stepwise", stepwise_problems=2,
)  # fmt: skip
OURS = dataclasses.replace(SPEC, uncached_length="padded", uncached="draft", control_problems=0, stepwise_problems=0)
QUICK = dataclasses.replace(SPEC, control_problems=0, stepwise_problems=0)
STOP_IDS = tuple(range(200, 212))
FP32 = make_precision("fp32")
RNG = np.random.default_rng(4)
ITEMS = [Item(20 + i, tuple(RNG.integers(3, 190, n).tolist()), "a") for i, n in enumerate(LENGTHS)]


def with_stops(checkpoint):
    """The checkpoint with a tokenizer that ends a row at any of STOP_IDS."""
    decode_new = lambda prompt, ids: "".join(chr(33 + i) for i in ids)  # noqa: E731
    tokenizer = types.SimpleNamespace(eos_ids=STOP_IDS, turn_ends=frozenset(STOP_IDS), decode_new=decode_new)
    return dataclasses.replace(checkpoint, tokenizer=tokenizer)


def run(checkpoint, spec=SPEC, precision=FP32, sampler="greedy", items=ITEMS, attention="eager"):
    """All records of a run, each checked against the schema."""
    records, checkpoint = [], with_stops(checkpoint)
    arms = TorchArms(checkpoint, precision, SAMPLERS[sampler], attention)
    for new, timing in run_missing(Divergence(arms, None, spec, checkpoint.tokenizer, Scoring()), items):
        records += new
        assert set(timing["tokens"]) <= set(timing["seconds"])
    for record in records:
        to_record(record)
    return records


def run_cached_of_ours(checkpoint, sampler):
    """Tokens of our cached arm, by problem."""
    arms, tokens = Arms(checkpoint.config, FP32, SAMPLERS[sampler], STOP_IDS, keep_logits=False), {}
    for batch in plan_batches(ITEMS, SPEC):
        layout, buffer, rows = lay_out(batch, SPEC, checkpoint.config)
        ran = arms.run_cached(arms.prepare(checkpoint.state), buffer, rows, layout)
        taken = np.asarray(ran.tokens[:, layout.prompt :])
        tokens |= {item.problem: taken[row, : ran.lengths[row]].tolist() for row, item in enumerate(batch.items)}
    return tokens


def arm_tokens(records, arm):
    return {record["problem"]: record["arms"][arm]["tokens"] for record in records}
