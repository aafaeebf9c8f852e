"""Ctrl-C and SIGTERM: one line and exit code 130 or 143, whatever the process is at. Imports nothing that is slow.

A handler in Python runs between two bytecodes of the main thread: never while XLA compiles, and what it raises is lost
where it lands in a callback of C code. So a thread of its own is told of the signal as well. It gives the main thread a
moment to unwind, and then ends the process. Nothing recorded is lost by that: a record is on disk before the next one.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

GRACE = 2.0  # seconds to unwind in
SAID = {signal.SIGINT: "stopped", signal.SIGTERM: "stopped by SIGTERM"}
_REST = "nothing recorded is lost, and the same command goes on from there"


class _Watch:
    """What is known of signals in this process."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.guarded = False  # whether somebody catches what the handler raises
        self.last: list[Callable[[], None]] = []
        self.rest = _REST
        self._told = False
        self._telling = threading.RLock()  # a signal may come while the main thread tells of another

    def end(self) -> NoReturn:
        """Writes the line, once for all threads, and ends the process here and now."""
        with self._telling:
            terminal = "\r\x1b[K\x1b[?25h" if sys.__stderr__ and sys.__stderr__.isatty() else ""  # of a progress bar
            line = f"{terminal}error: {SAID[signal.Signals(self.received or signal.SIGINT)]}; {self.rest}\n"
            with contextlib.suppress(OSError):
                if not self._told:
                    os.write(2, line.encode())
            self._told = True
        os._exit(128 + (self.received or signal.SIGINT))

    def handle(self, number: int, frame: object) -> None:
        """What Python calls in the main thread."""
        del frame
        again = self.received is not None
        self.received = number
        if again or not self.guarded:
            self.end()
        raise KeyboardInterrupt

    def wait(self, pipe: int) -> None:
        """What the thread does: a signal's number comes through the pipe as soon as it arrives."""
        number = os.read(pipe, 1)[0]
        if self.guarded:
            select.select([pipe], [], [], GRACE)  # or until a second signal
        self.received = self.received or number
        for call in reversed(self.last):
            with contextlib.suppress(Exception):
                call()
        self.end()


_watch = _Watch()


def watch(rest: str = _REST) -> None:
    """Has this process end as the module says; `rest` is what the line says of what is lost and how to go on.

    For the first lines of an entry module, before its slow imports.
    """
    _watch.rest = rest
    pipe, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in SAID:
        signal.signal(number, _watch.handle)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    tell = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if stopped() and lost.exc_type is KeyboardInterrupt else tell(lost)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_watch.wait, args=(pipe,), daemon=True, name="signals").start()


def _forget() -> None:
    """In a child that a fork made: its signals are its own."""
    signal.set_wakeup_fd(-1)
    for number in SAID:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Around a command: a signal raises KeyboardInterrupt in it, so that what is open can be closed, and then ends it.

    It also does if the command caught the exception, or made another one of it.
    """
    _watch.guarded = True
    try:
        yield
    except KeyboardInterrupt:
        leave()
    except BaseException:
        if stopped():
            leave()
        raise
    if stopped():
        leave()


@contextlib.contextmanager
def at_end(call: Callable[[], None]) -> Iterator[None]:
    """Has `call` called, by another thread, where the body cannot be unwound in time."""
    _watch.last.append(call)
    try:
        yield
    finally:
        _watch.last.remove(call)


def stopped() -> bool:
    """Whether the process was told to stop: what fails after that failed for no other reason."""
    return _watch.received is not None


def leave() -> NoReturn:
    """Ends the process in one line; buffers are written, nothing else is waited for.

    Interpreters that are finalized wait for threads of XLA, which may be at work for long.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _watch.end()
