"""Flags beyond any use, flagfiles of other kinds, data that is not there: one line, once, before anything is loaded."""

import math

import pytest
from commands import DATA, SMALL, parse, run_in_process

from jaxkv.errors import UserError
from jaxkv.options import OPTIONS
from jaxkv.sampling import make_sampler


@pytest.fixture(autouse=True)
def loads(monkeypatch):
    """What the command began to load."""
    seen = []

    def load(*arguments, **options):
        seen.append(arguments)
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("jaxkv.checkpoints.load", load)
    monkeypatch.setattr("jaxkv.tasks.sources.fetch", load)
    return seen


def refuse(*arguments):
    """The line that a command ends in."""
    with pytest.raises(UserError) as caught:
        run_in_process(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NUMBERS = (
    "num_problems", "max_new_tokens", "batch_size", "bucket", "tile", "context", "gate_problems", "control_problems",
    "stepwise_problems", "truth_problems",
    "patch_layers", "patch_bins", "shots", "shots_seed", "top_k", "seed", "temperature", "top_p",
    "doctor_seconds", "problems", "blocks", "error_seeds",
)  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value", ["1000000000000000000000", "-1000000000000000000000", "9" * 5000, "nan", "x", "1e400"]
)
def test_numbers_beyond_any_use_are_refused(name, value):
    assert f"--{name}={value}"[:40] in refuse(f"--{name}={value}")


def test_every_number_has_bounds():
    numbers = {option.flag: (option.low, option.high) for option in OPTIONS if option.kind in (int, float)}
    assert set(numbers) == set(NUMBERS)
    assert all(math.isfinite(bound) for bounds in numbers.values() for bound in bounds)


@pytest.mark.parametrize(
    "flag",
    ["--precision=fp16,,fp32", "--precision=", "--model=A,", "--model=,", "--sampler=greedy,", "--experiments=",
     "--blocks=1,,2", "--problems=", "--framework=,jax", "--conditions=", "--error_seeds=1,"],
)  # fmt: skip
def test_an_empty_item_is_refused(flag):
    assert refuse(flag).startswith(f"flag {flag}: an item is empty")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--residual=fp8"], "--residual=fp8 is not known"),
        (["--accumulation=fp8"], "--accumulation=fp8"),
        (["--cache=int8"], "--cache=int8"),
        (["--precision=fp16,fp8"], "--precision=fp8"),
        (["--sampler=greedy,beam"], "--sampler=beam"),
        (["--sampler=temperature", "--temperature=1e-40"], "--temperature=1e-40"),
        (["--task=gsm"], "--task=gsm is not known (did you mean 'gsm8k'?)"),
        (["--subset=short"], "--subset=short"),
        (["--task=gsm8k", "--data=nowhere.jsonl"], "--data=nowhere.jsonl: does not exist"),
        (["--task=gsm8k", "--data=."], "--data=.: is a directory"),
        (["--task=gsm8k", f"--data={__file__}"], "'.py' is no kind of file that is read"),
        (["--task=gsm8k", f"--data={DATA / 'problems.jsonl'}", "--fewshot_data=no.jsonl"], "--fewshot_data=no.jsonl"),
        (["--task=gsm8k", f"--data={DATA / 'problems.jsonl'}", "--num_problems=99"], "--num_problems=99 but the data"),
        (["--experiments=perplexity", "--data=nowhere.txt"], "--data=nowhere.txt: does not exist"),
        (["--experiments=perplexity", "--context=5000"], "--context=5000 and --max_new_tokens=256 exceed the context"),
        (["--bucket=100000"], "--bucket=100000 exceeds the context of"),
        (["--uncached_length=bucket:100000"], "--uncached_length=bucket:100000 exceeds the context of"),
        (["--uncached_length=bucket:10000000000"], "--uncached_length=bucket:10000000000 is not understood"),
    ],
)
def test_the_flag_at_fault_is_named_before_anything_is_loaded(tmp_path, monkeypatch, loads, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in refuse(*arguments)
    assert not loads
    assert not list(tmp_path.iterdir())  # no runs/ either


def test_the_data_of_several_conditions_is_read_once(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "jaxkv.tasks.load_task", lambda *a, **k: seen.append(a) or (_ for _ in ()).throw(UserError("no"))
    )
    assert refuse("--model=tiny-llama2,tiny-mistral", "--precision=fp16,fp32") == "no"
    assert len(seen) == 1


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-40, 1e30, float("nan"), float("inf")])
def test_a_sampler_has_a_temperature_that_it_can_divide_by(value):
    with pytest.raises(UserError, match="temperature"):
        make_sampler("temperature", value)


FLAGFILES = {
    "a line without dashes": (b"--seed=1\nprecision=bf16\n", "line 2: 'precision=bf16' is no flag"),
    "binary": (b"--seed=1\n\xff\xfe\x00", "line 2: is not UTF-8"),
    "zero bytes": (b"--seed=1\n--task=\x00\x01", "line 2: "),
    "UTF-16": ("--seed=1\n".encode("utf-16"), "line 1: is not UTF-8"),
}


@pytest.mark.parametrize("by", ["--flagfile", "--conditions"])
@pytest.mark.parametrize("name", FLAGFILES)
def test_a_flagfile_that_is_none_is_one_line(tmp_path, by, name):
    content, said = FLAGFILES[name]
    (tmp_path / "a.flags").write_bytes(content)
    found = refuse(f"{by}={tmp_path / 'a.flags'}")
    assert said in found
    assert "a.flags" in found


def test_flagfiles_may_have_a_byte_order_mark_comments_and_others_in_them(tmp_path):
    (tmp_path / "inner.flags").write_bytes(b"\xef\xbb\xbf// inner\n--seed=4\r\n")
    (tmp_path / "outer.flags").write_bytes(
        f"\ufeff--precision=bf16\n\n# more\n--flagfile={tmp_path / 'inner.flags'}\n".encode()
    )
    for arguments in ([f"--flagfile={tmp_path / 'outer.flags'}"], ["--flagfile", str(tmp_path / "outer.flags")]):
        (options,) = parse(*arguments)
        assert (options.precision.name, options.decoding.seed) == ("bf16", 4)
    (tmp_path / "inner.flags").write_text(f"--flagfile={tmp_path / 'outer.flags'}")
    assert "names itself" in refuse(f"--flagfile={tmp_path / 'outer.flags'}")


@pytest.mark.parametrize("more", [[], ["--precision=fp16,fp32"]])
@pytest.mark.parametrize("name", ["report.md", "summary.json", "samples.jsonl", "overview.txt"])
def test_a_folder_with_files_of_the_user_is_refused_first(tmp_path, loads, more, name):
    (tmp_path / name).write_text("mine")
    assert f"holds {name}" in refuse(*SMALL, *more, f"--out={tmp_path}")
    assert not loads
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_what_fails_while_it_loads_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxkv.checkpoints.load", lambda *a, **k: (_ for _ in ()).throw(UserError("not there")))
    refuse(
        "--model=test-gemma2", "--checkpoint=./nowhere", "--precision=fp16", "--task=arith", "--compilation_cache=none"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flag",
    [
        "--error_seeds=1,1",
        "--error_seeds=-3,4,-03",
        "--blocks=8,8",
        "--experiments=drift,drift",
        "--sampler=top_p,top_p",
    ],
)
def test_a_value_that_stands_twice_is_refused(flag):
    assert refuse(flag).startswith(f"flag {flag}: names a value twice")
