"""Run directories: resuming, killing, locking, refusing; and the sample schema."""

import errno
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import make_invalid, make_sample
from sealing import reseal

from jaxkv import provenance, records
from jaxkv.errors import UserError
from jaxkv.overview.gather import read_runs
from jaxkv.records import RunDirectory, to_record
from jaxkv.writing import check_writable

CONFIG = {"model": {"name": "tiny", "layers": 2}, "precision": "fp16", "lengths": (1, 2)}


def record(index: int) -> dict:
    return {"experiment": "other", "key": ["other", index], "value": index / 3}


def fill(path: pathlib.Path, indices) -> None:
    with RunDirectory.open(path, CONFIG) as run:
        for index in indices:
            if ("other", index) not in run.done_keys():
                run.append(record(index))


def assert_refused(path, said):
    """By whoever reads the directory and by whoever writes to it, in one line."""
    for read in (lambda: records.read_run(path), lambda: RunDirectory.open(path, CONFIG)):
        with pytest.raises(UserError, match=said) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_new_directory_is_written_and_resumed(tmp_path):
    path = tmp_path / "deep" / "run"
    with RunDirectory.open(path, CONFIG, "--precision=fp16\n", {"device": "cpu"}) as run:
        assert len(run.run["sessions"]) == 1
        run.append(record(1))
        run.append_timing({"key": ["other", 1], "seconds": 0.1})
        run.record_provenance({"hash": "abc"})
    with RunDirectory.open(path, {**CONFIG, "lengths": [1, 2]}, "--other\n", {"device": "gpu"}) as run:
        assert len(run.run["sessions"]) == 2
        assert run.done_keys() == {("other", 1)}
        assert run.read() == [to_record(record(1))]
        assert records.read_lines(path / "samples.jsonl") == [record(1)]
    assert (path / "run.flags").read_text() == "--precision=fp16\n"
    first, second = json.loads((path / "run.json").read_text())["sessions"]
    assert (first["device"], first["hash"], second["device"], second["done_before"]) == ("cpu", "abc", "gpu", 1)
    assert len((path / "timing.jsonl").read_text().splitlines()) == 1
    assert not list(path.glob("*.tmp"))


def test_another_config_is_refused_by_key(tmp_path):
    fill(tmp_path, [1])
    other = {"model": {"name": "tiny", "layers": 3}, "precision": "fp16", "lengths": (1, 2), "seed": 1}
    said = r"model\.layers is 2 there, 3 here, seed is unset there, 1 here; .*--out.*delete"
    with pytest.raises(UserError, match=said):
        RunDirectory.open(tmp_path, other)
    fill(tmp_path, [2])  # The lock was let go of.


def test_fingerprint_ignores_order_and_sees_values():
    assert records.fingerprint({"a": 1, "b": (2,)}) == records.fingerprint({"b": [2], "a": 1})
    assert records.fingerprint({"a": 1}) != records.fingerprint({"a": 1.5})


def run_python(code):
    """What a process of its own says on its standard error."""
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    return child.stderr


def test_two_processes_on_one_directory_end_in_one_error(tmp_path):
    code = f"""
        from jaxkv.records import RunDirectory
        RunDirectory.open({str(tmp_path)!r}, {CONFIG!r})
    """
    with RunDirectory.open(tmp_path, CONFIG) as run:
        assert "Busy: another process is at work" in run_python(code)
        with pytest.raises(UserError, match="another process"):
            RunDirectory.open(tmp_path, CONFIG)
        run.append(record(1))
    fill(tmp_path, [2])


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, 400))
def test_any_torn_tail_is_dropped_and_run_again(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("run")
    fill(path, range(5))
    whole = (path / "samples.jsonl").read_bytes()
    (path / "samples.jsonl").write_bytes(whole[:cut])
    reseal(path, 0)
    with RunDirectory.open(path, CONFIG) as run:
        assert run.done_keys() == {("other", i) for i in range(whole[:cut].count(b"\n"))}
    assert (path / "samples.jsonl").read_bytes() == whole[: whole[:cut].rfind(b"\n") + 1]
    fill(path, range(5))
    assert (path / "samples.jsonl").read_bytes() == whole


def test_a_run_that_still_goes_on_can_be_read_and_is_left_alone(tmp_path):
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.append(record(1))
        with open(tmp_path / "samples.jsonl", "ab") as file:
            file.write(b'{"key": ["oth')
        before = (tmp_path / "samples.jsonl").read_bytes()
        records.read_run(tmp_path)
        assert records.read_lines(tmp_path / "samples.jsonl") == [record(1)]
        assert (tmp_path / "samples.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "junk", [b'{"key": [1', b"\0\0\0\0", b"[1]", b'{"key":["other",9],"value":NaN}', b"\xff", b"{}"]
)
def test_a_corrupt_complete_line_is_an_error_naming_the_line(tmp_path, junk):
    fill(tmp_path, range(3))
    lines = (tmp_path / "samples.jsonl").read_bytes().split(b"\n")
    lines[1] = junk
    (tmp_path / "samples.jsonl").write_bytes(b"\n".join(lines))
    reseal(tmp_path)
    assert_refused(tmp_path, r"samples\.jsonl, line 2: ")


def test_duplicate_keys_are_an_error(tmp_path):
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.append(record(1))
        with pytest.raises(ValueError, match="recorded already"):
            run.append(record(1))
    with open(tmp_path / "samples.jsonl", "ab") as file:
        file.write(records.to_line(record(1)))
    with pytest.raises(UserError, match="twice, in lines 1 and 2"):
        RunDirectory.open(tmp_path, CONFIG)


@pytest.mark.parametrize("key", [None, [], "text", [1.5], [True], [None]])
def test_a_record_needs_a_natural_key(tmp_path, key):
    with RunDirectory.open(tmp_path, CONFIG) as run, pytest.raises(ValueError, match="key"):
        run.append({"key": key})


def test_a_full_disk_leaves_whole_records(tmp_path, monkeypatch):
    write = os.pwrite

    def half_then_full(descriptor, data, offset):
        if len(data) > 5:
            return write(descriptor, data[:5], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.append(record(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", half_then_full)
            with pytest.raises(UserError, match=r"no space left to write .*samples\.jsonl; free some"):
                run.append(record(1))
        assert run.done_keys() == {("other", 0)}
        assert records.read_lines(tmp_path / "samples.jsonl") == [record(0)]
        run.append(record(1))
        assert records.read_lines(tmp_path / "samples.jsonl") == [record(0), record(1)]


def test_a_real_file_limit_ends_in_one_error_and_resumes(tmp_path):
    code = f"""
        import resource
        from jaxkv.records import RunDirectory
        run = RunDirectory.open({str(tmp_path)!r}, {CONFIG!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        for i in range(50):
            run.append({{"experiment": "other", "key": ["other", i], "value": i / 3}})
    """
    assert "UserError: no space left" in run_python(code)
    undisturbed = tmp_path.with_name("undisturbed")
    for path in (tmp_path, undisturbed):
        fill(path, range(50))
    assert (tmp_path / "samples.jsonl").read_bytes() == (undisturbed / "samples.jsonl").read_bytes()


def test_an_unwritable_place_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="choose another --out"):
            RunDirectory.open(bad, CONFIG)
    monkeypatch.setattr(pathlib.Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "denied")))
    with pytest.raises(UserError, match="denied; choose another --out"):
        RunDirectory.open(tmp_path / "run", CONFIG)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 99, "config": {}, "sessions": []}', b"\xff\xfe\x00",
     b"[" * 100000, b'{"format": 1, "format"'],
)  # fmt: skip
def test_a_bad_run_json_is_one_line(tmp_path, content):
    fill(tmp_path, [1])
    (tmp_path / "run.json").write_bytes(content)
    assert_refused(tmp_path, r"run\.json")


def test_sigkill_at_any_moment(tmp_path):
    total = 400
    code = f"""
        import sys
        from jaxkv.records import RunDirectory
        with RunDirectory.open(sys.argv[1], {CONFIG!r}, "--flag=1\\n", {{"device": "cpu"}}) as run:
            done = run.done_keys()
            print("open", flush=True)
            for i in range({total}):
                if ("other", i) not in done:
                    run.append({{"experiment": "other", "key": ["other", i], "pad": "x" * (37 * i % 900)}})
                    run.append_timing({{"i": i}})
    """
    (tmp_path / "child.py").write_text(textwrap.dedent(code))
    command = [sys.executable, str(tmp_path / "child.py")]
    generator = np.random.default_rng(0)
    for attempt in range(8):
        child = subprocess.Popen([*command, str(tmp_path / "killed")], stdout=subprocess.PIPE)
        if attempt % 2:
            child.stdout.readline()
            time.sleep(generator.uniform(0, 0.02))
        else:
            time.sleep(generator.uniform(0.1, 0.4))
        child.send_signal(signal.SIGKILL)
        child.communicate()
    for name in ("killed", "undisturbed"):
        subprocess.run([*command, str(tmp_path / name)], check=True, stdout=subprocess.DEVNULL)
    killed, undisturbed = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("killed", "undisturbed"))
    assert killed == undisturbed
    run, samples = records.read_run(tmp_path / "killed")
    assert [s.key for s in samples] == [("other", i) for i in range(total)]
    assert len(run["sessions"]) > 1
    assert not list((tmp_path / "killed").glob("*.tmp"))


@given(st.lists(st.floats(width=64)))
def test_json_is_strict_and_floats_come_back(values):
    line = records.to_line({"key": [1], "values": np.array(values, np.float64)})
    back = [float(v) for v in json.loads(line, parse_constant=pytest.fail)["values"]]
    np.testing.assert_array_equal(np.array(back), np.array(values))


def test_numpy_values_become_plain():
    plain = records.to_plain(
        {"a": np.float32("inf"), "b": np.bool_(True), "c": np.int32(3), "d": np.array([[1, 2]]), 5: -np.inf}
    )
    assert plain == {"a": "inf", "b": True, "c": 3, "d": [[1, 2]], "5": "-inf"}
    assert type(plain["b"]) is bool


def test_provenance_has_what_it_promises(tmp_path):
    revision = provenance.git_revision()
    assert revision is None or len(revision.removesuffix("-dirty")) == 40
    environment = provenance.environment()
    assert environment["packages"]["numpy"] == np.__version__
    (tmp_path / "f").write_bytes(b"abc")
    assert provenance.sha256_file(tmp_path / "f").startswith("ba7816bf8f01cfea414140de5dae2223")
    with pytest.raises(UserError, match="cannot be read"):
        provenance.sha256_file(tmp_path / "none")


def test_valid_samples_pass_and_are_written(tmp_path):
    to_record(make_sample())
    to_record(make_invalid())
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.append(make_sample(1))
        run.append(make_invalid(2))
        broken = make_sample(4)
        broken["teacher_forced"]["kl"][2] = float("nan")
        with pytest.raises(ValueError, match=r"^teacher_forced\.kl\[2\]: expected `float`, got `str`"):
            run.append(broken)
        assert run.done_keys() == {("divergence", 1), ("divergence", 2)}


# Files that were changed by hand.


def write_samples(path):
    with RunDirectory.open(path, CONFIG, "--seed=1\n") as run:
        for index in range(3):
            run.append(make_sample(index))
    return path


RUN_JSON = {
    "sessions junk": (lambda run: run.update(sessions=[1, "x"]), "sessions"),
    "sessions null": (lambda run: run.update(sessions=None), "sessions"),
    "experiments null": (lambda run: run["config"].update(experiments=None), "config.experiments"),
    "model a list": (lambda run: run["config"].update(model=[]), "config.model"),
    "config a list": (lambda run: run.update(config=[]), "config"),
    "a gate of text": (lambda run: run["sessions"][0].update(gate="passed"), "gate"),
    "half a gate": (lambda run: run["sessions"][0].update(gate={"passed": True}), "gate"),
    "a format of text": (lambda run: run.update(format="1"), "format"),
    "a negative size": (lambda run: run["samples"].update(bytes=-1), "samples.bytes"),
    "another config": (lambda run: run["config"].update(precision="fp32"), "changed by hand"),
    "another fingerprint": (lambda run: run.update(fingerprint="0" * 64), "changed by hand"),
}


@pytest.mark.parametrize(("change", "said"), RUN_JSON.values(), ids=RUN_JSON)
def test_a_changed_run_json_is_one_line(tmp_path, change, said):
    write_samples(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    change(run)
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert_refused(tmp_path, rf"run\.json.*{re.escape(said)}")


def test_binary_run_flags_are_one_line(tmp_path):
    write_samples(tmp_path)
    (tmp_path / "run.flags").write_bytes(b"--seed=1\n\xff\xfe")
    with pytest.raises(UserError, match=r"run\.flags line 2: is not UTF-8"):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.update(experiment=[]), "experiment"),
        (lambda r: [arm["tokens"].pop() for arm in r["arms"].values()], "4 entries, expected 3"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_when_read(tmp_path, change, said):
    write_samples(tmp_path)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    record = json.loads(lines[1])
    change(record)
    lines[1] = json.dumps(record)
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"samples\.jsonl was changed by hand"):
        records.read_run(tmp_path)
    reseal(tmp_path)
    assert_refused(tmp_path, rf"samples\.jsonl, line 2.*{said}")


def test_lines_that_are_gone_or_others_are_noticed(tmp_path):
    write_samples(tmp_path)
    whole = (tmp_path / "samples.jsonl").read_bytes()
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["samples"] == {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    first, rest = whole.split(b"\n", 1)
    for changed in (rest, first + b"\n", whole.replace(b"0.5", b"0.6", 1), b""):
        (tmp_path / "samples.jsonl").write_bytes(changed)
        said = r"samples\.jsonl " + ("was changed by hand" if len(changed) == len(whole) else "is missing or cut")
        assert_refused(tmp_path, said)
        assert (tmp_path / "samples.jsonl").read_bytes() == changed
    (tmp_path / "samples.jsonl").write_bytes(whole)
    assert len(records.read_run(tmp_path)[1]) == 3


def test_run_json_learns_of_samples_while_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "SEALING", -1.0)
    with RunDirectory.open(tmp_path, CONFIG) as run:
        for index in range(2):
            run.append(make_sample(index))
            known = json.loads((tmp_path / "run.json").read_text())["samples"]["bytes"]
            assert known == (tmp_path / "samples.jsonl").stat().st_size


def test_a_run_of_an_older_version_is_read(tmp_path):
    write_samples(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    del run["samples"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert len(records.read_run(tmp_path)[1]) == 3
    with RunDirectory.open(tmp_path, CONFIG) as run:
        assert len(run.done_keys()) == 3


@pytest.mark.parametrize("name", ["report.md", "summary.json", "samples.jsonl", "notes.txt", "folder"])
def test_a_folder_of_the_user_is_left_alone(tmp_path, name):
    if name == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"is no run directory and holds {name}; choose another --out"):
        RunDirectory.open(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_fails_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "write_atomically", lambda *_: (_ for _ in ()).throw(UserError("no space left")))
    with pytest.raises(UserError, match="no space left"):
        RunDirectory.open(tmp_path / "runs" / "run", CONFIG)
    assert not list(tmp_path.iterdir())
    check_writable(tmp_path / "runs" / "run")
    assert not list(tmp_path.iterdir())
