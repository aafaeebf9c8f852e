"""A study's report from its summary: what is said in which order. The same summary gives the same bytes."""

import itertools
import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence

from rich.console import Group

from jaxkv import records
from jaxkv.experiments.divergence.report import show_value
from jaxkv.experiments.figures import draw_divergence
from jaxkv.experiments.record_parts import CLEAN
from jaxkv.experiments.report_parts import Run
from jaxkv.experiments.reports import REPORTS
from jaxkv.overview import orders, sections
from jaxkv.overview.examples import count_parted, show_examples
from jaxkv.overview.first_screen import describe
from jaxkv.overview.gather import Condition, Study, drop_copies, join_parts, list_values, name_conditions, read_runs
from jaxkv.overview.papers import CHANGED, keep_claims, write_claims
from jaxkv.overview.parity import write_free_parity
from jaxkv.overview.sections import Names
from jaxkv.overview.study import OTHERS, summarize_study
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
from jaxkv.reporting.html import to_html

TITLE = "Cached against uncached decoding"
CHANGES_TITLE = "Changed caches"
ORDERS_TITLE = "The order of sums"
FILES = ("report.html", "report.md", "summary.json")
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
CHANGES_METHOD = (
    "The clean arm decodes with its cache as it is. A changed arm has the same weights, tokens and sampler noise and "
    "another cache: it first follows the clean arm's tokens (KL, agreement), then runs freely (scores, tokens).",
    "Perplexity feeds the text's own tokens one by one through the cache. Along a text, `static` hands every layer "
    "the clean run's inputs, `accumulated` runs blocks of tokens, `decode` one token at a time.",
    "Intervals are 95 %, over problems with all their seeds. A count of zero stands with the one-sided 95 % bound "
    "of the share of problems.",
    "A sample in which a number was not finite is invalid and enters no figure.",
    "A verdict speaks of this model, task, device and version. Those of one run hold their 5 % together (Holm), each "
    "run for itself: over several runs more may be wrong.",
    "Runs of one condition that differ in their changes are joined; what they share is the same in each, bit for bit.",
)


def changes_alone(study: Study) -> bool:
    """Whether all that was run changes a cache, so that nothing speaks to cached against uncached decoding."""
    conditions = study["conditions"]
    others = {*REPORTS, *OTHERS} - set(CHANGED)
    return any(map(_changes, conditions)) and not any(c.get(name) for c in conditions for name in others)


def _changes(condition: Condition) -> bool:
    """Whether a run changes its cache; perplexity may be of the clean one alone."""
    texts = (condition.get("perplexity") or {}).get("changes", ())
    changed = any(entry["change"] != CLEAN for entry in texts)
    return changed or bool(condition.get("injection") or condition.get("accumulation"))


def _name_all(study: Study) -> Names:
    sides = [[c for c in study["conditions"] if bool(c.get("divergence")) == compared] for compared in (True, False)]
    return {c["name"]: name for side in sides for c, name in zip(side, name_conditions(side), strict=True)}


def _write_section(study: Study, name: str, before: Sequence[Block] = ()) -> list[Block]:
    """Figures of an experiment, what is said over all runs, and run by run; nothing where there is none of it."""
    experiment = REPORTS[name]
    blocks: list[Block] = [*experiment.draw(study), *before]
    for condition in study["conditions"]:
        if condition.get(name):
            blocks += [Heading(condition["name"], 3), *experiment.write(condition[name])]
    return [Heading(experiment.title, name=name), *blocks] if blocks else []


def _write_provenance(study: Study) -> list[Block]:
    commands = list(dict.fromkeys(command for c in study["conditions"] for command in c["origin"]["commands"]))
    blocks: list[Block] = [Heading("Provenance and commands", name="provenance")]
    if len(commands) > COMMANDS_SHOWN:
        blocks.append(Fold(f"The {len(commands)} commands that made the runs", [Code("\n".join(commands))]))
    elif commands:
        blocks += [Paragraph("Each run was made by:"), Code("\n".join(commands))]
    blocks += [Paragraph("This report was made of their directories by:"), Code("python -m jaxkv.report RUN...")]
    head = ["run", "date (UTC)", "revision", "device", "versions", "SHA-256 of files, begun", "fingerprint"]
    rows = [_list_origin(condition) for condition in study["conditions"]]
    return [*blocks, Fold("Dates, devices, versions, hashes of each run", [Table(head, rows, kind="wrap")])]


def _list_origin(condition: Condition) -> list[str]:
    origin = condition["origin"]
    device = origin["device"]
    data = origin["data"] if isinstance(origin["data"], Mapping) else {}
    hashes = [f"{name} `{digest[:16]}`" for name, digest in (origin["checkpoint"].get("files") or {}).items()]
    hashes += [f"{part} `{found['sha256'][:16]}`" for part, found in data.items() if found.get("sha256")]
    revisions = [name[:12] + ("-dirty" if name.endswith("-dirty") else "") for name in origin["revisions"]]
    return [
        condition["name"] + (f" ({len(origin['parts'])} parts)" if origin["parts"] else ""),
        ", ".join(origin["dates"]) or "-",
        ", ".join(revisions) or "-",
        ", ".join(map(str, device.values())) if isinstance(device, Mapping) else str(device),
        ", ".join(f"{n} {v}" for n, v in origin["versions"].items() if v),
        "; ".join(hashes) or "-",
        f"`{(origin['fingerprint'] or '-')[:16]}`",
    ]


def _write_missing(study: Study) -> list[Block]:
    odd = [f"{c['name']}: {', '.join(c['not_reported'])}" for c in study["conditions"] if c.get("not_reported")]
    lines = [f"Records this report has no section for: {'; '.join(odd)}."] if odd else []
    lines += [f"Not joined: {note}." for note in study.get("apart", ())]
    lines += [f"{note}." for note in study.get("copies", ())]
    return [Paragraph(line, "note") for line in lines]


def _write_examples(runs: Sequence[Run], names: Names) -> list[Block]:
    if (examples := show_examples(runs, names)) is None:
        return []
    total = count_parted(runs)
    shown = f"{len(examples.items)} of the {total}" if total > len(examples.items) else "All"
    text = f"{shown} texts that part, from a little before the token at which they do."
    if not examples.key:
        text += " The runs have no tokens.json, so that the decoded texts alone are shown."
    return [Heading("Where texts part", name="examples"), Paragraph(text), examples]


def _write_run(study: Study, runs: Sequence[Run]) -> list[Block]:
    """Of a single run, everything: what was run, its sessions and its configuration."""
    if len(runs) != 1:
        return []
    (run,), (condition,) = runs, study["conditions"]
    blocks = REPORTS["divergence"].write(condition["divergence"]) if condition.get("divergence") else []
    sessions = run.run["sessions"]
    shown = {
        f"Last of {len(sessions)} session(s)": sessions[-1] if sessions else {},
        "Configuration": run.run["config"],
    }
    tables = []
    for title, values in shown.items():
        rows = [[name, show_value(value)] for name, value in sorted(records.flatten(values).items())]
        tables.append(Table(["key", "value"], rows, title, "wrap"))
    whole = Only("page", [Heading("The run in full", name="run")])
    return [whole, *blocks, Only("page", [Fold("Session and configuration", tables)])]


def write_blocks(study: Study, runs: Sequence[Run], asked: Collection[str] = ()) -> list[Block]:
    """The report of one run or several, in order, from their summary and records; judges claims of `asked` papers."""
    names = _name_all(study)
    drawn = draw_divergence(study)
    first = describe(study["conditions"], study["causes"], runs)
    parts: list[Sequence[Block]] = [
        first.to_blocks() if any(c.get("divergence") for c in study["conditions"]) else [_say_what_ran(study)],
        _write_missing(study),
        _write_examples(runs, names),
        sections.draw_forest(study),
        [Heading("How far the arms are apart", name="figures"), *drawn] if drawn else [],
        sections.write_controls(study, names),
        sections.write_conditions(study, names),
        sections.write_ties(study, names),
        sections.write_precisions(study, names),
        sections.write_accuracy(study, names),
        *(_write_section(study, name) for name in ("mitigations", "drift", "patching")),
        _write_section(study, "parity", write_free_parity(study)),
        _write_section(study, "attribution"),
        _write_section(study, "lowering", [*orders.write_maps(study), *orders.write_predictions(study)]),
        *(_write_section(study, name) for name in (*CHANGED, "doctor")),
        write_claims(study, asked),
        _write_run(study, runs),
        [Heading("Method", name="method"), Bullets(CHANGES_METHOD if changes_alone(study) else METHOD)],
        _write_provenance(study),
    ]
    return keep_claims(list(itertools.chain.from_iterable(parts)), asked)


def _say_what_ran(study: Study) -> Paragraph:
    count = len(study["conditions"])
    named = [(word, list_values(study["conditions"], key)) for word, key in (("of", "model"), ("on", "device"))]
    of, on = (f" {word} {', '.join(names)}" if names else "" for word, names in named)
    return Paragraph(f"{count} run{'s' * (count != 1)}{of}{on}; none compares cached with uncached decoding.")


def _title(study: Study) -> str:
    if changes_alone(study):
        return CHANGES_TITLE
    if len(study["conditions"]) != 1:
        mapped = any(c.get("lowering") for c in study["conditions"])
        return TITLE if any(c.get("divergence") for c in study["conditions"]) or not mapped else ORDERS_TITLE
    named = [study["conditions"][0][name] for name in ("model", "precision", "device")]
    return ", ".join(str(name) for name in named if name) or "Report"


def write_study(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], asked: Collection[str] = ()
) -> Study:
    """Writes report.html, report.md and summary.json of the runs in or below `paths` into a directory.

    From their records alone; judges the claims of the papers `asked` for. Returns the summary. Raises UserError: no
    runs, corrupt records, or not writable.
    """
    once, copies = drop_copies(read_runs(paths))
    runs, apart = join_parts(once)
    study = summarize_study(runs) | {"apart": apart, "copies": copies}
    _write_files(pathlib.Path(out), study, study, write_blocks(study, runs, asked))
    return study


def _write_files(out: pathlib.Path, study: Study, summary: Study, blocks: Sequence[Block]) -> None:
    text = json.dumps(records.to_plain(summary), allow_nan=False, separators=(",", ":")) + "\n"
    title = _title(study)
    for name, content in zip(FILES, (to_html(title, blocks), to_markdown(title, blocks), text), strict=True):
        records.write_atomically(out / name, content)


def report_run(path: str | os.PathLike[str], asked: Collection[str] = ()) -> Group:
    """Writes the report of every experiment that a run directory has records of; of divergence if it has none yet.

    Returns what a terminal shows of it. Raises UserError: not a run directory, corrupt records, or not writable.
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
