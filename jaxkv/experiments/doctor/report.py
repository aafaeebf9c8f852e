"""What a doctor record says, and what follows from it for a study: rules that never claim more than was measured."""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import to_builtins

from jaxkv.errors import UserError
from jaxkv.experiments.doctor.record import DoctorRecord
from jaxkv.experiments.report_parts import Report, Run
from jaxkv.reporting.document import Block, Bullets, Heading, Paragraph, Table
from jaxkv.reporting.format import format_number, format_percent

Record = Mapping[str, Any]  # plain values of a DoctorRecord
Figure = Mapping[str, Any]
Figures = Mapping[str, Figure]  # by count
SHORT = "{share} ({ulp})"
UNKNOWN = "not measured"
OPERATIONS = ("matmul", "matmul_wide", "scores", "softmax", "weighted_sum", "rmsnorm", "exp_tanh", "layer", "attention")
WIDE_BITS = 16.0  # of a sum: partial sums in fp16 show at most 12, in bf16 9, in fp32 20 or more
# Operand bits from which a product of that kind is meant; a true fp32 product of 256 terms shows 20 or more.
OPERAND_KINDS = ((17.5, "fp32"), (13.0, "several bf16 products"), (8.7, "TF32"), (5.5, "bf16"), (0.0, "less than bf16"))


def operand_kind(bits: float | None) -> str:
    """In what a float32 product is taken, judged by its error."""
    return "not finite" if bits is None else next(kind for least, kind in OPERAND_KINDS if bits >= least or not least)


def sum_kind(bits: Mapping[str, float | None]) -> str:
    """In what a 16-bit product adds, judged by its errors with exact and with rounded terms."""
    exact, rounded = bits["exact"], bits["rounded"]
    if exact is None or rounded is None:
        return "not finite"
    if exact < WIDE_BITS:
        return "16-bit partial sums"
    return "sum in fp32" if rounded >= WIDE_BITS else "products rounded to 16 bits"


def join(words: Iterable[Any]) -> str:
    """``4, 8, 16``."""
    return ", ".join(str(word) for word in words)


def share_of(figure: Figure) -> float:
    """Share of elements that differ; above 1 if they are not finite, which is no agreement."""
    return 2.0 if figure["nonfinite"] else figure["differ"] / figure["elements"]


def describe(figures: Iterable[Figure], form: str = "{share} %, {ulp} ulp") -> str:
    """The worst of some figures: ``equal``, ``0.17 %, 1 ulp``, ``not finite`` or ``not measured``."""
    figures = list(figures)
    if not figures:
        return UNKNOWN
    share = max(map(share_of, figures))
    if share > 1:
        return "not finite"
    if not share:
        return "equal"
    ulp = max(figure["max_ulp"] for figure in figures)
    return form.format(share=format_percent(share), ulp="<1" if 0 < ulp < 1 else format_number(ulp))


def order_operations(by_operation: Mapping[str, Any]) -> list[str]:
    """The operations there are, in the order of a layer."""
    return [name for name in OPERATIONS if name in by_operation]


def find_differing(by_operation: Mapping[str, Figures]) -> dict[str, list[str]]:
    """Operation -> counts at which it has other bits, or none that are finite."""
    found = {name: [n for n, f in by_operation[name].items() if share_of(f)] for name in order_operations(by_operation)}
    return {name: counts for name, counts in found.items() if counts}


def summarize(
    by_operation: Mapping[str, Figures], count: str | None = None, form: str = "{share} %, {ulp} ulp"
) -> tuple[str, list[str]]:
    """The worst of all operations, as in `describe`, and which of them differ; at one count or at all."""
    chosen = {name: {n: f for n, f in figures.items() if count in (None, n)} for name, figures in by_operation.items()}
    return describe((f for by in chosen.values() for f in by.values()), form), list(find_differing(chosen))


def describe_dropped(shares: Mapping[str, float]) -> str:
    """Where casts were dropped, ``widened 45 %``; empty if nowhere."""
    return join(f"{name} {format_percent(share)} %" for name, share in shares.items() if share)


def compare_processes(record: Record, dtype: str) -> tuple[str, list[str]]:
    """``equal``, ``differ``, ``cannot tell`` or ``not measured``, and the operations that differ between processes."""
    if record["process"]["status"] != "ok":
        return "cannot tell", []
    equal = record["dtypes"][dtype]["process"]
    names = [name for name in order_operations(equal) if not all(equal[name].values())]
    return ("differ" if names else "equal" if equal else UNKNOWN), names


# Of a question: what is concluded for dtypes in which nothing differs, and for those in which something does.
ABOUT = {
    "slots": (
        "one row's bits did not depend on the number of slots.",
        "one row's bits depend on the number of slots. Fix it, as --regime=aligned does.",
    ),
    "batch": (
        "a row in a batch had the bits of a row alone.",
        "a row in a batch has other bits than alone. Compare runs of one batch size.",
    ),
    "neighbours": (
        "what a row's neighbours in a batch hold did not matter.",
        "what a row's neighbours in a batch hold matters. Decode one problem at a time.",
    ),
    "following": (
        "what follows a row in its tile did not matter, as draft and check needs.",
        "what follows a row in its tile matters. Draft and check is not exact: use --uncached=stepwise.",
    ),
    "rerun": (
        "a program run again gave the same bits.",
        "a program run again gives other bits. No comparison of arms means much before that is mended; try"
        " XLA_FLAGS=--xla_gpu_deterministic_ops=true.",
    ),
    "place": (
        "exp and tanh of a number did not depend on its place in a vector.",
        "exp or tanh of a number depends on its place in a vector.",
    ),
}
COMPILED_ALONE = (
    "Operations were compiled alone; within a model XLA may fuse them with others. Only the layer shows that, and"
    " only for its own widths, outside a decoding loop."
)


def _sort(found: Mapping[str, tuple[str, list[str]]], clean: str, dirty: str, part: str = ": up to {}") -> list[str]:
    """One sentence for the dtypes in which nothing differs, and one for those in which something does.

    `part` is what is told of the text of `summarize` beside the operations that differ.
    """
    quiet = [d for d, (text, _) in found.items() if text == "equal"]
    loud = [f"{d} ({join(names)}{part and part.format(text)})" for d, (text, names) in found.items() if names]
    return ([f"{join(quiet)}: {clean}"] if quiet else []) + ([f"{join(loud)}: {dirty}"] if loud else [])


def _group(texts: Mapping[str, str | None]) -> list[str]:
    """``fp16, bf16: text`` for every text, once."""
    return [f"{join(d for d in texts if texts[d] == text)}: {text}" for text in dict.fromkeys(texts.values()) if text]


def _about_rows(record: Record) -> list[str]:
    found = {d: summarize(values["rows"]) for d, values in record["dtypes"].items()}
    whole = {d: answer for d, answer in found.items() if "layer" in answer[1]}
    unknown = [d for d, (text, _) in found.items() if text == UNKNOWN]
    lines = [f"{join(unknown)}: whether the number of rows matters was not measured."] if unknown else []
    lines += _sort(
        {d: answer for d, answer in found.items() if d not in whole},
        f"no operation gave other bits at {join(record['spec']['rows'][1:])} rows than at 1. Other widths may, and "
        "cached and uncached can still differ by their numbers of slots.",
        "a row has other bits among many rows than at 1, though no difference was seen in a whole layer.",
    )
    return lines + _sort(
        whole,
        "",
        "a row has other bits among many rows than at 1, through a whole layer too. Cached (1 row a step) and uncached "
        "(many) can then differ by shape alone, with no fault in the cache; --regime=aligned removes that.",
    )


def _about_many_rows(values: Mapping[str, Any], most: int) -> str | None:
    layer = values["rows_from_most"].get("layer")
    if not layer or "layer" not in find_differing(values["rows"]):
        return None
    same, other = ([n for n, f in layer.items() if bool(share_of(f)) == differs] for differs in (False, True))
    text = f"a layer's bits at {most} rows are "
    if not same:
        text += "those at no other number of rows: uncached runs at two padded lengths can differ as much as cached"
        return f"{text} and uncached."
    text += f"those at {join(same)}" + (f", not at {join(other)}" if other else "")
    return f"{text}: a control at another padded length may show nothing although shape matters."


def _about_process(record: Record) -> list[str]:
    if record["process"]["status"] != "ok":
        return [f"Whether another process gets the same bits cannot be told: {record['process']['reason']}."]
    return _sort(
        {d: compare_processes(record, d) for d in record["dtypes"]},
        "a second process, which compiled for itself, got the same bits at "
        f"{join(record['spec']['process_rows'])} rows.",
        "a second process, which compiled for itself, got other bits. Compare arms within one process; resume with the "
        "compilation cache, which keeps the kernels that were chosen.",
        part="",
    )


def _at_rows(kinds: Mapping[str, str]) -> str:
    """``TF32 at 64 rows``; ``... at any number of rows`` where all agree."""
    if len(set(kinds.values())) == 1:
        return f"{next(iter(kinds.values()))} at {' and '.join(kinds)} rows"
    return " and ".join(f"{kind} at {rows} {'row' if rows == '1' else 'rows'}" for rows, kind in kinds.items())


def _about_fp32(values: Mapping[str, Any]) -> list[str]:
    lines = []
    asked = {
        "highest": ("as jaxkv asks for it (precision highest)", "it is no control here"),
        "default": ("at XLA's default precision", "only precision highest is an fp32 control"),
    }
    for precision, by_rows in values.get("operand_bits", {}).items():
        kinds = {rows: operand_kind(bits) for rows, bits in by_rows.items()}
        name, so = asked[precision]
        errors = "true fp32" if set(kinds.values()) == {"fp32"} else f"{_at_rows(kinds)}: {so}"
        lines.append(f"fp32 {name} has the errors of {errors}.")
    return lines


def _about_sums(dtype: str, values: Mapping[str, Any]) -> str | None:
    found = values.get("sum_bits", {}).items()
    kinds = {out: {rows: sum_kind(bits) for rows, bits in by_rows.items()} for out, by_rows in found}
    if not kinds:
        return None
    held = values["held"]
    wide = " (the arms hold such operands in fp32 here)" if held["operand"] != held["activation"] else ""
    if all(set(by_rows.values()) == {"sum in fp32"} for by_rows in kinds.values()):
        return f"products have the errors of sums in fp32, in whichever dtype they are returned{wide}."
    text = "; ".join(
        f"returned in {'16 bits' if out == dtype else out}, products show {_at_rows(by_rows)}"
        for out, by_rows in kinds.items()
    )
    differ = any(by_rows != kinds["fp32"] for by_rows in kinds.values())
    return text + (". --accumulation decides which a study gets." if differ else f"{wide}.")


def _about_casts(record: Record) -> list[str]:
    lines = []
    for options, label, so in (
        ("ours", "as jaxkv compiles", "a 16-bit study is not 16-bit here"),
        ("default", "with XLA's default options", "programs compiled so are not 16-bit"),
    ):
        casts = {d: values["casts_dropped"] for d, values in record["dtypes"].items() if "casts_dropped" in values}
        found = {d: describe_dropped(shares[options]) for d, shares in casts.items()}
        if kept := [d for d, text in found.items() if not text]:
            lines.append(f"Every probed rounding to {join(kept)} was kept {label}.")
        if dropped := [f"{d} ({text} of results)" for d, text in found.items() if text]:
            lines.append(f"Roundings to {join(dropped)} are dropped {label}: {so}.")
    return lines


def conclude(record: Record) -> list[str]:
    """What follows for a study on this device, in sentences."""
    dtypes, most = record["dtypes"], max(record["spec"]["rows"])
    lines = [*_about_rows(record), *_group({d: _about_many_rows(values, most) for d, values in dtypes.items()})]
    for question, texts in ABOUT.items():
        lines += _sort({d: summarize(values[question]) for d, values in dtypes.items()}, *texts)
    lines += [*_about_process(record), *_group({d: _about_sums(d, values) for d, values in dtypes.items()})]
    lines += [line for values in dtypes.values() for line in _about_fp32(values)]
    lines += [*_about_casts(record), COMPILED_ALONE]
    return [*lines, f"Not measured: {_join_missing(record['missing'])}."] if record["missing"] else lines


def _join_missing(missing: Mapping[str, str]) -> str:
    """What is missing, programs of one reason together and dtypes of one program behind its shape."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for name, why in missing.items():
        shape, _, dtype = name.rpartition(", ")
        by_reason.setdefault(why, {}).setdefault(shape or name, []).extend([dtype] if shape else [])
    return "; ".join(
        ", ".join(shape + (f" in {join(dtypes)}" if dtypes else "") for shape, dtypes in found.items()) + f" ({why})"
        for why, found in by_reason.items()
    )


NOTES = (
    "ulp: units in the last place of an element, or of the root mean square of all where the element is smaller",
    "sums: bits with exact terms / with terms that 16 bits would round; 24 stands for no error at all",
)


def _row_table(record: Record, dtype: str) -> Table:
    counts = [str(n) for n in record["spec"]["rows"][1:]]
    found = record["dtypes"][dtype]["rows"]
    rows = [
        [name, *(describe([found[name][n]] if n in found[name] else [], SHORT) for n in counts)]
        for name in order_operations(found)
    ]
    title = f"{dtype}: elements with other bits than at 1 row, % (largest difference, ulp)"
    return Table(["rows", *counts], rows or [[UNKNOWN, *[""] * len(counts)]], title)


def _other_table(record: Record) -> Table:
    spec, dtypes = record["spec"], record["dtypes"]

    def cell(text: str, names: list[str]) -> str:
        return f"{text}: {join(names)}" if names else text

    def row(label: str, question: str, count: int | None = None) -> list[str]:
        at = None if count is None else str(count)
        return [label, *(cell(*summarize(values[question], at, SHORT)) for values in dtypes.values())]

    most = max(spec["rows"])
    rows = [row(f"{n} rows, not {most}", "rows_from_most", n) for n in spec["rows"][1:] if n != most]
    rows += [row(f"{n} slots, not {spec['slots'][0]}", "slots", n) for n in spec["slots"][1:]]
    rows += [row(f"batch of {n}, not alone", "batch", n) for n in spec["batches"]]
    rows += [row("other neighbours", "neighbours"), row("other rows follow", "following"), row("run again", "rerun")]
    rows += [["another process", *(cell(*compare_processes(record, d)) for d in dtypes)]]
    if any(values["place"] for values in dtypes.values()):
        found = [cell(*summarize(v["place"], form=SHORT)) if v["place"] else "as fp32" for v in dtypes.values()]
        rows.append(["exp, tanh elsewhere", *found])
    return Table(["", *dtypes], rows, "the same row in other circumstances, % (ulp)")


def _arithmetic_table(record: Record) -> Table | None:
    def show(bits: float | None) -> str:
        return "-" if bits is None else f"{bits:.1f}"

    found: dict[str, dict[str, str]] = {}
    for dtype, values in record["dtypes"].items():
        for out, sums in values.get("sum_bits", {}).items():
            said = {n: f"{sum_kind(b)} ({show(b['exact'])} / {show(b['rounded'])})" for n, b in sums.items()}
            found[f"{dtype}, returned in {out}"] = said
        for precision, operands in values.get("operand_bits", {}).items():
            said = {n: f"{operand_kind(b)} ({show(b)})" for n, b in operands.items()}
            found[f"{dtype}, precision {precision}"] = said
    if not found:
        return None
    header = ["", *(f"rows: {n}" for n in next(iter(found.values())))]
    rows = [[label, *said.values()] for label, said in found.items()]
    return Table(header, rows, "products, judged by their errors (bits)")


def _cast_table(record: Record) -> Table | None:
    rows = [
        [f"{dtype}, {'options of jaxkv' if options == 'ours' else 'XLA defaults'}", describe_dropped(shares) or "none"]
        for dtype, values in record["dtypes"].items()
        for options, shares in values.get("casts_dropped", {}).items()
    ]
    return Table(["", "results that escaped"], rows, "roundings to 16 bits") if rows else None


def describe_device(record: Record) -> str:
    """Device, versions, time, in one line."""
    wide = [d for d, values in record["dtypes"].items() if values["held"]["operand"] != values["held"]["activation"]]
    text = f"{record['device']['kind']}, jax {record['environment']['packages']['jax']}"
    text += f"; {record['compilations']} programs compiled, {format_number(record['seconds'], 3)} s in all"
    return text + (f"; operands of {join(wide)} are held in fp32" if wide else "")


def summarize_doctor(run: Run) -> dict[str, Any]:
    """The record of a device with what follows from it. Raises UserError where there is none."""
    if not (found := run.of(DoctorRecord)):
        raise UserError(f"{run.name}: the device was not examined to the end; run the same command again")
    record = to_builtins(found[0])
    return record | {"conclusions": conclude(record)}


def write_doctor(summary: Record) -> list[Block]:
    """The device, what was measured of it, and what follows for a study there."""
    tables = *(_row_table(summary, dtype) for dtype in summary["dtypes"]), _other_table(summary)
    return [
        Paragraph(f"{describe_device(summary)}."),
        *tables,
        *(table for table in (_arithmetic_table(summary), _cast_table(summary)) if table),
        Bullets(NOTES),
        Heading("What follows for a study here", 3),
        Bullets(summary["conclusions"]),
    ]


REPORT = Report("The device", summarize_doctor, write_doctor)
