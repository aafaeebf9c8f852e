"""How often the intervals that reports print hold the truth, by simulation.

Of one to three clusters too: what is printed of so few covers as it must, or no interval is.

The data have the spread seen in runs: the KL of a step is log-normal with a log-sd of 2.1, and steps of one sequence
correlate (16 problems of GSM8K, 1095 steps of SmolLM2-135M in bf16 on a CPU: log-sd 2.24, 13 % of the log-variance
between sequences, and a long tail below, which does no harm). `PYTHONPATH=. python tests/test_coverage.py` writes
analysis/coverage.md, and the test compares the two.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from cases import daily
from scipy import stats

from jaxkv.reporting import statistics
from jaxkv.reporting.shares import clustered_share, share

PAGE = pathlib.Path(__file__).parents[1] / "analysis/coverage.md"
DRAWS, SIZES, LEAST = 2000, (1, 2, 3, 8, 16, 100), 0.93
SPREAD = 2.1  # log-sd of the KL of a step, as seen
ALIKE = 0.15  # share of its log-variance that sequences differ by
TOKENS = (48, 160)  # of a sequence, from and to
Interval = tuple[float, float] | None  # None where none is printed
Trial = Callable[[np.random.Generator, int], tuple[float, Interval]]


def draw_kl(generator, sequences, common=0.0, alike=ALIKE):
    """Sums over each sequence of two figures of mean exp(2.1^2 / 2), logs correlated by `common`, and its tokens."""
    tokens = generator.integers(TOKENS[0], TOKENS[1] + 1, sequences)
    between = generator.normal(size=(sequences, 1, 1)) * SPREAD * alike**0.5
    shared, own = (generator.normal(size=(sequences, TOKENS[1], n)) for n in (1, 2))
    steps = np.exp(between + SPREAD * (1 - alike) ** 0.5 * (common**0.5 * shared + (1 - common) ** 0.5 * own))
    steps *= (np.arange(TOKENS[1]) < tokens[:, None])[:, :, None]
    return *steps.sum(1).T, tokens.astype(float)


MEAN = float(np.exp(SPREAD**2 / 2))


def span(estimate, confidence=0.95):
    return None if estimate is None else estimate.interval(confidence)


def mean_kl(confidence=0.95, alike=ALIKE):
    def trial(generator, sequences):
        sums, _, tokens = draw_kl(generator, sequences, alike=alike)
        return MEAN, span(statistics.estimate_mean(sums, tokens), confidence)

    return trial


@functools.cache
def draw_resamples(sequences):
    """How often each of 500 resamples has each sequence."""
    return np.random.default_rng(0).multinomial(sequences, np.full(sequences, 1 / sequences), size=500).astype(float)


def bootstrap(generator, sequences):
    """What the reports had before: the percentile bootstrap."""
    sums, _, tokens = draw_kl(generator, sequences)
    drawn = draw_resamples(sequences)
    return MEAN, tuple(np.quantile((drawn @ sums) / (drawn @ tokens), [0.025, 0.975]))


def ratio_kl(common):
    def trial(generator, sequences):
        first, second, tokens = draw_kl(generator, sequences, common)
        return 1.0, span(statistics.estimate_ratio((first, tokens), (second, tokens)))

    return trial


def difference_kl(times):
    """Means of each problem, the first so many times the second."""

    def trial(generator, sequences):
        first, second, tokens = draw_kl(generator, sequences, 0.5)
        found = statistics.estimate_paired(times * first / tokens, second / tokens, skewed=True)
        return (times - 1) * MEAN, span(found)

    return trial


def relative_distance(generator, problems):
    """Figures of the size of their spread: distances of layers, relative errors of the attention output."""
    first, second = np.exp(generator.normal(size=(2, problems)) * 0.5)
    truth = float(np.exp(0.5**2 / 2))
    return 0.5 * truth, statistics.paired_interval(1.5 * first, second)


def layer_share(generator, problems):
    """The share of the last layer's drift that the first has."""
    last = np.exp(generator.normal(size=problems) * 0.5)
    return 0.1, span(statistics.estimate_mean(last * generator.beta(2, 18, problems), last))


def log_ratio(generator, windows):
    """Nats lost by a changed cache in windows of a text: the log of a ratio of perplexities."""
    return 0.02, span(statistics.estimate_signed_mean(generator.normal(2, 4, windows), np.full(windows, 100)))


def flips(rate, alike=0.01):
    def trial(generator, sequences):
        tokens = generator.integers(TOKENS[0], TOKENS[1] + 1, sequences)
        scale = 1 / alike - 1
        counts = generator.binomial(tokens, generator.beta(rate * scale, (1 - rate) * scale, sequences))
        return rate, statistics.clustered_share_interval(counts, tokens)

    return trial


def shown(entry):
    """What is printed of a share: its interval, or the bound of none or all."""
    return entry.get("lower_bound", entry["interval"][0]), entry.get("upper_bound", entry["interval"][1])


def bursts(rate, length):
    """After a first flip as many more follow in the sequence: flips come `length` at a time, or not at all."""

    def trial(generator, sequences):
        tokens = generator.integers(TOKENS[0], TOKENS[1] + 1, sequences)
        starts = generator.binomial(tokens // length, rate)
        return rate, shown(clustered_share((starts * length).tolist(), (tokens // length * length).tolist()))

    return trial


def parted(rate):
    def trial(generator, sequences):
        return rate, shown(share(int(generator.binomial(sequences, rate)), sequences))

    return trial


def score_over_seeds(generator, problems):
    """Three seeds a problem, which is right with a probability of its own."""
    right = generator.binomial(3, generator.beta(1, 1, problems)) / 3
    return 0.5, statistics.clustered_share_interval(right, np.ones(problems))


def paired_right(only_first, only_second, conditions=1):
    """Conditions that share problems: a problem where arms can differ at all is the same one in all of them."""

    def trial(generator, problems):
        law = [only_first, only_second, 1 - only_first - only_second]
        kind = generator.choice([1.0, -1.0, 0.0], size=problems, p=law)
        seen = np.mean(kind[:, None] * (generator.random((problems, conditions)) < (0.6 if conditions > 1 else 1)), 1)
        truth = (only_first - only_second) * (0.6 if conditions > 1 else 1)
        return truth, statistics.estimate_paired_share(seen).interval()

    return trial


def of_control(generator, problems):
    """Control 90 % right, 7 % of these lost, half of the wrong ones gained."""
    control, ones = generator.random(problems) < 0.9, np.ones(problems)
    changed = generator.random(problems) < np.where(control, 0.93, 0.5)
    found = statistics.share_of_control((changed, ones), (control, ones))
    return (0.9 * 0.93 + 0.1 * 0.5) / 0.9, found


def no_flip(by_sequence):
    """The worst rate: just above the bound that is told where none is seen, which it should be one time in 20.

    A sequence of 100 tokens that flips at all does so 29 times on the mean, as the next tokens follow the first.
    """
    burst = 30 * (1 - (29 / 30) ** 100)  # mean of a geometric law of mean 30, cut at 100

    def trial(generator, sequences):
        bound = statistics.zero_upper_bound(sequences if by_sequence else 100 * sequences)
        share_that_flips = 1.0001 * bound if by_sequence else min(1.0, 1.0001 * bound * 100 / burst)
        flips = np.minimum(generator.geometric(1 / 30, sequences), 100)
        flips *= generator.random(sequences) < share_that_flips
        found = clustered_share(flips.tolist(), [100] * sequences)
        assert not by_sequence or found.get("upper_bound", bound) == bound
        return 1.0001 * bound, (0.0, 1.0 if flips.any() else bound)

    return trial


@dataclasses.dataclass(frozen=True)
class Row:
    """An interval of a figure that reports print, on data of one kind; `least` is None for what is shown beside."""

    figure: str
    method: str
    data: str
    trial: Trial
    least: float | None = LEAST


STEP = "log-normal steps, log-sd 2.1, 48 to 160 a sequence, 15 % of the log-variance between sequences"
LOG_T = "Student's t on the log of the mean, 0.5 % above"
RATIO = "Student's t on the log of the ratio, 0.5 % on both sides"
BONETT = "Bonett & Price 2012, with Student's t"
EXACT = "Clopper & Pearson 1934"
CLUSTERED = f"{EXACT}, at effective trials (Korn & Graubard 1998)"
ROWS = (
    Row("mean KL and other means over tokens", LOG_T, STEP, mean_kl()),
    Row("the same", LOG_T, f"{STEP.rpartition(',')[0]}, independent", mean_kl(alike=0.0)),
    Row("the same at 99.5 %, what ten statements ask (Holm)", LOG_T, STEP, mean_kl(0.995), 0.985),
    Row("the same", "percentile bootstrap, for comparison: no report prints it", STEP, bootstrap, None),
    Row("ratio of KL (orders of ten, framework gap, share of KL or of a gap left)", RATIO,
        f"{STEP}; the two of a step correlate by 0.5", ratio_kl(0.5)),
    Row("the same", RATIO, f"{STEP}; the two of a step correlate by 0.9", ratio_kl(0.9)),
    Row("difference of two KL over problems", "Student's t, 0.5 % on both sides",
        f"{STEP}; the first twice the second, correlated by 0.5", difference_kl(2), 0.9),
    Row("the same, what its sign is judged by", "Student's t, 0.5 % on both sides",
        f"{STEP}; of one mean, correlated by 0.5", difference_kl(1)),
    Row("difference of distances or relative errors over problems", "Student's t", "log-normal, log-sd 0.5",
        relative_distance),
    Row("share of the drift that leaves layer 1", LOG_T, "drift log-normal with log-sd 0.5, shares beta(2, 18)",
        layer_share),
    Row("ratio of perplexities", "Student's t on the log", "normal nats of a window, sd twice the mean", log_ratio),
    Row("flips per token", CLUSTERED, "0.8 % of tokens, correlation within a sequence 0.01", flips(0.008)),
    Row("the same", CLUSTERED, "1.5 % of tokens, correlation within a sequence 0.01", flips(0.015)),
    Row("bit-equal steps, agreement", CLUSTERED, "half of the steps, correlation within a sequence 0.1",
        flips(0.5, 0.1)),
    Row("flips per token, rare", CLUSTERED, "0.1 % of tokens, in rows of 8: what follows a first flip",
        bursts(0.001, 8)),
    Row("the same", CLUSTERED, "0.1 % of tokens, in rows of 48", bursts(0.001, 48)),
    Row("sequences that part, accuracy", EXACT, "12 % of sequences, independent", parted(0.12)),
    Row("the same", EXACT, "1 % of sequences, independent", parted(0.01)),
    Row("the same", EXACT, "half of the sequences, independent", parted(0.5)),
    Row("bound of a zero of tokens: share of sequences with one (one-sided)", "exact, sequences being the trials",
        "a sequence of 100 tokens that flips does so 29 times on the mean; the worst share of such", no_flip(True)),
    Row("the same as a rate per token", "exact, tokens being the trials, for comparison: no report prints it",
        "the same, at the worst rate per token", no_flip(False), None),
    Row("score over seeds", CLUSTERED, "3 seeds, each problem with a probability of its own", score_over_seeds),
    Row("difference of accuracy, paired", BONETT, "1 % right in the first arm alone, 1 % in the second",
        paired_right(0.01, 0.01)),
    Row("the same", BONETT, "10 % and 3 %", paired_right(0.1, 0.03)),
    Row("the same", BONETT, "20 % and 20 %", paired_right(0.2, 0.2)),
    Row("the same, over conditions", BONETT, "3 conditions that share problems; 10 % and 3 %",
        paired_right(0.1, 0.03, 3)),
    Row("share of control", "Student's t by the delta method, and the exact bound",
        "control 90 %, 7 % of these lost, half of the others gained", of_control),
)  # fmt: skip


def simulate(row, clusters):
    """Of the draws with an interval, shares that hold the truth, lie below and above it; None if hardly one has any."""
    generator = np.random.default_rng([7, ROWS.index(row), clusters])
    below = above = printed = 0
    for _ in range(DRAWS):
        truth, interval = row.trial(generator, clusters)
        if interval is not None:
            printed += 1
            below, above = below + (interval[1] < truth), above + (interval[0] > truth)
    return (1 - (below + above) / printed, below / printed, above / printed) if printed > DRAWS / 10 else None


NONE = "no interval"


def render(found):
    """The page: a row each, coverage and misses in percent."""
    head = ["figure", "interval", "data", *(f"{size} cluster{'s' * (size > 1)}" for size in SIZES)]
    lines = [
        "# Coverage of the intervals",
        "",
        f"How often an interval of 95 % holds the truth, in percent, over {DRAWS} simulated studies of 1 to 100",
        "clusters (sequences, problems or windows); in brackets, how often it lies wholly below and wholly above it.",
        f"Where so few clusters do not tell how they differ, reports print none ({NONE}).",
        f"The error of a figure is about {100 * (0.95 * 0.05 / DRAWS) ** 0.5:.1f} points. The functions are those of",
        "`jaxkv/reporting/statistics.py`; `python tests/test_coverage.py` writes this page, and the test compares",
        f"the two and fails where an interval covers less than {100 * LEAST:.0f} %. One need not: that of a difference",
        "of two KL (90 %), which is judged by its sign alone, and covers where there is no difference. The expected",
        "share of sequences that part is made of the interval of flips per token and covers as that does.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    for row, cells in zip(ROWS, found, strict=True):
        told = [NONE if cell is None else "{:.1f} ({:.1f}, {:.1f})".format(*(100 * x for x in cell)) for cell in cells]
        lines.append("| " + " | ".join([row.figure, row.method, row.data, *told]) + " |")
    return "\n".join(lines) + "\n"


def read_page():
    lines = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in line[4 : 4 + len(SIZES)]] for line in lines]
    return [[None if cell == NONE else float(cell.split()[0]) / 100 for cell in row] for row in cells]


@pytest.mark.parametrize("row", daily(ROWS[::5], ROWS), ids=lambda row: f"{ROWS.index(row)} {row.figure}")
def test_intervals_cover(row):
    """At least as often as they must but for the binomial error of the draws, one time in a hundred."""
    for size, on_page in zip(SIZES, read_page()[ROWS.index(row)], strict=True):
        if (found := simulate(row, size)) is None:
            assert on_page is None
            continue
        covered, *_ = found
        if row.least is not None:
            assert covered * DRAWS >= stats.binom.ppf(0.01, DRAWS, row.least), (size, covered)
        assert covered == pytest.approx(on_page, abs=6e-4), "run this file to write the page again"


if __name__ == "__main__":
    PAGE.write_text(render([[simulate(row, size) for size in SIZES] for row in ROWS]), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
