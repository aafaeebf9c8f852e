"""The mitigations table: what each variant changes, how far from the truth it stays, and what it costs.

Reads records and timings alone, imports neither jax nor flax.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import asdict

from jaxkv.analysis import statistics
from jaxkv.analysis.document import Block, Bullets, Fold, Only, Paragraph, Table
from jaxkv.analysis.format import (
    format_bound,
    format_count,
    format_counted_share,
    format_mean,
    format_number,
    format_percent,
)
from jaxkv.analysis.summary import clustered_share, describe_column, group_invalid, share, summarize_comparisons
from jaxkv.experiments.mitigations.record import REFERENCES, Distances, MitigationsRecord
from jaxkv.experiments.record_parts import ARMS, Distance, known

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


def _with_values(summary: Summary) -> list[Summary]:
    return [entry for entry in summary["variants"] if entry["distance"] is not None]


def _write_short(summary: Summary) -> list[Block]:
    """The tables for a terminal of 100 columns."""
    agreement = []
    for entry in summary["variants"]:
        forced = entry["teacher_forced"]
        cells = ["none valid", "-", "-", "-"]
        if forced is not None:
            cells = [_short_share(forced["flips"]), _short_share(entry["diverged"])]
            cells += [format_number(forced["kl"]["mean"]), f"{format_percent(forced['bit_equal']['rate'])} %"]
        agreement.append([entry["variant"], *cells])
    given, apart, tokens = [], [], []
    for entry in _with_values(summary):
        name, found = entry["variant"], entry["distance"]
        means = {r: [[format_number(found[r][arm][m]["mean"]) for arm in ARMS] for m in JUDGED] for r in REFERENCES}
        rms, kl = (_verdict(found["given"]["nearer"][metric]) for metric in JUDGED)
        given.append([name, *means["given"][0], rms, *means["given"][1], kl])
        weights = format_number(found["weights"]["rms"]["mean"])
        apart.append([name, weights, *means["rounded"][0], _verdict(found["rounded"]["nearer"]["rms"])])
        tokens.append([name, *(_short_share(found["given"][arm]["flips"]) for arm in ARMS)])
    costs = [[entry["variant"], *_cost(entry)] for entry in summary["variants"] if entry["cost"]]
    head = ["", "argmax flips", "sequences that diverge", "mean KL", "bit-equal steps"]
    tables = [Table(head, agreement, "cached against uncached")]
    head = ["", "RMS cached", "uncached", "nearer", "KL cached", "uncached", "nearer"]
    tables.append(Table(head, given, "distance to fp64 of the weights as given"))
    head = ["", "weights alone", "arithmetic alone: cached", "uncached", "nearer"]
    title = "RMS distance to fp64, rounding of the weights apart from that of the arithmetic"
    tables.append(Table(head, apart, title))
    title = "tokens at which the argmax is not that of fp64 of the weights as given"
    tables.append(Table(["", *ARMS], tokens, title))
    head = ["", "ms a token", "ms of prefill", "MB held", "stored", "program"]
    return [table for table in (*tables, Table(head, costs, "cost of the cached arm")) if table.rows]


def _write_whole(summary: Summary) -> list[Block]:
    """The tables of a page, with all intervals: the distance to fp64 first, the others behind a line."""
    head = ["variant", "valid", "argmax flips per token", "sequences that diverge", "mean KL, nats", "bit-equal steps"]
    head += ["ms a token", "prefill, ms", "weights and cache, MB", "as stored, MB", "decode program, MB"]
    rows = []
    for entry in summary["variants"]:
        forced, problems = entry["teacher_forced"], entry["problems"]
        cells = ["none valid", "-", "-", "-"]
        if forced is not None:
            cells = [format_counted_share(e) for e in (forced["flips"], entry["diverged"])]
            cells += [format_mean(forced["kl"]), format_counted_share(forced["bit_equal"])]
        rows.append([entry["variant"], f"{problems['ok']} of {problems['total']}", *cells, *_cost(entry)])
    agreement = Table(head, rows, "Cached against uncached, and cost of the cached arm")
    titles = {
        "given": "Distance to fp64 of the weights as given",
        "rounded": "Distance to fp64 of the weights as each variant rounds them (arithmetic alone)",
    }
    head = ["variant", *(f"{name}, {arm}" for name in ("RMS", "largest difference", "KL, nats") for arm in ARMS)]
    head += [f"argmax differs, {arm}" for arm in ARMS] + ["nearer by RMS", "nearer by KL"]
    distances = []
    for reference in REFERENCES:
        rows = []
        for entry in _with_values(summary):
            found = entry["distance"][reference]
            columns = zip(*(_figures(found[arm]) for arm in ARMS), strict=True)
            reasons = [_reason(found["nearer"][metric]) for metric in JUDGED]
            rows.append([entry["variant"], *itertools.chain.from_iterable(columns), *reasons])
        distances.append(Table(head, rows, titles[reference]))
    head = ["variant", "RMS", "largest difference", "KL, nats", "argmax differs"]
    rows = [[entry["variant"], *_figures(entry["distance"]["weights"])] for entry in _with_values(summary)]
    weights = Table(head, rows, "Rounding of the weights alone, fp64 against fp64")
    return [distances[0], Fold("The other tables of these variants", [agreement, *distances[1:], weights])]


def _figures(found: Summary) -> list[str]:
    """RMS, largest difference, KL, tokens with another argmax."""
    largest = format_number(found["max_abs"]["max"])
    return [format_mean(found["rms"]), largest, format_mean(found["kl"]), format_counted_share(found["flips"])]


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
        Only("terminal", _write_short(summary)),
        Only("page", _write_whole(summary)),
        Bullets(NOTES),
    ]
