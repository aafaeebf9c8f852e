"""The aligned regime is exact, and draft and check gives what stepping gives, bit for bit."""

import copy
import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from cases import daily
from small_models import (
    BUCKET,
    NEW_TOKENS,
    PRESETS,
    SAMPLERS,
    STOP_IDS,
    VOCAB,
    changed_state,
    make_prompts,
    run_foreign,
    same_bits,
    step_uncached,
    taken,
)

from jaxkv.checkpoints.fill import flat_paths
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.drafts import Forced, first_disagreement, free_by_drafts
from jaxkv.rollout import make_layout, make_rows

small_config, small_state = (  # one layer is quicker to compile; two are gated and attributed
    functools.partial(make, layers=1) for make in (small_models.small_config, small_models.small_state)
)
PRECISIONS = ("fp16", "bf16", "fp32")
UNEQUAL = (4, 7, 6)


@functools.cache
def ready(family="mistral", precision="fp16", sampler="temperature", tile=None):
    """Arms of a small model and its prepared weights."""
    arms = Arms(small_config(family), make_precision(precision), SAMPLERS[sampler], STOP_IDS, tile=tile)
    return arms, arms.prepare(small_state(family, precision))


@functools.cache
def torn(precision="bf16", sampler="temperature"):
    """Plain arms and weights whose head rows come in pairs that a rounding orders: the arms then disagree often."""
    arms = Arms(small_config(), make_precision(precision), SAMPLERS[sampler], STOP_IDS, backend="cuda")
    state = small_state("mistral", precision)
    old = flat_paths(state)["head"][...]
    head = np.array(old, np.float32)
    head[1::2] = head[: 2 * (VOCAB // 2) : 2] * (1 + 2e-4 * np.random.default_rng(0).normal(size=(VOCAB // 2, 1)))
    return arms, arms.prepare(changed_state(state, "head", ..., jnp.asarray(head, old.dtype)))


def set_up(arms, prompts=None, seed=0):
    prompts = prompts or make_prompts(UNEQUAL, seed=seed)
    layout = make_layout(prompts, NEW_TOKENS, BUCKET, arms.config, arms.tile)
    return layout, *make_rows(prompts, list(range(len(prompts))), seed, layout)


# The aligned regime.

ALIGNED = [
    ("llama", "fp16", "greedy"), ("mistral", "fp32", "temperature"), ("gemma2", "bf16", "top_k"),
    ("gemma3", "fp16", "top_p"), ("qwen2", "bf16", "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "precision", "sampler"),
    daily(ALIGNED, dict.fromkeys([*ALIGNED, *itertools.product(PRESETS, PRECISIONS, ("temperature",))])),
)
def test_aligned_arms_are_bit_equal(family, precision, sampler):
    arms, state = ready(family, precision, sampler, 4)
    layout, tokens, rows = set_up(arms, seed=5)
    assert int(rows.first.max()) > 0  # left padding
    cached = arms.run_cached(state, tokens, rows, layout)
    assert_same_run(cached, step_uncached(arms, state, tokens, rows, layout), layout)
    forced = arms.run_forced(state, cached, rows, layout)
    assert same_bits(cached.logits, forced.logits)
    free, drafts = free_by_drafts(arms, state, [Forced(forced, rows, layout)])[0]
    assert drafts == 0
    assert taken(free, layout) == taken(cached, layout)


@pytest.mark.parametrize(
    ("tile", "lengths", "new_tokens"),
    daily(
        [(1, (3, 2, 1), 7), (5, (10, 2, 7), 7), (3, (1, 1, 1), 1)],
        [(1, (3, 2, 1), 7), (5, (10, 2, 7), 7), (16, (16, 1), 9), (64, (9, 4), 12), (3, (1, 1, 1), 1)],
    ),
)
def test_tiles_of_any_size(tile, lengths, new_tokens):
    """Prompts that end where a tile does, tiles larger than the buffer, a number of tokens that fills no tile."""
    arms, state = ready(tile=tile)
    prompts = make_prompts(lengths, seed=tile)
    layout = make_layout(prompts, new_tokens, 1, arms.config, tile)
    tokens, rows = make_rows(prompts, list(range(len(prompts))), 3, layout)
    cached = arms.run_cached(state, tokens, rows, layout)
    stepped = step_uncached(arms, state, tokens, rows, layout)
    assert same_bits(cached, stepped)
    reference = run_foreign(arms, state, tokens, rows, layout)
    forced = arms.run_forced(state, reference, rows, layout)
    assert same_bits(forced, arms.run_forced(state, reference, rows, layout, stepwise=True))
    free, drafts = free_by_drafts(arms, state, [Forced(forced, rows, layout)])[0]
    assert drafts <= 2  # aligned drafts are right once they begin from settled tokens
    assert_same_run(free, stepped, layout)


def test_slots_that_are_no_tiles_are_refused():
    arms, _ = ready(tile=8)
    prompts = make_prompts((9,))
    layout = make_layout(prompts, 5, 1, arms.config)
    tokens, rows = make_rows(prompts, [0], 0, layout)
    with pytest.raises(ValueError, match="14 slots are not a multiple of the tile of 8 rows"):
        arms.run_cached_keeping(None, tokens, rows, layout)


@pytest.mark.parametrize("tile", [None, 4])
def test_an_arm_is_one_program(tile):
    """However an arm is run it is the same executable: two compiled apart need not round alike on a GPU."""
    shared, state = ready("mistral", "fp32", tile=tile)
    arms = Arms(shared.config, shared.precision, shared.sampler, shared.stop_ids, tile=tile)
    layout, tokens, rows = set_up(arms)
    cached = arms.run_cached(state, tokens, rows, layout)
    forced = arms.run_forced(state, cached, rows, layout)
    arms.run_forced(state, cached, rows, layout, stepwise=True)
    step_uncached(arms, state, tokens, rows, layout)
    free_by_drafts(arms, state, [Forced(forced, rows, layout)])
    sizes = [program._cache_size() for program in (arms.prefill, arms.cached_loop, arms.tile_loop)]
    assert sizes == ([1, 1, 1] if tile is None else [0, 0, 1])


@pytest.mark.parametrize(
    ("family", "sampler"), daily([("mistral", "temperature")], [("mistral", "temperature"), ("gemma3", "greedy")])
)
def test_aligned_fp32_stays_near_the_plain_regime(family, sampler):
    """Aligning the roundings changes no more than they do: the aligned programs compute the same model."""
    logits = []
    for tile in (None, 4):
        arms, state = ready(family, "fp32", sampler, tile)
        layout, tokens, rows = set_up(arms)
        logits.append(arms.run_cached(state, tokens, rows, layout).logits)
    np.testing.assert_allclose(*logits, rtol=0, atol=5e-5)
    assert np.abs(logits[0]).max() > 1


def test_the_cached_arm_does_not_recompute():
    """A token changed behind its back in a finished tile changes the uncached arm's logits and not the cached one's."""
    arms, state = ready("mistral", "fp32", "temperature", 4)
    layout, tokens, rows = set_up(arms, make_prompts((7, 7, 7), seed=1))
    whole = arms.run_cached(state, tokens, rows, layout)
    assert whole.lengths.min() >= 8  # no row stops before
    first = dataclasses.replace(rows, limit=rows.limit - NEW_TOKENS + 4)
    half, cache = arms.run_cached_keeping(state, tokens, first, layout)
    changed = np.array(half.tokens)
    changed[:, 1] = (changed[:, 1] + 1) % VOCAB
    going_on = dataclasses.replace(half, tokens=jnp.asarray(changed), ended=jnp.zeros(3, bool))
    run, _ = arms.tile_loop(state, going_on, rows, layout.prompt + 8, cache, False, False, tile=4)
    other = step_uncached(arms, state, changed, rows, layout)
    for row in range(3):
        assert same_bits(run.logits[row, :8], whole.logits[row, :8])
        assert not same_bits(other.logits[row, :1], whole.logits[row, :1])


# Draft and check.


@pytest.mark.parametrize(
    ("precision", "sampler", "length"),
    daily(
        [("fp16", "temperature", "bucket:10"), ("fp32", "temperature", "padded")],
        [
            (precision, sampler, length)
            for precision, sampler in [
                *(("fp16", name) for name in SAMPLERS),
                ("bf16", "temperature"),
                ("fp32", "temperature"),
            ]
            for length in ("padded", "bucket:10")  # both end in 20 rows
        ],
    ),
)
def test_a_check_is_the_stepped_run(precision, sampler, length):
    """Along tokens that another seed drew, so that choices and tokens differ."""
    arms, state = ready("mistral", precision, sampler)
    layout, tokens, rows = set_up(arms, seed=2)
    reference = run_foreign(arms, state, tokens, rows, layout)
    check = arms.run_forced(state, reference, rows, layout, length)
    stepped = arms.run_forced(state, reference, rows, layout, length, stepwise=True)
    assert same_bits(check, stepped)
    assert int(check.lengths.min()) > 0


def random_reference(arms, state, tokens, rows, layout, rng):
    """The cached arm along random tokens, each row up to a stop token of its own or to the end."""
    given = np.array(tokens)
    new = rng.integers(12, VOCAB, (layout.batch, layout.new_tokens))
    for row, length in enumerate(rng.integers(1, layout.new_tokens + 3, layout.batch)):
        if length <= layout.new_tokens:
            new[row, length - 1] = STOP_IDS[length % 2]
    given[:, layout.prompt : layout.prompt + layout.new_tokens] = new
    return arms.run_cached(state, given, dataclasses.replace(rows, forced_until=rows.limit), layout)


@pytest.mark.parametrize(
    ("precision", "sampler"),
    daily(
        [("bf16", "temperature")],
        [*(("fp16", name) for name in SAMPLERS), ("bf16", "greedy"), ("bf16", "temperature")],
    ),
)
def test_drafts_give_the_stepped_free_run(precision, sampler):
    """The first draft is foreign or random and the arms disagree at near ties, so that rows are drafted repeatedly.

    Rows have limits of their own in every other trial; rows that a draft had ended are taken up again.
    """
    arms, state = torn(precision, sampler)
    seen, disagreed, revived = [], 0, 0
    for seed in range(8):
        layout, tokens, rows = set_up(arms, make_prompts(UNEQUAL if seed % 2 else (7, 7, 7), seed=seed), seed=seed)
        rng = np.random.default_rng(seed)
        if seed % 4 > 1:
            limit = layout.prompt + rng.integers(0, NEW_TOKENS + 1, layout.batch)
            rows = dataclasses.replace(rows, limit=jnp.asarray(limit, jnp.int32))
        if seed % 3:
            reference = random_reference(arms, state, tokens, rows, layout, rng)
        else:
            reference = run_foreign(arms, state, tokens, rows, layout, 100 + seed)
        forced = arms.run_forced(state, reference, rows, layout)
        disagreed += int((first_disagreement(forced, layout.prompt) < np.asarray(forced.lengths)).sum())
        free, drafts = free_by_drafts(arms, state, [Forced(forced, rows, layout)])[0]
        assert_same_run(free, step_uncached(arms, state, tokens, rows, layout), layout)
        revived += int((np.asarray(free.lengths) > np.asarray(reference.lengths)).sum())
        seen.append(drafts)
    assert disagreed >= 6
    assert max(seen) >= 1
    assert revived >= 2


def assert_same_run(free, stepped, layout):
    assert taken(free, layout) == taken(stepped, layout)
    for row, count in enumerate(np.asarray(stepped.lengths)):
        assert same_bits(free.logits[row, :count], stepped.logits[row, :count])
        assert same_bits(free.choices[row, :count], stepped.choices[row, :count])
    np.testing.assert_array_equal(free.ended, stepped.ended)
    np.testing.assert_array_equal(free.nonfinite_step, stepped.nonfinite_step)


def test_a_row_that_breaks_in_a_later_check_stays_broken():
    """The uncached arm overflows on its own tokens, the cached one does not, and other rows are drafted on after it.

    The cached arm has a head of its own here, so that its drafts are bad ones.
    """
    whole, clean = ready()
    head = flat_paths(clean)["head"][...]
    noise = np.random.default_rng(0).normal(size=head.shape) * 0.1
    other = changed_state(clean, "head", ..., (head + noise).astype(head.dtype))
    arms = copy.copy(whole)
    arms.prefill = lambda _, *rest: whole.prefill(other, *rest)
    arms.cached_loop = lambda _, *rest: whole.cached_loop(other, *rest)
    broke = late = 0
    for seed in range(16):
        layout, tokens, rows = set_up(arms, make_prompts((7, 7, 7), seed=seed), seed=seed)
        prompted = set(tokens[:, : layout.prompt].ravel().tolist()) | {0}
        bad = next(t for t in np.random.default_rng(seed).permutation(VOCAB).tolist() if t not in prompted)
        state = changed_state(clean, "embed", (bad, 0), np.inf)
        reference = random_reference(arms, state, tokens, rows, layout, np.random.default_rng(seed))
        forced = arms.run_forced(state, reference, rows, layout)
        free, drafts = free_by_drafts(arms, state, [Forced(forced, rows, layout)])[0]
        stepped = step_uncached(arms, state, tokens, rows, layout)
        assert_same_run(free, stepped, layout)
        own = np.asarray(stepped.nonfinite_step) > first_disagreement(forced, layout.prompt)
        broke += int(own.sum())
        late += drafts > 1 and own.any()
    assert broke >= 3
    assert late >= 1


def test_a_broken_check_is_stepped():
    """A later overflow may reach earlier rows of a check as NaN times zero; the result is that of stepping."""
    arms, clean = ready()
    layout, tokens, rows = set_up(arms, make_prompts((7, 7, 7), seed=1))
    reference = arms.run_cached(clean, tokens, rows, layout)
    row = taken(reference, layout)[1]
    before = {t for prompt in tokens[:, : layout.prompt].tolist() for t in prompt}
    before |= {t for other in (0, 2) for t in taken(reference, layout)[other]}
    step = next(i for i, t in enumerate(row) if t not in before | set(row[:i]) and i >= 2)
    broken = changed_state(clean, "embed", (row[step], 0), np.inf)
    forced = arms.run_forced(broken, reference, rows, layout)
    stepped = arms.run_forced(broken, reference, rows, layout, stepwise=True)
    assert same_bits(forced, stepped)
    assert forced.nonfinite_step.tolist() == [-1, step + 1, -1]
    free, _ = free_by_drafts(arms, broken, [Forced(forced, rows, layout)])[0]
    assert taken(free, layout) == taken(step_uncached(arms, broken, tokens, rows, layout), layout)


def test_a_draft_that_breaks_is_stepped():
    """The cached arm may overflow on tokens of the uncached arm where that one does not."""
    whole, state = torn()
    for seed in range(3, 20):
        layout, tokens, rows = set_up(whole, make_prompts((7, 7, 7), seed=seed))
        alone = np.where(np.arange(3) == 0, rows.limit, rows.prompt)  # the other two have ended from the start
        rows = dataclasses.replace(rows, limit=jnp.asarray(alone))
        reference = whole.run_cached(state, tokens, rows, layout)
        changed = np.array(reference.tokens)
        changed[0, layout.prompt + 3] = (changed[0, layout.prompt + 3] + 2) % VOCAB
        draft = dataclasses.replace(reference, tokens=jnp.asarray(changed))
        forced = whole.run_forced(state, draft, rows, layout)
        own = int(forced.choices[0, 3])
        if own not in changed[0, : layout.prompt + 3] and first_disagreement(forced, layout.prompt)[0] == 3:
            break
    broken = changed_state(state, "embed", (own, 0), np.inf)
    arms, drafted = copy.copy(whole), []
    arms.prefill = lambda _, *rest: whole.prefill(broken, *rest)
    arms.cached_loop = lambda _, *rest: drafted.append(whole.cached_loop(broken, *rest)) or drafted[-1]
    free, _ = free_by_drafts(arms, state, [Forced(forced, rows, layout)])[0]
    assert [run.nonfinite_step.tolist() for run, _ in drafted] == [[4, -1, -1]]
    assert_same_run(free, step_uncached(whole, state, tokens, rows, layout), layout)
    assert free.nonfinite_step.tolist() == [-1, -1, -1]


def test_batches_that_draft_together():
    """Rows of several batches, whose shapes differ, in one draft; each batch gets what it gets alone."""
    arms, state = torn()
    together, stepped = [], []
    for seed, lengths in enumerate([(4, 7, 6), (14, 9, 10), (7, 7, 7), (16, 1, 3)]):
        prompts = make_prompts(lengths, seed=seed)
        layout = make_layout(prompts, NEW_TOKENS, BUCKET, arms.config)
        tokens, rows = make_rows(prompts, list(range(seed, seed + 3)), 4, layout)
        reference = random_reference(arms, state, tokens, rows, layout, np.random.default_rng(seed))
        together.append(Forced(arms.run_forced(state, reference, rows, layout), rows, layout))
        stepped.append(step_uncached(arms, state, tokens, rows, layout))
    assert len({one.layout.slots for one in together}) > 1
    drafts = 0
    for one, (free, count), brute in zip(together, free_by_drafts(arms, state, together), stepped, strict=True):
        assert_same_run(free, brute, one.layout)
        assert same_bits(free, free_by_drafts(arms, state, [one])[0][0])
        drafts += count
    assert drafts >= 4


def test_a_program_that_does_not_repeat_itself_ends():
    """Drafts that settle nothing are given up, not repeated for ever."""
    whole, state = ready()
    arms, seeds = copy.copy(whole), itertools.count(100)

    def restless(state, run, rows, end, cache, recompute, check, **named):
        rows = dataclasses.replace(rows, seed=jnp.asarray(next(seeds), jnp.int32))
        return whole.tile_loop(state, run, rows, end, cache, recompute, check, **named)

    arms.tile_loop = restless
    layout, tokens, rows = set_up(arms)
    reference = arms.run_cached(state, tokens, rows, layout)
    forced = arms.run_forced(state, reference, rows, layout)
    _, drafts = free_by_drafts(arms, state, [Forced(forced, rows, layout)])[0]
    assert drafts <= NEW_TOKENS + 1
