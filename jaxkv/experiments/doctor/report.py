"""What doctor measured, and its blocks. Reads the record alone."""

from typing import Any

from msgspec import to_builtins

from jaxkv.errors import UserError
from jaxkv.experiments.doctor.findings import (
    UNKNOWN,
    Record,
    compare_processes,
    conclude,
    describe,
    describe_dropped,
    join,
    operand_kind,
    order_operations,
    sum_kind,
    summarize,
)
from jaxkv.experiments.doctor.record import DoctorRecord
from jaxkv.experiments.report_parts import Report, Run
from jaxkv.reporting.document import Block, Bullets, Heading, Paragraph, Table
from jaxkv.reporting.format import format_number

SHORT = "{share} ({ulp})"
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

    rows: list[list[str]] = []
    header: list[str] = []
    for dtype, values in record["dtypes"].items():
        for out, sums in values.get("sum_bits", {}).items():
            header = list(sums)
            cells = [f"{sum_kind(b)} ({show(b['exact'])} / {show(b['rounded'])})" for b in sums.values()]
            rows.append([f"{dtype}, returned in {out}", *cells])
        for precision, operands in values.get("operand_bits", {}).items():
            header = list(operands)
            cells = [f"{operand_kind(b)} ({show(b)})" for b in operands.values()]
            rows.append([f"{dtype}, precision {precision}", *cells])
    if not rows:
        return None
    return Table(["", *(f"rows: {n}" for n in header)], rows, "products, judged by their errors (bits)")


def _cast_table(record: Record) -> Table | None:
    rows = [
        [f"{dtype}, {'options of jaxkv' if options == 'ours' else 'XLA defaults'}", describe_dropped(shares) or "none"]
        for dtype, values in record["dtypes"].items()
        for options, shares in values.get("casts_dropped", {}).items()
    ]
    return Table(["", "results that escaped"], rows, "roundings to 16 bits") if rows else None


def make_tables(record: Record) -> list[Table]:
    """All tables of a record."""
    tables = [*(_row_table(record, dtype) for dtype in record["dtypes"]), _other_table(record)]
    return tables + [table for table in (_arithmetic_table(record), _cast_table(record)) if table]


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
    return [
        Paragraph(f"{describe_device(summary)}."),
        *make_tables(summary),
        Bullets(NOTES),
        Heading("What follows for a study here", 3),
        Bullets(summary["conclusions"]),
    ]


REPORT = Report("The device", summarize_doctor, write_doctor)
