"""Perplexity of a text by arm and change of the cache. Reads records alone, imports neither jax nor flax."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from jaxkv.experiments.perplexity.record import PerplexityRecord
from jaxkv.experiments.record_parts import ARMS, CLEAN, known
from jaxkv.experiments.report_parts import (
    Report,
    add_saturated,
    average_caches,
    collect,
    count_problems,
    describe_problems,
    list_invalid,
    list_unfinished,
    say_few,
    say_saturated,
    say_unfinished,
    say_unpacked,
)
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Brief, Bullets, Cell, Table
from jaxkv.reporting.format import format_bound, format_count, format_counted_share, format_number, format_percent
from jaxkv.reporting.shares import clustered_share
from jaxkv.tasks.perplexity import aggregate

Record = Mapping[str, Any]
Summary = Mapping[str, Any]
HEADER = ["change", "windows", "tokens", "uncached", "cached", "cached / uncached"]
HEADER += ["a word", "bits a byte", "KL", "flips", "cache bits", "packed, %", "cache bytes a row"]
NARROW = (0, 1, 10, 3, 4, 5, 8, 9)  # without tokens, words, bytes
NOTE = (
    "Perplexity a token, of the text's own tokens fed one by one through the cache, and without it. KL(uncached || "
    "cached) in nats a token. Intervals are 95 %, over windows; without a flip, the bound is of the share of "
    "windows with one."
)
UNITS = "A word, bits a byte: of the cached arm; they compare across tokenizers."
PACKED = (
    "Cache bits: per element of the whole cache at a window's length, first, recent and pending tokens at full width. "
    "Packed: share of elements that are packed."
)


def summarize_perplexity(records: Sequence[object], run: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Summarizes the 'perplexity' records of a run.

    Args:
      records: samples; those of other experiments are left out. Changes keep the order in which they first appear.
      run: content of run.json.

    Returns:
      Plain values. An invalid window enters no figure but the count of invalid ones. Where the clean cache was run,
      `problems.ok` counts the windows that are valid with it, and `clean_windows` of a change says whether its valid
      windows are those.
    """
    samples = collect(records, PerplexityRecord)
    names = list(dict.fromkeys(r.change for r in records if isinstance(r, PerplexityRecord)))
    valid = [s for s in samples if s.status == "ok"]
    problems = count_problems(samples, run or {})
    changes = [_summarize_change(name, [s for s in valid if s.change == name]) for name in names]
    if CLEAN in names:  # a window that a change breaks is still one of the text
        clean = {s.problem for s in valid if s.change == CLEAN}
        problems |= {"ok": len(clean)}
        for entry in changes:
            entry["clean_windows"] = {s.problem for s in valid if s.change == entry["change"]} == clean
    return {
        "experiment": "perplexity",
        "fingerprint": (run or {}).get("fingerprint"),
        "problems": problems,
        "invalid": list_invalid(samples),
        "unfinished": list_unfinished(samples, run or {}),
        "changes": changes,
    }


def _summarize_change(name: str, samples: Sequence[PerplexityRecord]) -> dict[str, Any]:
    summary: dict[str, Any] = {"change": name, "windows": len({s.problem for s in samples})}
    summary |= {"seeds": sorted({s.seed for s in samples})}
    if not samples:
        return summary
    summary |= {
        "spec": samples[0].spec and to_builtins(samples[0].spec),
        "cache": average_caches([s.cache for s in samples]),
        "saturated": add_saturated(s.saturated for s in samples),
    }
    summary |= {arm: aggregate(map(to_builtins, samples), arm) for arm in ARMS}
    by_window: dict[int, list[PerplexityRecord]] = {}
    for sample in samples:
        by_window.setdefault(sample.problem, []).append(sample)
    windows = by_window.values()
    tokens = [sum(s.tokens for s in each) for each in windows]
    nats = [[known(s.nats) for s in each] for each in windows]
    gaps = [math.fsum(n.cached - n.uncached for n in each) for each in nats]
    found = statistics.estimate_signed_mean(gaps, tokens)
    interval = found and [math.exp(end) for end in found.interval()]
    summary["ratio"] = {"mean": math.exp(math.fsum(gaps) / sum(tokens)), "interval": interval}
    summary["kl"] = math.fsum(known(s.logits).kl for s in samples) / sum(tokens)
    flips = [sum(known(s.logits).flips for s in each) for each in windows]
    summary["flips"] = clustered_share(flips, tokens, unit="windows")
    return summary


def _stack(flips: Record) -> str:
    """Flips over their interval or bound, narrow."""
    if "upper_bound" in flips:
        return f"{format_count(flips)}\n< {format_bound(flips)}"
    return f"{format_count(flips)}\n{'..'.join(map(format_percent, flips['interval']))} %"


def _make_rows(summary: Summary) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for found in summary["changes"]:
        if not found["windows"]:
            rows.append([found["change"], "0", *["none valid"] * (len(HEADER) - 2)])
            continue
        cached, ratio = found["cached"], found["ratio"]
        ends = "" if ratio["interval"] is None else " [{:.6g}, {:.6g}]".format(*ratio["interval"])
        rows.append(
            [
                found["change"],
                str(found["windows"]),
                str(cached["tokens"]),
                format_number(found["uncached"]["perplexity"], 5),
                format_number(cached["perplexity"], 5),
                f"{ratio['mean']:.6g}{ends}",
                format_number(cached["word_perplexity"], 5) if "word_perplexity" in cached else "-",
                format_number(cached["bits_per_byte"], 5) if "bits_per_byte" in cached else "-",
                format_number(found["kl"]),
                Brief(format_counted_share(found["flips"]), _stack(found["flips"])),
                format_number(found["cache"]["bits"], 3),
                format_percent(found["cache"]["packed"]),
                f"{found['cache']['bytes']:.0f}",
            ]
        )
    return rows


def _notes(summary: Summary) -> list[str]:
    broken = [f"window {bad['key'][1]} is invalid: {bad['op']} of the {bad['arm']} arm" for bad in summary["invalid"]]
    lines = [NOTE, *say_few(summary["problems"]["ok"]), *say_unfinished(summary["unfinished"]), *broken]
    for found in summary["changes"]:
        if not found.get("clean_windows", True):
            text = f"`{found['change']}` has {found['windows']} valid windows, others than the clean cache's "
            text += str(summary["problems"]["ok"])
            lines.append(text + (": its uncached figure is of its own windows." if found["windows"] else "."))
        if found["windows"]:
            lines += [*say_unpacked(found), *say_saturated(f"`{found['change']}`", found["saturated"])]
    return lines


def write_perplexity(summary: Summary) -> list[Block]:
    """The table of all changes, and how to read it."""
    return [
        Bullets([describe_problems(summary)]),
        Table(HEADER, _make_rows(summary), terminal=NARROW),
        Bullets([UNITS, PACKED, *_notes(summary)]),
    ]


REPORT = Report("Perplexity", lambda run: summarize_perplexity(run.records, run.run), write_perplexity)
