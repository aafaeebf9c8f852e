"""A study's report from its summary: what is said in which order. The same summary gives the same bytes."""

import itertools
import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Group

from jaxkv import records
from jaxkv.experiments.divergence.cause import FACTOR, HUGE, STRAY
from jaxkv.experiments.divergence.report import show_value
from jaxkv.experiments.divergence.wording import LABELS, describe_gate
from jaxkv.experiments.figures import draw_divergence
from jaxkv.experiments.record_parts import find_headline
from jaxkv.experiments.report_parts import Run
from jaxkv.experiments.reports import REPORTS
from jaxkv.overview.examples import count_parted, show_examples
from jaxkv.overview.first_screen import Status, describe_conditions
from jaxkv.overview.forest import draw_forest
from jaxkv.overview.gather import drop_copies, read_runs
from jaxkv.overview.joining import join_parts
from jaxkv.overview.page_changes import METHOD as CHANGES_METHOD
from jaxkv.overview.page_changes import SECTIONS, changes_alone
from jaxkv.overview.papers import keep_claims, write_claims
from jaxkv.overview.parity import write_free_parity
from jaxkv.overview.policy import name_conditions
from jaxkv.overview.study import summarize_study
from jaxkv.reporting.document import (
    Block,
    Bullets,
    Code,
    Fold,
    Heading,
    Only,
    Paragraph,
    Table,
    to_markdown,
    to_terminal,
)
from jaxkv.reporting.format import (
    format_count,
    format_counted_share,
    format_mean,
    format_number,
    format_percent,
    format_points,
    format_share,
)
from jaxkv.reporting.html import to_html

Study = Mapping[str, Any]
TITLE = "Cached against uncached decoding"
CHANGES_TITLE = "Changed caches"
FILES = ("report.html", "report.md", "summary.json")
ACCURACY_FLOOR = 0.05  # a model right less often answers by chance, and says nothing about its arms
TIES_SHOWN = 20
COMMANDS_SHOWN = 60
METHOD = (
    "cached: a prefill of the prompt, then one row a step. uncached: the whole prefix at every step. The uncached arm "
    "first follows the cached arm's tokens (teacher-forced: figures per token), then runs freely.",
    "flip: the two arms' top tokens differ at a step, the lowest id winning an exact tie. A sequence of n tokens "
    "diverges with probability 1 - (1 - p)^n at p flips per token, so flips and diverging sequences are two rates.",
    "KL is KL(uncached to cached) in nats, taken in float64.",
    "Intervals are 95 %, and sequences or problems are their unit; over conditions problems are, since conditions "
    "share them. Shares have Clopper & Pearson's, of as many tokens as the sequences are worth (Korn & Graubard 1998) "
    "and never more than there are; means Student's t on the log; differences of accuracy that of Bonett & Price "
    "(2012). How often each holds the truth was simulated (analysis/coverage.md).",
    "A count of zero stands with its one-sided 95 % bound, 1 - 0.05^(1/n): the share of sequences, problems or runs, "
    "of which there are n, that may still have one. Their steps are not taken as independent.",
    "McNemar's test is exact. Over conditions, which share problems, the exact sign-flip test over problems stands in "
    "its place: a problem's lead is added up over its conditions, and its sign is a fair coin.",
    "A sample in which a number was not finite is invalid and enters no figure: the argmax of NaN is no agreement.",
    "A verdict speaks of these models, prompts, devices and versions; each is reached by the rule under the claims.",
)


def _valid(study: Study) -> list[Mapping[str, Any]]:
    return [c for c in study["conditions"] if c.get("divergence") and c["divergence"]["status"] == "ok"]


def name_all(study: Study) -> dict[str, str]:
    """What each run is called, by its directory."""
    sides = [[c for c in study["conditions"] if bool(c.get("divergence")) == compared] for compared in (True, False)]
    return {c["name"]: name for side in sides for c, name in zip(side, name_conditions(side), strict=True)}


def write_conditions(study: Study, names: Mapping[str, str]) -> list[Block]:
    """One row a run with divergence records, and why runs are invalid."""
    head = ["run", "valid", "argmax flips per token", "sequences that diverge", "mean KL, nats", "bit-equal steps"]
    rows, notes = [], []
    for condition in study["conditions"]:
        found = condition.get("divergence")
        if not found:
            continue
        name, problems = names[condition["name"]], found["problems"]
        valid = f"{problems['ok']} of {problems['total']}"
        if problems["total"] < problems["asked"]:
            valid += f" (UNFINISHED, {problems['asked']} asked)"
        for group in found["invalid"]:
            notes.append(
                f"{name}: {group['samples']} samples invalid at {group['reason']} ({group['arm']}, "
                f"{group['value']}, from position {group['first_position']}); counted nowhere."
            )
        if found["status"] != "ok":
            rows.append([name, valid, *["none counted"] * 4, condition["name"]])
            continue
        forced, free = found["teacher_forced"], found["free_running"]
        cells = [
            format_counted_share(forced and forced["flips"]),
            format_counted_share(free and free["diverged"]),
            format_mean(forced["kl"]) if forced else "-",
            format_share(forced and forced["bit_equal"]),
        ]
        rows.append([name, valid, *cells, condition["name"]])
    blocks: list[Block] = [Heading("Divergence", name="divergence")] if rows else []
    if rows:
        blocks.append(Table([*head, "directory"], rows, "Every run"))
    if notes:
        blocks.append(Bullets(notes))
    return blocks + _write_causes(study)


def _write_causes(study: Study) -> list[Block]:
    """Rounding or a fault, for each model and precision."""
    rows = [
        [
            cause["name"],
            *(format_counted_share(cause[regime]) for regime in ("plain", "aligned")),
            "not run" if cause["distance"] is None else format_number(cause["distance"], 3),
            cause["verdict"],
        ]
        for cause in study["causes"]
    ]
    if not rows:
        return []
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
    head = ["model and precision", "plain", "aligned", "farther arm", "verdict"]
    return [Heading("Rounding or a fault", 3), Paragraph(text), Table(head, rows)]


def write_controls(study: Study, names: Mapping[str, str]) -> list[Block]:
    """Each arm against itself and the gate, as a matrix of bit-equal or not, and their figures behind a line."""
    rows, figures = [], []
    for condition in _valid(study):
        name, found = names[condition["name"]], condition["divergence"]
        controls = [found["controls"][control] for control in LABELS]
        rows.append([name, _say_gate(found["gate"]), *map(_say_bits, controls)])
        cells = [
            f"{format_counted_share(c['flips'])} flips; KL {format_number(c['kl']['mean'])}" if c else "not run"
            for c in controls
        ]
        figures.append([name, *cells, describe_gate(found["gate"])])
    if not rows:
        return []
    head = ["run", *LABELS.values()]
    return [
        Heading("Controls", name="controls"),
        Paragraph(
            "Both arms through one program with the cache on: the gate. The others are an arm against itself; where "
            "another padded length differs too, a shape alone suffices."
        ),
        Table(["run", "both arms, one program", *LABELS.values()], rows, "Controls, bit by bit", kind="matrix"),
        Fold("Flips and KL of each control, and what the gate found", [Table([*head, "gate"], figures, kind="wrap")]),
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


def write_ties(study: Study, names: Mapping[str, str]) -> list[Block]:
    """Exact ties, where the lowest id wins."""
    rows, listed, without = [], [], []
    for condition in _valid(study):
        found = condition["divergence"]["teacher_forced"]
        if not found:
            continue
        ties = found["ties"]
        if not ties["count"]:
            without.append(found["tokens"])
            continue
        steps = f"{ties['count']} of {found['tokens']}"
        name = names[condition["name"]]
        rows.append([name, steps, f"{ties['flips']} of {found['flips']['count']}"])
        listed += [
            [name, str(tie["problem"]), str(tie["step"]), "flip" if tie["flip"] else "no flip"]
            for tie in ties["listed"]
        ]
    if not rows and not without:
        return []
    text = "Two best logits that are equal have margin 0; the lowest token id wins in both arms."
    if without:
        text += f" In {len(without)} of {len(without) + len(rows)} runs none of {sum(without)} steps is a tie."
    blocks: list[Block] = [Heading("Exact ties", 3), Paragraph(text)]
    if listed:
        shown = Table(["run", "problem", "step", "outcome"], listed[:TIES_SHOWN])
        count = f"the first {TIES_SHOWN} of {len(listed)}" if len(listed) > TIES_SHOWN else f"all {len(listed)}"
        blocks.append(Table(["run", "steps at an exact tie", "of the flips, at one"], rows))
        blocks.append(Fold(f"Ties listed ({count})", [shown]))
    return blocks


def write_accuracy(study: Study, names: Mapping[str, str]) -> list[Block]:
    """Accuracy of both arms where there are answers and the model is above the floor; and over conditions."""
    rows, below = [], []
    for condition in _valid(study):
        accuracy = condition["divergence"]["accuracy"]
        right = accuracy[find_headline(accuracy)]
        name = names[condition["name"]]
        if max(right[arm]["interval"][0] for arm in ("cached", "uncached")) <= ACCURACY_FLOOR:
            below.append(f"{name} ({right['cached']['count']} of {right['cached']['total']})")
            continue
        counts = [format_count(right[arm]) for arm in ("cached", "uncached")]
        changed = str(right["label_changes"]["answer_changed"])
        rows.append([name, *counts, format_points(right["difference"]), format_number(right["mcnemar_p"]), changed])
    head = ["run", "right: cached", "uncached", "difference, points", "McNemar p", "labels that change"]
    blocks: list[Block] = [Table(head, rows, "Right answers, both arms on the same problems")] if rows else []
    if rows and (pooled := _list_pooled(study)):
        columns = [
            "precision",
            "scorer",
            "problems",
            "cached - uncached, points",
            "conditions: cached ahead, behind, equal",
        ]
        blocks.append(Table([*columns, "p, exact sign-flip test over problems"], pooled, "Over conditions"))
    if below:
        floor = f"{format_percent(ACCURACY_FLOOR)} %"
        shown = below if len(below) <= 4 else [*below[:4], f"{len(below) - 4} more"]
        text = f"Not judged, since so few answers are right that {floor} is not surpassed for sure: {'; '.join(shown)}."
        blocks.append(Paragraph(text, "note"))
    return [Heading("Accuracy", name="accuracy"), *blocks] if blocks else []


def _list_pooled(study: Study) -> list[list[str]]:
    rows = []
    for precision, scorers in study["accuracy"].items():
        for scorer, pooled in scorers.items():
            if pooled is None:
                continue
            found, points = pooled["conditions"], pooled["difference"]
            shown = format_points(points) if points["interval"] else f"{100 * points['mean']:+.1f}"
            ahead = f"{found['cached_ahead']}, {found['uncached_ahead']}, {found['equal']}"
            rows.append([precision, scorer, str(pooled["problems"]), shown, ahead, format_number(pooled["p"])])
    return rows


def write_precisions(study: Study, names: Mapping[str, str]) -> list[Block]:
    """FP32 against 16 bits."""
    head = [
        "16-bit run",
        "fp32 run",
        "problems",
        *(f"orders of {n}" for n in ("KL", "JS", "max |diff|", "mean |diff|")),
    ]
    rows = []
    for pair in study["precisions"]:
        cells = []
        for entry in pair["metrics"].values():
            text = "-" if entry["orders"] is None else f"{entry['orders']:.2f}"
            low, high = entry["interval"] or (None, None)
            cells.append(text if low is None else f"{text} [{low:.2f}, {high:.2f}]")
        rows.append([names[pair["narrow"]], names[pair["wide"]], str(pair["problems"]), *cells])
    if not rows:
        return []
    text = (
        "log10 of the ratio of means, with intervals over problems. KL and JS are quadratic in the error of the "
        "logits, the differences linear. A dash: the arms do not differ at all in one of the two."
    )
    table = Table(head, rows, "Orders of ten between fp32 and 16 bits")
    return [Heading("FP32 against 16 bits", name="fp32"), Paragraph(text), table]


def write_section(study: Study, name: str, before: Sequence[Block] = ()) -> list[Block]:
    """Figures of an experiment, what is said over all runs, and run by run; nothing where there is none of it."""
    experiment = REPORTS[name]
    blocks: list[Block] = [*experiment.draw(study), *before]
    for condition in study["conditions"]:
        if condition.get(name):
            blocks += [Heading(condition["name"], 3), *experiment.write(condition[name])]
    return [Heading(experiment.title, name=name), *blocks] if blocks else []


def _shorten(revision: str) -> str:
    return revision[:12] + ("-dirty" if revision.endswith("-dirty") else "")


def write_provenance(study: Study) -> list[Block]:
    """Commands, versions, hashes."""
    commands = list(dict.fromkeys(command for c in study["conditions"] for command in c["origin"]["commands"]))
    blocks: list[Block] = [Heading("Provenance and commands", name="provenance")]
    if len(commands) > COMMANDS_SHOWN:
        blocks.append(Fold(f"The {len(commands)} commands that made the runs", [Code("\n".join(commands))]))
    elif commands:
        blocks += [Paragraph("Each run was made by:"), Code("\n".join(commands))]
    blocks += [Paragraph("This report was made of their directories by:"), Code("python -m jaxkv.report RUN...")]
    rows = []
    for condition in study["conditions"]:
        origin = condition["origin"]
        device = origin["device"]
        kind = ", ".join(map(str, device.values())) if isinstance(device, Mapping) else str(device)
        versions = ", ".join(f"{n} {v}" for n, v in origin["versions"].items() if v)
        hashes = [f"{name} `{digest[:16]}`" for name, digest in (origin["checkpoint"].get("files") or {}).items()]
        data = origin["data"] if isinstance(origin["data"], Mapping) else {}
        hashes += [f"{part} `{found['sha256'][:16]}`" for part, found in data.items() if found.get("sha256")]
        rows.append(
            [
                condition["name"] + (f" ({len(origin['parts'])} parts)" if origin["parts"] else ""),
                ", ".join(origin["dates"]) or "-",
                ", ".join(map(_shorten, origin["revisions"])) or "-",
                kind,
                versions,
                "; ".join(hashes) or "-",
                f"`{(origin['fingerprint'] or '-')[:16]}`",
            ]
        )
    head = ["run", "date (UTC)", "revision", "device", "versions", "SHA-256 of files, begun", "fingerprint"]
    blocks.append(Fold("Dates, devices, versions, hashes of each run", [Table(head, rows, kind="wrap")]))
    return blocks


def _write_missing(study: Study) -> list[Block]:
    odd = [f"{c['name']}: {', '.join(c['not_reported'])}" for c in study["conditions"] if c.get("not_reported")]
    lines = [f"Records this report has no section for: {'; '.join(odd)}."] if odd else []
    lines += [f"Not joined: {note}." for note in study.get("apart", ())]
    lines += [f"{note}." for note in study.get("copies", ())]
    return [Paragraph(line, "note") for line in lines]


def write_examples(runs: Sequence[Run], names: Mapping[str, str]) -> list[Block]:
    """Texts that part, side by side."""
    if (examples := show_examples(runs, names)) is None:
        return []
    total = count_parted(runs)
    shown = f"{len(examples.items)} of the {total}" if total > len(examples.items) else "All"
    text = f"{shown} texts that part, from a little before the token at which they do."
    if not examples.key:
        text += " The runs have no tokens.json, so that the decoded texts alone are shown."
    return [Heading("Where texts part", name="examples"), Paragraph(text), examples]


def _write_forest(study: Study) -> list[Block]:
    drawn = draw_forest(study) if len(_valid(study)) > 1 else []
    return [Heading("All runs at a glance", name="overview"), *drawn] if drawn else []


def _write_run(study: Study, runs: Sequence[Run]) -> list[Block]:
    """Of a single run, everything: what was run, its sessions and its configuration."""
    if len(runs) != 1:
        return []
    (run,), (condition,) = runs, study["conditions"]
    blocks = REPORTS["divergence"].write(condition["divergence"]) if condition.get("divergence") else []
    session = run.run["sessions"][-1] if run.run["sessions"] else {}
    tables = [
        Table(
            ["key", "value"],
            [[name, show_value(value)] for name, value in sorted(records.flatten(values).items())],
            title,
            "wrap",
        )
        for title, values in (
            (f"Last of {len(run.run['sessions'])} session(s)", session),
            ("Configuration", run.run["config"]),
        )
    ]
    whole = Only("page", [Heading("The run in full", name="run")])
    return [whole, *blocks, Only("page", [Fold("Session and configuration", tables)])]


def write_blocks(study: Study, runs: Sequence[Run], asked: Collection[str] = ()) -> list[Block]:
    """The report of one run or several, in order.

    Args:
      study: of `summarize_study`.
      runs: that it was made of, with their records.
      asked: papers whose claims are judged (jaxkv.overview.papers).
    """
    names = name_all(study)
    drawn = draw_divergence(study)
    first = describe_conditions(study["conditions"], study["causes"], runs)
    parts: list[Sequence[Block]] = [
        first.to_blocks() if first.status is not Status.NOTHING or not changes_alone(study) else [],
        _write_missing(study),
        write_examples(runs, names),
        _write_forest(study),
        [Heading("How far the arms are apart", name="figures"), *drawn] if drawn else [],
        write_controls(study, names),
        write_conditions(study, names),
        write_ties(study, names),
        write_precisions(study, names),
        write_accuracy(study, names),
        *(write_section(study, name) for name in ("mitigations", "drift", "patching")),
        write_section(study, "parity", write_free_parity(study)),
        *(write_section(study, name) for name in ("attribution", *SECTIONS, "doctor")),
        write_claims(study, asked),
        _write_run(study, runs),
        [Heading("Method", name="method"), Bullets(CHANGES_METHOD if changes_alone(study) else METHOD)],
        write_provenance(study),
    ]
    return keep_claims(list(itertools.chain.from_iterable(parts)), asked)


def title_of(study: Study) -> str:
    """What the page is called."""
    conditions = study["conditions"]
    if len(conditions) == 1 and not changes_alone(study):
        named = [conditions[0][name] for name in ("model", "precision", "device")]
        return ", ".join(str(name) for name in named if name) or "Report"
    return CHANGES_TITLE if changes_alone(study) else TITLE


def write_study(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], asked: Collection[str] = ()
) -> Study:
    """Writes report.html, report.md and summary.json of one run or several into a directory, from their records alone.

    Parts of one run, which differ in their changes of the cache, are joined first (jaxkv.overview.joining).

    Args:
      paths: run directories, or directories that hold them.
      out: where the files go.
      asked: papers whose claims are judged.

    Returns:
      The summary.

    Raises:
      UserError: no runs, corrupt records, or not writable.
    """
    once, copies = drop_copies(read_runs(paths))
    runs, apart = join_parts(once)
    study = summarize_study(runs) | {"apart": apart, "copies": copies}
    _write_files(pathlib.Path(out), study, study, write_blocks(study, runs, asked))
    return study


def _write_files(out: pathlib.Path, study: Study, summary: Study, blocks: Sequence[Block]) -> None:
    text = json.dumps(records.to_plain(summary), allow_nan=False, separators=(",", ":")) + "\n"
    title = title_of(study)
    for name, content in zip(FILES, (to_html(title, blocks), to_markdown(title, blocks), text), strict=True):
        records.write_atomically(out / name, content)


def report_run(path: str | os.PathLike[str], asked: Collection[str] = ()) -> Group:
    """Writes the report of every experiment that a run directory has records of; of divergence if it has none yet.

    Returns:
      What a terminal shows of it.

    Raises:
      UserError: not a run directory, corrupt records, or not writable.
    """
    runs = read_runs([path])
    study = summarize_study(runs)
    (summary,) = study["conditions"]
    _write_files(pathlib.Path(path), study, summary, write_blocks(study, runs, asked))
    names = [name for name in REPORTS if name in summary]
    shown: list[Block] = []
    for name in names:
        title = Heading(REPORTS[name].title)
        shown += [*([title] if len(names) > 1 else []), *REPORTS[name].write(summary[name])]
    return to_terminal(keep_claims(shown, asked))
