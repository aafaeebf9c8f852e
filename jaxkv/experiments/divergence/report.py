"""What a run of 'divergence' is said to be and to have found, as blocks of a report. Needs its summary alone."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv import records
from jaxkv.experiments import law
from jaxkv.experiments.divergence import cause, wording
from jaxkv.experiments.divergence.summary import summarize
from jaxkv.experiments.divergence.wording import LABELS, describe_sampling
from jaxkv.experiments.figures import draw_divergence
from jaxkv.experiments.record_parts import find_headline
from jaxkv.experiments.report_parts import Report, Run, Summary, name_of
from jaxkv.reporting.document import Block, Bullets, Heading, Only, Paragraph, Table, make_table
from jaxkv.reporting.format import (
    format_cell,
    format_count,
    format_counted_share,
    format_expected,
    format_mean,
    format_number,
    format_percent,
    format_points,
    format_share,
)

ACCURACY_FLOOR = 0.05
TOO_FEW = (
    f"Not judged, since so few answers are right that {format_percent(ACCURACY_FLOOR)} % is not surpassed for sure"
)


def describe_setting(run: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says of a run, as a report shows it, from its config or else the last session that has it.

    `precision` is its name, None if it has none, `shown` what was run by name, `changes` how sessions differ from those
    before them.
    """

    def look_up(name: str) -> Any:
        if name in run["config"]:
            return run["config"][name]
        return next((s[name] for s in reversed(run["sessions"]) if name in s), None)

    model = look_up("model")
    found = {"model": model.get("name", model) if isinstance(model, Mapping) else model}
    found |= {name: look_up(name) for name in ("precision", "device", "data", "prompt")}
    sessions = [{k: v for k, v in s.items() if k not in records.OF_ONE_SESSION} for s in run["sessions"]]
    return {
        "precision": name_of(found["precision"]),
        "shown": {name: show_value(value) for name, value in found.items()},
        "changes": [records.describe_difference(a, b) for a, b in itertools.pairwise(sessions) if a != b],
    }


def show_value(value: Any) -> str:
    """A value of run.json in a line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {show_value(v)}" for k, v in records.flatten(value).items())
    if isinstance(value, list):
        return "[" + ", ".join(show_value(v) for v in value) + "]"
    return "none" if value is None else str(value)


def _range(pair: Sequence[int] | None) -> str:
    return "none" if pair is None else str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"


def _what_was_run(summary: Summary) -> list[Block]:
    shown, shapes = summary["setting"]["shown"], summary["shapes"]
    rows = [
        *([name, shown[name]] for name in ("model", "precision", "device")),
        *([f"{name} (shape)", _range(shapes[name])] for name in ("batch", "prefill", "slots", "left_pad")),
        ["uncached arm", ", ".join(shapes["uncached"]) or "none"],
        ["regime", ", ".join(shapes["regime"])],
        ["gate", wording.describe_gate(summary["gate"])],
        ["prompt tokens", _range(shapes["prompt_tokens"])],
        ["sampling", "; ".join(f"{describe_sampling(s)} ({s['samples']} samples)" for s in summary["sampling"])],
        *([name, shown[name]] for name in ("data", "prompt")),
        ["problems", "{ok} valid, {invalid} invalid".format(**summary["problems"])],
    ]
    return [Heading("What was run", 3), Table(["what", "value"], rows)]


# A row of the table of agreement: its name, and what it shows of a comparison.
AGREEMENT: dict[str, Callable[[Summary], str]] = {
    "sequences": lambda c: str(c["sequences"]),
    "tokens": lambda c: str(c["tokens"]),
    "argmax flips per token": lambda c: format_counted_share(c["flips"]),
    "sequences with a flip": lambda c: format_counted_share(c["sequences_with_flip"]),
    "bit-equal steps": lambda c: format_counted_share(c["bit_equal"]),
    "mean KL(uncached to cached), nats": lambda c: format_mean(c["kl"]),
    "largest KL, nats": lambda c: format_number(c["kl"]["max"]),
    "mean reverse KL, nats": lambda c: format_mean(c["kl_reverse"]),
    "mean JS, nats": lambda c: format_mean(c["js"]),
    "largest JS, nats": lambda c: format_number(c["js"]["max"]),
    "max abs logit difference, mean over steps": lambda c: format_mean(c["max_abs"]),
    "max abs logit difference, largest": lambda c: format_number(c["max_abs"]["max"]),
    "mean abs logit difference": lambda c: format_mean(c["mean_abs"]),
    "flips predicted by margins and shifts: linear, convolution": lambda c: _of_law(c, _say_predicted),
    "flips at a tie in one arm, in both; swaps by one unit; more": lambda c: _of_law(c, _say_kinds),
    "other tokens chosen under the same noise": lambda c: _of_law(c, lambda found: found["choice_flips"]),
    "exact ties (margin 0)": lambda c: str(c["ties"]["count"]),
    "flips at exact ties": lambda c: f"{c['ties']['flips']} of {c['flips']['count']}",
}


def _of_law(comparison: Summary, show: Callable[[Any], Any]) -> str:
    found = comparison["law"] and show(comparison["law"])
    return "not recorded" if found is None else str(found)


def _say_predicted(found: Summary) -> str:
    said = found["prediction"]
    return ", ".join(format_number(said[form] * said["steps"], 3) for form in ("linear", "convolution"))


def _say_kinds(found: Summary) -> str:
    return ", ".join(str(found["kinds"][kind]) for kind in law.KINDS)


def _agreement(summary: Summary) -> list[Block]:
    comparisons = wording.list_comparisons(summary)
    title = Heading("Cached against uncached, teacher-forced", 3)
    if not comparisons:
        return [title, Paragraph("No steps were compared.")]
    rows = [[name, *(show(comparison) for _, comparison in comparisons)] for name, show in AGREEMENT.items()]
    left = {True: "", False: " Not run here, so not ruled out."}
    ruled = [f"{LABELS[n]}: {why}.{left[bool(summary['controls'].get(n))]}" for n, why in wording.RULES_OUT.items()]
    table = Table(["", *(label for label, _ in comparisons)], rows)
    return [title, table, Paragraph("What each control rules out:"), Bullets(ruled)]


def _truth(summary: Summary) -> list[Block]:
    """Each arm's distance to float64, where it was run."""
    if (found := cause.read_distance(summary)) is None:
        why = Paragraph("A float64 run was left out, since it does not fit into memory.")
        return [Heading("Distance to float64", 3), why] if summary["truth_left_out"] else []
    rows = [
        ["median RMS logit error, cached", format_number(found.cached)],
        ["median RMS logit error, uncached", format_number(found.uncached)],
        ["cached over uncached, median over steps", format_number(found.ratio, 3)],
        ["steps at which the cached arm is the nearer", f"{found.nearer} of {found.steps}"],
        [f"steps at which one arm is over {cause.FACTOR:g} times as far", f"{found.beyond} of {found.steps}"],
    ]
    said = (
        "By rounding both arms are about equally far from a float64 run; with a fault in one of them they are not. "
        "Which one it is in, this does not say, and of other problems nothing."
    )
    if found.faulty:
        said = f"{cause.describe_distance(found)}. {said}"
    title = Heading(f"Distance to float64, {found.sequences} sequences", 3)
    return [title, Paragraph(said), Table(["", "along the cached arm's tokens"], rows)]


def _free(free: Mapping[str, Any] | None) -> list[Block]:
    if free is None:
        return []
    rows = [["sequences that diverge", format_counted_share(free["diverged"])]]
    if free["expected"]:
        rows.append(["expected from 1 - (1 - p)^n with independent flips", format_expected(free["expected"])])
        rows.append(["first divergence is the first teacher-forced flip", format_count(free["first_flip_agrees"])])
    if first := free["first_diverged"]:
        shown = [format_number(v, 3) for v in (first["min"], *first["quartiles"], first["max"])]
        rows.append(["first diverged token: min, quartiles, max", ", ".join(shown)])
        rows.append(["tokens that differ after it", format_counted_share(free["differing_after"])])
    return [Heading("Running free", 3), Table(["", wording.MAIN], rows)]


def is_above_floor(right: Mapping[str, Any]) -> bool:
    """Whether an arm is surely right more often than ACCURACY_FLOOR; else its answers say nothing about the arms."""
    return max(right[arm]["interval"][0] for arm in ("cached", "uncached")) > ACCURACY_FLOOR


Scored = tuple[str, Any]  # a scorer and its figures
ACCURACY: dict[str, Callable[[Scored], str]] = {
    "scorer": lambda scored: scored[0],
    "cached": lambda scored: format_counted_share(scored[1]["cached"]),
    "uncached": lambda scored: format_counted_share(scored[1]["uncached"]),
    "difference, points": lambda scored: format_points(scored[1]["difference"]),
    "only cached right": lambda scored: str(scored[1]["only_cached"]),
    "only uncached right": lambda scored: str(scored[1]["only_uncached"]),
    "McNemar p": lambda scored: format_number(scored[1]["mcnemar_p"]),
    "answer changed": lambda scored: str(scored[1]["label_changes"]["answer_changed"]),
    "extraction only": lambda scored: str(scored[1]["label_changes"]["extraction_only"]),
}


def _accuracy(summary: Summary) -> list[Block]:
    if not is_above_floor(summary["accuracy"][find_headline(summary["accuracy"])]):
        return []  # the page says so
    title = Heading("Accuracy, both arms on the same problems", 3)
    blocks: list[Block] = [title, make_table(ACCURACY, summary["accuracy"].items())]
    if instructions := summary.get("instruction_level"):
        columns = {name: ACCURACY[name] for name in ("scorer", "cached", "uncached")}
        blocks += [Paragraph("Of all instructions:"), make_table(columns, instructions.items())]
    return blocks


def _invalid(summary: Summary) -> list[Block]:
    text = "A non-finite number arose; these samples enter no figure of agreement or accuracy."
    names = ("reason", "arm", "value", "samples", "first_position", "problems")
    rows = [[show_value(group[name]) for name in names] for group in summary["invalid"]]
    heads = ["where it began", "arm", "value", "samples", "first position", "problems"]
    found: list[Block] = [Paragraph(text), Table(heads, rows)]
    if not summary["invalid"]:
        found = [Paragraph("No sample is invalid.")]
    if room := summary["headroom"]:
        where = room["op"] if room["layer"] is None else f"{room['op']}, layer {room['layer']}"
        text = f"Largest finite activation: {format_number(room['max_abs'], 3)} at {where} (problem {room['problem']}),"
        text += f" {format_percent(room['share_of_limit'])} % of its dtype's maximum {format_number(room['limit'], 3)}."
        found.append(Paragraph(text))
    return [Heading("Invalid samples and headroom", 3), *found]


def _caveats(summary: Summary) -> list[Block]:
    notes = [
        "Flips are predicted from the margins of the two best tokens and the shift of their gap"
        " (jaxkv/experiments/law.py).",
    ]
    if len(summary["sampling"]) > 1:
        notes.append("Samples of different sampling are pooled: see the sampling row.")
    if any(s["sampler"] != "greedy" for s in summary["sampling"]):
        notes.append("Sampled tokens can differ without an argmax flip, so no divergence is derived from flips.")
    if 0 < summary["problems"]["ok"] < 30:
        notes.append(f"Only {summary['problems']['ok']} valid problems: the intervals say how little that settles.")
    if changes := summary["setting"]["changes"]:
        notes.append(f"The sessions of this run differ (before = there, after = here): {'; '.join(changes)}.")
    return [Heading("Caveats", 3), Bullets(notes)]


def _write_page(summary: Summary) -> list[Block]:
    blocks = _what_was_run(summary)
    if summary["status"] == "ok":
        blocks += [*_agreement(summary), *_truth(summary), *_free(summary["free_running"]), *_accuracy(summary)]
    return [*blocks, *_invalid(summary), *_caveats(summary)]


def _write_short(summary: Summary) -> list[Block]:
    """What matters most, for a terminal of 80 columns."""
    problems = summary["problems"]
    sampling = "; ".join(describe_sampling(s) for s in summary["sampling"])
    lines = [f"{problems['ok']} of {problems['total']} problems valid; {sampling or 'no samples'}"]
    lines.append(f"gate {wording.describe_gate(summary['gate'])}")
    if missing := wording.describe_missing(summary):
        lines.append(missing)
    if problems["invalid"]:
        lines.append(f"INVALID, counted nowhere below: {wording.describe_invalid(summary)}")
    if summary["status"] != "ok":
        return list(map(Paragraph, [*lines, "no valid sample, so nothing is said about agreement"]))
    forced = []
    for label, c in wording.list_comparisons(summary):
        flips, texts = c["flips"], c["sequences_with_flip"]
        none = "upper_bound" in flips  # then its bound is that of the sequences
        cells = [
            format_count(flips) if none else format_share(flips),
            format_count(texts),
            format_number(c["kl"]["mean"]),
        ]
        if none:
            cells[1] += f", ≤ {format_percent(flips['upper_bound'])} %"
        forced.append([label, *cells, f"{format_percent(c['bit_equal']['rate'])} %"])
    said = []
    if (distance := cause.read_distance(summary)) is not None:
        said.append(f"distance to float64: {cause.describe_distance(distance)}")
    elif summary["truth_left_out"]:
        said.append("distance to float64: not run, since it does not fit into memory")
    if free := summary["free_running"]:
        said.append(f"free-running sequences that diverge: {wording.describe_divergence(free)}")
    scores = []
    for scorer, a in summary["accuracy"].items():
        changes = a["label_changes"]
        extraction = f" (+{changes['extraction_only']})" if changes["extraction_only"] else ""
        cells = [format_cell(a["cached"]), format_cell(a["uncached"]), format_points(a["difference"])]
        scores.append([scorer, *cells, format_number(a["mcnemar_p"]), f"{changes['answer_changed']}{extraction}"])
    return [
        *map(Paragraph, lines),
        Table(["teacher-forced", "argmax flips", "with flip", "mean KL", "bit-equal"], forced),
        *map(Paragraph, said),
        Table(["right, %", "cached", "uncached", "difference", "McNemar p", "labels"], scores),
        Paragraph(
            "with flip: sequences; ≤: 95 % upper bound. KL in nats. labels: changed answers (+ by extraction only)."
        ),
    ]


def write_divergence(summary: Summary) -> list[Block]:
    """All of `summarize` with `setting` from `describe_setting`; for a terminal what matters most."""
    return [Only("terminal", _write_short(summary)), Only("page", _write_page(summary))]


def _summarize(run: Run) -> Summary:
    return summarize(run.records, run.run) | {"setting": describe_setting(run.run)}


REPORT = Report("Cached against uncached decoding", _summarize, write_divergence, draw_divergence)
