"""What summaries of different experiments share: picking out the samples, and saying how many there are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.analysis import statistics

Record = Mapping[str, Any]


def check(samples: Iterable[Record], validate: Callable[[Record], None]) -> list[Record]:
    """The samples as a list.

    Raises:
      ValueError: a sample breaks its schema; starts with its key and the field.
    """
    checked = list(samples)
    for sample in checked:
        try:
            validate(sample)
        except ValueError as error:
            raise ValueError(f"sample {sample.get('key')}: {error}") from error
    return checked


def collect(records: Sequence[Record], experiment: str, validate: Callable[[Record], None]) -> list[Record]:
    """The records of an experiment, checked and in order of their problems.

    Raises:
      ValueError: a record breaks its schema; starts with its key and the field.
    """
    samples = (r for r in records if r.get("experiment") == experiment)
    return check(sorted(samples, key=lambda sample: sample.get("problem", 0)), validate)


def count_problems(samples: Sequence[Record], run: Mapping[str, Any]) -> dict[str, int]:
    """How many problems were asked for, have a sample, and have no invalid one."""
    problems = {s["problem"] for s in samples}
    broken = {s["problem"] for s in samples if s["status"] == "invalid"}
    asked = run.get("config", {}).get("num_problems", len(problems))
    return {"asked": asked, "total": len(problems), "ok": len(problems - broken)}


def list_invalid(samples: Sequence[Record]) -> list[dict[str, Any]]:
    """Where invalid samples broke."""
    return [{"key": list(s["key"])} | dict(s["invalid"]) for s in samples if s["status"] == "invalid"]


def say_invalid(name: str, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is invalid of a change or a quantizer, a sentence for each group (jaxkv.analysis.summary.group_invalid)."""
    return [
        f"{name}: {group['samples']} samples invalid at {group['reason']} ({group['arm']}, {group['value']}); counted "
        "nowhere."
        for group in groups
    ]


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
    """sum(sums) / sum(sizes) with a bootstrap interval over problems, None for one problem, and the largest of one."""
    interval = list(statistics.cluster_bootstrap(sums, sizes)) if len(sums) > 1 else None
    largest = max((total / size for total, size in zip(sums, sizes, strict=True) if size), default=0.0)
    return {"mean": float(np.sum(sums) / np.sum(sizes)), "interval": interval, "max": float(largest)}


def say_few(problems: int) -> list[str]:
    """What few problems mean for the intervals."""
    if problems == 1:
        return ["With one problem there are no intervals."]
    return [f"An interval resampled from {problems} problems is rough."] if problems < 20 else []
