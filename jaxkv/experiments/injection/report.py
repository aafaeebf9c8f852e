"""The report on changed caches: the seed study's statements, its table beside ours, every change, pairs, windows."""

from collections.abc import Callable
from typing import Any

from jaxkv.experiments import report_parts as parts
from jaxkv.experiments.figures_changes import draw_injection, name_method
from jaxkv.experiments.injection.claims import NOT_RUN, PAIRS
from jaxkv.experiments.injection.summary import summarize_injection
from jaxkv.experiments.record_parts import CLEAN
from jaxkv.experiments.report_parts import Report, Summary
from jaxkv.reporting.document import Block, Brief, Bullets, Cell, Claims, Heading, Only, Paragraph, Table, make_table
from jaxkv.reporting.format import (
    format_counted_share,
    format_interval,
    format_mean,
    format_number,
    format_percent,
    format_share,
)
from jaxkv.reporting.rules import say_family, write_verdicts

SEED_STUDY = "shebel-2025"  # a paper, as jaxkv.overview.papers names it
# Shebel 2025: score on 128 IFEval questions, and next strings guessed exactly, in percent.
SEED_TABLE = {
    CLEAN: ("control", 0.46, 51.3),
    "llama:q8_0": ("q8", 0.45, 46.8),
    "llama:q4_0": ("q4", 0.45, 59.2),
    "uniform:-1,1": ("U(-1, 1)", 0.38, 27.4),
    "uniform:-1.5,1.5": ("U(-1.5, 1.5)", 0.39, 31.4),
    "normal:0,0.25": ("N(0, .25)", 0.45, 41.2),
    "normal:0,0.5": ("N(0, .5)", 0.43, 31.2),
}
SEED_NOTE = (
    "IFEval and next string are the seed study's own figures (Llama-3.2-1B-Instruct, llama.cpp, FP32 control); the "
    "shares of control are computed from them. Its table 4 prints others: 27.4 of 51.3 is 53 %, 31.4 of 51.3 is 61 %. "
    "Its next-string score is called perplexity there. It gives no intervals."
)
OWN = (
    "What a prompt's own rows see of themselves during the prefill is the method's too: KVarN, QuaRot, TurboQuant, "
    "KIVI and hf read them exactly, KIVI and hf those of every later step as well; llama.cpp's blocks, int, fp8 and "
    "mask read them packed."
)
NOTES = (
    "KL is KL(clean to changed) in nats, agreement the share of steps with the same top token, both along the clean "
    "arm's tokens; free runs part where they take another token. KL and agreement of a change weight tokens alike, KL "
    "of pairs and statements weights problems alike.",
    "Intervals are 95 %, over problems with all their seeds; the noise of a seed is independent from problem to "
    "problem. Of a score of 0 or of all, and of two that differ in no problem, the exact one-sided bound stands; a "
    "share of control reaches as far on a side to which no problem moved. Runs and tokens are counted over seeds, "
    "their bounds over problems.",
    "Every interval stands alone: of twenty one may miss by chance. The verdicts of a table hold their 5 % together.",
    "bits: per element of the whole cache at the clean run's length, first, recent and pending tokens counted at full "
    "width; packed: share of elements that are packed.",
    OWN,
)

Show = Callable[[Summary], Cell]


def _show_score(score: Summary | None) -> str:
    """In percent, with its interval."""
    return format_interval(score["mean"], score["interval"], format_percent) if score else "-"


def show_of_control(score: Summary | None) -> str:
    """In percent of the control's, with its interval.

    A ratio, which may pass 1 and is 1 but for its own rounding where both scores are one: no share of a whole.
    """
    if not score or score["of_control"] is None:
        return "-"
    return format_interval(score["of_control"], score["of_control_interval"], lambda part: format_number(100 * part))


def _score_columns(scorer: str, head: str = "") -> dict[str, Show]:
    return {
        f"{head}{scorer}, %": lambda entry: _show_score(entry["score"].get(scorer)),
        f"{scorer}, % of control": lambda entry: show_of_control(entry["score"].get(scorer)),
    }


def _or_dash(figure: str, show: Callable[[Any], Cell]) -> Show:
    """What shows a figure, ``-`` where there is none, as of the clean run."""
    return lambda entry: show(entry[figure]) if entry[figure] else "-"


def _name(entry: Summary) -> str:
    return f"`{entry['change']}`"


def _show_agreement(entry: Summary) -> Cell:
    found = entry["agreement"]
    return Brief(format_counted_share(found), f"{format_percent(found['rate'])} %" if found else "-")


KL: dict[str, Show] = {"KL, nats": _or_dash("kl", parts.show_mean)}
AGREEMENT: dict[str, Show] = {"agreement": lambda entry: format_share(entry["agreement"])}
TOKENS: dict[str, Show] = {"tokens until they part": _or_dash("tokens_shared", format_mean)}
CACHE: dict[str, Show] = {
    "bits": _or_dash("cache", lambda cache: format_number(cache["bits"], 3)),
    "packed, %": _or_dash("cache", lambda cache: format_percent(cache["packed"])),
}
PAIR: dict[str, Show] = {
    "what differs": lambda pair: PAIRS[pair["kind"]],
    "first": lambda pair: f"`{pair['first']}`",
    "second": lambda pair: f"`{pair['second']}`",
    "score, first - second": _or_dash("score", lambda found: format_interval(found["mean"], found["interval"])),
    "KL, first - second": _or_dash("kl", lambda found: format_interval(found["mean"], found["interval"])),
}


def _write_claims(summary: Summary) -> list[Block]:
    """The statements with their verdicts; of those that no change of the run speaks to, the names alone."""
    tried = [claim for claim in summary["claims"] if claim["verdict"] != NOT_RUN]
    score = f"{summary['primary']} of {summary['task']}" if summary["primary"] else "none yet"
    text = f"Statements of the seed study (Shebel 2025), and one of KVarN's, on this run; score: {score}. "
    blocks: list[Block] = [Paragraph(text + say_family(summary["claims"]), "note"), *write_verdicts(tried)]
    if left := [claim["id"] for claim in summary["claims"] if claim["verdict"] == NOT_RUN]:
        blocks.append(Paragraph(f"Not run here: {', '.join(left)}.", "note"))
    return blocks


def _write_seed_table(summary: Summary) -> list[Block]:
    """The seed's table beside ours; nothing if the run has none of its changes."""
    named = {entry["change"]: entry for entry in summary["changes"]}
    if not (set(SEED_TABLE) - {CLEAN}) & set(named):
        return []
    ours = _score_columns(summary["primary"], "ours: ") | KL | AGREEMENT | TOKENS
    _, ifeval, strings = SEED_TABLE[CLEAN]
    rows: list[list[Cell]] = []
    for change, (label, score, guessed) in SEED_TABLE.items():
        theirs = [f"{100 * score:.0f}", f"{100 * score / ifeval:.0f}", f"{guessed}", f"{100 * guessed / strings:.0f}"]
        cells: list[Cell] = ["not run", *["-"] * (len(ours) - 1)]
        if change in named:
            cells = [show(named[change]) for show in ours.values()]
        rows.append([label, *theirs, *cells])
    head = ["", "IFEval, %", "% of control", "next string, %", "% of control", *ours]
    return [Heading("The seed study's table beside ours", 3), Table(head, rows), Paragraph(SEED_NOTE, "note")]


def _write_changes(summary: Summary) -> list[Block]:
    columns: dict[str, Show] = {"change": _name, "valid": lambda entry: "{ok} of {total}".format(**entry["samples"])}
    for scorer in summary["scorers"]:
        columns |= _score_columns(scorer)
    columns |= KL | {"agreement": _show_agreement}
    columns |= {"free runs that part": lambda entry: format_counted_share(entry["diverged"])} | TOKENS | CACHE
    columns["bytes a row"] = _or_dash("cache", lambda cache: f"{cache['bytes']:.0f}")
    head = list(columns)
    narrow = [*_score_columns(summary["primary"]), "KL, nats", "agreement", "bits"]
    terminal = [0, 1, *(head.index(name) for name in narrow if name in head)]
    notes = []
    for entry in summary["changes"]:
        notes += parts.say_change(entry)
        if without := entry["samples"]["without_control"]:
            notes.append(f"{_name(entry)}: {without} samples have no valid clean run.")
    table = make_table(columns, summary["changes"], terminal=terminal)
    return [Heading("Every change", 3), table, *([Bullets(notes)] if notes else [])]


def _write_pairs(summary: Summary) -> list[Block]:
    head = Heading("Changes that differ in one thing", 3)
    return [head, make_table(PAIR, summary["pairs"])] if summary["pairs"] else []


def _write_windows(summary: Summary) -> list[Block]:
    def show_blocks(entry: Summary) -> str:
        sides = [entry["spec"][side] for side in ("k", "v")]
        return "/".join(str(side["block"]) if side else "-" for side in sides)

    columns: dict[str, Show] = {"change": _name, "method": name_method, "block, K/V": show_blocks, **CACHE}
    columns |= _score_columns(summary["primary"]) | KL | AGREEMENT
    named = {entry["change"]: entry for entry in summary["changes"]}
    blocks: list[Block] = []
    for group in summary["windows"]:
        members = sorted((named[name] for name in group["changes"]), key=lambda entry: entry["cache"]["bits"])
        kept = ["16 bit" if group[s]["first"] is None else "{first} + {recent}".format(**group[s]) for s in ("k", "v")]
        blocks.append(make_table(columns, members, "first + recent tokens kept, K: {}, V: {}".format(*kept)))
    text = (
        "Methods at equal windows: the same first and recent tokens are kept whole. A method's block adds up to block "
        f"- 1 pending tokens, so compare where the packed shares are near too. {OWN}"
    )
    return [Heading("At equal windows", 3), Paragraph(text), *blocks] if blocks else []


def write_injection(summary: Summary) -> list[Block]:
    """The whole report of a run's changes, figures included."""
    few, unfinished = parts.say_few(summary["problems"]["ok"]), parts.say_unfinished(summary["unfinished"])
    return [
        Bullets([parts.describe_problems(summary), *few, *unfinished]),
        Claims(SEED_STUDY, [*_write_claims(summary), Only("page", _write_seed_table(summary))]),
        Only("page", draw_injection(summary)),
        *_write_changes(summary),
        Only("page", [*_write_windows(summary), *_write_pairs(summary), Bullets(NOTES)]),
    ]


REPORT = Report("Changed caches", lambda run: summarize_injection(run.records, run.run), write_injection)
