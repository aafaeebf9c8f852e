"""Scores of 349 answers beside those of lm-evaluation-harness and math-verify, each judged by hand.

`tests/data/judged_answers.jsonl` has 28 answers that a model wrote to problems of ours and 321 written by hand in the
styles of models. `right` is the judgement: whether the text settles on the gold. `why` says what a difference is about;
a row without it has none.
"""

import functools
import importlib.resources
import json
import pathlib

import pytest
import yaml

from jaxkv.tasks.scoring import cut_at_stop, score

ROWS = [json.loads(line) for line in (pathlib.Path(__file__).parent / "data/judged_answers.jsonl").open()]


@functools.cache
def harness():
    """The filters and the metric of gsm8k as the installed harness defines them."""
    metrics = pytest.importorskip("lm_eval.api.metrics", reason="pip install 'jaxkv[eval]'")
    from lm_eval.filters.extraction import RegexFilter

    task = yaml.safe_load((importlib.resources.files("lm_eval") / "tasks/gsm8k/gsm8k.yaml").read_text())
    arguments = {entry["name"]: dict(entry["filter"][0]) for entry in task["filter_list"]}
    for entry in arguments.values():
        assert entry.pop("function") == "regex"
    filters = {name: RegexFilter(**entry) for name, entry in arguments.items()}
    (metric,) = task["metric_list"]
    options = {key: metric[key] for key in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    return filters, functools.partial(metrics.exact_match_hf_evaluate, **options)


def harness_scores(text, gold):
    filters, match = harness()
    found = {}
    for name, key in (("strict-match", "strict"), ("flexible-extract", "flexible")):
        ((answer,),) = filters[name].apply([[text]], [{}])
        found[key] = bool(match(predictions=[answer], references=[f"#### {gold}"])["exact_match"])
    return found


def verified(text, gold):
    math_verify = pytest.importorskip("math_verify", reason="pip install 'jaxkv[eval]'")
    return bool(math_verify.verify(math_verify.parse(gold), math_verify.parse(text)))


def test_scores_are_as_judged():
    for row in ROWS:
        ours = {name: one["correct"] for name, one in score(row["text"], row["gold"]).items()}
        assert ours == row["ours"], row["text"]


def test_the_others_are_as_recorded():
    for row in ROWS:
        text = cut_at_stop(row["text"])
        assert harness_scores(text, row["gold"]) == row["harness"], text
        assert verified(text, row["gold"]) == row["math_verify"], text


def test_differences_are_judged():
    for row in ROWS:
        ours, harness_found = row["ours"], row["harness"]
        assert ours["strict"] == harness_found["strict"], row["text"]  # comparable with published figures
        agree = ours["flexible"] == harness_found["flexible"] and ours["numeric"] == row["math_verify"] == row["right"]
        assert ("why" in row) != agree, row["text"]


def test_numeric_is_right_where_it_differs():
    """Its faults: nothing marks an answer and another number follows (5 texts), and one of each that is named."""
    wrong = [row["why"] for row in ROWS if row["ours"]["numeric"] != row["right"]]
    assert sorted(set(wrong)) == [
        "a box without a number is passed over",
        "cut before the answer",
        "decimal comma",
        "nothing marks the answer, and another number follows",
    ]
    assert len(wrong) == 8
    differing = [row for row in ROWS if row["ours"]["numeric"] != row["math_verify"]]
    assert sum(row["ours"]["numeric"] == row["right"] for row in differing) == len(differing) - 3
