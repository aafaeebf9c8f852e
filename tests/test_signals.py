"""Ctrl-C and SIGTERM at any moment: one line, 130 or 143, and overviews that tell the truth afterwards."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
from commands import SMALL, run_in_process

from jaxkv import sweep
from jaxkv.errors import UserError
from jaxkv.records import RunDirectory
from jaxkv.writing import take_lock

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
LAUNCH = [sys.executable, "-m", "jaxkv.launch"]


def start(command):
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def start_stuck(name, watch="watch()"):
    """A command that is stuck already."""
    process = start([sys.executable, "-c", STUCK.replace("{name}", name).replace("watch()", watch)])
    assert process.stderr.readline() == "ready\n"
    return process


def end(process, number):
    """Sends a signal, and returns how long it took; checks code and line."""
    begin = time.monotonic()
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == CODES[number], told
    lines = [line for line in told.splitlines() if line.startswith("error: ")]
    said = "stopped by SIGTERM" if number == signal.SIGTERM else "stopped"
    assert lines == [f"error: {said}; nothing recorded is lost, and the same command goes on from there"]
    assert "Traceback" not in told
    return time.monotonic() - begin


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("seconds", [0.4, 1.0])
def test_while_modules_are_imported(tmp_path, number, seconds):
    process = start([*LAUNCH, *SMALL, "--compilation_cache=none", f"--out={tmp_path / 'run'}"])
    time.sleep(seconds)
    assert end(process, number) < 5
    assert not (tmp_path / "run").exists()


# A command that is at something which no exception gets out of: as JAX's callbacks are, and a compilation of XLA.
STUCK = """
from jaxkv import stopping
stopping.watch()
import ctypes, sys, time
from jaxkv.cli import run_command

def sleep():
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        pass

def swallow():
    while True:
        sleep()

class Collected:
    def __del__(self):
        time.sleep(60)

def collect():
    Collected()
    time.sleep(60)

def compile():
    ctypes.CDLL(None).sleep(60)
    ctypes.CDLL(None).sleep(60)

def translate():
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        raise RuntimeError("the callback failed")

def command(argv):
    print("ready", file=sys.stderr, flush=True)
    {name}()

run_command(command)
"""


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("name", ["swallow", "collect", "compile", "translate", "sleep"])
def test_what_swallows_an_exception_is_ended(number, name):
    assert end(start_stuck(name), number) < 10


def test_a_second_signal_does_not_wait():
    process = start_stuck("swallow", "watch(); stopping.GRACE = 600")
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert end(process, signal.SIGINT) < 10


def test_a_forked_child_has_signals_of_its_own():
    code = """
import os, signal, time
from jaxkv import stopping
stopping.watch()
child = os.fork()
if not child:
    time.sleep(60)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], flush=True)
time.sleep(0.5)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (f"{int(signal.SIGTERM)}\nalive\n", "", 0)


def wait_for(found, process):
    give_up = time.monotonic() + 120
    while not found():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.01)


def read_statuses(directory):
    """The status of each condition by its name."""
    try:
        conditions = json.loads((directory / "overview.json").read_text())["conditions"]
    except FileNotFoundError:
        return {}
    return {entry["name"]: entry["status"] for entry in conditions}


def test_a_stopped_sweep_says_what_is_left(tmp_path):
    out = tmp_path / "all"
    process = start([*LAUNCH, *SMALL, "--compilation_cache=none", "--precision=fp16,fp32", f"--out={out}"])
    wait_for(lambda: list(read_statuses(out).values()) == ["running", "waiting"], process)
    end(process, signal.SIGTERM)
    assert list(read_statuses(out).values()) == ["waiting", "waiting"]
    assert sorted(path.name for path in out.iterdir()) == ["overview.json", "overview.md", "sweep.lock"]


@pytest.fixture
def fake(monkeypatch):
    """Conditions that do nothing, but open their directory."""

    def run_study(options, alone):
        with RunDirectory.open(sweep.run_path(options), {"precision": options.precision.name}):
            pass

    monkeypatch.setattr(sweep, "run_study", run_study)
    monkeypatch.setattr(sweep, "gc", mock.Mock())  # they leave nothing to collect


def test_two_sweeps_on_one_directory_end_in_one_line(fake, tmp_path):
    command = [f"--out={tmp_path}", "--precision=fp16,fp32"]
    run_in_process(*command)
    before = (tmp_path / "overview.json").read_bytes()
    with take_lock(tmp_path, "sweep.lock"), pytest.raises(UserError, match="another process is at work in"):
        run_in_process(*command)
    assert (tmp_path / "overview.json").read_bytes() == before


def test_a_condition_that_another_process_runs_has_not_failed(fake, tmp_path, capsys):
    name = "tiny-gemma2-fp16-greedy"
    sweep.write_overview(tmp_path, [])
    (tmp_path / name).mkdir()
    command = [f"--out={tmp_path}", "--precision=fp16,fp32"]
    with take_lock(tmp_path / name, "lock"), pytest.raises(SystemExit) as caught:
        run_in_process(*command)
    assert caught.value.code == 2
    assert list(read_statuses(tmp_path).values()) == ["running elsewhere", "done"]
    assert re.search(rf"error: {name}: another process is at work in", capsys.readouterr().err)
    run_in_process(*command)
    assert list(read_statuses(tmp_path).values()) == ["done", "done"]


def test_what_a_killed_sweep_was_at_is_found_out(fake, tmp_path):
    entries = [sweep.Entry(name, ["divergence"], name, sweep.RUNNING) for name in ("killed", "alive", "gone")]
    sweep.write_overview(tmp_path, entries)
    for name in ("killed", "alive"):
        (tmp_path / name).mkdir()
    with take_lock(tmp_path / "alive", "lock"):
        run_in_process(f"--out={tmp_path}", "--precision=fp16,fp32")
    assert read_statuses(tmp_path) == {
        "tiny-gemma2-fp16-greedy": "done", "tiny-gemma2-fp32-greedy": "done",
        "killed": "waiting", "alive": "running elsewhere",
    }  # fmt: skip
    assert os.listdir(tmp_path / "killed") == []
