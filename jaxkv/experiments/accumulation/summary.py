"""Do errors of a quantized cache accumulate under decoding, and are wrong token scales the reason: the summary.

Reads records alone, imports neither jax nor flax. The unit of every average and interval is the problem: a problem's
figure is a mean over layers and positions, and problems count alike. What accumulates is the attention output's error
in a regime where errors feed back, minus that of `static`, where they do not, problem by problem.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.accumulation.claims import average, combine, judge, quadrature
from jaxkv.experiments.accumulation.record import REPAIRS, SIDES, AccumulationRecord, Grid
from jaxkv.experiments.record_parts import known
from jaxkv.experiments.report_parts import add_saturated, begin_summary, group_invalid
from jaxkv.reporting.shares import clustered_share

ByProblem = dict[int, AccumulationRecord]
Place = tuple[float, float]  # positions [begin, end), counted from the first one after the prompt
STATIC, DECODE = "static", "decode"
SEGMENTS: dict[str, Place] = {"prompt": (-math.inf, 0), "decoded": (0, math.inf)}
HALVES = ("earlier", "later")  # of the decoded positions
BINS = 12  # of the longest prompt, and of the longest text decoded


def summarize_accumulation(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'accumulation' records of a run, as `begin_summary` says; quantizers keep their order.

    A problem whose records follow different tokens cannot be compared: it enters nothing and is listed in `parted`.
    """
    summary, samples, every = begin_summary(records, run, AccumulationRecord)
    texts = Counter(problem for problem, _ in {(s.problem, s.tokens_sha256) for s in samples})
    parted = sorted(problem for problem, count in texts.items() if count > 1)
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
        counts = {regime: sum(s.regime == regime for s in members) for regime in regimes}
        quantizers.append({"quantizer": name, "samples": counts, "invalid": group_invalid(members), **entry})
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


def _inside(sample: AccumulationRecord, place: Place | str) -> np.ndarray:
    """Which bins have their middle in a place, a segment or one of HALVES, [bins]; none crosses the prompt's end."""
    bins = _bins(sample)
    middles, half = bins.mean(axis=1), bins[-1, 1] / 2
    named = SEGMENTS | {"earlier": (0, half), "later": (half, math.inf)}
    begin, end = named[place] if isinstance(place, str) else place
    return (begin <= middles) & (middles < end)


def _plan_places(samples: Sequence[AccumulationRecord]) -> dict[str, list[Place]]:
    """Common bins of each segment, of one width, counted from the end of the prompt both ways."""
    places: dict[str, list[Place]] = {}
    for segment in SEGMENTS:
        widest, length = 1, 0
        for sample in samples:
            bins = _bins(sample)
            length = max(length, int(bins[-1, 1]) if segment == "decoded" else sample.prompt_tokens)
            widest = max(widest, int(np.diff(bins)[_inside(sample, segment)].max(initial=1)))
        width = max(math.ceil(length / BINS), widest)  # no record's bin is wider, so that none is skipped
        edges: list[Place] = [(begin, min(begin + width, length)) for begin in range(0, length, width)]
        places[segment] = edges if segment == "decoded" else [(-end, -begin) for begin, end in reversed(edges)]
    return places


def _errors(members: ByProblem, place: Place | str, choice: str = "") -> dict[int, float]:
    """Of problems with all figures there, the attention output's error, with a `choice` that after the repair.

    The mean over layers and positions.
    """
    errors = {}
    for problem, sample in members.items():
        if choice and sample.repair is None:
            continue
        grid: Grid = getattr(sample.repair, choice) if choice else known(sample.attention_error).error
        chosen = _inside(sample, place)
        cells = np.compress(chosen, np.asarray(grid, np.float64), axis=1)  # None becomes NaN
        if chosen.any() and not np.isnan(cells).any():
            widths = np.diff(_bins(sample))[chosen, 0]
            errors[problem] = float(np.average(cells.mean(axis=0), weights=widths))
    return errors


def _growth(
    members: ByProblem, static: ByProblem, how: Callable[[float, float], float] = operator.sub
) -> dict[int, float]:
    """By problem, what accumulates in the later half of the decoded positions minus that in the earlier one."""
    early, late = (combine(_errors(members, half), _errors(static, half), how) for half in HALVES)
    return combine(late, early)


def _curve(members: ByProblem, static: ByProblem | None, places: Mapping[str, Sequence[Place]]) -> list[dict[str, Any]]:
    """The error by position, and with `static` what of it accumulates."""
    curve = []
    for place in (place for segment in SEGMENTS for place in places[segment]):
        if here := _errors(members, place):
            extra = None if static is None else average(combine(here, _errors(static, place)))
            curve.append({"begin": place[0], "end": place[1], "error": average(here, 0.0), "extra": extra})
    return curve


def _share(agreed: Sequence[int], steps: Sequence[int]) -> dict[str, Any] | None:
    """A share of steps with its interval over problems, None for the interval of one problem."""
    entry = clustered_share(agreed, steps, unit="problems")
    if entry is not None and len(steps) < 2:
        return {name: entry[name] for name in ("count", "total", "rate")} | {"interval": None}
    return entry


def _logits_at(members: ByProblem, place: Place) -> dict[str, Any]:
    """KL and agreement over the steps that follow a token there; nothing without one."""
    kl, agreed, steps = {}, [], []
    for problem, sample in sorted(members.items()):
        logits = known(sample.logits)
        places = np.asarray(logits.places) * _inside(sample, place)
        if places.any():
            kl[problem] = float(np.average(np.asarray(logits.kl, np.float64)[places > 0], weights=places[places > 0]))
            agreed.append(sum(known(logits.agree[n]) for n in np.flatnonzero(places)))
            steps.append(int(places.sum()))
    return {"kl": average(kl, 0.0), "agreement": _share(agreed, steps)} if kl else {}


def _summarize_logits(members: ByProblem, places: Sequence[Place]) -> dict[str, Any] | None:
    """KL and agreement over all steps and by position: the first step follows the prompt's last token, at -1."""
    kept = [(sample, known(sample.logits)) for _, sample in sorted(members.items()) if sample.steps]
    if not kept:
        return None
    found = {(-1, 0): _logits_at(members, SEGMENTS["prompt"])} | {place: _logits_at(members, place) for place in places}
    steps = [sample.steps for sample, _ in kept]
    return {
        "kl": average({sample.problem: logits.kl_sum / sample.steps for sample, logits in kept}, 0.0),
        "agreement": _share([logits.agree_sum for _, logits in kept], steps),
        "bit_equal": {"count": sum(logits.bit_equal for _, logits in kept), "total": sum(steps)},
        "curve": [{"begin": begin, "end": end} | entry for (begin, end), entry in found.items() if entry],
    }


def _summarize_stored(members: ByProblem) -> dict[str, Any]:
    """Per side: the share of fed tokens that are packed, how far they read from the clean ones, and E_M's share."""
    layers = min(sample.num_layers for sample in members.values())

    def over(side: str, figure: str, most: float = math.inf, layers: slice = slice(None)) -> dict[str, Any] | None:
        means = {}
        for problem, sample in members.items():
            column = getattr(getattr(sample.stored, side), figure)[layers]
            if found := [value for value in column if value is not None]:
                of = known(sample.bins)[-1][1] if figure == "packed" else 1
                means[problem] = float(np.mean(found)) / of
        return average(means, 0.0, most)

    return {
        side: {
            "packed": over(side, "packed", 1.0),
            "relative": over(side, "relative"),
            "norm_share": over(side, "norm_share", 1.0),
            "norm_share_by_layer": [over(side, "norm_share", 1.0, slice(n, n + 1)) for n in range(layers)],
        }
        for side in SIDES
    }


def _summarize_repair(static: ByProblem) -> tuple[dict[str, Any] | None, dict[str, dict[int, float]]]:
    """The error of decoded positions after each repair, and the share that each takes away where there is an error."""
    errors = {choice: _errors(static, "decoded", choice) for choice in REPAIRS}
    before = {problem: value for problem, value in errors["nothing"].items() if value > 0}
    taken = {
        choice: {problem: 1 - errors[choice][problem] / value for problem, value in before.items()}
        for choice in REPAIRS[1:]
    }
    repair = {
        "error": {choice: average(found, 0.0) for choice, found in errors.items()},
        "taken": {choice: average(found, most=1.0) for choice, found in taken.items()},
    }
    return repair if errors["nothing"] else None, taken


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


def _summarize_regime(
    regime: str, members: ByProblem, static: ByProblem, places: Mapping[str, Sequence[Place]]
) -> dict[str, Any]:
    """A quantizer in a regime; of `static` itself there is nothing that accumulates."""
    errors = {segment: _errors(members, segment) for segment in SEGMENTS}
    feeds_back, total = regime != STATIC, sum(s.steps for s in members.values())
    extra = {segment: average(combine(errors[segment], _errors(static, segment))) for segment in SEGMENTS}
    return {
        "problems": len(members),
        "error": {segment: average(found, 0.0) for segment, found in errors.items()},
        "extra": extra if feeds_back else None,
        "growth": average(_growth(members, static)) if feeds_back else None,
        "curve": _curve(members, static if feeds_back else None, places),
        "logits": _summarize_logits(members, places["decoded"]),
        "stored": _summarize_stored(members),
        "watched": {
            run: {"count": sum(getattr(s.instrumented_bit_equal, run) for s in members.values()), "total": total}
            for run in (("clean", "changed") if regime == DECODE else ("clean",))
        },
    }


def _summarize_quantizer(
    by_regime: Mapping[str, ByProblem], places: Mapping[str, Sequence[Place]]
) -> tuple[dict[str, Any], dict[str, dict[int, float]]]:
    """The figures of one quantizer, and those by problem, over decoded positions, that statements are judged by."""
    static, decode = (by_regime.get(regime, {}) for regime in (STATIC, DECODE))
    without, fed = (_errors(members, "decoded") for members in (static, decode))
    repair, taken = _summarize_repair(static)
    flat = [sample for found in by_regime.values() for sample in found.values()]
    entry = {
        "storage": _summarize_storage(flat),
        "saturated": add_saturated({s.problem: s.saturated for s in flat}.values()),  # alike in all regimes
        "regimes": {name: _summarize_regime(name, found, static, places) for name, found in by_regime.items() if found},
        "repair": repair,
    }
    return entry, {
        "static": without,
        "decode": fed,
        "extra": combine(fed, without),
        "quadrature": combine(fed, without, quadrature),
        "growth": _growth(decode, static),
        "growth_quadrature": _growth(decode, static, quadrature),
        "worst": taken["worst"],
        "worst_less_others": combine(taken["worst"], taken["others"]),
        "squared": {problem: 1 - (1 - share) ** 2 for problem, share in taken["everything"].items()},
    }
