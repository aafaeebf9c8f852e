"""Intervals and tests against scipy and published examples; reference metrics against scipy and first principles."""

import dataclasses
import json
import math

import numpy as np
import pytest
import reference_metrics as metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from scipy.special import softmax

from jaxkv.reporting import shares, statistics
from jaxkv.reporting.format import format_counted_share, format_share
from jaxkv.reporting.metrics import free_running


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(0, 1), st.sampled_from([0.9, 0.95, 0.99]))
def test_the_interval_of_a_share_matches_scipy(total, fraction, confidence):
    count = round(fraction * total)
    theirs = stats.binomtest(count, total).proportion_ci(confidence, "exact")
    found = statistics.clopper_pearson(count, total, confidence)
    np.testing.assert_allclose(found, (theirs.low, theirs.high), atol=1e-9)


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0, 1), st.floats(0.01, 0.99))
def test_exact_tests_of_a_share_match_scipy(total, fraction, threshold):
    count = round(fraction * total)
    for ours, side in ((statistics.share_p_above, "greater"), (statistics.share_p_below, "less")):
        theirs = stats.binomtest(count, total, threshold, side).pvalue
        assert ours(count, total, threshold) == pytest.approx(theirs, abs=1e-9)


def test_zero_bound_is_exact_and_near_the_rule_of_three():
    for total in (1, 12, 100, 100000):
        bound = statistics.zero_upper_bound(total)
        assert (1 - bound) ** total == pytest.approx(0.05)
    assert statistics.zero_upper_bound(1000) == pytest.approx(3 / 1000, rel=5e-3)


def test_the_sign_test_is_the_binomial_sum():
    """Eight in nine conditions; McNemar's of 6 discordant pairs, 5 one way: p = 2 * (1 + 6) / 64."""
    found = [statistics.sign_test(*counts) for counts in ((8, 1), (9, 0), (0, 0), (5, 1), (1, 5))]
    assert found == pytest.approx([0.0390625, 2 / 512, 1.0, 14 / 64, 14 / 64])


def test_sign_flip_of_one_condition_is_mcnemar():
    for first, second in ((5, 1), (12, 2), (1, 5), (3, 3), (0, 0)):
        leads = [1] * first + [-1] * second + [0] * 20
        sides = statistics.sign_flip(leads), statistics.sign_flip([-lead for lead in leads])
        assert min(1, 2 * min(sides)) == pytest.approx(statistics.sign_test(first, second))


def test_sign_flip_matches_scipy_over_conditions():
    """Leads over three conditions, all 2^9 signs."""
    leads = np.array([3, 2, -1, 0, 1, 1, -2, 3, 2])
    theirs = stats.permutation_test(
        (leads,), np.sum, permutation_type="samples", n_resamples=np.inf, alternative="greater"
    ).pvalue
    assert statistics.sign_flip(leads.tolist()) == pytest.approx(theirs)


def test_paired_interval_is_that_of_t():
    """Textbook differences 1, 2, 3: mean 2, t with 2 degrees of freedom 4.303, standard error 3^-0.5."""
    low, high = statistics.paired_interval([2, 4, 6], [1, 2, 3])
    np.testing.assert_allclose([low, high], [2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5], atol=1e-3)
    assert statistics.paired_interval([1], [0]) is None
    first, second = np.random.default_rng(0).exponential(size=(2, 40))
    theirs = stats.ttest_rel(first, second).confidence_interval()
    np.testing.assert_allclose(statistics.paired_interval(first, second), (theirs.low, theirs.high))


def test_paired_share_is_that_of_bonett_and_price_2012():
    """Airway hyper-responsiveness (Bentur et al. 2009), 1 and 7 of 21 discordant: -0.508 to -0.013 with a normal law.

    As in Fagerland, Lydersen & Laake 2014.
    """
    found = statistics.estimate_paired_share([1.0] + [-1.0] * 7 + [0.0] * 13)
    normal = dataclasses.replace(found, freedom=1e12)  # Student's t is the normal law
    np.testing.assert_allclose(normal.interval(), (-0.508, -0.013), atol=5e-4)
    low, high = found.interval()
    assert low < -0.508
    assert high > -0.013


def test_a_discordant_pair_widens_the_interval():
    widths = []
    for discordant in range(4):
        low, high = statistics.estimate_paired_share([1.0] * discordant + [0.0] * (200 - discordant)).interval()
        widths.append(high - low)
    assert widths == sorted(widths)
    assert 0.027 < widths[0] < widths[1] < widths[2]


def test_few_problems_that_lean_one_way_decide_no_sooner_than_exactly():
    for count in range(1, 9):
        low, _ = statistics.estimate_paired_share([1.0] * count).interval()
        assert low <= 0 or statistics.sign_test(count, 0) <= 0.05


def test_share_of_control_is_that_of_t_and_of_the_exact_bound():
    """Scores (2, 3, 4, 5, 6) / (1, 2, 3, 4, 5): R = 4/3, x - R c = 2/3, 1/3, 0, -1/3, -2/3, t of 4 degrees 2.776."""
    ones = np.ones(5)
    low, _ = statistics.share_of_control((np.arange(2, 7), ones), (np.arange(1, 6), ones))
    half = 2.7764 * (10 / 9 / 4) ** 0.5 / 5**0.5 / 3
    bound = 1 - 0.05**0.2
    assert low == pytest.approx(4 / 3 - max(half, bound / 3), abs=1e-4)
    mixed = np.array([3, 1, 4, 3, 6])  # some gain and some lose: no exact bound
    ends = statistics.share_of_control((mixed, ones), (np.arange(1, 6), ones))
    half = 2.7764 * np.std(mixed - 17 / 15 * np.arange(1, 6), ddof=1) / 5**0.5 / 3
    np.testing.assert_allclose(ends, (17 / 15 - half, 17 / 15 + half), atol=1e-4)
    sizes = np.array([1, 2, 1, 3, 2])
    assert statistics.share_of_control((sizes / 2, sizes), (sizes / 2, sizes)) == pytest.approx(
        (1 - bound * 2, 1 + bound * 2)
    )
    assert statistics.share_of_control(([1], [1]), ([1], [1])) is None
    assert statistics.share_of_control(([1, 0], [1, 1]), ([0, 0], [1, 1])) is None


def test_a_mean_is_student_s_on_the_log():
    """Clusters of one size: the delta method's error of the log is the coefficient of variation over n^0.5."""
    sums = np.array([1.0, 2.0, 4.0, 5.0])
    low, high = statistics.estimate_mean(sums, np.full(4, 10)).interval()
    error = sums.std(ddof=1) / sums.mean() / 2
    assert low == pytest.approx(0.3 * math.exp(-stats.t.ppf(0.975, 3) * error))
    assert high == pytest.approx(0.3 * math.exp(stats.t.ppf(0.995, 3) * error))
    assert statistics.estimate_mean([1, 2], [1, 1]) is None
    assert statistics.estimate_mean([0, 0, 0], [1, 1, 1]).interval() == (0, 0)
    with pytest.raises(ValueError, match="at least one token"):
        statistics.estimate_mean([0], [0])


def test_a_ratio_of_alike_figures_has_no_error():
    sums, tokens = np.array([1.0, 5.0, 2.0]), np.array([10, 20, 30])
    assert statistics.estimate_ratio((3 * sums, tokens), (sums, tokens)).interval() == pytest.approx((3, 3))
    swapped = [statistics.estimate_ratio(*pair).interval() for pair in (
        ((sums, tokens), (tokens, tokens)), ((tokens, tokens), (sums, tokens)),
    )]  # fmt: skip
    assert swapped[0] == pytest.approx([1 / end for end in reversed(swapped[1])])
    assert statistics.estimate_ratio((sums, tokens), (0 * sums, tokens)) is None


@pytest.mark.parametrize("make", [statistics.estimate_mean, statistics.estimate_signed_mean])
def test_a_test_and_its_interval_agree(make):
    found = make([1.0, 2.0, 4.0, 5.0], np.full(4, 10))
    low, high = found.interval()
    assert (found.p_above(low), found.p_below(high)) == pytest.approx((0.025, 0.025))
    assert found.p_above(0.9 * low) < 0.025 < found.p_above(1.1 * low)
    again = statistics.read_estimate(json.loads(json.dumps(statistics.describe(0.0, found))))
    assert again == found


def test_tokens_of_alike_sequences_are_worth_less():
    """Korn & Graubard 1998 by hand: 0 and 10 of 10 in turn, design effect 10 * 4 / 3, Student's t of 3 degrees."""
    counts, sizes = [0, 10, 0, 10], [10] * 4
    worth = 40 / (10 * 4 / 3) / (stats.t.ppf(0.975, 3) / stats.norm.ppf(0.975)) ** 2
    assert statistics.effective_trials(counts, sizes) == pytest.approx(worth)
    exact = statistics.clopper_pearson(worth / 2, worth)
    assert statistics.clustered_share_interval(counts, sizes) == pytest.approx(exact)
    assert statistics.effective_trials([3], [10]) == 1  # one sequence does not say how sequences differ


def test_a_zero_is_worth_its_sequences():
    """None and all of the tokens do not say how they cluster: it may be by whole sequences."""
    for counts in ([0, 0, 0], [10, 20, 0]):
        assert statistics.effective_trials(counts, [10, 20, 0]) == 2  # one has no token
    entry = shares.clustered_share([0, 0, 0], [10, 20, 0])
    assert entry["upper_bound"] == pytest.approx(1 - 0.05**0.5)
    assert format_share(entry, "steps") == "0 of 30 steps in 2 sequences (95 % upper bound 78 % of sequences)"
    turned = shares.take_rest(entry)
    assert format_counted_share(turned) == "30 of 30 in 2 sequences (95 % lower bound 22 % of sequences)"
    assert shares.take_rest(turned)["interval"] == pytest.approx(entry["interval"])
    assert format_share(shares.take_rest(turned)) == format_share(entry)
    assert format_share(shares.clustered_share([0, 0], [1, 1])) == "0 of 2 (95 % upper bound 78 %)"


def test_expected_divergence_of_one_percent_over_256_tokens():
    assert statistics.expected_divergence(0.01, [256]) == pytest.approx(0.9237, abs=1e-4)
    assert statistics.expected_divergence(0.01, [256, 0]) == pytest.approx(0.9237 / 2, abs=1e-4)
    assert statistics.expected_divergence(1e-20, [256]) == pytest.approx(2.56e-18)
    assert statistics.expected_divergence(1.0, [3]) == 1.0


@pytest.mark.parametrize(("count", "total"), [(0, 0), (-1, 3), (4, 3)])
def test_impossible_shares_are_refused(count, total):
    with pytest.raises(ValueError, match="not a share"):
        statistics.clopper_pearson(count, total)


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
    if scale == 0:
        assert not any(result[name].any() for name in ("flip", "kl", "kl_reverse", "js"))  # exact zeros


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
        assert tuple(free_running(*pair).values()) == expected
