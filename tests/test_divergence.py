"""The divergence experiment: its batches, its records, and that an interrupted run ends as an undisturbed one."""

import copy
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import reference_metrics
from small_models import SAMPLERS, changed_state, small_config, small_state, unaudited

from jaxkv.checkpoints import ByteTokenizer
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Item, RunSpec, plan_batches
from jaxkv.experiments.divergence.record import CONTROLS
from jaxkv.experiments.divergence.run import Divergence, compare_row, control_length, run_batch
from jaxkv.experiments.driver import run_missing
from jaxkv.records import to_record
from jaxkv.rollout import Layout, uncached_lengths
from jaxkv.tasks import scoring

TOKENIZER = ByteTokenizer()
V = TOKENIZER.vocab_size
STOP_IDS = (*TOKENIZER.eos_ids, *range(200, 206))
LENGTHS = (6, 8, 6, 7, 8, 6, 6, 8)
SPEC = RunSpec(new_tokens=12, seed=3, batch_size=2, bucket=8, control_problems=2)
LEFT = dataclasses.replace(SPEC, padding="left")
SCORERS = ("strict", "flexible", "numeric")


class Scoring:
    """Cuts at '#' and takes the first character as the answer."""

    def cut(self, text):
        return text.partition("#")[0], "#" in text

    def score(self, text, gold):
        return {name: {"answer": text[:1] or None, "correct": text[:1] == gold} for name in SCORERS}

    def label_change(self, text_a, text_b, gold):
        return scoring.label_change(self.score(text_a, gold), self.score(text_b, gold))


def make_items(lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [Item(10 + i, tuple(rng.integers(0, 128, n).tolist()), "a") for i, n in enumerate(lengths)]


@functools.cache
def make_arms(precision="fp16", sampler="greedy"):
    """16-bit weights stay narrow here, as on an accelerator: the arms then differ on a CPU too."""
    config = small_config("mistral", V, layers=1)
    return Arms(config, make_precision(precision), SAMPLERS[sampler], STOP_IDS, backend="cuda")


@functools.cache
def make_state(precision="fp16", every=None):
    """Each odd row of the head is a little off its even neighbour, so that a rounding decides which of them wins.

    Of the pairs from each `every`-th row on, the other one does.
    """
    state = small_state("mistral", precision, V, layers=1)
    leaves = {path: leaf[...] for path, leaf in flat_paths(state).items()}
    head = np.array(leaves["head"], np.float32)
    head[1::2] = head[:-1:2] * (1 + 2e-4 * np.random.default_rng(0).normal(size=head[1::2].shape))
    if every:
        head[::every], head[1::every] = head[1::every].copy(), head[::every].copy()
    leaves["head"] = jnp.asarray(head, leaves["head"].dtype)
    return with_leaves(state, leaves)


def make_flipping_arms():
    """Arms of which the cached one takes the other token of every second pair: flips, however a CPU rounds."""
    arms = copy.copy(make_arms())
    other = arms.prepare(make_state(every=4))
    arms.prefill = lambda state, *args, **options: make_arms().prefill(other, *args, **options)
    arms.cached_loop = lambda state, *args, **options: make_arms().cached_loop(other, *args, **options)
    return arms


def run(spec=SPEC, items=None, done=(), precision="fp16", sampler="greedy", state=None, arms=None):
    """All records of a run, each checked against the schema, and the problems of each batch that was run."""
    arms = arms or make_arms(precision, sampler)
    state = arms.prepare(state or make_state(precision))
    runner, done = Divergence(arms, state, spec, TOKENIZER, Scoring()), frozenset((problem,) for problem in done)
    batches = run_missing(runner, items or make_items(), done)
    records, batched = [], []
    for new, timing in batches:
        records += new
        batched.append(timing["problems"])
        assert set(timing["tokens"]) <= set(timing["seconds"])
    for record in records:
        to_record(record)
    return records, batched


undisturbed = functools.cache(run)


@functools.cache
def sampled(batch_size):
    """A run in fp32 with sampling and without controls."""
    spec = dataclasses.replace(SPEC, batch_size=batch_size, control_problems=0)
    return run(spec, precision="fp32", arms=unaudited(make_arms("fp32", "temperature")))


# Batches.


def problems(batches):
    return [[item.problem for item in batch.items] for batch in batches]


def test_equal_batches_hold_one_length_in_the_order_of_the_data():
    batches = plan_batches(make_items(), SPEC)
    assert problems(batches) == [[10, 12], [11, 14], [13], [15, 16], [17]]
    assert all(len({len(item.prompt) for item in batch.items}) == 1 for batch in batches)
    assert [batch.controls for batch in batches] == [True, False, False, False, False]


def test_left_batches_hold_neighbours():
    assert problems(plan_batches(make_items(), LEFT)) == [[10, 11], [12, 13], [14, 15], [16, 17]]
    odd = plan_batches(make_items()[:3], LEFT)
    assert problems(odd) == [[10, 11], [12]]


@pytest.mark.parametrize(("wanted", "batches"), [(0, 0), (1, 1), (2, 1), (3, 2), (100, 5)])
def test_controls_run_on_at_least_so_many_problems(wanted, batches):
    planned = plan_batches(make_items(), dataclasses.replace(SPEC, control_problems=wanted))
    assert [batch.controls for batch in planned] == [True] * batches + [False] * (5 - batches)


# Records.


@pytest.mark.parametrize("spec", [SPEC, LEFT], ids=["equal", "left"])
def test_each_problem_has_one_record(spec):
    records, _ = undisturbed(spec)
    assert sorted(record["problem"] for record in records) == [item.problem for item in make_items()]
    by_problem = {item.problem: item for item in make_items()}
    for record in records:
        length = len(by_problem[record["problem"]].prompt)
        pad = record["shapes"]["left_pad"]
        assert record["prompt_tokens"] == length
        assert record["status"] == "ok"
        assert record["shapes"] == {
            "batch": 2, "prefill": 8, "slots": 20, "uncached": "padded", "left_pad": pad, "tile": None,
        }  # fmt: skip
        assert (pad > 0) <= (spec.padding == "left")
        assert record["sampling"] == {"sampler": "greedy", "temperature": 1.0, "top_k": None, "top_p": None, "seed": 3}
        assert len(record["teacher_forced"]["kl"]) == len(record["arms"]["cached"]["tokens"])
    if spec.padding == "left":
        assert sum(record["shapes"]["left_pad"] > 0 for record in records) >= 3


def test_controls_are_bit_equal_in_reruns_alone():
    records, _ = undisturbed(SPEC)
    with_controls = [record for record in records if record["controls"]["cached_rerun"]]
    assert [record["problem"] for record in with_controls] == [10, 12]
    for record in with_controls:
        steps = len(record["arms"]["cached"]["tokens"])
        for name in CONTROLS[:2]:
            assert record["controls"][name]["bit_equal"] == [True] * steps
            assert not any(record["controls"][name]["kl"])
        assert len(record["controls"]["uncached_other_length"]["kl"]) == steps
    for record in records:
        if record not in with_controls:
            assert record["controls"] == dict.fromkeys(CONTROLS)


@pytest.mark.parametrize("spec", [SPEC, LEFT], ids=["equal", "left"])
def test_the_first_flip_is_where_the_free_runs_part(spec):
    records, _ = run(spec, arms=make_flipping_arms())
    flipped = 0
    for record in records:
        flips = record["teacher_forced"]["flip"]
        first = flips.index(True) if any(flips) else None
        flipped += first is not None
        cached, uncached = (record["arms"][arm]["tokens"] for arm in ("cached", "uncached"))
        assert record["free_running"]["first_diverged"] == first
        assert record["free_running"]["diverged"] == (cached != uncached)
        assert cached[:first] == uncached[:first]
        if first is None:
            assert cached == uncached
    assert 0 < flipped < len(records)


def test_tokens_and_figures_are_of_the_arms_that_they_name():
    """The cached arm alone is another model here; KL and margins have the uncached one for their reference."""
    arms, clean = make_flipping_arms(), {record["problem"]: record["arms"] for record in undisturbed(SPEC)[0]}
    records = {record["problem"]: record["arms"] for record in run(arms=arms)[0]}
    tokens = lambda found, arm: {problem: each[arm]["tokens"] for problem, each in found.items()}  # noqa: E731
    assert tokens(records, "uncached") == tokens(clean, "uncached")
    assert tokens(records, "cached") != tokens(clean, "cached")
    differ = False
    for batch in plan_batches(make_items(), SPEC):
        ran = run_batch(arms, arms.prepare(make_state()), batch, SPEC)
        for row, item in enumerate(batch.items):
            found = compare_row(arms, item, row, ran, SPEC)["teacher_forced"]
            arrays = (np.asarray(each.logits[row, : len(found["kl"])]) for each in (ran.forced, ran.cached))
            wanted = reference_metrics.compare_logits(*arrays)
            np.testing.assert_allclose(found["kl"], wanted["kl"], rtol=1e-9)
            assert found["margin"] == wanted["margin"].tolist()
            assert found["margin_other"] == wanted["margin_other"].tolist()
            differ |= found["kl"] != found["kl_reverse"]
    assert differ  # else the arms could be swapped unseen


def test_stops_say_why_a_row_ended():
    for record in sampled(2)[0] + undisturbed(SPEC)[0]:
        for arm in record["arms"].values():
            assert (arm["stop"] == "eos") == (arm["tokens"][-1] in STOP_IDS)
            if arm["stop"] != "eos":
                assert len(arm["tokens"]) == SPEC.new_tokens
            assert arm["text"] == TOKENIZER.decode([t for t in arm["tokens"] if t not in STOP_IDS]).partition("#")[0]


def test_batch_size_changes_no_token_in_fp32():
    """Nor do the rows that fill an incomplete batch."""
    paired = {record["problem"]: record for record in sampled(2)[0]}
    for record in sampled(1)[0]:
        other = paired[record["problem"]]
        assert record["shapes"]["batch"] == 1
        assert other["shapes"]["batch"] == 2
        assert record["arms"] == other["arms"]
        assert record["prompt_sha256"] == other["prompt_sha256"]
        np.testing.assert_allclose(record["teacher_forced"]["margin"], other["teacher_forced"]["margin"], atol=1e-4)
        assert max(record["teacher_forced"]["kl"]) < 1e-9


# Resumption.


@pytest.mark.parametrize("spec", [SPEC, LEFT], ids=["equal", "left"])
@pytest.mark.parametrize("done", [{10}, {10, 12, 13}, {11, 16, 17}, {10, 11, 12, 13, 14, 15, 16}])
def test_a_resumed_run_yields_the_same_records(spec, done):
    whole, all_batches = undisturbed(spec)
    rest, batches = run(spec, done=done)
    assert rest == [record for record in whole if record["problem"] not in done]
    assert batches == [batch for batch in all_batches if not set(batch) <= done]


# Faults.


@pytest.mark.parametrize("length", ["padded", "bucket:64", "bucket:160", "bucket:512", "bucket:1024", "bucket:4096"])
def test_the_length_control_has_a_length_of_its_own(length):
    spec = RunSpec(new_tokens=256, bucket=64, uncached_length=length)
    for prompt in (1, 60, 64, 65, 700):
        prefill = -(-prompt // 64) * 64
        layout = Layout(1, prompt, prefill, prefill + 256, 256)
        control = control_length(layout, spec)
        assert uncached_lengths(f"bucket:{control}", layout) == [(control, prompt + 256)]
        assert control not in [rows for rows, _ in uncached_lengths(length, layout)]


def test_float64_is_refused_where_jax_would_make_it_float32():
    with pytest.raises(ValueError, match="float64 parts"):
        Arms(small_config("llama", V), make_precision("fp32", accumulation="fp64"))


def test_a_broken_sample_is_invalid_and_its_neighbour_is_not():
    items = make_items()[:3:2]
    token = next(t for t in items[1].prompt if t not in items[0].prompt)
    clean = {record["problem"]: record for record in undisturbed(SPEC)[0]}
    assert token not in clean[10]["arms"]["cached"]["tokens"] + clean[10]["arms"]["uncached"]["tokens"]
    state = changed_state(make_state(), "embed", (token, 4), np.inf)
    (good, bad), _ = run(items=items, state=state)
    assert good == clean[10]
    assert bad["status"] == "invalid"
    position = items[1].prompt.index(token)
    assert bad["invalid"] == {
        "arm": "cached", "step": 0, "layer": 0, "op": "resid_pre", "position": position, "value": "inf",
    }  # fmt: skip
    assert bad["teacher_forced"] is bad["free_running"] is None
    assert bad["controls"] == dict.fromkeys(CONTROLS)
    for arm in bad["arms"].values():
        assert arm["stop"] == "invalid"
