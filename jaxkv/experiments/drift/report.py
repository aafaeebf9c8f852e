"""What the records of experiment 'drift' say: a summary, and its blocks. Reads records alone.

Means are over positions, their intervals over problems. Relative distances are those of the cached value from the
uncached one.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import asdict

from jaxkv.experiments.drift.record import SEGMENTS, TENSORS, WATCHED, DriftRecord, Layers
from jaxkv.experiments.figures import LABELS, draw_drift
from jaxkv.experiments.record_parts import ARMS, LogitSums, known
from jaxkv.experiments.report_parts import Report, Summary, begin_summary, describe_problems, say_few, say_nothing
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Bullets, Fold, Paragraph, Table
from jaxkv.reporting.format import format_interval, format_mean, format_number, format_part, format_percent
from jaxkv.reporting.shares import mean_over_problems

NOTE = (
    "Relative L2 distance of cached from uncached, mean over the decoded positions. residual: the stream entering a "
    "layer, in the last line what leaves the last one. K and V as they stand in the cache."
)
Measured = Sequence[tuple[DriftRecord, Layers]]  # samples with layers of theirs


def summarize_drift(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'drift' records of a run, as `begin_summary` says.

    Returns:
      Plain values. `layers` and `repeated.layers` hold tensor -> segment -> columns with one entry a layer.
    """
    summary, _, valid = begin_summary(records, run, DriftRecord)
    if not valid:
        return summary
    layers = [(s, known(s.layers)) for s in valid]
    repeated = [(s, s.repeated) for s in valid if s.repeated is not None]
    beside = [(s, found.layers) for s, found in repeated]
    return summary | {
        "num_layers": valid[0].num_layers,
        "heads": asdict(valid[0].heads),
        "tiles": sorted({s.shapes.tile for s in valid}, key=str),
        "steps": sum(s.steps for s in valid),
        "places": {segment: sum(_places(s, segment) for s in valid) for segment in SEGMENTS},
        "instrumented_bit_equal": {
            kind: {arm: sum(_get(s.instrumented_bit_equal, kind, arm) for s in valid) for arm in ARMS}
            for kind in WATCHED
        },
        "layers": _summarize_layers(layers),
        "logits": _summarize_logits([(s.steps, known(s.logits)) for s in valid]),
        "first_layer": _share_of_first_layer(layers),
        "first": {segment: _count_first(_with_places(valid, segment), segment) for segment in SEGMENTS},
        "path": _average_path(_with_places(valid, "decoded")),
        "repeated": {
            "layers": _summarize_layers(beside),
            "logits": _summarize_logits([(s.steps, found.logits) for s, found in repeated]),
            "first_layer": _share_of_first_layer(beside),
            "first_layer_against": _compare_first_layers([(s, known(s.layers)) for s, _ in repeated], beside),
            "compared": {tensor: _compare_to_repeated(beside, tensor) for tensor in TENSORS},
        }
        if repeated
        else None,
    }


def _get(part: object, *names: str) -> Any:
    return functools.reduce(getattr, names, part)


def _places(sample: DriftRecord, segment: str) -> int:
    return int(_get(sample.places, segment))


def _with_places(samples: Sequence[DriftRecord], segment: str) -> list[DriftRecord]:
    return [s for s in samples if _places(s, segment)]


def _summarize_layers(measured: Measured) -> dict[str, Any]:
    def summarize(tensor: str, segment: str) -> dict[str, Any] | None:
        kept = [(_places(s, segment), _get(layers, tensor, segment)) for s, layers in measured if _places(s, segment)]
        if not kept:
            return None
        sizes, columns = zip(*kept, strict=True)

        def means(figure: str) -> list[dict[str, Any]]:
            layers = zip(*(getattr(c, figure) for c in columns), strict=True)
            return [mean_over_problems(np.multiply(values, sizes).tolist(), sizes) for values in layers]

        return {
            "relative": means("relative"),
            "cosine": [entry["mean"] for entry in means("cosine")],
            "max_abs": np.max([c.max_abs for c in columns], axis=0).tolist(),
            "bit_equal": np.sum([c.bit_equal for c in columns], axis=0).tolist(),
            "places": sum(sizes),
        }

    return {tensor: {segment: summarize(tensor, segment) for segment in SEGMENTS} for tensor in TENSORS}


def _summarize_logits(samples: Sequence[tuple[int, LogitSums]]) -> dict[str, Any] | None:
    """Figures of samples with so many steps."""
    kept = [(steps, logits) for steps, logits in samples if steps]
    if not kept:
        return None
    return {
        "kl": mean_over_problems([logits.kl for _, logits in kept], [steps for steps, _ in kept]),
        "flips": sum(logits.flips for _, logits in kept),
        "bit_equal": sum(logits.bit_equal for _, logits in kept),
        "max_abs": max(logits.max_abs for _, logits in kept),
    }


def _leaving(measured: Measured) -> tuple[list[float], list[float]]:
    """The drift that leaves the first layer and the last one, summed over the decoded positions of each problem."""
    kept = [(_places(s, "decoded"), layers.resid_pre.decoded) for s, layers in measured if _places(s, "decoded")]
    first, last = ([known(column).relative[n] * places for places, column in kept] for n in (1, -1))
    return first, last


def _share_of_first_layer(measured: Measured) -> dict[str, Any] | None:
    """How much of the drift that leaves the last layer leaves the first one; None where there is no drift."""
    first, last = _leaving(measured)
    if not sum(last):
        return None
    found = mean_over_problems(first, last)
    return found | statistics.describe(found["mean"], statistics.estimate_mean(first, last))


def _compare_first_layers(given: Measured, repeated: Measured) -> dict[str, Any] | None:
    """The share of the drift that leaves the first layer, the model's against that with repeated heads, by problem.

    Returns:
      `difference` of the shares and `ratio`, each with an interval paired by problem (None where there is none) and
      what its tests are made of; None without drift in one of the two.
    """
    sides = _leaving(given), _leaving(repeated)
    a, b = (sum(first) / sum(last) if sum(last) else 0.0 for first, last in sides)
    if not a or not b:
        return None
    return {
        "difference": statistics.describe(a - b, statistics.estimate_difference(*sides)),
        "ratio": statistics.describe(a / b, statistics.estimate_ratio(*sides)),
    }


def _count_first(samples: Sequence[DriftRecord], segment: str) -> dict[str, Any]:
    """Where values first differ, most frequent first, and in how many problems nowhere."""
    found = [(d, (d.op, d.layer, *d.dtypes)) for s in samples if (d := _get(s.first, segment)) is not None]
    places = []
    for place, count in Counter(place for _, place in found).most_common():
        most = {name: max(_get(d, name) for d, at in found if at == place) for name in ("max_abs", "relative")}
        places.append({"op": place[0], "layer": place[1], "dtypes": list(place[2:]), "problems": count, **most})
    return {"problems": len(samples), "equal": len(samples) - len(found), "places": places}


def _average_path(samples: Sequence[DriftRecord]) -> list[dict[str, Any]]:
    """Every value from the first that differs in any problem to the logits; where it does not differ yet it is 0."""
    kept = [(_places(s, "decoded"), path) for s in samples if (path := known(s.path)).name]
    total = sum(_places(s, "decoded") for s in samples)
    longest = max((path.name for _, path in kept), key=len, default=())
    found: dict[str, dict[str, Any]] = {name: {"name": name, "relative": 0.0, "max_abs": 0.0} for name in longest}
    for places, path in kept:
        for name, relative, max_abs in zip(path.name, path.relative, path.max_abs, strict=True):
            found[name]["relative"] += relative * places / total
            found[name]["max_abs"] = max(found[name]["max_abs"], max_abs)
    return list(found.values())


def _compare_to_repeated(repeated: Measured, tensor: str) -> dict[str, Any] | None:
    """Drift of the model and of itself with repeated heads, mean over layers, paired by problem."""

    def mean(layers: Layers) -> float:
        column = _get(layers, tensor, "decoded").relative
        return float(np.mean(column[1:] if tensor == "resid_pre" else column))  # the embedding has no drift

    pairs = [(mean(known(s.layers)), mean(layers)) for s, layers in repeated if _places(s, "decoded")]
    if not pairs:
        return None
    ours, theirs = zip(*pairs, strict=True)
    given, other = float(np.mean(ours)), float(np.mean(theirs))
    interval = statistics.paired_interval(ours, theirs)
    return {"given": given, "repeated": other, "difference": given - other, "interval": interval}


def name_value(op: str, layer: int | None) -> str:
    """'k of layer 3', 'logits'."""
    return op if layer is None else f"{op} of layer {layer}"


def conclude(summary: Summary) -> list[str]:
    """What the figures allow to say, one sentence each; never more than their intervals do."""
    if nothing := say_nothing(summary, "nothing can be said of drift"):
        return nothing
    lines = [*_conclude_watching(summary), *_conclude_embedding(summary)]
    if not summary["places"]["decoded"]:
        return [*lines, "No generated token was fed back, so the cached steps were not compared."]
    lines += [_conclude_first(summary, segment) for segment in SEGMENTS]
    if (first := summary["first_layer"]) is None:
        return lines
    last = summary["layers"]["resid_pre"]["decoded"]["relative"][-1]
    lines.append(f"What leaves the last layer differs by {format_mean(last)} of its size; {_portion(first)} of that "
                 "leaves the first layer already.")  # fmt: skip
    return lines + _conclude_repeated(summary) + say_few(summary["problems"]["ok"])


def _portion(entry: Summary) -> str:
    return format_part(entry["mean"], entry["interval"])


def _conclude_watching(summary: Summary) -> list[str]:
    steps, lines = summary["steps"], []
    for kind, what in (("figures", "these values"), ("walk", "every value, for the first difference,")):
        equal = summary["instrumented_bit_equal"][kind]
        if all(equal[arm] == steps for arm in ARMS):
            lines.append(f"Watching {what} changed no bit of either arm's logits at {steps} steps.")
        else:
            lines.append(f"Watching {what} left the logits of {equal['cached']} (cached) and {equal['uncached']} "
                         f"(uncached) of {steps} steps as they were: the compiler made other programs of the watched "
                         "arms, whose drift is of the same kind but not bit for bit that of the arms.")  # fmt: skip
    return lines


def _conclude_embedding(summary: Summary) -> list[str]:
    columns = [summary["layers"]["resid_pre"][segment] for segment in SEGMENTS]
    places = sum(column["places"] for column in columns if column)
    equal = sum(column["bit_equal"][0] for column in columns if column)
    if equal == places:
        return [f"The embedding is equal in every bit at {places} of {places} positions, as it must be."]
    return [f"THE EMBEDDING DIFFERS at {places - equal} of {places} positions: the arms were not fed the same tokens."]


def _conclude_first(summary: Summary, segment: str) -> str:
    found = summary["first"][segment]
    what = {"prompt": "In the prompt", "decoded": "In decoded positions"}[segment]
    if found["equal"] == found["problems"]:
        return f"{what} no value of any operation differs in {found['problems']} problems."
    place = found["places"][0]
    others = len(found["places"]) - 1
    text = (
        f"{what} the first value that differs is {name_value(place['op'], place['layer'])} "
        f"({' beside '.join(dict.fromkeys(place['dtypes']))}) in {place['problems']} of {found['problems']} problems, "
        f"by at most {format_number(place['relative'])} of its size ({format_number(place['max_abs'])})"
    )
    return text + (f"; {others} other places come first elsewhere." if others else ".")


def _conclude_repeated(summary: Summary) -> list[str]:
    if (repeated := summary["repeated"]) is None:
        return [f"The model has one K/V head for each of its {summary['heads']['query']} query heads; there is no "
                "grouping to take out."]  # fmt: skip
    lines = []
    if repeated["first_layer"] is not None:
        lines.append("With K/V heads repeated to one for each query head, a model of equal mathematics, "
                     f"{_portion(repeated['first_layer'])} of the drift that leaves the last layer leaves the first; "
                     f"as it is, {_portion(summary['first_layer'])}.")  # fmt: skip
    for tensor, found in repeated["compared"].items():
        if found is None or found["interval"] is None:
            continue
        low, high = found["interval"]
        verdict = "less with repeated heads" if low > 0 else "more with repeated heads"
        lines.append(f"Drift of {LABELS[tensor]}, mean over layers: {format_number(found['given'])} as it is, "
                     f"{format_number(found['repeated'])} with repeated heads (difference "
                     f"{format_interval(found['difference'], found['interval'])}): "
                     f"{'not distinguishable' if low <= 0 <= high else verdict}.")  # fmt: skip
    return lines


HEADER = ["layer", *(LABELS[tensor] for tensor in TENSORS), "residual bit-equal"]


def make_rows(summary: Summary) -> list[list[str]]:
    """The cells of the table, a row a layer: mean relative distance over decoded positions."""
    columns = {tensor: summary["layers"][tensor]["decoded"] for tensor in TENSORS}
    if any(column is None for column in columns.values()):
        return []
    rows = []
    for layer in range(summary["num_layers"] + 1):
        cells = [
            format_number(column["relative"][layer]["mean"]) if layer < len(column["relative"]) else "-"
            for column in columns.values()
        ]
        equal = columns["resid_pre"]["bit_equal"][layer] / columns["resid_pre"]["places"]
        rows.append([str(layer) if layer < summary["num_layers"] else "out", *cells, f"{format_percent(equal)} %"])
    return rows


def write_drift(summary: Summary) -> list[Block]:
    """What is said of the drift, and its table by layer."""
    blocks: list[Block] = [Paragraph(f"{describe_problems(summary)}."), Bullets(conclude(summary))]
    if summary["status"] == "ok" and (rows := make_rows(summary)):
        blocks.append(Fold("Relative distance by layer", [Table(HEADER, rows), Paragraph(NOTE)]))
    return blocks


REPORT = Report("Drift by layer", lambda run: summarize_drift(run.records, run.run), write_drift, draw_drift)
