"""`--framework=torch`: the same problems, tokens and records from the command, and what it refuses."""

import os
import sys

import pytest
from commands import SMALL, parse, run_in_process
from plain_records import read_run

from jaxkv import launch
from jaxkv.checks import check_condition
from jaxkv.errors import UserError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("file_of_one_layer")
MODEL = "--model=test-llama2"  # soonest traced; tests/test_torch_path.py has every family
FEW = [
    "--num_problems=2",
    "--max_new_tokens=8",
    "--gate=off",
    "--bucket=64",
    "--control_problems=1",
    "--precision=fp32",
]


@pytest.fixture(scope="module")
def both(file_of_one_layer, tmp_path_factory, cache):
    """A sweep of both frameworks, sampled."""
    out = tmp_path_factory.mktemp("both")
    run_in_process(*SMALL, cache, *FEW, f"--out={out}", MODEL, "--framework=jax,torch", "--sampler=top_p")
    return {name: out / f"test-llama2-fp32-top_p{end}" for name, end in (("jax", ""), ("torch", "-torch-eager"))}


def test_both_frameworks_answer_the_same_problems_alike(both):
    """fp32 logits differ by less than the noise decides, so that equal noise gives equal tokens."""
    found = {name: read_run(path) for name, path in both.items()}
    for theirs, ours in zip(found["torch"][1], found["jax"][1], strict=True):
        assert (theirs["problem"], theirs["prompt_sha256"]) == (ours["problem"], ours["prompt_sha256"])
        assert theirs["sampling"] == ours["sampling"]
        for arm in ("cached", "uncached"):
            assert theirs["arms"][arm] == ours["arms"][arm]
    configs = {name: run["config"] for name, (run, _) in found.items()}
    shared = ("model", "checkpoint", "data", "prompt", "sampling", "precision", "num_problems")
    assert {k: configs["torch"][k] for k in shared} == {k: configs["jax"][k] for k in shared}


def test_what_torch_ran_is_in_its_records_and_config(both):
    run, samples = read_run(both["torch"])
    config = run["config"]
    assert (config["framework"], config["attention"]) == ("torch", "eager")
    assert config["torch"]["versions"]["torch"] == torch.__version__
    assert not {"held", "compiler_options", "tokens_chosen_on"} & set(config)
    decoding = config["decoding"]
    assert (decoding["uncached"], decoding["uncached_length"]) == ("stepwise", "growing")
    assert "tile" not in decoding
    assert [sample["framework"] for sample in samples] == ["torch"] * 2
    assert samples[0]["shapes"]["uncached"] == "growing"
    assert [sample["controls"]["uncached_stepwise"] is None for sample in samples] == [False, True]
    report = (both["torch"] / "report.md").read_text()
    assert "| gate | not applicable: PyTorch has no aligned regime here |" in report
    assert "gate off" not in report
    ours = read_run(both["jax"])[0]["config"]
    assert ours["framework"] == "jax"
    assert (ours["decoding"]["uncached"], ours["decoding"]["uncached_length"]) == ("draft", "padded")


def test_run_flags_replay_a_torch_run(both, capsys, monkeypatch):
    monkeypatch.setattr("jaxkv.torch_path.TorchArms.run_cached", None)
    before = (both["torch"] / "samples.jsonl").read_bytes()
    run_in_process(f"--flagfile={both['torch'] / 'run.flags'}")
    assert "2 of 2 records of divergence are done already" in capsys.readouterr().err
    assert (both["torch"] / "samples.jsonl").read_bytes() == before
    with pytest.raises(UserError, match=r"decoding\.uncached is stepwise there, draft here"):
        run_in_process(f"--flagfile={both['torch'] / 'run.flags'}", "--uncached=draft")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--uncached=draft"], ("draft", "padded")),
        (["--uncached_length=bucket:8"], ("stepwise", "bucket:8")),
        (["--uncached=draft", "--uncached_length=growing"], ("draft", "growing")),
        (["--framework=jax"], ("draft", "padded")),
        (["--framework=jax", "--uncached=stepwise"], ("stepwise", "padded")),
    ],
)
def test_the_uncached_arm_is_what_each_framework_usually_has(arguments, wanted):
    (one,) = launch.spread(parse("--framework=torch", "--precision=fp16", *arguments))
    assert (one.controls.uncached, one.decoding.uncached_length) == wanted


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--framework=toch"], "did you mean 'torch'"),
        (["--attention=spda"], "did you mean 'sdpa'"),
        (["--framework=jax", "--attention=sdpa"], "no effect without --framework=torch"),
        (["--attention=sdpa"], "use --attention=eager"),
        (["--precision=fp64"], "do not compute in fp64 throughout"),
        (["--residual=fp32"], "cannot run fp16 with residual=float32"),
        (["--experiments=divergence,attribution"], "--experiments=attribution runs in JAX alone"),
        (["--framework=jax,torch", "--experiments=mitigations"], "runs in JAX alone"),
        (["--regime=aligned"], "with --framework=torch use plain"),
        (["--framework=jax", "--uncached_length=growing"], "use padded or bucket:M"),
        (["--uncached_length=grown"], "use padded or bucket:M"),
    ],
)
def test_mistakes_end_in_one_line(arguments, wanted, tmp_path):
    with pytest.raises(UserError) as caught:
        run_in_process(*SMALL, "--compilation_cache=none", f"--out={tmp_path / 'run'}", "--framework=torch", *arguments)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_torch_the_command_that_installs_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pip install 'jaxkv\[torch\]'"):
        run_in_process(*SMALL, f"--out={tmp_path}", "--framework=torch")


def test_jax_leaves_torch_its_memory(monkeypatch):
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setenv(name, "")  # so that what was there comes back
    monkeypatch.delenv(name)
    for arguments, wanted in (["--framework=jax"], None), (["--framework=torch"], "false"):
        for one in launch.spread(parse("--precision=fp16", *arguments)):
            check_condition(one)
        assert os.environ.get(name) == wanted
