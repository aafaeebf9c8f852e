"""Charts: what they draw of given data, as trees that a page takes; texts side by side; the pieces of tokens."""

import dataclasses
import re
from xml.etree import ElementTree as ET

import msgspec
import pytest
from layer_records import make_drift
from plain_records import to_typed
from study_records import make_run, make_samples

from jaxkv.checkpoints.tokenizer import ByteTokenizer
from jaxkv.errors import UserError
from jaxkv.overview.curves import find_token_grid
from jaxkv.overview.examples import show_examples
from jaxkv.pieces import read_pieces, write_pieces
from jaxkv.reporting.charts import (
    Axis,
    Box,
    Cells,
    Diagram,
    Intervals,
    Lines,
    Point,
    Row,
    Scatter,
    Series,
    Word,
    limits,
    share_axis,
)
from jaxkv.reporting.document import to_markdown
from jaxkv.reporting.drawing import draw

X, Y, LOG = Axis("x"), Axis("y"), Axis("y", log=True)
CHARTS = {
    "lines": Lines("Lines", [Series("a", [Point(0, 1, (0.5, 2)), Point(4, 3, (2, 4))])], X, Y),
    "bars": Lines("Bars", [Series("a", [Point(0, 1e-3, (0, 1)), Point(4, 3)])], X, LOG, bars=True, rule=0.5),
    "scatter": Scatter("Dots", [Series("a", [Point(1, 2)]), Series("b", [Point(0, 3)])], X, LOG, [(1, 2), (2, 4)]),
    "intervals": Intervals("Rows", [Row("one", 0.5, (0.4, 0.6), "one: half"), Row("two", 0.1, None)], X),
    "cells": Cells("Cells", ["a", "b"], ["x", "y"], [[1.0, None], [0.01, 0.0]], log=True, show=str),
    "diagram": Diagram(
        "Boxes",
        60,
        [Box(0, 0, 50, 20, "4", 1, "four"), Box(60, 0, 50, 20)],
        [[(25, 20), (25, 60)]],
        [Word(2, 50, "sum")],
    ),
}


def tips(drawing):
    return [e.get("data-tip") for e in drawing.iter() if e.get("data-tip")]


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_the_same_tree_however_often(name):
    first, again = (ET.tostring(draw(CHARTS[name]), encoding="unicode") for _ in range(2))
    assert first == again
    assert CHARTS[name].title in first
    ids = re.findall(r'\bid="([^"]*)"', first)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", first)) <= set(ids)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lines", ["a: 1 at 0", "a: 3 at 4"]),
        ("bars", ["a: 0.001 at 0", "a: 3 at 4"]),
        ("intervals", ["one: half", "two: 0.1"]),
        ("diagram", ["four"]),
        ("cells", ["a, x: 1", "b, x: 0.01"]),  # None and what no logarithm has stay empty
    ],
)
def test_marks_say_their_values(name, said):
    assert tips(draw(CHARTS[name])) == said


def test_a_line_goes_through_its_points():
    points = [Point(0, 0), Point(5, 1), Point(10, 1)]
    drawing = draw(Lines("t", [Series("a", points, colour=2)], X, Axis("y", low=0, high=1)))
    (line,) = [e.get("d") for e in drawing.iter("path") if e.get("fill") is None and e.get("stroke") == "var(--s2)"]
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, p.split(","))) for p in re.findall(r"[\d.]+,[\d.]+", line)]
    assert (x0, y1, y2) == (0, 0, 0)
    assert (x1, y0 > 50) == (pytest.approx(x2 / 2), True)


def test_dots_lie_where_their_values_are():
    drawing = draw(Scatter("t", [Series("a", [Point(0, 0, said="low"), Point(1, 4, said="mid"), Point(4, 2)])], X, Y))
    (x0, y0), (x1, y1), (x2, y2) = [(float(c.get("cx")), float(c.get("cy"))) for c in drawing.iter("circle")][:3]
    assert (x0, y1) == (0, 0)
    assert (4 * x1, 2 * y2) == (pytest.approx(x2, abs=0.03), pytest.approx(y0, abs=0.02))  # of hundredths of a pixel


def test_what_has_no_place_is_not_drawn():
    with pytest.raises(ValueError, match="'t' has no point"):
        draw(Lines("t", [Series("a", [Point(1, 0)])], X, LOG))


def test_cells_that_have_no_logarithm_are_a_table_of_none():
    """As where four cells of two frameworks have the same bits."""
    drawing = draw(dataclasses.replace(CHARTS["cells"], values=[[None, 0.0], [0.0, None]]))
    assert not tips(drawing)
    assert {"a", "b", "x", "y"} <= {"".join(e.itertext()) for e in drawing.iter("text")}


def test_ends_of_axes():
    assert limits([0.02, 3e-5, 0], log=True) == pytest.approx((1e-5, 0.1))
    assert limits([]) == (0, 1)
    assert limits([0.4, -1.0]) == (-1, 0.4)
    panels = [[Series("a", [Point(0, 1e-3)])], [Series("b", [Point(0, 2.0)])]]
    axis = share_axis(panels, "y", log=True)
    assert (axis.low, axis.high) == pytest.approx((1e-3, 10))


def parting(pieces=None, at=5):
    run = to_typed(make_run(make_samples(count=3, flips=lambda p: (at,) if p == 1 else ())))
    object.__setattr__(run, "pieces", pieces or {})
    return run


def test_texts_stand_side_by_side_from_where_they_part():
    pieces = {token: f"<{token}>" for token in range(120)}
    found = show_examples([parting(pieces)], {"fp16": "tiny fp16"})
    (example,) = found.items
    assert example.title == "tiny fp16, problem 1, token 6"
    assert example.note == "Margin of the two best tokens 0.011, largest logit difference 0.011: 1 times."
    cached, uncached = ([token for token in side if "parts" in token.kind] for side in example.sides)
    assert ([t.text for t in cached], [t.text for t in uncached]) == (["<5>"], ["<105>"])
    assert cached[0].kind == "flip parts"
    assert [t.kind for t in example.sides[1]][-1] == "after"  # nothing was measured along its own tokens
    assert "⟦<5>⟧" in to_markdown("t", [found])


def test_without_pieces_the_texts_are_shown_as_they_were_decoded():
    found = show_examples([parting()], {"fp16": "tiny fp16"})
    assert found.key == ()
    assert found.items[0].sides[0][0].text == "It is 18"


def test_what_is_not_seen_is_shown_and_turns_no_page_around():
    pieces = {token: f"<{token}>" for token in range(200)} | {3: "\u202e", 4: "\x00\x1b[31m\r\n", 5: "x" * 5000}
    (example,) = show_examples([parting(pieces)], {"fp16": "tiny fp16"}).items
    texts = [token.text for token in example.sides[0]]
    assert texts[3:6] == ["⟨U+202E⟩", "⟨U+0000⟩⟨U+001B⟩[31m⟨U+000D⟩↵\n", f"{'x' * 120}…"]


def test_a_tie_is_not_said_to_decide_what_is_drawn():
    run = parting({1: "a"})
    sample = run.records[1]
    tied = [0.0] * len(sample.teacher_forced.margin)
    for sampler, said in (("greedy", "the lowest id wins it"), ("top_p", "the noise, alike in both arms, decides")):
        changed = msgspec.structs.replace(
            sample,
            teacher_forced=msgspec.structs.replace(sample.teacher_forced, margin=tied),
            sampling=msgspec.structs.replace(sample.sampling, sampler=sampler),
        )
        (example,) = show_examples([dataclasses.replace(run, records=[changed])], {"fp16": ""}).items
        assert said in example.note


def test_no_text_that_parts_is_no_example():
    assert show_examples([to_typed(make_run(make_samples(count=2)))], {"fp16": ""}) is None


def test_a_map_of_one_text_has_its_tokens():
    samples, drift = make_samples(count=2), make_drift(count=2)
    places = drift[0]["places"]["prompt"]
    run = to_typed(make_run([*samples, *(record | {"prompt_tokens": places} for record in drift)]))
    assert find_token_grid(run) is None  # no text of its tokens is known
    object.__setattr__(run, "pieces", {token: f"<{token}>" for token in range(places)})
    found = find_token_grid(run)
    assert found["problem"] == 0
    assert found["texts"] == ["".join(f"<{token}>" for token in range(places))]
    assert [len(row) for row in found["rows"]] == [1] * 4


def test_pieces_are_read_as_they_were_written(tmp_path):
    assert read_pieces(tmp_path) == {}
    write_pieces(tmp_path, [104, 32, 104, 258, 195], ByteTokenizer())
    assert read_pieces(tmp_path) == {32: " ", 104: "h", 195: "\ufffd", 258: ""}
    before = (tmp_path / "tokens.json").read_bytes()
    write_pieces(tmp_path, [32, 104, 195, 258], ByteTokenizer())
    assert (tmp_path / "tokens.json").read_bytes() == before
    (tmp_path / "tokens.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"tokens\.json"):
        read_pieces(tmp_path)
