"""Intervals and tests, all in closed form: the same records give the same ends. Probabilities are shares in [0, 1].

Tokens of one sequence are not independent (a close call tends to come near another), so the sequence, or the problem,
is the unit of every interval of a per-token figure. How often each kind of interval holds the truth is measured by
tests/test_coverage.py on data with the spread seen, and told in analysis/coverage.md.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special, stats

CONFIDENCE = 0.95
EVEN = (0.025, 0.025)
# The mean of skewed data misses the truth on one side: what is large and rare was not drawn, and the spread, by which
# the width is judged, lacks it too. There the end takes the quantile of 0.5 %, which leaves out about 2.5 to 4 % at a
# log-sd of 2.1 a step (analysis/coverage.md).
SKEWED_ABOVE, SKEWED_BOTH = (0.025, 0.005), (0.005, 0.005)
MIN_SKEWED = 3  # clusters: of two, nothing of a skewed spread is known
Array = npt.ArrayLike
Sums = tuple[Array, Array]  # per cluster (sequence) the sum over its tokens, and its number of tokens, both [clusters]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure with what its interval and its tests are made of: a center, its standard error and degrees of freedom.

    The center is on the log scale if `log`. The interval of 95 % leaves out the nominal shares `tails` below and above,
    and ends at `least` and `most`, which the figure cannot pass.
    """

    center: float
    error: float
    freedom: float
    log: bool = False
    tails: tuple[float, float] = EVEN
    least: float = -math.inf
    most: float = math.inf

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Low and high end, two-sided."""
        scale = (1 - confidence) / (1 - CONFIDENCE)
        low, high = (_quantile(1 - tail * scale, self.freedom) * self.error for tail in self.tails)
        ends = self.center - low, self.center + high
        low, high = map(math.exp, ends) if self.log else ends
        return max(self.least, low), min(self.most, high)

    def p_above(self, threshold: float) -> float:
        """One-sided p-value that the figure is not above a threshold: below 0.025 where the 95 % interval is above."""
        return self._tail(1, threshold, self.tails[0])

    def p_below(self, threshold: float) -> float:
        """One-sided p-value that the figure is not below a threshold."""
        return self._tail(-1, threshold, self.tails[1])

    def _tail(self, sign: int, threshold: float, tail: float) -> float:
        if self.log:
            threshold = math.log(threshold) if threshold > 0 else -math.inf
        gap = sign * (self.center - threshold)
        if not self.error or math.isinf(gap):
            return 0.0 if gap > 0 else 1.0
        return min(1.0, float(special.stdtr(self.freedom, -gap / self.error)) * EVEN[0] / tail)


def ends(estimate: Estimate | None) -> list[float] | None:
    """The 95 % interval for a summary, None for None."""
    return None if estimate is None else list(estimate.interval())


def describe(value: float, estimate: Estimate | None) -> dict[str, Any]:
    """A figure for a summary: its mean, its interval, and what `read_estimate` makes the estimate of again."""
    parts = {} if estimate is None else dataclasses.asdict(estimate) | {"tails": list(estimate.tails)}
    kept = {name: part for name, part in parts.items() if part not in (math.inf, -math.inf)}
    return {"mean": value, "interval": ends(estimate), "estimate": kept or None}


def read_estimate(entry: Mapping[str, Any] | None) -> Estimate | None:
    """The estimate of an entry of `describe`; None where there is none."""
    kept = entry and entry["estimate"]
    return Estimate(**{**kept, "tails": tuple(kept["tails"])}) if kept else None


def _quantile(probability: float, freedom: float) -> float:
    return float(special.stdtrit(freedom, probability))


def clopper_pearson(count: float, total: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Exact interval of a share (Clopper & Pearson 1934): it holds the truth at least so often, of one trial too.

    Trials may be those of clusters, no whole number (`effective_trials`); so they may in the tests of a share below.
    """
    _check(count, total)
    tail = (1 - confidence) / 2
    low = 0.0 if count <= 0 else float(special.betaincinv(count, total - count + 1, tail))
    return low, 1.0 if count >= total else float(special.betaincinv(count + 1, total - count, 1 - tail))


def effective_trials(counts: Array, sizes: Array, trials: float | None = None) -> float:
    """How many independent trials say as much of a share as clustered ones (Korn & Graubard 1998).

    Trials over the design effect, the variance of the share from cluster to cluster over that of independent
    trials, taken as at least 1 (one cluster is worth one trial); and over the squared ratio of Student's t for so
    few clusters to the normal quantile. A share of 0 or 1 shows nothing of how its clusters differ: there each cluster
    is one trial, as if all of its trials went one way. `counts` and `sizes` are [clusters]; `trials` would be
    independent if clusters were of no account, all unless said.
    """
    counted, size = np.asarray(counts, np.float64), np.asarray(sizes, np.float64)
    total, clusters = float(size.sum()), len(size)
    trials = total if trials is None else trials
    rate = float(counted.sum()) / total
    if not 0 < rate < 1:
        return float(np.count_nonzero(size))
    if clusters < 2:
        return 1.0
    spread = float(np.sum((counted - rate * size) ** 2)) * clusters / (clusters - 1) / total**2
    effect = max(1.0, spread / (rate * (1 - rate) / trials))
    return trials / effect / (_quantile(0.975, clusters - 1) / float(special.ndtri(0.975))) ** 2


def clustered_share_interval(counts: Array, sizes: Array, trials: float | None = None) -> tuple[float, float]:
    """Exact interval of a share over clusters, of as many trials as they are worth (`effective_trials`)."""
    worth = effective_trials(counts, sizes, trials)
    return clopper_pearson(float(np.sum(counts)) / float(np.sum(sizes)) * worth, worth)


def share_p_above(count: float, trials: float, threshold: float) -> float:
    """Exact one-sided p-value that a share is not above a threshold; its inverse is Clopper & Pearson's low end."""
    _check(count, trials)
    return 1.0 if count <= 0 else float(special.betainc(count, trials - count + 1, threshold))


def share_p_below(count: float, trials: float, threshold: float) -> float:
    """Exact one-sided p-value that a share is not below a threshold."""
    return share_p_above(trials - count, trials, 1 - threshold)


def zero_upper_bound(total: float, confidence: float = CONFIDENCE) -> float:
    """Largest share that still gives 0 of `total` independent trials with probability 1 - confidence, exactly.

    The "rule of three", 3/total, is its approximation (Hanley & Lippman-Hand 1983).
    """
    _check(0, total)
    return float(-np.expm1(np.log1p(-confidence) / total))


def sign_test(positive: int, negative: int) -> float:
    """p-value that signs are fair coins, ties left out: 8 against 1 gives 0.039. The trials must be independent.

    Of problems that the first or the second arm alone got right it is the exact McNemar test (McNemar 1947).
    """
    return float(stats.binomtest(positive, positive + negative).pvalue) if positive + negative else 1.0


def sign_flip(leads: Sequence[int]) -> float:
    """One-sided exact p-value that the first arm does not lead: the sign of each problem's lead is a fair coin.

    The permutation test of paired differences (Fisher 1935, sec. 21), every sign counted, by convolution. A lead is in
    how many of a problem's conditions the first arm alone is right less those of the second: conditions may share
    problems and need not be independent. Of one condition it is the one-sided exact McNemar test.
    """
    sizes = [abs(int(lead)) for lead in leads if lead]
    law = np.ones(1)  # of the sum of signed leads, from -reach to reach
    for size in sizes:
        wider = np.zeros(len(law) + 2 * size)
        wider[: len(law)] += law / 2
        wider[2 * size :] += law / 2
        law = wider
    return min(1.0, float(law[sum(sizes) + int(sum(leads)) :].sum()))


def fisher_exact(table: Sequence[Sequence[int]]) -> float:
    """p-value that the rows and columns of a 2 x 2 table are independent (Fisher's exact test, two-sided)."""
    return float(stats.fisher_exact(table).pvalue)


def _linearize(sums: Array, sizes: Array) -> tuple[float, np.ndarray]:
    """sum(sums) / sum(sizes), and what each cluster adds to its error (Cochran 1977, ch. 6: the delta method)."""
    total, size = np.asarray(sums, np.float64), np.asarray(sizes, np.float64)
    if total.shape != size.shape or total.ndim != 1 or size.sum() <= 0:
        raise ValueError("sums and sizes must be vectors of one length, with at least one token")
    mean = float(total.sum() / size.sum())
    return mean, (total - mean * size) / size.mean()


def _standard_error(parts: np.ndarray) -> float:
    return float(np.sqrt(np.sum(parts**2) / (len(parts) - 1) / len(parts)))


def estimate_mean(sums: Array, sizes: Array) -> Estimate | None:
    """The mean over all tokens of a figure that is never negative and may be skewed, such as KL; clusters are the unit.

    Student's t on the log of the mean, its error by the delta method, with the upper quantile of `SKEWED_ABOVE`. Takes
    the parts of `Sums`. None for fewer than three clusters; where everything is 0, an estimate of 0 with no error;
    `estimate_signed_mean`'s of figures that are below 0 in a cluster.
    """
    mean, parts = _linearize(sums, sizes)
    if len(parts) < MIN_SKEWED:
        return None
    if mean <= 0 or np.any(np.asarray(sums) < 0):
        return estimate_signed_mean(sums, sizes)
    error = _standard_error(parts) / mean
    return Estimate(math.log(mean), error, len(parts) - 1, log=True, tails=SKEWED_ABOVE)


def estimate_signed_mean(sums: Array, sizes: Array) -> Estimate | None:
    """The mean over all tokens of a figure of either sign by Student's t; None for one cluster."""
    mean, parts = _linearize(sums, sizes)
    return None if len(parts) < 2 else Estimate(mean, _standard_error(parts), len(parts) - 1)


def estimate_ratio(first: Sums, second: Sums) -> Estimate | None:
    """The ratio of two means over the same clusters, both never negative and maybe skewed, such as KL.

    Student's t on the log of the ratio, its error by the delta method, with the quantiles of `SKEWED_BOTH`, since what
    is large and rare may be missing above or below. None for fewer than three clusters, or where a mean is 0.
    """
    (above, ours), (below, theirs) = _linearize(*first), _linearize(*second)
    if len(ours) < MIN_SKEWED or above <= 0 or below <= 0:
        return None
    error = _standard_error(ours / above - theirs / below)
    return Estimate(math.log(above / below), error, len(ours) - 1, log=True, tails=SKEWED_BOTH)


def share_of_control(first: Sums, second: Sums) -> tuple[float, float] | None:
    """Interval of a ratio of two mean scores on the same problems, by Student's t and the exact bound.

    With x and c the scores of a problem (points, of how many), R their ratio: the standard error is that of x - R c
    over the mean of c (the delta method; Cochran 1977, ch. 6). Where no problem gained (or none lost) it says nothing
    of that side. There a share b of problems, the exact bound, could still gain, each at most its whole score, which
    moves the ratio by at most b over the mean share of c. The low end may be below 0; None for one problem, or a
    control of 0.
    """
    (mean, ours), (base, theirs) = _linearize(*first), _linearize(*second)
    problems = len(ours)
    if problems < 2 or not base:
        return None
    ratio = mean / base
    half = _quantile(0.975, problems - 1) * _standard_error(ours - ratio * theirs) / base
    (a, _), (b, _) = (tuple(np.asarray(x, np.float64) for x in pair) for pair in (first, second))
    most = zero_upper_bound(problems) / base
    down, up = max(half, most if np.all(a >= b) else 0.0), max(half, most if np.all(a <= b) else 0.0)
    return ratio - down, ratio + up


def estimate_difference(first: Sums, second: Sums) -> Estimate | None:
    """The difference of two means over the same clusters by Student's t; None for one cluster."""
    (ours, above), (theirs, below) = _linearize(*first), _linearize(*second)
    if len(above) < 2:
        return None
    return Estimate(ours - theirs, _standard_error(above - below), len(above) - 1)


def estimate_paired(first: Array, second: Array, *, skewed: bool = False) -> Estimate | None:
    """The mean of first - second over problems, both [problems], by Student's t; None for one problem.

    Figures that are `skewed`, as KL is, have the wider ends of `SKEWED_BOTH`.
    """
    ones = np.ones(len(np.asarray(first)))
    found = estimate_difference((first, ones), (second, ones))
    return dataclasses.replace(found, tails=SKEWED_BOTH) if found is not None and skewed else found


def paired_interval(first: Array, second: Array | None = None) -> list[float] | None:
    """The interval of `estimate_paired`, for a summary; of the first figures' own mean without a second."""
    return ends(estimate_paired(first, np.zeros(len(np.asarray(first))) if second is None else second))


def estimate_paired_share(differences: Array, weight: float = 1.0) -> Estimate:
    """The mean difference of two scores in [0, 1] of the same problems, such as right or wrong.

    Bonett & Price 2012, which Fagerland, Lydersen & Laake 2014 recommend: two problems are added, one that each arm
    alone gets right, and the rest is Wald's, here with Student's t, so that few problems that all lean one way decide
    no sooner than in the exact test. The interval has a width before any problem differs and widens with each that
    does (0, 1, 2 of 200: 1.4, 1.7, 1.9 points on a side). Means over conditions or seeds, between -1 and 1, do too.
    `differences` are first - weight * second of each problem, [problems]; the weight is at most 1.
    """
    values = np.asarray(differences, np.float64)
    more = np.concatenate([values, [1.0, -weight]])
    error = float(more.std() / len(more) ** 0.5)
    return Estimate(float(more.mean()), error, max(1, len(values) - 1), least=-weight, most=1.0)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted for their number, so that one below 0.05 by chance alone is rare among all (Holm 1979)."""
    adjusted: dict[str, float] = {}
    least = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: (item[1], item[0]))):
        least = max(least, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = least
    return adjusted


def expected_divergence(rate: float, lengths: Sequence[int]) -> float:
    """Share of sequences with at least one flip if flips were independent: mean over sequences of 1 - (1 - rate)^n."""
    if rate >= 1:
        return float(np.mean([n > 0 for n in lengths]))
    return float(np.mean(-np.expm1(np.asarray(lengths, np.float64) * np.log1p(-rate))))


def _check(count: float, total: float) -> None:
    if total <= 0 or not 0 <= count <= total:
        raise ValueError(f"{count} of {total} is not a share")
