"""Runs the program on standard input under limits; the first process of a sandbox, a script of its own.

    python -I sandbox_child.py LIMITS

LIMITS is JSON: `cpu_seconds`, `memory_bytes`, `file_bytes`, `processes`, and `namespace`, whether namespaces are tried.
Standard output gets two lines: what the isolation turned out to be, as JSON, before the program starts, and how it
ended after. A program that leaves the interpreter itself never gets its second line.
"""

import ctypes
import json
import os
import resource
import signal
import sys

NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 8, 38
READ_SEARCH, CAPABILITY_VERSION = 2, 0x20080522  # CAP_DAC_READ_SEARCH, _LINUX_CAPABILITY_VERSION_3
NOBODY = 65534


def enter_namespaces(libc):
    """Leaves the network and the table of processes behind. Returns whether the kernel let us."""
    return any(libc.unshare(NEW_NET | NEW_PID | user) == 0 for user in (0, NEW_USER))


def drop_root(libc):
    """Root becomes nobody. Returns the user's name, "root" where that cannot be.

    Nobody may be unable to read Python's own library; it then keeps the one capability of reading everything.
    """
    try:
        os.setgroups([])
        os.seteuid(NOBODY)
        readable = os.access(json.__file__, os.R_OK, effective_ids=True)
        os.seteuid(0)
        if not readable and not _holds(READ_SEARCH):
            return "root"
        libc.prctl(PR_SET_KEEPCAPS, int(not readable), 0, 0, 0)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:  # a user namespace without that user
        return "root"
    if readable:
        return "nobody"
    bit = 1 << READ_SEARCH
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)(bit, bit, 0, 0, 0, 0)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
    return "nobody, reading everything"


def _holds(capability):
    with open("/proc/self/status") as file:
        held = next(int(line.split()[1], 16) for line in file if line.startswith("CapPrm"))
    return bool(held >> capability & 1)


def count_tasks(table="/proc"):
    """Processes and threads of this user, which the kernel's limit counts together with those of a program."""
    found = 0
    for entry in os.scandir(table):
        if entry.name.isdigit():
            try:
                found += len(os.listdir(f"{entry.path}/task")) if entry.stat().st_uid == os.getuid() else 0
            except OSError:  # it ended meanwhile
                continue
    return found


def set_limits(limits, others):
    """Sets the limits of this process and those it starts; `others` are processes that run already."""
    for name, value in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"] + others),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def block_sockets():
    """Takes sockets out of Python, where there is no namespace to do it for every program."""
    import _socket
    import socket

    class Blocked:
        def __init__(self, *_, **__):
            raise PermissionError("no network here")

    for module in (socket, _socket):
        for name in ("socket", "SocketType", "create_connection", "create_server", "fromfd", "socketpair"):
            if hasattr(module, name):
                setattr(module, name, Blocked)


def run(program, report):
    """Runs the program and reports how it ended: 'passed', or the type of what it raised."""
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "program"})
        ended = "passed"
    except SystemExit:
        ended = "SystemExit"
    except BaseException as error:
        kind = type(error)  # with a dot in the name of one that is no builtin, so that none is called 'passed'
        ended = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    os.write(report, ended.encode() + b"\n")


def main():
    """Isolates itself, forks so as to be inside, runs the program there, and ends with it."""
    limits = json.loads(sys.argv[1])
    program = sys.stdin.read()
    report, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    libc = ctypes.CDLL(None, use_errno=True)
    root = not os.getuid()
    others = 0 if root else count_tasks()
    inside = limits["namespace"] and enter_namespaces(libc)
    child = os.fork()
    if child:
        _, status, used = os.wait4(child, 0)
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        # The first process of a namespace ignores SIGXCPU and is killed outright.
        spent = used.ru_utime + used.ru_stime > limits["cpu_seconds"] - 0.5
        if signalled == signal.SIGXCPU or (signalled == signal.SIGKILL and spent):
            os.write(report, b"timed out\n")
        return
    user = drop_root(libc) if root else "own"
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    set_limits(limits, others)
    if not inside:
        block_sockets()
    network = "own network and process namespaces" if inside else "sockets blocked in Python"
    os.write(report, json.dumps({"network": network, "user": user}).encode() + b"\n")
    run(program, report)
    os._exit(0)


if __name__ == "__main__":
    main()
