"""Intervals and tests. All probabilities are shares in [0, 1]; all tests are two-sided.

Tokens of one sequence are not independent (a close call tends to come near another), so intervals of per-token figures
resample whole sequences.
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

RESAMPLES = 4000
Array = npt.ArrayLike


def wilson(count: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a share (Wilson 1927, eq. as in Brown, Cai & DasGupta 2001, sec. 3.1.1)."""
    _check(count, total)
    z = float(stats.norm.ppf((1 + confidence) / 2))
    center = (count + z * z / 2) / (total + z * z)
    half = z / (total + z * z) * float(np.sqrt(count * (total - count) / total + z * z / 4))
    return (0.0 if count == 0 else center - half, 1.0 if count == total else center + half)


def clopper_pearson(count: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of a share (Clopper & Pearson 1934); covers at least `confidence` at any true share."""
    _check(count, total)
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else float(stats.beta.ppf(tail, count, total - count + 1))
    high = 1.0 if count == total else float(stats.beta.ppf(1 - tail, count + 1, total - count))
    return low, high


def zero_upper_bound(total: int, confidence: float = 0.95) -> float:
    """Largest share that still gives 0 of `total` with probability 1 - confidence: 1 - (1 - confidence)^(1/total).

    One-sided and exact for independent trials; the "rule of three", 3/total, is its approximation (Hanley &
    Lippman-Hand 1983).
    """
    _check(0, total)
    return float(-np.expm1(np.log1p(-confidence) / total))


def sign_test(positive: int, negative: int) -> float:
    """p-value that signs are fair coins, ties left out: 8 against 1 gives 0.039. The conditions must be independent."""
    if positive + negative == 0:
        return 1.0
    return float(stats.binomtest(positive, positive + negative, 0.5).pvalue)


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """p-value that two arms on the same problems are equally often right (McNemar 1947, exact binomial form).

    Args:
      only_first: problems that the first arm alone got right.
      only_second: problems that the second arm alone got right.
    """
    return sign_test(only_first, only_second)


@functools.lru_cache(maxsize=2)
def _draws(clusters: int, resamples: int, seed: int) -> np.ndarray:
    """How often each resample drew each cluster, [resamples, clusters]."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(clusters, np.full(clusters, 1 / clusters), size=resamples).astype(np.float64)


def cluster_bootstrap(
    sums: Array, sizes: Array, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of sum(sums) / sum(sizes), whole clusters resampled (Davison & Hinkley 1997, 3.8).

    Args:
      sums: per cluster (sequence), the sum over its tokens, [clusters].
      sizes: per cluster, its number of tokens, [clusters]; not all zero.

    Returns:
      Low and high end; equal ends if all clusters are alike, which says little when they are few.
    """
    numerator, denominator = np.asarray(sums, np.float64), np.asarray(sizes, np.float64)
    if numerator.shape != denominator.shape or numerator.ndim != 1 or denominator.sum() <= 0:
        raise ValueError("sums and sizes must be vectors of one length, with at least one token")
    draws = _draws(len(numerator), resamples, seed)
    totals = draws @ denominator
    ratios = (draws @ numerator)[totals > 0] / totals[totals > 0]
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_bootstrap(
    first: Array, second: Array, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of mean(first - second), problems resampled with both arms together.

    Args:
      first: score of the first arm per problem, [problems].
      second: score of the second arm on the same problems, [problems].
    """
    difference = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    return cluster_bootstrap(
        difference, np.ones(len(difference)), confidence=confidence, resamples=resamples, seed=seed
    )


def paired_interval(first: Array, second: Array, confidence: float = 0.95) -> tuple[float, float] | None:
    """`paired_bootstrap` widened to Student's t; None for fewer than two problems.

    Of four problems that all lean one way every resample leans that way too, though chance alone does it one time in
    eight: a percentile bootstrap of few problems is far too narrow.
    """
    difference = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    n = len(difference)
    if n < 2:
        return None
    low, high = paired_bootstrap(first, second, confidence=confidence)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * float(difference.std(ddof=1)) / n**0.5
    return min(low, float(difference.mean()) - half), max(high, float(difference.mean()) + half)


def expected_divergence(rate: float, lengths: Sequence[int]) -> float:
    """Share of sequences with at least one flip if flips were independent: mean over sequences of 1 - (1 - rate)^n."""
    if rate >= 1:
        return float(np.mean([n > 0 for n in lengths]))
    return float(np.mean(-np.expm1(np.asarray(lengths, np.float64) * np.log1p(-rate))))


def _check(count: int, total: int) -> None:
    if total < 1 or not 0 <= count <= total:
        raise ValueError(f"{count} of {total} is not a share")
