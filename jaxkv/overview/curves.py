"""What the figures of a report draw, taken from records: curves over position, and margins beside perturbations."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.drift.record import TENSORS, DriftRecord
from jaxkv.experiments.record_parts import known

BINS = 16
POINTS = 400  # at most so many are drawn of what does not flip


def bin_steps(columns: Sequence[Sequence[float]], bins: int = BINS) -> list[dict[str, float]]:
    """Means over all sequences in bins of steps of one width.

    Args:
      columns: per sequence, one value a step.
      bins: at most so many.

    Returns:
      For each bin: `step`, its middle; `mean`; `tokens`, how many values it has.
    """
    longest = max(map(len, columns), default=0)
    if not longest:
        return []
    width = math.ceil(longest / bins)
    found = []
    for begin in range(0, longest, width):
        values = np.concatenate([np.asarray(column[begin : begin + width], np.float64) for column in columns])
        middle = begin + (min(width, longest - begin) - 1) / 2
        found.append({"step": middle, "mean": float(values.mean()), "tokens": len(values)})
    return found


def divergence_over_tokens(samples: Sequence[DivergenceRecord]) -> list[list[float]]:
    """Share of free runs that have parted by a token: [token, share], a step function from [0, 0] on."""
    runs = [s.free_running for s in samples if s.free_running is not None]
    starts = sorted(known(run.first_diverged) for run in runs if run.diverged)
    curve: list[list[float]] = [[0, 0.0]]
    for count, start in enumerate(starts, start=1):
        if curve[-1][0] == start + 1:
            curve[-1][1] = count / len(runs)
        else:
            curve.append([start + 1, count / len(runs)])
    longest = max((len(s.arms.cached.tokens) for s in samples), default=0)
    if curve[-1][0] < longest:
        curve.append([longest, curve[-1][1]])
    return curve


def margin_points(samples: Sequence[DivergenceRecord], points: int = POINTS) -> dict[str, Any]:
    """Margins beside perturbations: [largest logit difference, margin], rounded to four digits.

    Every step that flips is there; of the others at most `points`, evenly taken.
    """
    flips: list[list[float]] = []
    others: list[list[float]] = []
    for sample in samples:
        found = sample.teacher_forced
        if not found:
            continue
        for flip, moved, margin in zip(found.flip, found.max_abs, found.margin, strict=True):
            (flips if flip else others).append([_round(moved), _round(margin)])
    every = max(1, math.ceil(len(others) / points))
    return {"flips": flips, "others": others[::every], "every": every}


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
    """Relative drift by layer and position, mean over problems whose text reaches so far.

    Args:
      samples: valid 'drift' records.
      bins: columns, of one width in positions.

    Returns:
      `bins` [begin, end), and tensor -> a row a layer; None without a position.
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
