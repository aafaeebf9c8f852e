"""The noise, the sets that may be drawn from, and what is recorded about both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from cases import daily
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make_prompts, same_bits, set_up, small_arms, small_state, step_uncached, taken

from jaxkv.errors import UserError
from jaxkv.options import SAMPLERS as KINDS
from jaxkv.sampling import _kept, choose, first_argmax, gumbel_noise, make_sampler

V, BATCH = 37, 256
SAMPLERS = {
    "greedy": make_sampler("greedy"),
    "temperature": make_sampler("temperature", temperature=0.5),
    "top_k": make_sampler("top_k", temperature=1.3, top_k=5),
    "top_p": make_sampler("top_p", top_p=0.8),
}
CHOOSE = jax.jit(choose, static_argnames="sampler")
KEPT = jax.jit(_kept, static_argnames="sampler")
NOISE = jax.jit(gumbel_noise, static_argnames="vocab_size")


def integers(*values):
    return [jnp.asarray(value, jnp.int32) for value in values]


def draw(logits, sampler, seed, problems, positions, batch=BATCH):
    """Tokens of any number of rows, in batches of one size: a program for each sampler."""
    rows = np.arange(-(-len(logits) // batch) * batch) % len(logits)  # the last batch is filled up
    chosen = [
        CHOOSE(logits[at], sampler, *integers(seed, problems[at], positions[at])) for at in rows.reshape(-1, batch)
    ]
    return np.concatenate(chosen)[: len(logits)]


def random_logits(rows, dtype=np.float32, spread=2.0, vocab=V):
    return (np.random.default_rng(0).normal(size=(rows, vocab)) * spread).astype(dtype)


def test_noise_depends_on_each_of_its_arguments():
    base = NOISE(*integers(1, 2, 3), V)
    assert base.dtype == jnp.float32
    assert same_bits(base, NOISE(*integers(1, 2, 3), V))
    others = [NOISE(*integers(*key), V) for key in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (2, 1, 3), (1, 3, 2), (-1, 2, 3))]
    assert all(not np.any(np.asarray(base) == np.asarray(other)) for other in others)
    assert len(set(np.asarray(base).tolist())) == V


@pytest.mark.parametrize("size", daily([1, V, 258], [1, 2, V, 128, 258]))
def test_a_tokens_noise_does_not_depend_on_the_size_of_the_vocabulary(size):
    assert same_bits(NOISE(*integers(1, 2, 3), size), np.asarray(NOISE(*integers(1, 2, 3), 259))[:size])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    daily(
        [*((kind, np.float32) for kind in SAMPLERS), ("greedy", np.float16)],  # the others widen their logits first
        [(kind, dtype) for kind in SAMPLERS for dtype in (np.float32, np.float16)],
    ),
)
def test_a_draw_does_not_depend_on_row_or_batch(kind, dtype):
    logits, sampler = random_logits(9, dtype), SAMPLERS[kind]
    problems, positions = np.arange(9) * 3, 40 - np.arange(9)
    together = draw(logits, sampler, 5, problems, positions)
    order = np.random.default_rng(1).permutation(9)
    np.testing.assert_array_equal(draw(logits[order], sampler, 5, problems[order], positions[order]), together[order])
    np.testing.assert_array_equal(draw(logits, sampler, 5, problems, positions, batch=1), together)


@pytest.mark.parametrize("kind", daily(["greedy", "top_p"], SAMPLERS))
def test_draws_and_noise_are_the_same_with_x64(kind):
    sampler, logits, keys = SAMPLERS[kind], random_logits(64), (5, np.arange(64), np.arange(64) * 7)
    narrow, noise = draw(logits, sampler, *keys), np.asarray(NOISE(*integers(1, 2, 3), V))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(draw(logits, sampler, *keys), narrow)
        assert same_bits(NOISE(*integers(1, 2, 3), V), noise)


@pytest.mark.parametrize(
    "sampler",
    daily(
        [SAMPLERS[kind] for kind in ("temperature", "top_k", "top_p")],
        [make_sampler("temperature", 1.0), *(SAMPLERS[kind] for kind in ("temperature", "top_k", "top_p"))],
    ),
    ids=lambda s: f"{s.kind}-{s.temperature}",
)
def test_draws_follow_the_filtered_softmax(sampler):
    logits = np.full((1, V), -1e9, np.float32)
    logits[0, :8] = [0.3, 2.0, -1.0, 1.1, 0.0, 1.6, -0.4, 0.9]
    count = 20000
    draws = draw(np.repeat(logits, count, 0), sampler, 0, np.arange(count) % 7, np.arange(count))
    kept = support(logits / np.float32(sampler.temperature), sampler)[0]
    wanted = scipy.special.softmax(np.where(kept, logits[0].astype(float) / sampler.temperature, -np.inf)) * count
    kept = kept & (wanted > 0)  # without a cut the far tokens may be drawn, and never are
    found = np.bincount(draws, minlength=V)
    assert not found[~kept].any()
    # The noise is fixed, and so is the p value: this can not fail by chance.
    assert scipy.stats.chisquare(found[kept], wanted[kept]).pvalue > 0.01


def transformers_support(logits, sampler):
    torch = pytest.importorskip("torch")
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    warp = TopKLogitsWarper(sampler.top_k) if sampler.top_k else TopPLogitsWarper(sampler.top_p)
    return torch.isfinite(warp(None, torch.tensor(np.asarray(logits)))).numpy()


def support(logits, sampler):
    return np.asarray(KEPT(logits, sampler))


CUTS = {
    f"{sampler.kind}-{sampler.top_k or sampler.top_p}": sampler
    for sampler in (
        *(make_sampler("top_k", top_k=k) for k in (1, 2, 5, 36, 37, 1000)),
        *(make_sampler("top_p", top_p=p) for p in (1e-9, 0.1, 0.5, 0.9, 0.999, 1.0)),
    )
}


@pytest.mark.parametrize("cut", CUTS)
def test_supports_are_those_of_transformers(cut):
    logits = random_logits(200)
    np.testing.assert_array_equal(support(logits, CUTS[cut]), transformers_support(logits, CUTS[cut]))


@pytest.mark.parametrize("cut", daily(["top_k", "top_p"], ["top_k", "top_p", *CUTS]))
def test_what_is_drawn_is_of_the_support(cut):
    logits, sampler = random_logits(200), (SAMPLERS | CUTS)[cut]
    drawn = draw(logits, sampler, 0, np.zeros(200), np.arange(200))
    assert support(logits / np.float32(sampler.temperature), sampler)[np.arange(200), drawn].all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=6, max_size=6), st.integers(1, 7), st.sampled_from([0.15, 0.35, 0.65, 0.95])
)
def test_ties_stay_together(values, k, p):
    """Of equal logits all are kept or none: which of them a sort puts first must not decide what can be drawn."""
    logits = np.asarray([values], np.float32)
    top_k = make_sampler("top_k", top_k=k)
    np.testing.assert_array_equal(support(logits, top_k), transformers_support(logits, top_k))
    kept = support(logits, make_sampler("top_p", top_p=p))[0]
    probabilities = scipy.special.softmax(logits[0].astype(np.float64))
    above = np.asarray([probabilities[logits[0] > value].sum() for value in logits[0]])
    clear = np.abs(above - p) > 1e-6
    np.testing.assert_array_equal(kept[clear], (above < p)[clear])


def test_top_p_1_keeps_a_long_flat_tail():
    """Summed from the top, probabilities reach 1 in fp32 before the last of a large vocabulary."""
    assert support(random_logits(4, spread=4.0, vocab=256_000), make_sampler("top_p", top_p=1.0)).all()


@pytest.mark.parametrize("sampler", [make_sampler("temperature", 1e-4), make_sampler("top_k", top_k=1)])
def test_limits_that_are_greedy(sampler):
    logits = random_logits(50)
    np.testing.assert_array_equal(draw(logits, sampler, 3, np.arange(50), np.arange(50)), logits.argmax(1))


@pytest.mark.parametrize("kind", daily(["top_p"], ["temperature", "top_p"]))
def test_16_bit_logits_are_scaled_in_fp32(kind):
    logits, sampler = random_logits(300, np.float16, spread=8.0), SAMPLERS[kind]
    keys = (3, np.arange(300), np.arange(300))
    np.testing.assert_array_equal(draw(logits, sampler, *keys), draw(logits.astype(np.float32), sampler, *keys))


# What is in effect is what is recorded.


@pytest.mark.parametrize(
    ("kind", "options", "record"),
    [
        ("greedy", {}, (1.0, None, None)),
        ("temperature", {}, (0.7, None, None)),
        ("temperature", {"temperature": 1.5}, (1.5, None, None)),
        ("top_k", {}, (0.7, 50, None)),
        ("top_k", {"temperature": 1.0, "top_k": 3}, (1.0, 3, None)),
        ("top_p", {}, (1.0, None, 0.9)),
        ("top_p", {"temperature": 0.6, "top_p": 0.95}, (0.6, None, 0.95)),
    ],
)
def test_the_record_holds_every_setting_in_effect(kind, options, record):
    names = ("temperature", "top_k", "top_p")
    sampler = make_sampler(kind, **options)
    assert sampler.to_json() == {"sampler": kind} | dict(zip(names, record, strict=True))
    assert make_sampler(kind, **{n: v for n, v in zip(names, record, strict=True) if v and kind != "greedy"}) == sampler


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("nucleus", {}, "unknown sampler 'nucleus'.*known: greedy, temperature, top_k, top_p"),
        ("greedily", {}, "greedy"),
        ("greedy", {"temperature": 0.7}, "--temperature=0.7 has no effect with --sampler=greedy"),
        ("greedy", {"top_k": 50}, "--top_k=50 has no effect"),
        ("temperature", {"top_k": 50}, "--top_k=50 has no effect"),
        ("top_k", {"top_p": 0.9}, "--top_p=0.9 has no effect"),
        ("top_p", {"top_k": 50}, "--top_k=50 has no effect"),
        ("temperature", {"temperature": 0.0}, "temperature 0.0 does not lie in .*; use --sampler=greedy"),
        ("temperature", {"temperature": -1.0}, "does not lie in"),
        ("temperature", {"temperature": float("nan")}, "does not lie in"),
        ("temperature", {"temperature": float("inf")}, "temperature inf does not lie in"),
        ("top_k", {"top_k": 0}, "top_k 0 must be at least 1"),
        ("top_p", {"top_p": 0.0}, "must lie in"),
        ("top_p", {"top_p": 1.1}, "must lie in"),
        ("top_p", {"top_p": float("nan")}, "must lie in"),
    ],
)
def test_settings_that_are_refused(kind, options, message):
    with pytest.raises(UserError, match=message):
        make_sampler(kind, **options)


def test_every_kind_has_a_default():
    assert [make_sampler(kind).kind for kind in KINDS] == list(KINDS)


@pytest.mark.parametrize("kind", daily(["temperature"], ["greedy", "temperature"]))
def test_both_arms_meet_the_same_noise(kind):
    """In fp32 the arms' logits differ by roundings; with one noise for both they draw the same tokens."""
    arms = small_arms("mistral", "fp32", kind, layers=1)
    state = arms.prepare(small_state("mistral", "fp32", layers=1))
    runs = {}
    for seed in (0, 1):
        layout, tokens, rows = set_up(make_prompts((7, 3, 5)), problems=[4, 9, 2], seed=seed)
        runs[seed] = taken(arms.run_cached(state, tokens, rows, layout), layout)
        assert taken(step_uncached(arms, state, tokens, rows, layout), layout) == runs[seed]
    assert (runs[0] == runs[1]) == (kind == "greedy")


@given(st.integers(0, 2**32 - 1), st.sampled_from(["float16", "bfloat16", "float32"]))
@settings(max_examples=50, deadline=None)
def test_the_first_of_the_largest_is_taken(seed, dtype):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.integers(-3, 3, (4, 11)) * rng.choice([1.0, 1e30]), dtype)  # overflows to infinity in fp16
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    np.testing.assert_array_equal(first_argmax(x), jnp.argmax(x, axis=-1))
    assert first_argmax(x).dtype == jnp.int32
