"""Where a checkpoint is written: never over anything, and under its own name only once it is whole."""

import contextlib
import errno
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Iterator

from jaxkv.errors import UserError
from jaxkv.files import explain

# What libraries that write for us say in exceptions of their own.
_NO_ROOM = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)]


def check_destination(directory: str | pathlib.Path) -> pathlib.Path:
    """The absolute destination. Raises UserError if it holds something already, or nothing can be made there."""
    try:
        path = pathlib.Path(directory).expanduser().absolute()
        taken = _is_there(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir()))
        parent = next(folder for folder in path.parents if folder.exists())
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a zero byte, an unknown ~user
        raise UserError(f"cannot write {directory} ({explain(error)}); choose another destination") from error
    if taken:
        raise UserError(f"{directory} exists and is not empty; remove it or choose another destination")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {directory} (no permission in {parent}); choose another destination")
    return path


def _is_there(path: pathlib.Path) -> bool:
    """Unlike `Path.exists`: a dangling link is something, and a name that no file can have is an error."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def new_directory(directory: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory beside the destination, renamed into place at the end: a crash leaves no half checkpoint.

    Raises:
      UserError: the destination is not empty, or cannot be written.
    """
    path = check_destination(directory)
    partial = path.parent / f".{path.name}.partial-{uuid.uuid4().hex[:8]}"
    made = [folder for folder in path.parents if not folder.exists()]  # the deepest first
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, path)  # an empty directory may be replaced
    except Exception as error:
        if (told := _cannot_write(error)) is None:
            raise
        raise UserError(f"cannot write {directory} ({told}); choose another destination or free some space") from error
    finally:
        if partial.exists():
            _remove(partial)
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: it holds the checkpoint
                folder.rmdir()


def _remove(directory: pathlib.Path) -> None:
    """Removes a directory in which threads of a library may still write after its error, and make it anew."""
    for pause in (0, 0.1, 0.2, 0.4, 0.8):
        time.sleep(pause)
        shutil.rmtree(directory, ignore_errors=True)


def _cannot_write(error: Exception) -> str | None:
    """Why a write failed, or None if that is not what happened."""
    told = next((reason for reason in _NO_ROOM if reason in str(error)), None)
    return explain(error) if told is None and isinstance(error, OSError) else told
