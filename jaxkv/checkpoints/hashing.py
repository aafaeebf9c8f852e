"""SHA-256 of the files that are read, and the proof that they stayed as they were meanwhile."""

import contextlib
import hashlib
import pathlib
from collections.abc import Iterator, Sequence

from jaxkv.errors import UserError
from jaxkv.files import reading


def hash_file(path: pathlib.Path) -> str:
    """sha256 of a file. Raises UserError if it cannot be read."""
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(paths: Sequence[pathlib.Path]) -> dict[str, str]:
    """sha256 of each file by its name."""
    return {path.name: hash_file(path) for path in paths}


@contextlib.contextmanager
def unchanged(paths: Sequence[pathlib.Path]) -> Iterator[None]:
    """Ties hashes to what is read: size, time of change and inode are the same before and after.

    Raises:
      UserError: a file is missing, or another program wrote it meanwhile.
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
