"""Tasks of lm-evaluation-harness: prompts, stop strings and scores are those that its own evaluator has."""

import json
import sys
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console
from sample_records import make_sample
from task_files import write_rows

from jaxkv import study
from jaxkv.errors import UserError
from jaxkv.records import to_record
from jaxkv.tasks import PromptSpec, lm_eval_tasks, load_task

lm_eval = pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'jaxkv[eval]'")
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

TRAIN = [{"q": f"What is {n} and {n}?", "a": f"It is {n}+{n}.\n#### {2 * n}"} for n in range(2, 9)]
TEST = [{"q": f"What is {n} and 1?", "a": f"#### {n + 1}"} for n in (10, 20, 30, 1000)]
TEXTS = [" 10+1\n#### 11 \n\nQ: more", " It is 21.", " #### 13\nNo, 31.", " #### 1,001.</s> 7"]
YAML = """
task: sums  # after gsm8k
dataset_path: json
dataset_kwargs: {{data_files: {{train: {train}, test: {test}}}}}
output_type: generate_until
training_split: train
fewshot_split: train
test_split: test
description: "Add up.\\n\\n"
doc_to_text: "Q: {{{{q}}}}\\nA:"
doc_to_target: "{{{{a}}}}"
metric_list:
  - {{metric: exact_match, regexes_to_ignore: [",", "(?s).*#### ", "\\\\.$"]}}
generation_kwargs: {{until: ["Q:", "</s>"], do_sample: false}}
num_fewshot: 3
filter_list:
  - name: strict
    filter: [{{function: regex, regex_pattern: "#### ([0-9.,]+)"}}, {{function: take_first}}]
  - name: flexible
    filter: [{{function: regex, group_select: -1, regex_pattern: "([0-9][0-9.,]*)"}}, {{function: take_first}}]
"""
# One score in parts whose mean is taken, one of the whole corpus, one of which less is better.
PARTS = """
include: {sums}
task: parts
num_fewshot: 0
process_results: !function parts.measure
metric_list:
  - {{metric: overlap, aggregation: mean, higher_is_better: true}}
  - {{metric: bleu, aggregation: bleu, higher_is_better: true}}
  - {{metric: missed, aggregation: mean, higher_is_better: false}}
filter_list: [{{name: none, filter: [{{function: take_first}}]}}]
"""
MEASURE = """
def measure(doc, results):
    said, gold = set(results[0].split()), set(doc["a"].split())
    return {"overlap": len(said & gold) / len(gold), "bleu": (doc["a"], results[0]), "missed": int(not said & gold)}
"""


class Dummy(LM):
    """Says given texts, cut at stop strings, and keeps what it was asked."""

    tokenizer_name = "dummy"

    def __init__(self, texts):
        super().__init__()
        self.texts, self.asked = texts, []

    def generate_until(self, requests):
        said = []
        for text, request in zip(self.texts, requests, strict=True):
            self.asked.append(request.args)
            for stop in request.args[1]["until"]:
                text = text.split(stop)[0]
            said.append(text)
        return said

    def apply_chat_template(self, messages, add_generation_prompt=True):
        return json.dumps(messages)

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = {"train": TRAIN, "test": TEST}
    files = {name: write_rows(tmp_path / f"{name}.jsonl", rows[name]) for name in rows}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(YAML.format(**files))
    (tmp_path / "tasks" / "parts.yaml").write_text(PARTS.format(sums=tmp_path / "tasks" / "sums.yaml"))
    (tmp_path / "tasks" / "parts.py").write_text(MEASURE)
    return tmp_path


def load(folder, name="sums", **more):
    return load_task(f"lm_eval:{folder / 'tasks' / name}.yaml", **more)


def evaluate(folder, name="sums", **more):
    """lm_eval's own results for TEXTS, and what its model was asked."""
    model = Dummy(TEXTS)
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=[name], task_manager=manager, bootstrap_iters=0, **more)
    results = {key: v for key, v in found["results"][name].items() if "," in key and "_stderr" not in key}
    return results, model.asked, found["samples"][name]


def answer(task):
    return {p.answer: task.cut(text)[0] for p, text in zip(task.problems, TEXTS, strict=True)}


def check(task, results, asked):
    assert [task.prompt(p) for p in task.problems] == [context for context, _ in asked]
    assert all(task.stops == tuple(options["until"]) for _, options in asked)
    assert task.total(answer(task)) == results


def test_prompts_stops_and_scores_are_those_of_its_evaluator(folder):
    task = load(folder)
    results, asked, samples = evaluate(folder)
    check(task, results, asked)
    assert asked[0][0].startswith("Add up.")
    assert asked[0][0].count("Q:") == 4
    assert results == {"exact_match,strict": 0.5, "exact_match,flexible": 1.0}
    for sample in samples:
        text, key = TEXTS[sample["doc_id"]], f"exact_match,{sample['filter']}"
        mine = task.score(text, task.problems[sample["doc_id"]].answer)[key]
        assert mine == {"answer": sample["filtered_resps"][0], "correct": sample["exact_match"] == 1}
    assert task.label_change(TEXTS[0], TEXTS[1], "0")["exact_match,strict"] == "answer_changed"
    assert json.loads(json.dumps(task.provenance)) == task.provenance


def test_scores_in_parts(folder):
    task = load(folder, "parts")
    results, asked, samples = evaluate(folder, "parts")
    check(task, results, asked)
    assert 0 < results["overlap,none"] < 1
    assert results["bleu,none"] > 0
    for sample in samples:
        scores = task.score(TEXTS[sample["doc_id"]], str(sample["doc_id"]))
        overlap = scores["overlap,none"]
        assert overlap.get("value", float(overlap["correct"])) == sample["overlap"]
        assert scores["missed,none"]["correct"] == (sample["missed"] == 0)


def test_a_scorer_that_fails_on_a_text_is_one_line(folder):
    """What a model says is known only in the middle of a run."""
    odd = MEASURE.replace("len(said & gold)", "len(said & gold) / ('?' not in said)")
    (folder / "tasks" / "parts.py").write_text(odd)
    task = load(folder, "parts")
    assert task.score(TEXTS[0], "0")
    told = r"answer to problem 0 by .* parts cannot be read \(.*zero\); use another"
    with pytest.raises(UserError, match=told) as error:
        task.score(" ? 11", "0")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("style", "shots"), [("few_shot", 1), ("zero_shot", 0), ("few_shot", None)])
def test_shots_and_their_seed(folder, style, shots):
    task = load(folder, spec=PromptSpec(style, shots, 7))
    check(task, *evaluate(folder, num_fewshot=shots, fewshot_random_seed=7)[:2])
    assert task.provenance["prompt"]["shots"] == (3 if shots is None else shots)


def test_chat(folder):
    task = load(folder, spec=PromptSpec("chat", None))
    _, asked, _ = evaluate(folder, apply_chat_template=True, fewshot_as_multiturn=True)
    assert [json.dumps(task.prompt(p)) for p in task.problems] == [context for context, _ in asked]
    roles = [message["role"] for message in task.prompt(task.problems[0])]
    assert roles == ["system", *["user", "assistant"] * 3, "user"]


def test_files(folder):
    """The same rows from files that are given in place of the task's own data."""
    files = {"data": str(folder / "test.jsonl"), "fewshot_data": str(folder / "train.jsonl")}
    task = load(folder, **files)
    check(task, *evaluate(folder)[:2])
    assert task.provenance["problems"]["rows"] == 4
    assert len(task.provenance["problems"]["sha256"]) == 64
    few = load(folder, data=files["fewshot_data"], spec=PromptSpec("zero_shot"))
    assert [few.prompt(p) for p in few.problems] == [f"Add up.\n\nQ: {row['q']}\nA:" for row in TRAIN]


def test_gsm8k_is_ours_but_for_the_spelling_of_numbers(tmp_path):
    """Our strict score is lm_eval's `strict-match` of its own gsm8k."""
    path = write_rows(tmp_path / "gsm8k.jsonl", [{"question": q["q"], "answer": q["a"]} for q in TEST])
    spec = PromptSpec("zero_shot")
    theirs, ours = (load_task(name, data=path, spec=spec) for name in ("lm_eval:gsm8k", "gsm8k"))
    for mine, other, text in zip(ours.problems, theirs.problems, TEXTS, strict=True):
        assert ours.prompt(mine) == theirs.prompt(other)
        found = theirs.score(text, other.answer)["exact_match,strict-match"]["correct"]
        assert ours.score(text, mine.answer)["strict"]["correct"] == found


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("output_type: generate_until", "output_type: multiple_choice", "kind multiple_choice.*generate_until"),
        ("num_fewshot:", "repeats: 5\nnum_fewshot:", "wants 5 samples a problem"),
        ("num_fewshot:", "unsafe_code: true\nnum_fewshot:", "runs code that the model wrote"),
        ("task: sums", "group: sums", "has no line 'task: NAME'"),
        ("{q}", "{absent.field}", "lm_eval's task .* cannot be read"),
        ("task: sums", "task: [sums", "mend the file|has no line"),
    ],
)
def test_refusals(folder, old, new, match):
    path = folder / "tasks" / "sums.yaml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=match) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_refused_requests(folder, monkeypatch):
    test, train = str(folder / "test.jsonl"), str(folder / "train.jsonl")
    with pytest.raises(UserError, match=r"has no task 'gsm8kk'.*did you mean 'gsm8k'"):
        load_task("lm_eval:gsm8kk")
    with pytest.raises(UserError, match="no boxed prompt"):
        load(folder, spec=PromptSpec("boxed"))
    with pytest.raises(UserError, match="shows 3 worked examples of its split 'train'; give them with --fewshot_data"):
        load(folder, data=test)
    with pytest.raises(UserError, match="give both or neither"):
        load(folder, fewshot_data=train)
    with pytest.raises(UserError, match="of the kind multiple_choice"):
        load_task("lm_eval:arc_easy")
    (folder / "odd.jsonl").write_text('{"q": 1}\n{"q": "one"}\n')
    with pytest.raises(UserError, match=r"odd\.jsonl cannot be read .*same columns and types"):
        load(folder, data=str(folder / "odd.jsonl"), spec=PromptSpec("zero_shot"))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    lm_eval_tasks._list_yamls.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'jaxkv\[eval\]'"):
        load_task("lm_eval:gsm8k")


def test_a_run_records_its_totals_and_scores_in_parts(folder):
    """In the record of a sample, and of all together as lm_eval aggregates them."""
    task = load(folder, "parts")
    records, texts = [], answer(task)
    for problem in task.problems:
        sample, text = make_sample(problem.index), texts[problem.answer]
        scores = task.score(text, problem.answer)
        sample["arms"] = {arm: sample["arms"][arm] | {"text": text, "scores": scores} for arm in sample["arms"]}
        sample["label_change"] = dict.fromkeys(scores, "same")
        record = to_record(sample)
        assert json.loads(msgspec.json.encode(record.arms.cached.scores)) == scores
        records.append(record)
    noted = {}
    run = SimpleNamespace(read=lambda: records, record_provenance=noted.update)
    study._record_totals(SimpleNamespace(task=task), run, Console(quiet=True))
    results, _, _ = evaluate(folder, "parts")
    assert noted == {"totals": {"uncached": results, "cached": results}}
