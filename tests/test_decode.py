"""Both arms: what they run, where they stop, and that the shortcut to a free run is no other run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from cases import daily
from small_models import (
    BUCKET,
    NEW_TOKENS,
    SAMPLERS,
    STOP_IDS,
    VOCAB,
    changed_state,
    make_prompts,
    run_foreign,
    same_bits,
    set_up,
    step_uncached,
    taken,
)

from jaxkv.cache import empty_cache
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.drafts import first_disagreement, free_stepwise
from jaxkv.errors import UserError
from jaxkv.rollout import PAD_ID, Layout, force, make_layout, round_up, start_rollout, uncached_lengths

small_arms, small_config, small_state = (  # one layer is quicker to compile
    functools.partial(make, layers=1)
    for make in (small_models.small_arms, small_models.small_config, small_models.small_state)
)
# Two ways to add up a fp32 product of these sizes: logits of a few units differ by some 1e-6.
FP32_LOGITS = {"rtol": 0, "atol": 5e-5}


def ready(family="mistral", precision="fp32", sampler="temperature", *options, **named):
    """Arms of a small model and its prepared weights."""
    arms = small_arms(family, precision, sampler, *options, **named)
    return arms, arms.prepare(small_state(family, precision))


# The uncached arm's free run out of its forced run.


def foreign_reference(own, layout, rng):
    """A rollout that leaves `own` at a random step of each row, and then takes other tokens to another length."""
    tokens, lengths = np.array(own.tokens), np.array(own.lengths)
    for row, length in enumerate(lengths):
        step = rng.integers(0, NEW_TOKENS + 1)
        if step >= length:
            continue
        tokens[row, layout.prompt + step :] = PAD_ID
        lengths[row] = rng.integers(step + 1, NEW_TOKENS + 1)
        new = rng.integers(12, VOCAB, lengths[row] - step)
        if lengths[row] < NEW_TOKENS or rng.integers(2):
            new[-1] = STOP_IDS[rng.integers(2)]
        tokens[row, layout.prompt + step : layout.prompt + lengths[row]] = new
    return dataclasses.replace(own, tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths))


@pytest.mark.parametrize(
    ("sampler", "length"),
    daily(
        [("top_k", "padded"), ("temperature", "bucket:16")],
        [*((name, "padded") for name in SAMPLERS), ("temperature", "bucket:16")],
    ),
)
def test_free_run_after_a_forced_one_is_the_stepped_run(sampler, length):
    arms, state = ready("mistral", "fp16", sampler, STOP_IDS)
    rng = np.random.default_rng(0)
    agreed, stops = set(), 0
    for trial in range(10):
        lengths = ((7, 7, 7), (4, 7, 6))[trial % 2]
        layout, tokens, rows = set_up(make_prompts(lengths, seed=trial), seed=trial)
        own = step_uncached(arms, state, tokens, rows, layout, length)
        reference = foreign_reference(own, layout, rng)
        forced_rows = force(rows, reference)
        forced = step_uncached(arms, state, np.asarray(reference.tokens), forced_rows, layout, length)
        assert taken(forced, layout) == taken(reference, layout)
        free = free_stepwise(arms, state, forced, rows, layout, length)
        for name in ("lengths", "ended", "nonfinite_step"):
            np.testing.assert_array_equal(getattr(free, name), getattr(own, name))
        width = layout.prompt + NEW_TOKENS
        np.testing.assert_array_equal(free.tokens[:, :width], own.tokens[:, :width])
        stepped = np.asarray(free.choices) != PAD_ID
        np.testing.assert_array_equal(np.asarray(free.choices)[stepped], np.asarray(own.choices)[stepped])
        assert same_bits(np.asarray(free.logits)[stepped], np.asarray(own.logits)[stepped])
        agreed |= set(first_disagreement(forced, layout.prompt).tolist())
        stops += sum(row[-1] in STOP_IDS for row in taken(own, layout))
    assert {0, NEW_TOKENS} <= agreed
    assert len(agreed) >= 6
    assert stops >= 3


def test_free_run_keeps_a_rows_own_limit():
    arms, state = ready()
    layout, tokens, rows = set_up(make_prompts((7, 7, 7)))
    rows = dataclasses.replace(rows, limit=layout.prompt + jnp.asarray([4, 12, 9], jnp.int32))
    own = step_uncached(arms, state, tokens, rows, layout)
    other = np.array(own.tokens)
    other[:, layout.prompt + 3] = (other[:, layout.prompt + 3] + 1) % VOCAB
    reference = dataclasses.replace(own, tokens=jnp.asarray(other))
    forced = step_uncached(arms, state, other, force(rows, reference), layout)
    assert first_disagreement(forced, layout.prompt).tolist() == [3, 3, 3]
    free = free_stepwise(arms, state, forced, rows, layout)
    np.testing.assert_array_equal(free.lengths, own.lengths)
    np.testing.assert_array_equal(free.tokens, own.tokens)


# Where a row ends.


@pytest.mark.parametrize("arm", [Arms.run_cached, step_uncached])
def test_a_row_ends_at_its_stop_token_and_the_loop_with_the_last_row(arm):
    layout, tokens, rows = set_up(make_prompts((7, 7, 7), seed=3), seed=4)
    endless, state = ready("mistral", "fp32", "temperature")
    full = taken(arm(endless, state, tokens, rows, layout), layout)
    assert [len(row) for row in full] == [NEW_TOKENS] * 3
    stop_ids = (full[0][2], full[1][7], full[2][4])
    arms = Arms(small_config(), make_precision("fp32"), SAMPLERS["temperature"], stop_ids)
    run = arm(arms, state, tokens, rows, layout)
    expected = [row[: 1 + min(row.index(s) for s in stop_ids if s in row)] for row in full]
    assert taken(run, layout) == expected
    longest = max(map(len, expected))
    assert min(map(len, expected)) < longest < NEW_TOKENS
    assert int(run.slot) == layout.prompt + longest
    assert np.asarray(run.ended).all()
    for row, kept in enumerate(expected):
        assert (np.asarray(run.tokens)[row, layout.prompt + len(kept) :] == PAD_ID).all()
    assert not np.asarray(run.logits)[:, longest:].any()


@pytest.mark.parametrize("arm", [Arms.run_cached, step_uncached])
def test_limits(arm):
    arms, state = ready()
    layout, tokens, rows = set_up(make_prompts((7, 7, 7)))
    full = arm(arms, state, tokens, rows, layout)
    limited = dataclasses.replace(rows, limit=layout.prompt + jnp.asarray([0, 3, 5], jnp.int32))
    run = arm(arms, state, tokens, limited, layout)
    assert run.lengths.tolist() == [0, 3, 5]
    assert int(run.slot) == layout.prompt + 5
    assert taken(run, layout) == [row[:n] for row, n in zip(taken(full, layout), (0, 3, 5), strict=True)]


@pytest.mark.parametrize("arm", [Arms.run_cached, step_uncached])
def test_non_finite_logits_end_their_row_alone(arm):
    """A row whose token has an infinite embedding breaks at the next step; its neighbours keep every bit."""
    arms, state = ready("mistral", "fp16", "temperature")
    layout, tokens, rows = set_up(make_prompts((7, 7, 7), seed=1), seed=2)
    clean = arm(arms, state, tokens, rows, layout)
    others = {t for prompt in tokens[:, : layout.prompt].tolist() for t in prompt}
    others |= {t for row in (0, 2) for t in taken(clean, layout)[row]} | {PAD_ID}
    step = next(i for i, t in enumerate(taken(clean, layout)[1]) if t not in others)
    bad = taken(clean, layout)[1][step]
    run = arm(arms, changed_state(state, "embed", (bad, 0), np.inf), tokens, rows, layout)
    assert run.nonfinite_step.tolist() == [-1, step + 1, -1]
    assert run.lengths.tolist() == [NEW_TOKENS, step + 1, NEW_TOKENS]
    assert taken(run, layout)[1] == taken(clean, layout)[1][: step + 1]
    assert (np.asarray(run.tokens)[1, layout.prompt + step + 1 :] == PAD_ID).all()
    for row in (0, 2):
        assert same_bits(run.tokens[row], clean.tokens[row])
        assert same_bits(run.logits[row], clean.logits[row])


# The uncached arm's padded lengths.


@pytest.mark.parametrize("size", [1, 5, 8, 64])
@pytest.mark.parametrize(("prompt", "new_tokens"), [(1, 1), (7, 1), (8, 1), (7, 12), (8, 8), (64, 65)])
def test_buckets_cover_each_step_once_at_its_length(size, prompt, new_tokens):
    layout = Layout(1, prompt, round_up(prompt, 8), round_up(prompt, 8) + new_tokens, new_tokens)
    slot, lengths = prompt, {}
    for padded, end in uncached_lengths(f"bucket:{size}", layout):
        assert end > slot
        lengths |= dict.fromkeys(range(slot, end), padded)
        slot = end
    assert lengths == {slot: round_up(slot, size) for slot in range(prompt, prompt + new_tokens)}
    assert uncached_lengths("padded", layout) == [(layout.slots, prompt + new_tokens)]


@pytest.mark.parametrize(
    "text", ["", "bucket", "bucket:", "bucket:0", "bucket:-4", "bucket:x", "bucket:8:8", "bucket: 8", "Padded", "64"]
)
def test_other_lengths_are_refused(text):
    with pytest.raises(UserError, match="use padded or bucket:M"):
        uncached_lengths(text, Layout(1, 7, 8, 20, 12))


def test_buckets_and_one_padded_length_agree_in_fp32():
    arms, state = ready()
    layout, tokens, rows = set_up(make_prompts((5, 7, 7)))
    padded = step_uncached(arms, state, tokens, rows, layout)
    bucketed = step_uncached(arms, state, tokens, rows, layout, "bucket:16")
    assert np.abs(bucketed.logits).max(-1).min() > 0
    np.testing.assert_allclose(bucketed.logits, padded.logits, **FP32_LOGITS)
    np.testing.assert_array_equal(bucketed.choices, padded.choices)
    assert taken(bucketed, layout) == taken(padded, layout)


# One arm against itself and the other.


@pytest.mark.parametrize(
    ("family", "precision"), daily([("mistral", "fp16")], [("mistral", "fp16"), ("gemma2", "bf16")])
)
def test_widened_weights_differ_by_roundings_alone(family, precision):
    """Held in fp32 the same products may be added in another order; then a last bit differs here and there."""
    runs = []
    layout, tokens, rows = set_up(make_prompts((7, 7, 7)))
    for backend in (None, "cuda"):
        arms, state = ready(family, precision, backend=backend)
        runs.append([arm(arms, state, tokens, rows, layout) for arm in (Arms.run_cached, step_uncached)])
    unit = float(jnp.finfo(make_precision(precision).logits).eps)
    for wide, narrow in zip(*runs, strict=True):
        wide, narrow = (np.asarray(run.logits[:, :6], np.float64) for run in (wide, narrow))
        np.testing.assert_allclose(wide, narrow, rtol=0, atol=8 * unit * np.abs(wide).max())


def test_widening_leaves_32_bits_alone():
    for name in ("fp32", "fp64"):
        precision = make_precision(name)
        assert precision.widened() is precision


@pytest.mark.parametrize("sampler", daily(["temperature"], ["greedy", "temperature"]))
@pytest.mark.parametrize("arm", [Arms.run_cached, step_uncached])
def test_left_padding_changes_no_token_in_fp32(arm, sampler):
    arms, state = ready("mistral", "fp32", sampler)
    prompts = make_prompts((3, 7, 5))
    layout, tokens, rows = set_up(prompts)
    together = arm(arms, state, tokens, rows, layout)
    for problem, prompt in enumerate(prompts):
        layout, tokens, rows = set_up([prompt], [problem])
        alone = arm(arms, state, tokens, rows, layout)
        assert taken(alone, layout)[0] == np.asarray(together.tokens)[problem, 7:19].tolist()
        np.testing.assert_allclose(alone.logits[0], together.logits[problem], **FP32_LOGITS)


def test_prefill_consumes_its_cache():
    arms, state = ready()
    layout, tokens, rows = set_up(make_prompts((5, 7, 7)))
    cache = empty_cache(arms.config, arms.precision, layout.batch, layout.slots)
    logits, filled = arms.prefill(state, jnp.asarray(tokens[:, : layout.prefill]), rows, cache)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    expected = np.full((3, layout.slots), -1)
    for row, length in enumerate((5, 7, 7)):
        expected[row, layout.prompt - length : layout.prompt] = np.arange(length)
    np.testing.assert_array_equal(filled.positions, expected)
    run = start_rollout(arms, tokens, rows, layout)
    uncached = step_uncached(arms, state, tokens, rows, layout)
    np.testing.assert_allclose(logits, uncached.logits[:, 0], **FP32_LOGITS)
    done, _ = arms.cached_loop(state, logits, run, rows, layout.prompt + NEW_TOKENS, filled)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((filled, run)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((rows, state)))
    assert taken(done, layout) == taken(uncached, layout)


def test_forcing_leaves_the_arms_own_choices_beside_the_tokens():
    arms, state = ready("mistral", "fp32", "temperature")
    layout, tokens, rows = set_up(make_prompts((7, 7, 7)))
    foreign = run_foreign(arms, state, tokens, rows, layout)
    forced_rows = force(rows, foreign)
    cached = arms.run_cached(state, np.asarray(foreign.tokens), forced_rows, layout)
    uncached = step_uncached(arms, state, np.asarray(foreign.tokens), forced_rows, layout)
    assert taken(cached, layout) == taken(uncached, layout) == taken(foreign, layout)
    np.testing.assert_array_equal(cached.choices, uncached.choices)
    assert not np.array_equal(cached.choices, foreign.choices)
    np.testing.assert_allclose(cached.logits, uncached.logits, **FP32_LOGITS)


# What does not fit.


def test_layouts():
    config = small_config()
    layout = make_layout(make_prompts((3, 9)), 4, BUCKET, config)
    assert layout == Layout(batch=2, prompt=9, prefill=16, slots=20, new_tokens=4)
    assert make_layout(make_prompts((60,)), 4, BUCKET, config).slots == 68
    with pytest.raises(UserError, match=r"61 tokens and 4 new ones exceed the context of 64 of small-mistral"):
        make_layout(make_prompts((3, 61)), 4, BUCKET, config)
    with pytest.raises(UserError, match="a prompt has no tokens"):
        make_layout([[1], []], 4, BUCKET, config)


def test_weights_are_prepared_in_place():
    """The same weights as prepared apart, in one copy; other arms get from them what they would have got before."""
    arms, narrow = small_arms("gemma2", "fp16"), small_arms("gemma2", "bf16")
    given = small_state("gemma2", "fp16")
    leaves = {path: leaf[...] for path, leaf in flat_paths(given).items()}
    own = with_leaves(given, leaves)
    wanted = arms.prepare(given)
    prepared = arms.prepare_in_place(own)
    assert prepared is own
    assert same_bits(prepared, wanted)
    assert same_bits(narrow.prepare(prepared), narrow.prepare(given))
    assert all(leaf[...] is leaves[path] for path, leaf in flat_paths(given).items())  # the caller's other copies stay
