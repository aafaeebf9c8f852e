"""The PyTorch path: the arms of transformers' models against ours, and that they run what they say."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import daily
from small_models import SAMPLERS, bits, unaudited
from test_parity import TORCH_DTYPES, TRANSFORMERS_TOLERANCE
from tiny_models import FAMILIES, WINDOW, load_torch, make_text
from torch_runs import (
    FP32,
    ITEMS,
    LENGTHS,
    NEW,
    OURS,
    QUICK,
    SPEC,
    STOP_IDS,
    arm_tokens,
    run,
    run_cached_of_ours,
    with_stops,
)

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments.batches import plan_batches
from jaxkv.experiments.divergence.run import run_batch
from jaxkv.rollout import GROWING
from jaxkv.torch_model import TorchModel, check_torch, describe_torch, true_fp32
from jaxkv.torch_path import TorchArms, find_chooser, find_host

TESTS = str(pathlib.Path(__file__).parent)


@pytest.fixture(scope="module")
def ours(tiny):
    """Batches of each family with our runs of both arms."""

    def make(family):
        checkpoint = tiny.checkpoint(family)
        arms = unaudited(Arms(checkpoint.config, FP32, SAMPLERS["greedy"], STOP_IDS))
        state, found = arms.prepare(checkpoint.state), []
        for batch in plan_batches(ITEMS, OURS):
            ran = run_batch(arms, state, batch, OURS)
            found.append((batch, ran.rows, ran))
        return found

    return functools.cache(make)


# Against ours.


@pytest.mark.parametrize(
    ("family", "attention"),
    daily(
        [("llama", "eager"), ("gemma3", "sdpa")],
        [*((f, "eager") for f in FAMILIES), *((f, "sdpa") for f in FAMILIES if f != "gemma2")],
    ),
)
def test_fp32_logits_and_tokens_are_ours(tiny, ours, family, attention):
    """Both arms of either framework, on left-padded batches, at every step of every row."""
    checkpoint = with_stops(tiny.checkpoint(family))
    assert checkpoint.config.window in (None, WINDOW)
    arms, ended = TorchArms(checkpoint, FP32, SAMPLERS["greedy"], attention), set()
    for batch, rows, runs in ours(family):
        theirs = run_batch(arms, None, batch, QUICK)
        assert theirs.rows.first.tolist() == np.asarray(rows.first).tolist()
        assert sum(theirs.rows.first) > 0
        for arm in ("cached", "forced", "free"):
            a, b = getattr(theirs, arm), getattr(runs, arm)
            assert a.lengths.tolist() == np.asarray(b.lengths).tolist()
            for row, length in enumerate(a.lengths.tolist()):
                taken = slice(theirs.layout.prompt, theirs.layout.prompt + length)
                assert a.tokens[row, taken].tolist() == np.asarray(b.tokens)[row, taken].tolist()
                difference = np.abs(a.logits[row, :length] - np.asarray(b.logits[row, :length]))
                assert difference.max() < TRANSFORMERS_TOLERANCE, (arm, row)
                assert np.abs(a.logits[row, :length]).max(-1).min() > 0.3
                ended.add(length < NEW)
    assert False in ended


@pytest.mark.parametrize("sampler", daily(["top_p"], ["temperature", "top_k", "top_p"]))
def test_sampled_tokens_are_ours(tiny, sampler):
    """The same noise and the same rule: near-equal logits give equal tokens."""
    checkpoint = tiny.checkpoint("llama")
    expected = run_cached_of_ours(checkpoint, sampler)
    same, greedy = run(checkpoint, QUICK, sampler=sampler), run(checkpoint, QUICK)
    reseeded = run(checkpoint, dataclasses.replace(QUICK, seed=4), sampler=sampler)
    for arm in ("cached", "uncached"):
        assert arm_tokens(same, arm) == expected
        assert arm_tokens(reseeded, arm) != expected
        assert arm_tokens(greedy, arm) != expected


CHOOSERS = """
import pathlib, sys
import jax
from tiny_models import TinyModels
from torch_runs import QUICK, arm_tokens, run
from jaxkv import torch_path

def make(name):
    (place := pathlib.Path(sys.argv[1], name)).mkdir()
    return place

checkpoint, found = TinyModels(make).checkpoint("llama"), []
host, other = jax.devices()
chose = []

def seen(run, logits, rows, **options):
    chose.append(jax.config.jax_default_device)  # once a program is traced
    return emit(run, logits, rows, **options)

emit, torch_path.emit = torch_path.emit, seen
for device in (host, other):
    torch_path.find_chooser = lambda sampler: device
    records = run(checkpoint, QUICK, sampler="top_p")
    found.append([arm_tokens(records, arm) for arm in ("cached", "uncached")])
assert found[0] == found[1], found
assert set(chose) == {host, other}, chose
"""


def test_sorting_samplers_choose_on_the_accelerator(monkeypatch):
    here = find_host()
    accelerator = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax, "devices", lambda platform=None: [here] if platform == "cpu" else [accelerator])
    for sampler, chooser in {"greedy": here, "temperature": here, "top_k": accelerator, "top_p": accelerator}.items():
        assert find_chooser(SAMPLERS[sampler]) is chooser


@pytest.mark.nightly
def test_another_device_may_choose(tmp_path):
    """Two devices of the CPU: arrays pass between the model's host and the one that chooses."""
    variables = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": TESTS}
    command = [sys.executable, "-c", CHOOSERS, str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, cwd=TESTS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_the_one_that_users_load(tiny, family, precision):
    """Built in memory from our weights, or read by transformers from files: the same bits."""
    model = TorchModel(tiny.checkpoint(family, precision=precision), make_precision(precision), "eager")
    text, first = make_text(model.config)[:, :24], np.zeros(2, np.int32)
    loaded = load_torch(tiny.path(family), TORCH_DTYPES[precision])
    assert loaded.dtype == model.net.dtype
    model.net, ours = loaded, model.logits(text, first, 0, 24, 0)
    np.testing.assert_array_equal(bits(ours), bits(model.logits(text, first, 0, 24, 0)))
    assert set(map(str, np.unique(ours.dtype))) == {np.dtype(make_precision(precision).param).name}


def test_weights_are_rounded_once(tiny):
    """A wider checkpoint gives the model that one of the wanted precision gives."""
    fp16 = make_precision("fp16")
    a, b = (TorchModel(tiny.checkpoint("llama", precision=p), fp16, "eager").net for p in ("fp32", "fp16"))
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), name


# What the arms run.


@pytest.fixture
def calls(monkeypatch):
    """What models are fed, call by call: (rows, use_cache, what the cache holds)."""
    found, original = [], TorchModel.run

    def run(model, *args, **kwargs):
        def note(net, _, fed):
            held = fed.get(model._cache_argument)
            found.append((fed["input_ids"].shape[1], fed["use_cache"], held and held.get_seq_length()))

        handle = model.net.register_forward_pre_hook(note, with_kwargs=True)
        output = original(model, *args, **kwargs)
        handle.remove()
        return output

    monkeypatch.setattr(TorchModel, "run", run)
    return found


def test_only_the_cached_arm_uses_a_cache(tiny, calls):
    (record,) = run(tiny.checkpoint("llama"), dataclasses.replace(QUICK, batch_size=1), items=ITEMS[:1])
    steps, prompt = len(record["arms"]["cached"]["tokens"]), LENGTHS[0]
    assert steps == NEW
    cached, uncached, audit = calls[:steps], calls[steps : 2 * steps], calls[2 * steps :]
    assert cached == [(prompt, True, 0)] + [(1, True, prompt + i) for i in range(steps - 1)]
    assert uncached == [(prompt + i, False, None) for i in range(steps)]
    assert audit == [(prompt + steps - 1, False, None)]  # the newest token is fed to nobody
    assert record["shapes"] == {
        "batch": 1, "prefill": prompt, "slots": 16 + NEW, "uncached": GROWING, "left_pad": 0, "tile": None,
    }  # fmt: skip


def test_controls_run_what_they_say(tiny, calls):
    once = dataclasses.replace(SPEC, batch_size=1, control_problems=1, stepwise_problems=1)
    run(tiny.checkpoint("llama"), once, items=ITEMS[:1])
    prompt, slots = LENGTHS[0], 16 + NEW
    cached = [(prompt, True, 0)] + [(1, True, prompt + i) for i in range(NEW - 1)]
    growing = [(prompt + i, False, None) for i in range(NEW)]
    longer, check = [(slots + 8, False, None)] * NEW, [(slots, False, None)]
    assert calls == cached + growing + cached + growing + longer + check + [(prompt + NEW - 1, False, None)]


def test_padded_runs_one_length(tiny, calls):
    padded = dataclasses.replace(SPEC, batch_size=1, uncached_length="padded", control_problems=0, stepwise_problems=0)
    run(tiny.checkpoint("llama"), padded, items=ITEMS[:1])
    assert calls[NEW : 2 * NEW] == [(16 + NEW, False, None)] * NEW


# What is told and refused.


@pytest.mark.parametrize("family", daily(["gemma2", "qwen3"], FAMILIES))
def test_the_audit_sees_what_ours_sees(tiny, family):
    """The values that have one name in both are as large, and padding counts in neither."""
    checkpoint = tiny.checkpoint(family)
    tokens, first, ends = make_text(checkpoint.config), np.array([0, 9]), np.array([40, 33])
    found = TorchArms(with_stops(checkpoint), FP32, SAMPLERS["greedy"]).audit_pass(None, tokens, first, ends)
    arms, state = tiny.arms(family)
    ours = arms.audit_pass(state, *(jnp.asarray(x, jnp.int32) for x in (tokens, first, ends)))
    theirs = {name.split()[1]: peak for name, peak in found.items()}
    shared = {name.split()[1]: np.asarray(peak) for name, peak in ours.items() if name.split()[1] in theirs}
    layers = range(checkpoint.config.num_layers)
    wanted = {f"{op}.{layer}" for op in ("resid_pre", "resid_mid", "qk") for layer in layers}
    assert wanted | {f"resid_pre.{len(layers)}", "final_norm", "head", "logits"} == set(shared)
    for name, peak in shared.items():
        np.testing.assert_allclose(theirs[name], peak, rtol=2e-5, atol=2e-5, err_msg=name)
        assert np.all((theirs[name] > 0) == (peak > 0))
    if checkpoint.config.qk_norm:
        assert theirs["self_attn/q_norm.0"].shape == tokens.shape


def test_what_transformers_cannot_compute_is_refused(tiny):
    """Also where only the checkpoint tells; tests of the command have the other refusals."""
    with pytest.raises(UserError, match="use --attention=eager"):
        run(tiny.checkpoint("gemma2"), attention="sdpa")
    check_torch(tiny.checkpoint("gemma2").config, make_precision("fp16", residual="fp16"), "eager")


def test_fp32_is_true_fp32_and_settings_are_restored(tiny, monkeypatch):
    seen = []
    original = TorchModel.run

    def run_watched(*args, **kwargs):
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32))
        return original(*args, **kwargs)

    monkeypatch.setattr(TorchModel, "run", run_watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        run(tiny.checkpoint("llama"), items=ITEMS[:1])
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(KeyError), true_fp32():
            raise KeyError
        assert torch.get_float32_matmul_precision() == "medium"
        found = describe_torch()
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {("highest", False)}
    assert (found["float32_matmul_precision"], found["versions"]["torch"]) == ("highest", torch.__version__)
    assert found["deterministic_algorithms"] is torch.are_deterministic_algorithms_enabled()
    assert found["device"]
