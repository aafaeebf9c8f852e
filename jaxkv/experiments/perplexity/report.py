"""Perplexity of a text by arm and change of the cache. Reads records alone, imports neither jax nor flax."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from jaxkv.experiments import report_parts as parts
from jaxkv.experiments.perplexity.record import PerplexityRecord
from jaxkv.experiments.record_parts import ARMS, CLEAN, known
from jaxkv.experiments.report_parts import Report, Summary
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Brief, Bullets, Cell, Table
from jaxkv.reporting.format import (
    format_bound,
    format_count,
    format_counted_share,
    format_interval,
    format_number,
    format_percent,
)
from jaxkv.reporting.shares import clustered_share
from jaxkv.tasks.perplexity import aggregate

NARROW = (0, 1, 10, 3, 4, 5, 8, 9)  # columns without tokens, words and bytes
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
    """Summarizes the 'perplexity' records of a run, as `begin_summary` says; changes keep their order.

    Where the clean cache was run, `problems.ok` counts the windows that are valid with it, and `clean_windows` of a
    change says whether its valid windows are those.
    """
    summary, samples, valid = parts.begin_summary(records, run or {}, PerplexityRecord)
    names = list(dict.fromkeys(r.change for r in records if isinstance(r, PerplexityRecord)))
    changes = [_summarize_change([s for s in samples if s.change == name]) for name in names]
    if CLEAN in names:  # a window that a change breaks is still one of the text
        clean = {s.problem for s in valid if s.change == CLEAN}
        summary["problems"]["ok"] = len(clean)
        for entry in changes:
            entry["clean_windows"] = {s.problem for s in valid if s.change == entry["change"]} == clean
    return summary | {"unfinished": parts.list_unfinished(samples, run or {}), "changes": changes}


def _summarize_change(members: Sequence[PerplexityRecord]) -> dict[str, Any]:
    samples = [s for s in members if s.status == "ok"]
    summary: dict[str, Any] = {
        "change": members[0].change,
        "windows": len({s.problem for s in samples}),
        "seeds": sorted({s.seed for s in samples}),
        "invalid": parts.group_invalid(members),
        "spec": members[0].spec and to_builtins(members[0].spec),
        "cache": parts.average_caches([s.cache for s in samples]),
        "saturated": parts.add_saturated(s.saturated for s in samples),
    }
    if not samples:
        return summary
    summary |= {arm: aggregate(map(to_builtins, samples), arm) for arm in ARMS}
    windows = [list(each) for _, each in itertools.groupby(samples, lambda s: s.problem)]  # they are in order
    tokens = [sum(s.tokens for s in each) for each in windows]
    nats = [[known(s.nats) for s in each] for each in windows]
    gaps = [math.fsum(n.cached - n.uncached for n in each) for each in nats]
    found = statistics.estimate_signed_mean(gaps, tokens)
    interval = found and [math.exp(end) for end in found.interval()]
    flips = [sum(known(s.logits).flips for s in each) for each in windows]
    return summary | {
        "ratio": {"mean": math.exp(math.fsum(gaps) / sum(tokens)), "interval": interval},
        "kl": math.fsum(known(s.logits).kl for s in samples) / sum(tokens),
        "flips": clustered_share(flips, tokens, unit="windows"),
    }


def _show_flips(flips: Summary) -> Brief:
    """Flips over their interval or bound where there is little room."""
    ends = f"{'..'.join(map(format_percent, flips['interval']))} %"
    if "upper_bound" in flips:
        ends = f"< {format_bound(flips)}"
    return Brief(format_counted_share(flips), f"{format_count(flips)}\n{ends}")


def _show(entry: Summary, figure: str) -> str:
    return format_number(entry[figure], 5) if figure in entry else "-"


COLUMNS: dict[str, Callable[[Summary], Cell]] = {
    "change": lambda c: str(c["change"]),
    "windows": lambda c: str(c["windows"]),
    "tokens": lambda c: str(c["cached"]["tokens"]),
    "uncached": lambda c: _show(c["uncached"], "perplexity"),
    "cached": lambda c: _show(c["cached"], "perplexity"),
    "cached / uncached": lambda c: format_interval(c["ratio"]["mean"], c["ratio"]["interval"], "{:.6g}".format),
    "a word": lambda c: _show(c["cached"], "word_perplexity"),
    "bits a byte": lambda c: _show(c["cached"], "bits_per_byte"),
    "KL": lambda c: format_number(c["kl"]),
    "flips": lambda c: _show_flips(c["flips"]),
    "cache bits": lambda c: format_number(c["cache"]["bits"], 3),
    "packed, %": lambda c: format_percent(c["cache"]["packed"]),
    "cache bytes a row": lambda c: f"{c['cache']['bytes']:.0f}",
}


def _notes(summary: Summary) -> list[str]:
    lines = [NOTE, *parts.say_few(summary["problems"]["ok"]), *parts.say_unfinished(summary["unfinished"])]
    for found in summary["changes"]:
        if not found.get("clean_windows", True):
            counts = f"{found['windows']} valid windows, others than the clean cache's {summary['problems']['ok']}"
            why = ": its uncached figure is of its own windows." if found["windows"] else "."
            lines.append(f"`{found['change']}` has {counts}{why}")
        lines += parts.say_change(found)
    return lines


def write_perplexity(summary: Summary) -> list[Block]:
    """The table of all changes, and how to read it."""
    rows = [
        [show(change) for show in COLUMNS.values()]
        if change["windows"]
        else [change["change"], "0", *["none valid"] * (len(COLUMNS) - 2)]
        for change in summary["changes"]
    ]
    return [
        Bullets([parts.describe_problems(summary)]),
        Table(list(COLUMNS), rows, terminal=NARROW),
        Bullets([UNITS, PACKED, *_notes(summary)]),
    ]


REPORT = Report("Perplexity", lambda run: summarize_perplexity(run.records, run.run), write_perplexity)
