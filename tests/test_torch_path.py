"""The PyTorch path: the arms of transformers' models against ours, and that it does what its records say."""

import dataclasses
import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from small_models import SAMPLERS, bits, changed_state
from test_divergence import Scoring
from test_parity import TORCH_DTYPES, TRANSFORMERS_TOLERANCE
from tiny_models import FAMILIES, WINDOW, load_torch, make_text

from jaxkv.analysis.summary import summarize
from jaxkv.checkpoints import load
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments import divergence
from jaxkv.experiments.divergence import DivergenceSpec, Item, lay_out, plan_batches
from jaxkv.generate import run_cached
from jaxkv.schemas import CONTROLS, validate_sample
from jaxkv.tasks import load_task
from jaxkv.tasks.gsm8k import PromptSpec
from jaxkv.torch_model import TorchModel, check_torch, describe_torch, true_fp32
from jaxkv.torch_path import GROWING, TorchArms, run_batch, run_torch_divergence, segments

NEW = 14
LENGTHS = (9, 12, 12, 7)  # longer than the window, or soon to be
SPEC = DivergenceSpec(
    NEW, seed=3, batch_size=2, padding="left", bucket=8, uncached_length=GROWING, control_problems=2,
    uncached="stepwise", stepwise_problems=2,
)  # fmt: skip
OURS = dataclasses.replace(SPEC, uncached_length="padded", uncached="draft", control_problems=0, stepwise_problems=0)
QUICK = dataclasses.replace(SPEC, control_problems=0, stepwise_problems=0)
STOP_IDS = tuple(range(200, 212))
FP32 = make_precision("fp32")


def make_items(lengths=LENGTHS):
    rng = np.random.default_rng(4)
    return [Item(20 + i, tuple(rng.integers(3, 190, n).tolist()), "a") for i, n in enumerate(lengths)]


def with_stops(checkpoint):
    """The checkpoint with a tokenizer that ends a row at any of STOP_IDS."""
    decode = lambda ids: "".join(chr(33 + i) for i in ids)  # noqa: E731
    return dataclasses.replace(checkpoint, tokenizer=types.SimpleNamespace(eos_ids=STOP_IDS, decode=decode))


def run(checkpoint, spec=SPEC, precision=FP32, sampler="greedy", items=None, **options):
    """All records of a run, each checked against the schema, and the problems of each batch that was run."""
    records, batched = [], []
    batches = run_torch_divergence(
        with_stops(checkpoint), precision, SAMPLERS[sampler], items or make_items(), spec, Scoring(), **options
    )
    for new, timing in batches:
        records += new
        batched.append(timing["problems"])
        assert set(timing["tokens"]) <= set(timing["seconds"])
    for record in records:
        validate_sample(record)
    return records, batched


def run_cached_of_ours(checkpoint, sampler, stop_ids=STOP_IDS, items=None, spec=SPEC):
    """Tokens of our cached arm, by problem."""
    arms, tokens = Arms(checkpoint.config, FP32, SAMPLERS[sampler], stop_ids, keep_logits=False), {}
    for batch in plan_batches(items or make_items(), spec):
        layout, buffer, rows = lay_out(batch, spec, checkpoint.config)
        ran = run_cached(arms, arms.prepare(checkpoint.state), buffer, rows, layout)
        taken = np.asarray(ran.tokens[:, layout.prompt :])
        tokens |= {item.problem: taken[row, : ran.lengths[row]].tolist() for row, item in enumerate(batch.items)}
    return tokens


def arm_tokens(records, arm):
    return {record["problem"]: record["arms"][arm]["tokens"] for record in records}


@pytest.fixture(scope="module")
def greedy(tiny):
    """Records of a greedy fp32 run of each family, made once."""
    return functools.cache(lambda family, attention="eager": run(tiny.checkpoint(family), attention=attention)[0])


@pytest.fixture(scope="module")
def ours(tiny):
    """Batches of each family with our runs of both arms."""

    def make(family):
        checkpoint = tiny.checkpoint(family)
        arms = Arms(checkpoint.config, FP32, SAMPLERS["greedy"], STOP_IDS)
        state, found = arms.prepare(checkpoint.state), []
        for batch in plan_batches(make_items(), OURS):
            layout, tokens, rows = lay_out(batch, OURS, checkpoint.config)
            found.append((batch, rows, divergence.run_arms(arms, state, tokens, rows, layout, OURS, batch)))
        return found

    return functools.cache(make)


# Against ours.


@pytest.mark.parametrize(
    ("family", "attention"), [(f, "eager") for f in FAMILIES] + [(f, "sdpa") for f in FAMILIES if f != "gemma2"]
)
def test_fp32_logits_and_tokens_are_ours(tiny, ours, family, attention):
    """Both arms of either framework, on left-padded batches, at every step of every row."""
    checkpoint = with_stops(tiny.checkpoint(family))
    assert checkpoint.config.window in (None, WINDOW)
    arms, ended = TorchArms(checkpoint, FP32, SAMPLERS["greedy"], attention), set()
    for batch, rows, runs in ours(family):
        theirs = run_batch(arms, batch, QUICK)
        assert theirs.rows.first.tolist() == np.asarray(rows.first).tolist()
        assert sum(theirs.rows.first) > 0
        for arm in ("cached", "forced", "free"):
            a, b = getattr(theirs.runs, arm), getattr(runs, arm)
            assert a.lengths.tolist() == np.asarray(b.lengths).tolist()
            for row, length in enumerate(a.lengths):
                taken = slice(theirs.layout.prompt, theirs.layout.prompt + length)
                assert a.tokens[row, taken].tolist() == np.asarray(b.tokens)[row, taken].tolist()
                difference = np.abs(a.logits[row, :length] - np.asarray(b.logits[row, :length]))
                assert difference.max() < TRANSFORMERS_TOLERANCE, (arm, row)
                assert np.abs(a.logits[row, :length]).max(-1).min() > 0.3
                ended.add(length < NEW)
    assert False in ended


@pytest.mark.parametrize("sampler", ["temperature", "top_k", "top_p"])
def test_sampled_tokens_are_ours(tiny, greedy, sampler):
    """The same noise and the same rule: near-equal logits give equal tokens."""
    checkpoint = tiny.checkpoint("llama")
    expected = run_cached_of_ours(checkpoint, sampler)
    for arm in ("cached", "uncached"):
        assert arm_tokens(run(checkpoint, QUICK, sampler=sampler)[0], arm) == expected
        assert arm_tokens(run(checkpoint, dataclasses.replace(QUICK, seed=4), sampler=sampler)[0], arm) != expected
        assert arm_tokens(greedy("llama"), arm) != expected


def test_a_shipped_model_says_the_same_in_both():
    checkpoint = load("tiny-gemma2", precision=FP32)
    task = load_task("arith", spec=PromptSpec("zero_shot", 0, 0))
    items = [Item(p.index, tuple(checkpoint.tokenizer.encode(task.prompt(p))), p.answer) for p in task.problems[:3]]
    spec = dataclasses.replace(QUICK, new_tokens=24, batch_size=3, bucket=64)
    expected = run_cached_of_ours(checkpoint, "greedy", checkpoint.tokenizer.eos_ids, items, spec)
    ((records, _),) = run_torch_divergence(checkpoint, FP32, SAMPLERS["greedy"], items, spec, task)
    for arm in ("cached", "uncached"):
        assert arm_tokens(records, arm) == expected
    assert all(record["arms"]["cached"]["text"] for record in records)


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


class Watch:
    """Records what a model is fed: (rows, use_cache, what the cache holds)."""

    def __init__(self, monkeypatch):
        self.calls = []
        original = TorchModel.run

        def run(model, tokens, first, begin, end, keep, cache=None):
            seen = {}

            def hook(net, args, kwargs):
                held = kwargs.get(model._cache_argument)
                seen["fed"] = (kwargs["input_ids"].shape[1], kwargs["use_cache"], held and held.get_seq_length())

            handle = model.net.register_forward_pre_hook(hook, with_kwargs=True)
            output = original(model, tokens, first, begin, end, keep, cache)
            handle.remove()
            self.calls.append(seen["fed"])
            return output

        monkeypatch.setattr(TorchModel, "run", run)


def test_only_the_cached_arm_uses_a_cache(tiny, monkeypatch):
    watch = Watch(monkeypatch)
    (record,), _ = run(tiny.checkpoint("llama"), dataclasses.replace(QUICK, batch_size=1), items=make_items()[:1])
    steps, prompt = len(record["arms"]["cached"]["tokens"]), LENGTHS[0]
    assert steps == NEW
    cached, uncached, audit = watch.calls[:steps], watch.calls[steps : 2 * steps], watch.calls[2 * steps :]
    assert cached == [(prompt, True, 0)] + [(1, True, prompt + i) for i in range(steps - 1)]
    assert uncached == [(prompt + i, False, None) for i in range(steps)]
    assert audit == [(prompt + steps - 1, False, None)]  # the newest token is fed to nobody
    assert record["shapes"] == {
        "batch": 1, "prefill": prompt, "slots": 16 + NEW, "uncached": GROWING, "left_pad": 0, "tile": None,
    }  # fmt: skip


def test_controls_run_what_they_say(tiny, monkeypatch):
    watch = Watch(monkeypatch)
    once = dataclasses.replace(SPEC, batch_size=1, control_problems=1, stepwise_problems=1)
    run(tiny.checkpoint("llama"), once, items=make_items()[:1])
    prompt, slots = LENGTHS[0], 16 + NEW
    cached = [(prompt, True, 0)] + [(1, True, prompt + i) for i in range(NEW - 1)]
    growing = [(prompt + i, False, None) for i in range(NEW)]
    longer, check = [(slots + 8, False, None)] * NEW, [(slots, False, None)]
    assert watch.calls == cached + growing + cached + growing + longer + check + [(prompt + NEW - 1, False, None)]


def test_padded_runs_one_length(tiny, monkeypatch):
    watch = Watch(monkeypatch)
    padded = dataclasses.replace(SPEC, batch_size=1, uncached_length="padded", control_problems=0, stepwise_problems=0)
    run(tiny.checkpoint("llama"), padded, items=make_items()[:1])
    assert watch.calls[NEW : 2 * NEW] == [(16 + NEW, False, None)] * NEW


def test_growing_is_a_bucket_of_one():
    layout = types.SimpleNamespace(prompt=9, slots=30, new_tokens=3)
    assert segments(GROWING, layout) == [(9, 10), (10, 11), (11, 12)]
    assert segments("padded", layout) == [(30, 12)]
    with pytest.raises(UserError, match="uncached_length"):
        segments("grown", layout)


# Records.


def test_records_are_those_of_the_study(greedy):
    records = greedy("mistral")
    assert [record["problem"] for record in records] == [item.problem for item in make_items()]
    for record, item in zip(records, make_items(), strict=True):
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
    with_controls = [record for record in records if record["controls"]["cached_rerun"]]
    assert [record["problem"] for record in with_controls] == [20, 21]
    for record in with_controls:
        for name in CONTROLS:
            assert record["controls"][name] is not None
        for name in CONTROLS[:2]:
            assert all(record["controls"][name]["bit_equal"])
    summary = summarize(records, {"config": {"num_problems": 4}, "fingerprint": "x"})
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
        validate_sample(greedy("mistral")[0] | changes)


def test_rows_end_at_stop_tokens(greedy):
    stops = {arm["stop"] for family in FAMILIES for r in greedy(family) for arm in r["arms"].values()}
    assert stops == {"eos", "length"}


@pytest.mark.parametrize("done", [{20}, {20, 21}, {21, 22, 23}])
def test_a_resumed_run_yields_the_same_records(tiny, greedy, done):
    rest, batches = run(tiny.checkpoint("mistral"), done=frozenset(done))
    assert rest == [record for record in greedy("mistral") if record["problem"] not in done]
    assert batches == [batch for batch in ([20, 21], [22, 23]) if not set(batch) <= done]


def test_nothing_is_run_when_all_is_done(tiny, monkeypatch):
    monkeypatch.setattr("jaxkv.torch_path.TorchArms", None)
    assert run(tiny.checkpoint("llama"), done=frozenset(range(20, 24))) == ([], [])


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
    stepped = run(checkpoint, spec)[0]
    drafted = run(checkpoint, dataclasses.replace(spec, uncached="draft"))[0]
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_arm_off_by_one_position_shows(tiny, monkeypatch, family):
    original = TorchModel.positions

    def off(model, begin, end, first):
        return original(model, begin, end, first) + (begin > 0)

    monkeypatch.setattr(TorchModel, "positions", off)
    for record in run(tiny.checkpoint(family), QUICK)[0]:
        differences = record["teacher_forced"]["max_abs"]
        assert differences[0] < TRANSFORMERS_TOLERANCE  # the prefill is sound
        assert len(differences) == 1 or max(differences) > 100 * TRANSFORMERS_TOLERANCE


def test_a_broken_sample_is_invalid_and_its_neighbour_is_not(tiny):
    checkpoint, fp16 = tiny.checkpoint("llama", "mha", "fp16"), make_precision("fp16")
    quick = dataclasses.replace(SPEC, control_problems=0)
    items = make_items()[:2]
    token = next(t for t in items[1].prompt if t not in items[0].prompt)
    clean = run(checkpoint, quick, fp16, items=items)[0][0]
    assert token not in clean["arms"]["cached"]["tokens"]
    state = changed_state(checkpoint.state, "embed", (token, 4), np.inf)
    good, bad = run(dataclasses.replace(checkpoint, state=state), quick, fp16, items=items)[0]
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
    leaves = {path: leaf[...] for path, leaf in flat_paths(checkpoint.state).items()}
    for name in ("q", "k"):
        leaves[f"layers/1/attn/{name}"] = leaves[f"layers/1/attn/{name}"] * 90
    checkpoint = dataclasses.replace(checkpoint, state=with_leaves(checkpoint.state, leaves))
    for record in run(checkpoint, QUICK, make_precision("fp16"))[0]:
        assert record["status"] == "invalid"
        assert (record["invalid"]["op"], record["invalid"]["layer"]) == ("qk", 1)


@pytest.mark.parametrize("family", FAMILIES)
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
    llama, gemma2 = tiny.checkpoint("llama").config, tiny.checkpoint("gemma2").config
    with pytest.raises(UserError, match="fp16 with residual=float32"):
        check_torch(llama, make_precision("fp16", residual="fp32"), "eager")
    with pytest.raises(UserError, match="fp64"):
        check_torch(llama, make_precision("fp64"), "eager")
    with pytest.raises(UserError, match="did you mean 'sdpa'"):
        check_torch(llama, FP32, "spda")
    with pytest.raises(UserError, match="eager"):
        run(tiny.checkpoint("gemma2"), attention="sdpa")
    check_torch(gemma2, make_precision("fp16", residual="fp16"), "eager")


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
        run(tiny.checkpoint("llama"), items=make_items()[:1])
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(KeyError), true_fp32():
            raise KeyError
        assert torch.get_float32_matmul_precision() == "medium"
        assert describe_torch()["float32_matmul_precision"] == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {("highest", False)}


def test_settings_are_told():
    found = describe_torch()
    assert found["versions"]["torch"] == torch.__version__
    assert found["deterministic_algorithms"] is torch.are_deterministic_algorithms_enabled()
    assert found["device"]
