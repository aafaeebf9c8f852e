"""The part of a study's report that sets JAX beside PyTorch: the answer first, then matrices and every pair."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.figures import name_group
from jaxkv.experiments.foreign.record import ForeignRecord
from jaxkv.experiments.parity.record import name_pair
from jaxkv.experiments.parity.report import ARMS, count_same, describe_gap, describe_same, judge_gap, tabulate
from jaxkv.experiments.record_parts import find_headline
from jaxkv.experiments.report_parts import Run
from jaxkv.overview.gather import SAMPLING, describe_condition
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Bullets, Fold, Heading, Table
from jaxkv.reporting.format import format_counted_share, format_number, format_share
from jaxkv.reporting.metrics import free_running
from jaxkv.reporting.shares import clustered_share, share

Study = Mapping[str, Any]


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
    table = tabulate((bool(a), bool(b)) for a, b in zip(first, second, strict=True))
    only = table[1][0], table[0][1]
    return {"only_first": only[0], "only_second": only[1], "mcnemar_p": statistics.mcnemar_exact(*only)}


def _contrast(first: str, second: str, pairs: Mapping, members: Mapping, shared: Sequence) -> dict[str, Any]:
    """The cache gap of two frameworks beside the gap between them, and whether the same sequences and steps part."""

    def parted(a: str, b: str) -> list[bool]:
        return pairs[name_pair(a, b)]["parted"]

    inside = [parted(f"{f} uncached", f"{f} cached") for f in (first, second)]
    between = [parted(f"{first} {arm}", f"{second} {arm}") for arm in ARMS]
    halves = [np.mean(np.asarray(found, np.float64), axis=0).tolist() for found in (between, inside)]
    sequences, flips = tabulate(zip(*inside, strict=True)), [[0, 0], [0, 0]]
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
        "same_sequences": count_same(sequences) | {"fisher_p": statistics.fisher_exact(sequences)},
        "same_flips": count_same(flips) if sum(map(sum, flips)) else None,
    }


def write_free_parity(study: Study) -> list[Block]:
    """JAX and PyTorch, cached and not, running free."""
    blocks: list[Block] = []
    for group in study["parity"]:
        rows = []
        for pair, found in group["pairs"].items():
            right = found["accuracy"]
            rows.append(
                [
                    pair.replace(" | ", " to "),
                    format_counted_share(found["diverged"]),
                    "-" if found["first_diverged"] is None else format_number(found["first_diverged"], 3),
                    format_share(found["agreement"]),
                    "-" if right is None else f"{right['only_first']}, {right['only_second']}",
                    "-" if right is None else format_number(right["mcnemar_p"]),
                ]
            )
        title = f"{name_group(group, study['parity'])}: {group['problems']} problems, running free"
        head = ["pair", "sequences that part", "first at (median)", "tokens that agree", "only first, second right"]
        blocks += [Heading(title, 3)]
        right = [f"{cell} {format_counted_share(entry)}" for cell, entry in group["cells"].items() if entry]
        lines = [f"Right by the main scorer: {'; '.join(right)}."] if right else []
        for contrast in group["contrasts"]:
            names = contrast["frameworks"]
            lines += [
                f"Problems that part between the frameworks, in either arm: "
                f"{format_counted_share(contrast['parted']['framework'])}; between the arms, in either framework: "
                f"{format_counted_share(contrast['parted']['cache'])}.",
                f"Share of sequences that part: {describe_gap(contrast['gap'], '')}.",
                describe_same(contrast["same_sequences"], "Sequences parted by the cache", names),
                describe_same(contrast["same_flips"], "Steps flipped by the cache", names),
            ]
        blocks += [Bullets(lines), Fold("Every pair of cells", [Table([*head, "McNemar p"], rows)])]
    return blocks
