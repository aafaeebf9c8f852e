"""The report of runs with changed caches: parts joined, statements over runs, every experiment with its section."""

import dataclasses

import accumulation_records
import pytest
from injection_records import ERROR, error, make_change, make_control, some
from plain_records import join_parts, join_runs, summarize_study, to_typed, write_blocks
from shown import on_terminal
from study_records import make_run, make_samples, write_run

from jaxkv.errors import UserError
from jaxkv.experiments.experiment import CHANGING
from jaxkv.experiments.reports import REPORTS
from jaxkv.overview.gather import describe_origin
from jaxkv.overview.page import CHANGES_TITLE, TITLE, changes_alone, write_study
from jaxkv.overview.papers import CHANGED, DIFFERS, list_statements, list_verdicts, read_asked, say_verdict
from jaxkv.reporting.document import to_markdown

N = 24
NAME = "tiny-fp16-greedy-injection"
POINTS = error("points", (0, 0.5))
CONTROL = make_control(some(20, N))


def part(name, change, spec, kl=0.5, fingerprint="f", task="gsm8k"):
    records = CONTROL + make_change(change, spec, some(10, N), kl)
    flags = f"--cache_error={change}\n--out=/runs/{name}\n"
    more = {"experiments": ["injection"], "task": task, "num_problems": N, "sampling": {"sampler": "greedy"}}
    return make_run(records, name, fingerprint=fingerprint, flags=flags, **more)


def parts(kl=0.5, **more):
    return [part("a/x", "normal:0,0.5", ERROR, kl, **more), part("b/x", "points:0,0.5", POINTS, **more)]


def accumulated(name, quantizer, tokens="0"):
    """A run of one quantizer whose clean arm took tokens of this hash."""
    records = accumulation_records.make_quantizer(quantizer)
    records = [record | {"tokens_sha256": tokens * 64} for record in records]
    return make_run(records, name, fingerprint="f", experiments=["accumulation"], num_problems=accumulation_records.N)


def test_parts_are_joined_under_the_name_of_what_was_run():
    (run,), notes = join_parts(parts())
    assert run.name == "tiny-fp16-greedy-injection-gsm8k"
    assert (len(run.records), len(run.run["sessions"])) == (3 * N, 2)
    origin = describe_origin(run)
    assert origin["parts"] == ["a/x", "b/x"]
    assert origin["commands"] == [
        "python -m jaxkv.launch --cache_error=normal:0,0.5",
        "python -m jaxkv.launch --cache_error=points:0,0.5",
    ]
    assert notes == []


def test_what_is_no_part_stays_apart():
    alone = part("a/x", "normal:0,0.5", ERROR)
    other = part("b/x", "points:0,0.5", POINTS, fingerprint="g")
    divergence = [make_run(make_samples(count=2), name, fingerprint="d") for name in "cd"]
    mixed = parts()
    for run in mixed:
        run.run["config"]["experiments"] = ["injection", "drift"]
    for runs in ([alone], [alone, other], divergence, mixed):
        assert join_parts(runs) == (to_typed(runs), [])


def test_a_run_that_disagrees_leaves_the_others_joined():
    clean = CONTROL[0] | {"prompt_sha256": "cd" * 32}
    odd = part("c/x", "uniform:-1.5,1.5", POINTS)
    odd = dataclasses.replace(odd, records=[clean, *odd.records[1:]])
    (joined, apart), notes = join_parts([parts()[0], odd, parts()[1]])
    assert ([part.name for part in joined.parts], apart) == (["a/x", "b/x"], to_typed(odd))
    assert notes[0].startswith("a/x and c/x have different records of injection 0 none 0")


def test_a_part_without_records_is_a_part():
    empty = dataclasses.replace(parts()[1], records=[])
    assert [part.name for part in join_parts([parts()[0], empty])[0][0].parts] == ["a/x", "b/x"]


def test_accumulation_is_joined_where_clean_arms_took_the_same_tokens():
    kvarn, kivi = accumulation_records.KVARN, "kivi:k2v2"
    (run,), _ = join_parts([accumulated("a", kvarn), accumulated("b", kivi)])
    assert len(run.parts) == 2
    others = [accumulated("a", kvarn), accumulated("b", kivi, "1")]
    assert join_parts(others)[0] == to_typed(others)
    with pytest.raises(UserError, match="a and b have different records of accumulation 0,"):
        join_runs("both", others)
    with pytest.raises(UserError, match="a and c are of different conditions"):
        join_runs("both", [others[0], make_run([], "c")])


def test_joined_runs_of_one_name_get_their_fingerprint():
    runs, _ = join_parts([*parts(), *parts(fingerprint="g")])
    assert [run.name for run in runs] == [f"tiny-fp16-greedy-injection-gsm8k{end}" for end in ("", "-g")]


def test_changed_experiments_are_those_with_sections():
    assert set(CHANGED) == set(CHANGING) <= set(REPORTS)


@pytest.fixture(scope="module")
def runs():
    worse, better = parts(2.0), parts(0.1, fingerprint="g", task="ifeval")
    records = accumulation_records.both()
    grown = make_run(records, "grown", experiments=["accumulation"], num_problems=accumulation_records.N)
    return [*join_parts([*worse, *better])[0], grown]


@pytest.fixture(scope="module")
def study(runs):
    return summarize_study(runs)


def test_a_statement_on_which_runs_differ_is_said_to(study):
    said = {text.split(":")[0]: (verdict, runs) for text, verdict, runs in list_statements(study)}
    verdict, runs = said["E1c"]
    assert verdict == DIFFERS
    assert runs == {"holds": [f"{NAME}-gsm8k"], "does not hold": [f"{NAME}-ifeval"]}
    assert said["K1a"][0] == "holds"
    assert "E6a" not in said  # no quantizer was run


def test_statements_are_in_the_report_of_those_who_ask(study, runs):
    papers = {"shebel-2025": "E1c", "2606.03458": "K1a"}
    assert changes_alone(study)
    for asked in ((), *((paper,) for paper in papers), tuple(papers)):
        page = to_markdown("t", write_blocks(runs, asked))
        assert page.index("## Changed caches") < page.index("## Quantized caches along a text")
        assert ("## Claims of papers" in page) == bool(asked)
        assert "C1:" not in page
        for paper, name in papers.items():
            assert (f"| {name}: " in page) == (paper in asked)
    assert f"holds: {NAME}-gsm8k" in page
    assert "| seen |" in page


def test_an_unknown_paper_is_named_with_those_that_there_are():
    with pytest.raises(UserError, match=r"no claims of '1\.2' are known; name some of 2604\.15409, "):
        read_asked("2604.15409,1.2")
    assert read_asked("") == ()


def test_a_statement_that_some_runs_leave_open_is_decided_on_the_others():
    open_ = parts(0.5, fingerprint="g", task="ifeval")
    runs, _ = join_parts([*parts(2.0), *open_])
    said = {text.split(":")[0]: verdict for text, verdict, _ in list_statements(summarize_study(runs))}
    assert said["E1c"] == "holds on 1 of 2"
    assert said["E1b"] == "cannot tell"


def test_perplexity_of_the_clean_cache_alone_changes_none():
    clean = {"perplexity": {"changes": [{"change": "none"}]}}
    changed = {"perplexity": {"changes": [{"change": "none"}, {"change": "int4"}]}}
    assert not changes_alone({"conditions": [clean]})
    assert changes_alone({"conditions": [clean, changed]})
    assert not changes_alone({"conditions": [changed, {"drift": {"status": "ok"}}]})


def test_a_terminal_shows_verdicts_to_those_who_ask(study):
    text = on_terminal(list_verdicts(study, ["2606.03458"]))
    assert "K1a" in text
    assert "E1c" not in text
    assert list_verdicts(study, ()) == []


def test_claims_are_worded_as_seen_here_or_not():
    runs = [make_run(make_samples(count=2), "d"), *join_parts(parts())[0]]
    page = to_markdown("t", write_blocks(runs, ["2604.15409", "shebel-2025"]))
    claims = page[page.index("## Claims of papers") :]
    assert claims.index("| C1:") < claims.index("| E1b:")
    assert say_verdict("not reproduced", ["a", "b"]) == "not seen on a, b"
    assert say_verdict("holds on 1 of 2", ["a"]) == "seen on 1 of 2"
    assert "reproduced" not in claims.split("| claim | here | figure")[0]
    assert "## Claims" not in to_markdown("t", write_blocks(runs))


def test_a_report_of_directories_joins_them(tmp_path):
    for run in parts():
        write_run(tmp_path / "runs" / run.name, run)
    (tmp_path / "out").mkdir()
    study = write_study([tmp_path / "runs"], tmp_path / "out")
    assert [condition["name"] for condition in study["conditions"]] == [f"{NAME}-gsm8k"]
    assert (tmp_path / "out" / "report.md").read_text().startswith(f"# {CHANGES_TITLE}\n")
    assert TITLE not in (tmp_path / "out" / "report.html").read_text()
