"""What the map says: which kernel each arm has for each class of operation, and whether they add in the same order."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import to_builtins

from jaxkv.errors import UserError
from jaxkv.experiments.lowering.figures import draw_trees
from jaxkv.experiments.lowering.record import Kernel, LoweringRecord, Order, ProgramFacts, Recovery, Row
from jaxkv.experiments.report_parts import Report, Run, Summary
from jaxkv.reporting.document import Block, Brief, Bullets, Cell, Code, Fold, Paragraph, Table, make_table
from jaxkv.reporting.format import format_number

COLUMNS = {"prefill": "cached, prompt", "decode": "cached, a step", "recompute": "uncached"}
AT_ONCE, IN_TILES = "at_once", "in_tiles"  # forms of a class in the fenced programs
FENCED = {"prompt": "fenced prefill", "step": "fenced decode", "uncached": "fenced recompute"}
PAIRS = {"prompt": ("prefill", "recompute"), "step": ("decode", "recompute")}  # cached beside uncached
PREDICTED = {"same": "no bit", "different": "bits", "not told": "not told"}  # of aligning a class alone
NOTE = (
    "Of each kernel: whose it is, with the blocks that the program names; dtypes of what is multiplied, of the sum and "
    "of what is written; terms that are added up; its instruction, whose whole line the record has. order: of the "
    "cached arm beside the uncached one, prompt and step. Kernels of one kind that differ in rows or blocks may or may "
    "not add in one order: not told."
)
TREES = (
    "Recovered from outputs alone (FPRev, arXiv 2411.00442): where a large number and its negative cancel, the small "
    "ones that are left tell which summands had come together before. Rounding: the rule under which sums in that "
    "order have all bits of a product of numbers that cancel, in so many columns. fused: a product is not rounded "
    "before it is added; rounded: it is; either: both fit; cut25: terms added at once are cut at 25 bits, as in "
    "Hopper's tensor cores."
)
SHORT = {"float32": "fp32", "f32": "fp32", "f16": "fp16", "bf16": "bf16", "f64": "fp64"}


def name_layers(layers: Sequence[int]) -> str:
    """``0-3, 5``; "-" for none."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "-"


def describe_kernel(kernel: Kernel) -> str:
    """``cuBLASLt (algorithm 0): fp16, fp32, fp16; 4096``."""
    blocks = ", ".join(f"{name} {value}" for name, value in kernel.blocks.items() if value)  # a scalar's tile has none
    dtypes = ", ".join(SHORT.get(one, one) for one in (kernel.operands, kernel.sums_in, kernel.writes))
    what = {"product": "", "sum": " sum", "multiply and add": " multiply and add", "sum of parts": " sum of parts"}
    return f"{kernel.by}{what[kernel.kind]}{f' ({blocks})' if blocks else ''}: {dtypes}; {kernel.summed}"


def _show_kernels(row: Row, program: str) -> Cell:
    found = row.kernels.get(program, [])
    first = {describe_kernel(one): one.instruction for one in reversed(found)}
    lines = tuple(f"{said} `{first[said]}`" for said in dict.fromkeys(map(describe_kernel, found)))
    names = dict.fromkeys(f"{one.by}{' loop' if one.kind == 'multiply and add' else ''}" for one in found)
    if len(lines) < 2:
        return Brief(lines[0] if lines else "-", ", ".join(names) or "-")
    return lines


def join_orders(orders: Iterable[Order]) -> Order:
    """What is said of several sums together: one that differs is enough, and one that is not told."""
    found = set(orders)
    return "different" if "different" in found else "not told" if "not told" in found else "same"


def compare_kinds(one: Iterable[Kernel], other: Iterable[Kernel]) -> Order:
    """What kernels of different shapes say of their orders.

    Kernels of another kind, maker, number of terms or dtype of the sum add in another order. Of kernels that differ in
    their rows and blocks it is not told: not even by the depth of a block, since tensor cores that go on with one
    accumulator add in one order whatever its depth (as measured: analysis/README.md).
    """

    def kinds(kernels: Iterable[Kernel]) -> set[tuple[object, ...]]:
        return {(k.kind, k.by, k.operands, k.sums_in, k.summed) for k in kernels}

    return "different" if kinds(one) != kinds(other) else "not told"


def read_order(row: Row, pair: str) -> Order:
    """What the programs of a pair say of the order in a row of the map, or of its forms."""
    if row.orders[pair] == "same":
        return "same"
    forms = any(":" in name for name in row.kernels)
    one, other = (f"{FENCED[pair]}:{AT_ONCE}", f"{FENCED[pair]}:{IN_TILES}") if forms else PAIRS[pair]
    return compare_kinds(row.kernels[one], row.kernels[other])


def summarize_lowering(run: Run) -> dict[str, Any]:
    """The record with what follows from it. Raises UserError where there is none."""
    if not (found := run.of(LoweringRecord)):
        raise UserError(f"{run.name}: the programs were not compiled to the end; run the same command again")
    (record,) = found
    return {"experiment": "lowering", "record": to_builtins(record), "conclusions": conclude(record)}


def restore(summary: Summary) -> LoweringRecord:
    """The record of a summary."""
    return msgspec.convert(summary["record"], LoweringRecord)


def conclude(record: LoweringRecord) -> list[str]:
    """What the map says of the arms, a sentence each."""
    if record.regime == "aligned":
        return ["Both arms are one program, so that every sum has one order in both, whatever it is."]
    lines = []
    for pair, said in (
        ("step", "One row of a step against all rows"),
        ("prompt", "The prompt's rows against all rows"),
    ):
        by = list_orders(record, pair)
        told = [f"{order}: {', '.join(by[order])}" for order in ("different", "not told", "same") if order in by]
        lines.append(f"{said}: {'; '.join(told)}.")
    narrow = sorted({row.operation for row in record.rows for one in _all_kernels(row) if _is_narrow(one)})
    wide = record.precision.get("accumulation") == "float32"
    if wide and narrow:
        lines.append(f"Sums that are taken in 16 bits where fp32 is asked for: {', '.join(narrow)}.")
    elif wide:
        lines.append("No program states a sum in 16 bits.")
    if record.unplaced:
        lines.append(f"{len(record.unplaced)} sums of the programs could not be told to be of a class.")
    return lines


def list_orders(record: LoweringRecord, pair: str) -> dict[Order, list[str]]:
    """The classes by what is said of their order in a pair of programs."""
    by: dict[Order, list[str]] = {}
    for operation in dict.fromkeys(row.operation for row in record.rows):
        if (order := judge(record, record.rows, operation, pair)) is not None:
            by.setdefault(order, []).append(operation)
    return by


def find_changes(one: LoweringRecord, other: LoweringRecord) -> list[str]:
    """The classes whose kernels are others in another map of the same arms: what a change of options or flags did."""

    def identify(one: Kernel) -> tuple[object, ...]:
        """Without what autotuning may choose anew for the same sum."""
        return one.kind, one.by, one.operands, one.sums_in, one.writes, one.summed, tuple(one.shape)

    def outline(record: LoweringRecord) -> dict[str, set[tuple[object, ...]]]:
        found: dict[str, set[tuple[object, ...]]] = {}
        for row in (*record.rows, *record.forms):
            for program, kernels in row.kernels.items():
                told = {(program, *identify(kernel)) for kernel in kernels}
                found.setdefault(row.operation, set()).update(told)
        return found

    mine, theirs = outline(one), outline(other)
    return [name for name in dict.fromkeys([*mine, *theirs]) if mine.get(name) != theirs.get(name)]


def count_rows(record: LoweringRecord, pair: str, forms: bool = False) -> tuple[int, int]:
    """Rows of the products whose orders are compared: of two arms, or of the two forms of a class."""
    shapes = record.shapes
    one = {"prompt": shapes.prefill, "step": 1, "uncached": shapes.slots}[pair]
    return one, record.tile if forms else shapes.slots


def judge(record: LoweringRecord, rows: Sequence[Row], operation: str, pair: str) -> Order | None:
    """What is said of a class's order in all layers together: by the programs, and where they do not tell by its trees.

    None if no row of the class has this pair. `rows` are those of the record, or its forms.
    """
    mine = [row for row in rows if row.operation == operation and pair in row.orders]
    if not mine:
        return None
    told = join_orders(read_order(row, pair) for row in mine)
    if told != "not told":
        return told
    kernels = [one for row in mine for found in row.kernels.values() for one in found]
    counts = count_rows(record, pair, rows is record.forms)
    trees = compare_trees(record.recovered, operation, counts, kernels)
    sums = any(one.kind == "sum" for one in kernels)
    return "not told" if trees == "same" and sums else trees


def compare_trees(
    recovered: Sequence[Recovery], operation: str, rows: tuple[int, int], kernels: Sequence[Kernel]
) -> Order:
    """Whether the products of a class have the same trees at two numbers of rows; not told if one has none.

    A tree counts where the product by itself was compiled to a kernel that the program has too.
    """
    known = {_outline(one) for one in kernels}
    by: dict[str, list[str]] = {}
    for one in recovered:
        if one.operation == operation and one.rows in rows:
            fits = one.shape is not None and {_outline(kernel) for kernel in one.kernels} <= known
            by.setdefault(one.weight, []).append(one.shape.key if fits and one.shape is not None else "")
    if not by or any(len(keys) < 2 or "" in keys for keys in by.values()):
        return "not told"
    return "same" if all(len(set(keys)) == 1 for keys in by.values()) else "different"


def _outline(kernel: Kernel) -> tuple[object, ...]:
    return kernel.kind, kernel.by, kernel.summed, kernel.sums_in, tuple(sorted(kernel.blocks.items()))


def _all_kernels(row: Row) -> list[Kernel]:
    return [one for kernels in row.kernels.values() for one in kernels]


def _is_narrow(kernel: Kernel) -> bool:
    return kernel.sums_in in ("f16", "bf16")


def _write_map(record: LoweringRecord) -> Table:
    shown = [name for name in COLUMNS if name in record.programs]
    rows: list[list[Cell]] = [
        [
            row.operation,
            name_layers(row.layers),
            *(_show_kernels(row, program) for program in shown),
            tuple(f"{pair}: {_say_order(record, row, pair)}" for pair in PAIRS if pair in row.orders) or "-",
        ]
        for row in record.rows
    ]
    return Table(
        ["operation", "layers", *(COLUMNS[name] for name in shown), "order"], rows, kind="wrap", terminal=(0, 1, -1)
    )


def _say_order(record: LoweringRecord, row: Row, pair: str) -> str:
    order = read_order(row, pair)
    if order == "not told" and (found := judge(record, record.rows, row.operation, pair)) != "not told":
        return f"{found} (recovered)"
    return order


def find_evidence(record: LoweringRecord, operation: str, pair: str = "step") -> tuple[Kernel, Kernel] | None:
    """Two kernels of a class, of the cached arm and of the uncached one, that differ; None where no program says so."""
    for row in record.rows:
        if row.operation == operation and pair in row.orders and read_order(row, pair) == "different":
            one, other = (row.kernels[name] for name in PAIRS[pair])
            return _pick(one, other), _pick(other, one)
    return None


def _pick(kernels: Sequence[Kernel], others: Sequence[Kernel]) -> Kernel:
    """The largest of the kernels that the others have none like."""
    there = {_outline(one) for one in others}
    own = [one for one in kernels if _outline(one) not in there] or kernels
    return max(own, key=lambda one: (one.kind in ("product", "multiply and add"), one.summed))


def show_lines(kernels: tuple[Kernel, Kernel]) -> Code:
    """The two lines of the programs, one below the other."""
    return Code("\n".join(f"{one.program}: {one.line}" for one in kernels))


def _write_lines(record: LoweringRecord) -> list[Block]:
    blocks: list[Block] = []
    for operation in dict.fromkeys(row.operation for row in record.rows):
        if (found := find_evidence(record, operation)) is not None:
            blocks += [Paragraph(f"{operation}: {found[0].by} for one row, {found[1].by} for all."), show_lines(found)]
    return [Fold("The lines of the programs beside each other", blocks)] if blocks else []


def _write_forms(record: LoweringRecord) -> list[Block]:
    """What aligning a class alone can change, as its two forms in the fenced programs predict."""
    if not record.forms:
        return []
    names = {"prompt": "cached, prompt", "step": "cached, a step", "uncached": "uncached"}
    table = []
    for operation in dict.fromkeys(row.operation for row in record.forms):
        orders = [judge(record, record.forms, operation, name) for name in names]
        table.append([operation, *(PREDICTED[order] if order else "-" for order in orders)])
    title = f"what aligning a class alone can change, in tiles of {record.tile} rows"
    return [Table(["operation", *names.values()], table, title)]


def _write_trees(record: LoweringRecord) -> list[Block]:
    """The orders that were recovered, one of a kind."""
    if not record.recovered:
        return []
    found: dict[tuple[str, ...], list[str]] = {}
    for one in record.recovered:
        by = ", ".join(dict.fromkeys(kernel.by for kernel in one.kernels))
        said = one.shape.text if one.shape is not None else f"none: {one.fault}"
        seen = "-" if one.shape is None else f"{one.rounding}, {_count_columns(one)}"
        summed = "-" if one.shape is None else str(one.shape.summands)
        found.setdefault((str(one.rows), summed, by, said, "yes" if one.again else "no", seen), []).append(one.weight)
    rows = [[*key[:2], ", ".join(weights), *key[2:]] for key, weights in found.items()]
    head = ["rows", "summands", "products", "kernel", "order", "again the same", "rounding"]
    of = f"{record.model['name']}, {record.precision['name']}, on {record.device.get('kind')}"
    table = Table(head, rows, f"{of}: the order in which it adds", "wrap", terminal=(0, 2, 4))
    return [*_draw(record), table, Paragraph(TREES, "note")]


def _count_columns(one: Recovery) -> str:
    most = max(one.reproduced.values(), default=0)
    return f"{most} columns" if most == one.columns else f"at most {most} of {one.columns} columns"


def _draw(record: LoweringRecord) -> list[Block]:
    """The largest product of one row and of all rows beside each other."""
    found = {}
    for one in record.recovered:
        if one.weight == "q" and one.shape is not None and one.rows in count_rows(record, "step"):
            rows = "one row" if one.rows == 1 else f"{one.rows} rows"
            found[one.rows] = (f"q, {rows}, {', '.join(dict.fromkeys(k.by for k in one.kernels))}", one.shape)
    return [draw_trees(list(found.values()))] if found else []


def _gib(count: int) -> str:
    return format_number(count / 2**30, 3)


def _write_programs(programs: Mapping[str, ProgramFacts]) -> Table:
    fits = {None: "not known", True: "yes", False: "no"}
    columns = {
        "program": lambda item: item[0],
        "weights, cache, batch (GiB)": lambda item: _gib(item[1].arguments),
        "temporaries (GiB)": lambda item: _gib(item[1].temporaries),
        "GFLOP": lambda item: "-" if item[1].flops is None else format_number(item[1].flops / 1e9, 3),
        "GB read and written": lambda item: (
            "-" if item[1].accessed is None else format_number(item[1].accessed / 1e9, 3)
        ),
        "chips": lambda item: str(item[1].chips),
        "fits": lambda item: fits[item[1].fits],
        "compiled in (s)": lambda item: format_number(item[1].seconds, 3),
    }
    title = "programs, on each chip; of a loop one step counts"
    return make_table(columns, programs.items(), title, terminal=(0, 1, 2, 6, 7))


def describe_target(record: LoweringRecord) -> str:
    """Model, precision, target, versions and shapes in one sentence."""
    shapes, packages = record.shapes, record.environment["packages"]
    kind = record.device.get("kind")
    chips = max(facts.chips for facts in record.programs.values())
    over = f", over {chips} chips" if chips > 1 else ""
    return (
        f"{record.model['name']} for {kind}{over}, jax {packages['jax']}: a prompt of {shapes.prompt} tokens in "
        f"{shapes.prefill} rows, {shapes.slots} slots, batch of {shapes.batch}."
    )


def write_lowering(summary: Summary) -> list[Block]:
    """The map, what follows from it, its lines, and what the programs take."""
    record = restore(summary)
    return [
        Paragraph(describe_target(record)),
        Bullets(summary["conclusions"]),
        _write_map(record),
        Paragraph(NOTE, "note"),
        *_write_lines(record),
        *_write_forms(record),
        *_write_trees(record),
        _write_programs(record.programs),
    ]


REPORT = Report("The order of sums", summarize_lowering, write_lowering)
