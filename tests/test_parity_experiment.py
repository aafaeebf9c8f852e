"""The four cells of the parity experiment: what each computes, and that a planted difference shows where it is."""

import dataclasses
import functools
import types

import numpy as np
import pytest
from cases import daily
from small_models import SAMPLERS, changed_state, run_all
from test_parity import TRANSFORMERS_TOLERANCE
from tiny_models import WINDOW

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Item, RunSpec, plan_batches
from jaxkv.experiments.divergence.run import run_batch
from jaxkv.experiments.parity import run as parity
from jaxkv.experiments.parity.record import CACHE_PAIRS, CELLS, FRAMEWORK_PAIRS, PAIRS
from jaxkv.experiments.parity.run import Parity, compare_cells
from jaxkv.records import to_plain, to_record
from jaxkv.torch_path import TorchArms

NEW = 6
SPEC = RunSpec(NEW, seed=3, batch_size=2, padding="left", bucket=8)
STOP_IDS = tuple(range(200, 212))


def make_items():
    rng = np.random.default_rng(4)
    return [Item(20 + i, tuple(rng.integers(3, 190, n).tolist()), "a") for i, n in enumerate((9, 14))]


@functools.cache
def make_arms(config, precision="fp32"):
    """The programs, compiled once: no test here breaks the code that they are traced from."""
    return Arms(config, make_precision(precision), SAMPLERS["greedy"], STOP_IDS)


def run(checkpoint, precision="fp32", theirs=None, spec=SPEC):
    """Records of the four cells; `theirs` is PyTorch's checkpoint if it is another."""
    tokenizer = types.SimpleNamespace(eos_ids=STOP_IDS)
    arms = make_arms(checkpoint.config, precision)
    other = dataclasses.replace(theirs or checkpoint, tokenizer=tokenizer)
    records = to_plain(run_all(Parity(arms, arms.prepare(checkpoint.state), other, spec), make_items()))
    for record in records:
        to_record(record)
    return records


@pytest.fixture(scope="module")
def plain(tiny):
    """fp32 records of each family, made once."""
    return functools.cache(lambda family: run(tiny.checkpoint(family)))


@pytest.mark.parametrize("family", daily(["llama"], ["llama", "gemma2"]))
def test_in_fp32_all_cells_nearly_agree(tiny, plain, family):
    """Past the window, under left padding, at every step, in the logits and in the stream of every layer."""
    records, config = plain(family), tiny.checkpoint(family).config
    assert config.window in (None, WINDOW)
    assert [record["problem"] for record in records] == [20, 21]
    assert records[0]["shapes"]["left_pad"] > 0
    for record in records:
        assert len(record["tokens"]) == NEW or record["tokens"][-1] in STOP_IDS
        for pair in PAIRS:
            found = record["pairs"][pair]
            assert max(found["max_abs"]) < TRANSFORMERS_TOLERANCE, pair
            assert len(record["layers"]["distance"][pair]["mean"]) == config.num_layers + 1
            assert max(record["layers"]["distance"][pair]["max"]) < 1e-4, pair
            assert record["layers"]["distance"][pair]["max"][0] < 1e-6, pair  # an embedding is at most scaled
        for pair in FRAMEWORK_PAIRS.values():
            assert max(record["pairs"][pair]["max_abs"]) > 0  # two frameworks, not one twice
        for cell in CELLS:
            assert record["choices"][cell] == record["tokens"]


def test_jax_cells_are_the_arms_of_the_study(tiny, plain):
    checkpoint = tiny.checkpoint("llama")
    arms = make_arms(checkpoint.config)
    (batch,) = plan_batches(make_items(), SPEC)
    ran = run_batch(arms, arms.prepare(checkpoint.state), batch, SPEC)
    for row, record in enumerate(plain("llama")):
        steps = len(record["tokens"])
        assert steps == int(ran.cached.lengths[row])
        wanted = parity.compare_logits(ran.forced.logits[row], ran.cached.logits[row], steps)
        assert record["pairs"][CACHE_PAIRS["jax"]] == wanted


def make_cells(steps=4, layers=2, vocab=9, width=5):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(steps + 1, vocab)).astype(np.float16)
    logits[:, 3] = -1  # never the largest
    resid = rng.normal(size=(layers + 1, steps + 1, width))
    return {cell: logits.copy() for cell in CELLS}, {cell: resid.copy() for cell in CELLS}


def test_identical_cells_differ_by_exactly_nothing():
    found = compare_cells(*make_cells(), steps=4)
    for pair in PAIRS:
        comparison = found["pairs"][pair]
        assert comparison["bit_equal"] == [True] * 4
        assert not any(comparison["flip"])
        for name in ("kl", "kl_reverse", "js", "max_abs", "mean_abs"):
            assert comparison[name] == [0] * 4, name
        assert found["distance"][pair] == {"mean": [0, 0, 0], "max": [0, 0, 0]}
    assert found["cosine"] == [None] * 4


@pytest.mark.parametrize("cell", CELLS)
def test_a_difference_shows_in_the_pairs_of_its_cell(cell):
    logits, resid = make_cells()
    logits[cell][2, 3] += 8
    resid[cell][1, 2] *= 3
    found = compare_cells(logits, resid, steps=4)
    for pair, cells in PAIRS.items():
        touched = cell in cells
        assert found["pairs"][pair]["flip"] == [False, False, touched, False]
        assert found["pairs"][pair]["max_abs"][2] == pytest.approx(8.0 * touched, rel=1e-3)
        # |a - 3a| over the root mean square of 1 and 3
        assert found["distance"][pair]["max"] == pytest.approx([0, touched * 2 / 5**0.5, 0])
        assert found["distance"][pair]["mean"] == pytest.approx([0, touched * 2 / 5**0.5 / 4, 0])
    assert found["choices"][cell][2] == 3


def test_the_direction_is_that_of_what_the_cache_does():
    logits, resid = make_cells()
    change = np.asarray([1, -1, 0, 0, 0, 0, 0, 0, 0], np.float16) / 4
    for step, (ours, theirs) in enumerate([(change, change), (change, -change), (change, 0 * change)]):
        logits["jax cached"][step] += ours + 0.5  # a shift common to all logits is no direction
        logits["torch cached"][step] += theirs
    cosine = compare_cells(logits, resid, steps=4)["cosine"]
    assert cosine[:2] == pytest.approx([1, -1], abs=1e-2)
    assert cosine[2:] == [None, None]


def test_a_fault_of_one_framework_is_no_gap_of_the_cache(tiny, plain):
    """A weight of PyTorch's second layer is off: the frameworks part after it, cached and uncached do not."""
    checkpoint = tiny.checkpoint("llama")
    off = dataclasses.replace(checkpoint, state=changed_state(checkpoint.state, "layers/1/mlp/down", (0, 0), 2.0))
    for record, clean in zip(run(checkpoint, theirs=off), plain("llama"), strict=True):
        distance = record["layers"]["distance"]
        for pair in FRAMEWORK_PAIRS.values():
            assert max(distance[pair]["max"][:2]) < 1e-4
            assert distance[pair]["mean"][2] > 1e-3
            assert max(record["pairs"][pair]["kl"]) > 1e6 * max(clean["pairs"][pair]["kl"])
        for pair in CACHE_PAIRS.values():
            assert max(distance[pair]["max"]) < 1e-4
            assert max(record["pairs"][pair]["max_abs"]) < TRANSFORMERS_TOLERANCE


def test_a_fault_of_one_arm_is_in_its_three_pairs(tiny, monkeypatch):
    original = TorchArms.cached

    def cached(arms, rows):
        give = original(arms, rows)
        return lambda tokens, slot: give(tokens, slot) * np.float32(1.5)

    monkeypatch.setattr(TorchArms, "cached", cached)
    for record in run(tiny.checkpoint("llama")):
        for pair, cells in PAIRS.items():
            assert (max(record["pairs"][pair]["max_abs"]) > 0.1) == ("torch cached" in cells), pair


def test_numbers_that_break_are_no_agreement(tiny):
    checkpoint = tiny.checkpoint("llama")
    off = dataclasses.replace(checkpoint, state=changed_state(checkpoint.state, "layers/1/mlp/down", (0, 0), np.inf))
    for record in run(checkpoint, theirs=off):
        assert record["status"] == "invalid"
        assert record["invalid"]["arm"].startswith("torch")
        assert record["pairs"] is record["layers"] is record["cosine"] is None


def test_sixteen_bits_and_the_aligned_regime(tiny):
    checkpoint = tiny.checkpoint("llama", precision="fp16")
    once = dataclasses.replace(SPEC, batch_size=1)
    whole = run(checkpoint, "fp16", spec=once)
    for record in whole:  # the programs that give the stream out give the logits of the arms
        assert set(record["layers"]["bit_equal"].values()) == {len(record["tokens"])}
    assert max(max(record["pairs"][FRAMEWORK_PAIRS["cached"]]["kl"]) for record in whole) > 1e-9
    aligned = Arms(checkpoint.config, make_precision("fp16"), tile=8)
    with pytest.raises(ValueError, match="plain regime"):
        Parity(aligned, aligned.prepare(checkpoint.state), checkpoint, SPEC)
