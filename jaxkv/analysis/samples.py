"""What summaries of different experiments share: picking out the samples, and saying how many there are."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import asdict

from jaxkv.analysis import statistics
from jaxkv.analysis.format import format_count
from jaxkv.experiments.injection.record import InjectionRecord
from jaxkv.experiments.perplexity.record import PerplexityRecord
from jaxkv.experiments.record_parts import CacheSize, Sample, Saturated

S = TypeVar("S", bound=Sample)


def collect(records: Sequence[object], kind: type[S]) -> list[S]:
    """The records of an experiment in order of their problems."""
    return sorted((r for r in records if isinstance(r, kind)), key=lambda sample: sample.problem)


def count_problems(samples: Sequence[Sample], run: Mapping[str, Any]) -> dict[str, int]:
    """How many problems were asked for, have a sample, and have no invalid one."""
    problems = {s.problem for s in samples}
    broken = {s.problem for s in samples if s.invalid is not None}
    asked = run.get("config", {}).get("num_problems", len(problems))
    return {"asked": asked, "total": len(problems), "ok": len(problems - broken)}


def list_invalid(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Where invalid samples broke."""
    return [{"key": list(s.key)} | asdict(s.invalid) for s in samples if s.invalid is not None]


def say_invalid(name: str, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is invalid of a change or a quantizer, a sentence for each group (jaxkv.analysis.summary.group_invalid)."""
    return [
        f"{name}: {group['samples']} samples invalid at {group['reason']} ({group['arm']}, {group['value']}); counted "
        "nowhere."
        for group in groups
    ]


def average_caches(caches: Sequence[CacheSize]) -> dict[str, float] | None:
    """Means over caches; None of no cache."""
    if not caches:
        return None
    return {part: float(np.mean([getattr(c, part) for c in caches])) for part in CacheSize.__struct_fields__}


def add_saturated(found: Iterable[Saturated | None]) -> dict[str, int] | None:
    """Sums over those that are there; None if none is."""
    kept = [asdict(counts) for counts in found if counts]
    return {part: sum(counts[part] for counts in kept) for part in kept[0]} if kept else None


def say_saturated(name: str, found: Mapping[str, int] | None) -> list[str]:
    """How many elements a quantizer's format cannot hold, where there are any."""
    if not found or not found["k"] + found["v"]:
        return []
    count = format_count({"count": found["k"] + found["v"], "total": found["elements"]})
    return [f"{name}: {count} elements lie outside its format."]


def say_packed_nothing(name: str, shares: Sequence[float]) -> list[str]:
    """Of a quantizer whose shares of packed elements are all 0."""
    text = f"{name} packed nothing: its windows, or layers that it leaves alone, hold the whole text."
    return [text] if shares and not any(shares) else []


def say_unpacked(entry: Mapping[str, Any]) -> list[str]:
    """`say_packed_nothing` of a change with its `spec` and mean `cache`."""
    spec, cache = entry["spec"], entry["cache"]
    quantized = spec is not None and spec["family"] == "quant"
    return say_packed_nothing(f"`{entry['change']}`", [cache["packed"]] if quantized and cache else [])


def describe_problems(summary: Mapping[str, Any]) -> str:
    """The header of a table."""
    problems = summary["problems"]
    text = f"{problems['ok']} of {problems['total']} problems valid"
    missing = problems["asked"] - problems["total"]
    unfinished = [f"{missing} of {problems['asked']} problems have no record yet"] if missing > 0 else []
    if summary.get("samples_missing"):
        unfinished.append(f"{summary['samples_missing']} samples are missing")
    return text + (f"; UNFINISHED: {', '.join(unfinished)}" if unfinished else "")


def mean_over_problems(sums: Sequence[float], sizes: Sequence[float]) -> dict[str, Any]:
    """sum(sums) / sum(sizes) with an interval over problems, None below three problems, and the largest of one."""
    found = statistics.estimate_mean(sums, sizes)
    largest = max((total / size for total, size in zip(sums, sizes, strict=True) if size), default=0.0)
    return {
        "mean": float(np.sum(sums) / np.sum(sizes)),
        "interval": statistics.ends(found),
        "max": float(largest),
    }


def say_few(problems: int) -> list[str]:
    """What few problems mean for the intervals."""
    if problems == 1:
        return ["With one problem there are no intervals."]
    return [f"An interval over {problems} problems is wide and rough."] if problems < 20 else []


def list_unfinished(
    samples: Sequence[InjectionRecord | PerplexityRecord], run: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Changes of the cache that lack samples of problems which have some.

    Args:
      samples: of one experiment.
      run: content of run.json. Sessions say what they asked for; of older runs only what was begun is known.

    Returns:
      `change`, its `samples`, and how many were `asked`.
    """
    problems = {s.problem for s in samples}
    name = samples[0].experiment if samples else ""
    sessions = [session.get("asked", {}).get(name, ()) for session in run.get("sessions", ())]
    wanted = [(change, seed) for session in sessions for change, seed in session]
    wanted += [(s.change, s.seed) for s in samples]
    seeds = Counter(change for change, _ in dict.fromkeys(wanted))
    have = Counter(s.change for s in samples)
    asked = {change: len(problems) * count for change, count in seeds.items()}
    return [{"change": c, "samples": have[c], "asked": asked[c]} for c in asked if have[c] < asked[c]]


def say_unfinished(unfinished: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each of `list_unfinished`."""
    return [
        f"UNFINISHED: `{found['change']}` has {found['samples']} of {found['asked']} samples." for found in unfinished
    ]
