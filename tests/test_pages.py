"""Every page under analysis/ is what the records kept beside it give, byte for byte."""

import importlib
import json
import pathlib
import sys

import pytest
from cases import daily
from sealing import reseal

from jaxkv.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "analysis"))
rebuild = importlib.import_module("rebuild")
sys.path.pop(0)


# The study's takes as long as all others together, and .ci/run checks it by the command.
@pytest.mark.parametrize("page", daily([page for page in rebuild.PAGES if page != "study"], rebuild.PAGES))
def test_a_page_is_what_its_records_give(page):
    assert rebuild.check(page) == []


def test_figures_are_quoted_as_the_pages_have_them():
    assert rebuild.quote.check() == []


def test_a_quoted_figure_is_filled_and_one_that_is_nowhere_is_named():
    mark = "<!--q decode_speed_h100.json | results.0.model-->{}<!--/q-->"
    assert rebuild.quote.fill(mark.format("by hand")) == mark.format("llama2-7b")
    with pytest.raises(LookupError, match="no such section"):
        rebuild.quote.fill("<!--q law/README.md | no such section | a | b-->1<!--/q-->")


def test_every_file_is_a_page_or_a_measurement():
    folders = {place.name for place in rebuild.HERE.iterdir() if place.is_dir() and place.name != "__pycache__"}
    assert folders == set(rebuild.PAGES)
    assert sum(file.stat().st_size for file in rebuild.HERE.rglob("runs.tar.xz")) < 20e6


@pytest.fixture
def runs(tmp_path):
    """The kept runs of the ablation, unpacked."""
    return rebuild.unpack("ablation", tmp_path)


def test_a_record_changed_by_hand_changes_the_page(runs, tmp_path):
    samples = next(run / "samples.jsonl" for run in runs if run.name == "gemma3-270m-kvarn-32")
    lines = samples.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"change":"kvarn:k2v2,tile=32,first=16"' in line)
    record = json.loads(lines[at])
    record["nats"]["cached"] += 10
    lines[at] = json.dumps(record, separators=(",", ":"))
    samples.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="changed"):
        rebuild.PAGES["ablation"][1](runs, tmp_path)
    reseal(samples.parent)
    rebuild.PAGES["ablation"][1](runs, tmp_path)
    assert (tmp_path / "README.md").read_bytes() != (rebuild.HERE / "ablation" / "README.md").read_bytes()


def test_kept_runs_name_no_place_of_the_machine_they_were_made_on(tmp_path):
    archives = [page for page in rebuild.PAGES if (rebuild.HERE / page / "runs.tar.xz").exists()]
    assert archives
    for run in [run for page in archives for run in rebuild.unpack(page, tmp_path)]:
        for file, sign in (("run.json", ": "), ("run.flags", "=")):
            for line in (run / file).read_text().splitlines():
                assert not line.partition(sign)[2].strip(' ",').startswith(("/", "./")), (run.name, line)
                assert not line.startswith(("--out=", "--compilation_cache=")), (run.name, line)


def test_what_is_kept_is_the_same_however_often(runs, monkeypatch, tmp_path):
    monkeypatch.setattr(rebuild, "HERE", tmp_path)
    two = sorted(runs, key=lambda run: (run / "samples.jsonl").stat().st_size)[:2]  # packing takes its time
    (first, again) = (rebuild.keep(name, two).read_bytes() for name in ("one", "two"))
    assert first == again
    assert [run.name for run in rebuild.unpack("one", tmp_path / "out")] == sorted(run.name for run in two)
