"""A report as blocks, rendered to one HTML file, to Markdown and for a terminal from the same blocks.

Text may hold `code` between backticks; everything else is shown as it stands. HTML is built as a tree, so that nothing
a record says can become markup.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Literal, TypeVar
from xml.etree import ElementTree as ET

import rich.box
import rich.table
import rich.text
from rich.console import Console, ConsoleOptions, Group

T = TypeVar("T")
NUMBER = re.compile(r"-|[+-]?\d[\d.e+-]*( %| of \d+)?")  # what stands to the right in a terminal's column


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading; `name` is the anchor of a section in the table of contents, empty for none."""

    text: str
    level: int = 2
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A paragraph; `kind` is a CSS class."""

    text: str
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Brief:
    """A cell, and the words for it that a terminal has room for."""

    text: str
    brief: str


Cell = str | tuple[str, ...] | Brief


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a header; wide ones scroll inside their own box.

    Attributes:
      header: one cell a column.
      rows: cells; a tuple of sentences becomes lines of one cell.
      caption: shown above, empty for none.
      kind: CSS class. In a table of kind 'claims' each row becomes a card on a phone, and its second cell a verdict.
      terminal: the columns that a terminal has room for, in its order; all if empty.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    kind: str = ""
    terminal: Sequence[int] = ()


def make_table(
    columns: Mapping[str, Callable[[T], Cell]],
    entries: Iterable[T],
    caption: str = "",
    terminal: Sequence[int] = (),
    kind: str = "",
) -> Table:
    """A row for each entry; `columns` holds what makes its cell under each head. The rest is as in `Table`."""
    rows = [[show(entry) for show in columns.values()] for entry in entries]
    return Table(list(columns), rows, caption, kind, terminal)


@dataclasses.dataclass(frozen=True)
class Code:
    """Commands, line by line."""

    text: str


@dataclasses.dataclass(frozen=True)
class Figure:
    """Drawings side by side, as many as fit, under one caption; Markdown shows the caption alone."""

    drawings: Sequence[ET.Element]
    caption: str


@dataclasses.dataclass(frozen=True)
class Fold:
    """Blocks behind a line that opens them; printed open."""

    text: str
    blocks: Sequence["Block"]


@dataclasses.dataclass(frozen=True)
class Only:
    """Blocks for one kind of reader: what fits into a terminal, or what only a page has room for."""

    where: Literal["page", "terminal"]
    blocks: Sequence["Block"]


Block = Heading | Paragraph | Bullets | Table | Code | Figure | Fold | Only


def _select(blocks: Sequence[Block], where: Literal["page", "terminal"]) -> Iterator[Block]:
    """What is shown there, in order."""
    for block in blocks:
        if not isinstance(block, Only):
            yield block
        elif block.where == where:
            yield from _select(block.blocks, where)


def add(parent: ET.Element, tag: str, text: str | None = None, **attributes: str) -> ET.Element:
    """Appends an element; a trailing underscore of an attribute's name is dropped, others become hyphens."""
    names = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value}
    element = ET.SubElement(parent, tag, names)
    element.text = text
    return element


def _inline(parent: ET.Element, text: str) -> None:
    """Adds text in which backticks mark code."""
    last: ET.Element | None = None
    for index, part in enumerate(text.split("`")):
        if index % 2:
            last = add(parent, "code", part)
        elif last is None:
            parent.text = (parent.text or "") + part
        else:
            last.tail = part


def _add_table(parent: ET.Element, block: Table) -> None:
    box = add(parent, "div", class_=f"scroll {block.kind}".strip(), tabindex="0", role="region")
    box.set("aria-label", block.caption or "table")
    table = add(box, "table", class_=block.kind)
    if block.caption:
        add(table, "caption", block.caption)
    head = add(add(table, "thead"), "tr")
    for name in block.header:
        add(head, "th", name, scope="col")
    body = add(table, "tbody")
    for row in block.rows:
        line = add(body, "tr")
        for column, (name, cell) in enumerate(zip(block.header, row, strict=True)):
            element = add(line, "td" if column else "th", data_label=name, scope="" if column else "row")
            if block.kind == "claims" and column == 1 and isinstance(cell, str):
                add(element, "span", cell, class_=f"verdict {cell.replace(' ', '-')}")
            elif not isinstance(cell, tuple):
                _inline(element, cell if isinstance(cell, str) else cell.text)
            else:
                for sentence in cell:
                    _inline(add(element, "p"), sentence)


def _add_block(parent: ET.Element, block: Block) -> None:
    if isinstance(block, Heading):
        add(parent, f"h{block.level}", block.text, id=block.name)
    elif isinstance(block, Paragraph):
        _inline(add(parent, "p", class_=block.kind), block.text)
    elif isinstance(block, Bullets):
        items = add(parent, "ul")
        for text in block.items:
            _inline(add(items, "li"), text)
    elif isinstance(block, Table):
        _add_table(parent, block)
    elif isinstance(block, Code):
        add(add(parent, "pre", tabindex="0"), "code", block.text)
    elif isinstance(block, Figure):
        figure = add(parent, "figure")
        add(figure, "div", class_="panels").extend(block.drawings)
        _inline(add(figure, "figcaption"), block.caption)
    elif isinstance(block, Fold):
        fold = add(parent, "details")
        add(fold, "summary", block.text)
        for inner in _select(block.blocks, "page"):
            _add_block(fold, inner)


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One self-contained page: style and figures inline, no script, nothing fetched."""
    blocks = list(_select(blocks, "page"))
    page = ET.Element("html", {"lang": "en"})
    head = add(page, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add(head, "meta", name="color-scheme", content="light dark")
    add(head, "title", title)
    style = resources.files("jaxkv.reporting").joinpath("report.css").read_text(encoding="utf-8")
    add(head, "style", style)
    main = add(add(page, "body"), "main")
    add(main, "h1", title)
    first = next((i for i, block in enumerate(blocks) if isinstance(block, Heading)), len(blocks))
    for block in blocks[:first]:
        _add_block(main, block)
    contents = add(main, "nav", aria_label="contents")
    for block in blocks:
        if isinstance(block, Heading) and block.name:
            add(contents, "a", block.text, href=f"#{block.name}")
    for block in blocks[first:]:
        _add_block(main, block)
    return "<!DOCTYPE html>\n" + ET.tostring(page, encoding="unicode", method="html") + "\n"


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
    if isinstance(block, Code):
        return ["```", block.text, "```", ""]
    if isinstance(block, Figure):
        return [f"Figure (in report.html): {block.caption}", ""]
    inside = block.blocks if isinstance(block, Only) else (Paragraph(f"{block.text}:"), *block.blocks)
    return [line for inner in _select(inside, "page") for line in _markdown(inner)]


def to_markdown(title: str, blocks: Sequence[Block]) -> str:
    """The same report without its figures."""
    lines = [f"# {title}", ""]
    for block in _select(blocks, "page"):
        lines += _markdown(block)
    return "\n".join(lines).rstrip() + "\n"


def to_terminal(blocks: Sequence[Block]) -> Group:
    """Sentences and tables for a terminal; figures and code are left out."""
    shown: list[Any] = []
    for block in _select(blocks, "terminal"):
        if isinstance(block, Heading):
            shown.append(rich.text.Text(f"\n{block.text}", style="bold"))
        elif isinstance(block, Paragraph):
            shown.append(rich.text.Text(block.text))
        elif isinstance(block, Bullets):
            shown += [rich.text.Text(f"- {line}") for line in block.items]
        elif isinstance(block, Fold):
            shown += [rich.text.Text(f"\n{block.text}", style="bold"), to_terminal(block.blocks)]
        elif isinstance(block, Table):
            if block.caption:
                shown.append(rich.text.Text(f"\n{block.caption}", style="bold"))
            shown.append(_Grid(block))
    return Group(*shown)


def _brief(cell: Cell) -> str:
    return "\n".join(cell) if isinstance(cell, tuple) else cell if isinstance(cell, str) else cell.brief


@dataclasses.dataclass(frozen=True)
class _Grid:
    """A table as wide as the terminal lets it be."""

    block: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[rich.table.Table]:
        columns = self.block.terminal or range(len(self.block.header))
        rows = [[_brief(row[column]) for column in columns] for row in self.block.rows]
        names = [self.block.header[column] for column in columns]
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
