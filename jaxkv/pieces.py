"""tokens.json of a run directory: the text of each token that its samples hold, for reports, which have no tokenizer.

It lies beside samples.jsonl, whose bytes are those of the numbers alone; a directory without it is whole.
"""

import json
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxkv.files import read_json
from jaxkv.writing import write_atomically

if TYPE_CHECKING:
    from jaxkv.checkpoints.tokenizer import AnyTokenizer

FILE = "tokens.json"


def write_pieces(directory: pathlib.Path, ids: Iterable[int], tokenizer: "AnyTokenizer") -> None:
    """Writes the text of each id, as it is after a letter; special tokens have none, cut characters are U+FFFD.

    Raises UserError if the directory cannot be written.
    """
    before = tokenizer.encode("a")
    pieces = {str(number): tokenizer.decode_new(before, [number]) for number in sorted(set(ids))}
    write_atomically(directory / FILE, json.dumps(pieces, ensure_ascii=False, indent=0) + "\n")


def read_pieces(directory: pathlib.Path) -> dict[int, str]:
    """The text of each id; empty where there is no such file. Raises UserError if it is none of ours."""
    path = directory / FILE
    return read_json(path, dict[int, str], "delete it") if path.exists() else {}
