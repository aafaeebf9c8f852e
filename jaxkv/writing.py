"""What survives a kill and a full disk: files, lines, new directories; and locks. Imports no jax."""

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Iterator

from jaxkv.errors import UserError
from jaxkv.files import explain, reading

# What libraries that write for us say in exceptions of their own.
_NO_ROOM = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)]
LOCK_TRIES, LOCK_PAUSE = 4, 0.05  # a process that asks who has the lock holds it for a moment


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step: a reader, or a kill at any moment, finds the old text or the new one.

    Raises UserError if the directory is not writable or the disk is full.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with _write(path):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


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
    if isinstance(error, FileExistsError):
        return UserError(f"{path} is a file, not a directory; choose another --out")
    return UserError(f"cannot write {path}: {error.strerror or error}; choose another --out")


@contextlib.contextmanager
def _write(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


@contextlib.contextmanager
def new_directories(path: pathlib.Path) -> Iterator[None]:
    """Makes a directory with its parents; those that it made and that are empty are gone again if the body fails.

    Raises UserError if a file is in the way, or it cannot be written.
    """
    missing = [place for place in (path, *path.parents) if not place.exists()]
    try:
        with _write(path):
            path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for place in missing:
                place.rmdir()
        raise


def check_writable(path: pathlib.Path) -> None:
    """Raises UserError if a directory cannot be written, before the work, not after it; leaves nothing behind."""

    class Undo(Exception):
        """Has the directory removed."""

    with contextlib.suppress(Undo), new_directories(path):
        with _write(path):
            probe = path / f".probe.{os.getpid()}"
            probe.write_bytes(b"jaxkv")
            probe.unlink()
        raise Undo


def check_destination(directory: str | pathlib.Path) -> pathlib.Path:
    """The absolute destination. Raises UserError if it holds something already, or nothing can be made there."""
    try:
        path = pathlib.Path(directory).expanduser().absolute()
        taken = False
        with contextlib.suppress(FileNotFoundError):
            path.lstat()  # unlike `exists`: a dangling link is something, and a name that no file can have is an error
            taken = path.is_symlink() or not path.is_dir() or any(path.iterdir())
        parent = next(folder for folder in path.parents if folder.exists())
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a zero byte, an unknown ~user
        raise UserError(f"cannot write {directory} ({explain(error)}); choose another destination") from error
    if taken:
        raise UserError(f"{directory} exists and is not empty; remove it or choose another destination")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {directory} (no permission in {parent}); choose another destination")
    return path


@contextlib.contextmanager
def new_directory(directory: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory beside the destination, renamed into place at the end: a crash leaves no half checkpoint.

    Raises UserError if the destination is not empty, or cannot be written.
    """
    path = check_destination(directory)
    partial = path.parent / f".{path.name}.partial-{uuid.uuid4().hex[:8]}"
    made = [folder for folder in path.parents if not folder.exists()]  # the deepest first
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, path)  # an empty directory may be replaced
    except Exception as error:
        told = next((reason for reason in _NO_ROOM if reason in str(error)), None)
        if told is None and not isinstance(error, OSError):
            raise
        told = told or explain(error)
        raise UserError(f"cannot write {directory} ({told}); choose another destination or free some space") from error
    finally:
        if partial.exists():
            for pause in (0, 0.1, 0.2, 0.4, 0.8):  # a library's threads may write after its error, and make it anew
                time.sleep(pause)
                shutil.rmtree(partial, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: it holds the checkpoint
                folder.rmdir()


class Lines:
    """An append-only file of JSON lines. What follows its last newline is a torn line, and cut off."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        complete = read_complete(path)
        self._length, self._digest = len(complete), hashlib.sha256(complete)
        with _write(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._file, self._length)
            os.fsync(self._file)
            _sync_directory(path.parent)

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
    content = b""
    with reading(path, "check the path"), contextlib.suppress(FileNotFoundError):
        content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


class Busy(UserError):
    """Another process has the directory."""


@contextlib.contextmanager
def take_lock(directory: pathlib.Path, name: str) -> Iterator[None]:
    """Holds a lock file of a directory. Raises Busy if another process holds it, UserError if it cannot be had."""
    with _write(directory):
        lock = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        for left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not left:
                    told = f"another process is at work in {directory}; wait for it to end or choose another --out"
                    raise Busy(told) from error
                time.sleep(LOCK_PAUSE)
            except OSError as error:
                raise UserError(
                    f"cannot lock {directory}: {error.strerror}; choose another --out on a local file system"
                ) from error
        yield
    finally:
        os.close(lock)


def is_locked(directory: pathlib.Path) -> bool:
    """Whether a process has a run directory open; one that was killed has not."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:  # of another kind: taking the lock will tell
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
