"""Runs over caches that errors are put into: once as rows enter, or at each read."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import pytest
from cases import daily
from kv_inputs import perturb
from quantized_models import FAMILIES, set_up, wide_arms, wide_config, wide_state
from small_models import SAMPLERS, make_prompts, same_bits

from jaxkv.cache import KVCache
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.interventions import perturbed_cache
from jaxkv.interventions.cache_errors import CacheError
from jaxkv.interventions.perturbed_cache import Perturbation

NEW_TOKENS = 12
UNEQUAL = (4, 7, 6)


@functools.cache
def run_clean(family="mistral", precision="fp16"):
    """The same prompts over a plain cache."""
    return run_arms(wide_arms(family, precision, sampler=SAMPLERS["greedy"]), family=family, precision=precision)[0]


def run_arms(arms, seed=0, family="mistral", precision="fp16", error=None):
    """A free run with left padding, its rows and layout."""
    prompts = [make_prompts((n,), index)[0] for index, n in enumerate(UNEQUAL)]
    layout, tokens, rows = set_up(prompts, NEW_TOKENS)
    rows = dataclasses.replace(rows, seed=jnp.asarray(seed, jnp.int32))
    state = arms.prepare(wide_state(family, precision))
    cache = arms.make_cache(rows, layout, error and Perturbation(error, seed))
    return arms.run_cached_keeping(state, tokens, rows, layout, cache), rows, layout


def run_error(error, seed=0):
    return run_arms(wide_arms(sampler=SAMPLERS["greedy"]), seed, error=error)


@pytest.mark.parametrize("draw", ["write", "read"])
def test_an_error_of_nothing_is_the_clean_run(draw):
    clean, plain = run_clean()
    (changed, cache), _, _ = run_error(CacheError("normal", (0.0, 0.0), draw=draw))
    assert same_bits(clean, changed)
    assert same_bits(plain, KVCache(cache.k, cache.v, cache.positions))
    assert int(cache.calls) == NEW_TOKENS
    kept = run_error(CacheError("normal", (0.0, 0.3), draw=draw))[0]
    assert not same_bits(clean.logits, kept[0].logits)
    assert same_bits(kept, run_error(CacheError("normal", (0.0, 0.3), draw=draw))[0])
    assert not same_bits(kept, run_error(CacheError("normal", (0.0, 0.3), draw=draw), seed=1)[0])


@pytest.mark.parametrize(
    ("family", "precision"),
    daily([("gemma3", "fp32")], itertools.product(FAMILIES, ("fp32", "bf16"))),
)
def test_an_error_of_nothing_changes_no_bit_in_other_precisions(family, precision):
    arms = wide_arms(family, precision, sampler=SAMPLERS["greedy"])
    error = CacheError("normal", (0.0, 0.0))
    changed, _ = run_arms(arms, family=family, precision=precision, error=error)[0]
    assert same_bits(run_clean(family, precision)[0], changed)


ONE = {"side": "k", "layers": ((1, 1),)}


@pytest.mark.parametrize(("draw", "scope"), daily([("write", ONE)], itertools.product(("write", "read"), ({}, ONE))))
def test_what_is_drawn_ahead_is_what_each_layer_would_draw(draw, scope, monkeypatch):
    error = CacheError("normal", (0.0, 0.3), draw=draw, **scope)
    ahead = run_error(error)[0]
    monkeypatch.setattr(perturbed_cache, "MOST_DRAWN", 0)
    arms = Arms(wide_config(), make_precision("fp16"), SAMPLERS["greedy"])  # traced anew
    assert same_bits(ahead, run_arms(arms, error=error)[0])


def test_frozen_errors_lie_in_the_cache_and_redrawn_ones_do_not():
    """In layer 0, whose keys and values depend on the tokens alone."""
    _, plain = run_clean()
    scoped = {"positions": ((0, 3),), "side": "v"}
    frozen = CacheError("normal", (0.0, 0.3), **scoped)
    (_, cache), rows, layout = run_error(frozen)
    early = slice(0, layout.prompt)
    expected = perturb(frozen, plain.v[0], layer=0, side="v", positions=plain.positions, problems=rows.problems, seed=0)
    assert same_bits(cache.v[0][:, early], expected[:, early])
    assert not same_bits(cache.v[0][:, early], plain.v[0][:, early])
    assert same_bits(cache.k[0][:, early], plain.k[0][:, early])
    (_, cache), _, _ = run_error(dataclasses.replace(frozen, draw="read"))
    assert same_bits(cache.v[0][:, early], plain.v[0][:, early])
    assert not same_bits(cache.v[1][:, early], plain.v[1][:, early])
