"""The door for files from outside: whatever is wrong ends in one line with the file, the fault and the remedy."""

import gzip
from typing import Any

import msgspec
import pytest

from jaxkv import files
from jaxkv.errors import UserError


class Sizes(msgspec.Struct):
    hidden_size: int
    theta: float = 1e4


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("[" * 100000, "expected `object`, got `array`"),
        ('{"a":' * 100000, "nested too deep"),
        (r'{"hidden_size": "\ud800"}', "is not JSON"),
        ('{"hidden_size": NaN}', "is not JSON"),
        ("", "is not JSON"),
        ("[1]", "expected `object`, got `array`"),
        ('{"hidden_size": null}', "field hidden_size: expected `int`, got `null`"),
        ('{"hidden_size": 1.5}', "field hidden_size: expected `int`, got `float`"),
        ('{"hidden_size": 1, "theta": "x"}', "field theta: expected `float`, got `str`"),
        ("{}", "missing required field `hidden_size`"),
        (b"\xff\xfe", "is not JSON"),
    ],
)
def test_json_that_is_none_of_the_type(content, fault, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        files.read_json(path, Sizes, "download it again")
    assert fault in str(caught.value)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith("; download it again")
    assert "\n" not in str(caught.value)


def test_json_of_the_type(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"hidden_size": 4, "theta": 10000, "other": [1]}')
    assert files.read_json(path, Sizes) == Sizes(4, 1e4)
    assert files.decode_json("[12345678901234567890123]", list[Any], "x") == [12345678901234567890123]


@pytest.mark.parametrize("make", ["missing", "folder", "zero byte"])
def test_what_is_no_file(make, tmp_path):
    path = {"missing": tmp_path / "none", "folder": tmp_path, "zero byte": "a\0b"}[make]
    with pytest.raises(UserError, match="check the path"):
        files.read_bytes(path)


def test_text_names_the_line_that_is_not_utf8(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"one\ntwo\n\xff")
    with pytest.raises(UserError, match="line 3: is not UTF-8"):
        files.read_text(path)
    path.write_bytes(b"\xef\xbb\xbfone")
    assert files.read_text(path) == "one"


def test_gzip_broken_anywhere():
    whole = gzip.compress(bytes(range(256)) * 50, mtime=0)
    assert files.unzip(whole, "x.gz") == bytes(range(256)) * 50
    for broken in (b"abc", whole[:-3], whole[:40] + b"\0\0\0" + whole[43:]):
        with pytest.raises(UserError, match=r"x\.gz cannot be read"):
            files.unzip(broken, "x.gz")


def test_a_decoder_of_others_fails_in_one_line_and_ours_stays():
    with (
        pytest.raises(UserError, match=r"model cannot be read .*odd length.*; mend it"),
        files.reading("model", "mend it"),
    ):
        raise ValueError("odd length\nof the thing")
    with pytest.raises(UserError, match=r"^ours$"), files.reading("model"):
        raise UserError("ours")
