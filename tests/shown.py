"""What a reader of blocks is shown."""

import io

from rich.console import Console

from jaxkv.reporting import document
from jaxkv.reporting.html import to_html


def on_terminal(blocks, width=80):
    console = Console(width=width, file=io.StringIO())
    console.print(document.to_terminal(blocks))
    return console.file.getvalue()


def as_markdown(blocks):
    return document.to_markdown("t", blocks)


def as_html(blocks):
    return to_html("t", blocks)


def show_by(write, width=80):
    """What shows a summary's blocks, which `write` makes: on a terminal, where they fit, as Markdown and as a page."""

    def shown(summary, width=width):
        text = on_terminal(write(summary), width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        return text

    return shown, lambda summary: as_markdown(write(summary)), lambda summary: as_html(write(summary))
