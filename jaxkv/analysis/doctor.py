"""What doctor measured, as tables for a terminal and for a report. Reads the record alone."""

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxkv.analysis.doctor_findings import (
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
from jaxkv.analysis.format import format_number

TableData = tuple[str, list[str], list[list[str]]]  # title, header, rows
SHORT = "{share} ({ulp})"
NOTES = (
    "ulp: units in the last place of an element, or of the root mean square of all where the element is smaller",
    "sums: bits with exact terms / with terms that 16 bits would round; 24 stands for no error at all",
)


def _row_table(record: Record, dtype: str) -> TableData:
    counts = [str(n) for n in record["spec"]["rows"][1:]]
    found = record["dtypes"][dtype]["rows"]
    rows = [
        [name, *(describe([found[name][n]] if n in found[name] else [], SHORT) for n in counts)]
        for name in order_operations(found)
    ]
    title = f"{dtype}: elements with other bits than at 1 row, % (largest difference, ulp)"
    return title, ["rows", *counts], rows or [[UNKNOWN, *[""] * len(counts)]]


def _other_table(record: Record) -> TableData:
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
    return "the same row in other circumstances, % (ulp)", ["", *dtypes], rows


def _arithmetic_table(record: Record) -> TableData | None:
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
    return "products, judged by their errors (bits)", ["", *(f"rows: {n}" for n in header)], rows


def _cast_table(record: Record) -> TableData | None:
    rows = [
        [f"{dtype}, {'options of jaxkv' if options == 'ours' else 'XLA defaults'}", describe_dropped(shares) or "none"]
        for dtype, values in record["dtypes"].items()
        for options, shares in values.get("casts_dropped", {}).items()
    ]
    return ("roundings to 16 bits", ["", "results that escaped"], rows) if rows else None


def make_tables(record: Record) -> list[TableData]:
    """All tables of a record: title, header, rows of text."""
    tables = [*(_row_table(record, dtype) for dtype in record["dtypes"]), _other_table(record)]
    return tables + [table for table in (_arithmetic_table(record), _cast_table(record)) if table]


def describe_device(record: Record) -> str:
    """Device, versions, time, in one line."""
    wide = [d for d, values in record["dtypes"].items() if values["held"]["operand"] != values["held"]["activation"]]
    text = f"{record['device']['kind']}, jax {record['environment']['packages']['jax']}"
    text += f"; {record['compilations']} programs compiled, {format_number(record['seconds'], 3)} s in all"
    return text + (f"; operands of {join(wide)} are held in fp32" if wide else "")


def render(record: Record) -> Group:
    """The record for a terminal of 80 columns or more."""
    parts: list[Any] = [Text(describe_device(record))]
    for title, header, rows in make_tables(record):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for name in header:
            table.add_column(name)
        for cells in rows:
            table.add_row(*(Text(cell) for cell in cells))
        parts += [Text(f"\n{title}", style="bold"), table]
    parts += [Text(note) for note in ("", *NOTES)]
    parts += [Text("\nwhat follows for a study here", style="bold"), *(Text(f"- {s}") for s in conclude(record))]
    return Group(*parts)


def to_markdown(record: Record) -> str:
    """The record as a section of a report."""
    lines = [f"# Doctor: {record['device']['kind']}", "", describe_device(record), ""]
    for title, header, rows in make_tables(record):
        cells = [header, ["---"] * len(header), *rows]
        lines += [f"**{title}**", "", *("| " + " | ".join(row) + " |" for row in cells), ""]
    lines += [*(f"{note}.  " for note in NOTES), "", "## What follows for a study here", ""]
    return "\n".join([*lines, *(f"* {sentence}" for sentence in conclude(record)), ""])
