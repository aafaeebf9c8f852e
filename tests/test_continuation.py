"""Texts and their passages: what counts, how a guess is scored, what a bad file is told."""

import hashlib
import json

import pytest

from jaxkv.errors import UserError
from jaxkv.tasks import PromptSpec, load_task, usual_style
from jaxkv.tasks.continuation import find_passages, grade, load_text

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


def test_passages_are_long_lines_without_headings_and_unknown_words():
    assert find_passages(TEXT) == [
        ("The river rises in the hills and runs to", "the"),
        ("One two three four five six seven eight nine", "Ten"),
    ]


def test_task(tmp_path):
    path = write(tmp_path / "a.txt", TEXT)
    task = load_task("next_string", data=path)
    assert [(p.index, p.answer) for p in task.problems] == [(0, "the"), (1, "Ten")]
    assert task.prompt(task.problems[0]) == "The river rises in the hills and runs to"
    assert task.cut(" the\n sea") == (" the", True)
    origin = task.provenance["problems"]
    assert origin["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest() == origin["content"]
    assert (origin["rows"], origin["source"]) == (2, path)
    assert json.loads(json.dumps(task.provenance)) == task.provenance
    assert len(load_task("next_string", data=path, limit=1).problems) == 1


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
def test_scores(tmp_path, text, gold, exact, loose):
    task = load_task("next_string", data=write(tmp_path / "a.txt", TEXT))
    assert {name: score["correct"] for name, score in task.score(text, gold).items()} == {
        "exact": exact,
        "loose": loose,
    }


def test_label_changes(tmp_path):
    task = load_task("next_string", data=write(tmp_path / "a.txt", TEXT))
    assert task.label_change(" the", " The", "the") == {"exact": "extraction_only", "loose": "same"}
    assert task.label_change(" the", " sea", "the") == dict.fromkeys(("exact", "loose"), "answer_changed")
    assert grade("", "the")["exact"] == {"answer": None, "correct": False}


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf"])
def test_not_utf8(tmp_path, before):
    path = write(tmp_path / "latin.txt", before + "f\xf6x\ncaf\xe9 ".encode() + b"\xe9 more")
    with pytest.raises(UserError) as caught:
        load_text(path)
    assert str(caught.value) == f"{path} line 2: is not UTF-8; save the file as UTF-8"


def test_faults(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_text(str(tmp_path / "none.txt"))
    with pytest.raises(UserError, match="holds no text"):
        load_text(write(tmp_path / "empty.txt", " \n"))
    with pytest.raises(UserError, match="no line of 10 strings"):
        load_task("next_string", data=write(tmp_path / "short.txt", "a b c"))
    path = write(tmp_path / "a.txt", TEXT)
    with pytest.raises(UserError, match="no chat prompt; use --prompt=zero_shot"):
        load_task("next_string", data=path, spec=PromptSpec("chat"))
    with pytest.raises(UserError, match="no few_shot prompt with 8 shots"):
        load_task("next_string", data=path, spec=PromptSpec("few_shot", 8))
    with pytest.raises(UserError, match="no worked examples; drop --fewshot_data"):
        load_task("next_string", data=path, fewshot_data=path)
    with pytest.raises(UserError, match="leave --subset at all"):
        load_task("next_string", data=path, subset="no_length_128")
    with pytest.raises(UserError, match="did you mean 'no_length_128'"):
        load_task("ifeval", subset="no_length")


def test_hub(monkeypatch):
    import datasets

    asked = {}

    def load(*args, **kwargs):
        asked.update(kwargs, args=args)
        return datasets.Dataset.from_list([{"text": line + "\n"} for line in TEXT.split("\n")])

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = load_task("next_string")
    assert [p.answer for p in task.problems] == ["the", "Ten"]
    assert asked == {"args": ("Salesforce/wikitext", "wikitext-2-raw-v1"), "revision": None, "split": "test"}
    assert task.provenance["problems"]["content"] == hashlib.sha256((TEXT + "\n").encode()).hexdigest()

    def refuse(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        UserError, match=r"WikiText-2 could not be fetched .*HF_HUB_OFFLINE is set\).* pass --data FILE"
    ) as e:
        load_task("next_string")
    assert "UTF-8 text" in str(e.value)
    assert ".jsonl" not in str(e.value)


def test_usual_styles():
    assert usual_style("next_string", True) == "zero_shot"
    assert usual_style("ifeval", True) == "chat"
    assert usual_style("gsm8k", False) == "few_shot"
    assert usual_style("arith", False) == usual_style("humaneval", False) == "zero_shot"
