"""Intervals and tests against scipy and published examples; reference metrics against scipy and first principles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from scipy.special import softmax

from jaxkv.analysis import metrics, statistics


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(0, 1), st.sampled_from([0.9, 0.95, 0.99]))
def test_share_intervals_match_scipy(total, fraction, confidence):
    count = round(fraction * total)
    test = stats.binomtest(count, total)
    for ours, name in ((statistics.wilson, "wilson"), (statistics.clopper_pearson, "exact")):
        theirs = test.proportion_ci(confidence, name)
        np.testing.assert_allclose(ours(count, total, confidence), (theirs.low, theirs.high), atol=1e-9)


def test_wilson_and_exact_match_newcombe_1998():
    # Newcombe, Statistics in Medicine 17 (1998), table I: 81/263, 15/148, 0/20, 1/29.
    for (count, total), interval in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0000, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }.items():
        np.testing.assert_allclose(statistics.wilson(count, total), interval, atol=5e-5)
    np.testing.assert_allclose(statistics.clopper_pearson(81, 263), (0.2527, 0.3676), atol=5e-5)
    np.testing.assert_allclose(statistics.clopper_pearson(0, 20), (0.0, 0.1684), atol=5e-5)


def test_zero_bound_is_exact_and_near_the_rule_of_three():
    for total in (1, 12, 100, 100000):
        bound = statistics.zero_upper_bound(total)
        assert (1 - bound) ** total == pytest.approx(0.05)
    assert statistics.zero_upper_bound(1000) == pytest.approx(3 / 1000, rel=5e-3)


def test_sign_test_of_eight_in_nine_conditions():
    assert statistics.sign_test(8, 1) == pytest.approx(0.0390625)
    assert statistics.sign_test(9, 0) == pytest.approx(2 / 512)
    assert statistics.sign_test(0, 0) == 1.0


def test_mcnemar_matches_the_binomial_sum():
    # 6 discordant pairs, 5 one way: p = 2 * (1 + 6) / 64.
    assert statistics.mcnemar_exact(5, 1) == statistics.mcnemar_exact(1, 5) == pytest.approx(14 / 64)
    assert statistics.mcnemar_exact(12, 2) == pytest.approx(2 * stats.binom.cdf(2, 14, 0.5))


def test_paired_bootstrap_matches_scipy_and_its_seed():
    generator = np.random.default_rng(1)
    first, second = generator.random(150) < 0.6, generator.random(150) < 0.5
    ours = statistics.paired_bootstrap(first, second)
    theirs = stats.bootstrap(
        (first.astype(float) - second,), np.mean, n_resamples=4000, method="percentile", rng=3
    ).confidence_interval
    np.testing.assert_allclose(ours, theirs, atol=0.012)
    assert ours == statistics.paired_bootstrap(first, second) != statistics.paired_bootstrap(first, second, seed=1)


def test_paired_interval_is_that_of_t_where_problems_are_few():
    """Textbook differences 1, 2, 3: mean 2, t with 2 degrees of freedom 4.303, standard error 3^-0.5."""
    low, high = statistics.paired_interval([2, 4, 6], [1, 2, 3])
    np.testing.assert_allclose([low, high], [2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5], atol=1e-3)
    assert statistics.paired_interval([1], [0]) is None
    many = np.random.default_rng(0).exponential(size=400)
    low, high = statistics.paired_interval(many, np.zeros(400))
    inner = statistics.paired_bootstrap(many, np.zeros(400))
    assert low <= inner[0] < inner[1] <= high
    assert high - low < 1.1 * (inner[1] - inner[0])


@pytest.mark.parametrize("problems", [16, 40])
def test_ratio_interval_covers_where_problems_are_few(problems):
    """Control 90 % right, 7 % of these lost, half of the wrong ones gained."""
    generator, ones, draws = np.random.default_rng(0), np.ones(problems), 400
    true = (0.9 * 0.93 + 0.1 * 0.5) / 0.9
    covered = 0
    for _ in range(draws):
        control = generator.random(problems) < 0.9
        changed = generator.random(problems) < np.where(control, 0.93, 0.5)
        low, high = statistics.ratio_interval((changed, ones), (control, ones))
        covered += low <= true <= high
    assert covered >= 0.93 * draws


def test_ratio_interval_is_that_of_t_and_of_the_exact_bound():
    """Scores (2, 3, 4, 5, 6) / (1, 2, 3, 4, 5): R = 4/3, x - R c = 2/3, 1/3, 0, -1/3, -2/3, t of 4 degrees 2.776."""
    ones = np.ones(5)
    low, _ = statistics.ratio_interval((np.arange(2, 7), ones), (np.arange(1, 6), ones))
    half = 2.7764 * (10 / 9 / 4) ** 0.5 / 5**0.5 / 3
    bound = 1 - 0.05**0.2
    assert low == pytest.approx(4 / 3 - max(half, bound / 3), abs=1e-4)
    mixed = np.array([3, 1, 4, 3, 6])  # some gain and some lose: no exact bound
    ends = statistics.ratio_interval((mixed, ones), (np.arange(1, 6), ones))
    half = 2.7764 * np.std(mixed - 17 / 15 * np.arange(1, 6), ddof=1) / 5**0.5 / 3
    np.testing.assert_allclose(ends, (17 / 15 - half, max(17 / 15 + half, ends[1])), atol=1e-4)
    sizes = np.array([1, 2, 1, 3, 2])
    assert statistics.ratio_interval((sizes / 2, sizes), (sizes / 2, sizes)) == pytest.approx(
        (1 - bound * 2, 1 + bound * 2)
    )
    assert statistics.ratio_interval(([1], [1]), ([1], [1])) is None
    assert statistics.ratio_interval(([1, 0], [1, 1]), ([1, 0], [1, 1])) is None


def test_cluster_bootstrap_is_wider_than_independent_tokens_and_covers():
    generator = np.random.default_rng(0)
    covered = naive = 0
    for trial in range(100):
        rates = generator.beta(0.5, 4.5, size=40)  # Mean 0.1, strongly clustered.
        counts = generator.binomial(100, rates)
        low, high = statistics.cluster_bootstrap(counts, np.full(40, 100), seed=trial, resamples=500)
        covered += low <= 0.1 <= high
        low, high = statistics.wilson(int(counts.sum()), 4000)
        naive += low <= 0.1 <= high
    assert covered >= 85
    assert naive < 60


def test_cluster_bootstrap_is_a_ratio_of_sums():
    low, high = statistics.cluster_bootstrap([1, 0], [1, 99])
    assert (low, high) == (0.0, 1.0)
    assert statistics.cluster_bootstrap([2, 2], [10, 10]) == (0.2, 0.2)
    with pytest.raises(ValueError, match="at least one token"):
        statistics.cluster_bootstrap([0], [0])


def test_expected_divergence_of_one_percent_over_256_tokens():
    assert statistics.expected_divergence(0.01, [256]) == pytest.approx(0.9237, abs=1e-4)
    assert statistics.expected_divergence(0.01, [256, 0]) == pytest.approx(0.9237 / 2, abs=1e-4)
    assert statistics.expected_divergence(1e-20, [256]) == pytest.approx(2.56e-18)
    assert statistics.expected_divergence(1.0, [3]) == 1.0


@pytest.mark.parametrize(("count", "total"), [(0, 0), (-1, 3), (4, 3)])
def test_impossible_shares_are_refused(count, total):
    for interval in (statistics.wilson, statistics.clopper_pearson):
        with pytest.raises(ValueError, match="not a share"):
            interval(count, total)


LOGITS = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(2, 9)), elements=st.floats(-60, 60, width=32))


@settings(deadline=None)
@given(LOGITS, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-3, 1.0, 30.0]))
def test_metrics_match_first_principles(logits, seed, scale):
    noise = np.random.default_rng(seed).normal(size=logits.shape) * scale
    other = (logits + noise).astype(np.float32)
    result = metrics.compare_logits(logits, other)
    p, q = softmax(logits.astype(np.float64), axis=1), softmax(other.astype(np.float64), axis=1)
    np.testing.assert_allclose(result["kl"], [stats.entropy(*pair) for pair in zip(p, q, strict=True)], atol=1e-12)
    np.testing.assert_allclose(
        result["kl_reverse"], [stats.entropy(*pair) for pair in zip(q, p, strict=True)], atol=1e-12
    )
    middle = (p + q) / 2  # scipy's own jensenshannon is the root of this, NaN where it rounds below 0
    js = [(stats.entropy(a, m) + stats.entropy(b, m)) / 2 for a, b, m in zip(p, q, middle, strict=True)]
    np.testing.assert_allclose(result["js"], js, atol=1e-12)
    difference = np.abs(other.astype(np.float64) - logits)
    np.testing.assert_array_equal(result["max_abs"], difference.max(1))
    np.testing.assert_allclose(result["mean_abs"], difference.mean(1), rtol=1e-12)
    np.testing.assert_array_equal(result["flip"], logits.argmax(1) != other.argmax(1))
    ordered = np.sort(logits.astype(np.float64), axis=1)
    np.testing.assert_array_equal(result["margin"], ordered[:, -1] - ordered[:, -2])
    assert (result["kl"] >= 0).all()
    assert ((result["js"] >= 0) & (result["js"] <= np.log(2) + 1e-12)).all()
    # The claim behind "flips within the perturbation".
    assert not (result["flip"] & (result["margin"] > 2 * result["max_abs"])).any()


@settings(deadline=None)
@given(LOGITS)
def test_identical_logits_give_exact_zeros(logits):
    result = metrics.compare_logits(logits, logits.copy())
    for name in ("flip", "kl", "kl_reverse", "js", "max_abs", "mean_abs"):
        assert not result[name].any()
    assert result["bit_equal"].all()


def test_tiny_divergences_keep_their_digits():
    generator = np.random.default_rng(0)
    logits, direction = generator.normal(size=(1, 50)) * 3, generator.normal(size=(1, 50))
    p = softmax(logits)
    variance = (p * direction**2).sum() - (p * direction).sum() ** 2
    for scale in (1e-3, 1e-5, 1e-7):
        result = metrics.compare_logits(logits, logits + scale * direction)
        assert result["kl"][0] == pytest.approx(scale**2 * variance / 2, rel=20 * scale + 1e-6)
        assert result["js"][0] == pytest.approx(scale**2 * variance / 8, rel=20 * scale + 1e-6)


def test_far_apart_distributions_stay_finite():
    result = metrics.compare_logits(np.array([[0.0, 2000.0]]), np.array([[2000.0, 0.0]]))
    assert result["kl"][0] == pytest.approx(2000)
    assert result["js"][0] == pytest.approx(np.log(2))
    assert result["flip"][0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("both", [True, False])
def test_a_non_finite_logit_is_never_agreement(value, both):
    clean = np.arange(6, dtype=np.float16).reshape(2, 3)
    bad = clean.copy()
    bad[1, 1] = value
    result = metrics.compare_logits(bad if both else clean, bad)
    assert result["flip"].tolist() == [False, True]
    assert result["bit_equal"].tolist() == [True, False]
    for name in ("kl", "kl_reverse", "js", "max_abs", "mean_abs", "margin"):
        assert np.isnan(result[name]).tolist() == [False, True]


def test_bits_and_ties():
    result = metrics.compare_logits(np.float16([[0.0, 1.0, 1.0]]), np.float16([[-0.0, 1.0, 1.0]]))
    assert not result["bit_equal"][0]
    assert result["margin"][0] == result["max_abs"][0] == 0
    with pytest.raises(ValueError, match="dtypes"):
        metrics.compare_logits(np.zeros((1, 2), np.float16), np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="V >= 2"):
        metrics.compare_logits(np.zeros((1, 1)), np.zeros((1, 1)))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [], (False, None, 0, 0)),
        ([1, 2], [1, 2], (False, None, 0, 0)),
        ([1, 2, 3, 4], [1, 5, 3, 6], (True, 1, 1, 2)),
        ([1, 2], [1, 2, 3, 4], (True, 2, 1, 1)),
        ([], [7], (True, 0, 0, 0)),
        ([1, 2, 3], [9], (True, 0, 2, 2)),
    ],
)
def test_free_running(first, second, expected):
    for pair in ((first, second), (second, first)):
        assert tuple(metrics.free_running(*pair).values()) == expected
