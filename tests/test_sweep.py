"""A sweep: one run directory a condition, an overview, failures that stop nothing, and the same command again."""

import dataclasses
import itertools
import json
from unittest import mock

import commands
import pytest
from absl import flags
from commands import FEW, LAUNCH, parse, refuse, run_in_process
from plain_records import read_run

from jaxkv import launch, sweep
from jaxkv.checks import check_condition
from jaxkv.errors import UserError
from jaxkv.experiments.driver import share_arms

pytestmark = pytest.mark.usefixtures("one_layer")
SMALL = [*commands.SMALL, "--model=test-llama2", "--regime=aligned"]  # soonest compiled


def overview(directory):
    found = json.loads((directory / "overview.json").read_text())
    return {entry["name"]: entry for entry in found["conditions"]}, found["counts"]


def fails(*arguments):
    """Exit code of a command whose sweep fails."""
    with pytest.raises(SystemExit) as caught:
        run_in_process(*arguments)
    return caught.value.code


def test_a_condition_that_fails_stops_no_other(tmp_path, cache, capsys):
    command = [*SMALL, cache, *FEW, f"--out={tmp_path}", "--sampler=greedy,temperature"]
    broken, sound = (f"test-llama2-fp16-{sampler}" for sampler in ("greedy", "temperature"))
    sweep.write_overview(tmp_path, [])  # of a sweep that was there before the file
    (tmp_path / broken).write_text("in the way")
    assert fails(*command) == 2
    shown = capsys.readouterr()
    (line,) = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {broken}: {tmp_path / broken} is a file, not a directory")
    assert f"overview: {tmp_path / 'overview.md'}" in shown.out
    assert shown.out.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"
    assert "Claims of papers" not in (tmp_path / "report.md").read_text()
    entries, counts = overview(tmp_path)
    assert list(entries) == [broken, sound]
    assert counts == {"waiting": 0, "running": 0, "running elsewhere": 0, "done": 1, "failed": 1}
    assert [entries[name]["records"] for name in entries] == [0, 1]
    assert f"report: {tmp_path / sound / 'report.md'}" in shown.out
    run, (sample,) = read_run(tmp_path / entries[sound]["run"])
    flags = (tmp_path / sound / "run.flags").read_text()
    assert "--model=test-llama2\n--checkpoint=random:0\n--precision=fp16\n" in flags
    assert "\n--sampler=temperature\n" in flags
    assert sample["shapes"]["tile"] == run["config"]["decoding"]["tile"] == 8
    assert all(sample["teacher_forced"]["bit_equal"])
    assert "gate" not in run["sessions"][0]
    assert "| gate | off: nothing rules out a bug of the cache |" in (tmp_path / sound / "report.md").read_text()
    samples = (tmp_path / sound / "samples.jsonl").read_bytes()

    (tmp_path / broken).unlink()
    run_in_process(*command)
    assert capsys.readouterr().err.count("1 of 1 records of divergence are done already") == 1
    assert overview(tmp_path)[1] == {"waiting": 0, "running": 0, "running elsewhere": 0, "done": 2, "failed": 0}
    assert (tmp_path / sound / "samples.jsonl").read_bytes() == samples


@pytest.fixture
def fake(monkeypatch):
    """Conditions that end as told, by precision, and what the overview said while each ran."""
    told, seen = {}, []

    def run_study(options, alone):
        path = sweep.run_path(options)
        path.mkdir(parents=True, exist_ok=True)
        seen.append([entry["status"] for entry in overview(path.parent)[0].values()])
        if (error := told.get(options.precision.name)) is not None:
            raise error
        (path / "samples.jsonl").write_text("{}\n{}\n")

    monkeypatch.setattr(sweep, "run_study", run_study)
    monkeypatch.setattr(sweep, "gc", mock.Mock())  # they leave nothing to collect
    return told, seen


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ZeroDivisionError("one\ntwo"), "ZeroDivisionError: one two"),
        pytest.param(MemoryError(), "out of memory; use a smaller model", marks=pytest.mark.nightly),
        pytest.param(
            RuntimeError("RESOURCE_EXHAUSTED: 3 GiB"),
            "the device is out of memory; use a smaller model",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_nobody_foresaw_fails_one_condition(fake, tmp_path, capsys, error, said):
    told, seen = fake
    told["bf16"] = error
    command = [f"--out={tmp_path}", "--precision=fp16,bf16,fp32"]
    assert fails(*command) == 1
    assert seen == [["running", "waiting", "waiting"], ["done", "running", "waiting"], ["done", "failed", "running"]]
    name = "tiny-gemma2-bf16-greedy"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {name}: {said}")
    assert line.endswith(f"(see {tmp_path / name / 'traceback.txt'})")
    assert "Traceback" in (tmp_path / name / "traceback.txt").read_text()
    entries, _ = overview(tmp_path)
    assert said in entries[name]["fault"]
    assert said in (tmp_path / "overview.md").read_text()
    assert [entry["records"] for entry in entries.values()] == [2, 0, 2]

    told.clear()
    run_in_process(*command)
    assert overview(tmp_path)[1]["done"] == 3
    assert not (tmp_path / name / "traceback.txt").exists()


def test_users_mistakes_alone_are_exit_code_2(fake, tmp_path, capsys):
    told, _ = fake
    told |= dict.fromkeys(("fp16", "bf16"), UserError("no; do"))
    assert fails(f"--out={tmp_path}", "--precision=fp16,bf16,fp32") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == ["error: tiny-gemma2-fp16-greedy, tiny-gemma2-bf16-greedy: no; do"]


def test_a_stopped_sweep_says_what_it_was_at(fake, tmp_path):
    told, _ = fake
    told["bf16"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_in_process(f"--out={tmp_path}", "--precision=fp16,bf16,fp32")
    assert [entry["status"] for entry in overview(tmp_path)[0].values()] == ["done", "waiting", "waiting"]


def test_a_sweep_without_a_directory_gets_one_of_its_own(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(sweep, "run_study", lambda options, alone: seen.append(sweep.run_path(options)))
    for more in ([], [], ["--seed=1"]):
        run_in_process("--precision=fp16,bf16", *more)
    made = sorted(path.name for path in (tmp_path / "runs").glob("sweep-*"))
    assert len(made) == 2
    assert seen[:2] == seen[2:4]
    assert len(set(seen)) == 4


def conditions(*arguments):
    found = launch.spread(parse(*arguments))
    for one in found:
        check_condition(one)
    return {sweep.name_condition(one): one for one in found}


def test_a_grid_has_every_combination_and_mitigations_once():
    grid = ["--model=tiny-llama2,tiny-mistral", "--precision=fp16,fp32", "--sampler=greedy,top_p", "--out=there"]
    found = conditions(*grid, "--experiments=divergence,mitigations")
    models, samplers = ("tiny-llama2", "tiny-mistral"), ("greedy", "top_p")
    usual = ["-".join(names) for names in itertools.product(models, ("fp16", "fp32"), samplers)]
    own = ["-".join(names) for names in itertools.product(models, ("mitigations",), samplers)]
    assert list(found) == usual + own
    for name, one in found.items():
        assert one.output.out == f"there/{name}"
        assert one.run.experiments == (("mitigations",) if name in own else ("divergence",))


@pytest.fixture
def flagfiles(tmp_path):
    """Two flagfiles whose conditions compile the same programs, as an option."""
    (tmp_path / "greedy.flags").write_text("--num_problems=1\n--precision=fp16\n")
    (tmp_path / "other.flags").write_text("# another\n--problems=2\n--precision=fp16\n--seed=1\n")
    return f"--conditions={tmp_path / 'greedy.flags'},{tmp_path / 'other.flags'}"


def test_flagfiles_are_conditions_that_share_programs(flagfiles, tmp_path, cache, capsys):
    small = [flag for flag in SMALL if not flag.startswith(("--num_problems", "--precision"))]
    out = tmp_path / "out"
    command = [*small, cache, *(flag for flag in FEW if "num_problems" not in flag), flagfiles, f"--out={out}"]
    run_in_process(*command)
    made = share_arms.cache_info()
    assert (made.misses, made.hits) == (1, 1)
    entries, counts = overview(out)
    assert (list(entries), counts["done"]) == (["greedy", "other"], 2)
    for name, problem in (("greedy", 0), ("other", 2)):
        run, (sample,) = read_run(out / name)
        assert (sample["problem"], run["config"]["decoding"]["seed"]) == (problem, int(name == "other"))
        assert "--conditions" not in (out / name / "run.flags").read_text()
    alone = tmp_path / "alone"
    share_arms.cache_clear()
    run_in_process(*command[:-2], f"--flagfile={tmp_path / 'other.flags'}", f"--out={alone}")
    assert (alone / "samples.jsonl").read_bytes() == (out / "other" / "samples.jsonl").read_bytes()
    capsys.readouterr()
    run_in_process(*command)
    assert capsys.readouterr().err.count("1 of 1 records of divergence are done already") == 2


def test_the_commands_flags_override_a_flagfile_and_repeated_ones_add_up(flagfiles, tmp_path):
    (tmp_path / "greedy.flags").write_text("--seed=3\n--cache_quant=int8\n--experiments=injection\n--model=a,b\n")
    parse(flagfiles, "--seed=5", "--cache_quant=k=int4;v=fp8:e4m3", "--cache_quant=int2", "--out=runs/all")
    greedy, (other,) = launch.read_flagfiles(flags.FLAGS.conditions)
    assert {one.decoding.seed for one in (*greedy, other)} == {5}
    assert greedy[0].cache.cache_quant == ("int8", "k=int4;v=fp8:e4m3", "int2")
    assert list(dict.fromkeys(one.model.name for one in greedy)) == ["a", "b"]
    assert {one.output.out for one in greedy} == {"runs/all/greedy"}
    assert (other.output.out, other.data.problems) == ("runs/all/other", (2,))
    assert not any(one.output.conditions for one in greedy)
    outs = [one.output.out for one in launch.spread(greedy)]
    assert outs[0] == "runs/all/greedy/a-fp16-greedy"


@pytest.mark.parametrize(
    ("content", "files", "said"),
    [
        (None, "a.flags", "a.flags: "),
        ("--no_such_flag=1", "a.flags", "Unknown command line flag 'no_such_flag'"),
        ("--conditions=b.flags", "a.flags", "names --conditions itself; list all flagfiles in the command"),
        ("", "a.flags,./a.flags", "two are called alike, and so would their runs; rename one"),
    ],
)
def test_a_flagfile_that_is_none_is_one_line(tmp_path, monkeypatch, content, files, said):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "a.flags").write_text(content)
    assert said in refuse(f"--conditions={files}")


def test_the_nine_conditions_have_flagfiles():
    models, samplers = ("llama2-7b", "mistral-7b-v0.3", "gemma2-2b"), ("greedy", "temperature", "top_p")
    for model, sampler in itertools.product(models, samplers):
        ((name, one),) = conditions(f"--flagfile={LAUNCH / f'{model}-{sampler}.flags'}").items()
        assert name == f"{model}-fp16-{sampler}"
        assert (one.data.task, one.decoding.max_new_tokens) == ("gsm8k", 256)


def test_the_flagfiles_of_changed_caches_go_together():
    files = sorted(LAUNCH.glob("changed-*.flags"))
    parse(
        f"--conditions={','.join(map(str, files))}", "--model=smollm2-135m", "--cache_quant=int8,first=16", "--out=all"
    )
    found = [one for grid in launch.read_flagfiles(flags.FLAGS.conditions) for one in launch.spread(grid)]
    for one in found:
        assert one.cache.cache_quant == ("int8,first=16",)
        sizes = (one.decoding.batch_size, one.decoding.bucket, one.decoding.max_new_tokens)
        assert sizes == (32, 256, 256)  # one layout, one program
    names = ("gsm8k", "ifeval", "next_string", "text")
    assert [one.output.out for one in found] == [f"all/changed-{name}" for name in names]
    assert [one.run.experiments for one in found] == [("injection",)] * 3 + [("perplexity",)]


def test_the_overview_is_replaced_in_one_step(tmp_path, monkeypatch):
    entries = [sweep.Entry("a|b", ["divergence"], "a", sweep.FAILED, fault="no | yes", mendable=True)]
    sweep.write_overview(tmp_path, entries)
    text = (tmp_path / "overview.json").read_text()
    assert json.loads(text)["conditions"] == [dataclasses.asdict(entries[0])]
    row = (tmp_path / "overview.md").read_text().splitlines()[-1]
    assert row.replace("\\|", "").count("|") == len(sweep._COLUMNS) + 1
    monkeypatch.setattr("jaxkv.writing.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(UserError, match="no space left"):
        sweep.write_overview(tmp_path, [])
    assert (tmp_path / "overview.json").read_text() == text
