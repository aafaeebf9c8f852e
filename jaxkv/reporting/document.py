"""A report as blocks, rendered to Markdown and for a terminal; `jaxkv.reporting.html` makes a page of the same blocks.

Text may hold `code` between backticks; everything else is shown as it stands.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import rich.box
import rich.table
import rich.text
from rich.console import Console, ConsoleOptions, Group

from jaxkv.reporting.charts import Chart

T = TypeVar("T")
NUMBER = re.compile(r"-|[+-]?\d[\d.e+-]*( %| of \d+)?")  # what stands to the right in a terminal's column


class Heading(msgspec.Struct, frozen=True):
    """A heading; `name` is the anchor of a section in the table of contents, empty for none."""

    text: str
    level: int = 2
    name: str = ""


class Paragraph(msgspec.Struct, frozen=True):
    """A paragraph; `kind` is a CSS class."""

    text: str
    kind: str = ""


class Bullets(msgspec.Struct, frozen=True):
    items: Sequence[str]


class Brief(msgspec.Struct, frozen=True):
    """A cell, and the words for it that a terminal has room for."""

    text: str
    brief: str


Cell = str | tuple[str, ...] | Brief


class Table(msgspec.Struct, frozen=True):
    """Rows of text under a header; wide ones scroll inside their own box. A tuple becomes lines of one cell.

    `kind` is a CSS class: of 'claims' each row becomes a card on a phone, and its second cell a verdict. `terminal` are
    the columns that a terminal has room for, in its order; all if empty.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    kind: str = ""
    terminal: Sequence[int] = ()


Columns = Mapping[str, Callable[[T], Cell]]  # what makes the cell of an entry under each head


def make_table(
    columns: Columns[T], entries: Iterable[T], caption: str = "", terminal: Sequence[int] = (), kind: str = ""
) -> Table:
    """A row for each entry; the rest is as in `Table`."""
    rows = [[show(entry) for show in columns.values()] for entry in entries]
    return Table(list(columns), rows, caption, kind, terminal)


class Terms(msgspec.Struct, frozen=True):
    """Short names, each with a sentence."""

    items: Sequence[tuple[str, str]]


class Tile(msgspec.Struct, frozen=True):
    """A figure that is seen first: what it is, its value, and its interval and counts."""

    name: str
    value: str
    detail: str


class Tiles(msgspec.Struct, frozen=True):
    items: Sequence[Tile]


class Token(msgspec.Struct, frozen=True):
    """A piece of a text; `kind` are CSS classes, 'parts' where texts part; `said` what it says when pointed at."""

    text: str
    kind: str = ""
    said: str = ""


Side = Sequence[Token]


class Example(msgspec.Struct, frozen=True):
    """One text as two arms go on with it."""

    title: str
    note: str
    sides: tuple[Side, Side]


class Examples(msgspec.Struct, frozen=True):
    """Texts side by side; `key` explains the colours."""

    names: tuple[str, str]
    items: Sequence[Example]
    key: Side = ()


class Code(msgspec.Struct, frozen=True):
    text: str


class Figure(msgspec.Struct, frozen=True):
    """Charts side by side, as many as fit, over one caption; Markdown shows the caption alone."""

    charts: Sequence[Chart]
    caption: str


class Fold(msgspec.Struct, frozen=True):
    """Blocks behind a line that opens them; printed open."""

    text: str
    blocks: Sequence["Block"]


class Only(msgspec.Struct, frozen=True):
    """Blocks for one kind of reader: what fits into a terminal, or what only a page has room for."""

    where: Literal["page", "terminal"]
    blocks: Sequence["Block"]


class Claims(msgspec.Struct, frozen=True):
    """What is said of a paper's claims; a page shows it where that paper was asked for."""

    paper: str
    blocks: Sequence["Block"]


Block = Heading | Paragraph | Bullets | Terms | Tiles | Table | Examples | Code | Figure | Fold | Only | Claims


def select(blocks: Sequence[Block], where: Literal["page", "terminal"]) -> Iterator[Block]:
    """What is shown there, in order."""
    for block in blocks:
        if isinstance(block, Claims) or (isinstance(block, Only) and block.where == where):
            yield from select(block.blocks, where)
        elif not isinstance(block, Only):
            yield block


def _cell(cell: Cell) -> str:
    text = "; ".join(cell) if isinstance(cell, tuple) else cell if isinstance(cell, str) else cell.text
    return " ".join(text.split()).replace("|", "\\|")


def _markdown(block: Block) -> list[str]:
    if isinstance(block, Heading):
        return [f"{'#' * block.level} {block.text}", ""]
    if isinstance(block, Paragraph):
        return [block.text, ""]
    if isinstance(block, Bullets):
        return [*(f"- {text}" for text in block.items), ""]
    if isinstance(block, Table):
        lines = [block.header, ["---"] * len(block.header), *block.rows]
        title = [f"**{block.caption}**", ""] if block.caption else []
        return [*title, *("| " + " | ".join(map(_cell, line)) + " |" for line in lines), ""]
    if isinstance(block, Terms):
        return [line for name, text in block.items for line in (f"**{name}.** {text}", "")]
    if isinstance(block, Tiles):
        return _markdown(Table(["figure", "value", ""], [[t.name, t.value, t.detail] for t in block.items]))
    if isinstance(block, Examples):
        return [line for example in block.items for line in _show_example(block.names, example)]
    if isinstance(block, Code):
        return ["```", block.text, "```", ""]
    if isinstance(block, Figure):
        return [f"Figure (in report.html): {block.caption}", ""]
    inside = (Paragraph(f"{block.text}:"), *block.blocks) if isinstance(block, Fold) else block.blocks
    return [line for inner in select(inside, "page") for line in _markdown(inner)]


def _show_example(names: tuple[str, str], example: Example) -> list[str]:
    """Both texts on a line each, the token at which they part between brackets."""
    lines = [f"**{example.title}.** {example.note}", ""]
    for name, side in zip(names, example.sides, strict=True):
        text = "".join(f"⟦{token.text}⟧" if "parts" in token.kind else token.text for token in side)
        lines.append(f"- {name}: ``{' '.join(text.replace('`', chr(39)).split())}``")
    return [*lines, ""]


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
    """The same report without its figures."""
    lines = [line for block in select(blocks, "page") for line in _markdown(block)]
    return "\n".join([f"# {title}", "", *lines]).rstrip() + "\n"


def to_terminal(blocks: Sequence[Block]) -> Group:
    """Sentences and tables for a terminal; figures, code and a page's first screen are left out."""
    shown: list[Any] = []
    for block in select(blocks, "terminal"):
        title = block.caption if isinstance(block, Table) else block.text if isinstance(block, Heading | Fold) else ""
        if title:
            shown.append(rich.text.Text(f"\n{title}", style="bold"))
        if isinstance(block, Paragraph):
            shown.append(rich.text.Text(block.text))
        elif isinstance(block, Bullets):
            shown += [rich.text.Text(f"- {line}") for line in block.items]
        elif isinstance(block, Fold):
            shown.append(to_terminal(block.blocks))
        elif isinstance(block, Table):
            shown.append(_Grid(block))
    return Group(*shown)


def _brief(cell: Cell) -> str:
    return "\n".join(cell) if isinstance(cell, tuple) else cell if isinstance(cell, str) else cell.brief


class _Grid(msgspec.Struct, frozen=True):
    """A table as wide as the terminal lets it be."""

    block: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[rich.table.Table]:
        columns = self.block.terminal or range(len(self.block.header))
        names, *rows = [[_brief(row[column]) for column in columns] for row in (self.block.header, *self.block.rows)]
        widths = _fit(list(zip(names, *rows, strict=True)), options.max_width - 2 * (len(names) - 1))
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for index, (name, width) in enumerate(zip(names, widths, strict=True)):
            numbers = index > 0 and all(NUMBER.fullmatch(row[index]) for row in rows)
            table.add_column(name, width=width, overflow="fold", justify="right" if numbers else "left")
        for row in rows:
            table.add_row(*map(rich.text.Text, row))
        yield table


def _fit(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths of columns that fit into the room: the widest is narrowed first, and no word cut while another way is."""
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    while sum(widths) > room and max(widths) > 1:
        loose = [index for index, width in enumerate(widths) if width > words[index]] or range(len(widths))
        widths[max(loose, key=widths.__getitem__)] -= 1
    return widths
