"""JAX beside PyTorch (and engines elsewhere), cached and uncached: is the framework gap larger than the cache gap?

Two sources. Runs of 'divergence' and 'foreign' of several frameworks on the same prompts give free-running figures:
tokens, first divergence, accuracy. Records of 'parity' give logits of four cells along the same tokens: flips, KL,
direction, and the residual stream of each layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.figures import draw_parity
from jaxkv.experiments.parity.record import CACHE_PAIRS, CELLS, FRAMEWORK_PAIRS, PAIRS, ParityRecord
from jaxkv.experiments.record_parts import known
from jaxkv.experiments.report_parts import Report, collect, group_invalid, summarize_comparisons
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Bullets, Fold, Paragraph, Table
from jaxkv.reporting.format import format_count, format_counted_share, format_mean, format_number, format_share

ARMS = ("uncached", "cached")


def judge_gap(framework: Sequence[float], cache: Sequence[float], *, shares: bool) -> dict[str, Any]:
    """Whether the framework gap is larger or smaller than the cache gap, problems being the unit.

    Args:
      framework: gap of each problem between frameworks.
      cache: gap of each problem between the arms of one framework.
      shares: whether gaps are shares of arms that part; else they are skewed, as KL is.

    Returns:
      means of both, their difference with an interval, and `larger`: 'framework', 'cache' or None where the interval
      holds 0, or where there is none, problems being too few or all equal.
    """
    differ = [a - b for a, b in zip(framework, cache, strict=True)]
    estimate = statistics.estimate_paired(framework, cache, skewed=True)
    if shares:
        estimate = statistics.estimate_paired_share(differ)
    elif len(set(differ)) == 1 and (not differ[0] or statistics.sign_test(len(differ), 0) > 0.05):
        estimate = None  # an interval of no width, of so few problems that they may lean one way by chance
    found = statistics.ends(estimate)
    larger = None
    if found is not None:
        larger = "framework" if found[0] > 0 else "cache" if found[1] < 0 else None
    return {
        "problems": len(differ),
        "framework": float(np.mean(framework)),
        "cache": float(np.mean(cache)),
        "difference": float(np.mean(differ)),
        "interval": found,
        "larger": larger,
    }


def tabulate(pairs: Any) -> list[list[int]]:
    """2 x 2 counts of pairs of booleans."""
    table = [[0, 0], [0, 0]]
    for a, b in pairs:
        table[int(a)][int(b)] += 1
    return table


def count_same(table: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Whether two frameworks part at the same places: counts, and what independence would give.

    Fisher's test takes places as independent, which sequences are and steps of one are not.
    """
    total = sum(map(sum, table))
    first, second = sum(table[1]), table[0][1] + table[1][1]
    return {
        "places": total,
        "first": first,
        "second": second,
        "both": table[1][1],
        "expected": first * second / total,
        "fisher_p": None,
    }


def summarize_parity(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'parity' records of a run.

    Args:
      records: in any order; those of other experiments are left out.
      run: content of run.json.

    Returns:
      Plain values. `status` is 'ok', 'invalid' (no sample is valid) or 'empty'.
    """
    samples = collect(records, ParityRecord)
    valid = [s for s in samples if s.status == "ok" and s.tokens]
    summary: dict[str, Any] = {
        "experiment": "parity",
        "fingerprint": run.get("fingerprint"),
        "status": "ok" if valid else "invalid" if samples else "empty",
        "problems": {"total": len(samples), "ok": len(valid)},
        "invalid": group_invalid(samples),
        "attention": sorted({s.attention for s in samples}),
        "torch_uncached": sorted({s.torch_uncached for s in samples}),
        "versions": samples[0].versions if samples else {},
    }
    if not valid:
        return summary
    sizes = [len(s.tokens) for s in valid]
    summary["tokens"] = sum(sizes)
    summary["pairs"] = {
        pair: summarize_comparisons([(s.problem, known(s.pairs)[pair]) for s in valid]) for pair in PAIRS
    }
    kl = {pair: [float(np.mean(known(s.pairs)[pair].kl)) for s in valid] for pair in PAIRS}
    halves = [np.mean([kl[pair] for pair in kind.values()], axis=0).tolist() for kind in (FRAMEWORK_PAIRS, CACHE_PAIRS)]
    ratio = statistics.estimate_ratio(*((half, np.ones(len(half))) for half in halves))
    summary["gap"] = judge_gap(*halves, shares=False) | {
        "ratio": sum(halves[0]) / sum(halves[1]) if sum(halves[1]) else None,
        "ratio_interval": statistics.ends(ratio),
    }
    summary["cosine"] = _summarize_cosine([[c for c in known(s.cosine) if c is not None] for s in valid])
    flips = [[known(s.pairs)[CACHE_PAIRS[f]].flip for s in valid] for f in ("jax", "torch")]
    steps = [pair for a, b in zip(*flips, strict=True) for pair in zip(a, b, strict=True)]
    summary["same_flips"] = count_same(tabulate(steps))
    summary["same_choice"] = _same_choices(valid)
    streams = [known(s.layers) for s in valid]
    summary["layers"] = {
        "bit_equal": {cell: sum(stream.bit_equal[cell] for stream in streams) for cell in CELLS},
        "mean": {
            pair: np.average([stream.distance[pair].mean for stream in streams], axis=0, weights=sizes).tolist()
            for pair in PAIRS
        },
        "max": {pair: np.max([stream.distance[pair].max for stream in streams], axis=0).tolist() for pair in PAIRS},
    }
    return summary


def _summarize_cosine(columns: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Mean cosine over the steps at which the cache moves both frameworks; None without such a step."""
    kept = [column for column in columns if column]
    if not kept:
        return None
    sums, sizes = [sum(column) for column in kept], [len(column) for column in kept]
    interval = statistics.paired_interval([a / n for a, n in zip(sums, sizes, strict=True)], np.zeros(len(kept)))
    return {"steps": sum(sizes), "mean": sum(sums) / sum(sizes), "interval": interval and list(interval)}


def _same_choices(valid: Sequence[ParityRecord]) -> dict[str, int]:
    """Of the steps at which both frameworks flip, at how many they flip between the same two tokens."""
    flipped = [
        [tuple(known(s.choices)[f"{f} {arm}"][step] for arm in ARMS) for f in ("jax", "torch")]
        for s in valid
        for step in range(len(s.tokens))
        if all(known(s.pairs)[CACHE_PAIRS[f]].flip[step] for f in ("jax", "torch"))
    ]
    return {"count": sum(a == b for a, b in flipped), "total": len(flipped)}


def _span(interval: Sequence[float] | None) -> str:
    """`` [0.1, 0.3]``, or nothing where there is no interval."""
    return "" if interval is None else f" [{format_number(interval[0])}, {format_number(interval[1])}]"


def describe_gap(gap: Mapping[str, Any], unit: str) -> str:
    means = f"framework {format_number(gap['framework'])}, cache {format_number(gap['cache'])} {unit}".rstrip()
    if gap["interval"] is None:
        return f"{means}: cannot tell which is larger ({gap['problems']} problems, no interval)"
    low, high = map(format_number, gap["interval"])
    said = {"framework": "the framework gap is larger", "cache": "the cache gap is larger"}
    return f"{means}, difference {format_number(gap['difference'])} [{low}, {high}]: " + (
        said.get(gap["larger"]) or "cannot tell which is larger"
    )


def describe_same(found: Mapping[str, Any] | None, what: str, names: Sequence[str]) -> str:
    if found is None:
        return f"{what}: nothing to compare."
    if not found["first"] and not found["second"]:
        return f"{what}: none of {found['places']} in {names[0]} and none in {names[1]}."
    test = "" if found["fisher_p"] is None else f"; Fisher p = {format_number(found['fisher_p'])}"
    return (
        f"{what}: {found['first']} in {names[0]}, {found['second']} in {names[1]}, {found['both']} in both of "
        f"{found['places']} (independent: {format_number(found['expected'])}{test})."
    )


def write_parity(found: Mapping[str, Any]) -> list[Block]:
    """Four cells along the same tokens, from what `summarize_parity` gives."""
    if found["status"] != "ok":
        why = "; ".join(f"{g['samples']} at {g['reason']} ({g['arm']}, {g['value']})" for g in found["invalid"])
        return [Paragraph(f"No valid sample: {why or 'none yet'}.")]
    rows = [
        [
            pair.replace(" | ", " to "),
            format_counted_share(values["flips"]),
            format_mean(values["kl"]),
            format_number(values["max_abs"]["max"]),
            format_share(values["bit_equal"]),
        ]
        for pair, values in found["pairs"].items()
    ]
    gap, cosine, choice = found["gap"], found["cosine"], found["same_choice"]
    lines = [f"KL a token, mean over problems: {describe_gap(gap, 'nats')}."]
    if gap["ratio"] is not None:
        span = _span(gap["ratio_interval"])
        lines.append(f"The framework gap is {format_number(gap['ratio'])}{span} times the cache gap.")
    lines.append(
        f"PyTorch's uncached arm: {', '.join(found['torch_uncached'])} rows. Where JAX's has others, the framework gap "
        "holds what other shapes alone do; a divergence run's control at another length gives the size of that."
    )
    if cosine is None:
        lines.append("Direction: at no step does the cache move the logits of both frameworks.")
    else:
        lines.append(
            "Direction: the cosine between what the cache does to the logits of JAX and of PyTorch is "
            f"{format_number(cosine['mean'])}{_span(cosine['interval'])} over {cosine['steps']} steps; 0 is no common "
            "direction."
        )
    lines.append(
        describe_same(found["same_flips"], "Steps, taken as independent, flipped by the cache", ("JAX", "PyTorch"))
    )
    if choice["total"]:
        lines.append(f"Of steps that flip in both, {format_count(choice)} flip between the same two tokens.")
    equal = ", ".join(f"{cell} {found['layers']['bit_equal'][cell]}" for cell in CELLS)
    lines.append(
        f"Steps whose residual stream comes with the cell's own logits bit for bit, of {found['tokens']}: {equal}."
    )
    head = ["pair", "argmax flips per token", "mean KL, nats", "max |diff|", "bit-equal steps"]
    about = Paragraph("Four cells along the tokens of JAX's cached arm.")
    return [about, Bullets(lines), Fold("Every pair of cells", [Table(head, rows)])]


REPORT = Report("JAX beside PyTorch", lambda run: summarize_parity(run.records, run.run), write_parity, draw_parity)
