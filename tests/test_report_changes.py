"""The report of runs with changed caches: parts joined, statements over runs, every experiment with its section."""

import dataclasses
import json

import accumulation_records
import pytest
from injection_records import ERROR, error, make_change, make_control, some
from study_records import make_run, make_samples

from jaxkv.analysis.document import to_markdown
from jaxkv.analysis.gather import describe_origin, join_parts
from jaxkv.analysis.page import CHANGES_TITLE, TITLE, write_blocks, write_study
from jaxkv.analysis.page_changes import DIFFERS, changes_alone, list_statements
from jaxkv.analysis.study import summarize_study
from jaxkv.report import render_claims

N = 24
POINTS = error("points", (0, 0.5))
CONTROL = make_control(some(20, N))


def part(name, change, spec, kl=0.5, fingerprint="f", task="gsm8k"):
    records = CONTROL + make_change(change, spec, some(10, N), kl)
    flags = f"--cache_error={change}\n--out=/runs/{name}\n"
    return make_run(records, name, fingerprint=fingerprint, flags=flags, experiments=["injection"], task=task)


def parts(flips=0.5, **more):
    return [part("a/x", "normal:0,0.5", ERROR, flips, **more), part("b/x", "points:0,0.5", POINTS, **more)]


def test_parts_are_joined_under_the_name_of_what_was_run():
    (run,) = join_parts(parts())
    assert run.name == "tiny-fp16-injection-gsm8k"
    assert [part.name for part in run.parts] == ["a/x", "b/x"]
    assert len(run.records) == 3 * N
    assert describe_origin(run)["command"].split("\n") == [
        "python -m jaxkv.launch --cache_error=normal:0,0.5",
        "python -m jaxkv.launch --cache_error=points:0,0.5",
    ]


def test_what_is_no_part_stays_apart():
    alone = part("a/x", "normal:0,0.5", ERROR)
    other = part("b/x", "points:0,0.5", POINTS, fingerprint="g")
    clean = CONTROL[0] | {"prompt_tokens": 99}
    disagrees = dataclasses.replace(parts()[1], records=[clean, *parts()[1].records[1:]])
    divergence = [make_run(make_samples(count=2), name, fingerprint="d") for name in "cd"]
    for runs in ([alone], [alone, other], [alone, disagrees], divergence):
        assert join_parts(runs) == runs


def test_joined_runs_of_one_name_are_numbered():
    runs = join_parts([*parts(), *parts(fingerprint="g")])
    assert [run.name for run in runs] == ["tiny-fp16-injection-gsm8k", "tiny-fp16-injection-gsm8k-2"]


@pytest.fixture(scope="module")
def study():
    worse, better = parts(2.0), parts(0.1, fingerprint="g", task="ifeval")
    records = accumulation_records.both()
    grown = make_run(records, "grown", experiments=["accumulation"], num_problems=accumulation_records.N)
    return summarize_study([*join_parts([*worse, *better]), grown])


def test_a_statement_on_which_runs_differ_is_said_to(study):
    said = {text.split(":")[0]: (verdict, runs) for text, verdict, runs in list_statements(study)}
    verdict, runs = said["E1c"]
    assert verdict == DIFFERS
    assert runs == {"holds": ["tiny-fp16-injection-gsm8k"], "does not hold": ["tiny-fp16-injection-ifeval"]}
    assert said["K1a"][0] == "holds"
    assert "E6a" not in said  # no quantizer was run


def test_the_report_begins_with_the_statements_and_has_all_sections(study):
    page = to_markdown("t", write_blocks(study))
    assert changes_alone(study)
    assert "| C1:" not in page
    statements = page.index("| E1c: ")
    assert statements < page.index("## Changed caches") < page.index("## Quantized caches along a text")
    assert "holds: tiny-fp16-injection-gsm8k" in page


def test_a_terminal_counts_runs_by_verdict(study):
    numbers, _, counts = ([str(cell) for cell in column.cells] for column in render_claims(study).columns)
    assert counts[numbers.index("E1c")] == "holds: 1 of 2\ndoes not hold: 1 of 2"
    assert counts[numbers.index("K1a")] == "holds: 1 of 1"


def test_beside_divergence_the_claims_come_first():
    study = summarize_study([make_run(make_samples(count=2), "d"), *join_parts(parts())])
    page = to_markdown("t", write_blocks(study))
    assert page.index("| C1:") < page.index("## Statements on changed caches") < page.index("## Changed caches")


def write_run(directory, run):
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps(run.run))
    (directory / "run.flags").write_text(run.flags)
    (directory / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in run.records))


def test_a_report_of_directories_joins_them(tmp_path):
    for run in parts():
        write_run(tmp_path / "runs" / run.name, run)
    (tmp_path / "out").mkdir()
    study = write_study([tmp_path / "runs"], tmp_path / "out")
    assert [condition["name"] for condition in study["conditions"]] == ["tiny-fp16-injection-gsm8k"]
    assert (tmp_path / "out" / "report.md").read_text().startswith(f"# {CHANGES_TITLE}\n")
    assert TITLE not in (tmp_path / "out" / "report.html").read_text()
