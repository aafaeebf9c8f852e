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
