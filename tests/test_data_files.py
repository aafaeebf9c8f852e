"""Data files that are broken inside: one line with the file and the place, whoever reads them."""

import gzip
import io
import random

import pyarrow
import pyarrow.parquet
import pytest
from task_files import to_jsonl

from jaxkv.errors import UserError
from jaxkv.tasks import PromptSpec, load_task
from jaxkv.tasks.continuation import load_text
from jaxkv.tasks.gsm8k import load_problems

ROWS = [{"question": f"How many are {n} and 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(400)]
JSONL, LINE = to_jsonl(ROWS), to_jsonl(ROWS[:1])
TASKS = {
    "gsm8k": ROWS[0],
    "math500": {"problem": "1 + 1", "answer": "2"},
    "humaneval": {"task_id": "a", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): pass"},
    "ifeval": {"key": 1, "prompt": "a", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
}


def parquet(rows=ROWS, **options):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, **options)
    return buffer.getvalue()


def refuse(path, content, name="data.jsonl"):
    """The one line that a file of this content ends in."""
    file = path / name
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_problems(str(file))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(file))
    return message.removeprefix(str(file))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"question": ' + b"[" * 100000 + b"]" * 100000 + b"}", "it is nested too deep"),
        (b"[" * 100000, "expected `object`, got `array`"),
        (b'{"question": "\\ud800", "answer": "#### 1"}', "is not JSON"),
        (b'{"question": "\xed\xa0\x80", "answer": "#### 1"}', "is not UTF-8"),
        (b'{"question": NaN}', "is not JSON"),
        (b'{"question": 1e400}', "number out of range"),
        (LINE[:-10], "is not JSON"),
        (LINE[:-1] + LINE, "is not JSON"),
        (b'{"question": "q", "answer": 1}', "field answer: expected `str`, got `int`"),
        (b'{"question": null, "answer": "#### 1"}', "field question: expected `str`, got `null`"),
        (b'"text"', "expected `object`, got `str`"),
        (b"\x00", "is not JSON"),
        (b"\x1f\x8b\x08", "is not UTF-8"),
        (b'{"question": "q"}', "object missing required field `answer`"),
        (b'{"question": "", "answer": "#### 1"}', "field question: expected `str` that is not blank"),
        (b'{"question": "q", "answer": "18"}', "the answer does not end in '#### N'"),
        (b'{"question": "q", "answer": "#### ten"}', "the answer does not end in '#### N'"),
    ],
)
def test_a_line(tmp_path, content, told):
    message = refuse(tmp_path, LINE + b"\r\n" + content + b"\n" + LINE)
    assert message.startswith(" line 3:")
    assert told in message


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_nothing(tmp_path, content):
    assert "holds no rows" in refuse(tmp_path, content)


def test_other_formats(tmp_path):
    assert "line 1: is not UTF-8" in refuse(tmp_path, JSONL.decode().encode("utf-16"))
    message = refuse(tmp_path, b"no parquet", "data.parquet")
    assert message.startswith(" cannot be read (")
    assert message.endswith("; copy or download it again or give a .jsonl file")


def flip(content, at, bit):
    """The content with another bit."""
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def test_gzip_cut_short_or_with_any_byte_changed(tmp_path):
    """Its CRC notices what the stream does not; the name and time in its head decide nothing."""
    whole, rng = gzip.compress(JSONL, mtime=0), random.Random(0)
    changed = [flip(whole, at, rng.randrange(8)) for at in sorted(rng.sample(range(10, len(whole)), 60))]
    for content in [*changed, *(whole[:cut] for cut in (5, 40, -200, -8, -1))]:
        assert "cannot be read" in refuse(tmp_path, content, "data.jsonl.gz")


def test_parquet_with_other_columns(tmp_path):
    message = refuse(tmp_path, parquet([{"prompt": "q", "answer": "#### 1"}]), "data.parquet")
    assert message.startswith(": has no column 'question', but 'prompt' and 'answer'; --data takes")
    message = refuse(tmp_path, parquet([{"a": 1}]), "data.parquet")
    assert message.startswith(": has no column 'question' and 'answer', but 'a'")
    message = refuse(tmp_path, parquet([{"question": 1, "answer": "#### 1"}]), "data.parquet")
    assert message.startswith(" row 1: field question: expected `str`, got `int`")


def test_parquet_with_any_byte_changed(tmp_path):
    """With checksums every changed page is noticed, and named; a changed byte elsewhere is at worst not noticed."""
    whole = parquet(write_page_checksum=True, compression="none", use_dictionary=False, row_group_size=100)
    file, rng = tmp_path / "data.parquet", random.Random(0)
    message = refuse(tmp_path, flip(whole, whole.index(b"How many are 250"), 0), file.name)
    assert message.startswith(" row group 2 column 'question' cannot be read (could not verify page integrity")
    for at in rng.sample(range(len(whole)), 200):
        file.write_bytes(flip(whole, at, rng.randrange(8)))
        try:
            told = [row.solution for row in load_problems(str(file))[0]]
        except UserError as error:
            told = str(error)
        assert told == [row["answer"] for row in ROWS] or (told.startswith(str(file)) and "\n" not in told), at


@pytest.mark.parametrize("name", TASKS)
def test_byte_order_mark_and_line_ends_change_nothing(tmp_path, name):
    plain = to_jsonl([TASKS[name]])
    contents = {
        "a.jsonl": plain,
        "b.jsonl": b"\xef\xbb\xbf" + plain,
        "c.jsonl": b"\r\n" + plain.replace(b"\n", b"\r\n") + b"  \r\n\r\n",
        "d.jsonl.gz": gzip.compress(b"\xef\xbb\xbf" + plain),
        "E.JSONL": plain.rstrip(b"\n"),
    }
    if name != "ifeval":  # Parquet has no empty struct
        contents["f.parquet"] = parquet([TASKS[name]])
    problems = []
    for file, content in contents.items():
        (tmp_path / file).write_bytes(content)
        given = {"allow_code_execution": name == "humaneval", "spec": PromptSpec("zero_shot")}
        problems.append(load_task(name, data=str(tmp_path / file), **given).problems)
    assert problems == problems[:1] * len(contents)


def test_byte_order_mark_of_a_text(tmp_path):
    for name, content in (("a.txt", "one\ntwo"), ("b.txt", "\ufeffone\ntwo")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    texts = [load_text(str(tmp_path / name)) for name in ("a.txt", "b.txt")]
    assert texts[0][0] == texts[1][0] == "one\ntwo"
    assert texts[0][1]["content"] == texts[1][1]["content"]


@pytest.mark.parametrize("name", ["data.json", "data.csv", "data.gz", "data.jsonl.zip", "data"])
def test_other_extensions(tmp_path, name):
    assert "unknown extension" in refuse(tmp_path, JSONL, name)


def test_directories(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d"):
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=f"{name} is a directory, not a file; --fewshot_data takes"):
            load_problems(str(tmp_path / name), flag="--fewshot_data")
        with pytest.raises(UserError, match=f"{name} is a directory, not a file"):
            load_text(str(tmp_path / name))
    with pytest.raises(UserError, match="No such file"):
        load_problems(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="is no path"):
        load_problems("a\0.jsonl")
