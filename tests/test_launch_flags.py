"""Flags beyond any use, flagfiles of other kinds, data that is not there: one line, once, before anything is loaded."""

import math
import re

import pytest
from commands import SMALL, parse, refuse

from jaxkv.checkpoints import load as load_checkpoint
from jaxkv.errors import UserError
from jaxkv.options import OPTIONS


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


NUMBERS = {option.flag: (option.low, option.high) for option in OPTIONS if option.kind in (int, float)}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value", ["1000000000000000000000", "-1000000000000000000000", "9" * 5000, "nan", "x", "1e400"]
)
def test_numbers_beyond_any_use_are_refused(name, value):
    assert f"--{name}={value}"[:40] in refuse(f"--{name}={value}")


def test_every_number_has_bounds():
    assert len(NUMBERS) == 23
    assert all(math.isfinite(bound) for bounds in NUMBERS.values() for bound in bounds)


LISTS = {
    "an item is empty": (
        "--precision=fp16,,fp32", "--precision=", "--model=A,", "--model=,", "--sampler=greedy,", "--experiments=",
        "--blocks=1,,2", "--problems=", "--framework=,jax", "--conditions=", "--error_seeds=1,",
    ),
    "names a value twice": (
        "--error_seeds=-3,4,-03", "--blocks=8,8", "--experiments=drift,drift", "--precision=fp16,fp16",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("flag", "said"), [(flag, said) for said, listed in LISTS.items() for flag in listed])
def test_an_empty_item_and_one_that_stands_twice_are_refused(flag, said):
    assert refuse(flag).startswith(f"flag {flag}: {said}")


INJECT, PERPLEX, ACCUMULATE, MITIGATE = (
    f"--experiments={name}" for name in ("injection", "perplexity", "accumulation", "mitigations")
)
MISTAKES = [
    (["--checkpoint="], "--checkpoint= is empty"),  # as of `--checkpoint=$UNSET` in a script
    (["--out="], "--out= is empty"),
    (["--padding="], "--padding= is empty"),
    (["--model=gemma2-2"], "did you mean 'gemma2-2b'"),
    (["--precision=fp16,fp23"], "--precision=fp23 is not known (did you mean 'fp32'?)"),
    (["--residual=fp23"], "--residual=fp23 is not known (did you mean 'fp32'?)"),
    (["--accumulation=fp8"], "--accumulation=fp8"),
    (["--cache=int8"], "--cache=int8"),
    (["--sampler=greedy,gredy"], "--sampler=gredy is not known (did you mean 'greedy'?)"),
    (["--temperature=0.5"], "--temperature=0.5 has no effect with --sampler=greedy"),
    (["--sampler=temperature", "--temperature=1e-40"], "--temperature=1e-40"),
    (["--experiments=divergance"], "did you mean 'divergence'"),
    (["--task=gsm"], "--task=gsm is not known (did you mean 'gsm8k'?)"),
    (["--task=humaneval"], "--allow_code_execution"),
    (["--subset=short"], "--subset=short"),
    (["--subset=no_length_128"], "leave --subset at all"),
    (["--prompt=fewshot"], "did you mean 'few_shot'"),
    (["--padding=right"], "known: equal, left"),
    (["--regime=algned"], "did you mean 'aligned'"),
    (["--gate=of"], "did you mean 'off'"),
    (["--uncached=drafts"], "did you mean 'draft'"),
    (["--data=nowhere.jsonl"], "--data=nowhere.jsonl: does not exist"),
    (["--data=."], "--data=.: is a directory"),
    ([f"--data={__file__}"], "'.py' is no kind of file that is read"),
    (["--fewshot_data=no.jsonl"], "--fewshot_data=no.jsonl"),
    ([PERPLEX, "--data=nowhere.txt"], "--data=nowhere.txt: does not exist"),
    (["--num_problems=99"], "--num_problems=99 but the data"),
    (["--num_problems=0"], "--num_problems=0: '0' is no whole number in the range [1, 1000000]"),
    (["--problems=0,1,2,3,99"], "ask for 0 to"),
    (["--problems=3,-1"], "'-1' is no whole number in the range [0, 1000000]"),
    (["--problems=3,4", "--num_problems=1"], "say different things"),
    (["--tile=0"], "--tile=0"),
    (["--stepwise_problems=-1"], "--stepwise_problems=-1"),
    (["--seed=3000000000"], "--seed=3000000000"),
    (["--max_new_tokens=600"], "--max_new_tokens=600 exceeds the context of 512"),
    (["--bucket=100000"], "--bucket=100000 exceeds the context of"),
    ([PERPLEX, "--context=5000"], "--context=5000 and --max_new_tokens=6 exceed the context"),
    (["--uncached_length=bucket:x"], "use padded or bucket:M"),
    (["--uncached_length=bucket:100000"], "--uncached_length=bucket:100000 exceeds the context of"),
    (["--uncached_length=bucket:10000000000"], "--uncached_length=bucket:10000000000 is not understood"),
    (["--regime=aligned", "--uncached_length=bucket:64"], "use padded"),
    (["--experiments=doctor,divergence"], "run it by itself"),
    (["--experiments=lowering,divergence"], "is of programs, the others of problems; run it by itself"),
    (["--experiments=lowering", "--checkpoint=random:0"], "needs no weights; give --model=PRESET alone"),
    ([MITIGATE, "--precision=fp16,fp64"], "--precision=fp64"),
    ([MITIGATE, "--residual=fp32"], "--residual=fp32"),
    ([MITIGATE, "--cache=fp32"], "--cache=fp32"),
    (["--experiments=divergence,mitigations", "--regime=aligned"], "one of their variants"),
    (["--experiments=attribution", "--regime=aligned"], "attribution explains the plain regime"),
    (["--experiments=attribution", "--uncached_length=bucket:8"], "attribution looks at one padded length"),
    (["--experiments=drift", "--uncached_length=bucket:64"], "drift looks at one padded length"),
    (["--experiments=patching", "--uncached_length=bucket:64"], "patching looks at one padded length"),
    (["--experiments=accumulation", "--uncached_length=bucket:64"], "accumulation looks at one padded length"),
    (["--experiments=patching", "--regime=aligned"], "patching explains the plain regime"),
    (["--experiments=parity", "--regime=aligned"], "parity explains the plain regime"),
    ([INJECT, "--regime=aligned"], "no aligned regime"),
    ([PERPLEX, "--regime=aligned", "--cache_quant=int8"], "no aligned regime"),
    ([INJECT, "--framework=torch"], "JAX alone"),
    ([INJECT, "--cache_error=norml:0,1"], "did you mean 'normal'"),
    ([INJECT, "--cache_quant=kvran:k2v2"], "did you mean 'kvarn'"),
    ([INJECT, "--cache_quant=kvarn:k2v2,tile=100000"], "tile"),
    ([ACCUMULATE, "--cache_quant=kvarn"], "needs its bits after a colon"),
    ([ACCUMULATE, "--blocks=0"], "--blocks=0: '0' is no whole number in the range [1, 131072]"),
    ([ACCUMULATE, "--cache_error=normal:0,1"], "--cache_error has no effect without"),
    (["--cache_error=normal:0,1"], "--cache_error has no effect without"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_the_flag_at_fault_is_named_before_anything_is_loaded(tmp_path, monkeypatch, loads, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in refuse(*SMALL, *arguments)
    assert not loads
    assert not list(tmp_path.iterdir())  # no runs/ either


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (b'{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?", "answer": "four"}\n', [], r"a\.jsonl.*2"),
        ("caf\xe9".encode("latin1"), [PERPLEX], r"a\.jsonl line 1: is not UTF-8"),
    ],
)
def test_the_line_at_fault_in_data_is_named(tmp_path, content, arguments, said):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert re.search(said, refuse(*SMALL, f"--data={tmp_path / 'a.jsonl'}", *arguments))


def test_the_data_of_several_conditions_is_read_once(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "jaxkv.tasks.load_task", lambda *a, **k: seen.append(a) or (_ for _ in ()).throw(UserError("no"))
    )
    assert refuse("--model=tiny-llama2,tiny-mistral", "--precision=fp16,fp32") == "no"
    assert len(seen) == 1


FLAGFILES = {
    "a line without dashes": (b"--seed=1\nprecision=bf16\n", "line 2: 'precision=bf16' is no flag"),
    "binary": (b"--seed=1\n\xff\xfe\x00", "line 2: is not UTF-8"),
    "zero bytes": (b"--seed=1\n--task=\x00\x01", "line 2: "),
    "UTF-16": ("--seed=1\n".encode("utf-16"), "line 1: is not UTF-8"),
}


@pytest.mark.parametrize("by", ["--flagfile", "--conditions"])
@pytest.mark.parametrize(("content", "said"), FLAGFILES.values(), ids=FLAGFILES)
def test_a_flagfile_that_is_none_is_one_line(tmp_path, by, content, said):
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
    monkeypatch.setattr("jaxkv.checkpoints.load", load_checkpoint)
    assert "does not exist" in refuse(*SMALL, "--checkpoint=./nowhere", "--compilation_cache=none")
    assert not list(tmp_path.iterdir())
