"""The mitigations table, from records and timings alone: how far from the truth each variant stays, and its cost."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import asdict

from jaxkv.experiments import report_parts as parts
from jaxkv.experiments.mitigations.record import REFERENCES, Distances, MitigationsRecord
from jaxkv.experiments.record_parts import ARMS, Distance, known
from jaxkv.experiments.report_parts import Report, Summary
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Brief, Bullets, Cell, Only, Paragraph, Table
from jaxkv.reporting.format import format_bound, format_count, format_counted_share, format_number, format_percent
from jaxkv.reporting.shares import clustered_share, describe_column, share

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
    records: Sequence[object], timings: Sequence[Summary], run: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Summarizes the 'mitigations' records of a run with the lines of its timing.jsonl; variants keep their order.

    The last cost of a variant counts. An invalid sample enters no figure but the count of invalid ones.
    """
    samples = parts.collect(records, MitigationsRecord)
    costs = {t["variant"]: t["cost"] for t in timings if t.get("experiment") == "mitigations" and t.get("cost")}
    return {
        "experiment": "mitigations",
        "fingerprint": (run or {}).get("fingerprint"),
        "problems": sorted({sample.problem for sample in samples}),
        "variants": [
            _summarize_variant(name, [s for s in samples if s.variant == name], costs.get(name))
            for name in dict.fromkeys(r.variant for r in records if isinstance(r, MitigationsRecord))
        ],
    }


def _summarize_variant(name: str, samples: Sequence[MitigationsRecord], cost: Summary | None) -> dict[str, Any]:
    valid = [s for s in samples if s.status == "ok"]
    free = [known(s.free_running) for s in valid]
    counted = [found for s in valid if (found := known(s.distance)).weights.kl]
    distance: dict[str, Any] | None = None
    if counted:
        distance = {reference: _compare(counted, reference) for reference in REFERENCES}
        distance["weights"] = _describe([d.weights for d in counted])
    return {
        "variant": name,
        "precision": dict(samples[0].precision),
        "held": asdict(samples[0].held),
        "tile": samples[0].shapes.tile,
        "problems": {"total": len(samples), "ok": len(valid), "invalid": len(samples) - len(valid)},
        "invalid": parts.group_invalid(samples),
        "teacher_forced": parts.summarize_comparisons([(s.problem, s.teacher_forced) for s in valid]),
        "diverged": share(sum(run.diverged for run in free), len(valid)),
        "first_diverged": [run.first_diverged for run in free if run.diverged],
        "distance": distance,
        "cost": dict(cost) if cost else None,
    }


def _compare(distances: Sequence[Distances], reference: str) -> dict[str, Any]:
    """Both arms' distances to a reference, and which is nearer."""
    found = {arm: [getattr(getattr(d, arm), reference) for d in distances] for arm in ARMS}
    nearer = {metric: _judge(*([getattr(d, metric) for d in found[arm]] for arm in ARMS)) for metric in JUDGED}
    return {arm: _describe(own) for arm, own in found.items()} | {"nearer": nearer}


def _describe(distances: Sequence[Distance]) -> dict[str, Any]:
    sizes = [len(d.kl) for d in distances]
    flips = clustered_share([sum(d.flip) for d in distances], sizes)
    columns = {name: [np.asarray(getattr(d, name), np.float64) for d in distances] for name in NUMBERS}
    return {"flips": flips} | {name: describe_column(column, sizes) for name, column in columns.items()}


def _judge(cached: Sequence[Sequence[float]], uncached: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Which arm is nearer, problems being the unit: mean and interval of cached minus uncached.

    `differ` is the share of problems at any of whose steps the distances differ; `nearer` is 'cached', 'uncached',
    'same' (none differ) or None, where the interval does not say.
    """
    differ = sum(a != b for a, b in zip(cached, uncached, strict=True))
    means = [[float(np.mean(column)) for column in arm] for arm in (cached, uncached)]
    interval = statistics.ends(statistics.estimate_paired(*means, skewed=True))
    nearer = "same" if not differ else None
    if differ and interval is not None:
        nearer = "uncached" if interval[0] > 0 else "cached" if interval[1] < 0 else None
    return {
        "differ": share(differ, len(cached)),
        "mean": float(np.mean(means[0]) - np.mean(means[1])),
        "interval": interval,
        "nearer": nearer,
    }


def _show_share(entry: Summary) -> Brief:
    """``3 of 128 [0.8, 6.7] %`` where there is little room; a zero with its bound."""
    brief = f"{format_count(entry)} [{', '.join(map(format_percent, entry['interval']))}] %"
    if "upper_bound" in entry:
        brief = f"0 of {entry['total']} ≤ {format_bound(entry)}"
    return Brief(format_counted_share(entry), brief)


def _show_nearer(judged: Summary) -> Brief:
    """The verdict, with what it rests on."""
    nearer, interval = judged["nearer"], judged["interval"]
    if nearer == "same":
        text = f"no difference: {format_counted_share(judged['differ'], 'problems')} differ"
        return Brief(text, "no difference")
    verdict = nearer or "cannot tell"
    if interval is None:
        return Brief("cannot tell from one problem", verdict)
    mean, low, high = (f"{'+' if v > 0 else ''}{format_number(v)}" for v in (judged["mean"], *interval))
    return Brief(f"{verdict}: cached - uncached {mean} [{low}, {high}]", verdict)


COSTS: dict[str, Callable[[Summary], float | None]] = {
    "ms a token": lambda cost: min(cost["ms_a_token"] or (), default=None),
    "prefill, ms": lambda cost: min(cost["prefill_ms"] or (), default=None),
    "weights and cache, MB": lambda cost: (cost["bytes"]["weights"] + cost["bytes"]["cache"]) / 1e6,
    "as stored, MB": lambda cost: (cost["bytes"]["weights_as_stored"] + cost["bytes"]["cache"]) / 1e6,
    "decode program, MB": lambda cost: (peak := cost["bytes"]["program_peak"]) and peak / 1e6,
}


def _cost(entry: Summary) -> list[str]:
    figures = [entry["cost"] and find(entry["cost"]) for find in COSTS.values()]
    return ["-" if figure is None else format_number(figure, 3) for figure in figures]


def _agreement(entry: Summary) -> list[Cell]:
    forced, valid = entry["teacher_forced"], "{ok} of {total}".format(**entry["problems"])
    if forced is None:
        return [entry["variant"], valid, "none valid", "-", "-", "-"]
    equal = Brief(format_counted_share(forced["bit_equal"]), f"{format_percent(forced['bit_equal']['rate'])} %")
    shares = [_show_share(share) for share in (forced["flips"], entry["diverged"])]
    return [entry["variant"], valid, *shares, parts.show_mean(forced["kl"]), equal]


def _write_agreement(summary: Summary) -> list[Block]:
    """Cached against uncached beside what it costs; for a terminal, two tables."""
    head = ["variant", "valid", "argmax flips per token", "sequences that diverge", "mean KL, nats", "bit-equal steps"]
    rows = [[*_agreement(entry), *_cost(entry)] for entry in summary["variants"]]
    title = "Cached against uncached, and cost of the cached arm"
    blocks: list[Block] = [Table([*head, *COSTS], rows, title, terminal=(0, 2, 3, 4, 5))]
    if measured := [[entry["variant"], *_cost(entry)] for entry in summary["variants"] if entry["cost"]]:
        blocks.append(Only("terminal", [Table(["variant", *COSTS], measured, "Cost of the cached arm")]))
    return blocks


FIGURES: dict[str, Callable[[Summary], Cell]] = {
    "RMS": lambda found: parts.show_mean(found["rms"]),
    "largest difference": lambda found: format_number(found["max_abs"]["max"]),
    "KL, nats": lambda found: parts.show_mean(found["kl"]),
    "argmax differs": lambda found: _show_share(found["flips"]),
}


def _write_distances(summary: Summary) -> list[Block]:
    """Distance to the truth with the weights as given, and the rounding of weights apart from that of arithmetic."""
    entries = [entry for entry in summary["variants"] if entry["distance"] is not None]

    def make(reference: str, title: str, terminal: Sequence[int]) -> Table:
        head = ["variant", *(f"{name}, {arm}" for name in FIGURES for arm in ARMS), "nearer by RMS", "nearer by KL"]
        rows: list[list[Cell]] = []
        for entry in entries:
            found = entry["distance"][reference]
            figures = [show(found[arm]) for show in FIGURES.values() for arm in ARMS]
            rows.append([entry["variant"], *figures, *(_show_nearer(found["nearer"][metric]) for metric in JUDGED)])
        return Table(head, rows, title, terminal=terminal)

    given = make("given", "Distance to fp64 of the weights as given", (0, 1, 2, 9, 5, 6, 10))
    title = "Tokens at which the argmax is not that of fp64 of the weights as given"
    tokens = Table(["variant", *ARMS], [[row[0], *row[7:9]] for row in given.rows], title)
    arithmetic = "Distance to fp64 of the weights as each variant rounds them (arithmetic alone)"
    rows = [[entry["variant"], *(show(entry["distance"]["weights"]) for show in FIGURES.values())] for entry in entries]
    title = "Rounding of the weights alone, fp64 against fp64"
    weights = Table(["variant", *FIGURES], rows, title, terminal=(0, 1))
    return [given, Only("terminal", [tokens]), make("rounded", arithmetic, (0, 1, 2, 9)), weights]


def _unequal(summary: Summary) -> list[str]:
    """What keeps the rows from being of the same problems."""
    asked, lines = len(summary["problems"]), []
    for entry in summary["variants"]:
        problems = entry["problems"]
        lines += [f"{entry['variant']}: {parts.say_invalid(group)}; counted nowhere." for group in entry["invalid"]]
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
