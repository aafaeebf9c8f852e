"""The report on changed caches: the seed study's statements, its table beside ours, every change, pairs, windows."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.experiments.injection.claims import NOT_RUN, PAIRS
from jaxkv.experiments.injection.figures import draw_injection, name_method
from jaxkv.experiments.injection.summary import summarize_injection
from jaxkv.experiments.record_parts import CLEAN
from jaxkv.experiments.report_parts import (
    Report,
    describe_problems,
    say_few,
    say_invalid,
    say_saturated,
    say_unfinished,
    say_unpacked,
)
from jaxkv.reporting.document import Block, Brief, Bullets, Cell, Heading, Only, Paragraph, Table
from jaxkv.reporting.format import (
    format_counted_share,
    format_mean,
    format_number,
    format_percent,
    format_share,
)
from jaxkv.reporting.rules import say_family, write_verdicts

Summary = Mapping[str, Any]
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


def _span(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" [{format_percent(interval[0])}, {format_percent(interval[1])}]"


def show_score(entry: Summary, scorer: str) -> str:
    """A change's mean score in percent with its interval."""
    found = entry["score"].get(scorer)
    return "-" if found is None else f"{format_percent(found['mean'])}{_span(found['interval'])}"


def show_of_control(entry: Summary, scorer: str) -> str:
    """A change's score in percent of the control's, with its interval."""
    found = entry["score"].get(scorer)
    if found is None or found["of_control"] is None:
        return "-"
    # A ratio, which may pass 1 and is 1 but for its own rounding where both scores are one: no share of a whole.
    interval = found["of_control_interval"]
    span = "" if interval is None else f" [{', '.join(format_number(100 * end) for end in interval)}]"
    return f"{format_number(100 * found['of_control'])}{span}"


def show_kl(entry: Summary) -> str:
    """A change's mean KL with its interval; ``-`` for the clean run."""
    return format_mean(entry["kl"]) if entry["kl"] else "-"


def _say_what_there_is(summary: Summary) -> list[str]:
    """How many problems, which changes lack samples of them, and which quantizers packed nothing."""
    lines = [describe_problems(summary), *say_few(summary["problems"]["ok"])]
    lines += say_unfinished(summary["unfinished"])
    for entry in summary["changes"]:
        lines += say_unpacked(entry)
    return lines


def write_claims(summary: Summary) -> list[Block]:
    """The statements with their verdicts; of those that no change of the run speaks to, the names alone."""
    tried = [claim for claim in summary["claims"] if claim["verdict"] != NOT_RUN]
    score = f"{summary['primary']} of {summary['task']}" if summary["primary"] else "none yet"
    text = f"Statements of the seed study (Shebel 2025), and one of KVarN's, on this run; score: {score}. "
    text += say_family(summary["claims"])
    blocks: list[Block] = [Paragraph(text, "note"), *write_verdicts(tried)]
    if left := [claim["id"] for claim in summary["claims"] if claim["verdict"] == NOT_RUN]:
        blocks.append(Paragraph(f"Not run here: {', '.join(left)}.", "note"))
    return blocks


def write_seed_table(summary: Summary) -> list[Block]:
    """The seed's table beside ours; nothing if the run has none of its changes."""
    named = {entry["change"]: entry for entry in summary["changes"]}
    if not (set(SEED_TABLE) - {CLEAN}) & set(named):
        return []
    primary, (_, ifeval, strings) = summary["primary"], SEED_TABLE[CLEAN]
    rows = []
    for change, (label, score, guessed) in SEED_TABLE.items():
        theirs = [f"{100 * score:.0f}", f"{100 * score / ifeval:.0f}", f"{guessed}", f"{100 * guessed / strings:.0f}"]
        entry = named.get(change)
        cells = ["not run", "-", "-", "-", "-"]
        if entry is not None:
            cells = [show_score(entry, primary), show_of_control(entry, primary), show_kl(entry)]
            cells += [format_share(entry["agreement"]), _tokens(entry)]
        rows.append([label, *theirs, *cells])
    head = ["", "IFEval, %", "% of control", "next string, %", "% of control"]
    head += [f"ours: {primary}, %", "% of control", "KL, nats", "agreement", "tokens until they part"]
    return [Heading("The seed study's table beside ours", 3), Table(head, rows), Paragraph(SEED_NOTE, "note")]


def _tokens(entry: Summary) -> str:
    return format_mean(entry["tokens_shared"]) if entry["tokens_shared"] else "-"


def _write_changes(summary: Summary) -> list[Block]:
    scorers = summary["scorers"]
    rows, notes = [], []
    for entry in summary["changes"]:
        samples = entry["samples"]
        cells: list[Cell] = [f"`{entry['change']}`", f"{samples['ok']} of {samples['total']}"]
        cells += [cell for name in scorers for cell in (show_score(entry, name), show_of_control(entry, name))]
        agreement = entry["agreement"]
        brief = f"{format_percent(agreement['rate'])} %" if agreement else "-"
        kl = Brief(show_kl(entry), format_number(entry["kl"]["mean"]) if entry["kl"] else "-")
        cells += [kl, Brief(format_counted_share(agreement), brief), format_counted_share(entry["diverged"])]
        rows.append([*cells, _tokens(entry), *_storage(entry)])
        notes += say_invalid(f"`{entry['change']}`", entry["invalid"])
        if samples["without_control"]:
            notes.append(f"`{entry['change']}`: {samples['without_control']} samples have no valid clean run.")
        notes += say_saturated(f"`{entry['change']}`", entry["saturated"])
    head = ["change", "valid"] + [cell for name in scorers for cell in (f"{name}, %", "% of control")]
    place = [2 + 2 * scorers.index(name) for name in scorers if name == summary["primary"]]
    narrow = [0, 1, *(at + more for at in place for more in (0, 1)), len(head), len(head) + 1, len(head) + 4]
    head += ["KL, nats", "agreement", "free runs that part", "tokens until they part", "bits", "packed, %"]
    blocks: list[Block] = [Heading("Every change", 3), Table([*head, "bytes a row"], rows, terminal=narrow)]
    return [*blocks, Bullets(notes)] if notes else blocks


def _storage(entry: Summary) -> list[str]:
    cache = entry["cache"]
    if not cache:
        return ["-"] * 3
    return [format_number(cache["bits"], 3), format_percent(cache["packed"]), f"{cache['bytes']:.0f}"]


def _write_pairs(summary: Summary) -> list[Block]:
    def cell(found: Summary | None) -> str:
        if found is None:
            return "-"
        low, high = found["interval"] or (None, None)
        span = "" if low is None or high is None else f" [{format_number(low)}, {format_number(high)}]"
        return f"{format_number(found['mean'])}{span}"

    rows = [
        [PAIRS[pair["kind"]], f"`{pair['first']}`", f"`{pair['second']}`", cell(pair["score"]), cell(pair["kl"])]
        for pair in summary["pairs"]
    ]
    if not rows:
        return []
    head = ["what differs", "first", "second", "score, first - second", "KL, first - second"]
    return [Heading("Changes that differ in one thing", 3), Table(head, rows)]


def _write_windows(summary: Summary) -> list[Block]:
    named = {entry["change"]: entry for entry in summary["changes"]}
    blocks: list[Block] = []
    for group in summary["windows"]:
        rows = []
        for entry in sorted((named[name] for name in group["changes"]), key=lambda e: e["cache"]["bits"]):
            block = "/".join(str(entry["spec"][s]["block"]) if entry["spec"][s] else "-" for s in ("k", "v"))
            rows.append([f"`{entry['change']}`", name_method(entry), block, *_storage(entry)[:2]])
            primary = summary["primary"]
            rows[-1] += [show_score(entry, primary), show_of_control(entry, primary), show_kl(entry)]
            rows[-1].append(format_share(entry["agreement"]))
        sides = [
            f"{side.upper()}: " + ("16 bit" if (w := group[side])["first"] is None else f"{w['first']} + {w['recent']}")
            for side in ("k", "v")
        ]
        head = ["change", "method", "block, K/V", "bits", "packed, %", f"{summary['primary']}, %", "% of control"]
        head += ["KL, nats", "agreement"]
        blocks.append(Table(head, rows, caption=f"first + recent tokens kept, {', '.join(sides)}"))
    if not blocks:
        return []
    text = (
        "Methods at equal windows: the same first and recent tokens are kept whole. A method's block adds up to block "
        f"- 1 pending tokens, so compare where the packed shares are near too. {OWN}"
    )
    return [Heading("At equal windows", 3), Paragraph(text), *blocks]


def write_injection(summary: Summary) -> list[Block]:
    """The whole report of a run's changes, figures included."""
    return [
        Bullets(_say_what_there_is(summary)),
        *write_claims(summary),
        Only("page", [*write_seed_table(summary), *draw_injection(summary)]),
        *_write_changes(summary),
        Only("page", [*_write_windows(summary), *_write_pairs(summary), Bullets(NOTES)]),
    ]


REPORT = Report("Changed caches", lambda run: summarize_injection(run.records, run.run), write_injection)
