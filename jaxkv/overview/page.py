"""A study's report from its summary: what is said in which order. The same summary gives the same bytes."""

import itertools
import json
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rich.console import Group

from jaxkv import records
from jaxkv.experiments.divergence.cause import FACTOR, HUGE, STRAY
from jaxkv.experiments.divergence.report import TOO_FEW, is_above_floor, show_value
from jaxkv.experiments.divergence.wording import LABELS, describe_gate
from jaxkv.experiments.figures import draw_divergence
from jaxkv.experiments.record_parts import find_headline
from jaxkv.experiments.report_parts import Run
from jaxkv.experiments.reports import REPORTS
from jaxkv.overview.examples import count_parted, show_examples
from jaxkv.overview.first_screen import describe_conditions
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
    make_table,
    to_markdown,
    to_terminal,
)
from jaxkv.reporting.format import (
    format_count,
    format_counted_share,
    format_mean,
    format_number,
    format_points,
    format_share,
)
from jaxkv.reporting.html import to_html

Study = Mapping[str, Any]
Condition = Mapping[str, Any]
Names = Mapping[str, str]  # what each run is called, by its directory
TITLE = "Cached against uncached decoding"
CHANGES_TITLE = "Changed caches"
FILES = ("report.html", "report.md", "summary.json")
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


def name_all(study: Study) -> Names:
    """What each run is called, by its directory."""
    sides = [[c for c in study["conditions"] if bool(c.get("divergence")) == compared] for compared in (True, False)]
    return {c["name"]: name for side in sides for c, name in zip(side, name_conditions(side), strict=True)}


def write_conditions(study: Study, names: Names) -> list[Block]:
    """One row a run with divergence records, and why runs are invalid."""
    kept = [c for c in study["conditions"] if c.get("divergence")]
    if not kept:
        return []

    def shown(take: Callable[[Mapping[str, Any]], str]) -> Callable[[Condition], str]:
        return lambda c: take(c["divergence"]) if c["divergence"]["status"] == "ok" else "none counted"

    columns: dict[str, Callable[[Condition], str]] = {
        "run": lambda c: names[c["name"]],
        "valid": lambda c: _say_valid(c["divergence"]["problems"]),
        "argmax flips per token": shown(
            lambda d: format_counted_share(d["teacher_forced"] and d["teacher_forced"]["flips"])
        ),
        "sequences that diverge": shown(
            lambda d: format_counted_share(d["free_running"] and d["free_running"]["diverged"])
        ),
        "mean KL, nats": shown(lambda d: format_mean(d["teacher_forced"]["kl"]) if d["teacher_forced"] else "-"),
        "bit-equal steps": shown(lambda d: format_share(d["teacher_forced"] and d["teacher_forced"]["bit_equal"])),
        "directory": lambda c: c["name"],
    }
    notes = [
        f"{names[c['name']]}: {group['samples']} samples invalid at {group['reason']} ({group['arm']}, "
        f"{group['value']}, from position {group['first_position']}); counted nowhere."
        for c in kept
        for group in c["divergence"]["invalid"]
    ]
    table = make_table(columns, kept, "Every run")
    return [
        Heading("Divergence", name="divergence"),
        table,
        *([Bullets(notes)] if notes else []),
        *_write_causes(study),
    ]


def _say_valid(problems: Mapping[str, int]) -> str:
    unfinished = f" (UNFINISHED, {problems['asked']} asked)" if problems["total"] < problems["asked"] else ""
    return f"{problems['ok']} of {problems['total']}{unfinished}"


def _write_causes(study: Study) -> list[Block]:
    """Rounding or a fault, for each model and precision."""
    if not study["causes"]:
        return []
    columns: dict[str, Callable[[Condition], str]] = {
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
    if not (kept := _valid(study)):
        return []

    def cells(show: Callable[[Mapping[str, Any] | None], str]) -> dict[str, Callable[[Condition], str]]:
        return {
            label: lambda c, control=control: show(c["divergence"]["controls"][control])  # type: ignore[misc]
            for control, label in LABELS.items()
        }

    run: dict[str, Callable[[Condition], str]] = {"run": lambda c: names[c["name"]]}
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
    kept = [(names[c["name"]], found) for c in _valid(study) if (found := c["divergence"]["teacher_forced"])]
    tied = [(name, found) for name, found in kept if found["ties"]["count"]]
    if not kept:
        return []
    text = "Two best logits that are equal have margin 0; the lowest token id wins in both arms."
    if without := [found["tokens"] for _, found in kept if not found["ties"]["count"]]:
        text += f" In {len(without)} of {len(kept)} runs none of {sum(without)} steps is a tie."
    blocks: list[Block] = [Heading("Exact ties", 3), Paragraph(text)]
    if tied:
        listed = [
            [name, str(tie["problem"]), str(tie["step"]), "flip" if tie["flip"] else "no flip"]
            for name, found in tied
            for tie in found["ties"]["listed"]
        ]
        rows = [
            [name, f"{f['ties']['count']} of {f['tokens']}", f"{f['ties']['flips']} of {f['flips']['count']}"]
            for name, f in tied
        ]
        count = f"the first {TIES_SHOWN} of {len(listed)}" if len(listed) > TIES_SHOWN else f"all {len(listed)}"
        shown = Table(["run", "problem", "step", "outcome"], listed[:TIES_SHOWN])
        blocks.append(Table(["run", "steps at an exact tie", "of the flips, at one"], rows))
        blocks.append(Fold(f"Ties listed ({count})", [shown]))
    return blocks


def write_accuracy(study: Study, names: Names) -> list[Block]:
    """Accuracy of both arms where there are answers and the model is above the floor; and over conditions."""
    found = [
        (names[c["name"]], accuracy[find_headline(accuracy)])
        for c in _valid(study)
        if (accuracy := c["divergence"]["accuracy"])
    ]
    above = [(name, right) for name, right in found if is_above_floor(right)]
    below = [f"{name} ({format_count(right['cached'])})" for name, right in found if not is_above_floor(right)]
    columns: dict[str, Callable[[tuple[str, Any]], str]] = {
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
        [name, metric, *(format_number(found[arm][metric], 4) for arm in ("cached", "uncached"))]
        for name, found in totals
        for metric in found["cached"]
        if metric in found["uncached"]
    ]
    title = "The task's own results, over all valid texts of an arm"
    return [Table(["run", "metric, filter", "cached", "uncached"], rows, title)] if rows else []


def _write_pooled(study: Study) -> list[Block]:
    rows = []
    for precision, scorers in study["accuracy"].items():
        for scorer, pooled in scorers.items():
            if pooled is None:
                continue
            found, points = pooled["conditions"], pooled["difference"]
            shown = format_points(points) if points["interval"] else f"{100 * points['mean']:+.1f}"
            ahead = f"{found['cached_ahead']}, {found['uncached_ahead']}, {found['equal']}"
            rows.append([precision, scorer, str(pooled["problems"]), shown, ahead, format_number(pooled["p"])])
    head = ["precision", "scorer", "problems", "cached - uncached, points", "conditions: cached ahead, behind, equal"]
    return [Table([*head, "p, exact sign-flip test over problems"], rows, "Over conditions")] if rows else []


def write_precisions(study: Study, names: Names) -> list[Block]:
    """FP32 against 16 bits."""
    if not study["precisions"]:
        return []

    def show(entry: Mapping[str, Any]) -> str:
        text = "-" if entry["orders"] is None else f"{entry['orders']:.2f}"
        return text if entry["interval"] is None else f"{text} [{entry['interval'][0]:.2f}, {entry['interval'][1]:.2f}]"

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


def write_examples(runs: Sequence[Run], names: Names) -> list[Block]:
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
        first.to_blocks() if any(c.get("divergence") for c in study["conditions"]) else [_say_what_ran(study)],
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


def _say_what_ran(study: Study) -> Paragraph:
    """Of runs that do not compare the arms."""
    models, devices = (list(dict.fromkeys(str(c[k]) for c in study["conditions"] if c[k])) for k in ("model", "device"))
    count = len(study["conditions"])
    of, on = (f" {word} {', '.join(names)}" if names else "" for word, names in (("of", models), ("on", devices)))
    return Paragraph(f"{count} run{'s' * (count != 1)}{of}{on}; none compares cached with uncached decoding.")


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
