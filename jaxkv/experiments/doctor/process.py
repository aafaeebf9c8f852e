"""Does another process get the same bits? XLA may pick kernels by timing them, so it need not."""

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

Hashes = Mapping[str, Mapping[str, Mapping[str, str]]]  # dtype -> operation -> row count -> hash


def child_environment() -> dict[str, str]:
    """This process's environment and JAX settings, without compiled programs of others and without preallocation."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    root = str(pathlib.Path(__file__).parents[3])
    env |= {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_X64": str(bool(jax.config.read("jax_enable_x64"))).lower(),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    for name in ("jax_platforms", "jax_default_matmul_precision"):
        if value := getattr(jax.config, name):
            env[name.upper()] = str(value)
    return env


def find_error(log: str) -> str:
    """The last line of a log that names an exception, since JAX writes advice below it; else the last line."""
    lines = log.strip().splitlines() or [""]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1][:200]


def start_process(spec: Mapping[str, Any], seconds: float) -> Hashes:
    """Starts doctor again on a spec (DoctorSpec as JSON), and returns the hashes of the second process.

    Raises RuntimeError, in one line, where it could not be started, failed or took longer than the seconds given.
    """
    command = [sys.executable, "-m", "jaxkv.experiments.doctor"]
    asked, env = json.dumps(spec), child_environment()
    try:
        done = subprocess.run(command, input=asked, env=env, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {seconds:.0f} s") from None
    except OSError as error:
        raise RuntimeError(f"it did not start: {error.strerror}") from error
    if done.returncode:
        raise RuntimeError(find_error(done.stderr) or f"exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compare_processes(ours: Hashes, start: Callable[[], Hashes]) -> dict[str, Any]:
    """Which hashes `start` gives as well, as `equal`, with a status ('ok' or 'cannot tell') and the reason for it.

    `start` raises RuntimeError where it has none.
    """

    def cannot_tell(reason: str) -> dict[str, Any]:
        return {"status": "cannot tell", "reason": reason, "equal": {}}

    if not any(ours.values()):
        return cannot_tell("no program to compare with")
    try:
        theirs = start()
    except RuntimeError as error:
        return cannot_tell(str(error))
    equal: dict[str, dict[str, dict[str, bool]]] = {}
    for dtype, by_name in ours.items():
        for name, by_rows in by_name.items():
            other = theirs.get(dtype, {}).get(name, {})
            if found := {rows: value == other[rows] for rows, value in by_rows.items() if rows in other}:
                equal.setdefault(dtype, {})[name] = found
    if not equal:
        return cannot_tell("it computed nothing that can be compared")
    return {"status": "ok", "reason": None, "equal": equal}
