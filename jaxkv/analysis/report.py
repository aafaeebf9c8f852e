"""A run's summary as report.md. The same summary and run give the same bytes."""

import itertools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv import records
from jaxkv.analysis import cause
from jaxkv.analysis.format import (
    format_choices,
    format_count,
    format_counted_share,
    format_expected,
    format_kinds,
    format_law,
    format_mean,
    format_number,
    format_percent,
    format_points,
)
from jaxkv.analysis.summary import summarize
from jaxkv.analysis.wording import (
    LABELS,
    MAIN,
    RULES_OUT,
    Summary,
    describe_gate,
    describe_invalid,
    describe_missing,
    describe_sampling,
    list_comparisons,
)
from jaxkv.experiments.record_parts import find_headline


def _lookup(run: Mapping[str, Any], name: str) -> Any:
    """A value from the config, else from the provenance of the last session that has it."""
    if name in run["config"]:
        return run["config"][name]
    return next((s[name] for s in reversed(run["sessions"]) if name in s), None)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_inline(v)}" for k, v in records.flatten(value).items())
    if isinstance(value, list):
        return "[" + ", ".join(_inline(v) for v in value) + "]"
    return "none" if value is None else str(value)


def _cellsafe(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(_cellsafe(cell) for cell in line) + " |" for line in lines] + [""]


def _range(pair: Sequence[int] | None) -> str:
    return "none" if pair is None else str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"


def _headline(summary: Summary, run: Mapping[str, Any]) -> str:
    """The answer in two sentences."""
    problems = summary["problems"]
    if summary["status"] == "empty":
        return "There is no sample yet. Run the command below to go on."
    if summary["status"] == "invalid":
        return (
            f"The run is invalid: a non-finite number arose in each of its {problems['total']} samples"
            f" ({describe_invalid(summary)}). It says nothing about agreement between cached and uncached decoding."
        )
    forced, free, controls = summary["teacher_forced"], summary["free_running"], summary["controls"]
    precision = _lookup(run, "precision")
    name = precision.get("name") if isinstance(precision, Mapping) else precision
    first = f"In {name}, " if name else ""
    if forced:
        first += (
            "the cached arm picks another top token than the uncached one at"
            f" {format_counted_share(forced['flips'], 'teacher-forced steps')}, and at least once in"
            f" {format_counted_share(forced['sequences_with_flip'], 'sequences')}"
        )
    else:
        first += "there are no teacher-forced steps to compare"
    if free:
        first += f"; running free, {format_counted_share(free['diverged'], 'sequences')} diverge"
    beside = [
        f"{format_counted_share(control['flips'], 'steps')} ({LABELS[name]})"
        for name, control in reversed(controls.items())
        if control is not None
    ]
    scorer = find_headline(summary["accuracy"])
    right, how = summary["accuracy"][scorer], "numeric value" if scorer == "numeric" else f"the {scorer} scorer"
    second = (
        f"{right['cached']['count']} (cached) and {right['uncached']['count']} (uncached) of {problems['ok']}"
        f" answers are right by {how} (difference {format_points(right['difference'])} points, McNemar"
        f" p = {format_number(right['mcnemar_p'])})"
    )
    if beside:
        second = f"An arm against itself flips at {', at '.join(beside)}, and {second}"
    if problems["invalid"]:
        second += f", with {problems['invalid']} of {problems['total']} samples invalid and left out"
    return f"{first}. {second}."


def _what_was_run(summary: Summary, run: Mapping[str, Any]) -> list[str]:
    precision = _lookup(run, "precision")
    model = _lookup(run, "model")
    shapes = summary["shapes"]
    rows = [
        ("model", _inline(model.get("name", model) if isinstance(model, Mapping) else model)),
        ("precision", _inline(precision)),
        ("device", _inline(_lookup(run, "device"))),
        *((f"{name} (shape)", _range(shapes[name])) for name in ("batch", "prefill", "slots", "left_pad")),
        ("uncached arm", ", ".join(shapes["uncached"]) or "none"),
        ("regime", ", ".join(shapes["regime"])),
        ("gate", describe_gate(summary["gate"])),
        ("prompt tokens", _range(shapes["prompt_tokens"])),
        ("sampling", "; ".join(f"{describe_sampling(s)} ({s['samples']} samples)" for s in summary["sampling"])),
        ("data", _inline(_lookup(run, "data"))),
        ("prompt", _inline(_lookup(run, "prompt"))),
        ("problems", "{ok} valid, {invalid} invalid".format(**summary["problems"])),
    ]
    return ["## What was run", "", *_rows(["what", "value"], rows)]


def _agreement(summary: Summary) -> list[str]:
    comparisons = list_comparisons(summary)

    def each(show: Any) -> list[str]:
        return [show(comparison) for _, comparison in comparisons]

    rows = [
        ["sequences", *each(lambda c: str(c["sequences"]))],
        ["tokens", *each(lambda c: str(c["tokens"]))],
        ["argmax flips per token", *each(lambda c: format_counted_share(c["flips"]))],
        ["sequences with a flip", *each(lambda c: format_counted_share(c["sequences_with_flip"]))],
        ["bit-equal steps", *each(lambda c: format_counted_share(c["bit_equal"]))],
        ["mean KL(uncached to cached), nats", *each(lambda c: format_mean(c["kl"]))],
        ["largest KL, nats", *each(lambda c: format_number(c["kl"]["max"]))],
        ["mean reverse KL, nats", *each(lambda c: format_mean(c["kl_reverse"]))],
        ["mean JS, nats", *each(lambda c: format_mean(c["js"]))],
        ["largest JS, nats", *each(lambda c: format_number(c["js"]["max"]))],
        ["max abs logit difference, mean over steps", *each(lambda c: format_mean(c["max_abs"]))],
        ["max abs logit difference, largest", *each(lambda c: format_number(c["max_abs"]["max"]))],
        ["mean abs logit difference", *each(lambda c: format_mean(c["mean_abs"]))],
        ["flips predicted by margins and shifts: linear, convolution", *each(format_law)],
        ["flips at a tie in one arm, in both; swaps by one unit; more", *each(format_kinds)],
        ["other tokens chosen under the same noise", *each(format_choices)],
        ["exact ties (margin 0)", *each(lambda c: str(c["ties"]["count"]))],
        ["flips at exact ties", *each(lambda c: f"{c['ties']['flips']} of {c['flips']['count']}")],
    ]
    lines = ["## Cached against uncached, teacher-forced", ""]
    if not comparisons:
        return [*lines, "No steps were compared.", ""]
    lines += _rows(["", *(label for label, _ in comparisons)], rows)
    lines += ["What each control rules out:", ""]
    for name, why in RULES_OUT.items():
        ran = "" if summary["controls"].get(name) else " **Not run here, so not ruled out.**"
        lines.append(f"- {LABELS[name]}: {why}.{ran}")
    lines.append("")
    ties = [(label, tie) for label, c in comparisons for tie in c["ties"]["listed"]]
    if ties:
        lines += ["Exact ties, where the lowest token id wins:", ""]
        flipped = {True: "flip", False: "no flip"}
        rows = [[label, str(t["problem"]), str(t["step"]), flipped[t["flip"]]] for label, t in ties]
        lines += _rows(["comparison", "problem", "step", "outcome"], rows)
    return lines


def _truth(summary: Summary) -> list[str]:
    """Each arm's distance to float64, where it was run."""
    if (found := cause.read_distance(summary)) is None:
        why = ["A float64 run was left out, since it does not fit into memory.", ""]
        return ["## Distance to float64", "", *why] if summary["truth_left_out"] else []
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
        said = f"**{cause.describe_distance(found)}.** {said}"
    title = f"## Distance to float64, {found.sequences} sequences"
    return [title, "", said, "", *_rows(["", "along the cached arm's tokens"], rows)]


def _free(free: Mapping[str, Any] | None) -> list[str]:
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
    return ["## Running free", "", *_rows(["", MAIN], rows)]


def _accuracy(summary: Summary) -> list[str]:
    header = ["scorer", "cached", "uncached", "difference, points", "only cached right", "only uncached right"]
    header += ["McNemar p", "answer changed", "extraction only"]
    rows = []
    for scorer, a in summary["accuracy"].items():
        changes = a["label_changes"]
        rows.append(
            [
                scorer,
                format_counted_share(a["cached"]),
                format_counted_share(a["uncached"]),
                format_points(a["difference"]),
                str(a["only_cached"]),
                str(a["only_uncached"]),
                format_number(a["mcnemar_p"]),
                str(changes["answer_changed"]),
                str(changes["extraction_only"]),
            ]
        )
    lines = ["## Accuracy, both arms on the same problems", "", *_rows(header, rows)]
    if instructions := summary.get("instruction_level"):
        followed = [
            [scorer, *(format_counted_share(arms[arm]) for arm in ("cached", "uncached"))]
            for scorer, arms in instructions.items()
        ]
        lines += ["Of all instructions:", "", *_rows(["scorer", "cached", "uncached"], followed)]
    return lines


def _invalid(summary: Summary) -> list[str]:
    lines = ["## Invalid samples and headroom", ""]
    if summary["invalid"]:
        rows = [
            [g["reason"], g["arm"], g["value"], str(g["samples"]), str(g["first_position"]), _inline(g["problems"])]
            for g in summary["invalid"]
        ]
        lines += ["A non-finite number arose; these samples enter no figure of agreement or accuracy.", ""]
        lines += _rows(["where it began", "arm", "value", "samples", "first position", "problems"], rows)
    else:
        lines += ["No sample is invalid.", ""]
    if room := summary["headroom"]:
        where = room["op"] if room["layer"] is None else f"{room['op']}, layer {room['layer']}"
        lines += [
            f"Largest finite activation: {format_number(room['max_abs'], 3)} at {where} (problem {room['problem']}),"
            f" {format_percent(room['share_of_limit'])} % of its dtype's maximum {format_number(room['limit'], 3)}.",
            "",
        ]
    return lines


def _provenance(run: Mapping[str, Any]) -> list[str]:
    lines = ["## Provenance", "", "Replay or finish the run, RUN being its directory:", "", "```"]
    lines += ["python -m jaxkv.launch --flagfile=RUN/run.flags", "python -m jaxkv.report RUN", "```", ""]
    lines += [f"Configuration fingerprint: `{run['fingerprint']}`.", ""]
    session = run["sessions"][-1] if run["sessions"] else {}
    rows = [[name, _inline(value)] for name, value in sorted(records.flatten(session).items())]
    lines += [f"Last of {len(run['sessions'])} session(s):", "", *_rows(["what", "value"], rows)]
    lines += ["Configuration:", ""]
    lines += _rows(["key", "value"], [[k, _inline(v)] for k, v in sorted(records.flatten(run["config"]).items())])
    return lines


def _caveats(summary: Summary, run: Mapping[str, Any]) -> list[str]:
    notes = [
        "Intervals are 95 %. Those of per-token figures have the sequence as their unit, since its tokens are not"
        " independent; the bound of a zero is of the share of sequences.",
        "Flips per token, sequences with a flip and sequences that diverge are three rates: a sequence of n tokens"
        " diverges with probability 1 - (1 - p)^n.",
        "The uncached arm is defined by its shape; figures hold for the shapes, device and versions named here.",
        "Flips are predicted from the margins of the two best tokens and the shift of their gap"
        " (jaxkv/analysis/law.py).",
    ]
    if len(summary["sampling"]) > 1:
        notes.append("Samples of different sampling are pooled: see the sampling row.")
    if any(s["sampler"] != "greedy" for s in summary["sampling"]):
        notes.append("Sampled tokens can differ without an argmax flip, so no divergence is derived from flips.")
    if 0 < summary["problems"]["ok"] < 30:
        notes.append(f"Only {summary['problems']['ok']} valid problems: the intervals say how little that settles.")
    sessions = [{k: v for k, v in s.items() if k not in records.OF_ONE_SESSION} for s in run["sessions"]]
    if changes := [records.describe_difference(a, b) for a, b in itertools.pairwise(sessions) if a != b]:
        notes.append(f"The sessions of this run differ (before = there, after = here): {'; '.join(changes)}.")
    return ["## Caveats", "", *(f"- {note}" for note in notes), ""]


def render_markdown(summary: Summary, run: Mapping[str, Any]) -> str:
    """Renders report.md.

    Args:
      summary: from `summarize`.
      run: content of run.json. Shown by name, from the config or else the provenance: `model`, `precision` (a name or
        the dtype of each part), `device`, `data` and `prompt`; all the rest is listed under provenance.
    """
    lines = ["# Cached against uncached decoding", "", _headline(summary, run), ""]
    if missing := describe_missing(summary):
        lines += [f"**{missing}.**", ""]
    lines += _what_was_run(summary, run)
    if summary["status"] == "ok":
        lines += [*_agreement(summary), *_truth(summary), *_free(summary["free_running"]), *_accuracy(summary)]
    lines += [*_invalid(summary), *_caveats(summary, run), *_provenance(run)]
    return "\n".join(lines).rstrip() + "\n"


def write_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes summary.json and report.md of a run directory from its records alone.

    Returns:
      The summary.

    Raises:
      UserError: not a run directory, corrupt records, or not writable.
    """
    directory = pathlib.Path(path)
    run, samples = records.read_run(directory)
    summary = summarize(samples, run)
    write_summary(directory, summary)
    records.write_atomically(directory / "report.md", render_markdown(summary, run))
    return summary


def write_summary(directory: pathlib.Path, summary: Summary) -> None:
    """Writes summary.json. Raises UserError if the directory cannot be written."""
    text = json.dumps(records.to_plain(summary), allow_nan=False, indent=2) + "\n"
    records.write_atomically(directory / "summary.json", text)
