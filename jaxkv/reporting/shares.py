"""Shares and means with their intervals, as plain values for a summary.

A share is a dict ``{"count", "total", "rate"}`` with ``interval`` ``[low, high]`` (95 %) and ``method``. A count of 0
also has ``upper_bound``, a count of everything ``lower_bound`` (one-sided 95 %, exact). Where trials come in clusters,
as tokens do in sequences, ``clusters`` says how many and ``unit`` what they are; the bound is of the share of these.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.reporting import statistics

EXACT = "Clopper & Pearson 1934"
CLUSTERED = "Clopper & Pearson, of as many trials as the clusters are worth (Korn & Graubard 1998)"
PAIRED = "paired, Bonett & Price 2012"


def share(count: int, total: int) -> dict[str, Any] | None:
    """A share of independent trials with its exact interval, of 0 or 1 with its bound; None if there were no trials."""
    if total == 0:
        return None
    return _describe(count, total, total, interval=list(statistics.clopper_pearson(count, total)), method=EXACT)


def _describe(count: int, total: int, independent: int, **more: Any) -> dict[str, Any]:
    bound = statistics.zero_upper_bound(independent)
    bounds = {"upper_bound": bound} if count == 0 else {"lower_bound": 1 - bound} if count == total else {}
    return {"count": count, "total": total, "rate": count / total, **more, **bounds}


def clustered_share(
    counts: Sequence[int], sizes: Sequence[int], independent: int | None = None, unit: str = "sequences"
) -> dict[str, Any] | None:
    """A share of tokens with an interval over sequences, never narrower than if tokens were independent.

    None and all of the tokens say nothing of how flips cluster, so that their bound is of the share of sequences in
    which there is one, or in which not all are. `independent`: trials, as `statistics.effective_trials` has them.
    """
    count, total, clusters = int(sum(counts)), int(sum(sizes)), sum(size > 0 for size in sizes)
    if total == 0:
        return None
    interval = list(statistics.clustered_share_interval(counts, sizes, independent))
    found = {"interval": interval, "method": CLUSTERED, "clusters": clusters, "unit": unit}
    return _describe(count, total, clusters, **found)


def take_rest(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The share of the trials that a share does not count."""
    turned = {"upper_bound": "lower_bound", "lower_bound": "upper_bound"}
    kept = {turned.get(name, name): 1 - part if name in turned else part for name, part in entry.items()}
    interval = [1 - end for end in reversed(entry["interval"])]
    return kept | {"count": entry["total"] - entry["count"], "rate": 1 - entry["rate"], "interval": interval}


def describe_column(columns: Sequence[np.ndarray], sizes: Sequence[int]) -> dict[str, Any]:
    """Mean over all tokens with its interval over sequences (None below three sequences), and the largest value."""
    sums = [float(c.sum()) for c in columns]
    return {
        "mean": sum(sums) / sum(sizes),
        "interval": statistics.ends(statistics.estimate_mean(sums, sizes)),
        "median": float(np.median(np.concatenate(columns))),
        "max": max(float(c.max()) for c in columns),
    }


def mean_over_problems(sums: Sequence[float], sizes: Sequence[float]) -> dict[str, Any]:
    """sum(sums) / sum(sizes) with an interval over problems, None below three problems, and the largest of one."""
    interval = statistics.ends(statistics.estimate_mean(sums, sizes))
    largest = max((total / size for total, size in zip(sums, sizes, strict=True) if size), default=0.0)
    return {"mean": float(np.sum(sums) / np.sum(sizes)), "interval": interval, "max": float(largest)}


def ratio_of_sums(first: Sequence[float], second: Sequence[float]) -> dict[str, Any] | None:
    """sum(first) / sum(second) over the same problems with its interval; None where the second adds up to nothing."""
    if not sum(second):
        return None
    ones = np.ones(len(first))
    interval = statistics.ends(statistics.estimate_ratio((first, ones), (second, ones)))
    return {"share": sum(first) / sum(second), "interval": interval, "problems": len(first)}
