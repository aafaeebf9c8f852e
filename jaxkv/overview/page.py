"""A study's report from its summary: what is said in which order. The same summary gives the same bytes."""

import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.experiments.divergence.cause import FACTOR, HUGE, STRAY
from jaxkv.experiments.divergence.wording import LABELS, describe_gate
from jaxkv.experiments.figures import draw_divergence
from jaxkv.experiments.record_parts import find_headline
from jaxkv.experiments.reports import REPORTS
from jaxkv.overview.gather import drop_copies, read_runs
from jaxkv.overview.joining import join_parts
from jaxkv.overview.page_changes import METHOD as CHANGES_METHOD
from jaxkv.overview.page_changes import SECTIONS, changes_alone, write_statements
from jaxkv.overview.parity import write_free_parity
from jaxkv.overview.reports import write_files
from jaxkv.overview.study import summarize_study
from jaxkv.reporting.document import (
    Block,
    Bullets,
    Code,
    Fold,
    Heading,
    Paragraph,
    Table,
)
from jaxkv.reporting.format import (
    format_count,
    format_counted_share,
    format_mean,
    format_number,
    format_points,
    format_share,
)
from jaxkv.reporting.rules import say_family, write_rules

Study = Mapping[str, Any]
TITLE = "Cached against uncached decoding: the claims, tested"
CHANGES_TITLE = "Changed caches: the statements, tested"
PAPER = "arXiv 2604.15409"
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


def write_claims(study: Study) -> list[Block]:
    """The claims table; nothing where no run can speak to a claim."""
    if changes_alone(study):
        return []
    rows = [
        [f"{claim['id']}: {claim['claim']}", claim["verdict"], tuple(claim["figure"]), tuple(claim["control"])]
        for claim in study["claims"]
    ]
    text = f"Claims of {PAPER}, on the models and devices of the {len(study['conditions'])} runs below."
    return [
        Paragraph(f"{text} {say_family(study['claims'])}", "note"),
        Table(["claim", "verdict", "figure", "control"], rows, kind="claims"),
        *write_rules([claim["id"] for claim in study["claims"]]),
    ]


def _valid(study: Study) -> list[Mapping[str, Any]]:
    return [c for c in study["conditions"] if c.get("divergence") and c["divergence"]["status"] == "ok"]


def write_conditions(study: Study) -> list[Block]:
    """One row a run with divergence records, and why runs are invalid."""
    head = ["run", "valid", "argmax flips per token", "sequences that diverge", "mean KL, nats", "bit-equal steps"]
    head += ["right: cached", "uncached", "difference, points", "McNemar p"]
    rows, notes = [], []
    for condition in study["conditions"]:
        found = condition.get("divergence")
        if not found:
            continue
        problems = found["problems"]
        valid = f"{problems['ok']} of {problems['total']}"
        if problems["total"] < problems["asked"]:
            valid += f" (UNFINISHED, {problems['asked']} asked)"
        for group in found["invalid"]:
            notes.append(
                f"{condition['name']}: {group['samples']} samples invalid at {group['reason']} ({group['arm']}, "
                f"{group['value']}, from position {group['first_position']}); counted nowhere."
            )
        if found["status"] != "ok":
            rows.append([condition["name"], valid, *["none counted"] * 8])
            continue
        forced, free, accuracy = found["teacher_forced"], found["free_running"], found["accuracy"]
        right = accuracy[find_headline(accuracy)]
        rows.append(
            [
                condition["name"],
                valid,
                format_counted_share(forced and forced["flips"]),
                format_counted_share(free and free["diverged"]),
                format_mean(forced["kl"]) if forced else "-",
                format_share(forced and forced["bit_equal"]),
                format_count(right["cached"]),
                format_count(right["uncached"]),
                format_points(right["difference"]),
                format_number(right["mcnemar_p"]),
            ]
        )
    blocks: list[Block] = [Heading("Divergence", name="divergence")] if rows else []
    if rows:
        blocks.append(Table(head, rows))
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


def write_controls(study: Study) -> list[Block]:
    """Each arm against itself, and the gate."""
    names = list(LABELS)
    rows = []
    for condition in _valid(study):
        controls = condition["divergence"]["controls"]
        cells = [
            f"{format_counted_share(c['flips'])} flips; KL {format_number(c['kl']['mean'])}" if c else "not run"
            for c in (controls[name] for name in names)
        ]
        rows.append([condition["name"], *cells, describe_gate(condition["divergence"]["gate"])])
    if not rows:
        return []
    return [
        Heading("Controls", name="controls"),
        Paragraph("Each is an arm against itself. Where another padded length differs too, a shape alone suffices."),
        Table(["run", *(LABELS[name] for name in names), "gate"], rows),
    ]


def write_ties(study: Study) -> list[Block]:
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
        rows.append([condition["name"], steps, f"{ties['flips']} of {found['flips']['count']}"])
        listed += [
            [condition["name"], str(tie["problem"]), str(tie["step"]), "flip" if tie["flip"] else "no flip"]
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


def write_accuracy(study: Study) -> list[Block]:
    """Paired accuracy over conditions."""
    rows = []
    for precision, scorers in study["accuracy"].items():
        for scorer, pooled in scorers.items():
            if pooled is None:
                continue
            found, points = pooled["conditions"], pooled["difference"]
            shown = format_points(points) if points["interval"] else f"{100 * points['mean']:+.1f}"
            ahead = f"{found['cached_ahead']}, {found['uncached_ahead']}, {found['equal']}"
            rows.append([precision, scorer, str(pooled["problems"]), shown, ahead, format_number(pooled["p"])])
    if not rows:
        return []
    head = ["precision", "scorer", "problems", "cached - uncached, points", "conditions: cached ahead, behind, equal"]
    return [
        Heading("Accuracy over conditions", name="accuracy"),
        Table([*head, "p, exact sign-flip test over problems"], rows),
    ]


def write_precisions(study: Study) -> list[Block]:
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
        rows.append([pair["narrow"], pair["wide"], str(pair["problems"]), *cells])
    if not rows:
        return []
    text = (
        "log10 of the ratio of means, with intervals over problems. KL and JS are quadratic in the error of the "
        "logits, the differences linear. A dash: the arms do not differ at all in one of the two."
    )
    return [Heading("FP32 against 16 bits", name="fp32"), Paragraph(text), Table(head, rows)]


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


def write_blocks(study: Study) -> list[Block]:
    """The whole report in order."""
    drawn = draw_divergence(study)
    parts: list[list[Block]] = [
        write_claims(study),
        write_statements(study),
        _write_missing(study),
        [Heading("Where the arms part", name="figures"), *drawn] if drawn else [],
        write_conditions(study),
        write_ties(study),
        write_controls(study),
        write_precisions(study),
        write_accuracy(study),
        write_section(study, "mitigations"),
        write_section(study, "drift"),
        write_section(study, "patching"),
        write_section(study, "parity", write_free_parity(study)),
        *(write_section(study, name) for name in ("attribution", *SECTIONS, "doctor")),
        [Heading("Method", name="method"), Bullets(CHANGES_METHOD if changes_alone(study) else METHOD)],
        write_provenance(study),
    ]
    return list(itertools.chain.from_iterable(parts))


def write_study(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> dict[str, Any]:
    """Writes report.html, report.md and summary.json of several runs into a directory, from their records alone.

    Parts of one run, which differ in their changes of the cache, are joined first (jaxkv.overview.joining).

    Returns:
      The summary.

    Raises:
      UserError: no runs, corrupt records, or not writable.
    """
    once, copies = drop_copies(read_runs(paths))
    runs, apart = join_parts(once)
    study = summarize_study(runs) | {"apart": apart, "copies": copies}
    blocks = write_blocks(study)
    title = CHANGES_TITLE if changes_alone(study) else TITLE
    write_files(pathlib.Path(out), title, blocks, study)
    return study
