"""Other experiments than divergence, changed caches too, from the command: run directories, reports, resumption."""

import collections
import dataclasses
from unittest import mock

import commands
import pytest
from cases import daily
from commands import FEW, LAUNCH, parse, run_in_process
from plain_records import read_run

from jaxkv import checkpoints
from jaxkv.experiments.changes import make_changes
from jaxkv.experiments.mitigations import run as mitigations
from jaxkv.interventions.quantizers.spec import METHODS
from jaxkv.models.families import PRESETS, get_preset

# One model, the soonest compiled, in one shape: the experiments share most programs.
SMALL = [*commands.SMALL, "--model=test-llama2"]
TWO = ["--num_problems=2", "--max_new_tokens=3", "--gate=off"]
SPECS = ["--cache_error=normal:0,0.25;side=k", "--cache_quant=int8"]


@pytest.fixture(autouse=True)
def small_model(one_layer, monkeypatch):
    """Of one layer, with heads whose channels quantizers can pack."""
    config = dataclasses.replace(get_preset("test-llama2"), head_dim=16, query_scale=16**-0.5)
    monkeypatch.setitem(PRESETS, "test-llama2", config)


SHARED = {  # records of one problem, and what the page calls it
    "divergence": (1, "Divergence"),
    "drift": (1, "Drift by layer"),
    "parity": (1, "JAX beside PyTorch"),
    "patching": (18, "Activation patching"),
    "attribution": (22, "Attribution"),
}


@pytest.mark.parametrize("number", daily([4], [4, 5]))
def test_experiments_share_a_run(tmp_path, cache, capsys, number):
    shared = dict(list(SHARED.items())[:number])
    out, few = tmp_path / "run", [f"--experiments={','.join(shared)}"]
    run_in_process(*SMALL, cache, *FEW, f"--out={out}", *few)
    assert f"report: {out / 'report.md'}" in capsys.readouterr().out
    records = read_run(out)[1]
    counts = collections.Counter(record["experiment"] for record in records)
    assert counts == {name: count for name, (count, _) in shared.items()}
    page = (out / "report.md").read_text()
    assert all(f"\n## {title}\n" in page for _, title in shared.values())
    run_in_process(*SMALL, cache, *FEW, f"--out={out}", *few)
    shown = capsys.readouterr().err
    assert all(f"{count} of {count} records of {name} are done already" in shown for name, count in counts.items())
    assert read_run(out)[1] == records


def test_mitigations_run_once_whatever_the_precisions(tmp_path, cache, capsys, monkeypatch):
    load = mock.Mock(wraps=checkpoints.load)
    monkeypatch.setattr(checkpoints, "load", load)
    made = mitigations.make_variants
    few = lambda tile: {name: made(tile)[name] for name in ("fp16", "fp16 aligned")}  # noqa: E731
    monkeypatch.setattr(mitigations, "make_variants", few)
    out = tmp_path / "run"
    run_in_process(*SMALL, cache, *FEW, f"--out={out}", "--precision=fp16,bf16", "--experiments=mitigations")
    assert [call.kwargs["precision"].name for call in load.call_args_list] == ["fp32"]
    assert f"report: {out / 'report.md'}" in capsys.readouterr().out
    run, records = read_run(out)
    assert "precision" not in run["config"]
    variants = {record["variant"]: record["precision"] for record in records}
    assert {name: kept["precision"] for name, kept in run["config"]["variants"].items()} == variants
    assert run["config"]["variants"]["fp16 aligned"]["tile"] == 8
    run_in_process(f"--flagfile={out / 'run.flags'}")
    assert "2 of 2 records of mitigations are done already" in capsys.readouterr().err
    assert read_run(out)[1] == records


def test_the_full_gate_tries_the_plain_programs(tmp_path, cache, capsys):
    out = tmp_path / "run"
    run_in_process(*SMALL, cache, *FEW, "--gate=full", f"--out={out}", "-v")
    found = next(entry["gate"] for entry in read_run(out)[0]["sessions"] if "gate" in entry)
    assert found["plain"] == {"passed": True, "tolerance": 0.0, "steps": 3}
    assert "equal in every bit at 3 steps" in " ".join(capsys.readouterr().out.split())


def test_injection_replays_from_its_flagfile_and_may_be_asked_for_more(tmp_path, cache, capsys):
    out = tmp_path / "run"
    few = [*TWO, "--experiments=injection", "--error_seeds=0,3"]
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
    louder = [f"--cache_error=normal:0,{level};side=k" for level in ("0.5", "1")]  # the same programs
    run_in_process(*SMALL, cache, f"--out={out}", *few, *SPECS, louder[0])
    assert "8 of 12 records of injection are done already" in capsys.readouterr().err
    run_in_process(*SMALL, cache, f"--out={out}", *few, louder[1], "--gate=on")
    assert "2 of 6 records of injection are done already" in capsys.readouterr().err
    run, grown = read_run(out)
    assert grown[:8] == records
    assert [r["change"] for r in grown[8:]] == ["normal:0,0.5;side=k"] * 4 + ["normal:0,1;side=k"] * 4
    assert run["sessions"][-1]["gate"]["passed"]  # for what is new, however much is done of other changes


def test_perplexity_reads_a_text_and_leaves_its_uncached_arm_alone(tmp_path, cache, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    few = ["--experiments=perplexity", f"--data={text}", "--context=16"]
    run_in_process(*SMALL, cache, *TWO, f"--out={out}", *few, "--cache_quant=int8")
    run, records = read_run(out)
    assert run["config"]["task"] == "text"
    assert run["config"]["prompt"] == {"context": 16, "stride": 3, "bos": True}
    by_change = {(r["problem"], r["change"]): r for r in records}
    assert set(by_change) == {(n, name) for n in (0, 1) for name in ("none", "int8")}
    for n in (0, 1):
        clean, changed = by_change[n, "none"], by_change[n, "int8"]
        assert clean["nats"]["uncached"] == changed["nats"]["uncached"]
        assert clean["nats"]["cached"] != changed["nats"]["cached"]
    run_in_process(f"--flagfile={out / 'run.flags'}")
    assert "4 of 4 records of perplexity are done already" in capsys.readouterr().err


def test_accumulation_has_a_record_for_every_regime(tmp_path, cache, capsys):
    out = tmp_path / "run"
    few = [*TWO, "--num_problems=1", "--experiments=accumulation", "--cache_quant=int8", "--blocks=1"]
    run_in_process(*SMALL, cache, f"--out={out}", *few)
    assert [r["regime"] for r in read_run(out)[1]] == ["static", "accumulated:1", "decode"]
    run_in_process(f"--flagfile={out / 'run.flags'}")
    assert "3 of 3 records of accumulation are done already" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["tiny-llama2", "smollm2-135m", "gemma3-270m", "llama2-7b"])
def test_flagfiles_of_changes_suit_the_models(model):
    (options,) = parse(f"--flagfile={LAUNCH / 'quantizers.flags'}", f"--model={model}")
    config = get_preset(model)
    changes = make_changes(options.cache.cache_error, options.cache.cache_quant, config)
    methods = {type(side.quantizer) for change in changes[1:] for side in (change.what.k, change.what.v)}
    assert set(METHODS.values()) == methods
    assert parse(f"--flagfile={LAUNCH / 'cache_errors.flags'}")[0].cache.cache_quant == ()
