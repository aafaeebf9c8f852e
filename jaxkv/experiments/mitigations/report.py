"""The mitigations table: what each variant changes, how far from the truth it stays, and what it costs.

Reads records and timings alone, imports neither jax nor flax.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import asdict

from jaxkv.experiments.mitigations.record import REFERENCES, Distances, MitigationsRecord
from jaxkv.experiments.record_parts import ARMS, Distance, known
from jaxkv.experiments.report_parts import Report, group_invalid, summarize_comparisons
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Brief, Bullets, Cell, Only, Paragraph, Table
from jaxkv.reporting.format import (
    format_bound,
    format_count,
    format_counted_share,
    format_mean,
    format_number,
    format_percent,
)
from jaxkv.reporting.shares import clustered_share, describe_column, share

Record = Mapping[str, Any]
Summary = Mapping[str, Any]
NUMBERS = ("kl", "rms", "max_abs")
JUDGED = ("rms", "kl")
NOTES = (
    "KL in nats, RMS and largest difference in logits; fp64: the cached arm in float64, along whose own tokens all "
    "distances are measured.",
    "Intervals are 95 %, over whole problems; with few of them they are rough. ≤: one-sided 95 % bound of a zero, "
    "of the share of sequences where steps are counted.",
    "nearer: the arm whose distance is smaller, where the paired interval over problems (Student's t, with wide "
    "ends) leaves out 0. Each is judged alone: of twenty such intervals one may miss by chance.",
    "MB: 10^6 bytes of weights and cache as this device holds them (on a CPU most 16-bit weights lie in fp32); stored: "
    "in the policy's own dtypes; program: the most the decode program holds at once.",
    "ms: the fastest of the repeats, which on a machine that does other work too is still no fair race.",
)


def summarize_mitigations(
    records: Sequence[object], timings: Sequence[Record], run: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Summarizes the 'mitigations' records of a run.

    Args:
      records: samples; those of other experiments are left out. Variants keep the order in which they first appear.
      timings: lines of timing.jsonl; the last cost of a variant counts.
      run: content of run.json; its fingerprint ties the summary to the run.

    Returns:
      Plain values. An invalid sample enters no figure but the count of invalid ones.
    """
    samples = [r for r in records if isinstance(r, MitigationsRecord)]
    names = list(dict.fromkeys(sample.variant for sample in samples))
    costs = {
        t["variant"]: t["cost"] for t in timings if t.get("experiment") == "mitigations" and t.get("cost") is not None
    }
    return {
        "experiment": "mitigations",
        "fingerprint": (run or {}).get("fingerprint"),
        "problems": sorted({sample.problem for sample in samples}),
        "variants": [
            _summarize_variant(
                name, sorted((s for s in samples if s.variant == name), key=lambda s: s.problem), costs.get(name)
            )
            for name in names
        ],
    }


def _summarize_variant(name: str, samples: Sequence[MitigationsRecord], cost: Record | None) -> dict[str, Any]:
    valid = [s for s in samples if s.status == "ok"]
    free = [known(s.free_running) for s in valid]
    first = samples[0]
    summary: dict[str, Any] = {
        "variant": name,
        "precision": dict(first.precision),
        "held": asdict(first.held),
        "tile": first.shapes.tile,
        "problems": {"total": len(samples), "ok": len(valid), "invalid": len(samples) - len(valid)},
        "invalid": group_invalid(samples),
        "teacher_forced": summarize_comparisons([(s.problem, s.teacher_forced) for s in valid]),
        "diverged": share(sum(run.diverged for run in free), len(valid)),
        "first_diverged": [run.first_diverged for run in free if run.diverged],
        "distance": None,
        "cost": dict(cost) if cost else None,
    }
    counted = [distance for s in valid if (distance := known(s.distance)).weights.kl]
    if counted:
        summary["distance"] = {
            reference: {arm: _describe([_distance(d, arm, reference) for d in counted]) for arm in ARMS}
            | {"nearer": {metric: _judge(counted, reference, metric) for metric in JUDGED}}
            for reference in REFERENCES
        } | {"weights": _describe([d.weights for d in counted])}
    return summary


def _distance(distances: Distances, arm: str, reference: str) -> Distance:
    found: Distance = getattr(getattr(distances, arm), reference)
    return found


def _describe(distances: Sequence[Distance]) -> dict[str, Any]:
    sizes = [len(d.kl) for d in distances]
    flips = clustered_share([sum(d.flip) for d in distances], sizes)
    columns = {name: [np.asarray(getattr(d, name), np.float64) for d in distances] for name in NUMBERS}
    return {"flips": flips} | {name: describe_column(column, sizes) for name, column in columns.items()}


def _judge(samples: Sequence[Distances], reference: str, metric: str) -> dict[str, Any]:
    """Which arm is nearer, problems being the unit.

    Returns:
      differ: share of problems at any of whose steps the two distances differ. mean and interval of cached minus
      uncached (None for one problem). nearer: 'cached', 'uncached', 'same' (no step of no problem differs) or None,
      where the interval does not say.
    """
    columns = [[getattr(_distance(d, arm, reference), metric) for d in samples] for arm in ARMS]
    cached, uncached = ([float(np.mean(column)) for column in arm] for arm in columns)
    differ = sum(a != b for a, b in zip(*columns, strict=True))
    found = statistics.estimate_paired(cached, uncached, skewed=True)
    interval = statistics.ends(found)
    nearer = "same" if not differ else None
    if differ and interval is not None:
        nearer = "uncached" if interval[0] > 0 else "cached" if interval[1] < 0 else None
    return {
        "differ": share(differ, len(samples)),
        "mean": float(np.mean(cached) - np.mean(uncached)),
        "interval": interval,
        "nearer": nearer,
    }


def _short_share(entry: Record | None) -> str:
    """``3 of 128 [0.8, 6.7] %``; a zero with its bound."""
    if entry is None:
        return "-"
    if "upper_bound" in entry:
        return f"0 of {entry['total']} ≤ {format_bound(entry)}"
    low, high = entry["interval"]
    return f"{format_count(entry)} [{format_percent(low)}, {format_percent(high)}] %"


def _verdict(judged: Record) -> str:
    return {None: "cannot tell", "same": "no difference"}.get(judged["nearer"]) or str(judged["nearer"])


def _reason(judged: Record) -> str:
    """The verdict with what it rests on."""
    if judged["nearer"] == "same":
        return f"no difference: {format_counted_share(judged['differ'], 'problems')} differ"
    if judged["interval"] is None:
        return "cannot tell from one problem"
    low, high = (f"{'+' if end > 0 else ''}{format_number(end)}" for end in judged["interval"])
    mean = f"{'+' if judged['mean'] > 0 else ''}{format_number(judged['mean'])}"
    return f"{_verdict(judged)}: cached - uncached {mean} [{low}, {high}]"


def _fastest(values: Sequence[float] | None) -> str:
    return "-" if not values else format_number(min(values), 3)


def _cost(entry: Summary) -> list[str]:
    """ms a token, ms of prefill, MB held, MB stored, MB of the program."""
    cost = entry["cost"]
    if cost is None:
        return ["-"] * 5
    size = cost["bytes"]
    held, stored = size["weights"] + size["cache"], size["weights_as_stored"] + size["cache"]
    peak = "-" if size["program_peak"] is None else format_number(size["program_peak"] / 1e6, 3)
    return [
        _fastest(cost["ms_a_token"]),
        _fastest(cost["prefill_ms"]),
        format_number(held / 1e6, 3),
        format_number(stored / 1e6, 3),
        peak,
    ]


def _invalid(entry: Summary) -> str:
    return "; ".join(f"{g['samples']} at {g['reason']} ({g['arm']}, {g['value']})" for g in entry["invalid"])


def _write_agreement(summary: Summary) -> list[Block]:
    """Cached against uncached beside what it costs; for a terminal, two tables."""
    head = ["variant", "valid", "argmax flips per token", "sequences that diverge", "mean KL, nats", "bit-equal steps"]
    costs = ["ms a token", "prefill, ms", "weights and cache, MB", "as stored, MB", "decode program, MB"]
    rows: list[list[Cell]] = []
    for entry in summary["variants"]:
        forced, problems = entry["teacher_forced"], entry["problems"]
        cells: list[Cell] = ["none valid", "-", "-", "-"]
        if forced is not None:
            equal = Brief(format_counted_share(forced["bit_equal"]), f"{format_percent(forced['bit_equal']['rate'])} %")
            cells = [_share(forced["flips"]), _share(entry["diverged"]), _mean(forced["kl"]), equal]
        rows.append([entry["variant"], f"{problems['ok']} of {problems['total']}", *cells, *_cost(entry)])
    title = "Cached against uncached, and cost of the cached arm"
    blocks: list[Block] = [Table([*head, *costs], rows, title, terminal=(0, 2, 3, 4, 5))]
    if measured := [[row[0], *row[len(head) :]] for row in rows if row[-2] != "-"]:
        blocks.append(Only("terminal", [Table(["variant", *costs], measured, "Cost of the cached arm")]))
    return blocks


def _write_distances(summary: Summary) -> list[Block]:
    """Distance to the truth with the weights as given, and the rounding of weights apart from that of arithmetic."""
    titles = {
        "given": "Distance to fp64 of the weights as given",
        "rounded": "Distance to fp64 of the weights as each variant rounds them (arithmetic alone)",
    }
    head = ["variant", *(f"{name}, {arm}" for name in ("RMS", "largest difference", "KL, nats") for arm in ARMS)]
    head += [f"argmax differs, {arm}" for arm in ARMS] + ["nearer by RMS", "nearer by KL"]
    entries = [entry for entry in summary["variants"] if entry["distance"] is not None]
    blocks: list[Block] = []
    for reference, shown in (("given", (0, 1, 2, 9, 5, 6, 10)), ("rounded", (0, 1, 2, 9))):
        rows: list[list[Cell]] = []
        for entry in entries:
            found = entry["distance"][reference]
            columns = zip(*(_figures(found[arm]) for arm in ARMS), strict=True)
            nearer = [Brief(_reason(found["nearer"][metric]), _verdict(found["nearer"][metric])) for metric in JUDGED]
            rows.append([entry["variant"], *itertools.chain.from_iterable(columns), *nearer])
        blocks.append(Table(head, rows, titles[reference], terminal=shown))
        if reference == "given":
            tokens = [[row[0], *row[7:9]] for row in rows]
            title = "Tokens at which the argmax is not that of fp64 of the weights as given"
            blocks.append(Only("terminal", [Table(["variant", *ARMS], tokens, title)]))
    head = ["variant", "RMS", "largest difference", "KL, nats", "argmax differs"]
    rows = [[entry["variant"], *_figures(entry["distance"]["weights"])] for entry in entries]
    return [*blocks, Table(head, rows, "Rounding of the weights alone, fp64 against fp64", terminal=(0, 1))]


def _mean(found: Summary) -> Brief:
    return Brief(format_mean(found), format_number(found["mean"]))


def _share(entry: Summary | None) -> Brief:
    return Brief(format_counted_share(entry), _short_share(entry))


def _figures(found: Summary) -> list[Cell]:
    """RMS, largest difference, KL, tokens with another argmax."""
    return [_mean(found["rms"]), format_number(found["max_abs"]["max"]), _mean(found["kl"]), _share(found["flips"])]


def _unequal(summary: Summary) -> list[str]:
    """What keeps the rows from being of the same problems."""
    asked, lines = len(summary["problems"]), []
    for entry in summary["variants"]:
        problems = entry["problems"]
        if problems["invalid"]:
            counted = f"{problems['invalid']} of {problems['total']} problems are invalid and counted nowhere"
            lines.append(f"{entry['variant']}: {counted}: {_invalid(entry)}")
        if problems["total"] < asked:
            lines.append(f"{entry['variant']}: UNFINISHED, {problems['total']} of {asked} problems")
    return lines


def write_mitigations(summary: Summary) -> list[Block]:
    """What keeps rows apart, the tables, and how to read them."""
    return [
        Paragraph(f"{len(summary['problems'])} problems, {len(summary['variants'])} variants."),
        *([Bullets(lines)] if (lines := _unequal(summary)) else []),
        *_write_distances(summary),
        *_write_agreement(summary),
        Bullets(NOTES),
    ]


REPORT = Report(
    "Which arm is nearer to fp64",
    lambda run: summarize_mitigations(run.records, run.timings, run.run),
    write_mitigations,
)
