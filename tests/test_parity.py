"""Our logits against transformers' and against float64: every family, both arms, every precision."""

import dataclasses
import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import daily
from flax import nnx
from tiny_models import FAMILIES, TEXT, WINDOW, arm_logits, load_torch, make_text, real_rows, tiny_config, torch_logits
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jaxkv.cache import empty_cache
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.checkpoints.hf_config import transformers_config
from jaxkv.config import ModelConfig, Precision, RopeScaling, make_precision
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.layers import product, rope_frequencies, rope_table
from jaxkv.rollout import slot_positions

# fp32 rounds each sum of a few units to 1e-7 of it, and three layers carry that to the logits; 8e-6 was seen.
TRANSFORMERS_TOLERANCE = 2e-5
# The same between two programs of ours that multiply by other shapes; 6e-6 was seen.
CACHE_TOLERANCE = 1e-5
# first text slot of each row, slots of the prompt; the rows before the prompt are prefilled together
UNPADDED, LEFT_PADDED = ([0, 0], 1), ([0, 9], 11)
TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.parametrize(
    ("family", "heads", "padded"),
    daily(
        # a padded llama is in test_parity_experiment.py
        [*((family, "gqa", True) for family in FAMILIES if family != "llama"), ("llama", "mha", False)],
        itertools.product(FAMILIES, ("mha", "gqa"), (False, True)),
    ),
)
def test_fp32_logits_are_those_of_transformers(tiny, family, heads, padded):
    """Of either arm those of either arm there, and the two arms' still nearer to each other."""
    first, prompt = LEFT_PADDED if padded else UNPADDED
    text = make_text(tiny_config(family, heads))
    ours = arm_logits(*tiny.arms(family, heads), text, first, prompt)
    theirs = {
        "cached": torch_logits(tiny.torch(family, heads), text, first, prompt),
        "uncached": torch_logits(tiny.torch(family, heads), text, first),
    }
    real = real_rows(first, prompt)
    assert 0.3 < rms(theirs["uncached"]) < 10
    for arm, logits in ours.items():
        for their_arm, expected in theirs.items():
            difference = np.abs(logits - expected[:, prompt - 1 :]).max(-1)[real].max()
            print(f"{family} {heads} ours {arm}, theirs {their_arm}: {difference:.2g}")
            assert difference < TRANSFORMERS_TOLERANCE
    assert np.abs(ours["cached"] - ours["uncached"]).max(-1)[real].max() < CACHE_TOLERANCE


@pytest.mark.parametrize("family", daily(["mistral"], ["mistral", "gemma2", "gemma3"]))
def test_the_window_bites(tiny, family):
    """Without it these texts would have other logits from position WINDOW on, and the parity above would be idle."""
    difference = np.abs(np.asarray(tiny.run(family)[0] - tiny.run(family, window=TEXT)[0])).max((0, 2))
    assert difference[:WINDOW].max() < CACHE_TOLERANCE
    assert difference[WINDOW:].min() > 1e-2


def test_the_softcaps_bite(tiny):
    config = tiny_config("gemma2")
    logits, _, seen = tiny.run("gemma2")
    for layer in range(config.num_layers):
        before = np.abs(np.asarray(seen[f"qk.{layer}"])) * config.query_scale
        assert np.mean(before > 0.5 * config.attn_softcap) > 0.3
    assert np.mean(np.abs(np.asarray(seen["head"])) > 0.5 * config.final_softcap) > 0.3
    without = {"attn": tiny.run("gemma2", attn_softcap=None)[0], "final": seen["head"]}
    for cap, off in without.items():
        assert rms(np.asarray(logits) - np.asarray(off)) > 0.1, cap


@pytest.mark.parametrize(
    ("family", "precision"),
    daily([("mistral", "bf16"), ("gemma2", "fp16")], itertools.product(FAMILIES, ("fp16", "bf16"))),
)
def test_rounds_as_transformers_does(tiny, family, precision):
    """Our 16-bit logits are as far from float64 as transformers' are, and nearer to theirs than either is to it."""
    first, prompt = [0, 0], 11
    text, truth = make_text(tiny_config(family)), tiny.truth(family, precision)[:, prompt - 1 :]
    model = load_torch(tiny.path(family), TORCH_DTYPES[precision])
    ours = arm_logits(*tiny.arms(family, precision=precision), text, first, prompt)
    for arm, filled in (("cached", prompt), ("uncached", None)):
        theirs = torch_logits(model, text, first, filled)[:, prompt - 1 :]
        error, their_error = rms(ours[arm] - truth), rms(theirs - truth)
        apart = rms(ours[arm] - theirs)
        print(f"{family} {precision} {arm}: {error:.3g}, {error / their_error:.4f} of theirs, {apart:.2g} apart")
        assert error <= 1.5 * their_error
        assert error >= their_error / 1.5
        assert apart < 0.75 * their_error


@pytest.mark.parametrize("family", daily(["mistral", "gemma2", "llama3"], FAMILIES))
def test_fp64_is_the_truth(tiny, family):
    """float64 logits and fp32 ones of the same weights differ by fp32 rounding alone."""
    theirs = torch_logits(tiny.torch(family), make_text(tiny_config(family)), [0, 0])
    assert np.abs(tiny.truth(family) - theirs).max() < TRANSFORMERS_TOLERANCE


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("head_dim", "theta"), [(12, 1e4), (64, 1e5), (128, 1e6), (256, 1e4)])
def test_rope_tables_are_those_of_transformers(precision, head_dim, theta):
    """Bit for bit but at a few ties in 100 000; frequencies off by one unit would show in hundreds."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
    angles = torch.arange(4096).float()[:, None] * frequencies
    table = rope_table(np.arange(4096)[None], (theta, None), head_dim, make_precision(precision))
    for ours, theirs in zip(table, (angles.cos(), angles.sin()), strict=True):
        expected = theirs.to(TORCH_DTYPES[precision]).float().numpy()
        found = np.asarray(ours)[0, :, 0].astype(np.float32)
        assert np.mean(found != np.concatenate([expected, expected], -1)) < 1e-4


# theta, factor, low, high, original context: as in Llama 3.1 and 3.2, and as no model has them
LLAMA3_SCALINGS = [(5e5, 8.0, 1.0, 4.0, 8192), (5e5, 32.0, 1.0, 4.0, 8192), (1e4, 7.3, 0.7, 3.1, 10000)]


def scaled_config(head_dim, theta, *numbers):
    changes = {"rope_theta": theta, "rope_scaling": RopeScaling(*numbers), "query_scale": head_dim**-0.5}
    return dataclasses.replace(tiny_config("llama3"), head_dim=head_dim, context_length=131072, **changes)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("theta", "factor", "low", "high", "length"), LLAMA3_SCALINGS)
def test_llama3_frequencies_are_those_of_transformers(theta, factor, low, high, length, head_dim):
    """Bit for bit in fp32. At some other dims torch's own power is off by a unit."""
    config = scaled_config(head_dim, theta, factor, low, high, length)
    expected, factor_of_attention = ROPE_INIT_FUNCTIONS["llama3"](transformers_config(config))
    assert factor_of_attention == 1
    found = rope_frequencies(config.layer_rope(0), head_dim, jnp.float32)
    np.testing.assert_array_equal(found.view(np.uint32), expected.numpy().view(np.uint32))
    plain = rope_frequencies((theta, None), head_dim, jnp.float32)
    assert found[0] == plain[0]
    assert np.isclose(found[-1], plain[-1] / factor, rtol=1e-6)
    np.testing.assert_allclose(found, rope_frequencies(config.layer_rope(0), head_dim, jnp.float64), rtol=2e-6)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("theta", "factor", "low", "high", "length"), LLAMA3_SCALINGS[:2])
def test_llama3_tables_are_those_of_transformers(theta, factor, low, high, length, head_dim):
    """Frequencies and angles bit for bit; cos and sin as far as two libraries' functions agree, ours the closer."""
    config = scaled_config(head_dim, theta, factor, low, high, length)
    positions = np.arange(8192)
    theirs = LlamaRotaryEmbedding(transformers_config(config))(torch.zeros(1), torch.from_numpy(positions)[None])
    angles = positions[:, None].astype(np.float32) * rope_frequencies(config.layer_rope(0), head_dim, jnp.float32)
    angles = np.concatenate([angles, angles], axis=-1)
    table = rope_table(jnp.asarray(positions)[None], config.layer_rope(0), head_dim, make_precision("fp32"))
    for part, name in enumerate(("cos", "sin")):
        expected = theirs[part][0].numpy()
        by_torch = getattr(torch, name)(torch.from_numpy(angles)).numpy()
        np.testing.assert_array_equal(by_torch.view(np.uint32), expected.view(np.uint32))
        right = getattr(np, name)(angles.astype(np.float64)).astype(np.float32)
        ours = np.asarray(table[part])[0, :, 0]
        np.testing.assert_array_max_ulp(ours, expected, maxulp=1)
        assert 2 * np.mean(ours != right) < np.mean(expected != right)


def test_the_llama3_scaling_bites(tiny):
    """The tiny model has waves of each kind, and would compute other logits without it."""
    config = tiny_config("llama3")
    plain, scaled = (
        rope_frequencies((config.rope_theta, s), config.head_dim, np.float64) for s in (None, config.rope_scaling)
    )
    ratios = plain / scaled
    assert (ratios == 1).any()
    assert ((ratios > 1.01) & (ratios < 7.9)).any()
    assert np.isclose(ratios, config.rope_scaling.factor).any()
    with_it, without = (np.asarray(tiny.run("llama3", **changes)[0]) for changes in ({}, {"rope_scaling": None}))
    assert np.abs(with_it - without).max() > 0.1


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_bias_joins_the_sum_before_it_is_rounded(precision, dtype):
    """As in torch's `linear`: a second rounding changes every sixth value, torch's own sums a few in a thousand."""
    rng = np.random.default_rng(0)
    x, w, bias = (rng.normal(size=shape) * size for shape, size in (((2, 16, 512), 1), ((256, 512), 0.05), (256, 3)))
    policy = make_precision(precision)
    ours = product(
        "btd,fd->btf", *(jnp.asarray(a.astype(policy.activation)) for a in (x, w)), policy,
        bias=nnx.Param(jnp.asarray(bias.astype(policy.param))),
    )  # fmt: skip
    theirs = torch.nn.functional.linear(*(torch.tensor(a).to(dtype) for a in (x, w, bias))).float().numpy()
    assert np.mean(np.asarray(ours, np.float32) != theirs) < 0.01


# What each field of ModelConfig is changed to, one at a time, from a model that uses all of them.
FIELD_CHANGES = {
    "num_layers": 3, "activation": "silu", "norm_eps": 1e-2, "norm_offset": 0.5, "norm_round_first": True,
    "post_norms": False, "qk_norm": False, "rope_theta": 500.0, "local_rope_theta": None, "query_scale": 0.5,
    "attn_softcap": None, "final_softcap": None, "window": 6, "window_pattern": (False, True),
    "tie_embeddings": False, "embed_scale": 1.0, "qkv_bias": True, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64),
}  # fmt: skip
SIZES = {
    "vocab_size": 300, "model_dim": 64, "mlp_dim": 64, "num_query_heads": 16, "num_kv_heads": 2, "head_dim": 16,
}  # fmt: skip
FIELDS_WITHOUT_EFFECT = {"name": "another", "family": "llama", "context_length": 64}


def make_state(state):
    """Weights that depend on their path and shape alone: a changed field changes no more of them than it must."""
    arrays = {}
    for path, leaf in flat_paths(state).items():
        rng = np.random.default_rng(zlib.crc32(path.encode()))
        arrays[path] = jnp.asarray((rng.normal(size=leaf.shape) * 0.3).astype(leaf.dtype))
    return with_leaves(state, arrays)


def eager_logits(config, precision, state=None):
    """Logits and cache of a short text, operation by operation: nothing to compile for each config."""
    tokens = jnp.asarray(make_text(config, seed=3)[:, :16] % 250)
    graphdef, abstract = abstract_decoder(config, precision)
    model = nnx.merge(graphdef, make_state(abstract) if state is None else state)
    positions = slot_positions(jnp.arange(16), jnp.zeros(2, jnp.int32), 16)
    hidden, cache = model(tokens, positions, empty_cache(config, precision, 2, 16), 0)
    return model.logits(hidden), cache


@pytest.fixture(scope="module")
def full_config():
    """A config in which every field matters. Its products have one shape, and so are compiled once."""
    sizes = {"num_layers": 2, "model_dim": 32, "mlp_dim": 32, "num_query_heads": 4, "num_kv_heads": 4, "head_dim": 8}
    return dataclasses.replace(
        tiny_config("gemma2"), **sizes, window=9, qk_norm=True, local_rope_theta=100.0, query_scale=1.0
    )


def test_every_config_field_has_an_effect(full_config):
    assert set(FIELDS_WITHOUT_EFFECT) == {"name", "family", "context_length"}
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields == set(FIELD_CHANGES) | set(SIZES) | set(FIELDS_WITHOUT_EFFECT)
    fp16 = make_precision("fp16")  # without rounding, where a norm rounds is no matter

    def logits_with(**changes):
        return np.asarray(eager_logits(dataclasses.replace(full_config, **changes), fp16)[0], np.float32)

    before = logits_with()
    for field, value in FIELDS_WITHOUT_EFFECT.items():
        np.testing.assert_array_equal(logits_with(**{field: value}), before, err_msg=field)
    for field, value in FIELD_CHANGES.items():
        assert np.abs(logits_with(**{field: value}) - before).max() > 1e-3, field


def test_every_size_is_that_of_weights(full_config):
    """Their shapes and that of the logits tell it: no number is computed."""
    fp32 = make_precision("fp32")

    def shapes(config):
        return {path: leaf.shape for path, leaf in flat_paths(abstract_decoder(config, fp32)[1]).items()}

    before = shapes(full_config)
    for field, value in SIZES.items():
        config = dataclasses.replace(full_config, **{field: value})
        logits, cache = jax.eval_shape(functools.partial(eager_logits, config, fp32))
        assert logits.shape == (2, 16, config.vocab_size)
        assert cache.k[0].shape == (2, 16, config.num_kv_heads, config.head_dim)
        changed = {path: shape for path, shape in shapes(config).items() if shape != before[path]}
        grown, was = (set().union(*some) for some in (changed.values(), (before[path] for path in changed)))
        assert changed, field
        assert value in grown - was, field


def test_every_part_of_a_precision_has_an_effect(full_config):
    changes = {
        "param": "fp32", "activation": "bf16", "operand": "bf16", "residual": "fp32", "accumulation": "bf16",
        "softmax": "fp16", "norm": "fp16", "rope": "fp16", "cache": "fp32", "logits": "fp32", "scores": "fp32",
    }  # fmt: skip
    others = {"name", "dot", "rounds_apart"}  # the last is how a TPU holds a policy (test_targets)
    assert {field.name for field in dataclasses.fields(Precision)} == set(changes) | others
    fp16 = make_precision("fp16")
    state = make_state(abstract_decoder(full_config, fp16)[1])
    before, _ = eager_logits(full_config, fp16, state)
    for part, name in changes.items():
        policy = make_precision("fp16", **{part: name})
        assert policy.name == f"fp16+{part}={name}"
        if part == "param":
            stored = jax.tree.leaves(abstract_decoder(full_config, policy)[1])
            assert {leaf.dtype for leaf in stored} == {jnp.dtype(jnp.float32)}
            continue
        logits, cache = eager_logits(full_config, policy, state)
        assert logits.dtype == policy.logits
        assert {leaf.dtype for leaf in (*cache.k, *cache.v)} == {jnp.dtype(policy.cache)}
        if part not in ("cache", "logits"):
            assert not np.array_equal(np.asarray(logits), np.asarray(before)), part


def test_every_product_is_true_fp32(full_config):
    """TF32 would void an fp32 control: each dot of the program asks for the highest precision."""
    fp32 = make_precision("fp32")
    for policy, name in ((fp32, "HIGHEST"), (dataclasses.replace(fp32, dot=jax.lax.Precision.DEFAULT), "DEFAULT")):
        graphdef, state = abstract_decoder(full_config, policy)

        def forward(state, graphdef=graphdef, policy=policy):
            model = nnx.merge(graphdef, state)
            positions = jnp.arange(4)[None]
            hidden, _ = model(positions, positions, empty_cache(full_config, policy, 1, 4), 0)
            return model.logits(hidden)

        text = jax.jit(forward).lower(state).as_text()
        dots = text.count("stablehlo.dot_general")
        assert dots >= 9
        assert text.count(f"precision = [{name}, {name}]") == dots
