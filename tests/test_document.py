"""Blocks: the same report on a page and in a terminal, which has less room."""

import pytest
from shown import as_html, as_markdown, on_terminal

from jaxkv.reporting.document import Brief, Bullets, Fold, Heading, Only, Paragraph, Table

TABLE = Table(
    ["name", "whole", "count"],
    [["a", Brief("3 of 4 [0.1, 0.9]", "3 of 4"), "12"], ["b", ("one", "two"), "-"]],
    "Title",
    terminal=(0, 1),
)


def test_what_is_only_for_a_terminal_or_a_page_is_shown_there_alone():
    blocks = [Only("page", [Heading("Whole")]), Only("terminal", [Paragraph("short")])]
    blocks = [*blocks, Fold("more", [Only("page", [Bullets(["long"])])])]
    for text in (as_markdown(blocks), as_html(blocks)):
        assert "Whole" in text
        assert "long" in text
        assert "short" not in text
    assert on_terminal(blocks).split() == ["short", "more"]


def test_a_terminal_has_fewer_columns_and_words():
    page, text = as_markdown([TABLE]), on_terminal([TABLE])
    assert "| a | 3 of 4 [0.1, 0.9] | 12 |\n| b | one; two | - |" in page
    assert "3 of 4 [0.1, 0.9]" in as_html([TABLE])
    lines = [line.split() for line in text.splitlines()]
    assert [line for line in lines if line[:1] in (["a"], ["b"])] == [["a", "3", "of", "4"], ["b", "one"]]
    assert "Title" in text
    assert "12" not in text


@pytest.mark.parametrize("width", [80, 60, 48])
def test_no_word_of_a_table_is_cut_where_there_is_room_for_each(width):
    names = ["cached vs uncached", "uncached by brute force"]
    rows = [[name, "0 of 2101 in 50 sequences (95 % upper bound 5.8 % of sequences)", "1.234e-05"] for name in names]
    text = on_terminal([Table(["comparison", "argmax flips", "mean KL"], rows)], width)
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    assert all(words.count(word) >= 2 for word in ("1.234e-05", "uncached", "sequences", "2101"))


def test_numbers_stand_to_the_right():
    text = on_terminal([Table(["", "number", "words"], [["a", "1", "x"], ["b", "100 %", "1 x"]])])
    assert [line.index(found) for line, found in zip(text.splitlines()[2:], ("1", "100 %"), strict=True)] == [8, 4]


def test_a_table_too_wide_for_any_terminal_is_folded():
    text = on_terminal([Table(["a", "b"], [["x" * 50, "y" * 50]])], 40)
    assert max(map(len, text.splitlines())) <= 40
    assert (text.count("x"), text.count("y")) == (50, 50)
