"""Lock files: which process has a directory, found out even of those that were killed."""

import contextlib
import fcntl
import os
import pathlib
import time
from collections.abc import Iterator

from jaxkv.errors import UserError
from jaxkv.writing import write_error

LOCK_TRIES, LOCK_PAUSE = 4, 0.05  # a process that asks who has the lock holds it for a moment


class Busy(UserError):
    """Another process has the directory."""


@contextlib.contextmanager
def take_lock(directory: pathlib.Path, name: str) -> Iterator[None]:
    """Holds a lock file of a directory. Raises Busy if another process holds it, UserError if it cannot be had."""
    try:
        lock = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise write_error(directory, error) from error
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
    except BlockingIOError:
        return True
    except OSError:  # taking the lock will tell
        return False
    finally:
        os.close(descriptor)
    return False
