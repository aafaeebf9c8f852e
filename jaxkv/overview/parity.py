"""The part of a study's report that sets JAX beside PyTorch: the answer first, then matrices and every pair."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.figures import name_group
from jaxkv.experiments.foreign.record import ForeignRecord
from jaxkv.experiments.parity.record import name_pair
from jaxkv.experiments.parity.report import ARMS, count_same, describe_gap, describe_same, judge_gap
from jaxkv.experiments.record_parts import find_headline
from jaxkv.experiments.report_parts import Run
from jaxkv.overview.contrasts import find_valid
from jaxkv.overview.gather import SAMPLING, Study, describe_condition
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Bullets, Fold, Heading, Table
from jaxkv.reporting.format import format_counted_share, format_number, format_share
from jaxkv.reporting.metrics import free_running
from jaxkv.reporting.shares import clustered_share, share

Cell = Sequence[Any]  # what one arm of one framework generated for each of the shared problems
TOGETHER = ("model", "precision", *SAMPLING, "batch_size", "padding", "device")  # what the cells of a group share


def find_cells(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Groups of runs of one model, precision, sampling and batch in several frameworks, each as cells by prompt."""
    groups: dict[tuple, dict[str, dict]] = defaultdict(dict)
    foreign = []
    for run in runs:
        condition, samples = describe_condition(run), find_valid(run)
        if records := run.of(ForeignRecord):
            foreign.append((condition, records))
        elif samples and condition["regime"] == "plain":
            label = condition["framework"]
            if condition["attention"] not in (None, "eager"):
                label += f" ({condition['attention']})"
            group = groups[tuple(condition[name] for name in TOGETHER)]
            group.setdefault(label, {"run": run.name, "samples": samples})
    for condition, records in foreign:
        sampler = records[0].sampling.sampler if records[0].sampling else None
        for key, group in groups.items():
            asked = {prompt for member in group.values() for prompt in member["samples"]}
            same = {prompt: r for r in records if (prompt := (r.problem, r.prompt_sha256)) in asked}
            if same and condition["precision"] in (None, key[1]) and sampler in (None, key[2]):
                group.setdefault(records[0].framework, {"run": condition["name"], "samples": same})
    found = [
        dict(zip(TOGETHER, key, strict=True)) | {"members": group} for key, group in groups.items() if len(group) > 1
    ]
    return sorted(found, key=lambda group: -(group["batch_size"] or 0))  # larger ones ask more problems


def _find_right(cell: Cell) -> list[bool] | None:
    right = [bool(arm.scores[find_headline(arm.scores)].correct) for arm in cell if arm.scores]
    return right if len(right) == len(cell) else None


def _compare_cells(first: Cell, second: Cell) -> dict[str, Any]:
    """Two cells' own generations, problem by problem, and who is right where both have scores."""
    found = [free_running(a.tokens, b.tokens) for a, b in zip(first, second, strict=True)]
    sizes = [max(len(a.tokens), len(b.tokens)) for a, b in zip(first, second, strict=True)]
    differing = [f["differing_after"] + f["diverged"] for f in found]
    starts = [f["first_diverged"] for f in found if f["diverged"]]
    accuracy = None
    if (ours := _find_right(first)) is not None and (theirs := _find_right(second)) is not None:
        pairs = list(zip(ours, theirs, strict=True))
        only = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
        accuracy = {"only_first": only[0], "only_second": only[1], "mcnemar_p": statistics.sign_test(*only)}
    return {
        "problems": len(found),
        "diverged": share(sum(f["diverged"] for f in found), len(found)),
        "agreement": clustered_share([n - d for n, d in zip(sizes, differing, strict=True)], sizes),
        "first_diverged": float(np.median(starts)) if starts else None,
        "parted": [f["diverged"] for f in found],
        "accuracy": accuracy,
    }


def summarize_free(group: Mapping[str, Any]) -> dict[str, Any] | None:
    """Figures of a group of `find_cells` on the problems that all its cells have; None if there are none."""
    members = group["members"]
    shared = sorted(set.intersection(*(set(member["samples"]) for member in members.values())))
    if not shared:
        return None
    cells: dict[str, Cell] = {}
    for framework, member in members.items():
        records = [member["samples"][prompt] for prompt in shared]
        arms = {arm: [getattr(record.arms, arm) for record in records] for arm in ARMS}
        cells |= {f"{framework} {arm}": cell for arm, cell in arms.items() if all(cell)}
    pairs = {name_pair(a, b): _compare_cells(cells[a], cells[b]) for a, b in itertools.combinations(cells, 2)}
    both = [f for f in members if f"{f} cached" in cells and f"{f} uncached" in cells]
    contrasts = [_contrast(first, second, pairs, members, shared) for first, second in itertools.combinations(both, 2)]
    return {
        **{name: group[name] for name in TOGETHER},
        "runs": {framework: member["run"] for framework, member in members.items()},
        "problems": len(shared),
        "cells": {name: (right := _find_right(cell)) and share(sum(right), len(right)) for name, cell in cells.items()},
        "pairs": {name: {k: v for k, v in pair.items() if k != "parted"} for name, pair in pairs.items()},
        "contrasts": contrasts,
    }


def _contrast(first: str, second: str, pairs: Mapping, members: Mapping, shared: Sequence) -> dict[str, Any]:
    """The cache gap of two frameworks beside the gap between them, and whether the same sequences and steps part."""

    def parted(a: str, b: str) -> list[bool]:
        return list(pairs[name_pair(a, b)]["parted"])

    inside = [parted(f"{f} uncached", f"{f} cached") for f in (first, second)]
    between = [parted(f"{first} {arm}", f"{second} {arm}") for arm in ARMS]
    halves = [np.mean(np.asarray(found, np.float64), axis=0).tolist() for found in (between, inside)]
    flips: list[tuple[bool, bool]] = []
    for prompt in shared:
        ours, theirs = (members[f]["samples"][prompt] for f in (first, second))
        columns = [found.flip for r in (ours, theirs) if (found := getattr(r, "teacher_forced", None))]
        if len(columns) == 2:
            apart = free_running(ours.arms.cached.tokens, theirs.arms.cached.tokens)["first_diverged"]
            # The step at which the tokens part still has the same text before it.
            flips += list(zip(*columns, strict=False))[: None if apart is None else apart + 1]
    return {
        "frameworks": [first, second],
        "gap": judge_gap(*halves, shares=True),
        "parted": {
            kind: share(sum(map(any, zip(*found, strict=True))), len(shared))
            for kind, found in (("framework", between), ("cache", inside))
        },
        "same_sequences": count_same(zip(*inside, strict=True), fisher=True),
        "same_flips": count_same(flips) if flips else None,
    }


def _list_pair(name: str, pair: Mapping[str, Any]) -> list[str]:
    at, right = pair["first_diverged"], pair["accuracy"]
    return [
        name.replace(" | ", " to "),
        format_counted_share(pair["diverged"]),
        "-" if at is None else format_number(at, 3),
        format_share(pair["agreement"]),
        f"{right['only_first']}, {right['only_second']}" if right else "-",
        format_number(right["mcnemar_p"]) if right else "-",
    ]


def write_free_parity(study: Study) -> list[Block]:
    """JAX and PyTorch, cached and not, running free."""
    blocks: list[Block] = []
    for group in study["parity"]:
        title = f"{name_group(group, study['parity'])}: {group['problems']} problems, running free"
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
        head = ["pair", "sequences that part", "first at (median)", "tokens that agree", "only first, second right"]
        table = Table([*head, "McNemar p"], [_list_pair(*pair) for pair in group["pairs"].items()])
        blocks += [Heading(title, 3), Bullets(lines), Fold("Every pair of cells", [table])]
    return blocks
