"""The report on errors of a quantized cache along a text: statements, what accumulates, error split, repair."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.experiments.accumulation.claims import show_average
from jaxkv.experiments.accumulation.figures import DECODE, REPAIRED, STATIC, draw_accumulation
from jaxkv.experiments.accumulation.summary import summarize_accumulation
from jaxkv.experiments.report_parts import (
    Report,
    describe_problems,
    say_few,
    say_invalid,
    say_packed_nothing,
    say_saturated,
)
from jaxkv.reporting.document import Block, Brief, Bullets, Cell, Fold, Heading, Only, Paragraph, Table
from jaxkv.reporting.format import format_count, format_counted_share, format_number, format_percent
from jaxkv.reporting.rules import say_family, write_verdicts

Summary = Mapping[str, Any]
NOTES = (
    "`static`: every layer is handed the clean run's queries, keys, values and attention output, so errors do not feed "
    "back. `accumulated:B`: the tokens after the prompt are run B at a time, and later ones see them as they were "
    "packed; rows of one call see each other as in the method's prefill, so a block may err less than `static`. "
    "`decode`: token by token. All follow the clean run's tokens.",
    "Error: |a' - a| / |a|, a the heads' output of the clean run before the output projection, mean over layers and "
    "positions. What accumulates is the error minus that of `static`, problem by problem; it holds what earlier layers "
    "pass on within a step as well as what earlier steps do, and only the former at the prompt. Later - earlier: its "
    "mean over the later half of the decoded positions minus that over the earlier half.",
    "In quadrature: sqrt(decode^2 - static^2) of a problem's errors, 0 where decode errs less. Independent errors add "
    "in squares, so the same error fed back makes a smaller difference where the static error is larger. K1b and K2 "
    "compare places or methods whose static errors differ, and are decided only where both measures say the same.",
    "E_M: share of the squared error of packed keys or values that is of norms, not of directions, mean over layers. "
    "In `static` it is the quantizer's own; in `decode` it holds what accumulated too.",
    "Repair: an oracle gives packed tokens the norm back with which they entered, in `static` alone: it says what an "
    "error is made of, not what of it feeds back. % gone: 1 - e'/e, of the error as a norm. K3b is of the squared "
    "error, 1 - (e'/e)^2, as E_M is: half of the squared error is 29 % of the norm.",
    "Problems count alike. Intervals are 95 %, over problems, by Student's t; the share of agreeing steps has one that "
    "is never narrower than if steps were independent. A figure that is 0 in every problem stands with the exact 95 % "
    "bound of the share of problems in which it is not.",
    "Every interval stands alone, and so does what is said of one quantizer: of twenty one may miss by chance. The "
    "verdicts of the table hold their 5 % together.",
    "bits: of an element of the whole cache at the slots it had, counted from its arrays, windows included; bytes: "
    "beside the clean cache's.",
    "Positions count from the first one after the prompt. A record has bins of its own; each lies whole in the bin "
    "here that holds its middle. Where problems differ in length, far bins have fewer of them.",
)


def show_agreement(entry: Summary | None) -> str:
    """A share of steps; without an interval, for one problem, the count alone."""
    if entry is None or entry["interval"] is None:
        return format_count(entry)
    return format_counted_share(entry)


def _decoded(entry: Summary, regime: str) -> Summary | None:
    found = entry["regimes"].get(regime)
    return found["error"]["decoded"] if found else None


def _logits(entry: Summary, regime: str = DECODE) -> Summary:
    found = entry["regimes"].get(regime)
    return (found and found["logits"]) or {"kl": None, "agreement": None}


def _from_decode(entry: Summary, figure: str) -> Summary | None:
    found = entry["regimes"].get(DECODE, {}).get(figure)
    return found["decoded"] if found and figure == "extra" else found


def _bits(entry: Summary) -> str:
    return format_number(entry["storage"]["bits"], 3) if entry["storage"] else "-"


def _packed(entry: Summary, side: str) -> Summary | None:
    return next((found["stored"][side]["packed"] for found in entry["regimes"].values()), None)


def say_what_there_is(summary: Summary) -> list[str]:
    """How many problems, and what is missing, invalid, cannot be compared, not packed or not held."""
    lines = [describe_problems(summary), *say_few(summary["problems"]["ok"])]
    if summary["parted"]:
        text = ", ".join(map(str, summary["parted"]))
        lines.append(f"LEFT OUT, since their records follow different tokens: problems {text}.")
    for entry in summary["quantizers"]:
        name, total = f"`{entry['quantizer']}`", summary["problems"]["total"]
        missing = {regime: count for regime, count in entry["samples"].items() if count < total}
        lines += [f"UNFINISHED: {name} has {count} of {total} samples of {r}." for r, count in missing.items()]
        lines += say_invalid(name, entry["invalid"])
        packed = [_packed(entry, side) for side in ("k", "v")]
        lines += say_packed_nothing(name, [found["mean"] for found in packed if found])
        lines += say_saturated(name, entry["saturated"])
    return lines


def _say_controls(summary: Summary) -> list[str]:
    """What must be equal, and whether it is."""
    lines = []
    entries = [e["regimes"][STATIC]["logits"] for e in summary["quantizers"] if STATIC in e["regimes"]]
    if any(entries):
        count = _add([found["bit_equal"] for found in entries if found])
        lines.append(f"Control: in `static` the logits are the clean run's, bit for bit, at {count} steps.")
    watched = [found["watched"] for entry in summary["quantizers"] for found in entry["regimes"].values()]
    for run, what in (("clean", "the clean run's"), ("changed", "the decoding run's")):
        found = [entry[run] for entry in watched if run in entry]
        if found:
            lines.append(f"Watching left {what} logits as they were, bit for bit, at {_add(found)} steps.")
    return lines


def _add(counts: Sequence[Summary]) -> str:
    return format_count({part: sum(entry[part] for entry in counts) for part in ("count", "total")})


def _write_claims(summary: Summary) -> list[Block]:
    """The statements with their verdicts."""
    text = "Statements of the KVarN study (arXiv 2606.03458), on this run: relative error of the attention output."
    return [Paragraph(f"{text} {say_family(summary['claims'])}", "note"), *write_verdicts(summary["claims"])]


def _write_quantizers(summary: Summary) -> list[Block]:
    rows: list[list[Cell]] = []
    for entry in summary["quantizers"]:
        storage, logits = entry["storage"], _logits(entry)
        same = logits["agreement"]
        share = "-" if not storage or storage["of_clean"] is None else format_percent(storage["of_clean"])
        rows.append(
            [
                f"`{entry['quantizer']}`",
                _bits(entry),
                show_average(_decoded(entry, STATIC)),
                show_average(_decoded(entry, DECODE)),
                show_average(_from_decode(entry, "extra")),
                show_average(_from_decode(entry, "growth")),
                show_average(logits["kl"]),
                Brief(show_agreement(same), f"{format_percent(same['rate'])} %" if same else "-"),
                show_average(_packed(entry, "k"), format_percent),
                show_average(_packed(entry, "v"), format_percent),
                share,
            ]
        )
    head = ["quantizer", "bits", "error, static", "error, decode", "decode - static", "later - earlier half"]
    head += ["KL, nats", "same top token", "K packed, %", "V packed, %", "bytes, %"]
    return [
        Heading("Every quantizer, at decoded positions", 3),
        Table(head, rows, terminal=(0, 1, 2, 3, 4, 6, 7)),
        Paragraph("KL and top token are those of `decode` beside the clean run.", "note"),
    ]


def _write_regimes(summary: Summary) -> list[Block]:
    rows = []
    for entry in summary["quantizers"]:
        for regime, found in entry["regimes"].items():
            extra, logits = found["extra"] or {"prompt": None, "decoded": None}, _logits(entry, regime)
            cells = [found["error"]["prompt"], extra["prompt"], found["error"]["decoded"], extra["decoded"]]
            shown = [*map(show_average, cells), show_average(found["growth"]), show_average(logits["kl"])]
            counted = f"{found['problems']} of {entry['samples'][regime]}"
            rows.append(
                [f"`{entry['quantizer']}`", regime, counted, *shown, show_agreement(logits["agreement"])]
            )  # fmt: skip
    head = ["quantizer", "regime", "valid", "error, prompt", "- static", "error, decoded", "- static"]
    head += ["later - earlier half", "KL, nats", "same top token"]
    return [Heading("By regime", 3), Table(head, rows)] if rows else []


def _write_stored(summary: Summary) -> list[Block]:
    rows = []
    for entry in summary["quantizers"]:
        for regime in (STATIC, DECODE):
            if regime in entry["regimes"]:
                stored = entry["regimes"][regime]["stored"]
                cells = [
                    show_average(stored[side][figure], show)
                    for side in ("k", "v")
                    for figure, show in (("relative", format_number), ("norm_share", format_percent))
                ]
                rows.append([f"`{entry['quantizer']}`", regime, *cells])
    head = ["quantizer", "regime", "K, relative error", "K, E_M %", "V, relative error", "V, E_M %"]
    text = "What is packed at the end of the text beside the clean run's keys and values."
    return [Heading("Error of norms and of directions", 3), Paragraph(text), Table(head, rows)] if rows else []


def _write_repairs(summary: Summary) -> list[Block]:
    rows = []
    for entry in summary["quantizers"]:
        repair = entry["repair"]
        if repair:
            cells = [show_average(found) for found in repair["error"].values()]
            cells += [show_average(repair["taken"][name], format_percent) for name in REPAIRED]
            rows.append([f"`{entry['quantizer']}`", *cells])
    head = ["quantizer", "error", *(f"{name} repaired" for name in REPAIRED.values())]
    head += [f"{name}: % gone" for name in REPAIRED.values()]
    return [Heading("Token scales repaired by an oracle", 3), Table(head, rows)] if rows else []


def _write_positions(summary: Summary) -> list[Block]:
    tables: list[Block] = []
    for entry in summary["quantizers"]:
        curves = {
            regime: {(p["begin"], p["end"]): p for p in found["curve"]} for regime, found in entry["regimes"].items()
        }
        logits = {(p["begin"], p["end"]): p for p in _logits(entry).get("curve", [])}
        rows = []
        for place in sorted({place for curve in (*curves.values(), logits) for place in curve}):
            cells = [show_average(curve[place]["error"] if place in curve else None) for curve in curves.values()]
            extra = curves.get(DECODE, {}).get(place, {"extra": None})["extra"]
            step = logits.get(place, {"kl": None, "agreement": None})
            at = [curve[place]["error"] for curve in curves.values() if place in curve]
            count = str(max(found["problems"] for found in at)) if at else str(step["kl"]["problems"])
            cells += [show_average(extra), show_average(step["kl"]), show_agreement(step["agreement"])]
            rows.append([f"{place[0]} to {place[1] - 1}", count, *cells])
        if rows:
            head = ["positions", "problems", *(f"error, {regime}" for regime in curves)]
            head += ["decode - static", "KL, nats", "same top token"]
            tables.append(Table(head, rows, caption=entry["quantizer"]))
    return [Fold("Every figure by position", tables)] if tables else []


def write_accumulation(summary: Summary) -> list[Block]:
    """The whole report of a run's quantizers, figures included."""
    return [
        Bullets([*say_what_there_is(summary), *_say_controls(summary)]),
        *_write_claims(summary),
        *_write_quantizers(summary),
        Only(
            "page",
            [
                *draw_accumulation(summary),
                *_write_regimes(summary),
                *_write_stored(summary),
                *_write_repairs(summary),
                *_write_positions(summary),
                Bullets(NOTES),
            ],
        ),
    ]


REPORT = Report(
    "Quantized caches along a text", lambda run: summarize_accumulation(run.records, run.run), write_accumulation
)
