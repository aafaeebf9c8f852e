"""Changed caches from the command: errors, quantizers, perplexity of a text, accumulation; their run directories."""

import pathlib

import pytest
from commands import SMALL, parse, run_in_process
from plain_records import read_run

from jaxkv.errors import UserError
from jaxkv.experiments.changes import make_changes
from jaxkv.interventions.quantizers.spec import METHODS
from jaxkv.models.families import get_preset

pytestmark = pytest.mark.usefixtures("one_layer")
FEW = ["--num_problems=2", "--max_new_tokens=3", "--gate=off"]
SPECS = ["--cache_error=normal:0,0.25;side=k", "--cache_quant=int8"]


def test_injection_replays_from_its_flagfile_and_may_be_asked_for_more(tmp_path, cache, capsys):
    out = tmp_path / "run"
    few = [*FEW, "--experiments=injection", "--error_seeds=0,3"]
    run_in_process(*SMALL, cache, f"--out={out}", *few, *SPECS)
    run, records = read_run(out)
    seeds = [["none", 0], ["int8", 0], ["normal:0,0.25;side=k", 0], ["normal:0,0.25;side=k", 3]]
    assert run["sessions"][0]["asked"] == {"injection": seeds}
    assert f"report: {out / 'report.md'}" in capsys.readouterr().out
    keys = {(r["problem"], r["change"], r["seed"]) for r in records}
    drawn = {(n, "normal:0,0.25;side=k", seed) for n in (0, 1) for seed in (0, 3)}
    assert keys == drawn | {(n, name, 0) for n in (0, 1) for name in ("none", "int8")}
    run_in_process(f"--flagfile={out / 'run.flags'}")
    assert "8 of 8 records of injection are done already" in capsys.readouterr().err
    assert read_run(out)[1] == records
    run_in_process(*SMALL, cache, f"--out={out}", *few, *SPECS, "--cache_quant=int4")
    assert "8 of 10 records of injection are done already" in capsys.readouterr().err
    run_in_process(*SMALL, cache, f"--out={out}", *few, "--cache_quant=int2", "--gate=on")
    assert "2 of 4 records of injection are done already" in capsys.readouterr().err
    run, grown = read_run(out)
    assert grown[:8] == records
    assert [r["change"] for r in grown[8:]] == ["int4"] * 2 + ["int2"] * 2
    assert run["sessions"][-1]["gate"]["passed"]  # for what is new, however much is done of other changes


def test_perplexity_reads_a_text_and_leaves_its_uncached_arm_alone(tmp_path, cache, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    few = ["--experiments=perplexity", f"--data={text}", "--context=16", "--max_new_tokens=8", "--num_problems=2"]
    run_in_process(*SMALL, cache, *FEW, f"--out={out}", *few, "--cache_quant=int2")
    run, records = read_run(out)
    assert run["config"]["task"] == "text"
    assert run["config"]["prompt"] == {"context": 16, "stride": 8, "bos": True}
    by_change = {(r["problem"], r["change"]): r for r in records}
    assert set(by_change) == {(n, name) for n in (0, 1) for name in ("none", "int2")}
    for n in (0, 1):
        clean, changed = by_change[n, "none"], by_change[n, "int2"]
        assert clean["nats"]["uncached"] == changed["nats"]["uncached"]
        assert clean["nats"]["cached"] != changed["nats"]["cached"]
    run_in_process(f"--flagfile={out / 'run.flags'}")
    assert "4 of 4 records of perplexity are done already" in capsys.readouterr().err


def test_accumulation_has_a_record_for_every_regime(tmp_path, cache, capsys):
    out = tmp_path / "run"
    few = [*FEW, "--num_problems=1", "--experiments=accumulation", "--cache_quant=int4", "--blocks=2"]
    run_in_process(*SMALL, cache, f"--out={out}", *few)
    assert [r["regime"] for r in read_run(out)[1]] == ["static", "accumulated:2", "decode"]
    run_in_process(f"--flagfile={out / 'run.flags'}")
    assert "3 of 3 records of accumulation are done already" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["tiny-llama2", "smollm2-135m", "gemma3-270m", "llama2-7b"])
def test_flagfiles_of_changes_suit_the_models(model):
    launch = pathlib.Path(__file__).parents[1] / "launch"
    (options,) = parse(f"--flagfile={launch / 'quantizers.flags'}", f"--model={model}")
    config = get_preset(model)
    changes = make_changes(options.cache.cache_error, options.cache.cache_quant, config)
    methods = {type(side.quantizer) for change in changes[1:] for side in (change.what.k, change.what.v)}
    assert set(METHODS.values()) == methods
    assert parse(f"--flagfile={launch / 'cache_errors.flags'}")[0].cache.cache_quant == ()


INJECT, PERPLEX, ACCUMULATE = (f"--experiments={name}" for name in ("injection", "perplexity", "accumulation"))
MISTAKES = {
    "unknown law": ([INJECT, "--cache_error=norml:0,1"], "did you mean 'normal'"),
    "unknown quantizer": ([INJECT, "--cache_quant=kvran:k2v2"], "did you mean 'kvarn'"),
    "no bits": ([ACCUMULATE, "--cache_quant=kvarn"], "needs its bits after a colon"),
    "a tile that does not fit": ([INJECT, "--cache_quant=kvarn:k2v2,tile=100000"], "tile"),
    "seeds": ([INJECT, "--error_seeds=0,0"], "--error_seeds=0,0: names a value twice"),
    "blocks": ([ACCUMULATE, "--blocks=0"], "--blocks=0: '0' is no whole number in the range [1, 131072]"),
    "an error without effect": (["--cache_error=normal:0,1"], "--cache_error has no effect without"),
    "a quantizer without effect": (["--cache_quant=int8"], "--cache_quant has no effect without"),
    "an error that accumulates": ([ACCUMULATE, "--cache_error=normal:0,1"], "--cache_error has no effect without"),
    "aligned": ([INJECT, "--regime=aligned"], "no aligned regime"),
    "aligned perplexity": ([PERPLEX, "--regime=aligned", "--cache_quant=int8"], "no aligned regime"),
    "a text and problems": (["--experiments=perplexity,divergence"], "run it by itself"),
    "code without leave": (["--task=humaneval"], "--allow_code_execution"),
    "a subset of another task": (["--subset=no_length_128"], "leave --subset at all"),
    "an unknown task": (["--task=ifevl"], "did you mean 'ifeval'"),
    "in PyTorch": ([INJECT, "--framework=torch"], "JAX alone"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_end_in_one_line(name, tmp_path):
    arguments, wanted = MISTAKES[name]
    with pytest.raises(UserError) as caught:
        run_in_process(*SMALL, "--compilation_cache=none", f"--out={tmp_path / 'run'}", *arguments)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_text_that_is_not_utf_8_is_named_with_the_place(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes("caf\xe9".encode("latin1"))
    with pytest.raises(UserError, match=r"text\.txt line 1: is not UTF-8"):
        run_in_process(*SMALL, PERPLEX, f"--data={text}", "--compilation_cache=none", f"--out={tmp_path / 'run'}")
