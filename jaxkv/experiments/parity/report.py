"""JAX beside PyTorch (and engines elsewhere), cached and uncached: is the framework gap larger than the cache gap?

Two sources. Runs of 'divergence' and 'foreign' of several frameworks on the same prompts give free-running figures:
tokens, first divergence, accuracy. Records of 'parity' give logits of four cells along the same tokens: flips, KL,
direction, and the residual stream of each layer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.figures import draw_parity
from jaxkv.experiments.parity.record import CACHE_PAIRS, CELLS, FRAMEWORK_PAIRS, PAIRS, ParityRecord
from jaxkv.experiments.record_parts import known
from jaxkv.experiments.report_parts import Report, Summary, begin_summary, say_invalid, summarize_comparisons
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Bullets, Fold, Paragraph, make_table
from jaxkv.reporting.format import (
    format_count,
    format_counted_share,
    format_interval,
    format_mean,
    format_number,
    format_share,
)
from jaxkv.reporting.shares import ratio_of_sums

ARMS = ("uncached", "cached")


def judge_gap(framework: Sequence[float], cache: Sequence[float], *, shares: bool) -> dict[str, Any]:
    """Whether the gap of each problem between frameworks is larger than that between the arms of one framework.

    Gaps are `shares` of arms that part, or skewed, as KL is. `larger` is 'framework', 'cache', or None where the
    interval holds 0, or where there is none, problems being too few or all equal.
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


def count_same(pairs: Iterable[Sequence[bool]], fisher: bool = False) -> dict[str, Any]:
    """Whether two frameworks part at the same places, given which part at each: counts, and what independence gives.

    Fisher's test takes places to be independent: sequences are, steps of one are not.
    """
    both = np.asarray(list(pairs), bool).reshape(-1, 2)
    first, second = (int(column.sum()) for column in both.T)
    table = [[int(np.sum((both[:, 0] == a) & (both[:, 1] == b))) for b in (0, 1)] for a in (0, 1)]
    return {
        "places": len(both),
        "first": first,
        "second": second,
        "both": table[1][1],
        "expected": first * second / len(both) if len(both) else 0.0,
        "fisher_p": statistics.fisher_exact(table) if fisher else None,
    }


def summarize_parity(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'parity' records of a run, as `begin_summary` says."""
    summary, samples, every = begin_summary(records, run, ParityRecord)
    valid = [s for s in every if s.tokens]
    summary |= {
        "status": "ok" if valid else "invalid" if samples else "empty",
        "attention": sorted({s.attention for s in samples}),
        "torch_uncached": sorted({s.torch_uncached for s in samples}),
        "versions": samples[0].versions if samples else {},
    }
    if not valid:
        return summary
    sizes = [len(s.tokens) for s in valid]
    kl = {pair: [float(np.mean(known(s.pairs)[pair].kl)) for s in valid] for pair in PAIRS}
    halves = [np.mean([kl[pair] for pair in kind.values()], axis=0).tolist() for kind in (FRAMEWORK_PAIRS, CACHE_PAIRS)]
    ratio = ratio_of_sums(*halves) or {"share": None, "interval": None}
    flips = [[known(s.pairs)[pair].flip for s in valid] for pair in CACHE_PAIRS.values()]
    streams = [known(s.layers) for s in valid]
    return summary | {
        "tokens": sum(sizes),
        "pairs": {pair: summarize_comparisons([(s.problem, known(s.pairs)[pair]) for s in valid]) for pair in PAIRS},
        "gap": judge_gap(*halves, shares=False) | {"ratio": ratio["share"], "ratio_interval": ratio["interval"]},
        "cosine": _summarize_cosine([[c for c in known(s.cosine) if c is not None] for s in valid]),
        "same_flips": count_same(pair for a, b in zip(*flips, strict=True) for pair in zip(a, b, strict=True)),
        "same_choice": _same_choices(valid),
        "layers": {
            "bit_equal": {cell: sum(stream.bit_equal[cell] for stream in streams) for cell in CELLS},
            "mean": {
                pair: np.average([stream.distance[pair].mean for stream in streams], axis=0, weights=sizes).tolist()
                for pair in PAIRS
            },
            "max": {pair: np.max([s.distance[pair].max for s in streams], axis=0).tolist() for pair in PAIRS},
        },
    }


def _summarize_cosine(columns: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Mean cosine over the steps at which the cache moves both frameworks; None without such a step."""
    kept = [column for column in columns if column]
    if not kept:
        return None
    steps = sum(map(len, kept))
    interval = statistics.paired_interval([sum(column) / len(column) for column in kept])
    return {"steps": steps, "mean": sum(map(sum, kept)) / steps, "interval": interval}


def _same_choices(valid: Sequence[ParityRecord]) -> dict[str, int]:
    """Of the steps at which both frameworks flip, at how many they flip between the same two tokens."""
    flipped = [
        [tuple(known(s.choices)[f"{f} {arm}"][step] for arm in ARMS) for f in CACHE_PAIRS]
        for s in valid
        for step in range(len(s.tokens))
        if all(known(s.pairs)[pair].flip[step] for pair in CACHE_PAIRS.values())
    ]
    return {"count": sum(a == b for a, b in flipped), "total": len(flipped)}


def describe_gap(gap: Summary, unit: str) -> str:
    """Both gaps, their difference, and which is larger."""
    means = f"framework {format_number(gap['framework'])}, cache {format_number(gap['cache'])} {unit}".rstrip()
    if gap["interval"] is None:
        return f"{means}: cannot tell which is larger ({gap['problems']} problems, no interval)"
    verdict = f"the {gap['larger']} gap is larger" if gap["larger"] else "cannot tell which is larger"
    return f"{means}, difference {format_interval(gap['difference'], gap['interval'])}: {verdict}"


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


COLUMNS: dict[str, Callable[[tuple[str, Any]], str]] = {
    "pair": lambda pair: pair[0].replace(" | ", " to "),
    "argmax flips per token": lambda pair: format_counted_share(pair[1]["flips"]),
    "mean KL, nats": lambda pair: format_mean(pair[1]["kl"]),
    "max |diff|": lambda pair: format_number(pair[1]["max_abs"]["max"]),
    "bit-equal steps": lambda pair: format_share(pair[1]["bit_equal"]),
}


def write_parity(found: Summary) -> list[Block]:
    """Four cells along the same tokens, from what `summarize_parity` gives."""
    if found["status"] != "ok":
        return [Paragraph(f"No valid sample: {'; '.join(map(say_invalid, found['invalid'])) or 'none yet'}.")]
    gap, cosine, choice = found["gap"], found["cosine"], found["same_choice"]
    lines = [f"KL a token, mean over problems: {describe_gap(gap, 'nats')}."]
    if gap["ratio"] is not None:
        ratio = format_interval(gap["ratio"], gap["ratio_interval"])
        lines.append(f"The framework gap is {ratio} times the cache gap.")
    lines.append(
        f"PyTorch's uncached arm: {', '.join(found['torch_uncached'])} rows. Where JAX's has others, the framework gap "
        "holds what other shapes alone do; a divergence run's control at another length gives the size of that."
    )
    if cosine is None:
        lines.append("Direction: at no step does the cache move the logits of both frameworks.")
    else:
        lines.append(
            "Direction: the cosine between what the cache does to the logits of JAX and of PyTorch is "
            f"{format_interval(cosine['mean'], cosine['interval'])} over {cosine['steps']} steps; 0 is no common "
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
    about = Paragraph("Four cells along the tokens of JAX's cached arm.")
    return [about, Bullets(lines), Fold("Every pair of cells", [make_table(COLUMNS, found["pairs"].items())])]


REPORT = Report("JAX beside PyTorch", lambda run: summarize_parity(run.records, run.run), write_parity, draw_parity)
