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
from jaxkv.experiments.accumulation.record import REPAIRS, SIDES, AccumulationRecord, Grid
from jaxkv.experiments.record_parts import known
from jaxkv.experiments.report_parts import add_saturated, begin_summary, group_invalid
from jaxkv.reporting.shares import clustered_share

ByProblem = dict[int, AccumulationRecord]
Place = tuple[int, int]  # positions [begin, end), counted from the first one after the prompt
Columns = Callable[[AccumulationRecord], np.ndarray]  # a record -> which of its bins, [bins]
STATIC, DECODE = "static", "decode"
SEGMENTS = ("prompt", "decoded")
BINS = 12  # of the longest prompt, and of the longest text decoded


def summarize_accumulation(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'accumulation' records of a run, as `begin_summary` says; quantizers keep their order.

    Returns:
      Plain values. A problem whose records follow different tokens cannot be compared across regimes: it enters nothing
      and is listed in `parted`.
    """
    summary, samples, every = begin_summary(records, run, AccumulationRecord)
    tokens: dict[int, set[str]] = {}
    for sample in samples:
        tokens.setdefault(sample.problem, set()).add(sample.tokens_sha256)
    parted = sorted(problem for problem, found in tokens.items() if len(found) > 1)
    valid = [s for s in every if s.problem not in parted]
    places = _plan_places(valid)
    regimes = sorted({s.regime for s in samples}, key=_rank)
    quantizers, values = [], {}
    for name in dict.fromkeys(r.quantizer for r in records if isinstance(r, AccumulationRecord)):
        members = [s for s in samples if s.quantizer == name]
        by_regime: dict[str, ByProblem] = {
            regime: {s.problem: s for s in valid if s.quantizer == name and s.regime == regime} for regime in regimes
        }
        entry, values[name] = _summarize_quantizer(by_regime, places)
        quantizers.append(
            {
                "quantizer": name,
                "samples": {regime: sum(s.regime == regime for s in members) for regime in regimes},
                "invalid": group_invalid(members),
                **entry,
            }
        )
    return summary | {
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


def _bins(sample: AccumulationRecord) -> np.ndarray:
    """Begin and end of a record's bins, counted from the first position after the prompt, [bins, 2]."""
    return np.asarray(known(sample.bins)) - sample.prompt_tokens


def _in(segment: str, place: Place | None = None) -> Columns:
    """Bins of a segment, none of which crosses the end of the prompt; those whose middle lies in a place, if given."""

    def choose(sample: AccumulationRecord) -> np.ndarray:
        bins = _bins(sample)
        inside = (bins[:, 1] <= 0) == (segment == "prompt")
        middles = bins.sum(axis=1) / 2
        return inside if place is None else inside & (place[0] <= middles) & (middles < place[1])

    return choose


def _in_half(late: bool) -> Columns:
    """Bins of the later or the earlier half of the decoded positions."""

    def choose(sample: AccumulationRecord) -> np.ndarray:
        bins = _bins(sample)
        return _in("decoded")(sample) & ((bins.sum(axis=1) >= bins[-1, 1]) == late)

    return choose


def _plan_places(samples: Sequence[AccumulationRecord]) -> dict[str, list[Place]]:
    """Common bins of each segment, of one width, counted from the end of the prompt both ways."""
    places: dict[str, list[Place]] = {}
    for segment in SEGMENTS:
        widest, length = 1, 0
        for sample in samples:
            bins = _bins(sample)
            length = max(length, int(bins[-1, 1]) if segment == "decoded" else sample.prompt_tokens)
            widest = max(widest, int(np.diff(bins)[_in(segment)(sample)].max(initial=1)))
        width = max(math.ceil(length / BINS), widest)  # no record's bin is wider, so that none is skipped
        edges = [(begin, min(begin + width, length)) for begin in range(0, length, width)]
        places[segment] = edges if segment == "decoded" else [(-end, -begin) for begin, end in reversed(edges)]
    return places


def _find(members: ByProblem, figure: Callable[[AccumulationRecord], float | None]) -> dict[int, float]:
    """A figure by problem, of those that have it."""
    found = {problem: figure(sample) for problem, sample in members.items()}
    return {problem: value for problem, value in found.items() if value is not None}


def _errors(members: ByProblem, columns: Columns, choice: str = "") -> dict[int, float]:
    """The attention output's error by problem, mean over layers and positions; with a `choice`, after that repair.

    A problem without bins there, or with one that has no figure, has none.
    """

    def figure(sample: AccumulationRecord) -> float | None:
        if choice and sample.repair is None:
            return None
        grid: Grid = getattr(sample.repair, choice) if choice else known(sample.attention_error).error
        chosen = columns(sample)
        cells = np.compress(chosen, np.asarray(grid, np.float64), axis=1)  # None becomes NaN
        if not chosen.any() or np.isnan(cells).any():
            return None
        return float(np.average(cells.mean(axis=0), weights=np.diff(_bins(sample))[chosen, 0]))

    return _find(members, figure)


def _growth(members: ByProblem, static: ByProblem, gap: Callable[..., dict[int, float]] = subtract) -> dict[int, float]:
    """By problem: what accumulates in the later half of the decoded positions minus that in the earlier one.

    What accumulates in a half is the `gap` between its errors and those of `static`.
    """
    late, early = (gap(*(_errors(found, _in_half(half)) for found in (members, static))) for half in (True, False))
    return subtract(late, early)


def _curve(members: ByProblem, static: ByProblem | None, places: Mapping[str, Sequence[Place]]) -> list[dict[str, Any]]:
    """The error by position, and with `static` what of it accumulates."""
    curve = []
    for columns, place in ((_in(segment, place), place) for segment in SEGMENTS for place in places[segment]):
        if here := _errors(members, columns):
            extra = None if static is None else average(subtract(here, _errors(static, columns)))
            curve.append({"begin": place[0], "end": place[1], "error": average(here, 0.0), "extra": extra})
    return curve


def _share(agreed: Sequence[int], steps: Sequence[int]) -> dict[str, Any] | None:
    """A share of steps with its interval over problems, None for the interval of one problem."""
    entry = clustered_share(agreed, steps, unit="problems")
    if entry is not None and len(steps) < 2:
        return {name: entry[name] for name in ("count", "total", "rate")} | {"interval": None}
    return entry


def _logits_at(members: ByProblem, columns: Columns) -> dict[str, Any] | None:
    """KL and agreement over the steps that follow a token there."""
    kl, agreed, steps = {}, [], []
    for problem, sample in sorted(members.items()):
        logits = known(sample.logits)
        places = np.asarray(logits.places) * columns(sample)
        if places.any():
            kl[problem] = float(np.average(np.asarray(logits.kl, np.float64)[places > 0], weights=places[places > 0]))
            agreed.append(sum(known(logits.agree[n]) for n in np.flatnonzero(places)))
            steps.append(int(places.sum()))
    return {"kl": average(kl, 0.0), "agreement": _share(agreed, steps)} if kl else None


def _summarize_logits(members: ByProblem, places: Sequence[Place]) -> dict[str, Any] | None:
    """KL and agreement over all steps and by position: the first step follows the prompt's last token, at -1."""
    kept = [(sample, known(sample.logits)) for _, sample in sorted(members.items()) if sample.steps]
    if not kept:
        return None
    at = [((-1, 0), _in("prompt")), *((place, _in("decoded", place)) for place in places)]
    found = [(place, _logits_at(members, columns)) for place, columns in at]
    steps = [sample.steps for sample, _ in kept]
    return {
        "kl": average({sample.problem: logits.kl_sum / sample.steps for sample, logits in kept}, 0.0),
        "agreement": _share([logits.agree_sum for _, logits in kept], steps),
        "bit_equal": {"count": sum(logits.bit_equal for _, logits in kept), "total": sum(steps)},
        "curve": [{"begin": begin, "end": end} | entry for (begin, end), entry in found if entry is not None],
    }


def _summarize_stored(members: ByProblem) -> dict[str, Any]:
    """Per side: the share of fed tokens that are packed, how far they read from the clean ones, and E_M's share."""
    layers = min(sample.num_layers for sample in members.values())

    def over(side: str, figure: str, most: float = math.inf, layer: int | None = None) -> dict[str, Any] | None:
        def one(sample: AccumulationRecord) -> float | None:
            column = getattr(getattr(sample.stored, side), figure)
            found = [value for value in (column if layer is None else column[layer : layer + 1]) if value is not None]
            return float(np.mean(found)) if found else None

        shares = _find(members, one)
        if figure == "packed":
            shares = {problem: count / known(members[problem].bins)[-1][1] for problem, count in shares.items()}
        return average(shares, 0.0, most)

    return {
        side: {
            "packed": over(side, "packed", 1.0),
            "relative": over(side, "relative"),
            "norm_share": over(side, "norm_share", 1.0),
            "norm_share_by_layer": [over(side, "norm_share", 1.0, layer) for layer in range(layers)],
        }
        for side in SIDES
    }


def _summarize_repair(static: ByProblem) -> tuple[dict[str, Any] | None, dict[str, dict[int, float]]]:
    """The error of decoded positions after each repair, and the share of it that each takes away, problem by problem.

    A problem without an error has none to be taken away and no share.
    """
    errors = {choice: _errors(static, _in("decoded"), choice) for choice in REPAIRS}
    if not errors["nothing"]:
        return None, {}
    before = {problem: value for problem, value in errors["nothing"].items() if value > 0}
    taken = {
        choice: {problem: 1 - errors[choice][problem] / value for problem, value in before.items()}
        for choice in REPAIRS[1:]
    }
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
    by_regime: Mapping[str, ByProblem], places: Mapping[str, Sequence[Place]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of one quantizer, and those by problem that statements are judged by."""
    static = by_regime.get(STATIC, {})
    base = {segment: _errors(static, _in(segment)) for segment in SEGMENTS}
    values: dict[str, Any] = {"static": base["decoded"], "decode": {}, "extra": {}, "growth": {}}
    values |= {"quadrature": {}, "growth_quadrature": {}}
    regimes: dict[str, Any] = {}
    for regime, found in ((regime, found) for regime, found in by_regime.items() if found):
        errors = {segment: _errors(found, _in(segment)) for segment in SEGMENTS}
        extra = {segment: subtract(errors[segment], base[segment]) for segment in SEGMENTS}
        growth = _growth(found, static)
        feeds_back, watched = regime != STATIC, ("clean", "changed") if regime == DECODE else ("clean",)
        regimes[regime] = {
            "problems": len(found),
            "error": {segment: average(errors[segment], 0.0) for segment in SEGMENTS},
            "extra": {segment: average(extra[segment]) for segment in SEGMENTS} if feeds_back else None,
            "growth": average(growth) if feeds_back else None,
            "curve": _curve(found, static if feeds_back else None, places),
            "logits": _summarize_logits(found, places["decoded"]),
            "stored": _summarize_stored(found),
            "watched": {
                run: {
                    "count": sum(getattr(s.instrumented_bit_equal, run) for s in found.values()),
                    "total": sum(s.steps for s in found.values()),
                }
                for run in watched
            },
        }
        if regime == DECODE:
            values |= {"decode": errors["decoded"], "extra": extra["decoded"], "growth": growth}
            values["quadrature"] = quadrature(errors["decoded"], base["decoded"])
            values["growth_quadrature"] = _growth(found, static, quadrature)
    repair, values["taken"] = _summarize_repair(static)
    flat = [sample for found in by_regime.values() for sample in found.values()]
    return {
        "storage": _summarize_storage(flat),
        "saturated": add_saturated({s.problem: s.saturated for s in flat}.values()),  # alike in all regimes
        "regimes": regimes,
        "repair": repair,
    }, values
