"""Files that survive a kill and a full disk: replaced in one step, or grown line by line. Imports no jax."""

import contextlib
import errno
import hashlib
import os
import pathlib
from collections.abc import Iterator

from jaxkv.errors import UserError


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step: a reader, or a kill at any moment, finds the old text or the new one.

    Raises:
      UserError: the directory is not writable or the disk is full.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error) from error


def _sync_directory(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(path: pathlib.Path, error: OSError) -> UserError:
    """What to say of a file or directory that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(f"no space left to write {path}; free some and run the same command again, it resumes")
    return UserError(f"cannot write {path}: {error.strerror or error}; choose another --out")


@contextlib.contextmanager
def new_directories(path: pathlib.Path) -> Iterator[None]:
    """Makes a directory with its parents; those that it made and that are empty are gone again if the body fails.

    Raises:
      UserError: a file is in the way, or it cannot be written.
    """
    missing = [place for place in (path, *path.parents) if not place.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UserError(f"{path} is a file, not a directory; choose another --out") from error
        except OSError as error:
            raise write_error(path, error) from error
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for place in missing:
                place.rmdir()
        raise


def check_writable(path: pathlib.Path) -> None:
    """Finds out before the work, not after it, that a directory cannot be written; leaves nothing behind.

    Raises:
      UserError: it cannot.
    """
    with contextlib.suppress(_Undo), new_directories(path):
        try:
            probe = path / f".probe.{os.getpid()}"
            probe.write_bytes(b"jaxkv")
            probe.unlink()
        except OSError as error:
            raise write_error(path, error) from error
        raise _Undo


class _Undo(Exception):
    pass


class Lines:
    """An append-only file of JSON lines. What follows its last newline is a torn line, and cut off."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        complete = read_complete(path)
        self._length, self._digest = len(complete), hashlib.sha256(complete)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._file, self._length)
            os.fsync(self._file)
            _sync_directory(path.parent)
        except OSError as error:
            raise write_error(path, error) from error

    def append(self, line: bytes) -> None:
        """Writes a line and waits for the disk; on failure the file is cut back to its complete lines."""
        try:
            os.ftruncate(self._file, self._length)
            written = 0
            while written < len(line):
                written += os.pwrite(self._file, line[written:], self._length + written)
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # Else the next append or the next open drops the torn line.
                os.ftruncate(self._file, self._length)
            raise write_error(self.path, error) from error
        self._length += len(line)
        self._digest.update(line)

    def seal(self) -> dict[str, str | int]:
        """`bytes` and `sha256` of the lines."""
        return {"bytes": self._length, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def read_complete(path: pathlib.Path) -> bytes:
    """The complete lines of a file, empty if there is none. Raises UserError if it cannot be read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    return content[: content.rfind(b"\n") + 1]
