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


def wilson(count: float, total: int, confidence: float = 0.95) -> tuple[float, float]:
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


def mcnemar_mid_p(only_first: int, only_second: int) -> float:
    """One-sided mid-p that the first arm is not the better one: P(X > b) + P(X = b) / 2 with X binomial(b + c, 1/2).

    Never 0 or 1, so that it can be turned into a z score (Fagerland, Lydersen & Laake 2013, sec. 2).
    """
    total = only_first + only_second
    coin = stats.binom(total, 0.5)
    return float(coin.sf(only_first) + coin.pmf(only_first) / 2)


def stouffer(tables: Sequence[tuple[int, int]]) -> float | None:
    """Two-sided p-value of McNemar tables put together by Stouffer's z, weighted by the root of their discordant pairs.

    Tables without a discordant pair say nothing and are left out; None if none is left. The tables must be independent,
    which conditions on the same problems are not quite.

    Args:
      tables: (only first right, only second right) of each condition.
    """
    kept = [table for table in tables if sum(table)]
    if not kept:
        return None
    weights = np.sqrt([sum(table) for table in kept])
    up = float(stats.combine_pvalues([mcnemar_mid_p(*t) for t in kept], method="stouffer", weights=weights).pvalue)
    return min(1.0, 2 * min(up, 1 - up))


def fisher_exact(table: Sequence[Sequence[int]]) -> float:
    """p-value that the rows and columns of a 2 x 2 table are independent (Fisher's exact test, two-sided)."""
    return float(stats.fisher_exact(table).pvalue)


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


def ratio_bootstrap(
    first: tuple[Array, Array], second: tuple[Array, Array], *, confidence: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of a ratio of two means over the same clusters, resampled together.

    Args:
      first: per cluster the sum over its tokens, and its number of tokens, both [clusters].
      second: the same of the denominator; positive.

    Returns:
      Low and high end; None for one cluster, or where a resample has a mean of 0 below.
    """
    (a, n), (b, m) = (tuple(np.asarray(x, np.float64) for x in pair) for pair in (first, second))
    if len(a) < 2:
        return None
    draws = _draws(len(a), resamples, 0)
    below = (draws @ b) / (draws @ m)
    if not np.all(below > 0):
        return None
    low, high = np.quantile((draws @ a) / (draws @ n) / below, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def ratio_interval(
    first: tuple[Array, Array], second: tuple[Array, Array], confidence: float = 0.95
) -> tuple[float, float] | None:
    """`ratio_bootstrap` of two mean scores widened to Student's t and to the exact bound; None where it is None.

    With x and c the scores of a problem, R their ratio: the standard error is that of x - R c over the mean of c (the
    delta method; Cochran 1977, ch. 6), its sd over n^0.5. A percentile bootstrap of few problems is too narrow, and
    where no problem gained (or none lost) it ends at or near R. There a share b of problems, the exact bound, could
    still gain, each at most its whole score, which moves the ratio by at most b over the mean share of c.

    Args:
      first: per problem the points, and how many there are to have, both [problems].
      second: the same of the denominator.

    Returns:
      Low and high end; the low one may be below 0.
    """
    found = ratio_bootstrap(first, second, confidence=confidence)
    if found is None:
        return None
    (a, n), (b, m) = (tuple(np.asarray(x, np.float64) for x in pair) for pair in (first, second))
    base, problems = float(b.sum() / m.sum()), len(a)
    ratio = float(a.sum() / n.sum()) / base
    spread = (a - ratio * base * n) / n.mean() - ratio * (b - base * m) / m.mean()  # x - R c where all have one point
    half = float(stats.t.ppf((1 + confidence) / 2, problems - 1)) * float(spread.std(ddof=1)) / problems**0.5 / base
    most = zero_upper_bound(problems, confidence) / base
    down, up = max(half, most if np.all(a >= b) else 0.0), max(half, most if np.all(a <= b) else 0.0)
    return min(found[0], ratio - down), max(found[1], ratio + up)


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


def _check(count: float, total: int) -> None:
    if total < 1 or not 0 <= count <= total:
        raise ValueError(f"{count} of {total} is not a share")
