"""Fills the figures that README.md and analysis/README.md quote from the pages and measurements of this folder.

A figure stands between two marks that say where it comes from, and is filled by rebuild.py:

    <!--q study/report.md | Every run | smollm2-135m bf16 greedy | valid-->...<!--/q--> page, section, row, column
    <!--q decode_speed_h100.json | results.0.ms_a_step-->...<!--/q--> a value of a JSON file

`| figure` as a last part quotes a cell without its interval. A .jsonl file holds a record of `jaxkv compare --json`:
what the command prints of it is quoted.
"""

import functools
import itertools
import json
import pathlib
import re

import msgspec

from jaxkv.comparison import Comparison

HERE = pathlib.Path(__file__).parent
QUOTERS = (HERE.parent / "README.md", HERE / "README.md")
MARK = re.compile(r"<!--q ([^>]*?)-->(.*?)<!--/q-->", re.DOTALL)


@functools.cache
def _read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _find_cell(text: str, section: str, row: str, column: str) -> str:
    """The one cell of a section's Markdown tables with this row and column; a section is HEADING or HEADING / CAPTION,
    and a row is told by its first cells, CELL or CELL + CELL.
    """
    heading, _, caption = section.partition(" / ")
    first = row.split(" + ")
    found, head, under, inside = set(), [], False, False
    for line, following in itertools.pairwise([*text.splitlines(), ""]):
        if line.startswith(("#", "**")):
            under = line.strip("#* ") == heading
            inside = under and not caption
        elif caption and line.endswith(":"):
            inside = under and line.strip(": ") == caption
        if re.fullmatch(r"\|( *:?-+:? *\|)+", following.strip()):
            head = _cells(line)
        elif inside and line.startswith("|") and column in head and (cells := _cells(line))[: len(first)] == first:
            found.add(cells[head.index(column)])
    if len(found) != 1:
        raise LookupError(f"{len(found)} cells")
    return found.pop()


def look_up(where: str) -> str:
    """The figure that a mark names. Raises LookupError if there is none, or more than one."""
    file, *parts = (part.strip() for part in where.split("|"))
    text = _read(HERE / file)
    bare = parts[-1:] == ["figure"]
    if bare:
        parts.pop()
    if file.endswith(".jsonl"):
        return "\n".join(["", "```", *msgspec.json.decode(text, type=Comparison).lines(), "```", ""])
    if file.endswith(".json"):
        value = json.loads(text)
        for key in parts[0].split("."):
            value = value[int(key) if isinstance(value, list) else key]
        figure = f"{value:.3g}" if isinstance(value, float) else str(value)
    else:
        section, row, column = parts
        figure = _find_cell(text, section, row, column)
    return re.sub(r" *[(\[].*", "", figure) if bare else figure


def fill(text: str) -> str:
    """The text with every mark's figure as the pages have it today. Raises LookupError, which names the mark."""

    def quote(mark: re.Match[str]) -> str:
        try:
            return f"<!--q {mark[1]}-->{look_up(mark[1])}<!--/q-->"
        except (LookupError, OSError) as error:
            raise LookupError(f"{mark[1]}: {error}") from None

    return MARK.sub(quote, text)


def check() -> list[str]:
    """The files whose figures are not those of the pages."""
    _read.cache_clear()
    return [path.name for path in QUOTERS if fill(text := path.read_text(encoding="utf-8")) != text]


def rewrite() -> None:
    """Fills the marks of every file that quotes."""
    _read.cache_clear()
    for path in QUOTERS:
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
