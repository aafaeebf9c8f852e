"""Figures that need several runs: accuracy over conditions, fp32 against 16 bits, the same run twice."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Sized
from typing import Any, TypeVar

import numpy as np

from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.record_parts import ARMS, find_headline
from jaxkv.experiments.report_parts import Run, base_precision
from jaxkv.overview.gather import SAMPLING, describe_condition, select_valid
from jaxkv.records import fingerprint
from jaxkv.reporting import statistics
from jaxkv.reporting.shares import PAIRED, clustered_share, share

Samples = Mapping[Any, DivergenceRecord]  # by problem and prompt
Condition = tuple[Mapping[str, Any], Samples]
Described = TypeVar("Described", bound=Mapping[str, Any])
Counted = TypeVar("Counted", bound=Sized)
METRICS = ("kl", "js", "max_abs", "mean_abs")  # the first two are quadratic in the perturbation of the logits
PROCESS, BUILD = "process", "build"  # in what a configuration that was run again was not the same
ASKED = ("model", "weights", *SAMPLING, "device")  # runs alike in these ask a model the same of a problem
MATCHED = ("model", "weights", *SAMPLING, "framework", "attention", "regime", "device", "batch_size", "padding")


def find_valid(run: Run) -> dict[tuple[int, str], DivergenceRecord]:
    """Valid 'divergence' samples by problem and prompt."""
    return {(s.problem, s.prompt_sha256): s for s in run.of(DivergenceRecord) if s.status == "ok"}


def select(
    study: Mapping[str, Any],
    precision: str | None = None,
    regime: str = "plain",
    framework: str = "jax",
    each: bool = False,
) -> list[Any]:
    """Conditions with valid 'divergence' samples: of runs of one configuration that with most problems, or `each`."""
    valid = [
        (c, range(c["divergence"]["problems"]["ok"]))
        for c in select_valid(study)
        if c["regime"] == regime and c["framework"] == framework and precision in (None, base_precision(c))
    ]
    return [c for c, _ in (valid if each else drop_replicates(valid))]


def by_model(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Conditions or pairs of one model and precision together, and of one device and batch where there are several."""
    devices, batches = ({entry[name] for entry in entries} for name in ("device", "batch_size"))
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in entries:
        device = f" on {entry['device']}" if len(devices) > 1 else ""
        batch = f" in batches of {entry['batch_size']}" if len(batches) > 1 and entry["batch_size"] else ""
        groups[f"{entry['model']} {entry['precision']}{device}{batch}"].append(entry)
    return groups


def drop_replicates(found: Sequence[tuple[Described, Counted]]) -> list[tuple[Described, Counted]]:
    """Conditions with their samples, each once: of runs of one configuration that with most problems."""
    once: dict[str, tuple[Described, Counted]] = {}
    for condition, samples in found:
        name = condition["fingerprint"] or condition["name"]
        if name not in once or len(samples) > len(once[name][1]):
            once[name] = condition, samples
    return list(once.values())


def _score(sample: DivergenceRecord, scorer: str | None = None) -> tuple[bool, bool]:
    """Whether each arm is right, by the main scorer unless another is named."""
    scores = [getattr(sample.arms, arm).scores for arm in ARMS]
    cached, uncached = (each[scorer or find_headline(each)].correct for each in scores)
    return cached, uncached


def pool_accuracy(conditions: Sequence[Condition], scorer: str) -> dict[str, Any] | None:
    """Which arm is right more often by a scorer that every sample has, over conditions that ask the same problems.

    Problems are the unit: their conditions are put together first, since they are not independent. `p_cached` and
    `p_uncached` are the exact one-sided p-values that this arm does not lead (`statistics.sign_flip`), `p` the
    two-sided one. None without a sample.
    """
    tables, by_problem = [], defaultdict(list)
    for condition, samples in conditions:
        right = {key: _score(sample, scorer) for key, sample in samples.items()}
        if not right:
            continue
        only = [sum(a and not b for a, b in right.values()), sum(b and not a for a, b in right.values())]
        both = [sum(arm) for arm in zip(*right.values(), strict=True)]
        table = {"condition": condition["name"], "problems": len(right), "right": both}
        test = {"only_cached": only[0], "only_uncached": only[1], "mcnemar_p": statistics.sign_test(*only)}
        tables.append(table | test)
        for (problem, _), (a, b) in right.items():
            by_problem[problem].append(float(a) - float(b))
    if not tables:
        return None
    differences = [float(np.mean(values)) for values in by_problem.values()]
    pairs = [(t["only_cached"], t["only_uncached"]) for t in tables]
    found = statistics.estimate_paired_share(differences)
    leads = [int(sum(values)) for values in by_problem.values()]
    sides = [statistics.sign_flip(leads), statistics.sign_flip([-lead for lead in leads])]
    ahead = [sum(a > b for a, b in pairs), sum(a < b for a, b in pairs), sum(a == b for a, b in pairs)]
    return {
        "scorer": scorer,
        "problems": len(differences),
        "difference": {"mean": float(np.mean(differences)), "interval": list(found.interval()), "method": PAIRED},
        "conditions": dict(zip(("cached_ahead", "uncached_ahead", "equal"), ahead, strict=True)),
        "p": min(1.0, 2 * min(sides)),
        "p_cached": sides[0],
        "p_uncached": sides[1],
        "tables": tables,
    }


def pool_scorers(conditions: Sequence[Condition]) -> dict[str, Any]:
    """`pool_accuracy` for every scorer that all samples have."""
    every = [sample for _, samples in conditions for sample in samples.values()]
    scores = [getattr(sample.arms, arm).scores for sample in every for arm in ARMS]
    shared = [scorer for scorer in scores[0] if all(scorer in each for each in scores)] if scores else []
    return {scorer: pool_accuracy(conditions, scorer) for scorer in shared}


def _flips(sample: DivergenceRecord) -> list[bool]:
    return sample.teacher_forced.flip if sample.teacher_forced else []


def _total(samples: Sequence[DivergenceRecord], name: str) -> tuple[list[float], list[int]]:
    columns = [getattr(sample.teacher_forced, name) for sample in samples]
    return [float(np.sum(np.asarray(c, np.float64))) for c in columns], [len(c) for c in columns]


def compare_precisions(narrow: Samples, wide: Samples) -> dict[str, Any] | None:
    """By how many orders of ten the arms of a wide precision are nearer to each other than those of a narrow one.

    `orders` of a metric is log10 of the ratio of its means over tokens, with an interval over problems; None where the
    wide arms do not differ at all. None without a problem that both compared.
    """
    shared = [key for key in narrow if key in wide and all(_flips(s[key]) for s in (narrow, wide))]
    if not shared:
        return None
    metrics: dict[str, Any] = {}
    for name in METRICS:
        first, second = (_total([samples[key] for key in shared], name) for samples in (narrow, wide))
        means = [sum(sums) / sum(sizes) for sums, sizes in (first, second)]
        found = statistics.estimate_ratio(first, second)
        metrics[name] = {
            "narrow": means[0],
            "wide": means[1],
            "orders": math.log10(means[0] / means[1]) if all(means) else None,
            "interval": found and [math.log10(end) for end in found.interval()],
            "estimate": statistics.describe(0.0, found)["estimate"],  # of the ratio
        }
    return {"problems": len(shared), "metrics": metrics}


def pair_precisions(runs: Sequence[Condition]) -> list[dict[str, Any]]:
    """`compare_precisions` of every 16-bit condition with the fp32 one that differs in precision alone."""
    narrow = [(c, s) for c, s in runs if base_precision(c) in ("fp16", "bf16")]
    wide = [(c, s) for c, s in runs if c["precision"] == "fp32"]
    found = []
    for (condition, samples), (other, others) in itertools.product(narrow, wide):
        alike = all(condition[name] == other[name] for name in MATCHED)
        if alike and (compared := compare_precisions(samples, others)):
            shown = {name: condition[name] for name in (*MATCHED, "precision", "products")}
            found.append({"narrow": condition["name"], "wide": other["name"], **shown, **compared})
    return found


def choose_shared(runs: Sequence[Condition], others: Sequence[Condition]) -> list[Condition]:
    """The runs with the samples alone whose problem another run asked the same model alike (`ASKED`)."""
    asked: dict[tuple, set[Any]] = defaultdict(set)
    for condition, samples in others:
        asked[tuple(condition[name] for name in ASKED)] |= samples.keys()
    chosen: list[Condition] = []
    for condition, samples in runs:
        shared = asked[tuple(condition[name] for name in ASKED)]
        if kept := {key: sample for key, sample in samples.items() if key in shared}:
            chosen.append((condition, kept))
    return chosen


def count_flips(runs: Sequence[Condition]) -> dict[str, Any] | None:
    """Flips per token over several conditions, with an interval over problems, which conditions share."""
    flips: dict[int, list[bool]] = defaultdict(list)
    for _, samples in runs:
        for (problem, _), sample in samples.items():
            if found := _flips(sample):
                flips[problem] += found
    if not flips:
        return None
    counts, sizes = [sum(each) for each in flips.values()], [len(each) for each in flips.values()]
    return {
        "flips": clustered_share(counts, sizes, unit="problems"),
        "worth": statistics.effective_trials(counts, sizes),  # independent tokens that say as much
        "problems_with_flip": share(sum(count > 0 for count in counts), len(flips)),
        "most": max(counts),  # of a problem
        "conditions": len(runs),
        "problems": len(flips),
    }


def count_reruns(runs: Sequence[Condition]) -> dict[str, Any]:
    """Runs in which an arm run again has other bits at some step, by arm; None where no arm was run again."""
    found: dict[str, Any] = {}
    for arm in ARMS:
        again = [[getattr(s.controls, f"{arm}_rerun") for s in samples.values()] for _, samples in runs]
        kept = [[one.bit_equal for one in each if one and one.bit_equal] for each in again]
        kept = [each for each in kept if each]
        entry = share(sum(not all(map(all, each)) for each in kept), len(kept))
        sequences = {"sequences": sum(map(len, kept)), "steps": sum(len(one) for each in kept for one in each)}
        found[arm] = None if entry is None else entry | sequences
    return found


def find_replicates(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Runs of one configuration, made more than once: whether tokens, bits of the comparison and direction are one.

    `kind` says in what they differ: 'build' if in versions of packages or of the device's runtime, else 'process'.
    `another` is the second process or build; pairs that share it are not independent.
    """
    groups = defaultdict(list)
    for run in runs:
        if run.run.get("fingerprint") and run.of(DivergenceRecord):
            groups[_identify(run)].append(run)
    twice = [pair for members in groups.values() for pair in itertools.combinations(members, 2)]
    return [found for first, second in twice if (found := _compare_runs(first, second))]


def _compare_runs(first: Run, second: Run) -> dict[str, Any] | None:
    """None of a run and one of another configuration, or without a problem of both."""
    a, b = find_valid(first), find_valid(second)
    pairs = [(a[key], b[key]) for key in a if key in b]
    kind = BUILD if _find_build(first) != _find_build(second) else PROCESS
    if not pairs or (kind == PROCESS and first.run["fingerprint"] != second.run["fingerprint"]):
        return None
    leads = [sum(cached - uncached for cached, uncached in map(_score, side)) for side in zip(*pairs, strict=True)]
    return {
        "runs": [first.name, second.name],
        "kind": kind,
        "another": second.name if kind == PROCESS else fingerprint({"build": _find_build(second)}),
        "condition": describe_condition(first),
        "problems": len(pairs),
        "other_tokens": share(sum(_tokens(one) != _tokens(two) for one, two in pairs), len(pairs)),
        "other_figures": share(sum(one.teacher_forced != two.teacher_forced for one, two in pairs), len(pairs)),
        "signs": [int(np.sign(lead)) for lead in leads],  # of cached minus uncached right answers
    }


def _identify(run: Run) -> str:
    """What a run's configuration is but for versions."""
    device = run.run["config"].get("device")
    kept = {key: value for key, value in device.items() if key != "runtime"} if isinstance(device, Mapping) else device
    return fingerprint({**run.run["config"], "device": kept, "versions": None})


def _find_build(run: Run) -> Any:
    """Versions of what compiles and runs it: packages and the device's runtime."""
    device = run.run["config"].get("device")
    return run.run["config"].get("versions"), device.get("runtime") if isinstance(device, Mapping) else None


def _tokens(sample: DivergenceRecord) -> list[list[int]]:
    return [getattr(sample.arms, arm).tokens for arm in ARMS]
