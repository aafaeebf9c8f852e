"""Other experiments than divergence from the command: their run directories, reports and resumption."""

import pytest
from commands import SMALL, run_in_process
from plain_records import read_run

from jaxkv import checkpoints
from jaxkv.errors import UserError
from jaxkv.experiments.mitigations import run as mitigations

pytestmark = pytest.mark.usefixtures("one_layer")
FEW = [
    "--num_problems=1", "--max_new_tokens=3", "--gate=off", "--control_problems=0", "--stepwise_problems=0",
    "--truth_problems=0",
]  # fmt: skip


def test_attribution_and_divergence_share_a_run(tmp_path, cache, capsys):
    small = ["--num_problems=1", "--max_new_tokens=2", "--gate=off", "--experiments=attribution,divergence"]
    small.append("--model=test-llama2")
    run_in_process(*SMALL, cache, f"--out={tmp_path / 'run'}", *small)
    shown = capsys.readouterr().out
    records = read_run(tmp_path / "run")[1]
    assert {record["experiment"] for record in records} == {"attribution", "divergence"}
    assert f"report: {tmp_path / 'run' / 'report.md'}" in shown
    page = (tmp_path / "run" / "report.md").read_text()
    assert all(f"\n## {title}\n" in page for title in ("Attribution", "Divergence"))
    with pytest.raises(UserError, match=r"decoding\.tile is 8 there, 4 here"):
        run_in_process(*SMALL, cache, f"--out={tmp_path / 'run'}", *small, "--tile=4")
    run_in_process(*SMALL, cache, f"--out={tmp_path / 'run'}", *small)
    again = capsys.readouterr()
    assert "records of attribution are done already" in again.err
    assert read_run(tmp_path / "run")[1] == records


def test_mitigations_run_once_whatever_the_precisions(tmp_path, cache, capsys, monkeypatch):
    loaded = []
    load = checkpoints.load

    def counting(*args, **kwargs):
        loaded.append(kwargs["precision"].name)
        return load(*args, **kwargs)

    monkeypatch.setattr(checkpoints, "load", counting)
    made = mitigations.make_variants
    few = lambda tile: {name: made(tile)[name] for name in ("bf16", "fp16 aligned")}  # noqa: E731
    monkeypatch.setattr(mitigations, "make_variants", few)
    out = tmp_path / "run"
    run_in_process(*SMALL, cache, *FEW, f"--out={out}", "--precision=fp16,bf16", "--experiments=mitigations")
    assert loaded == ["fp32"]
    assert f"report: {out / 'report.md'}" in capsys.readouterr().out
    run, records = read_run(out)
    assert "precision" not in run["config"]
    variants = {record["variant"]: record["precision"] for record in records}
    assert {name: kept["precision"] for name, kept in run["config"]["variants"].items()} == variants
    assert run["config"]["variants"]["fp16 aligned"]["tile"] == 8
    run_in_process(f"--flagfile={out / 'run.flags'}")
    assert "2 of 2 records of mitigations are done already" in capsys.readouterr().err
    assert read_run(out)[1] == records
    with pytest.raises(UserError, match=r"decoding\.tile is 8 there, 4 here"):
        run_in_process(f"--flagfile={out / 'run.flags'}", "--tile=4")


def test_the_full_gate_tries_the_plain_programs(tmp_path, cache, capsys):
    out = tmp_path / "run"
    run_in_process(*SMALL, cache, *FEW, "--gate=full", f"--out={out}", "-v")
    found = next(entry["gate"] for entry in read_run(out)[0]["sessions"] if "gate" in entry)
    assert found["plain"] == {"passed": True, "tolerance": 0.0, "steps": 3}
    assert "equal in every bit at 3 steps" in " ".join(capsys.readouterr().out.split())


def test_drift_patching_and_parity_from_the_command(tmp_path, cache, capsys):
    out = tmp_path / "run"
    run_in_process(*SMALL, cache, *FEW, "--max_new_tokens=2", "--experiments=drift,patching,parity", f"--out={out}")
    records = read_run(out)[1]
    assert [r["experiment"] for r in records] == ["drift"] + ["patching"] * 18 + ["parity"]
    shown = capsys.readouterr().out
    assert f"report: {out / 'report.md'}" in shown
    page = (out / "report.md").read_text()
    assert all(f"\n## {title}\n" in page for title in ("Drift by layer", "Activation patching", "JAX beside PyTorch"))


@pytest.mark.parametrize(
    ("experiment", "flag", "message"),
    [
        ("drift", "--uncached_length=bucket:64", "drift looks at one padded length"),
        ("patching", "--regime=aligned", "patching explains the plain regime"),
        ("parity", "--regime=aligned", "parity explains the plain regime"),
    ],
)
def test_what_an_experiment_cannot_use_is_refused(experiment, flag, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run_in_process(*SMALL, f"--experiments={experiment}", flag, f"--out={tmp_path / 'run'}")
