"""The command as a user meets it: a run, its resumption after SIGKILL, and one line for every mistake."""

import json
import signal
import subprocess
import sys
import time

import pytest
from cases import daily
from commands import DATA, SMALL, refuse, run_in_process, run_process
from plain_records import read_run
from sample_records import make_invalid

from jaxkv import launch
from jaxkv.errors import UserError


@pytest.fixture(scope="session")
def finished(tmp_path_factory, cache):
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("run") / "whole"
    done = run_process(*SMALL, cache, f"--out={out}", "-v")
    assert done.returncode == 0, done.stderr
    return out, done


def test_a_run_leaves_table_report_and_records(finished):
    out, done = finished
    assert "cached vs uncached" in done.stdout
    assert f"report: {out / 'report.md'}" in done.stdout
    assert "Traceback" not in done.stderr
    run, samples = read_run(out)
    assert [s["problem"] for s in samples] == [0, 1, 2, 3, 4]
    sampling = {"sampler": "greedy", "temperature": 1.0, "top_k": None, "top_p": None, "seed": 0}
    assert run["config"]["sampling"] == sampling
    assert run["config"]["precision"]["cache"] == "float16"
    assert run["config"]["checkpoint"]["add_bos"] is True
    assert run["sessions"][0]["packages"]["jax"]
    assert json.loads((out / "summary.json").read_text())["divergence"]["problems"] == {
        "asked": 5, "total": 5, "ok": 5, "invalid": 0,
    }  # fmt: skip
    assert samples[0]["controls"]["cached_rerun"]["bit_equal"] == [True] * 6
    assert samples[1]["controls"]["cached_rerun"] is None
    assert samples[0]["controls"]["uncached_stepwise"]["bit_equal"] == [True] * 6
    assert samples[1]["controls"]["uncached_stepwise"] is None
    assert run["sessions"][0]["gate"] == {"passed": True, "problems": 2, "steps": 12, "tile": 8}
    assert "gate passed: aligned arms bit-equal at 12 of 12 steps of 2 problems (tile 8)" in done.stdout


def test_without_v_a_sentence_comes_first_and_the_controls_are_a_line(finished, cache, capsys):
    run_in_process(*SMALL, cache, f"--out={finished[0]}")
    name, sentence, *lines = capsys.readouterr().out.splitlines()
    assert name == finished[0].name
    assert sentence.startswith(("Equal bit for bit: ", "Rounding: ", "Cause open: "))
    assert max(map(len, lines[:-1])) <= 80
    said = " ".join(" ".join(lines).split())
    assert "texts that part" in said
    assert "0 of 5" in said
    (controls,) = [line for line in lines if line.startswith("controls:")]
    assert controls.startswith("controls: aligned arms bit-equal in 1 of 1 runs; ")
    assert controls.endswith("; 4 others: 0 of 24 flip")


def test_chosen_problems_keep_their_numbers_and_results(finished, cache, tmp_path):
    out = tmp_path / "chosen"
    run_in_process(*SMALL, cache, f"--out={out}", "--problems=4,2", "--num_problems=2", "--gate=off")
    run, samples = read_run(out)
    whole = {sample["problem"]: sample for sample in read_run(finished[0])[1]}
    assert [s["problem"] for s in samples] == run["config"]["problems"] == [4, 2]
    assert "--problems=4,2" in (out / "run.flags").read_text().splitlines()
    for sample in samples:
        assert sample["arms"] == whole[sample["problem"]]["arms"]
        assert sample["teacher_forced"] == whole[sample["problem"]]["teacher_forced"]


@pytest.mark.parametrize("moments", daily(["3"], ["3", "03"]))
def test_killed_at_any_moment_ends_with_the_same_samples(finished, cache, tmp_path, moments):
    out = tmp_path / "killed"
    samples = out / "samples.jsonl"
    command = [sys.executable, "-m", "jaxkv.launch", *SMALL, cache, f"--out={out}"]
    for wanted in map(int, moments):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < give_up:
            if samples.exists() and samples.read_bytes().count(b"\n") >= wanted:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with open(samples, "ab") as file:
        file.write(b'{"experiment":"divergence","problem":4,"key":["diver')  # what a kill amid a write leaves
    run_in_process(*SMALL, cache, f"--out={out}")
    assert samples.read_bytes() == (finished[0] / "samples.jsonl").read_bytes()


@pytest.mark.parametrize(("name", "there", "here"), [("seed", 0, 1), ("tile", 8, 16)])
def test_another_configuration_is_refused(finished, cache, name, there, here):
    with pytest.raises(UserError, match=rf"another configuration: .*decoding\.{name} is {there} there, {here} here"):
        run_in_process(*SMALL, cache, f"--out={finished[0]}", f"--{name}={here}")


def test_run_flags_replay_and_files_may_move_between_sessions(finished, tmp_path, capsys):
    out, _ = finished
    before = (out / "samples.jsonl").read_bytes()
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes((DATA / "problems.jsonl").read_bytes())
    run_in_process(f"--flagfile={out / 'run.flags'}", f"--data={moved}")
    assert "5 of 5 records of divergence are done already" in capsys.readouterr().err
    assert (out / "samples.jsonl").read_bytes() == before


MISTAKES = [
    (["--modle=gemma2-2b"], "modle"),
    (["--model=gemma2-2b", "--precision=fp16"], "--checkpoint"),  # no network, no local weights
]


@pytest.mark.parametrize(("arguments", "wanted"), daily(MISTAKES[1:], MISTAKES))
def test_exit_codes_without_traceback(arguments, wanted):
    done = run_process(*arguments)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert wanted in lines[0]


def test_mistakes_are_lines():
    assert "modle" in refuse("--modle=gemma2-2b")
    assert "choose another --out" in refuse("--model=gemma2-2b", "--out=/proc/nowhere")
    with pytest.raises(UserError, match="unexpected argument 'gemma2-2b'"):
        launch.launch(["launch", "gemma2-2b"])


def test_doctor_needs_no_model(tmp_path, capsys, monkeypatch):
    lines = map(json.loads, (DATA / "records.jsonl").read_text().splitlines())
    record = next(record for record in lines if record["experiment"] == "doctor")
    monkeypatch.setattr("jaxkv.experiments.doctor.run.run_doctor", lambda spec: record)
    arguments = ["--experiments=doctor", "--compilation_cache=none", f"--out={tmp_path}"]
    run_in_process(*arguments)
    shown = capsys.readouterr().out
    assert f"report: {tmp_path / 'report.md'}" in shown
    assert read_run(tmp_path)[1] == [record]
    monkeypatch.setattr("jaxkv.experiments.doctor.run.run_doctor", lambda spec: pytest.fail("examined twice"))
    run_in_process(*arguments)
    assert capsys.readouterr().out == shown


def test_a_run_without_a_valid_problem_fails_and_says_why(cache, tmp_path, monkeypatch, capsys):
    records = [make_invalid(0), make_invalid(1)]
    found = iter([(records, {"problems": [0, 1], "seconds": {}, "tokens": {}})])
    monkeypatch.setattr("jaxkv.experiments.driver.run_missing", lambda *_: found)
    command = [*SMALL, cache, "--gate=off", "--num_problems=2", f"--out={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=r"none of its 2 samples is valid, all at resid_pre, layer 8 \(inf, cached"):
        run_in_process(*command)
    assert "report: " in capsys.readouterr().out
    monkeypatch.setattr("jaxkv.experiments.driver.run_missing", lambda *_: iter(()))
    with pytest.raises(UserError, match="problem 0 was asked in other tokens"):  # the samples above are made up
        run_in_process(*command)
    monkeypatch.setattr("jaxkv.study.hash_tokens", lambda ids: records[0]["prompt_sha256"])
    with pytest.raises(UserError, match="none of its 2 samples is valid"):
        run_in_process(*command)
