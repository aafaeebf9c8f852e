"""The report on errors of a quantized cache along a text: statements, what accumulates, error split, repair."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxkv.experiments.accumulation.claims import show_average
from jaxkv.experiments.accumulation.record import SIDES
from jaxkv.experiments.accumulation.summary import DECODE, STATIC, summarize_accumulation
from jaxkv.experiments.figures_changes import REPAIRED, draw_accumulation
from jaxkv.experiments.report_parts import Report, Summary, describe_problems, say_few, say_odd
from jaxkv.reporting.document import Block, Brief, Bullets, Claims, Fold, Heading, Only, Paragraph, Table, make_table
from jaxkv.reporting.format import format_count, format_counted_share, format_number, format_percent
from jaxkv.reporting.rules import say_family, write_verdicts

Show = Callable[[Summary], str | Brief]
KVARN = "2606.03458"  # a paper, as jaxkv.overview.papers names it
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


def _get(found: Any, *names: Any) -> Any:
    """What lies under these names, None where something on the way is not there."""
    for name in names:
        found = found.get(name) if found else None
    return found


def _show_agreement(logits: Summary | None) -> Brief:
    """A share of steps; without an interval, for one problem, the count alone."""
    same = _get(logits, "agreement")
    if not same:
        return Brief("-", "-")
    text = format_count(same) if same["interval"] is None else format_counted_share(same)
    return Brief(text, f"{format_percent(same['rate'])} %")


def _show(*names: str, show: Callable[[float], str] = format_number) -> Callable[[Summary], str]:
    """What shows the average that an entry has under these names."""
    return lambda entry: show_average(_get(entry, *names), show)


def _name(entry: Summary) -> str:
    return f"`{entry['quantizer']}`"


def _packed(side: str) -> Callable[[Summary], Summary | None]:
    return lambda entry: next((found["stored"][side]["packed"] for found in entry["regimes"].values()), None)


def _say_what_there_is(summary: Summary) -> list[str]:
    """How many problems, and what is missing, invalid, cannot be compared, not packed or not held."""
    lines = [describe_problems(summary), *say_few(summary["problems"]["ok"])]
    if summary["parted"]:
        text = ", ".join(map(str, summary["parted"]))
        lines.append(f"LEFT OUT, since their records follow different tokens: problems {text}.")
    for entry in summary["quantizers"]:
        name, total = _name(entry), summary["problems"]["total"]
        missing = {regime: count for regime, count in entry["samples"].items() if count < total}
        lines += [f"UNFINISHED: {name} has {count} of {total} samples of {r}." for r, count in missing.items()]
        packed = [found["mean"] for side in SIDES if (found := _packed(side)(entry))]
        lines += say_odd(name, entry["invalid"], packed, entry["saturated"])
    return lines


def _say_controls(summary: Summary) -> list[str]:
    """What must be equal, and whether it is."""
    regimes = [regime for entry in summary["quantizers"] for regime in entry["regimes"].items()]
    equal = [found["logits"]["bit_equal"] for name, found in regimes if name == STATIC and found["logits"]]
    lines = []
    if equal:
        lines.append(f"Control: in `static` the logits are the clean run's, bit for bit, at {_add(equal)} steps.")
    for run, what in (("clean", "the clean run's"), ("changed", "the decoding run's")):
        if watched := [found["watched"][run] for _, found in regimes if run in found["watched"]]:
            lines.append(f"Watching left {what} logits as they were, bit for bit, at {_add(watched)} steps.")
    return lines


def _add(counts: Sequence[Summary]) -> str:
    return format_count({part: sum(entry[part] for entry in counts) for part in ("count", "total")})


def _of(name: str, show: Callable[[float], str]) -> Callable[[Summary], str]:
    return lambda entry: "-" if _get(entry, "storage", name) is None else show(entry["storage"][name])


QUANTIZER: dict[str, Show] = {
    "quantizer": _name,
    "bits": _of("bits", lambda bits: format_number(bits, 3)),
    "error, static": _show("regimes", STATIC, "error", "decoded"),
    "error, decode": _show("regimes", DECODE, "error", "decoded"),
    "decode - static": _show("regimes", DECODE, "extra", "decoded"),
    "later - earlier half": _show("regimes", DECODE, "growth"),
    "KL, nats": _show("regimes", DECODE, "logits", "kl"),
    "same top token": lambda entry: _show_agreement(_get(entry, "regimes", DECODE, "logits")),
    "K packed, %": lambda entry: show_average(_packed("k")(entry), format_percent),
    "V packed, %": lambda entry: show_average(_packed("v")(entry), format_percent),
    "bytes, %": _of("of_clean", format_percent),
}
# Cells of a quantizer in a regime: an entry with what it has of the regime beside it.
REGIME: dict[str, Show] = {
    "quantizer": _name,
    "regime": lambda entry: str(entry["regime"]),
    "valid": lambda entry: f"{entry['problems']} of {entry['samples'][entry['regime']]}",
    "error, prompt": _show("error", "prompt"),
    "prompt - static": _show("extra", "prompt"),
    "error, decoded": _show("error", "decoded"),
    "decoded - static": _show("extra", "decoded"),
    "later - earlier half": _show("growth"),
    "KL, nats": _show("logits", "kl"),
    "same top token": lambda entry: _show_agreement(entry["logits"]).text,
}
STORED: dict[str, Show] = {
    **{name: REGIME[name] for name in ("quantizer", "regime")},
    "K, relative error": _show("stored", "k", "relative"),
    "K, E_M %": _show("stored", "k", "norm_share", show=format_percent),
    "V, relative error": _show("stored", "v", "relative"),
    "V, E_M %": _show("stored", "v", "norm_share", show=format_percent),
}
REPAIR: dict[str, Show] = {
    "quantizer": _name,
    "error": _show("repair", "error", "nothing"),
    **{f"{name} repaired": _show("repair", "error", choice) for choice, name in REPAIRED.items()},
    **{f"{name}: % gone": _show("repair", "taken", choice, show=format_percent) for choice, name in REPAIRED.items()},
}


def _write_tables(summary: Summary) -> list[Block]:
    """By regime, what is stored, and repairs; of each what there is."""
    regimes = [
        {**entry, "regime": name, **found}
        for entry in summary["quantizers"]
        for name, found in entry["regimes"].items()
    ]
    stored = [entry for entry in regimes if entry["regime"] in (STATIC, DECODE)]
    repaired = [entry for entry in summary["quantizers"] if entry["repair"]]
    what = Paragraph("What is packed at the end of the text beside the clean run's keys and values.")
    blocks: list[Block] = []
    if regimes:
        blocks += [Heading("By regime", 3), make_table(REGIME, regimes)]
    if stored:
        blocks += [Heading("Error of norms and of directions", 3), what, make_table(STORED, stored)]
    if repaired:
        blocks += [Heading("Token scales repaired by an oracle", 3), make_table(REPAIR, repaired)]
    return blocks


def _by_place(curve: Sequence[Summary]) -> dict[tuple[int, int], Summary]:
    return {(place["begin"], place["end"]): place for place in curve}


def _write_positions(summary: Summary) -> list[Block]:
    tables: list[Block] = []
    for entry in summary["quantizers"]:
        curves = {name: _by_place(found["curve"]) for name, found in entry["regimes"].items()}
        logits = _by_place(_get(entry, "regimes", DECODE, "logits", "curve") or ())
        rows = []
        for place in sorted({place for curve in (*curves.values(), logits) for place in curve}):
            errors, step = [_get(curve, place, "error") for curve in curves.values()], logits.get(place, {})
            problems = [found["problems"] for found in errors if found] or [step["kl"]["problems"]]
            shown = map(show_average, (*errors, _get(curves, DECODE, place, "extra"), step.get("kl")))
            at = f"{place[0]} to {place[1] - 1}"
            rows.append([at, str(max(problems)), *shown, _show_agreement(step).text])
        if rows:
            head = ["positions", "problems", *(f"error, {regime}" for regime in curves)]
            head += ["decode - static", "KL, nats", "same top token"]
            tables.append(Table(head, rows, caption=entry["quantizer"]))
    return [Fold("Every figure by position", tables)] if tables else []


def write_accumulation(summary: Summary) -> list[Block]:
    """The whole report of a run's quantizers, figures included."""
    claims = summary["claims"]
    text = "Statements of the KVarN study (arXiv 2606.03458), on this run: relative error of the attention output."
    detail = [*draw_accumulation(summary), *_write_tables(summary), *_write_positions(summary), Bullets(NOTES)]
    return [
        Bullets([*_say_what_there_is(summary), *_say_controls(summary)]),
        Claims(KVARN, [Paragraph(f"{text} {say_family(claims)}", "note"), *write_verdicts(claims)]),
        Heading("Every quantizer, at decoded positions", 3),
        make_table(QUANTIZER, summary["quantizers"], terminal=(0, 1, 2, 3, 4, 6, 7)),
        Paragraph("KL and top token are those of `decode` beside the clean run.", "note"),
        Only("page", detail),
    ]


REPORT = Report(
    "Quantized caches along a text", lambda run: summarize_accumulation(run.records, run.run), write_accumulation
)
