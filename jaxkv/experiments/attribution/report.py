"""What the records of experiment 'attribution' say: a summary, and its blocks. Reads records alone.

The share of the plain KL that a variant keeps is a ratio of sums over the same problems, its interval over problems
(Student's t on the log). Shares of classes do not add up to one: any class that is left unaligned scatters the
roundings of all that follow it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import asdict

from jaxkv.experiments.attribution.record import (
    ALL,
    ALL_BUT,
    ALONE,
    FENCED,
    OP_CLASSES,
    PLAIN,
    PROGRAMS,
    VARIANTS,
    AttributionRecord,
)
from jaxkv.experiments.record_parts import ARMS, known
from jaxkv.experiments.report_parts import Report, collect, describe_problems
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Brief, Bullets, Cell, Paragraph, Table
from jaxkv.reporting.format import (
    format_bound,
    format_count,
    format_counted_share,
    format_mean,
    format_number,
    format_percent,
    format_share,
)
from jaxkv.reporting.shares import clustered_share, take_rest

Summary = Mapping[str, Any]
NOTE = (
    "fenced: operations cut apart as aligning needs, none aligned. KL kept: share of the KL of none, with a 95 % "
    "interval over problems. moved: steps at which an arm has other bits than in fenced. KL in nats."
)


def summarize_attribution(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'attribution' records of a run.

    Args:
      records: in any order; those of other experiments are left out.
      run: content of run.json.

    Returns:
      Plain values. `status` is 'ok', 'invalid' (no valid sample of the plain programs) or 'empty'; `variants` holds the
      figures of each variant over its valid samples, in the order of the table.
    """
    samples = collect(records, AttributionRecord)
    by_variant: dict[str, dict[int, AttributionRecord]] = {name: {} for name in VARIANTS}
    for sample in samples:
        by_variant[sample.variant][sample.problem] = sample
    problems = {s.problem for s in samples}
    plain = {p: s for p, s in by_variant[PLAIN].items() if s.status == "ok"}
    return {
        "experiment": "attribution",
        "fingerprint": run.get("fingerprint"),
        "status": "ok" if plain else "invalid" if samples else "empty",
        "problems": {
            "asked": run.get("config", {}).get("num_problems", len(problems)),
            "total": len(problems),
            "ok": len(plain),
        },
        "tiles": sorted({s.tile for s in samples}),
        "prefill": sorted({s.shapes.prefill for s in samples}),
        "slots": sorted({s.shapes.slots for s in samples}),
        "samples_missing": sum(p not in found for found in by_variant.values() for p in problems),
        "invalid": [
            {"variant": s.variant, "problem": s.problem} | asdict(s.invalid)
            for found in by_variant.values()
            for s in found.values()
            if s.invalid is not None
        ],
        "variants": {
            name: _summarize_variant([s for s in found.values() if s.status == "ok"], plain)
            for name, found in by_variant.items()
        }
        if plain
        else {},
    }


def _sum(sample: AttributionRecord, name: str) -> float:
    return float(np.sum(np.asarray(getattr(sample.teacher_forced, name), np.float64)))


def _summarize_variant(
    samples: Sequence[AttributionRecord], plain: Mapping[int, AttributionRecord]
) -> dict[str, Any] | None:
    """Figures of one variant; None if it has no step."""
    kept = [s for s in samples if s.steps]
    if not kept:
        return None
    sizes = [s.steps for s in kept]
    sums = [_sum(s, "kl") for s in kept]
    kl = statistics.estimate_mean(sums, sizes)
    return {
        "problems": len(kept),
        "steps": sum(sizes),
        "flips": clustered_share([int(_sum(s, "flip")) for s in kept], sizes),
        "bit_equal": clustered_share([int(_sum(s, "bit_equal")) for s in kept], sizes),
        "kl": {
            "mean": sum(sums) / sum(sizes),
            "interval": statistics.ends(kl),
            "max": max(max(known(s.teacher_forced).kl) for s in kept),
        },
        "max_abs": max(max(known(s.teacher_forced).max_abs) for s in kept),
        "kl_kept": _compare_to_plain([(s, plain[s.problem]) for s in kept if s.problem in plain]),
        "moved": {arm: sum(getattr(s.moved, arm) for s in kept) for arm in ARMS},
    }


def _compare_to_plain(pairs: Sequence[tuple[AttributionRecord, AttributionRecord]]) -> dict[str, Any] | None:
    """The share of the plain KL that is left, on the same problems; None if there was none to begin with."""
    sums, plain = [_sum(a, "kl") for a, _ in pairs], [_sum(b, "kl") for _, b in pairs]
    if not sum(plain):
        return None
    ones = np.ones(len(pairs))
    found = statistics.estimate_ratio((sums, ones), (plain, ones))
    interval = statistics.ends(found)
    return {"share": sum(sums) / sum(plain), "interval": interval, "problems": len(pairs)}


def _describe_kept(kept: Mapping[str, Any] | None) -> str:
    if kept is None:
        return "-"
    text = f"{format_number(100 * kept['share'], 3)} %"  # no share of a whole: it may exceed 100 %
    if kept["interval"] is None or not kept["share"]:
        return text
    low, high = kept["interval"]
    return f"{text} [{format_number(100 * low, 3)}, {format_number(100 * high, 3)}]"


def _is_exact(figures: Mapping[str, Any]) -> bool:
    return figures["bit_equal"]["count"] == figures["steps"]


def _differing(figures: Mapping[str, Any]) -> str:
    """Steps with other bits; none and all with the bound of the share of sequences."""
    differing = take_rest(figures["bit_equal"])
    return format_share(differing, "steps") if differing["rate"] in (0, 1) else f"{format_count(differing)} steps"


def conclude(summary: Summary) -> list[str]:
    """What the figures allow to say, one sentence each; never more than their intervals do."""
    if summary["status"] != "ok":
        kind = "no sample yet" if summary["status"] == "empty" else "no sample with finite numbers"
        return [f"There is {kind}, so nothing can be attributed."]
    variants = summary["variants"]
    plain, exact = variants[PLAIN], variants[ALL]
    if plain is None:
        return ["No step was compared, so nothing can be attributed."]
    if not plain["kl"]["max"] and _is_exact(plain):
        return [f"The plain arms differ in no bit at {plain['steps']} steps: there is nothing to attribute here."]
    lines = []
    if exact is not None and _is_exact(exact):
        lines.append(f"With every class aligned, logits differ at {_differing(exact)}: what is in no class (embedding, "
                     "masks, residual additions) adds no difference here.")  # fmt: skip
    elif exact is not None:
        lines.append(f"With every class aligned, logits still differ at {_differing(exact)}, keeping "
                     f"{_describe_kept(exact['kl_kept'])} of the plain KL: the same operation on the same rows gives "
                     "other bits in another program on this device, and the shares below are not of row counts "
                     "alone.")  # fmt: skip
    if (fenced := variants[FENCED]) is not None and (here := variants[PLAIN]) is not None:
        if not here["moved"]["cached"] and not here["moved"]["uncached"]:
            lines.append("Cutting the operations apart, without aligning any, changes no bit of either arm: the plain "
                         "programs are attributed as they are.")  # fmt: skip
        else:
            lines.append(f"Cutting the operations apart changes bits by itself, at {here['moved']['cached']} (cached) "
                         f"and {here['moved']['uncached']} (uncached) of {here['steps']} steps, and leaves "
                         f"{_describe_kept(fenced['kl_kept'])} of the plain KL: what a class does is measured on "
                         "programs that the compiler fused otherwise than the plain ones.")  # fmt: skip
    lines += _conclude_classes(variants, exact is not None and _is_exact(exact))
    for name in PROGRAMS:
        if (figures := variants[ALONE[name]]) is not None:
            lines.append(f"All classes aligned in {name} alone: {_judge(figures)}.")
    few = plain["problems"]
    if few == 1:
        lines.append("With one problem there are no intervals.")
    elif few < 20:
        lines.append(f"An interval over {few} problems is wide and rough.")
    lines.append("Shares do not add up: one unaligned class scatters the roundings of all that follow it.")
    return lines


def _judge(figures: Mapping[str, Any]) -> str:
    """Whether a variant's KL is below that of the plain programs, as far as the interval tells."""
    kept = figures["kl_kept"]
    if _is_exact(figures):
        return f"logits differ at {_differing(figures)}"
    if kept is None:
        return "not comparable with the plain programs"
    text = f"{_describe_kept(kept)} of the plain KL is left"
    if kept["interval"] is None:
        return text
    low, high = kept["interval"]
    if high < 1:
        return text
    return f"{text}, {'more than all of it' if low > 1 else 'not distinguishable from all of it'}"


def _conclude_classes(variants: Mapping[str, Any], exact_end: bool) -> list[str]:
    lines, clean, idle, one_row, lowering = [], [], [], [], []
    for name in OP_CLASSES:
        alone, but = variants[ALONE[name]], variants[ALL_BUT[name]]
        if alone is not None and not any(alone["moved"].values()):
            idle.append(name)
        if alone is not None and alone["moved"]["cached"] and not alone["moved"]["uncached"]:
            one_row.append(name)
        if alone is not None and (kept := alone["kl_kept"]) and kept["interval"] and kept["interval"][1] < 1:
            lowering.append(f"{name} ({_describe_kept(kept)} left)")
        if but is None or not exact_end:
            continue
        if _is_exact(but):
            clean.append(name)
        else:
            lines.append(f"Left unaligned by itself, {name} makes logits differ at {_differing(but)} and keeps "
                         f"{_describe_kept(but['kl_kept'])} of the plain KL.")  # fmt: skip
    if clean:
        fewest = min((variants[ALL_BUT[name]] for name in clean), key=lambda figures: figures["steps"])
        lines.append(f"Left unaligned by themselves, {', '.join(clean)} make logits differ at {_differing(fewest)}.")
    if idle:
        lines.append(f"Aligning {', '.join(idle)} alone changes no bit of either arm: here nothing can be isolated, "
                     "either because rows do not depend on their number or because the compiler makes the same of "
                     "both forms.")  # fmt: skip
    if one_row:
        lines.append(f"Aligning {', '.join(one_row)} alone moves the cached arm and no bit of the uncached one: many "
                     "rows give the bits of a tile anyway, and it is the form for one row that differs.")  # fmt: skip
    known = [variants[ALONE[name]] for name in OP_CLASSES if variants[ALONE[name]] is not None]
    if lowering:
        lines.append(
            f"Aligned alone, the share kept stays below 100 % in its interval for {', '.join(lowering)}; the others "
            "cannot be told from 100 %."
        )
    elif known:
        lines.append("Whether any class, aligned alone, lowers the KL at all the intervals leave open.")
    return lines


HEADER = ["aligned", "argmax flips", "mean KL", "KL kept", "max |diff|", "bit-equal", "moved (cached, uncached)"]


def make_rows(summary: Summary) -> list[list[Cell]]:
    """The cells of the report's table, a row for each variant that has figures."""
    rows: list[list[Cell]] = []
    for name, figures in summary["variants"].items():
        if figures is None:
            continue
        flips, kl = figures["flips"], figures["kl"]
        brief = f"0 (≤ {format_bound(flips)})" if "upper_bound" in flips else format_share(flips)
        cells = [Brief(format_counted_share(flips), brief), Brief(format_mean(kl), format_number(kl["mean"]))]
        equal = f"{format_percent(figures['bit_equal']['rate'])} %"
        moved = "{cached}, {uncached} of {steps}".format(**figures["moved"], steps=figures["steps"])
        rows.append([name, *cells, _describe_kept(figures["kl_kept"]), format_number(figures["max_abs"]), equal, moved])
    return rows


def write_attribution(summary: Summary) -> list[Block]:
    """What the variants show, and what follows from it."""
    found: list[Block] = []
    if rows := make_rows(summary):
        found = [Table(HEADER, rows, terminal=(0, 1, 2, 3, 5)), Paragraph(NOTE, "note")]
    about = Paragraph(f"{describe_problems(summary)}; tile {', '.join(map(str, summary['tiles']))}.")
    return [about, *found, Bullets(conclude(summary))]


REPORT = Report("Attribution", lambda run: summarize_attribution(run.records, run.run), write_attribution)
