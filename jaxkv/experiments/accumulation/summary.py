"""Do errors of a quantized cache accumulate under decoding, and are wrong token scales the reason: the summary.

Reads records alone, imports neither jax nor flax. The unit of every average and interval is the problem: a problem's
figure is a mean over layers and positions, and problems count alike. What accumulates is the attention output's error
in a regime where errors feed back, minus that of `static`, where they do not, problem by problem.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.accumulation.claims import average, judge, quadrature, subtract
from jaxkv.experiments.accumulation.record import REPAIRS, SIDES, AccumulationRecord, Grid, Stored
from jaxkv.experiments.record_parts import known
from jaxkv.experiments.report_parts import add_saturated, collect, count_problems, group_invalid
from jaxkv.reporting.shares import clustered_share

Summary = Mapping[str, Any]
ByProblem = dict[int, AccumulationRecord]
Gap = Callable[[Mapping[int, float], Mapping[int, float]], dict[int, float]]
Place = tuple[int, int]  # positions [begin, end), counted from the first one after the prompt
STATIC, DECODE = "static", "decode"
SEGMENTS = ("prompt", "decoded")
BINS = 12  # of the longest prompt, and of the longest text decoded


def summarize_accumulation(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'accumulation' records of a run.

    Args:
      records: samples; those of other experiments are left out. Quantizers keep the order in which they first appear.
      run: content of run.json.

    Returns:
      Plain values. An invalid sample enters no figure but the count of invalid ones. A problem whose records follow
      different tokens cannot be compared across regimes: it enters nothing and is listed in `parted`.
    """
    samples = collect(records, AccumulationRecord)
    tokens: dict[int, set[str]] = {}
    for sample in samples:
        tokens.setdefault(sample.problem, set()).add(sample.tokens_sha256)
    parted = sorted(problem for problem, found in tokens.items() if len(found) > 1)
    order = dict.fromkeys(r.quantizer for r in records if isinstance(r, AccumulationRecord))
    valid = [s for s in samples if s.status == "ok" and s.problem not in parted]
    places = _plan_places(valid)
    regimes = sorted({s.regime for s in samples}, key=_rank)
    quantizers, values = [], {}
    for name in order:
        members = [s for s in samples if s.quantizer == name]
        by_regime: dict[str, ByProblem] = {
            regime: {s.problem: s for s in valid if s.quantizer == name and s.regime == regime} for regime in regimes
        }
        entry, values[name] = _summarize_quantizer(name, members, by_regime, places)
        quantizers.append(entry)
    return {
        "experiment": "accumulation",
        "fingerprint": run.get("fingerprint"),
        "problems": count_problems(samples, run),
        "parted": parted,
        "num_layers": valid[0].num_layers if valid else None,
        "regimes": regimes,
        "quantizers": quantizers,
        "claims": judge(quantizers, values),
    }


def _rank(regime: str) -> tuple[int, int]:
    """static, then larger and larger feedback: blocks from the longest on, decode last."""
    block = regime.partition(":")[2]
    return (0 if regime == STATIC else 2 if regime == DECODE else 1), -int(block or 0)


def _plan_places(samples: Sequence[AccumulationRecord]) -> dict[str, list[Place]]:
    """Common bins of each segment, of one width, counted from the end of the prompt both ways."""
    places: dict[str, list[Place]] = {}
    for segment in SEGMENTS:
        widths = [width for s in samples for width in _widths(s, _columns(s, segment))]
        fed = {"prompt": (s.prompt_tokens for s in samples)}
        fed["decoded"] = (_end(s) - s.prompt_tokens for s in samples)
        length = max(fed[segment], default=0)
        width = max(math.ceil(length / BINS), *widths, 1)  # no record's bin is wider, so that none is skipped
        edges = [(begin, min(begin + width, length)) for begin in range(0, length, width)]
        places[segment] = edges if segment == "decoded" else [(-end, -begin) for begin, end in reversed(edges)]
    return places


def _widths(sample: AccumulationRecord, columns: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in (known(sample.bins)[n] for n in columns)]


def _middle(sample: AccumulationRecord, column: int) -> float:
    return sum(known(sample.bins)[column]) / 2


def _end(sample: AccumulationRecord) -> int:
    """Positions of the text, up to the last token fed."""
    return known(sample.bins)[-1][1]


def _columns(sample: AccumulationRecord, segment: str) -> list[int]:
    """Which bins of a record lie in a segment; none crosses the end of the prompt."""
    prompt = sample.prompt_tokens
    return [n for n, (_, end) in enumerate(known(sample.bins)) if (end <= prompt) == (segment == "prompt")]


def _choose(sample: AccumulationRecord, segment: str, place: Place | None = None) -> list[int]:
    """Columns of a segment, those whose middle lies in a common bin if one is given."""
    columns = _columns(sample, segment)
    if place is None:
        return columns
    middles = {n: _middle(sample, n) - sample.prompt_tokens for n in columns}
    return [n for n in columns if place[0] <= middles[n] < place[1]]


def _mean_error(
    sample: AccumulationRecord, grid: Sequence[Sequence[float | None]], columns: Sequence[int]
) -> float | None:
    """Mean over layers and positions; None where a bin has no figure, or without bins."""
    cells = [[row[n] for n in columns] for row in grid]
    if not columns or any(cell is None for row in cells for cell in row):
        return None
    means = np.mean(np.asarray(cells, np.float64), axis=0)
    return float(np.average(means, weights=_widths(sample, columns)))


def _find(members: ByProblem, figure: Callable[[AccumulationRecord], float | None]) -> dict[int, float]:
    """A figure by problem, of those that have it."""
    found = {problem: figure(sample) for problem, sample in members.items()}
    return {problem: value for problem, value in found.items() if value is not None}


def _errors(members: ByProblem, segment: str, place: Place | None = None, choice: str = "") -> dict[int, float]:
    """The attention output's error by problem; with a `choice`, after that repair."""

    def figure(sample: AccumulationRecord) -> float | None:
        if choice and sample.repair is None:
            return None
        grid: Grid = getattr(sample.repair, choice) if choice else known(sample.attention_error).error
        return _mean_error(sample, grid, _choose(sample, segment, place))

    return _find(members, figure)


def _growth(members: ByProblem, static: ByProblem, gap: Gap = subtract) -> dict[int, float]:
    """By problem: what accumulates in the later half of the decoded positions minus that in the earlier one.

    What accumulates in a half is the `gap` between its errors and those of `static`.
    """

    def halves(sample: AccumulationRecord, late: bool) -> float | None:
        middle = (_end(sample) + sample.prompt_tokens) / 2
        chosen = [n for n in _columns(sample, "decoded") if (_middle(sample, n) >= middle) == late]
        return _mean_error(sample, known(sample.attention_error).error, chosen)

    def extra(late: bool) -> dict[int, float]:
        return gap(*(_find(found, lambda s: halves(s, late)) for found in (members, static)))

    return subtract(extra(True), extra(False))


def _curve(members: ByProblem, static: ByProblem | None, places: Mapping[str, Sequence[Place]]) -> list[dict[str, Any]]:
    """The error by position, and with `static` what of it accumulates."""
    curve = []
    for segment in SEGMENTS:
        for place in places[segment]:
            here = _errors(members, segment, place)
            if not here:
                continue
            extra = None if static is None else subtract(here, _errors(static, segment, place))
            at = {"begin": place[0], "end": place[1]}
            curve.append(at | {"error": average(here, 0.0), "extra": None if extra is None else average(extra)})
    return curve


def _share(agreed: Sequence[int], steps: Sequence[int]) -> dict[str, Any] | None:
    """A share of steps with its interval over problems, None for the interval of one problem."""
    entry = clustered_share(agreed, steps, unit="problems")
    if entry is not None and len(steps) < 2:
        return {name: entry[name] for name in ("count", "total", "rate")} | {"interval": None}
    return entry


def _logits_at(members: ByProblem, segment: str, place: Place | None) -> dict[str, Any] | None:
    """KL and agreement over the steps that follow a token there."""
    kl, agreed, steps = {}, [], []
    for problem, sample in sorted(members.items()):
        logits = known(sample.logits)
        chosen = [n for n in _choose(sample, segment, place) if logits.places[n]]
        if not chosen:
            continue
        places = [logits.places[n] for n in chosen]
        kl[problem] = float(np.average([known(logits.kl[n]) for n in chosen], weights=places))
        agreed.append(sum(known(logits.agree[n]) for n in chosen))
        steps.append(sum(places))
    return {"kl": average(kl, 0.0), "agreement": _share(agreed, steps)} if kl else None


def _summarize_logits(members: ByProblem, places: Sequence[Place]) -> dict[str, Any] | None:
    """KL and agreement over all steps and by position: the first step follows the prompt's last token, at -1."""
    kept = [(sample, known(sample.logits)) for _, sample in sorted(members.items()) if sample.steps]
    if not kept:
        return None
    at = [("prompt", None, (-1, 0)), *(("decoded", place, place) for place in places)]
    curve = [
        {"begin": shown[0], "end": shown[1]} | found
        for segment, place, shown in at
        if (found := _logits_at(members, segment, place)) is not None
    ]
    steps = [sample.steps for sample, _ in kept]
    return {
        "kl": average({sample.problem: logits.kl_sum / sample.steps for sample, logits in kept}, 0.0),
        "agreement": _share([logits.agree_sum for _, logits in kept], steps),
        "bit_equal": {"count": sum(logits.bit_equal for _, logits in kept), "total": sum(steps)},
        "curve": curve,
    }


def _stored(sample: AccumulationRecord, side: str) -> Stored:
    found: Stored = getattr(sample.stored, side)
    return found


def _summarize_stored(members: ByProblem) -> dict[str, Any]:
    """Per side: the share of fed tokens that are packed, how far they read from the clean ones, and E_M's share."""

    def over_layers(side: str, figure: str, most: float = math.inf) -> dict[str, Any] | None:
        def one(sample: AccumulationRecord) -> float | None:
            found = [value for value in getattr(_stored(sample, side), figure) if value is not None]
            return float(np.mean(found)) if found else None

        return average(_find(members, one), 0.0, most)

    def packed(side: str) -> dict[str, Any] | None:
        return average(_find(members, lambda s: float(np.mean(_stored(s, side).packed)) / _end(s)), 0, 1)

    def by_layer(side: str, layer: int) -> dict[str, Any] | None:
        return average(_find(members, lambda s: _stored(s, side).norm_share[layer]), 0.0, 1.0)

    layers = min(sample.num_layers for sample in members.values())
    return {
        side: {
            "packed": packed(side),
            "relative": over_layers(side, "relative"),
            "norm_share": over_layers(side, "norm_share", 1.0),
            "norm_share_by_layer": [by_layer(side, layer) for layer in range(layers)],
        }
        for side in SIDES
    }


def _summarize_repair(static: ByProblem) -> tuple[dict[str, Any] | None, dict[str, dict[int, float]]]:
    """The error of decoded positions after each repair, and the share of it that each takes away, problem by problem.

    A problem without an error has none to be taken away and no share.
    """
    errors = {choice: _errors(static, "decoded", choice=choice) for choice in REPAIRS}
    before = {problem: value for problem, value in errors["nothing"].items() if value > 0}
    taken = {
        choice: {problem: 1 - errors[choice][problem] / value for problem, value in before.items()}
        for choice in REPAIRS[1:]
    }
    if not errors["nothing"]:
        return None, {}
    return {
        "error": {choice: average(found, 0.0) for choice, found in errors.items()},
        "taken": {choice: average(found, most=1.0) for choice, found in taken.items()},
    }, taken


def _summarize_storage(samples: Sequence[AccumulationRecord]) -> dict[str, Any] | None:
    """Counted over all caches of a quantizer: bits per element, windows included, and bytes beside the clean cache."""
    if not samples:
        return None
    found = [s.storage for s in samples]
    size, clean = sum(entry.bytes for entry in found), sum(entry.clean_bytes for entry in found)
    elements = sum(8 * entry.bytes / entry.bits for entry in found if entry.bits)
    slots = [entry.slots for entry in found]
    return {
        "bits": 8 * size / elements if elements else 0.0,
        "of_clean": size / clean if clean else None,
        "slots": [min(slots), max(slots)],
    }


def _summarize_quantizer(
    name: str,
    members: Sequence[AccumulationRecord],
    by_regime: Mapping[str, ByProblem],
    places: Mapping[str, Sequence[Place]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The summary of one quantizer, and its figures by problem."""
    static = by_regime.get(STATIC, {})
    base = _errors(static, "decoded")
    values: dict[str, Any] = {"static": base, "decode": {}, "extra": {}, "growth": {}}
    values |= {"quadrature": {}, "growth_quadrature": {}}
    regimes: dict[str, Any] = {}
    for regime, found in by_regime.items():
        if not found:
            continue
        errors = {segment: _errors(found, segment) for segment in SEGMENTS}
        entry: dict[str, Any] = {
            "problems": len(found),
            "error": {segment: average(errors[segment], 0.0) for segment in SEGMENTS},
            "extra": None,
            "growth": None,
            "curve": _curve(found, None if regime == STATIC else static, places),
            "logits": _summarize_logits(found, places["decoded"]),
            "stored": _summarize_stored(found),
            "watched": {
                run: {"count": sum(getattr(s.instrumented_bit_equal, run) for s in found.values()),
                      "total": sum(s.steps for s in found.values())}
                for run in ("clean", "changed")
                if run == "clean" or regime == DECODE
            },
        }  # fmt: skip
        if regime != STATIC:
            extra = subtract(errors["decoded"], base)
            growth = _growth(found, static)
            entry["extra"] = {
                "prompt": average(subtract(errors["prompt"], _errors(static, "prompt"))),
                "decoded": average(extra),
            }
            entry["growth"] = average(growth)
            if regime == DECODE:
                values |= {"decode": errors["decoded"], "extra": extra, "growth": growth}
                values["quadrature"] = quadrature(errors["decoded"], base)
                values["growth_quadrature"] = _growth(found, static, quadrature)
        regimes[regime] = entry
    repair, values["taken"] = _summarize_repair(static)
    flat = [sample for found in by_regime.values() for sample in found.values()]
    return {
        "quantizer": name,
        "samples": {regime: sum(s.regime == regime for s in members) for regime in by_regime},
        "invalid": group_invalid(members),
        "storage": _summarize_storage(flat),
        "saturated": add_saturated({s.problem: s.saturated for s in flat}.values()),  # alike in all regimes
        "regimes": regimes,
        "repair": repair,
    }, values
