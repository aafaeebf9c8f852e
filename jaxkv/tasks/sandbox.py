"""Runs a Python program that nobody has read: in a child process of its own session, under limits, without network.

The child is `python -I` in an empty folder that is removed afterwards. Where the kernel allows, it has network and
process namespaces of its own (Linux `unshare`), so that it reaches no host and nothing it starts outlives it; elsewhere
Python's sockets are blocked in it, which keeps honest programs off the network but not hostile ones. A child of root
becomes the user nobody, which can write next to nothing. The file system is not hidden: what the child's user may read
or write, it may; and a program that sets out to report success falsely can. `Outcome.isolation` says which held.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

CHILD = pathlib.Path(__file__).with_name("sandbox_child.py")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may use.

    After `seconds` of wall time its whole process group is killed. Each process has `cpu_seconds`, an address space of
    `memory_bytes`, and files of `file_bytes`; `processes` are those beyond what its user runs already, and do not bind
    root. `namespace` says whether namespaces are tried.
    """

    seconds: float = 20.0
    cpu_seconds: int = 10
    memory_bytes: int = 2 << 30
    file_bytes: int = 1 << 20
    processes: int = 64
    namespace: bool = True


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended: 'passed', 'timed out' (by the clock or in processor time), 'killed' (it left the
    interpreter), or the type of what it raised; `isolation` of `network` and `user`, None if it did not get as far.
    """

    ended: str
    isolation: dict[str, str] | None


def run_program(program: str, limits: Limits) -> Outcome:
    """Runs a program to its end or its limits."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as report:
        os.chmod(folder, 0o777)  # the child may be another user; the folder's name is only known to us
        child = subprocess.Popen(
            [sys.executable, "-I", str(CHILD), json.dumps(dataclasses.asdict(limits))],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        ended = "killed"
        try:
            child.communicate(program.encode("utf-8", "replace"), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            ended = "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # even of a child that ended: it may have left others behind
            child.wait()
        report.seek(0)
        lines = report.read(4096).decode(errors="replace").splitlines()
    return Outcome(lines[1] if len(lines) > 1 else ended, json.loads(lines[0]) if lines else None)
