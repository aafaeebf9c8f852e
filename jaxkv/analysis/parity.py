"""JAX beside PyTorch (and engines elsewhere), cached and uncached: is the framework gap larger than the cache gap?

Two sources. Runs of 'divergence' and 'foreign' of several frameworks on the same prompts give free-running figures:
tokens, first divergence, accuracy. Records of 'parity' give logits of four cells along the same tokens: flips, KL,
direction, and the residual stream of each layer.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.analysis import statistics
from jaxkv.analysis.gather import SAMPLING, Run, describe_condition
from jaxkv.analysis.metrics import free_running
from jaxkv.analysis.samples import collect
from jaxkv.analysis.summary import clustered_share, group_invalid, share, summarize_comparisons
from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.foreign.record import ForeignRecord
from jaxkv.experiments.parity.record import CACHE_PAIRS, CELLS, FRAMEWORK_PAIRS, PAIRS, ParityRecord, name_pair
from jaxkv.experiments.record_parts import find_headline, known

ARMS = ("uncached", "cached")


def judge_gap(framework: Sequence[float], cache: Sequence[float], *, shares: bool) -> dict[str, Any]:
    """Whether the framework gap is larger or smaller than the cache gap, problems being the unit.

    Args:
      framework: gap of each problem between frameworks.
      cache: gap of each problem between the arms of one framework.
      shares: whether gaps are shares of arms that part; else they are skewed, as KL is.

    Returns:
      means of both, their difference with an interval, and `larger`: 'framework', 'cache' or None where the interval
      holds 0, or where there is none, problems being too few or all equal.
    """
    differ = [a - b for a, b in zip(framework, cache, strict=True)]
    estimate = statistics.estimate_paired(framework, cache, skewed=True)
    if shares:
        estimate = statistics.estimate_paired_share(differ)
    elif len(set(differ)) == 1 and (not differ[0] or statistics.sign_test(len(differ), 0) > 0.05):
        estimate = None  # an interval of no width, of so few problems that they may lean one way by chance
    found = statistics.ends(estimate)
    larger = None
    if found is not None:
        larger = "framework" if found[0] > 0 else "cache" if found[1] < 0 else None
    return {
        "problems": len(differ),
        "framework": float(np.mean(framework)),
        "cache": float(np.mean(cache)),
        "difference": float(np.mean(differ)),
        "interval": found,
        "larger": larger,
    }


# Free-running, from the records of each framework.


# What the cells of a group share.
TOGETHER = ("model", "precision", *SAMPLING, "batch_size", "padding", "device")


def find_cells(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Groups of runs of one model, precision, sampling and batch in several frameworks, each as cells by prompt."""
    groups: dict[tuple, dict[str, dict]] = defaultdict(dict)
    foreign = []
    for run in runs:
        condition = describe_condition(run)
        if records := run.of(ForeignRecord):
            foreign.append((condition, records))
            continue
        samples = [s for s in run.of(DivergenceRecord) if s.status == "ok"]
        if samples and condition["regime"] == "plain":
            key = tuple(condition[name] for name in TOGETHER)
            label = condition["framework"]
            if condition["attention"] not in (None, "eager"):
                label += f" ({condition['attention']})"
            groups[key].setdefault(label, {"run": run.name, "samples": {_prompt(s): s for s in samples}})
    for condition, records in foreign:
        for key, group in groups.items():
            asked = {prompt for member in group.values() for prompt in member["samples"]}
            same = [r for r in records if _prompt(r) in asked]
            sampler = records[0].sampling.sampler if records[0].sampling else None
            if same and condition["precision"] in (None, key[1]) and sampler in (None, key[2]):
                group.setdefault(
                    records[0].framework, {"run": condition["name"], "samples": {_prompt(s): s for s in same}}
                )
    found = [
        dict(zip(TOGETHER, key, strict=True)) | {"members": group} for key, group in groups.items() if len(group) > 1
    ]
    return sorted(found, key=lambda group: -(group["batch_size"] or 0))  # larger ones ask more problems


Generated = DivergenceRecord | ForeignRecord


def _prompt(record: Generated) -> tuple[int, str]:
    return record.problem, record.prompt_sha256


def _compare_tokens(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Two cells' own generations, problem by problem."""
    found = [free_running(a, b) for a, b in zip(first, second, strict=True)]
    sizes = [max(len(a), len(b)) for a, b in zip(first, second, strict=True)]
    differing = [f["differing_after"] + f["diverged"] for f in found]
    starts = [f["first_diverged"] for f in found if f["diverged"]]
    return {
        "problems": len(found),
        "diverged": share(sum(f["diverged"] for f in found), len(found)),
        "agreement": clustered_share([n - d for n, d in zip(sizes, differing, strict=True)], sizes),
        "first_diverged": float(np.median(starts)) if starts else None,
        "parted": [f["diverged"] for f in found],
    }


def _right(record: Generated, arm: str) -> bool | None:
    scores = getattr(record.arms, arm).scores
    return None if not scores else bool(scores[find_headline(scores)].correct)


def summarize_free(group: Mapping[str, Any]) -> dict[str, Any] | None:
    """Figures of a group of `find_cells` on the problems that all its cells have; None if there are none."""
    members = group["members"]
    shared = sorted(set.intersection(*(set(member["samples"]) for member in members.values())))
    if not shared:
        return None
    cells: dict[str, list[Generated]] = {}
    for framework, member in members.items():
        records = [member["samples"][prompt] for prompt in shared]
        for arm in ARMS:
            if all(getattr(record.arms, arm) for record in records):
                cells[f"{framework} {arm}"] = records
    arm_of = {cell: cell.rsplit(" ", 1)[1] for cell in cells}
    tokens = {cell: [getattr(r.arms, arm_of[cell]).tokens for r in records] for cell, records in cells.items()}
    right = {cell: [_right(r, arm_of[cell]) for r in records] for cell, records in cells.items()}
    pairs: dict[str, dict[str, Any]] = {}
    for a, b in itertools.combinations(cells, 2):
        pairs[name_pair(a, b)] = _compare_tokens(tokens[a], tokens[b]) | {"accuracy": _compare(right[a], right[b])}
    both = [f for f in members if f"{f} cached" in cells and f"{f} uncached" in cells]
    contrasts = [_contrast(first, second, pairs, members, shared) for first, second in itertools.combinations(both, 2)]
    for pair in pairs.values():
        del pair["parted"]
    return {
        **{name: group[name] for name in TOGETHER},
        "runs": {framework: member["run"] for framework, member in members.items()},
        "problems": len(shared),
        "cells": {
            cell: share(sum(map(bool, right[cell])), len(shared)) if None not in right[cell] else None for cell in cells
        },
        "pairs": pairs,
        "contrasts": contrasts,
    }


def _compare(first: Sequence[bool | None], second: Sequence[bool | None]) -> dict[str, Any] | None:
    """Accuracy of two cells on the same problems; None where one has no scores."""
    if None in (*first, *second):
        return None
    table = _count((bool(a), bool(b)) for a, b in zip(first, second, strict=True))
    only = table[1][0], table[0][1]
    return {"only_first": only[0], "only_second": only[1], "mcnemar_p": statistics.mcnemar_exact(*only)}


def _contrast(first: str, second: str, pairs: Mapping, members: Mapping, shared: Sequence) -> dict[str, Any]:
    """The cache gap of two frameworks beside the gap between them, and whether the same sequences and steps part."""

    def parted(a: str, b: str) -> list[bool]:
        return pairs[name_pair(a, b)]["parted"]

    inside = [parted(f"{f} uncached", f"{f} cached") for f in (first, second)]
    between = [parted(f"{first} {arm}", f"{second} {arm}") for arm in ARMS]
    halves = [np.mean(np.asarray(found, np.float64), axis=0).tolist() for found in (between, inside)]
    sequences, flips = _count(zip(*inside, strict=True)), [[0, 0], [0, 0]]
    for prompt in shared:
        ours, theirs = (members[f]["samples"][prompt] for f in (first, second))
        columns = [found.flip for r in (ours, theirs) if (found := getattr(r, "teacher_forced", None))]
        if len(columns) < 2:
            continue
        apart = free_running(ours.arms.cached.tokens, theirs.arms.cached.tokens)["first_diverged"]
        # The step at which the tokens part still has the same text before it.
        steps = min(*map(len, columns), len(columns[0]) if apart is None else apart + 1)
        for a, b in zip(columns[0][:steps], columns[1][:steps], strict=True):
            flips[int(a)][int(b)] += 1
    return {
        "frameworks": [first, second],
        "gap": judge_gap(*halves, shares=True),
        "parted": {
            kind: share(sum(map(any, zip(*found, strict=True))), len(shared))
            for kind, found in (("framework", between), ("cache", inside))
        },
        "same_sequences": _same(sequences) | {"fisher_p": statistics.fisher_exact(sequences)},
        "same_flips": _same(flips) if sum(map(sum, flips)) else None,
    }


def _count(pairs: Any) -> list[list[int]]:
    """2 x 2 counts of pairs of booleans."""
    table = [[0, 0], [0, 0]]
    for a, b in pairs:
        table[int(a)][int(b)] += 1
    return table


def _same(table: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Whether two frameworks part at the same places: counts, and what independence would give.

    Fisher's test takes places as independent, which sequences are and steps of one are not.
    """
    total = sum(map(sum, table))
    first, second = sum(table[1]), table[0][1] + table[1][1]
    return {
        "places": total,
        "first": first,
        "second": second,
        "both": table[1][1],
        "expected": first * second / total,
        "fisher_p": None,
    }


# Along the same tokens, from the records of 'parity'.


def summarize_parity(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'parity' records of a run.

    Args:
      records: in any order; those of other experiments are left out.
      run: content of run.json.

    Returns:
      Plain values. `status` is 'ok', 'invalid' (no sample is valid) or 'empty'.
    """
    samples = collect(records, ParityRecord)
    valid = [s for s in samples if s.status == "ok" and s.tokens]
    summary: dict[str, Any] = {
        "experiment": "parity",
        "fingerprint": run.get("fingerprint"),
        "status": "ok" if valid else "invalid" if samples else "empty",
        "problems": {"total": len(samples), "ok": len(valid)},
        "invalid": group_invalid(samples),
        "attention": sorted({s.attention for s in samples}),
        "torch_uncached": sorted({s.torch_uncached for s in samples}),
        "versions": samples[0].versions if samples else {},
    }
    if not valid:
        return summary
    sizes = [len(s.tokens) for s in valid]
    summary["tokens"] = sum(sizes)
    summary["pairs"] = {
        pair: summarize_comparisons([(s.problem, known(s.pairs)[pair]) for s in valid]) for pair in PAIRS
    }
    kl = {pair: [float(np.mean(known(s.pairs)[pair].kl)) for s in valid] for pair in PAIRS}
    halves = [np.mean([kl[pair] for pair in kind.values()], axis=0).tolist() for kind in (FRAMEWORK_PAIRS, CACHE_PAIRS)]
    ratio = statistics.estimate_ratio(*((half, np.ones(len(half))) for half in halves))
    summary["gap"] = judge_gap(*halves, shares=False) | {
        "ratio": sum(halves[0]) / sum(halves[1]) if sum(halves[1]) else None,
        "ratio_interval": statistics.ends(ratio),
    }
    summary["cosine"] = _summarize_cosine([[c for c in known(s.cosine) if c is not None] for s in valid])
    flips = [[known(s.pairs)[CACHE_PAIRS[f]].flip for s in valid] for f in ("jax", "torch")]
    steps = [pair for a, b in zip(*flips, strict=True) for pair in zip(a, b, strict=True)]
    summary["same_flips"] = _same(_count(steps))
    summary["same_choice"] = _same_choices(valid)
    streams = [known(s.layers) for s in valid]
    summary["layers"] = {
        "bit_equal": {cell: sum(stream.bit_equal[cell] for stream in streams) for cell in CELLS},
        "mean": {
            pair: np.average([stream.distance[pair].mean for stream in streams], axis=0, weights=sizes).tolist()
            for pair in PAIRS
        },
        "max": {pair: np.max([stream.distance[pair].max for stream in streams], axis=0).tolist() for pair in PAIRS},
    }
    return summary


def _summarize_cosine(columns: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Mean cosine over the steps at which the cache moves both frameworks; None without such a step."""
    kept = [column for column in columns if column]
    if not kept:
        return None
    sums, sizes = [sum(column) for column in kept], [len(column) for column in kept]
    interval = statistics.paired_interval([a / n for a, n in zip(sums, sizes, strict=True)], np.zeros(len(kept)))
    return {"steps": sum(sizes), "mean": sum(sums) / sum(sizes), "interval": interval and list(interval)}


def _same_choices(valid: Sequence[ParityRecord]) -> dict[str, int]:
    """Of the steps at which both frameworks flip, at how many they flip between the same two tokens."""
    flipped = [
        [tuple(known(s.choices)[f"{f} {arm}"][step] for arm in ARMS) for f in ("jax", "torch")]
        for s in valid
        for step in range(len(s.tokens))
        if all(known(s.pairs)[CACHE_PAIRS[f]].flip[step] for f in ("jax", "torch"))
    ]
    return {"count": sum(a == b for a, b in flipped), "total": len(flipped)}
