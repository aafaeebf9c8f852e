"""Blocks as one HTML file: style, script and charts inline, nothing fetched.

HTML is built as a tree, so that nothing a record says can become markup. Without its script the page is whole but for
sorting, CSV and what marks say when they are pointed at.
"""

from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any
from xml.etree import ElementTree as ET

from jaxkv.reporting.document import (
    Block,
    Brief,
    Bullets,
    Code,
    Examples,
    Figure,
    Fold,
    Heading,
    Paragraph,
    Side,
    Table,
    Terms,
    Tiles,
    select,
)

SORTED = 3  # rows from which a table can be sorted and saved
BITS = {"bit-equal": "equal-bits", "other bits": "other-bits"}  # how a cell of a matrix begins, and its class


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
    kind, name = f"scroll {block.kind}".strip(), block.caption or "table"
    box = add(parent, "div", class_=kind, tabindex="0", role="region", aria_label=name)
    table = add(box, "table", class_=f"{block.kind}{' sort' if len(block.rows) >= SORTED else ''}".strip())
    if block.caption:
        add(table, "caption", block.caption)
    head = add(add(table, "thead"), "tr")
    for name in block.header:
        add(head, "th", name, scope="col")
    body = add(table, "tbody")
    for row in block.rows:
        line = add(body, "tr")
        for column, (name, cell) in enumerate(zip(block.header, row, strict=True)):
            label = name if block.kind == "claims" else ""  # a card on a phone shows it
            element = add(line, "td" if column else "th", data_label=label, scope="" if column else "row")
            text = cell.text if isinstance(cell, Brief) else cell
            if isinstance(text, tuple):
                for sentence in text:
                    _inline(add(element, "p"), sentence)
            elif block.kind == "claims" and column == 1:
                verdict = "not-seen" if text.startswith("not seen") else text.replace(" ", "-")
                add(element, "span", text, class_=f"verdict {verdict}")
            else:
                _inline(element, text)
                for begin, mark in BITS.items() if block.kind == "matrix" and column else ():
                    if text.startswith(begin):
                        element.set("class", mark)


def _add_tokens(parent: ET.Element, side: Side, kind: str, reached: Sequence[str] = ()) -> None:
    """Tokens of a text; the keyboard reaches those of the kinds `reached`."""
    tokens = add(parent, "p", class_=kind)
    for token in side:
        focus = "0" if any(part in token.kind for part in reached) else ""
        add(tokens, "span", token.text, class_=f"t {token.kind}".strip(), data_tip=token.said, tabindex=focus)


def _add_examples(parent: ET.Element, block: Examples) -> None:
    if block.key:
        _add_tokens(parent, block.key, "note key")
    for example in block.items:
        box = add(parent, "section", class_="example")
        add(box, "h4", example.title)
        _inline(add(box, "p", class_="note"), example.note)
        sides = add(box, "div", class_="sides")
        for name, side in zip(block.names, example.sides, strict=True):
            text = add(sides, "div", class_="side")
            add(text, "h5", name)
            _add_tokens(text, side, "tokens", ("parts", "tie"))


def _add_bullets(parent: ET.Element, block: Bullets) -> None:
    items = add(parent, "ul")
    for text in block.items:
        _inline(add(items, "li"), text)


def _add_terms(parent: ET.Element, block: Terms) -> None:
    terms = add(parent, "dl", class_="said")
    for name, text in block.items:
        add(terms, "dt", name)
        _inline(add(terms, "dd"), text)


def _add_tiles(parent: ET.Element, block: Tiles) -> None:
    tiles = add(parent, "div", class_="tiles")
    for tile in block.items:
        box = add(tiles, "div", class_="tile")
        for part in ("name", "value", "detail"):
            add(box, "p", getattr(tile, part), class_=part)


def _add_figure(parent: ET.Element, block: Figure) -> None:
    figure = add(parent, "figure")
    if block.charts:
        from jaxkv.reporting.drawing import draw  # altair takes a second to import

        add(figure, "div", class_="panels").extend(map(draw, block.charts))
    _inline(add(figure, "figcaption"), block.caption)


def _add_fold(parent: ET.Element, block: Fold) -> None:
    fold = add(parent, "details")
    add(fold, "summary", block.text)
    _add_blocks(fold, block.blocks)


_ADDED: dict[type, Callable[[ET.Element, Any], object]] = {
    Heading: lambda parent, block: add(parent, f"h{block.level}", block.text, id=block.name),
    Paragraph: lambda parent, block: _inline(add(parent, "p", class_=block.kind), block.text),
    Code: lambda parent, block: add(add(parent, "pre", tabindex="0"), "code", block.text),
    Bullets: _add_bullets,
    Terms: _add_terms,
    Tiles: _add_tiles,
    Table: _add_table,
    Examples: _add_examples,
    Figure: _add_figure,
    Fold: _add_fold,
}


def _add_blocks(parent: ET.Element, blocks: Sequence[Block]) -> None:
    for block in select(blocks, "page"):
        _ADDED[type(block)](parent, block)


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One self-contained page. What stands before the first heading is its first screen, before the contents."""
    blocks = list(select(blocks, "page"))
    page = ET.Element("html", {"lang": "en"})
    head = add(page, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add(head, "meta", name="color-scheme", content="light dark")
    add(head, "title", title)
    here = resources.files("jaxkv.reporting")
    style, script = (here.joinpath(f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    add(head, "style", style)
    body = add(page, "body")
    main = add(body, "main")
    add(main, "h1", title)
    first = next((i for i, block in enumerate(blocks) if isinstance(block, Heading)), len(blocks))
    _add_blocks(main, blocks[:first])
    contents = add(main, "nav", aria_label="contents")
    for block in blocks:
        if isinstance(block, Heading) and block.name:
            add(contents, "a", block.text, href=f"#{block.name}")
    _add_blocks(main, blocks[first:])
    add(body, "script", script)
    return "<!DOCTYPE html>\n" + ET.tostring(page, encoding="unicode", method="html") + "\n"
