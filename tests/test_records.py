"""Run directories: resuming, killing, locking, refusing; and the sample schema."""

import errno
import json
import os
import pathlib
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
from jaxkv.records import RunDirectory
from jaxkv.schemas import validate_sample

CONFIG = {"model": {"name": "tiny", "layers": 2}, "precision": "fp16", "lengths": (1, 2)}


def record(index: int) -> dict:
    return {"experiment": "other", "key": ["other", index], "value": index / 3}


def fill(path: pathlib.Path, indices) -> None:
    with RunDirectory.open(path, CONFIG) as run:
        for index in indices:
            if ("other", index) not in run.done_keys():
                run.append(record(index))


def test_a_new_directory_is_written_and_resumed(tmp_path):
    path = tmp_path / "deep" / "run"
    with RunDirectory.open(path, CONFIG, "--precision=fp16\n", {"device": "cpu"}) as run:
        assert not run.resumed
        run.append(record(1))
        run.append_timing({"key": ["other", 1], "seconds": 0.1})
        run.record_provenance({"hash": "abc"})
    with RunDirectory.open(path, {**CONFIG, "lengths": [1, 2]}, "--other\n", {"device": "gpu"}) as run:
        assert run.resumed
        assert run.done_keys() == {("other", 1)}
        assert run.read() == [record(1)]
    assert (path / "run.flags").read_text() == "--precision=fp16\n"
    first, second = json.loads((path / "run.json").read_text())["sessions"]
    assert (first["device"], first["hash"], second["device"], second["done_before"]) == ("cpu", "abc", "gpu", 1)
    assert len((path / "timing.jsonl").read_text().splitlines()) == 1
    assert not list(path.glob("*.tmp"))


def test_another_config_is_refused_by_key(tmp_path):
    fill(tmp_path, [1])
    other = {"model": {"name": "tiny", "layers": 3}, "precision": "fp16", "lengths": (1, 2), "seed": 1}
    with pytest.raises(
        UserError, match=r"model\.layers is 2 there, 3 here, seed is unset there, 1 here; .*--out.*delete"
    ):
        RunDirectory.open(tmp_path, other)
    fill(tmp_path, [2])  # The lock was let go of.


def test_fingerprint_ignores_order_and_sees_values():
    assert records.fingerprint({"a": 1, "b": (2,)}) == records.fingerprint({"b": [2], "a": 1})
    assert records.fingerprint({"a": 1}) != records.fingerprint({"a": 1.5})


def test_two_processes_on_one_directory_end_in_one_error(tmp_path):
    code = f"""
        from jaxkv.records import RunDirectory
        RunDirectory.open({str(tmp_path)!r}, {CONFIG!r})
    """
    with RunDirectory.open(tmp_path, CONFIG) as run:
        child = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
        assert "Busy: another process is at work" in child.stderr
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
        assert records.read_run(tmp_path)[1] == [record(1)]
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
    with pytest.raises(UserError, match=r"samples\.jsonl, line 2: "):
        RunDirectory.open(tmp_path, CONFIG)
    with pytest.raises(UserError, match=r"samples\.jsonl, line 2: "):
        records.read_run(tmp_path)


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
        assert run.read() == [record(0)]
        run.append(record(1))
        assert run.read() == [record(0), record(1)]


def test_a_real_file_limit_ends_in_one_error_and_resumes(tmp_path):
    code = f"""
        import resource
        from jaxkv.records import RunDirectory
        run = RunDirectory.open({str(tmp_path)!r}, {CONFIG!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        for i in range(50):
            run.append({{"experiment": "other", "key": ["other", i], "value": i / 3}})
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert "UserError: no space left" in child.stderr
    fill(tmp_path, range(50))
    fill(tmp_path.with_name("undisturbed"), range(50))
    assert (tmp_path / "samples.jsonl").read_bytes() == (
        tmp_path.with_name("undisturbed") / "samples.jsonl"
    ).read_bytes()


def test_an_unwritable_place_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="choose another --out"):
            RunDirectory.open(bad, CONFIG)
    monkeypatch.setattr(pathlib.Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "denied")))
    with pytest.raises(UserError, match="denied; choose another --out"):
        RunDirectory.open(tmp_path / "run", CONFIG)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99, "config": {}, "sessions": []}'])
def test_a_bad_run_json_is_one_line(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json"):
        RunDirectory.open(tmp_path, CONFIG)


def test_records_without_their_config_are_not_adopted(tmp_path):
    fill(tmp_path, [1])
    (tmp_path / "run.json").unlink()
    with pytest.raises(UserError, match=r"is no run directory and holds samples\.jsonl"):
        RunDirectory.open(tmp_path, CONFIG)


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
    assert [s["key"] for s in samples] == [["other", i] for i in range(total)]
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
    with pytest.raises(UserError, match="cannot read"):
        provenance.sha256_file(tmp_path / "none")


def test_valid_samples_pass_and_are_written(tmp_path):
    validate_sample(make_sample())
    validate_sample(make_invalid())
    with RunDirectory.open(tmp_path, CONFIG) as run:
        run.append(make_sample(1))
        run.append(make_invalid(2))
        broken = make_sample(4)
        broken["teacher_forced"]["kl"][2] = float("nan")
        with pytest.raises(ValueError, match=r"^teacher_forced\.kl\[2\]: expected a finite number, got 'nan'"):
            run.append(broken)
        assert run.done_keys() == {("divergence", 1), ("divergence", 2)}


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("problem", "3", "problem"),
        ("problem", True, "problem"),
        ("key", ["divergence", 4], "key"),
        ("shapes.slots", -1, "shapes.slots"),
        ("sampling.sampler", "beam", "sampling.sampler"),
        ("sampling.top_k", 1.5, "sampling.top_k"),
        ("status", "fine", "status"),
        ("invalid", {"arm": "cached"}, "invalid"),
        ("headroom.max_abs", float("inf"), "headroom.max_abs"),
        ("headroom.limit", 0, "headroom.limit"),
        ("arms.cached.tokens", [1, 2.0], r"arms\.cached\.tokens\[1\]"),
        ("arms.cached.stop", "invalid", "arms.cached.stop"),
        ("arms.uncached.scores.strict.correct", None, "arms.uncached.scores.strict.correct"),
        ("teacher_forced.js", [0.0], "teacher_forced"),
        ("teacher_forced.flip", [0, 0, 0, 0], r"teacher_forced\.flip\[0\]"),
        ("teacher_forced.bit_equal", [True] * 4, r"teacher_forced\.bit_equal\[0\]"),
        ("free_running.diverged", True, "free_running.first_diverged"),
        ("free_running.differing_after", 2, "free_running.differing_after"),
        ("controls.uncached_rerun", {}, r"controls\.uncached_rerun\.flip"),
        ("label_change.numeric", "changed", "label_change.numeric"),
    ],
)
def test_a_broken_sample_is_refused_by_field(path, value, field):
    sample = make_sample()
    *parents, last = path.split(".")
    target = sample
    for parent in parents:
        target = target[parent]
    target[last] = value
    with pytest.raises(ValueError, match=rf"^{field}: "):
        validate_sample(sample)


@pytest.mark.parametrize("name", ["teacher_forced", "free_running", "controls.cached_rerun"])
def test_an_invalid_sample_states_no_agreement(name):
    sample, valid = make_invalid(), make_sample()
    if name.startswith("controls"):
        sample["controls"] = valid["controls"]
    else:
        sample[name] = valid[name]
    with pytest.raises(ValueError, match="no agreement"):
        validate_sample(sample)


def test_a_missing_field_is_named():
    flat = records.flatten(make_sample())
    for path in flat:
        if path in ("invalid",):
            continue
        sample = make_sample()
        *parents, last = path.split(".")
        target = sample
        for parent in parents:
            target = target[parent]
        del target[last]
        with pytest.raises(ValueError, match=rf"^{path}: missing"):
            validate_sample(sample)
