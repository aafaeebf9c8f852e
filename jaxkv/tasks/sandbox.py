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

    Attributes:
      seconds: wall time, after which its whole process group is killed.
      cpu_seconds: processor time of each process, after which it is killed.
      memory_bytes: address space of each process.
      file_bytes: size of a file it writes.
      processes: beyond those that its user runs already; root is not bound by it.
      namespace: whether namespaces are tried.
    """

    seconds: float = 20.0
    cpu_seconds: int = 10
    memory_bytes: int = 2 << 30
    file_bytes: int = 1 << 20
    processes: int = 64
    namespace: bool = True


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
      ended: 'passed', 'timed out' (by the clock or in processor time), 'killed' (it left the interpreter), or the type
        of what it raised.
      isolation: `network` and `user`, None if the child did not get as far.
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
        late = False
        try:
            child.communicate(program.encode("utf-8", "replace"), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _kill_group(child)
        report.seek(0)
        lines = report.read(4096).decode(errors="replace").splitlines()
    isolation = json.loads(lines[0]) if lines else None
    if len(lines) > 1:
        return Outcome(lines[1], isolation)
    return Outcome("timed out" if late else "killed", isolation)


def _kill_group(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # even of a child that ended: it may have left others behind
    child.wait()
