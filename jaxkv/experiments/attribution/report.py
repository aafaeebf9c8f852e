"""What the records of experiment 'attribution' say: a summary, and its blocks. Reads records alone.

The share of the plain KL that a variant keeps is a ratio of sums over the same problems, its interval over problems
(Student's t on the log). Shares of classes do not add up to one: any class that is left unaligned scatters the
roundings of all that follow it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments import report_parts
from jaxkv.experiments.attribution.record import ALL, ALL_BUT, ALONE, FENCED, PLAIN, VARIANTS, AttributionRecord
from jaxkv.experiments.record_parts import ARMS, known
from jaxkv.experiments.report_parts import Report, Summary
from jaxkv.reporting.document import Block, Brief, Bullets, Cell, Paragraph, make_table
from jaxkv.reporting.format import (
    format_bound,
    format_count,
    format_counted_share,
    format_number,
    format_part,
    format_percent,
    format_share,
)
from jaxkv.reporting.shares import ratio_of_sums, take_rest

NOTE = (
    "fenced: operations cut apart as aligning needs, none aligned. KL kept: share of the KL of none, with a 95 % "
    "interval over problems. moved: steps at which an arm has other bits than in fenced. KL in nats."
)


def summarize_attribution(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'attribution' records of a run, as `begin_summary` says.

    `status` is that of the plain programs, without which there is nothing to attribute; `variants` holds the figures
    of each variant over its valid samples, in the order of the table (None without a step).
    """
    summary, samples, valid = report_parts.begin_summary(records, run, AttributionRecord)
    problems = {s.problem for s in samples}
    plain = {s.problem: s for s in valid if s.variant == PLAIN}
    return summary | {
        "status": "ok" if plain else "invalid" if samples else "empty",
        "problems": summary["problems"] | {"ok": len(plain)},
        "tiles": sorted({s.tile for s in samples}),
        "prefill": sorted({s.shapes.prefill for s in samples}),
        "slots": sorted({s.shapes.slots for s in samples}),
        "samples_missing": len(problems) * len(VARIANTS) - len(samples),
        "variants": {name: _summarize_variant([s for s in valid if s.variant == name], plain) for name in VARIANTS}
        if plain
        else {},
    }


def _summarize_variant(samples: Sequence[AttributionRecord], plain: Mapping[int, AttributionRecord]) -> Any:
    found = report_parts.summarize_comparisons([(s.problem, s.teacher_forced) for s in samples])
    if found is None:
        return None
    pairs = [[_add_kl(one) for one in (s, plain[s.problem])] for s in samples if s.steps and s.problem in plain]
    return found | {
        "kl_kept": ratio_of_sums(*zip(*pairs, strict=True)) if pairs else None,
        "moved": {arm: sum(getattr(s.moved, arm) for s in samples if s.steps) for arm in ARMS},
    }


def _add_kl(sample: AttributionRecord) -> float:
    return float(np.sum(known(sample.teacher_forced).kl))


def _say_kept(figures: Summary) -> str:
    kept = figures["kl_kept"]
    return "-" if kept is None else format_part(kept["share"], kept["interval"] if kept["share"] else None)


def _is_exact(figures: Summary | None) -> bool:
    return figures is not None and figures["bit_equal"]["count"] == figures["tokens"]


def _differing(figures: Summary) -> str:
    """Steps with other bits; none and all with the bound of the share of sequences."""
    differing = take_rest(figures["bit_equal"])
    return format_share(differing, "steps") if differing["rate"] in (0, 1) else f"{format_count(differing)} steps"


def conclude(summary: Summary) -> list[str]:
    """What the figures allow to say, one sentence each; never more than their intervals do."""
    if nothing := report_parts.say_nothing(summary, "nothing can be attributed"):
        return nothing
    variants = summary["variants"]
    plain, exact, fenced = (variants[name] for name in (PLAIN, ALL, FENCED))
    if plain is None:
        return ["No step was compared, so nothing can be attributed."]
    if not plain["kl"]["max"] and _is_exact(plain):
        return [f"The plain arms differ in no bit at {plain['tokens']} steps: there is nothing to attribute here."]
    lines = []
    if exact is not None:
        lines.append(f"With every class aligned, logits differ at {_differing(exact)}" + (
            ": what is in no class (embedding, masks, residual additions) adds no difference here." if _is_exact(exact)
            else f" and {_say_kept(exact)} of the plain KL is left: on this device equal operations on equal rows give "
            "other bits in another program, so that the shares below are not of row counts alone."
        ))  # fmt: skip
    if fenced is not None:
        lines.append("Cutting the operations apart, without aligning any, changes bits at {cached} (cached) and "
                     "{uncached} (uncached) of {steps} steps".format(**plain["moved"], steps=plain["tokens"]) + (
            f" and leaves {_say_kept(fenced)} of the plain KL: what a class does is measured on programs that the "
            "compiler fused otherwise than the plain ones." if any(plain["moved"].values())
            else ": the plain programs are attributed as they are."
        ))  # fmt: skip
    for kind, names in (("aligned alone", ALONE), ("left unaligned by itself", ALL_BUT)):
        said: dict[str, list[str]] = {}
        for name, variant in names.items():
            if (figures := variants[variant]) is not None and (names is ALONE or _is_exact(exact)):
                reading = _read(figures)
                said.setdefault(reading, []).append(name + (f" ({_say_kept(figures)})" if reading in JUDGED else ""))
        lines += [f"{kind}: {reading}: {', '.join(found)}." for reading, found in said.items()]
    lines += report_parts.say_few(plain["sequences"])
    return [*lines, "Shares do not add up: one unaligned class scatters the roundings of all that follow it."]


LESS, MORE = "less than the plain KL is left", "more than the plain KL is left"
EXACT, IDLE, LEFT_OPEN = "equal logits", "no bit of either arm changes", "cannot be told from the plain KL"
ONE_ARM = "no bit of the uncached arm changes: it is the form for one row that differs"
JUDGED = (LESS, MORE, LEFT_OPEN, ONE_ARM)


def _read(figures: Summary) -> str:
    """What a variant does to the plain arms' difference, as far as its interval tells."""
    moved, kept = figures["moved"], figures["kl_kept"]
    if _is_exact(figures):
        return EXACT
    if not moved["uncached"]:
        return ONE_ARM if moved["cached"] else IDLE
    low, high = (kept and kept["interval"]) or (0, 1)
    return LESS if high < 1 else MORE if low > 1 else LEFT_OPEN


def _show_flips(flips: Summary) -> Brief:
    brief = f"0 (≤ {format_bound(flips)})" if "upper_bound" in flips else format_share(flips)
    return Brief(format_counted_share(flips), brief)


# A variant's cells, of its name and figures.
COLUMNS: dict[str, Callable[[tuple[str, Any]], Cell]] = {
    "aligned": lambda v: v[0],
    "argmax flips": lambda v: _show_flips(v[1]["flips"]),
    "mean KL": lambda v: report_parts.show_mean(v[1]["kl"]),
    "KL kept": lambda v: _say_kept(v[1]),
    "max |diff|": lambda v: format_number(v[1]["max_abs"]["max"]),
    "bit-equal": lambda v: f"{format_percent(v[1]['bit_equal']['rate'])} %",
    "moved (cached, uncached)": lambda v: "{cached}, {uncached} of {steps}".format(
        **v[1]["moved"], steps=v[1]["tokens"]
    ),
}


def write_attribution(summary: Summary) -> list[Block]:
    """What the variants show, and what follows from it."""
    found = [variant for variant in summary["variants"].items() if variant[1] is not None]
    table: list[Block] = [make_table(COLUMNS, found, terminal=(0, 1, 2, 3, 5)), Paragraph(NOTE, "note")]
    about = Paragraph(f"{report_parts.describe_problems(summary)}; tile {', '.join(map(str, summary['tiles']))}.")
    return [about, *(table if found else []), Bullets(conclude(summary))]


REPORT = Report("Attribution", lambda run: summarize_attribution(run.records, run.run), write_attribution)
