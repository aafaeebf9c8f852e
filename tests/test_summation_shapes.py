"""What is said, kept and drawn of orders of summation."""

from xml.etree import ElementTree as ET

import msgspec
import pytest
from summation_trees import blocks, chain, core, lanes, pairwise

from jaxkv.experiments.lowering.figures import draw_tree, draw_trees
from jaxkv.experiments.lowering.shapes import TreeShape, describe, same_order
from jaxkv.experiments.lowering.trees import Sum, make_sum
from jaxkv.reporting.drawing import draw


@pytest.mark.parametrize(
    ("tree", "text", "depth"),
    [
        (0, "1 summand", 0),
        (chain(range(512)), "512 summands, in sequence", 511),
        (chain(range(9, -1, -1)), "10 summands, in sequence, from the last to the first", 9),
        (chain(at ^ 1 for at in range(32)), "32 summands, in sequence, in another order (0, 1, 3, 2, 5, 4, ...)", 31),
        (pairwise(lanes(96, 8)), "8 partial sums of every 8th summand, 12 each, in sequence; joined pairwise", 14),
        (chain(lanes(96, 3)), "3 partial sums of every 3rd summand, 32 each, in sequence; joined in sequence", 33),
        (
            chain([*blocks(128, 32), 128, 129]),
            "4 partial sums of neighbouring summands, 32 each, in sequence; joined in sequence; "
            "then 2 summands, in sequence",
            36,
        ),
        (chain([*blocks(64, 64), make_sum(64, 65)]),
         "64 summands, in sequence; then a partial sum of 2 summands, in sequence", 64),
        (core(range(128)), "128 summands, in 8 steps of 16 at once", 8),
        (make_sum(*range(9)), "9 summands, 9 at once", 1),
        (
            pairwise([core(range(at, at + 32)) for at in range(0, 256, 32)]),
            "8 partial sums of neighbouring summands, 32 each, in 2 steps of 16 at once; joined pairwise",
            5,
        ),
        (
            pairwise([chain([at + far + i for far in (0, 64) for i in range(8)]) for at in range(0, 64, 8)]),
            "8 partial sums of 8 neighbours of every 64 summands, 16 each, in sequence; joined pairwise",
            18,
        ),
        (
            pairwise([chain([chain(range(at + i, at + i + 8)) for i in range(0, 32, 8)]) for at in range(0, 256, 32)]),
            "4 partial sums of neighbouring summands, 8 each, in sequence; joined in sequence; "
            "8 of these joined pairwise",
            13,
        ),
        (make_sum(*blocks(32, 8)), "4 partial sums of neighbouring summands, 8 each, in sequence; joined at once", 8),
        (chain([*blocks(20, 4), chain(range(20, 23)), make_sum(23, 24), chain(range(25, 35))]),
         "4 parts of 2 to 20 summands, one after the other", 10),
    ],
)  # fmt: skip
def test_a_tree_is_told_in_a_line(tree, text, depth):
    shape = describe(tree)
    assert (shape.text, shape.depth) == (text, depth)
    assert shape.summands == (len(tree) if isinstance(tree, Sum) else 1)


def test_a_tree_is_kept_in_figures():
    shape = describe(chain([*[core(range(at, at + 64)) for at in range(0, 192, 64)], 192]))
    found = (shape.summands, shape.partial_sums, shape.lengths, shape.at_once, shape.strides, shape.joined)
    assert found == (193, 3, (64,), (16,), (1,), "in turn")
    assert (shape.order, shape.stretches) == ((0, 1, 2), ((0, 64), (1, 64), (2, 64), (0, 1)))
    kept = msgspec.json.encode(describe(pairwise([chain(range(at, 4096, 256)) for at in range(256)])))
    assert len(kept) < 1500
    shape = msgspec.json.decode(kept, type=TreeShape)
    assert (shape.partial_sums, shape.lengths, shape.joined, len(shape.order)) == (256, (16,), "pairwise", 16)
    assert msgspec.json.encode(shape) == kept


def words_of(shape):
    drawing = draw(draw_tree("Order", shape))
    assert "Order" in ET.tostring(drawing, encoding="unicode")
    return [e.text for e in drawing.iter("text")], [e.get("data-tip") for e in drawing.iter() if e.get("data-tip")]


def test_pictures_show_partial_sums_and_their_joins():
    figure = draw_trees([("One row", describe(pairwise(lanes(96, 8)))), ("Many", describe(core(range(96))))])
    assert [chart.title for chart in figure.charts] == ["One row", "Many"]
    words, tips = words_of(describe(pairwise(lanes(96, 8))))
    assert (words.count("12"), words.count("96")) == (8, 1)
    assert {"summands 0 to 15, of 96", "8 partial sums, summands one by one"} <= set(words)
    assert tips[9] == "summands 9 to 9: partial sum 2 of 8"
    pair, chained = (draw_tree("t", describe(f(lanes(96, 8)))) for f in (pairwise, chain))
    assert [len({line[-1][1] for line in chart.lines}) for chart in (pair, chained)] == [2 * 3 + 1, 2 * 7 + 1]
    words, _ = words_of(describe(core(range(96))))
    assert words.count("96") == 2
    assert "1 partial sum, 16 summands at once, in 6 steps" in words
    words, _ = words_of(describe(pairwise([chain(blocks(128, 8)[at : at + 4]) for at in (0, 4, 8, 12)])))
    assert {"16 partial sums, summands one by one", "4 joined in sequence", "4 joined pairwise", "..."} <= set(words)
    words, _ = words_of(describe(chain([*blocks(64, 32), 64, 65])))
    assert {"32", "+ 2", "66"} <= set(words)


def test_equal_trees_alone_have_one_key():
    trees = {
        "in sequence": chain(range(128)),
        "from the last": chain(range(127, -1, -1)),
        "blocks": chain(blocks(128, 32)),
        "pairwise": pairwise(blocks(128, 32)),
        "lanes": pairwise(lanes(128, 8)),
        "other lanes": pairwise([lanes(128, 8)[lane] for lane in (0, 4, 2, 6, 1, 5, 3, 7)]),
        "tensor core": core(range(128)),
        "half of it": core(range(128), 8),
        "one pair first": make_sum(make_sum(0, 1, 3), 2, 4),
        "another first": make_sum(make_sum(0, 1, 4), 2, 3),
    }
    keys = {name: describe(tree).key for name, tree in trees.items()}
    assert len(set(keys.values())) == len(trees)
    turned = make_sum(*reversed([chain(reversed(range(at, at + 64))) for at in (0, 64)]))
    again = make_sum(*[chain(reversed(range(at, at + 64))) for at in (0, 64)])
    assert same_order(describe(turned), describe(again))
    assert not same_order(describe(trees["blocks"]), describe(trees["tensor core"]))
    with pytest.raises(ValueError, match="128 and of 2 summands"):
        same_order(describe(again), describe(make_sum(0, 1)))
