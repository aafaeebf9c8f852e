"""Runs of models over changed caches: changes of nothing, neighbours, forced runs, what is refused, errors put in."""

import functools
import itertools

import jax
import numpy as np
import pytest
import quantized_models
from cases import daily
from kv_inputs import perturb
from quantized_models import FAMILIES, UNEQUAL, quantized, run_wide, set_up, weights_of, wide_config
from small_models import NEW_TOKENS, SAMPLERS, make_prompts, same_bits

from jaxkv.cache import KVCache
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.interventions import perturbed_cache
from jaxkv.interventions.cache_errors import CacheError
from jaxkv.interventions.perturbed_cache import Perturbation
from jaxkv.rollout import force

wide_arms = functools.partial(quantized_models.wide_arms, layers=1)  # one layer is quicker to compile


@functools.cache
def run(family, precision, spec=None, seeds=(0, 1, 2)):
    """A free run with left padding."""
    return run_wide(wide_arms(family, precision, sampler=SAMPLERS["greedy"]), quantized(spec), seeds=seeds)[0]


ALL_16, ALL_32 = "mask:16,first=3,recent=4", "mask:32,first=3,recent=4"


@pytest.mark.parametrize(
    ("family", "precision", "spec"),
    daily(
        [
            ("mistral", "fp16", ALL_16),
            ("gemma2", "fp32", ALL_32),
            ("mistral", "fp16", "none"),
        ],
        [
            *((family, "fp16", ALL_16) for family in FAMILIES),
            *((family, "fp32", ALL_32) for family in FAMILIES),
            *(("mistral", "bf16", ALL_16), ("gemma3", "fp32", "mask:32,of=fp32")),
            *(("mistral", "fp16", "none"), ("gemma3", "fp16", "none"), ("llama", "fp32", "none")),
        ],
    ),
)
def test_packing_that_changes_nothing_changes_no_bit(family, precision, spec):
    """Values whose bits are all kept, packed, with windows, and read back; a prefill and a loop.

    In fp32 XLA fused RoPE's products with their sum by what followed it, until they were rounded by themselves.
    """
    packed, cache = run(family, precision, spec)
    assert same_bits(run(family, precision)[0], packed)
    if spec in (ALL_16, ALL_32):
        assert int(cache.packed(0)[0].sum()) == sum(n + NEW_TOKENS - 1 - 7 for n in UNEQUAL)
    if spec != "none":
        assert cache.quant.k.quantizer.of == precision  # whether named or not


@pytest.mark.parametrize("spec", daily(["hf:2,every=5"], ["kvarn:2,tile=4,first=2", "hf:2,every=5"]))
def test_neighbours_change_no_bit(spec):
    """Of a row's logits and of what is stored of it; the batch has its shape."""
    (a, cache), (b, other) = (run("mistral", "fp16", spec, seeds=seeds) for seeds in ((0, 1, 2), (7, 1, 8)))
    assert not same_bits(a.logits[0], b.logits[0])
    assert same_bits((a.logits[1], a.tokens[1]), (b.logits[1], b.tokens[1]))
    for stored, beside in zip(cache.k + cache.v, other.k + other.v, strict=True):
        assert same_bits(*(jax.tree.map(lambda x: x[1], tree) for tree in (stored, beside)))


def test_a_forced_run_follows_the_clean_one():
    reference, _ = run("mistral", "fp16")
    arms = wide_arms("mistral", "fp16", sampler=SAMPLERS["greedy"])
    _, rows, layout = run_wide(arms)
    forced = force(rows, reference)
    cache = arms.make_cache(forced, layout, quantized("hf:2,every=5"))
    along, _ = arms.run_cached_keeping(weights_of(arms), np.asarray(reference.tokens), forced, layout, cache)
    assert same_bits(along.tokens, reference.tokens)
    assert same_bits(along.lengths, reference.lengths)
    assert not same_bits(along.logits, reference.logits)
    assert not same_bits(along.choices, reference.choices)


def test_the_aligned_regime_is_refused():
    layout, _, rows = set_up(make_prompts((4,)), NEW_TOKENS)
    arms = wide_arms(tile=8)
    assert isinstance(arms.make_cache(rows, layout), KVCache)
    with pytest.raises(UserError, match="no aligned regime"):
        arms.make_cache(rows, layout, quantized("int8"))


# Errors put into a cache: once as rows enter, or at each read.


def greedy(family="mistral", precision="fp16", layers=1):
    return quantized_models.wide_arms(family, precision, layers, sampler=SAMPLERS["greedy"])


def run_error(error, seed=0, layers=1):
    return run_wide(greedy(layers=layers), Perturbation(error, seed))


ONE = {"side": "k", "layers": ((1, 1),)}
EARLY = {"side": "v", "positions": ((0, 3),)}


@pytest.mark.parametrize(
    ("draw", "scope"), daily([("write", EARLY), ("read", {})], itertools.product(("write", "read"), ({}, EARLY)))
)
def test_an_error_of_nothing_is_the_clean_run(draw, scope):
    clean, plain = run("mistral", "fp16")
    make = functools.partial(CacheError, "normal", draw=draw, **scope)
    (changed, cache), _, _ = run_error(make((0.0, 0.0)))
    assert same_bits(clean, changed)
    assert same_bits(plain, KVCache(cache.k, cache.v, cache.positions))
    assert int(cache.calls) == NEW_TOKENS
    kept = run_error(make((0.0, 0.3)))[0]
    assert not same_bits(clean.logits, kept[0].logits)
    assert same_bits(kept, run_error(make((0.0, 0.3)))[0])
    assert not same_bits(kept, run_error(make((0.0, 0.3)), seed=1)[0])


@pytest.mark.parametrize(
    ("family", "precision"),
    daily([("gemma2", "fp32")], itertools.product(FAMILIES, ("fp32", "bf16"))),
)
def test_an_error_of_nothing_changes_no_bit_in_other_precisions(family, precision):
    changed, _ = run_wide(greedy(family, precision), Perturbation(CacheError("normal", (0.0, 0.0))))[0]
    assert same_bits(run(family, precision)[0], changed)


@pytest.mark.parametrize(
    ("draw", "scope"), daily([("write", EARLY)], itertools.product(("write", "read"), ({}, ONE, EARLY)))
)
def test_what_is_drawn_ahead_is_what_each_layer_would_draw(draw, scope, monkeypatch):
    error = CacheError("normal", (0.0, 0.3), draw=draw, **scope)
    layers = 2 if "layers" in scope else 1
    ahead = run_error(error, layers=layers)[0]
    monkeypatch.setattr(perturbed_cache, "MOST_DRAWN", 0)
    arms = Arms(wide_config(layers=layers), make_precision("fp16"), SAMPLERS["greedy"])  # traced anew
    assert same_bits(ahead, run_wide(arms, Perturbation(error))[0])


def test_frozen_errors_lie_in_the_cache_and_redrawn_ones_do_not():
    """In layer 0, whose keys and values depend on the tokens alone."""
    clean, plain = run("mistral", "fp16")
    frozen = CacheError("normal", (0.0, 0.3), **EARLY)
    (_, cache), rows, layout = run_error(frozen)
    early = slice(0, layout.prompt)
    expected = perturb(frozen, plain.v[0], layer=0, side="v", positions=plain.positions, problems=rows.problems, seed=0)
    assert same_bits(cache.v[0][:, early], expected[:, early])
    assert not same_bits(cache.v[0][:, early], plain.v[0][:, early])
    assert same_bits(cache.k[0][:, early], plain.k[0][:, early])
    (redrawn, cache), _, _ = run_error(CacheError("normal", (0.0, 0.3), draw="read"))
    assert same_bits(cache.v[0][:, early], plain.v[0][:, early])
    assert not same_bits(redrawn.logits, clean.logits)
