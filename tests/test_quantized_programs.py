"""Caches that differ in traced settings share their programs; layers are packed in one loop with the same bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from quantized_models import quantized, set_up, wide_arms, wide_config, wide_state
from small_models import same_bits

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.interventions import quantized_cache
from jaxkv.interventions.quantized_cache import Quantization, effective_bits
from jaxkv.interventions.quantized_side import SideStore
from jaxkv.interventions.quantizers import parse_cache_quant

CELLS = (
    "kvarn:k2v2,tile=8,first=2",
    "kvarn:k2v2,tile=8,rotate=off,first=2",
    "kvarn:k2v2,tile=8,normalize=off,first=2",
    "k=kvarn:2,tile=8,rotate=off,first=2;v=kvarn:2,tile=8,normalize=off,first=2",
)


def generate(arms, spec=None, lengths=(21, 14), new_tokens=6):
    """What the cached arm makes of two prompts, and the cache it ends with."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, arms.config.vocab_size, length).tolist() for length in lengths]
    layout, tokens, rows = set_up(prompts, new_tokens)
    cache = arms.make_cache(rows, layout, quantized(spec))
    return arms.run_cached_keeping(arms.prepare(wide_state("gemma2")), tokens, rows, layout, cache)


def test_rotation_and_normalisation_share_one_program():
    arms = wide_arms("gemma2")
    before = arms.prefill._cache_size(), arms.cached_loop._cache_size()
    logits = [np.asarray(generate(arms, spec)[0].logits) for spec in CELLS]
    assert (arms.prefill._cache_size() - before[0], arms.cached_loop._cache_size() - before[1]) == (1, 1)
    for first, second in ((0, 1), (0, 2), (1, 3), (2, 3)):  # and yet they do what they say
        assert not np.array_equal(logits[first], logits[second])


@pytest.mark.parametrize("settings", ["", ",rotate=off", ",passes=0", ",passes=3,rotate=off"])
@pytest.mark.parametrize("side", "kv")
def test_a_traced_setting_has_the_bits_of_a_static_one(side, settings):
    quantizer = getattr(parse_cache_quant(f"kvarn:2,tile=16{settings}"), side).quantizer
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 32, 2, 32)) * np.geomspace(0.1, 9, 32), jnp.float16)

    def work(quantizer, x):
        rotated = quantizer.rotate(x)
        return rotated, quantizer.quantize(rotated)

    traced = jax.jit(work)(jax.tree.map(jnp.asarray, quantizer), x)
    assert same_bits(traced, jax.jit(functools.partial(work, quantizer))(x))


def test_a_head_without_a_rotation_is_left_as_it_is():
    quantizer = jax.tree.map(jnp.asarray, parse_cache_quant("kvarn:2,rotate=off").k.quantizer)
    x = jnp.ones((2, 24))
    assert same_bits(jax.jit(lambda quantizer, x: quantizer.rotate(x))(quantizer, x), x)


@pytest.mark.parametrize(
    "spec",
    daily(
        [CELLS[0]],
        [CELLS[0], "kivi:k2v2,group=8,window=8", "turboquant:3,edges=0", "quarot:4,first=3"],
    ),
)
def test_layers_packed_in_a_loop_have_the_bits_of_layers_packed_one_by_one(spec, monkeypatch):
    run, cache = generate(wide_arms("gemma2"), spec)
    late = []

    def never(plan, rows):
        late.append(plan is not None and rows.shape[1] > 1)
        return False

    monkeypatch.setattr(quantized_cache, "_packs_late", never)
    one_by_one, other = generate(Arms(wide_config("gemma2"), make_precision("fp16")), spec)  # traced anew
    assert any(late)
    assert same_bits(run.logits, one_by_one.logits)
    assert same_bits((cache.k, cache.v), (other.k, other.v))


@pytest.mark.parametrize("layers", ["global", "windowed"])
def test_layers_that_are_left_hold_what_the_clean_cache_does(layers):
    config = wide_config("gemma2")
    assert set(config.windowed_layers) == {True, False}
    arms = wide_arms("gemma2")
    _, clean = generate(arms, new_tokens=1)
    _, cache = generate(arms, f"int4,layers={layers}", new_tokens=1)
    for layer, windowed in enumerate(config.windowed_layers):
        packed = windowed == (layers == "windowed")
        assert isinstance(cache.k[layer], SideStore) == isinstance(cache.v[layer], SideStore) == packed
    if layers == "windowed":
        return
    # Gemma-2 begins with a windowed layer, whose rows no packed one has changed.
    assert same_bits((cache.k[0], cache.v[0]), (clean.k[0], clean.v[0]))


def test_bits_count_the_layers_that_are_left():
    config = wide_config("gemma2")
    shapes = {
        layers: jax.eval_shape(
            lambda layers=layers: Quantization(parse_cache_quant(f"int4,layers={layers}")).make_cache(
                config, wide_arms("gemma2").precision, 1, 64
            )
        )
        for layers in ("all", "global", "windowed")
    }
    bits = {layers: effective_bits(cache, config) for layers, cache in shapes.items()}
    share = sum(config.windowed_layers) / config.num_layers
    assert bits["all"] == parse_cache_quant("int4").k.quantizer.bits_per_element(config.head_dim)
    assert bits["windowed"] == pytest.approx(share * bits["all"] + (1 - share) * 16)
    assert bits["global"] == pytest.approx((1 - share) * bits["all"] + share * 16)


def test_a_model_without_windows_refuses_windowed_layers_before_anything_runs():
    config = dataclasses.replace(wide_config("gemma2"), window=None, window_pattern=(False,))
    with pytest.raises(UserError, match="no windowed layer"):
        Quantization(parse_cache_quant("int4,layers=windowed")).make_cache(config, wide_arms("gemma2").precision, 1, 64)
