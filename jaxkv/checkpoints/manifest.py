"""SHA-256 of the files that are read, and the proof that they stayed as they were meanwhile.

A checkpoint in our own format has a manifest of them, written last and checked first.
"""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from jaxkv.checkpoints.fill import shorten
from jaxkv.errors import UserError
from jaxkv.files import read_json, reading
from jaxkv.provenance import sha256_file

FILE = "manifest.json"
FOLDERS = ("params", "tokenizer")
_REMEDY = "copy the checkpoint again, or convert the original again"


class _Manifest(msgspec.Struct):
    format: Literal[1]
    files: dict[str, str]


def hash_files(paths: Sequence[pathlib.Path]) -> dict[str, str]:
    """sha256 of each file by its name."""
    return {path.name: sha256_file(path) for path in paths}


@contextlib.contextmanager
def unchanged(paths: Sequence[pathlib.Path]) -> Iterator[None]:
    """Ties hashes to what is read: size, time of change and inode are the same before and after.

    Raises UserError if a file is missing, or another program wrote it meanwhile.
    """
    before = [_stamp(path) for path in paths]
    yield
    for path, stamp in zip(paths, before, strict=True):
        if _stamp(path) != stamp:
            raise UserError(f"{path} changed while it was read; wait until it is written, then run again")


def _stamp(path: pathlib.Path) -> tuple[int, ...]:
    with reading(path):
        status = path.stat()
        return status.st_size, status.st_mtime_ns, status.st_ino


def list_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Every file under params/ and tokenizer/, sorted."""
    with reading(directory):
        return sorted(
            pathlib.Path(root) / name
            for folder in FOLDERS
            for root, _, names in os.walk(directory / folder)
            for name in names
        )


def hash_tree(directory: pathlib.Path) -> dict[str, str]:
    """sha256 of every file under params/ and tokenizer/ by its path in the checkpoint."""
    return {path.relative_to(directory).as_posix(): sha256_file(path) for path in list_files(directory)}


def write_manifest(directory: pathlib.Path) -> None:
    """Writes the manifest of what lies in a directory."""
    content = {"format": 1, "files": hash_tree(directory)}
    (directory / FILE).write_text(json.dumps(content, indent=1) + "\n")


def check_manifest(directory: pathlib.Path, found: Mapping[str, str]) -> None:
    """Compares hashes of what lies there with the manifest. Raises UserError with the files that differ."""
    written = read_json(directory / FILE, _Manifest, _REMEDY).files
    faults = {
        "missing": [name for name in written if name not in found],
        "changed": [name for name in written if found.get(name, written[name]) != written[name]],
        "added": [name for name in found if name not in written],
    }
    told = [f"{len(names)} {what}: {shorten(names)}" for what, names in faults.items() if names]
    if told:
        raise UserError(f"{directory} is not as it was written ({'; '.join(told)}); {_REMEDY}")


def summarize(hashes: Mapping[str, str]) -> dict[str, str]:
    """One hash for the arrays and one for the tokenizer, over the hashes of their files.

    Orbax's own notes beside the arrays are left out: they hold times, and two conversions of one model would differ.
    """
    parts: dict[str, list[str]] = {folder: [] for folder in FOLDERS}
    for name, digest in sorted(hashes.items()):
        if name.startswith("tokenizer/") or f"{name.rpartition('/')[0]}/.zarray" in hashes:
            parts[name.partition("/")[0]].append(f"{digest}  {name}\n")
    return {folder: hashlib.sha256("".join(lines).encode()).hexdigest() for folder, lines in parts.items()}
