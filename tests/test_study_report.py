"""The report of several runs: every figure comes from records, one file without a network, life without jax."""

import html.parser
import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import scipy.stats
from layer_records import make_drift, make_patching
from plain_records import divergence_over_tokens, margin_points, summarize_study, write_blocks
from sample_records import grade, make_invalid
from sealing import reseal
from study_records import align, as_torch, make_parity, make_run, make_samples, write_run

from jaxkv import records
from jaxkv.errors import UserError
from jaxkv.overview.curves import bin_steps
from jaxkv.overview.gather import describe_command, find_runs, name_runs, read_runs
from jaxkv.overview.page import FILES, report_run, write_study
from jaxkv.report import main
from jaxkv.reporting.document import to_markdown
from jaxkv.reporting.html import to_html
from jaxkv.reporting.metrics import free_running


def flips(problem):
    return (5, 9) if problem % 3 == 0 else ()


def make_study(change=None):
    """fp16, fp32, an aligned, a PyTorch and a parity run; `change` gets the fp16 samples first."""
    samples = make_samples(flips=flips)
    samples[1]["teacher_forced"]["margin"][2] = 0.0
    if change:
        change(samples)
    return [
        make_run(samples, name="fp16"),
        make_run(make_samples("fp32"), name="fp32", precision="fp32"),
        make_run(align(make_samples()), name="aligned"),
        make_run(as_torch(make_samples(flips=lambda p: (5,) if p == 3 else ())), name="torch"),
        make_run(make_parity(), name="parity"),
    ]


def render(runs):
    study = summarize_study(runs)
    blocks = write_blocks(runs, ["2604.15409"])
    return json.dumps(study), to_html("title", blocks), to_markdown("title", blocks)


def as_text(runs):
    """The report in Markdown, which draws no charts."""
    return to_markdown("title", write_blocks(runs, ["2604.15409"]))


@pytest.fixture(scope="module")
def rendered():
    return render(make_study())


@pytest.fixture(scope="module")
def unchanged():
    return render(make_study()[:1])


# Figures come from records.


def test_a_tasks_own_results_are_shown():
    run, other = make_study()[:2]
    totals = {"cached": {"f1,none": 0.5123, "bleu,none": "nan"}, "uncached": {"f1,none": 0.5, "bleu,none": 12.0}}
    run.run["sessions"] += [{"started": "2026-01-03T00:00:00+00:00", "totals": totals}, dict(run.run["sessions"][0])]
    _, page, text = render([run, other])
    assert "**The task's own results, over all valid texts of an arm**" in text
    assert "| tiny fp16 greedy | f1,none | 0.5123 | 0.5 |" in text
    assert "| tiny fp16 greedy | bleu,none | nan | 12 |" in text
    assert "own results" not in as_text([other])
    assert "f1,none" in page


def take(sample, arm, step, token):
    """Has an arm take another token, and the free runs say so."""
    sample["arms"][arm]["tokens"][step] = token
    sample["free_running"] = free_running(*(sample["arms"][name]["tokens"] for name in ("uncached", "cached")))


CHANGES = {
    "a flip": lambda s: s[1]["teacher_forced"]["flip"].__setitem__(3, True),
    "a KL": lambda s: s[1]["teacher_forced"]["kl"].__setitem__(3, 0.25),
    "a margin": lambda s: s[1]["teacher_forced"]["margin"].__setitem__(3, 2e-3),
    "a tie": lambda s: s[1]["teacher_forced"]["margin"].__setitem__(2, 1.0),
    "an answer": lambda s: grade(s[1], (False, True)),
    "a token": lambda s: take(s[1], "cached", 6, 77),
    "a divergence": lambda s: take(s[0], "uncached", 5, s[0]["arms"]["cached"]["tokens"][5]),
    "a rerun": lambda s: s[1]["controls"]["cached_rerun"]["bit_equal"].__setitem__(0, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_record_changes_the_report(unchanged, name):
    """Of one run, so that no other says it."""
    summary, page, _ = render(make_study(CHANGES[name])[:1])
    assert summary != unchanged[0]
    assert page != unchanged[1]


def test_markdown_and_page_say_the_same(rendered):
    _, page, text = rendered
    shown = "".join(html.unescape(re.sub("<[^>]*>", "", page)).split())
    for line in text.splitlines():
        if line.startswith("- "):
            said = re.sub("[`⟦⟧]", "", line.partition(": ``")[2] or line[2:])  # an example's side has a heading
            assert "".join(said.split()) in shown, line


def test_parts_are_there_in_order(rendered):
    headings = re.findall(r"^## (.*)", rendered[2], re.M)
    assert headings == [
        "Where texts part", "All runs at a glance", "How far the arms are apart", "Controls", "Divergence",
        "FP32 against 16 bits", "Accuracy", "JAX beside PyTorch", "Claims of papers", "Method",
        "Provenance and commands",
    ]  # fmt: skip
    assert rendered[2].index("**What this means.**") < rendered[2].index("## ")


def test_case_9_exact_ties_are_listed(rendered):
    """vllm-project/vllm 5543: margin 0 is a tie, and the rule is the lowest id."""
    text = rendered[2]
    assert "the lowest token id wins in both arms" in text
    assert "| tiny fp16 greedy | 1 of 240 | " in text
    assert "| tiny fp16 greedy | 1 | 2 | no flip |" in text


def test_invalid_samples_are_named_and_counted_nowhere():
    runs = make_study(lambda samples: samples.append(make_invalid(20)))
    text = as_text(runs)
    said = "tiny fp16 greedy: 1 samples invalid at resid_pre, layer 8 (cached, inf, from position 5); counted nowhere."
    assert said in text
    assert "12 of 13" in text
    assert summarize_study(runs)["flips"]["fp16"]["flips"]["total"] == 240
    alone = make_run([make_invalid(i) for i in range(3)], name="gemma")
    assert "| tiny fp16 greedy | 0 of 3 | none counted |" in as_text([alone])


def test_a_broken_record_names_run_and_field(tmp_path):
    write_run(tmp_path / "fp16", make_run(make_samples(count=3)))
    path = tmp_path / "fp16" / "samples.jsonl"
    path.write_text(path.read_text().replace('"seed":0', '"seed":null'))
    reseal(tmp_path / "fp16")
    with pytest.raises(UserError, match=r"fp16/samples\.jsonl, line 1: sampling\.seed: expected `int`, got `null`"):
        read_runs([tmp_path])


# The page.


class Scan(html.parser.HTMLParser):
    """Collects tags and attributes."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]


def test_the_page_is_one_file_that_fetches_nothing(rendered):
    scan = Scan(rendered[1])
    assert not {"link", "img", "iframe", "object"} & set(scan.tags)
    for _, name, value in scan.attributes:
        assert name not in ("src", "srcset", "style", "onload")
        if name == "href":
            assert value.startswith("#")
    assert "http" not in rendered[1].replace("http-equiv", "")
    assert "url(" not in rendered[1].replace("url(#", "")
    assert scan.tags.count("script") == 1
    assert "@import" not in rendered[1]
    anchors = {value for tag, name, value in scan.attributes if name == "id" and tag == "h2"}
    assert {value[1:] for _, name, value in scan.attributes if name == "href"} == anchors
    assert ("meta", "content", "width=device-width, initial-scale=1") in scan.attributes
    assert "prefers-color-scheme: dark" in rendered[1]
    assert "@media print" in rendered[1]


def test_what_records_say_is_no_markup():
    runs = [make_run(make_samples(), name="<b>&amp;|`x`</b>", model={"name": "<script>alert(1)</script>"})]
    _, page, text = render(runs)
    assert "b" not in Scan(page).tags
    assert Scan(page).tags.count("script") == 1
    assert "&lt;script&gt;" in page
    assert "\\|" in text


def test_charts_take_the_colours_of_the_page(rendered):
    scan = Scan(rendered[1])
    drawn = [value for tag, name, value in scan.attributes if name in ("fill", "stroke") and tag != "stop"]
    assert {f"var(--s{number})" for number in (0, 2)} | {"var(--ink)", "var(--soft)", "var(--line)"} <= set(drawn)
    assert not [value for value in drawn if value.startswith("#") and value not in ("#ffffff", "#111111")]
    assert all(value for tag, name, value in scan.attributes if tag == "svg" and name == "aria-label")


# Curves.


def test_means_are_taken_in_bins():
    (first, second) = bin_steps([[1, 3, 5], [2, 4]], bins=2)
    assert first == {"step": 0.5, "mean": 2.5, "interval": None, "tokens": 4}
    assert second == {"step": 2.0, "mean": 5.0, "interval": None, "tokens": 1}
    assert bin_steps([]) == []


def test_divergence_is_a_step_function():
    samples = make_samples(count=4, flips=lambda p: {0: (2,), 1: (2,), 2: (11,)}.get(p, ()))
    curve = divergence_over_tokens(samples)
    assert [entry[:2] for entry in curve] == [[0, 0.0], [3, 0.5], [12, 0.75], [20, 0.75]]
    assert curve[1][2:] == pytest.approx(scipy.stats.binomtest(2, 4).proportion_ci(0.95))


def test_all_flips_are_drawn():
    samples = make_samples(count=60, flips=flips)
    found = margin_points(samples, points=100)
    assert len(found["flips"]) == 40
    assert found["every"] == 12
    assert len(found["others"]) == 97


# Directories and the command.


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep")
    for run in make_study():
        write_run(path / run.name, run)
    return path


def test_a_sweep_is_one_report_without_jax(sweep, tmp_path):
    code = f"""import runpy, sys
class Block:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "orbax", "transformers", "torch", "absl", "matplotlib"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
study = {str(sweep)!r}, "--out={tmp_path}", "--claims=2604.15409"
for wanted, *arguments in ((0, *study), (0, {str(sweep / "fp32")!r}), (2, "nowhere")):
    sys.argv = ["report", *arguments]
    try:
        runpy.run_module("jaxkv.report", run_name="__main__")
    except SystemExit as ended:
        assert ended.code == wanted"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0
    assert re.fullmatch("error: nowhere.* not a directory.*\n", child.stderr)
    assert "argmax flips" in child.stdout
    assert "not seen on tiny" in " ".join(child.stdout.split())
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [c["name"] for c in summary["conditions"]] == ["aligned", "fp16", "fp32", "parity", "torch"]
    assert summary["conditions"][0]["origin"]["commands"] == ["python -m jaxkv.launch --precision=fp16"]
    assert not any(str(sweep) in (tmp_path / name).read_text() for name in FILES)
    made = [(sweep / "fp32" / name).read_bytes() for name in FILES]
    report_run(sweep / "fp32")
    assert [(sweep / "fp32" / name).read_bytes() for name in FILES] == made


def test_several_runs_go_where_they_are_told(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(sweep / "fp16"), str(sweep / "fp32")]) == 0
    assert (tmp_path / "study-report" / "report.html").exists()
    assert not (sweep / "fp16" / "report.md").exists()
    assert main([str(sweep / "fp16")]) == 0
    assert (sweep / "fp16" / "report.md").exists()
    assert "argmax flips" in capsys.readouterr().out


def test_one_run_gets_a_report_with_a_section_for_each_experiment(tmp_path, capsys):
    layers = [*make_drift(count=2), *make_patching(count=2)]
    write_run(tmp_path / "all", make_run([*make_samples(count=2), *make_parity(count=2), *layers]))
    assert main([str(tmp_path / "all")]) == 0
    page = (tmp_path / "all" / "report.md").read_text()
    for title in ("The run in full", "Drift by layer", "Activation patching", "JAX beside PyTorch"):
        assert page.count(f"\n## {title}\n") == 1
    assert "The framework gap is 100 times the cache gap" in page
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert {"divergence", "drift", "patching", "parity"} < set(summary)
    html = (tmp_path / "all" / "report.html").read_text()
    assert '<h2 id="drift">' in html
    assert html.count("<figure>") == page.count("Figure (in report.html): ") > 3
    assert "torch uncached" in capsys.readouterr().out


def test_no_runs_are_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "holds none" in error
    assert error.count("\n") == 1


def test_runs_are_found_once_and_named_apart(sweep, tmp_path):
    found = find_runs([sweep / "fp16", sweep])
    assert [path.name for path in found] == ["fp16", "aligned", "fp32", "parity", "torch"]
    other = tmp_path / "other" / "fp16"
    other.mkdir(parents=True)
    assert name_runs([sweep / "fp16", other]) == [f"{sweep.name}/fp16", "other/fp16"]


def test_commands_name_no_place():
    flags = "--model=m\n--checkpoint=/a/b/c.gguf\n--out=/runs/x\n--data=/d/t.jsonl\n--compilation_cache=/c\n"
    assert describe_command(flags) == "python -m jaxkv.launch --model=m --checkpoint=c.gguf --data=t.jsonl"
    assert describe_command("--checkpoint=random:0\n") == "python -m jaxkv.launch --checkpoint=random:0"
    assert describe_command("") is None


def test_records_without_a_section_are_named():
    run = make_run([*make_samples(), {"experiment": "later", "key": ["later", 1]}])
    assert "Records this report has no section for: fp16: later." in as_text([run])


def test_a_copy_of_a_run_is_the_same_run(tmp_path):
    run = make_run(make_samples(count=4))
    write_run(tmp_path / "a", run)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    time.sleep(0.01)  # runs of one configuration begin in another millisecond
    write_run(tmp_path / "again", run)
    once = write_study([tmp_path / "a"], tmp_path)
    study = write_study([tmp_path / name for name in ("a", "copy")], tmp_path)
    assert study["copies"] == ["copy is a copy of a and counts once"]
    assert len(study["conditions"]) == 1
    assert study["claims"] == once["claims"]
    assert "copy is a copy of a and counts once." in (tmp_path / "report.md").read_text()
    assert len(write_study([tmp_path / "a", tmp_path / "again"], tmp_path)["replicates"]) == 1
    with records.RunDirectory.open(tmp_path / "copy", run.run["config"]) as directory:
        directory.append(make_samples(count=5)[4])
    study = write_study([tmp_path / "a", tmp_path / "copy"], tmp_path)
    assert [condition["divergence"]["problems"]["total"] for condition in study["conditions"]] == [5]


def test_a_report_does_not_overwrite_the_users(tmp_path):
    write_run(tmp_path / "runs" / "a", make_run(make_samples(count=2)))
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.md").write_text("mine")
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 2
    assert [path.read_text() for path in out.iterdir()] == ["mine"]
    (out / "report.md").unlink()
    for _ in range(2):
        assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0


def test_resuming_is_no_difference(tmp_path):
    run = make_run(make_samples(count=2))
    for number, more in enumerate(({"gate": {"passed": True, "problems": 2, "steps": 4, "tile": 8}}, {})):
        with records.RunDirectory.open(tmp_path, run.run["config"], provenance={"git": "f" * 40}) as directory:
            directory.append(run.records[number])
            directory.record_provenance({**more, "seconds": 1.5 + number, "asked": {"injection": [["none", number]]}})
    report_run(tmp_path)
    assert "sessions of this run differ" not in (tmp_path / "report.md").read_text()
    with records.RunDirectory.open(tmp_path, run.run["config"], provenance={"git": "e" * 40}):
        pass
    report_run(tmp_path)
    assert "sessions of this run differ" in (tmp_path / "report.md").read_text()
