"""The PyTorch path's records: those of the study, resumed, and with the faults that they must show."""

import dataclasses

import numpy as np
import pytest
import torch
from cases import daily
from plain_records import summarize
from small_models import changed_state
from test_parity import TRANSFORMERS_TOLERANCE
from tiny_models import FAMILIES, scaled
from torch_runs import ITEMS, NEW, QUICK, SPEC, STOP_IDS, run

from jaxkv.config import make_precision
from jaxkv.experiments.divergence.record import CONTROLS
from jaxkv.records import to_record
from jaxkv.rollout import GROWING
from jaxkv.torch_model import TorchModel


@pytest.fixture(scope="module")
def greedy(tiny):
    """Records of a greedy fp32 run."""
    return run(tiny.checkpoint("mistral"))


# Records.


def test_records_are_those_of_the_study(greedy):
    assert [record["problem"] for record in greedy] == [item.problem for item in ITEMS]
    assert {arm["stop"] for record in greedy for arm in record["arms"].values()} == {"eos", "length"}
    for record, item in zip(greedy, ITEMS, strict=True):
        assert record["framework"] == "torch"
        assert record["attention"] == "eager"
        assert record["versions"]["torch"] == torch.__version__
        assert record["prompt_tokens"] == len(item.prompt)
        steps = len(record["arms"]["cached"]["tokens"])
        assert len(record["teacher_forced"]["kl"]) == steps
        for arm in record["arms"].values():
            assert (arm["stop"] == "eos") == (arm["tokens"][-1] in STOP_IDS)
            assert arm["stop"] == "eos" or len(arm["tokens"]) == NEW
            assert not set(arm["tokens"][:-1]) & set(STOP_IDS)
    with_controls = [record for record in greedy if record["controls"]["cached_rerun"]]
    assert [record["problem"] for record in with_controls] == [20, 21]
    for record in with_controls:
        for name in CONTROLS:
            assert record["controls"][name] is not None
        for name in CONTROLS[:2]:
            assert all(record["controls"][name]["bit_equal"])
    summary = summarize(greedy, {"config": {"num_problems": 4}, "fingerprint": "x"})
    assert summary["status"] == "ok"
    assert summary["teacher_forced"]["flips"]["count"] == 0
    assert 0 < summary["teacher_forced"]["kl"]["max"] < 1e-9


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"framework": "tf"}, "framework"),
        ({"attention": None}, "attention"),
        ({"versions": {"torch": 2}}, "versions.t"),
    ],
)
def test_a_record_says_which_framework_it_is_of(greedy, changes, field):
    with pytest.raises(ValueError, match=f"^{field}"):
        to_record(greedy[0] | changes)


@pytest.fixture
def apart(monkeypatch):
    """Sets the uncached arm's logits apart from the cached one's by noise of their slot, so that tokens flip."""
    noise, original = np.random.default_rng(5).normal(size=(99, 260)).astype(np.float32) * 0.3, TorchModel.logits

    def logits(model, tokens, first, begin, end, keep, cache=None):
        plain = original(model, tokens, first, begin, end, keep, cache)
        rows = list(range(end - keep, end)) if isinstance(keep, int) else keep
        return plain if cache is not None else plain + noise[rows, : plain.shape[-1]]

    monkeypatch.setattr(TorchModel, "logits", logits)


@pytest.mark.parametrize("length", [GROWING, "padded", "bucket:8"])
def test_free_runs_are_the_arms_own(tiny, apart, length):
    """By steps from the first disagreement, by draft and check, and by brute force: the same tokens and flips."""
    checkpoint, spec = tiny.checkpoint("llama"), dataclasses.replace(QUICK, stepwise_problems=9, uncached_length=length)
    stepped = run(checkpoint, spec)
    drafted = run(checkpoint, dataclasses.replace(spec, uncached="draft"))
    parted, late = 0, 0
    for a, b in zip(stepped, drafted, strict=True):
        assert a["arms"] == b["arms"]
        assert a["teacher_forced"]["flip"] == b["teacher_forced"]["flip"]
        first = a["free_running"]["first_diverged"]
        flips = a["teacher_forced"]["flip"]
        assert first == (flips.index(True) if any(flips) else None)
        parted += first is not None
        late += bool(first) and a["free_running"]["compared_after"] > 1
        for record in (a, b):  # each form has the other beside it
            control = record["controls"]["uncached_stepwise"]
            assert len(control["kl"]) == len(record["arms"]["uncached"]["tokens"])
            assert not any(control["flip"])
            assert max(control["max_abs"]) < TRANSFORMERS_TOLERANCE
    assert parted >= 3
    assert late >= 2


# Faults.


@pytest.mark.parametrize("family", daily(["mistral", "gemma3"], FAMILIES))
def test_a_cached_arm_off_by_one_position_shows(tiny, monkeypatch, family):
    original = TorchModel.positions

    def off(model, begin, end, first):
        return original(model, begin, end, first) + (begin > 0)

    monkeypatch.setattr(TorchModel, "positions", off)
    for record in run(tiny.checkpoint(family), QUICK):
        differences = record["teacher_forced"]["max_abs"]
        assert differences[0] < TRANSFORMERS_TOLERANCE  # the prefill is sound
        assert len(differences) == 1 or max(differences) > 100 * TRANSFORMERS_TOLERANCE


def test_a_broken_sample_is_invalid_and_its_neighbour_is_not(tiny):
    checkpoint, fp16 = tiny.checkpoint("llama", "mha", "fp16"), make_precision("fp16")
    quick = dataclasses.replace(SPEC, control_problems=0)
    items = ITEMS[:2]
    token = next(t for t in items[1].prompt if t not in items[0].prompt)
    clean = run(checkpoint, quick, fp16, items=items)[0]
    assert token not in clean["arms"]["cached"]["tokens"]
    state = changed_state(checkpoint.state, "embed", (token, 4), np.inf)
    good, bad = run(dataclasses.replace(checkpoint, state=state), quick, fp16, items=items)
    del good["controls"], clean["controls"]
    assert good["status"] == "ok"
    assert bad["status"] == "invalid"
    assert bad["invalid"] == {
        "arm": "cached", "step": 0, "layer": None, "op": "embed_tokens", "position": items[1].prompt.index(token),
        "value": "inf",
    }  # fmt: skip
    assert bad["teacher_forced"] is bad["free_running"] is None
    assert {arm["stop"] for arm in bad["arms"].values()} == {"invalid"}


def test_an_overflow_that_a_softcap_hides_is_found(tiny):
    checkpoint = tiny.checkpoint("gemma2", precision="fp16")
    state = scaled(checkpoint.state, {"layers/1/attn/q": 90, "layers/1/attn/k": 90})
    checkpoint = dataclasses.replace(checkpoint, state=state)
    for record in run(checkpoint, QUICK, make_precision("fp16")):
        assert record["status"] == "invalid"
        assert (record["invalid"]["op"], record["invalid"]["layer"]) == ("qk", 1)
