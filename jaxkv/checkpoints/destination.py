"""Where a checkpoint is written: never over anything, and under its own name only once it is whole."""

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator

from jaxkv.errors import UserError


def check_destination(directory: str | pathlib.Path) -> pathlib.Path:
    """The absolute destination. Raises UserError if it holds something already."""
    path = pathlib.Path(directory).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{directory} exists and is not empty; remove it or choose another destination")
    return path


@contextlib.contextmanager
def new_directory(directory: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory beside the destination, renamed into place at the end: a crash leaves no half checkpoint.

    Raises:
      UserError: the destination is not empty, or cannot be written.
    """
    path = check_destination(directory)
    partial = path.parent / f".{path.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, path)  # an empty directory may be replaced
    except OSError as error:
        raise UserError(f"cannot write {directory} ({error}); choose another destination or free some space") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
