"""From the records of a run to the figures of its report. A pure function of the records: same records, same summary.

An invalid sample enters no figure but the count of invalid samples and the headroom.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import to_builtins
from msgspec.structs import asdict

from jaxkv.experiments.divergence import cause
from jaxkv.experiments.divergence.record import CONTROLS, DivergenceRecord
from jaxkv.experiments.record_parts import LABEL_CHANGES, Setting, known
from jaxkv.experiments.report_parts import begin_summary, summarize_comparisons
from jaxkv.reporting import statistics
from jaxkv.reporting.shares import PAIRED, clustered_share, share


def summarize(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values for summary.json, begun as `begin_summary` says. Without a valid sample no figures of agreement."""
    summary, samples, valid = begin_summary(records, run, DivergenceRecord)
    sessions = run.get("sessions", [])
    summary |= {
        "headroom": _find_headroom(samples),
        "gate": next((s["gate"] for s in sessions if "gate" in s), None),  # None: samples were made without
        "sampling": _count_distinct([asdict(s.sampling) for s in samples]),
        "shapes": _describe_shapes(samples),
    }
    if not valid:
        remedies = [{"remedy": session["remedy"]} for session in sessions if "remedy" in session]
        return summary | (remedies[-1] if remedies else {})
    compared = summarize_comparisons([(s.problem, s.teacher_forced) for s in valid])
    summary |= {
        "truth": to_builtins(cause.measure_distance([to_builtins({"truth": s.truth or None}) for s in valid])),
        "truth_left_out": next((s.truth_left_out for s in valid if s.truth_left_out), None),
        "teacher_forced": compared,
        "controls": {
            name: summarize_comparisons([(s.problem, getattr(s.controls, name)) for s in valid]) for name in CONTROLS
        },
        "free_running": _summarize_free_running(valid, compared),
        "accuracy": {scorer: _summarize_accuracy(valid, scorer) for scorer in valid[0].arms.cached.scores},
    }
    if run.get("config", {}).get("task") == "ifeval":
        summary["instruction_level"] = _summarize_instructions(valid)
    return summary


def _summarize_instructions(valid: Sequence[DivergenceRecord]) -> dict[str, Any]:
    """Of IFEval: the share of all instructions followed, scorer -> arm -> share with an interval over prompts.

    An answer there has a 1 or a 0 for each instruction of the prompt.
    """

    def followed(scorer: str, arm: str) -> dict[str, Any] | None:
        answers = [known(getattr(s.arms, arm).scores[scorer].answer) for s in valid]
        counts = [answer.count("1") for answer in answers]
        return clustered_share(counts, [len(answer) for answer in answers], unit="prompts")

    scorers = valid[0].arms.cached.scores
    return {scorer: {arm: followed(scorer, arm) for arm in ("cached", "uncached")} for scorer in scorers}


def _summarize_free_running(
    valid: Sequence[DivergenceRecord], forced: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    runs = [(s, s.free_running) for s in valid if s.free_running is not None]
    if not runs:
        return None
    diverged = [run for _, run in runs if run.diverged]
    after = [(d.differing_after, d.compared_after) for d in diverged if d.compared_after]
    starts = [known(d.first_diverged) for d in diverged]
    together = [s.arms.cached.stop == "length" for s, run in runs if not run.diverged]
    summary: dict[str, Any] = {
        "diverged": share(len(diverged), len(runs)),
        "together": {"ended": together.count(False), "cut": together.count(True)},  # cut ones might part yet
        "first_diverged": None,
        "differing_after": clustered_share([a for a, _ in after], [b for _, b in after]),
        "expected": None,
        "first_flip_agrees": None,
    }
    if starts:
        low, *quartiles, high = np.quantile(starts, [0, 0.25, 0.5, 0.75, 1]).tolist()
        first = {"sequences": len(starts), "min": int(low), "quartiles": quartiles, "max": int(high)}
        summary["first_diverged"] = first
    compared = [(s, run, s.teacher_forced.flip) for s, run in runs if s.teacher_forced and s.teacher_forced.flip]
    if forced and compared and all(s.sampling.sampler == "greedy" for s, _, _ in compared):
        lengths = [len(flips) for _, _, flips in compared]
        found = forced["flips"]
        rate, *interval = (statistics.expected_divergence(p, lengths) for p in (found["rate"], *found["interval"]))
        summary["expected"] = {
            "rate": rate,
            "interval": interval,
            "method": "mean of 1 - (1 - p)^n over sequences, p the flip rate per token",
        }
        if found["count"] == 0:  # its interval and bound are those of the share of sequences with a flip already
            summary["expected"] |= {"interval": found["interval"], "upper_bound": found["upper_bound"]}
        agrees = sum((flips.index(True) if True in flips else None) == run.first_diverged for _, run, flips in compared)
        summary["first_flip_agrees"] = {"count": agrees, "total": len(compared)}
    return summary


def _summarize_accuracy(valid: Sequence[DivergenceRecord], scorer: str) -> dict[str, Any]:
    cached = np.array([s.arms.cached.scores[scorer].correct for s in valid], bool)
    uncached = np.array([s.arms.uncached.scores[scorer].correct for s in valid], bool)
    only_cached, only_uncached = int((cached & ~uncached).sum()), int((uncached & ~cached).sum())
    found = statistics.estimate_paired_share(cached.astype(float) - uncached)
    changes = Counter(s.label_change[scorer] for s in valid)
    return {
        "cached": share(int(cached.sum()), len(valid)),
        "uncached": share(int(uncached.sum()), len(valid)),
        "only_cached": only_cached,
        "only_uncached": only_uncached,
        "mcnemar_p": statistics.sign_test(only_cached, only_uncached),
        "difference": {
            "mean": float(cached.mean() - uncached.mean()),
            "interval": list(found.interval()),
            "method": PAIRED,
        },
        "label_changes": {kind: changes[kind] for kind in LABEL_CHANGES},
    }


def _find_headroom(samples: Sequence[Setting]) -> dict[str, Any] | None:
    if not samples:
        return None
    worst = max(samples, key=lambda s: s.headroom.max_abs / s.headroom.limit)
    used = worst.headroom.max_abs / worst.headroom.limit
    return asdict(worst.headroom) | {"share_of_limit": used, "problem": worst.problem}


def _count_distinct(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    counts = Counter(tuple(sorted(v.items())) for v in values)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], repr(item[0])))
    return [dict(items) | {"samples": count} for items, count in ordered]


def _describe_shapes(samples: Sequence[Setting]) -> dict[str, Any]:
    """Range of each shape over the samples, and the distinct values of the uncached regime."""
    columns = {name: [getattr(s.shapes, name) for s in samples] for name in ("batch", "prefill", "slots", "left_pad")}
    columns["prompt_tokens"] = [s.prompt_tokens for s in samples]
    tiles = {s.shapes.tile for s in samples}
    return {
        **{name: [min(values), max(values)] if values else None for name, values in columns.items()},
        "uncached": sorted({s.shapes.uncached for s in samples}),
        "regime": sorted("plain" if tile is None else f"aligned, tile {tile}" for tile in tiles),
    }
