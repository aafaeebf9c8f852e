"""What the figures of a report draw, taken from records: curves over position, and margins beside perturbations."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.drift.record import TENSORS, DriftRecord
from jaxkv.experiments.record_parts import known
from jaxkv.experiments.report_parts import Run
from jaxkv.reporting import statistics

BINS = 16
POINTS = 400  # at most so many are drawn of what does not flip


def bin_steps(columns: Sequence[Sequence[float]], bins: int = BINS) -> list[dict[str, Any]]:
    """Means over all sequences, of one value a step, in at most so many bins of steps of one width.

    `step` is the middle of a bin; `mean` has an `interval` over sequences (None below three), of `tokens` values.
    """
    longest = max(map(len, columns), default=0)
    if not longest:
        return []
    width = math.ceil(longest / bins)
    found = []
    for begin in range(0, longest, width):
        parts = [part for column in columns if len(part := np.asarray(column[begin : begin + width], np.float64))]
        sums, sizes = [float(part.sum()) for part in parts], list(map(len, parts))
        middle = begin + (min(width, longest - begin) - 1) / 2
        interval = statistics.ends(statistics.estimate_mean(sums, sizes))
        mean = float(np.concatenate(parts).mean())
        found.append({"step": middle, "mean": mean, "interval": interval, "tokens": sum(sizes)})
    return found


def divergence_over_tokens(samples: Sequence[DivergenceRecord]) -> list[list[float]]:
    """Share of free runs that have parted by a token, a step function from 0 on: [token, share, its exact interval]."""
    runs = [s.free_running for s in samples if s.free_running is not None]
    starts = sorted(known(run.first_diverged) for run in runs if run.diverged)
    longest = max((len(s.arms.cached.tokens) for s in samples), default=0)
    if not runs:
        return [[token, 0.0, 0.0, 1.0] for token in sorted({0, longest})]
    parted = {0: 0} | {start + 1: count for count, start in enumerate(starts, start=1)}
    parted.setdefault(longest, len(starts))
    total = len(runs)
    return [[at, count / total, *statistics.clopper_pearson(count, total)] for at, count in parted.items()]


def margin_points(samples: Sequence[DivergenceRecord], points: int = POINTS) -> dict[str, Any]:
    """Margins beside perturbations: [largest logit difference, margin, problem, step], rounded to four digits.

    Every step that flips is there; of the others at most `points`, evenly taken.
    """
    steps = [
        (flip, (moved, margin, sample.problem, step))
        for sample in samples
        if (found := sample.teacher_forced)
        for step, (flip, moved, margin) in enumerate(zip(found.flip, found.max_abs, found.margin, strict=True))
    ]
    flips, others = ([point for flip, point in steps if flip == kind] for kind in (True, False))
    every = max(1, math.ceil(len(others) / points))
    drawn = {"flips": flips, "others": others[::every]}
    rounded = {name: [[_round(x), _round(y), *at] for x, y, *at in kept] for name, kept in drawn.items()}
    return rounded | {"every": every}


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def draw_condition(samples: Sequence[DivergenceRecord]) -> dict[str, Any]:
    """All curves of a condition's valid samples."""
    forced = [s.teacher_forced for s in samples if s.teacher_forced]
    return {
        "kl": bin_steps([f.kl for f in forced]),
        "flips": bin_steps([f.flip for f in forced]),
        "diverged": divergence_over_tokens(samples),
        "margins": margin_points(samples),
    }


def average_grids(samples: Sequence[DriftRecord], bins: int = 24) -> dict[str, Any] | None:
    """Relative drift by layer and position, mean over problems (valid records) whose text reaches so far.

    `bins` [begin, end) of one width in positions, and tensor -> a row a layer; None without a position.
    """
    grids = [known(s.grid) for s in samples]
    longest = max((grid.bins[-1][1] for grid in grids if grid.bins), default=0)
    if not longest:
        return None
    width = math.ceil(longest / bins)
    edges = [[begin, min(begin + width, longest)] for begin in range(0, longest, width)]
    found: dict[str, Any] = {"bins": edges}
    for tensor in TENSORS:
        total = np.zeros((len(getattr(grids[0], tensor).relative), longest))
        reached = np.zeros(longest)
        for grid in grids:
            rows = np.asarray(getattr(grid, tensor).relative)
            for column, (begin, end) in enumerate(grid.bins):
                total[:, begin:end] += rows[:, column, None]
                reached[begin:end] += 1
        found[tensor] = [[_round(row[a:b].sum() / reached[a:b].sum()) for a, b in edges] for row in total]
    return found


def find_token_grid(run: Run) -> dict[str, Any] | None:
    """The residual stream's relative drift of the first problem whose tokens are known, by layer and decoded token.

    `texts` has one a column of as many tokens as the record's bins have, `rows` one a layer. None where no problem has
    both records, or no text of its tokens is kept.
    """
    tokens = {s.problem: s.arms.cached.tokens for s in run.of(DivergenceRecord) if s.status == "ok"}
    for sample in run.of(DriftRecord) if run.pieces else ():
        if sample.status != "ok" or sample.problem not in tokens:
            continue
        grid, own, first = known(sample.grid), tokens[sample.problem], sample.prompt_tokens
        kept = [n for n, (begin, end) in enumerate(grid.bins) if first <= begin and end - first <= len(own)]
        texts = [
            "".join(run.pieces.get(token) or f"⟨{token}⟩" for token in own[begin - first : end - first])
            for begin, end in (grid.bins[n] for n in kept)
        ]
        rows = [[_round(row[n]) for n in kept] for row in grid.resid_pre.relative]
        if kept and any(map(any, rows)):
            return {"problem": sample.problem, "texts": texts, "rows": rows}
    return None
