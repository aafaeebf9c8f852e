"""Texts and their passages: what counts, how a guess is scored, what a bad file is told."""

import hashlib
import json

import pytest
from task_files import serve

from jaxkv.errors import UserError
from jaxkv.tasks import PromptSpec, load_task, usual_style
from jaxkv.tasks.continuation import load_text

TEXT = (
    " \n = A river = \n\n"
    " The river rises in the hills and runs to  the sea past nine towns . \n"
    " Short line . \n"
    " = = Course of the long river through all the nine quiet towns = = \n"
    " In <unk> the river bends twice and then runs south to the lake . \n"
    "One two three four five six seven eight nine Ten"
)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.fixture
def task(tmp_path):
    return load_task("next_string", data=write(tmp_path / "a.txt", TEXT))


def test_task(task, tmp_path):
    """Passages are long lines that are no heading, without unknown words."""
    assert [(task.prompt(p), p.answer) for p in task.problems] == [
        ("The river rises in the hills and runs to", "the"),
        ("One two three four five six seven eight nine", "Ten"),
    ]
    assert task.cut(" the\n sea") == (" the", True)
    origin = task.provenance["problems"]
    assert origin["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest() == origin["content"]
    assert (origin["rows"], origin["source"]) == (2, str(tmp_path / "a.txt"))
    assert json.loads(json.dumps(task.provenance)) == task.provenance


@pytest.mark.parametrize(
    ("text", "gold", "exact", "loose"),
    [
        (" the sea", "the", True, True),
        ("the", "the", True, True),
        (" The", "the", False, True),
        (" the, sea", "the", False, True),
        (" then", "the", False, False),
        ("\nthe", "the", False, False),
        ("", "the", False, False),
        (" , and", ",", True, True),
        (" . and", ",", False, False),
        (" @-@", "@-@", True, True),
        (" a", "<a>", False, True),
    ],
)
def test_scores(task, text, gold, exact, loose):
    assert [score["correct"] for score in task.score(text, gold).values()] == [exact, loose]


def test_label_changes(task):
    assert task.label_change(" the", " The", "the") == {"exact": "extraction_only", "loose": "same"}
    assert task.label_change(" the", " sea", "the") == dict.fromkeys(("exact", "loose"), "answer_changed")
    assert task.score("", "the")["exact"] == {"answer": None, "correct": False}


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf"])
def test_not_utf8(tmp_path, before):
    path = write(tmp_path / "latin.txt", before + "f\xf6x\ncaf\xe9 ".encode() + b"\xe9 more")
    with pytest.raises(UserError) as caught:
        load_text(path)
    assert str(caught.value) == f"{path} line 2: is not UTF-8; save the file as UTF-8"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (" \n", {}, "holds no text"),
        ("a b c", {}, "no line of 10 strings"),
        (TEXT, {"spec": PromptSpec("chat")}, "no chat prompt; use --prompt=zero_shot"),
        (TEXT, {"spec": PromptSpec("few_shot", 8)}, "no few_shot prompt with 8 shots"),
        (TEXT, {"fewshot_data": "a.txt"}, "no worked examples; drop --fewshot_data"),
        (TEXT, {"subset": "no_length_128"}, "leave --subset at all"),
    ],
)
def test_faults(tmp_path, text, options, message):
    with pytest.raises(UserError, match=message):
        load_task("next_string", data=write(tmp_path / "a.txt", text), **options)


def test_hub(monkeypatch):
    asked = serve(monkeypatch, [{"text": line + "\n"} for line in TEXT.split("\n")])
    task = load_task("next_string")
    assert [p.answer for p in task.problems] == ["the", "Ten"]
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test", None)]
    assert task.provenance["problems"]["content"] == hashlib.sha256((TEXT + "\n").encode()).hexdigest()
    serve(monkeypatch, ConnectionError("no route"))
    with pytest.raises(
        UserError, match=r"WikiText-2 could not be fetched .*HF_HUB_OFFLINE is set\).* pass --data"
    ) as e:
        load_task("next_string")
    assert "UTF-8 text" in str(e.value)
    assert ".jsonl" not in str(e.value)


def test_usual_styles():
    assert usual_style("next_string", True) == "zero_shot"
    assert usual_style("ifeval", True) == "chat"
    assert usual_style("gsm8k", False) == "few_shot"
    assert usual_style("arith", False) == usual_style("humaneval", False) == "zero_shot"
