"""The aligned regime is exact, and draft and check gives what stepping gives, bit for bit."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from small_models import (
    BUCKET,
    NEW_TOKENS,
    PRESETS,
    SAMPLERS,
    STOP_IDS,
    VOCAB,
    changed_state,
    make_prompts,
    same_bits,
    small_config,
    small_state,
    step_uncached,
    taken,
)

from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import make_precision
from jaxkv.decode import Arms, make_layout, make_rows
from jaxkv.generate import first_disagreement, force, free_by_drafts, run_cached_keeping, run_forced

PRECISIONS = ("fp16", "bf16", "fp32")
UNEQUAL = (4, 7, 6)


@functools.cache
def make_arms(family="mistral", precision="fp16", sampler="greedy", tile=None, keep=True):
    return Arms(small_config(family), make_precision(precision), SAMPLERS[sampler], STOP_IDS, keep, tile)


def set_up(arms, prompts=None, seed=0):
    prompts = prompts or make_prompts(UNEQUAL, seed=seed)
    layout = make_layout(prompts, NEW_TOKENS, BUCKET, arms.config, arms.tile)
    return layout, *make_rows(prompts, list(range(len(prompts))), seed, layout)


@functools.cache
def near_ties(precision):
    """Weights whose head rows come in pairs that a rounding orders: the plain arms then disagree often."""
    state = small_state("mistral", precision)
    leaves = {path: leaf[...] for path, leaf in flat_paths(state).items()}
    head = np.array(leaves["head"], np.float32)
    head[1::2] = head[: 2 * (VOCAB // 2) : 2] * (1 + 2e-4 * np.random.default_rng(0).normal(size=(VOCAB // 2, 1)))
    leaves["head"] = jnp.asarray(head, leaves["head"].dtype)
    return with_leaves(state, leaves)


# The aligned regime.


@pytest.mark.parametrize("tile", [4, 8])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", PRESETS)
def test_aligned_arms_are_bit_equal(family, precision, tile):
    arms = make_arms(family, precision, "temperature", tile)
    state = arms.prepare(small_state(family, precision))
    layout, tokens, rows = set_up(arms, seed=5)
    assert layout.slots % tile == 0
    assert int(rows.first.max()) > 0  # left padding
    cached, cache = run_cached_keeping(arms, state, tokens, rows, layout)
    assert same_bits(cached.logits, step_uncached(arms, state, tokens, rows, layout).logits)
    forced = run_forced(arms, state, cached, rows, layout)
    assert same_bits(cached.logits, forced.logits)
    free, drafts = free_by_drafts(arms, state, forced, cache, rows, layout)
    assert drafts == 0
    assert taken(free, layout) == taken(cached, layout)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_aligned_arms_are_bit_equal_under_every_sampler(sampler):
    arms = make_arms("gemma2", "fp16", sampler, 8)
    state = arms.prepare(small_state("gemma2", "fp16"))
    layout, tokens, rows = set_up(arms, make_prompts((9, 9)), seed=1)
    cached, _ = run_cached_keeping(arms, state, tokens, rows, layout)
    uncached = step_uncached(arms, state, tokens, rows, layout)
    assert same_bits(
        (cached.logits, cached.tokens, cached.lengths), (uncached.logits, uncached.tokens, uncached.lengths)
    )


def test_aligned_fp32_stays_near_the_plain_regime():
    """Aligning the roundings changes no more than they do: the aligned programs compute the same model."""
    logits = []
    for tile in (None, 8):
        arms = make_arms("gemma3", "fp32", "greedy", tile)
        layout, tokens, rows = set_up(arms)
        logits.append(
            run_cached_keeping(arms, arms.prepare(small_state("gemma3", "fp32")), tokens, rows, layout)[0].logits
        )
    np.testing.assert_allclose(*logits, rtol=0, atol=5e-5)
    assert np.abs(logits[0]).max() > 1


def test_the_cached_arm_does_not_recompute():
    """A token changed behind its back in a finished tile changes the uncached arm's logits and not the cached one's."""
    arms = make_arms("llama", "fp32", "greedy", 4)
    state = arms.prepare(small_state("llama"))
    layout, tokens, rows = set_up(arms, make_prompts((9,)))
    first = dataclasses.replace(rows, limit=jnp.asarray([layout.prompt + 4], jnp.int32))
    half, cache = run_cached_keeping(arms, state, tokens, first, layout)
    changed = np.array(half.tokens)
    changed[0, 1] = (changed[0, 1] + 1) % VOCAB
    going_on = dataclasses.replace(half, tokens=jnp.asarray(changed), ended=jnp.zeros(1, bool))
    run, _ = arms.tile_loop(state, going_on, rows, layout.prompt + 8, cache, False, False, tile=4)
    whole, _ = run_cached_keeping(arms, state, tokens, rows, layout)
    assert same_bits(run.logits[:, :8], whole.logits[:, :8])
    other = step_uncached(arms, state, changed, rows, layout)
    assert not same_bits(other.logits[:, :1], whole.logits[:, :1])


# Draft and check.


@pytest.mark.parametrize("length", ["padded", "bucket:16"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_check_is_the_stepped_run(precision, sampler, length):
    """Along tokens that another seed drew, so that choices and tokens differ."""
    arms = make_arms("mistral", precision, sampler)
    state = arms.prepare(small_state("mistral", precision))
    layout, tokens, rows = set_up(arms, seed=2)
    foreign = dataclasses.replace(rows, seed=jnp.asarray(9, jnp.int32))
    reference, _ = run_cached_keeping(arms, state, tokens, foreign, layout)
    check = run_forced(arms, state, reference, rows, layout, length)
    stepped = run_forced(arms, state, reference, rows, layout, length, stepwise=True)
    assert same_bits(check, stepped)
    assert int(check.lengths.min()) > 0


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_drafts_give_the_stepped_free_run(precision, sampler, unequal):
    """The first draft is foreign and the arms disagree at near ties, so that rows are drafted again and again."""
    arms = Arms(small_config(), make_precision(precision), SAMPLERS[sampler], STOP_IDS, backend="cuda")
    state = arms.prepare(near_ties(precision))
    seen, disagreed = [], 0
    for seed in range(6):
        layout, tokens, rows = set_up(arms, make_prompts(UNEQUAL if unequal else (7, 7, 7), seed=seed), seed=seed)
        foreign = dataclasses.replace(rows, seed=jnp.asarray(100 + seed, jnp.int32))
        reference, cache = run_cached_keeping(arms, state, tokens, foreign, layout)
        forced = run_forced(arms, state, reference, rows, layout)
        disagreed += int((first_disagreement(forced, layout.prompt) < np.asarray(forced.lengths)).sum())
        free, drafts = free_by_drafts(arms, state, forced, cache, rows, layout)
        stepped = step_uncached(arms, state, tokens, rows, layout)
        assert taken(free, layout) == taken(stepped, layout)
        for row, count in enumerate(np.asarray(free.lengths)):
            assert same_bits(free.logits[row, :count], stepped.logits[row, :count])
            assert same_bits(free.choices[row, :count], stepped.choices[row, :count])
        np.testing.assert_array_equal(free.ended, stepped.ended)
        seen.append(drafts)
    if sampler != "greedy":
        assert disagreed >= 6
        assert max(seen) >= 1


def test_a_broken_check_is_stepped():
    """A later overflow may reach earlier rows of a check as NaN times zero; the result is that of stepping."""
    arms = make_arms("mistral", "fp16")
    clean = arms.prepare(small_state("mistral", "fp16"))
    layout, tokens, rows = set_up(arms, make_prompts((7, 7, 7), seed=1))
    reference, cache = run_cached_keeping(arms, clean, tokens, rows, layout)
    row = taken(reference, layout)[1]
    before = {t for prompt in tokens[:, : layout.prompt].tolist() for t in prompt}
    before |= {t for other in (0, 2) for t in taken(reference, layout)[other]}
    step = next(i for i, t in enumerate(row) if t not in before | set(row[:i]) and i >= 2)
    broken = changed_state(clean, "embed", (row[step], 0), np.inf)
    forced = run_forced(arms, broken, reference, rows, layout)
    stepped = run_forced(arms, broken, reference, rows, layout, stepwise=True)
    assert same_bits(forced, stepped)
    assert forced.nonfinite_step.tolist() == [-1, step + 1, -1]
    free, _ = free_by_drafts(arms, broken, forced, cache, rows, layout)
    assert taken(free, layout) == taken(step_uncached(arms, broken, tokens, rows, layout), layout)


def test_a_draft_that_breaks_is_stepped():
    """The cached arm may overflow on tokens of the uncached arm where that one does not."""
    arms = Arms(small_config(), make_precision("fp16"), SAMPLERS["greedy"], backend="cuda")
    state = arms.prepare(near_ties("fp16"))
    layout, tokens, rows = set_up(arms, make_prompts((7,), seed=3))
    reference, cache = run_cached_keeping(arms, state, tokens, rows, layout)
    changed = np.array(reference.tokens)
    changed[0, layout.prompt + 3] = (changed[0, layout.prompt + 3] + 2) % VOCAB
    forced = run_forced(arms, state, dataclasses.replace(reference, tokens=jnp.asarray(changed)), rows, layout)
    assert first_disagreement(forced, layout.prompt).tolist() == [3]
    v = (cache.v[0].at[:, 1].set(jnp.inf), *cache.v[1:])
    free, _ = free_by_drafts(arms, state, forced, dataclasses.replace(cache, v=v), rows, layout)
    assert taken(free, layout) == taken(step_uncached(arms, state, tokens, rows, layout), layout)
    assert free.nonfinite_step.tolist() == [-1]


def test_forcing_ends_rows_where_the_reference_ended():
    arms = make_arms()
    layout, tokens, rows = set_up(arms)
    reference, _ = run_cached_keeping(arms, arms.prepare(small_state("mistral", "fp16")), tokens, rows, layout)
    forced = force(rows, reference)
    np.testing.assert_array_equal(forced.limit, layout.prompt + np.asarray(reference.lengths))
