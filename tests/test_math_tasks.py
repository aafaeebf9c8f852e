"""MATH-500 and AIME 2024: answers compared as mathematics."""

import json
import sys

import pytest
from task_files import serve, write_rows

from jaxkv.errors import UserError
from jaxkv.tasks import PromptSpec, load_task
from jaxkv.tasks.math_tasks import find_boxed
from jaxkv.tasks.task import BOXED_REQUEST

REQUEST = f"\n{BOXED_REQUEST}"

ROWS = [
    {"prompt": "What is half of three?", "answer": "\\frac{3}{2}"},
    {"problem": "What is two and two?" + REQUEST, "answer": 4},
]


@pytest.fixture
def task(tmp_path):
    return load_task("math500", data=write_rows(tmp_path / "a.jsonl", ROWS))


def test_prompts(task, tmp_path):
    assert [task.prompt(p) for p in task.problems] == [ROWS[0]["prompt"] + REQUEST, ROWS[1]["problem"]]
    assert [p.answer for p in task.problems] == ["\\frac{3}{2}", "4"]
    chat = load_task("aime24", data=write_rows(tmp_path / "b.jsonl", ROWS), spec=PromptSpec("chat"))
    assert chat.prompt(chat.problems[0]) == [{"role": "user", "content": ROWS[0]["prompt"] + REQUEST}]
    assert set(task.provenance["scoring"]["packages"]) == {"math-verify", "sympy"}
    assert task.provenance["problems"]["rows"] == 2
    assert json.loads(json.dumps(task.provenance)) == task.provenance


@pytest.mark.parametrize(
    ("text", "gold", "boxed", "verified"),
    [
        ("So it is \\boxed{\\frac{3}{2}}.", "\\frac{3}{2}", True, True),
        ("So it is \\boxed{\\frac{3}{2}}.", "\\frac{ 3 }{ 2 }", True, True),
        ("So it is \\boxed{1.5}.", "\\frac{3}{2}", False, True),
        ("First \\boxed{7}, no: \\boxed{\\dfrac32}", "\\frac{3}{2}", False, True),
        ("\\boxed{\\frac{2}{3}}", "\\frac{3}{2}", False, False),
        ("The answer is $x = 4$.", "4", False, True),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3, \\pi/2)", False, True),
        ("\\boxed{q - p}", "p - q", False, False),
        ("\\boxed{-q + p}", "p - q", False, True),
        ("I do not know", "4", False, False),
        ("", "4", False, False),
        ("It is \\boxed{3}<|im_end|>\\boxed{4}", "4", False, False),  # what follows a stop does not count
    ],
)
def test_scores(task, text, gold, boxed, verified):
    found = {name: score["correct"] for name, score in task.score(text, gold).items()}
    assert found == {"boxed": boxed, "verified": verified}


def test_find_boxed():
    assert find_boxed("a \\boxed{x^{2}} b \\boxed{ y_{1} } c") == "y_{1}"
    assert find_boxed("\\boxed{x} and \\boxed{open") == "x"
    assert find_boxed("\\fbox{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert find_boxed("nothing") is None


def test_label_changes(task):
    assert task.label_change("\\boxed{4}", "\\boxed{4.0}", "4")["verified"] == "same"
    assert task.label_change("\\boxed{4}", "the value is $4$", "4") == {"boxed": "extraction_only", "verified": "same"}
    assert set(task.label_change("\\boxed{4}", "\\boxed{5}", "4").values()) == {"answer_changed"}


def test_faults(tmp_path, monkeypatch):
    for row, message in (
        ({"prompt": "a"}, "object missing required field `answer`"),
        ({"answer": "1"}, "has neither 'prompt' nor 'problem'"),
    ):
        with pytest.raises(UserError, match=f"line 2: {message}"):
            load_task("math500", data=write_rows(tmp_path / "a.jsonl", [ROWS[0], row]))
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"math500 task needs .*'math_verify': run `pip install 'jaxkv\[eval\]'`"):
        load_task("math500", data=path)


def test_hub(monkeypatch):
    asked = serve(monkeypatch, [{"problem": "p", "solution": "s", "answer": "1"}])
    (problem,) = load_task("math500").problems
    load_task("aime24")
    assert (problem.question, problem.answer, problem.solution) == ("p" + REQUEST, "1", "s")
    assert asked == [("HuggingFaceH4/MATH-500", None, "test", None), ("HuggingFaceH4/aime_2024", None, "train", None)]
