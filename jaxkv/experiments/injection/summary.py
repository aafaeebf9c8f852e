"""What changed caches do to a model: distance to its own clean run, and the task's score beside the clean one.

Reads records alone, imports neither jax nor flax. The unit of every interval is the problem with all its seeds: noise
is keyed by (seed, problem), so problems are independent of each other at one seed, and their spread covers seeds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import to_builtins

from jaxkv.experiments import report_parts as parts
from jaxkv.experiments.injection.claims import judge
from jaxkv.experiments.injection.record import InjectionRecord
from jaxkv.experiments.record_parts import CLEAN, find_headline, known
from jaxkv.experiments.report_parts import Summary
from jaxkv.reporting import statistics
from jaxkv.reporting.shares import clustered_share, mean_over_problems

Clusters = dict[int, list[InjectionRecord]]  # problem -> its valid samples
INSTRUCTIONS = ", instructions"  # of ifeval: the share of all instructions, not of prompts


def summarize_injection(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'injection' records of a run, as `begin_summary` says; changes keep their order.

    A problem whose clean run is invalid enters no figure either.
    """
    summary, samples, every = parts.begin_summary(records, run, InjectionRecord)
    clean: Clusters = {s.problem: [s] for s in every if s.change == CLEAN}
    task = run.get("config", {}).get("task")
    scorers = _find_scorers(samples, task)
    clusters: dict[str, Clusters] = {}
    changes = []
    for name in dict.fromkeys(r.change for r in records if isinstance(r, InjectionRecord)):
        found = clusters.setdefault(name, {})
        for sample in every:
            if sample.change == name and sample.problem in clean:
                found.setdefault(sample.problem, []).append(sample)
        changes.append(_summarize_change([s for s in samples if s.change == name], found, clean, scorers))
    primary = find_headline(samples[0].run.scores) if samples else ""
    values = {name: _find_values(found, primary) for name, found in clusters.items()}
    return {
        **summary,
        "task": task,
        "scorers": scorers,
        "primary": primary,
        "problems": summary["problems"] | {"ok": len(clean)},
        "changes": changes,
        "unfinished": parts.list_unfinished(samples, run),
        "windows": _group_windows(changes),
        **judge(changes, values, primary),
    }


def _find_scorers(samples: Sequence[InjectionRecord], task: str | None) -> list[str]:
    names = list(dict.fromkeys(scorer for s in samples for scorer in s.run.scores))
    return [*(name + INSTRUCTIONS for name in names if task == "ifeval"), *names]


def _score(sample: InjectionRecord, scorer: str) -> tuple[float, float]:
    """Points of a sample and how many there are to have."""
    if scorer.endswith(INSTRUCTIONS):
        followed = sample.run.scores[scorer.removesuffix(INSTRUCTIONS)].answer or ""
        return float(followed.count("1")), float(len(followed))
    return float(sample.run.scores[scorer].correct), 1.0


def _average(clusters: Clusters, scorer: str, problems: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Points and possible points of each problem, each the mean over its seeds: [problems] both."""
    pairs = [np.mean([_score(s, scorer) for s in clusters[problem]], axis=0) for problem in problems]
    points, possible = np.asarray(pairs, np.float64).reshape(-1, 2).T
    return points, possible


def _find_values(clusters: Clusters, scorer: str) -> dict[str, dict[int, float]]:
    """Score and KL of each problem, means over its seeds: what changes are compared by."""
    kl: dict[int, float] = {}
    for problem, found in clusters.items():
        if means := [np.mean(s.teacher_forced.kl) for s in found if s.teacher_forced and s.teacher_forced.kl]:
            kl[problem] = float(np.mean(means))
    score = {p: float(np.mean([_score(s, scorer)[0] for s in found])) for p, found in clusters.items() if scorer}
    return {"score": score, "kl": kl}


def _summarize_score(valid: Clusters, control: Clusters, scorer: str) -> dict[str, Any] | None:
    """Mean score with its interval, and its share of the control's, over the problems that both have."""
    problems = sorted(valid)
    points, possible = _average(valid, scorer, problems)
    if not possible.sum():
        return None
    clean = _average(control, scorer, problems)
    mean, base = (float(sums.sum() / sizes.sum()) for sums, sizes in ((points, possible), clean))
    ratio = statistics.share_of_control((points, possible), clean) if base and valid is not control else None
    return {
        "mean": mean,
        "interval": list(statistics.clustered_share_interval(points, possible)),
        "problems": len(problems),
        "of_control": mean / base if base else None,
        "of_control_interval": ratio and [max(0.0, ratio[0]), ratio[1]],
    }


def _count(clusters: Sequence[Sequence[InjectionRecord]], count: Any, size: Any) -> tuple[list[float], list[float]]:
    return [sum(map(count, c)) for c in clusters], [sum(map(size, c)) for c in clusters]


def _share_over_seeds(clusters: Sequence[Sequence[InjectionRecord]], count: Any, size: Any) -> dict[str, Any] | None:
    """`clustered_share` over problems of all seeds' trials, which say no more than the trials of one seed would."""
    counts, sizes = _count(clusters, count, size)
    once = int(sum(max(map(size, cluster)) for cluster in clusters))
    return clustered_share([int(n) for n in counts], [int(n) for n in sizes], once, "problems")


def _tokens_shared(sample: InjectionRecord) -> int:
    """Tokens before the free runs part; all of the run's where they do not."""
    first = known(sample.free_running).first_diverged
    return len(sample.run.tokens) if first is None else first


def _summarize_change(
    members: Sequence[InjectionRecord], valid: Clusters, control: Clusters, scorers: Sequence[str]
) -> dict[str, Any]:
    kept = [valid[problem] for problem in sorted(valid)]
    flat = [sample for cluster in kept for sample in cluster]
    clean = members[0].change == CLEAN
    entry: dict[str, Any] = {
        "change": members[0].change,
        "spec": members[0].spec and to_builtins(members[0].spec),
        "seeds": sorted({s.seed for s in members}),
        "samples": {
            "total": len(members),
            "ok": len(flat),
            "without_control": sum(s.status == "ok" for s in members) - len(flat),
        },
        "problems": len(kept),
        "invalid": parts.group_invalid(members),
        "score": {scorer: _summarize_score(control if clean else valid, control, scorer) for scorer in scorers},
        **dict.fromkeys(("kl", "agreement", "diverged", "tokens_shared")),
        "cache": parts.average_caches([s.cache for s in flat]),
        "saturated": parts.add_saturated(s.saturated for s in flat),
    }
    if clean or not flat:
        return entry
    steps = lambda s: len(known(s.teacher_forced).flip)  # noqa: E731
    if spoken := [c for c in kept if sum(map(steps, c))]:
        entry["kl"] = mean_over_problems(*_count(spoken, lambda s: sum(known(s.teacher_forced).kl), steps))
        entry["agreement"] = _share_over_seeds(spoken, lambda s: known(s.teacher_forced).flip.count(False), steps)
    entry["diverged"] = _share_over_seeds(kept, lambda s: int(known(s.free_running).diverged), lambda s: 1)
    entry["tokens_shared"] = mean_over_problems(*_count(kept, _tokens_shared, lambda s: 1))
    return entry


def _group_windows(changes: Sequence[Summary]) -> list[dict[str, Any]]:
    """Quantizers by the first and recent tokens that they keep on each side; groups of at least two."""
    groups: dict[tuple, list[str]] = {}
    for entry in changes:
        spec = entry["spec"]
        if not spec or spec["family"] != "quant" or not entry["cache"]:
            continue
        key = tuple((spec[side][part] if spec[side] else None) for side in ("k", "v") for part in ("first", "recent"))
        groups.setdefault(key, []).append(entry["change"])
    return [
        {"k": {"first": key[0], "recent": key[1]}, "v": {"first": key[2], "recent": key[3]}, "changes": names}
        for key, names in groups.items()
        if len(names) > 1
    ]
