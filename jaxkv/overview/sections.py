"""What a report says of cached against uncached decoding over all its runs: a section for each question."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.experiments.divergence.cause import FACTOR, HUGE, STRAY
from jaxkv.experiments.divergence.report import TOO_FEW, is_above_floor
from jaxkv.experiments.divergence.wording import LABELS, describe_gate
from jaxkv.experiments.figures import find_colour, place
from jaxkv.experiments.record_parts import ARMS, find_headline
from jaxkv.overview.gather import Condition, Study, name_condition, select_valid
from jaxkv.reporting.charts import Axis, Intervals, Row
from jaxkv.reporting.document import Block, Bullets, Figure, Fold, Heading, Paragraph, Table, make_table
from jaxkv.reporting.format import (
    format_count,
    format_counted_share,
    format_interval,
    format_mean,
    format_number,
    format_percent,
    format_points,
    format_share,
)

Names = Mapping[str, str]  # what each run is called, by its directory
Columns = dict[str, Callable[[Any], str]]
TIES_SHOWN = 20


def draw_forest(study: Study) -> list[Block]:
    """All runs at a glance: the share of sequences that part, of each with its interval, a panel a model."""
    if len(select_valid(study)) < 2:
        return []
    panels: dict[str, list[Condition]] = defaultdict(list)
    once = {c["fingerprint"] or c["name"]: c for c in study["conditions"]}  # a run that was repeated is one row
    for condition in select_valid({"conditions": once.values()}):
        if condition["divergence"]["free_running"]:
            panels[condition["model"] or condition["name"]].append(condition)
    batches = {c["batch_size"] for members in panels.values() for c in members}
    without = ("model", "batch_size") if len(batches) < 2 else ("model",)
    values = {title: [_show_row(c, without) for c in _order(members)] for title, members in panels.items()}
    high = max((end for rows in values.values() for row in rows for end in row.interval or ()), default=1.0)
    axis = Axis("share of sequences that part", low=0.0, high=min(1.0, 1.05 * high))
    charts = [Intervals(title, rows, axis) for title, rows in values.items()]
    caption = (
        "The share of sequences that part, running free, with its exact 95 % interval. Each row is named by its whole "
        "policy: precision with its overrides, sampler, framework, regime."
    )
    return [Heading("All runs at a glance", name="overview"), Figure(charts, caption)] if charts else []


def _order(members: Sequence[Condition]) -> list[Condition]:
    return sorted(members, key=lambda c: (place(c)[0], c["precision"], c["sampler"] or "", c["framework"], c["regime"]))


def _show_row(condition: Condition, without: Sequence[str]) -> Row:
    share = condition["divergence"]["free_running"]["diverged"]
    name = name_condition(condition, without)
    low, high = map(format_percent, share["interval"])
    said = f"{name}: {share['count']} of {share['total']} part, {format_percent(share['rate'])} % [{low}, {high}]"
    return Row(name, share["rate"], share["interval"], said, find_colour(condition))


def write_conditions(study: Study, names: Names) -> list[Block]:
    """One row a run with divergence records, and why runs are invalid."""
    kept = [c for c in study["conditions"] if c.get("divergence")]
    if not kept:
        return []

    def shown(part: str, figure: str, show: Callable[[Any], str]) -> Callable[[Condition], str]:
        def cell(condition: Condition) -> str:
            found = condition["divergence"]
            return show(found[part] and found[part][figure]) if found["status"] == "ok" else "none counted"

        return cell

    columns: Columns = {
        "run": lambda c: names[c["name"]],
        "valid": lambda c: _say_valid(c["divergence"]["problems"]),
        "argmax flips per token": shown("teacher_forced", "flips", format_counted_share),
        "sequences that diverge": shown("free_running", "diverged", format_counted_share),
        "mean KL, nats": shown("teacher_forced", "kl", lambda kl: format_mean(kl) if kl else "-"),
        "bit-equal steps": shown("teacher_forced", "bit_equal", format_share),
        "directory": lambda c: c["name"],
    }
    notes = [
        f"{names[c['name']]}: {group['samples']} samples invalid at {group['reason']} ({group['arm']}, "
        f"{group['value']}, from position {group['first_position']}); counted nowhere."
        for c in kept
        for group in c["divergence"]["invalid"]
    ]
    table = make_table(columns, kept, "Every run")
    said = [Bullets(notes)] if notes else []
    return [Heading("Divergence", name="divergence"), table, *said, *_write_causes(study)]


def _say_valid(problems: Mapping[str, int]) -> str:
    unfinished = f" (UNFINISHED, {problems['asked']} asked)" if problems["total"] < problems["asked"] else ""
    return f"{problems['ok']} of {problems['total']}{unfinished}"


def _write_causes(study: Study) -> list[Block]:
    if not study["causes"]:
        return []
    columns: Columns = {
        "model and precision": lambda c: c["name"],
        "plain": lambda c: format_counted_share(c["plain"]),
        "aligned": lambda c: format_counted_share(c["aligned"]),
        "farther arm": lambda c: "not run" if c["distance"] is None else format_number(c["distance"], 3),
        "verdict": lambda c: c["verdict"],
    }
    text = (
        "Of the problems run here and of no others: a verdict does not cover a window or a position that they do not "
        "reach, nor what both arms and float64 get wrong alike. Problems with other bits at some step, in the plain "
        "arms and with both arms through one program, the cache on (aligned: runs and gates; of several, which share "
        "problems, the one that says most), and how many times as far from float64 one plain arm is as the other "
        "(median over steps of a few problems). "
        "rounding: the plain arms differ, aligned they do not, both plain arms are about equally far from float64, in "
        "fp32 and with each sampler too, and the difference falls from 16 bits to fp32 as the dtypes' units do; or the "
        f"full gate passed. fault: they differ aligned too, or in some precision one plain arm is over {FACTOR:g} "
        f"times as far as the other at a tenth of its steps, or over {HUGE:g} times at one; which arm has it, this "
        "does not say. cannot tell: one of these was not run, or a step is not as rounding has it, such as one at "
        f"which the arms are over {STRAY:g} times as far apart as both are from float64 at the usual step."
    )
    table = make_table(columns, study["causes"])
    return [Heading("Rounding or a fault", 3), table, Fold("How it is judged", [Paragraph(text)])]


def write_controls(study: Study, names: Names) -> list[Block]:
    """Each arm against itself and the gate, as a matrix of bit-equal or not, and their flips behind a line."""
    if not (kept := select_valid(study)):
        return []

    def cells(show: Callable[[Mapping[str, Any] | None], str]) -> Columns:
        return {
            label: lambda c, control=control: show(c["divergence"]["controls"][control])  # type: ignore[misc]
            for control, label in LABELS.items()
        }

    run: Columns = {"run": lambda c: names[c["name"]]}
    bits = run | {"both arms, one program": lambda c: _say_gate(c["divergence"]["gate"])} | cells(_say_bits)
    flips = run | cells(
        lambda c: f"{format_counted_share(c['flips'])} flips; KL {format_number(c['kl']['mean'])}" if c else "-"
    )
    flips |= {"gate": lambda c: describe_gate(c["divergence"]["gate"])}
    return [
        Heading("Controls", name="controls"),
        Paragraph(
            "Both arms through one program with the cache on: the gate. The others are an arm against itself; where "
            "another padded length differs too, a shape alone suffices."
        ),
        make_table(bits, kept, "Controls, bit by bit", kind="matrix"),
        Fold("Flips and KL of each control, and what the gate found", [make_table(flips, kept, kind="wrap")]),
    ]


def _say_bits(control: Mapping[str, Any] | None) -> str:
    if control is None:
        return "not run"
    steps, equal = control["tokens"], control["bit_equal"]["count"]
    return f"bit-equal, {steps} steps" if equal == steps else f"other bits, {steps - equal} of {steps} steps"


def _say_gate(gate: Mapping[str, Any] | None) -> str:
    if not gate or not gate.get("steps"):
        return "not run"
    return f"bit-equal, {gate['steps']} steps" if gate.get("passed") else "other bits"


def write_ties(study: Study, names: Names) -> list[Block]:
    """Exact ties, where the lowest id wins."""
    kept = [(names[c["name"]], found) for c in select_valid(study) if (found := c["divergence"]["teacher_forced"])]
    if not kept:
        return []
    tied = [(name, found) for name, found in kept if found["ties"]["count"]]
    text = "Two best logits that are equal have margin 0; the lowest token id wins in both arms."
    if without := [found["tokens"] for _, found in kept if not found["ties"]["count"]]:
        text += f" In {len(without)} of {len(kept)} runs none of {sum(without)} steps is a tie."
    blocks: list[Block] = [Heading("Exact ties", 3), Paragraph(text)]
    if tied:
        columns: Columns = {
            "run": lambda one: one[0],
            "steps at an exact tie": lambda one: f"{one[1]['ties']['count']} of {one[1]['tokens']}",
            "of the flips, at one": lambda one: f"{one[1]['ties']['flips']} of {one[1]['flips']['count']}",
        }
        listed = [
            [name, str(tie["problem"]), str(tie["step"]), "flip" if tie["flip"] else "no flip"]
            for name, found in tied
            for tie in found["ties"]["listed"]
        ]
        count = f"the first {TIES_SHOWN} of {len(listed)}" if len(listed) > TIES_SHOWN else f"all {len(listed)}"
        shown = Table(["run", "problem", "step", "outcome"], listed[:TIES_SHOWN])
        blocks += [make_table(columns, tied), Fold(f"Ties listed ({count})", [shown])]
    return blocks


def write_accuracy(study: Study, names: Names) -> list[Block]:
    """Accuracy of both arms where there are answers and the model is above the floor; and over conditions."""
    found = [
        (names[c["name"]], accuracy[find_headline(accuracy)])
        for c in select_valid(study)
        if (accuracy := c["divergence"]["accuracy"])
    ]
    above = [(name, right) for name, right in found if is_above_floor(right)]
    below = [f"{name} ({format_count(right['cached'])})" for name, right in found if not is_above_floor(right)]
    columns: Columns = {
        "run": lambda one: one[0],
        "right: cached": lambda one: format_count(one[1]["cached"]),
        "uncached": lambda one: format_count(one[1]["uncached"]),
        "difference, points": lambda one: format_points(one[1]["difference"]),
        "McNemar p": lambda one: format_number(one[1]["mcnemar_p"]),
        "labels that change": lambda one: str(one[1]["label_changes"]["answer_changed"]),
    }
    blocks: list[Block] = []
    if above:
        blocks = [make_table(columns, above, "Right answers, both arms on the same problems"), *_write_pooled(study)]
    if below:
        more = f" and {len(below) - 4} more" if len(below) > 4 else ""
        blocks.append(Paragraph(f"{TOO_FEW}: {'; '.join(below[:4])}{more}.", "note"))
    blocks += _write_totals(study, names)
    return [Heading("Accuracy", name="accuracy"), *blocks] if blocks else []


def _write_totals(study: Study, names: Names) -> list[Block]:
    """What the package that a task is of makes of an arm's texts together; no interval, since its rule is its own."""
    totals = [(names[c["name"]], c["totals"]) for c in study["conditions"] if c.get("totals")]
    rows = [
        [name, metric, *(format_number(found[arm][metric], 4) for arm in ARMS)]
        for name, found in totals
        for metric in found["cached"]
        if metric in found["uncached"]
    ]
    title = "The task's own results, over all valid texts of an arm"
    return [Table(["run", "metric, filter", *ARMS], rows, title)] if rows else []


def _write_pooled(study: Study) -> list[Block]:
    columns: Columns = {
        "precision": lambda one: one[0],
        "scorer": lambda one: one[1]["scorer"],
        "problems": lambda one: str(one[1]["problems"]),
        "cached - uncached, points": lambda one: format_points(one[1]["difference"]),
        "conditions: cached ahead, behind, equal": lambda one: ", ".join(map(str, one[1]["conditions"].values())),
        "p, exact sign-flip test over problems": lambda one: format_number(one[1]["p"]),
    }
    pooled = [(name, found) for name, scorers in study["accuracy"].items() for found in scorers.values() if found]
    return [make_table(columns, pooled, "Over conditions")] if pooled else []


def write_precisions(study: Study, names: Names) -> list[Block]:
    if not study["precisions"]:
        return []

    def show(entry: Mapping[str, Any]) -> str:
        return "-" if entry["orders"] is None else format_interval(entry["orders"], entry["interval"], "{:.2f}".format)

    orders = [f"orders of {name}" for name in ("KL", "JS", "max |diff|", "mean |diff|")]
    rows = [
        [names[pair["narrow"]], names[pair["wide"]], str(pair["problems"]), *map(show, pair["metrics"].values())]
        for pair in study["precisions"]
    ]
    text = (
        "log10 of the ratio of means, with intervals over problems. KL and JS are quadratic in the error of the "
        "logits, the differences linear. A dash: the arms do not differ at all in one of the two."
    )
    table = Table(["16-bit run", "fp32 run", "problems", *orders], rows, "Orders of ten between fp32 and 16 bits")
    return [Heading("FP32 against 16 bits", name="fp32"), Paragraph(text), table]
