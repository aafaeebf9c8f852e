"""Reports of other projects, each in its smallest form, and the three faults that a cache path may hide."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from flax import nnx
from small_models import changed_state
from tiny_models import (
    SLOTS,
    TEXT,
    arm_logits,
    make_forward,
    make_text,
    real_rows,
    run_arms,
    run_whole,
    scaled,
    tiny_config,
)

from jaxkv.audit import audit_rows
from jaxkv.cache import EMPTY, empty_cache
from jaxkv.checkpoints.fill import flat_paths
from jaxkv.checkpoints.tokenizer import ByteTokenizer
from jaxkv.config import make_precision
from jaxkv.decode import COMPILER_OPTIONS, Arms
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.experiments.divergence.run import Divergence
from jaxkv.experiments.driver import run_missing
from jaxkv.logits import compare_logits
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.layers import rope_table, visible
from jaxkv.rollout import make_layout, make_rows, slot_positions, start_rollout
from jaxkv.tasks import load_task

FP32 = make_precision("fp32")
FP32_ROUNDING = 1e-5  # as in test_parity.py, cached against uncached
SEE = jax.jit(visible, static_argnums=2)
TABLE = jax.jit(rope_table, static_argnums=(1, 2, 3), compiler_options=COMPILER_OPTIONS)


# Windows by absolute positions (lalamo 200)


def test_visible_keys_exactly():
    keys = np.asarray([[0, 1, 2, 3, 4, 5, 6, 7, 8, EMPTY, EMPTY]])
    expected = np.zeros((3, 11), bool)
    for row, query in enumerate((6, 7, 8)):
        expected[row, query - 3 : query + 1] = True
    np.testing.assert_array_equal(SEE(np.asarray([[6, 7, 8]]), keys, 4)[0], expected)
    for row, query in enumerate((6, 7, 8)):
        alone = SEE(np.asarray([[query]]), np.where(keys > query, EMPTY, keys), 4)
        np.testing.assert_array_equal(alone[0, 0], expected[row])
    padded = np.asarray([[EMPTY, EMPTY, 0, 1, 2, 3]])
    np.testing.assert_array_equal(SEE(np.asarray([[3]]), padded, 2)[0][0], [0, 0, 0, 0, 1, 1])
    whole = SEE(np.asarray([[EMPTY], [3]]).T, padded, None)
    np.testing.assert_array_equal(whole[0], [[0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]])


@pytest.mark.parametrize("family", daily(["gemma2"], ["mistral", "gemma2"]))
def test_three_tokens_at_once_and_one_by_one(tiny, family):
    checkpoint = tiny.checkpoint(family)
    config = dataclasses.replace(checkpoint.config, window=4)
    tokens = jnp.asarray(make_text(config, batch=1)[:, :9])
    positions = jnp.arange(9)[None]
    forward = make_forward(config, FP32)
    _, cache, _ = forward(checkpoint.state, tokens[:, :6], positions[:, :6], empty_cache(config, FP32, 1, 12))
    together, _, seen = forward(checkpoint.state, tokens[:, 6:], positions[:, 6:], cache, 6)
    for t in range(3):
        one, cache, alone = forward(
            checkpoint.state, tokens[:, 6 + t : 7 + t], positions[:, 6 + t : 7 + t], cache, 6 + t
        )
        np.testing.assert_allclose(one[:, 0], together[:, t], rtol=0, atol=FP32_ROUNDING)
        for layer in range(config.num_layers):
            window = config.layer_window(layer)
            expected = np.arange(12) <= 6 + t
            if window is not None:
                expected &= np.arange(12) > 6 + t - window
            for weights, row in ((alone, 0), (seen, t)):
                weights = np.asarray(weights[f"attn_weights.{layer}"])[0, :, :, row]
                np.testing.assert_array_equal(weights > 0, np.broadcast_to(expected, weights.shape))


# A query that sees key 0 only (Megatron-Bridge 5259)


def test_every_visible_key_weighs_in(tiny):
    checkpoint = tiny.checkpoint("gemma2")
    config = dataclasses.replace(checkpoint.config, window=4)  # as above, and of all four tokens
    tokens = jnp.asarray(make_text(config, batch=1)[:, :4])
    positions = jnp.arange(4)[None]
    forward = make_forward(config, FP32)
    _, cache, _ = forward(checkpoint.state, tokens[:, :3], positions[:, :3], empty_cache(config, FP32, 1, 12), 0)
    _, _, seen = forward(checkpoint.state, tokens[:, 3:], positions[:, 3:], cache, 3)
    model = nnx.merge(abstract_decoder(config, FP32)[0], checkpoint.state)

    @jax.jit
    @jax.grad
    def sensitivity(cached):
        hidden, _ = model(tokens[:, 3:], positions[:, 3:], dataclasses.replace(cache, k=cached[0], v=cached[1]), 3)
        return model.logits(hidden)[0, 0, 17]

    by_key, by_value = sensitivity((cache.k, cache.v))
    for layer in range(config.num_layers):
        weights = np.asarray(seen[f"attn_weights.{layer}"])[0, :, :, 0]
        assert (weights[..., :4] > 1e-6).all()
        assert (weights[..., 4:] == 0).all()
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
        for gradient in (by_key[layer], by_value[layer]):
            size = np.abs(np.asarray(gradient)).max((0, 2, 3))
            assert (size[:3] > 1e-6).all()
            assert (size[3:] == 0).all()


# A softcap that is dropped, or applied after the mask (sglang 33915)


def test_softcap_comes_before_the_mask(tiny):
    config = tiny_config("gemma2")
    layers = range(config.num_layers)
    factors = {f"layers/{layer}/attn/q": 12 for layer in layers}
    runs = {cap: tiny.run("gemma2", factors=factors, attn_softcap=cap) for cap in (50.0, None)}
    positions = np.arange(TEXT)[None]
    for layer in layers:
        mask = np.asarray(SEE(positions, positions, config.layer_window(layer)))[0]
        on, off = (np.asarray(runs[cap][2][f"scores.{layer}"]) for cap in (50.0, None))
        assert np.abs(off[..., mask]).max() > 100
        assert 45 < np.abs(on[..., mask]).max() <= 50
        assert (on[..., ~mask] == np.finfo(np.float32).min).all()
        assert (np.asarray(runs[50.0][2][f"attn_weights.{layer}"])[..., ~mask] == 0).all()
        if layer == 0:  # later layers have other inputs with a cap before them
            np.testing.assert_allclose(on[..., mask], 50 * np.tanh(off[..., mask] / 50), atol=1e-4)
    assert np.abs(np.asarray(runs[50.0][0]) - np.asarray(runs[None][0])).max() > 0.1


@pytest.mark.parametrize("precision", daily(["fp32"], ["fp16", "fp32"]))
def test_softcap_at_the_logits(tiny, precision):
    factors = {"final_norm/weight": 12, "embed": 12}
    logits, _, seen = tiny.run("gemma2", precision, factors, final_softcap=30.0)
    head = np.asarray(seen["head"], np.float64)
    assert np.abs(head).max() > 60
    assert 29 < np.abs(np.asarray(logits)).max() <= 30
    np.testing.assert_allclose(np.asarray(logits), 30 * np.tanh(head / 30), atol=0.05 if precision == "fp16" else 1e-4)
    off = tiny.run("gemma2", precision, factors, final_softcap=None)[0]
    np.testing.assert_array_equal(np.asarray(off, np.float64), head)


# An overflow that shows up later as NaN, or never (transformers 36822)


def divergence_record(arms, state, prompt):
    spec = RunSpec(new_tokens=8, bucket=16, control_problems=0, stepwise_problems=0)
    item = Item(problem=0, prompt=tuple(map(int, prompt)), gold="1")
    [(records, _)] = run_missing(Divergence(arms, state, spec, ByteTokenizer(), load_task("arith")), [item])
    return records[0]


def prompt_peaks(arms, state, prompt, name):
    """Largest magnitude of a named value at each position of the prompt."""
    layout = make_layout([prompt], 8, 16, arms.config)
    tokens, rows = make_rows([prompt], [0], 0, layout)
    found = arms.audit_pass(state, jnp.asarray(tokens), rows.first, rows.prompt[None])
    return np.asarray(next(value for key, value in found.items() if key.endswith(f" {name}")))[0, : len(prompt)]


def test_overflow_of_an_mlp(tiny):
    checkpoint = tiny.checkpoint("llama", precision="fp16")
    arms = Arms(checkpoint.config, make_precision("fp16"))
    path = "layers/0/mlp/down"
    for seed in range(20):  # a text whose largest value stands out, neither at its beginning nor at its end
        prompt = make_text(checkpoint.config, batch=1, seed=seed)[0, :12].tolist()
        peaks = prompt_peaks(arms, arms.prepare(checkpoint.state), prompt, "mlp_down.0")
        second, largest = np.sort(peaks)[-2:]
        if largest > 1.2 * second and 0 < np.argmax(peaks) < 11:
            break
    else:
        pytest.fail("no such text")
    state = scaled(checkpoint.state, {path: 65504 / np.sqrt(largest * second)})
    assert np.isfinite(np.asarray(flat_paths(state)[path][...])).all()
    record = divergence_record(arms, arms.prepare(state), prompt)
    where = {"layer": 0, "op": "mlp_down", "position": int(np.argmax(peaks)), "value": "inf"}
    assert record["status"] == "invalid"
    assert record["invalid"] == {"arm": "cached", "step": 0} | where
    assert record["teacher_forced"] is None
    assert record["free_running"] is None
    assert record["arms"]["cached"]["tokens"] == record["arms"]["uncached"]["tokens"] == []
    assert record["headroom"]["max_abs"] > 0.5 * 65504
    sound = divergence_record(arms, arms.prepare(checkpoint.state), prompt)
    assert sound["status"] == "ok"
    assert sound["invalid"] is None
    nan = jnp.full((2, 5), jnp.nan, jnp.float16)
    with pytest.raises(ValueError, match="not finite"):
        compare_logits(nan, nan, 2)


def test_overflow_that_a_softcap_hides(tiny):
    """The logits stay finite and both arms agree, so only the audit can tell; unseen keys' products do not count."""
    checkpoint = tiny.checkpoint("gemma2", precision="fp16")
    arms, _ = tiny.arms("gemma2", precision="fp16")
    text = make_text(checkpoint.config)
    prompt = 11
    layout = make_layout([[1] * prompt] * 2, SLOTS - 16, 16, checkpoint.config)
    rows = make_rows([[1] * prompt] * 2, [0, 1], 0, layout)[1]
    mask = np.tri(TEXT, dtype=bool)
    mask &= ~np.tri(TEXT, k=-checkpoint.config.window, dtype=bool)
    told_apart = False
    for factor in (30, 50, 70, 90):
        state = scaled(checkpoint.state, {"layers/0/attn/q": factor, "layers/0/attn/k": factor})
        products = np.asarray(run_whole(arms.config, arms.precision, state, text[:, :TEXT])[2]["qk.0"])
        overflows = ~np.isfinite(products).all((1, 2))
        run = start_rollout(arms, text, rows, layout)
        run = dataclasses.replace(run, lengths=jnp.full(2, TEXT - prompt, jnp.int32))
        findings = audit_rows(arms, arms.prepare(state), run, rows)
        for row, finding in enumerate(findings):
            begins = (overflows[row] & mask).any(-1)
            told_apart |= bool(np.argmax(overflows[row].any(-1)) != np.argmax(begins))
            where = {"layer": 0, "op": "qk", "position": int(np.argmax(begins)), "value": "inf"}
            assert finding.invalid == (where if begins.any() else None)
        if overflows.any():
            logits = arm_logits(arms, arms.prepare(state), text, [0, 0], prompt)  # finite in both arms
            assert np.abs(logits["cached"] - logits["uncached"]).max() < 0.1
    assert told_apart


# Left padding (transformers 27114)


@pytest.mark.parametrize(
    ("family", "precision"),
    daily([("gemma2", "fp16")], itertools.product(("llama", "gemma2"), ("fp32", "fp16", "bf16"))),
)
def test_left_padded_rows_are_finite_and_theirs(tiny, family, precision):
    checkpoint, policy = tiny.checkpoint(family, precision=precision), make_precision(precision)
    config, state = checkpoint.config, checkpoint.state
    text = make_text(config, batch=2)[:, :5]
    padded = text.copy()
    padded[0] = [0, 0, *text[0, :3]]
    logits, cache, seen = run_whole(config, policy, state, padded, [2, 0])
    assert all(np.isfinite(np.asarray(value, np.float32)).all() for value in seen.values())
    for keys in (*cache.k, *cache.v):
        assert not np.asarray(keys, np.float32)[0, :2].any()
    alone = run_whole(config, policy, state, text, [0, 0])[0]  # its first three rows do not see the other two
    rounding = {"fp32": FP32_ROUNDING, "fp16": 0.02, "bf16": 0.15}[precision]
    for row, first in ((0, 2), (1, 0)):
        difference = np.asarray(logits[row, first:], np.float32) - np.asarray(alone[row, : 5 - first], np.float32)
        assert np.abs(difference).max() < rounding


@pytest.mark.parametrize(
    ("family", "precision"),
    daily([("gemma2", "fp16"), ("llama", "fp16")], [("gemma2", "fp16"), ("llama", "fp16"), ("gemma3", "bf16")]),
)
def test_what_stands_in_the_padding_changes_no_bit(tiny, family, precision):
    arms, state = tiny.arms(family, precision=precision)
    text = make_text(arms.config)
    other = text.copy()
    other[1, :9] = np.random.default_rng(5).integers(0, arms.config.vocab_size, 9)
    assert (other != text).any()
    first, prompt = [0, 9], 11
    before, after = (arm_logits(arms, state, tokens, first, prompt) for tokens in (text, other))
    for arm, logits in before.items():
        np.testing.assert_array_equal(logits[real_rows(first, prompt)], after[arm][real_rows(first, prompt)])


# Exact ties (vllm 5543)


@pytest.mark.parametrize("precision", daily(["fp16"], ["fp32", "fp16"]))
def test_two_equal_columns_in_the_head_are_a_tie(tiny, precision):
    arms, state = tiny.arms("llama", precision=precision)
    text, step = make_text(arms.config), 5
    winner = int(run_arms(arms, state, text, [0, 0], 1)["cached"].choices[0, step])
    unused = [token for token in range(arms.config.vocab_size) if token not in text and token != winner]
    embed = flat_paths(state)["embed"][...]
    for twin in (unused[0], unused[-1], unused[len(unused) // 2]):
        runs = run_arms(arms, changed_state(state, "embed", twin, embed[winner]), text, [0, 0], 1)
        for run in runs.values():
            np.testing.assert_array_equal(run.logits[..., winner], run.logits[..., twin])
            assert int(run.choices[0, step]) == min(winner, twin)
        metrics = compare_logits(runs["uncached"].logits[0], runs["cached"].logits[0], TEXT)
        assert metrics["margin"][step] == 0
        assert not metrics["flip"][step]


# The three faults of paz 415: K cut on one path, positions summed in 16 bits, an input cast missing


@pytest.mark.parametrize(
    ("family", "precision"), daily([("gemma3", "bf16")], itertools.product(("llama", "gemma3"), ("fp16", "bf16")))
)
def test_keys_enter_the_cache_with_the_same_bits_on_both_paths(tiny, family, precision):
    """Layer 0 has the same input on both paths; only sums in another order may round its keys otherwise."""
    checkpoint, policy = tiny.checkpoint(family, precision=precision), make_precision(precision)
    config = checkpoint.config
    text = jnp.asarray(make_text(config)[:, :TEXT])
    _, whole, seen = run_whole(config, policy, checkpoint.state, text)
    step, cache = make_forward(config, policy), empty_cache(config, policy, 2, TEXT)
    for slot in range(TEXT):
        positions = jnp.full((2, 1), slot, jnp.int32)
        _, cache, _ = step(checkpoint.state, text[:, slot : slot + 1], positions, cache, slot)
    for name, kept, stepped in (("k", whole.k[0], cache.k[0]), ("v", whole.v[0], cache.v[0])):
        np.testing.assert_array_equal(np.asarray(kept), np.asarray(seen[f"{name}.0"]))
        share = np.mean(np.asarray(kept) != np.asarray(stepped))
        print(f"{family} {precision} {name}.0: {share:.2%} of elements differ")
        assert share < 0.01


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_positions_stay_whole_numbers_above_256(precision):
    policy = make_precision(precision)
    positions = slot_positions(jnp.arange(320), jnp.asarray([7]), 320)[:, 264:308]
    assert positions.dtype == jnp.int32
    np.testing.assert_array_equal(positions[0], np.arange(257, 301))
    exact = TABLE(positions, (10000.0, None), 16, FP32)
    rounded = TABLE(positions, (10000.0, None), 16, policy)
    summed = TABLE(positions.astype(policy.activation), (10000.0, None), 16, policy)
    for ours, wide, planted in zip(rounded, exact, summed, strict=True):
        assert ours.dtype == policy.activation
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(wide).astype(policy.activation))
        if precision == "bf16":  # fp16 holds whole numbers up to 2048
            assert np.abs(np.asarray(planted, np.float32) - np.asarray(wide)).max() > 0.3
    cache = empty_cache(tiny_config("llama"), policy, 1, 4)
    assert cache.positions.dtype == jnp.int32


RESIDUAL = ("resid_pre", "resid_mid", "attn_out", "mlp_out")
POLICIES = {
    "fp16": make_precision("fp16"),
    "bf16": make_precision("bf16"),
    "fp16+residual=fp32": make_precision("fp16", residual="fp32"),
    "fp16+cache=fp32+logits=fp32": make_precision("fp16", cache="fp32", logits="fp32"),
    "fp64": make_precision("fp64"),
}


@pytest.mark.parametrize(
    ("family", "name", "widened"),
    daily(
        [*itertools.product(("gemma3",), POLICIES, (False, True)), ("gemma2", "fp16", False), ("llama", "bf16", True)],
        itertools.product(("llama", "gemma2", "gemma3"), POLICIES, (False, True)),
    ),
)
def test_nothing_is_promoted_silently(family, name, widened):
    """Every named value has the policy's dtype, whether one row runs or many."""
    config = tiny_config(family)
    policy = POLICIES[name].widened() if widened else POLICIES[name]
    expected = dict.fromkeys(RESIDUAL, policy.residual) | {"k": policy.cache, "v": policy.cache}
    expected |= {"head": policy.logits, "logits": policy.logits}
    with jax.enable_x64(name == "fp64"):
        graphdef, state = abstract_decoder(config, policy)
        for rows in (1, 8):
            seen = {}

            def record(key, value, seen=seen):
                seen[key] = value.dtype
                return value

            def forward(state, rows=rows, record=record):
                model = nnx.merge(graphdef, state)
                positions = jnp.zeros((2, rows), jnp.int32)
                hidden, cache = model(positions, positions, empty_cache(config, policy, 2, 16), 0, record)
                return model.logits(hidden, record), cache

            logits, cache = jax.eval_shape(forward, state)
            assert logits.dtype == policy.logits
            assert {leaf.dtype for leaf in (*cache.k, *cache.v)} == {jnp.dtype(policy.cache)}
            assert len(seen) == 18 * config.num_layers + 4
            for key, dtype in seen.items():
                assert dtype == expected.get(key.partition(".")[0], policy.activation), key
