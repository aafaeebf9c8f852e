"""Maps beside what was measured, of the runs that analysis/lowering keeps: an H200, a CPU, TPUs that were not there."""

import copy
import pathlib
import sys

import pytest

from jaxkv.overview import orders
from jaxkv.overview.gather import read_runs
from jaxkv.overview.study import summarize_study
from jaxkv.reporting.document import to_markdown

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "analysis"))
import rebuild

MAP, MEASURED = "smollm2-135m-bf16-cpu", "smollm2-135m-bf16-cpu-attribution"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return {path.name: path for path in rebuild.unpack("lowering", tmp_path_factory.mktemp("kept"))}


@pytest.fixture(scope="module")
def study(kept):
    return summarize_study(read_runs([kept[MAP], kept[MEASURED]]))


@pytest.fixture(scope="module")
def maps(kept):
    text = to_markdown(
        "maps", orders.write_maps(summarize_study(read_runs([p for n, p in kept.items() if n != MEASURED])))
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def find_condition(study, name):
    return next(c for c in study["conditions"] if c["name"] == name)


def test_what_is_predicted_of_a_cpu_is_what_was_measured(study):
    text = to_markdown("predictions", orders.write_predictions(study))
    assert f"| {MEASURED} | 13 of 13 | 1 |" in text
    assert "is wrong" not in text


@pytest.mark.parametrize(("operation", "arm", "moved"), [("qkv", "uncached", 5), ("scores", "cached", 0)])
def test_a_prediction_that_fails_is_named(study, operation, arm, moved):
    changed = copy.deepcopy(study)
    find_condition(changed, MEASURED)["attribution"]["variants"][f"{operation} alone"]["moved"][arm] = moved
    text = to_markdown("predictions", orders.write_predictions(changed))
    assert "12 of 13" in text
    assert f"wrong in {operation}, {arm} arm" in text


@pytest.mark.parametrize("part", ["flags", "version", "shapes"])
def test_a_map_of_other_programs_predicts_nothing(study, part):
    changed = copy.deepcopy(study)
    condition = find_condition(changed, MEASURED)
    if part == "flags":
        condition["origin"]["variables"]["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    elif part == "version":
        condition["origin"]["versions"]["jaxlib"] = "0.0.1"
    else:
        condition["attribution"]["slots"] = [161]
    assert orders.write_predictions(changed) == []


def test_the_order_is_named_with_two_lines_of_the_programs(study):
    (said,) = orders.explain_orders(study, [find_condition(study, MEASURED)])
    assert "in norms, qkv, scores, attention, output, mlp, in all 30 layers" in said
    assert "`decode: %dot" in said
    assert "`recompute: %dot" in said


def test_aligned_arms_are_the_same_in_every_class(maps):
    rows = [row for row in maps if row[0].startswith("llama2-7b-fp16-h200-tile") and len(row) == 6]
    assert len(rows) == 2
    assert all(row[2:5] == ["-", "-", "norms, qkv, scores, attention, output, mlp, head"] for row in rows)


def test_one_row_takes_another_order_everywhere(maps):
    rows = [row for row in maps if len(row) == 6 and "tile" not in row[0] and row[0] != "map" and "--" not in row[0]]
    assert len(rows) >= 18
    assert all({"qkv", "output", "mlp"} <= set(row[2].split(", ")) and row[4] == "head" for row in rows)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ("accumulation", {"qkv", "scores", "attention", "output", "mlp", "head"}),
        ("no-triton", {"qkv", "scores", "attention"}),
    ],
)
def test_a_planted_change_of_order_is_seen_on_a_gpu(maps, change, seen):
    (row,) = [r for r in maps if r[:2] == ["llama2-7b-fp16-h200", f"llama2-7b-fp16-h200-{change}"]]
    assert seen <= set(row[2].split(", "))


def test_another_tile_is_seen_on_a_gpu(maps):
    (row,) = [r for r in maps if r[:2] == ["llama2-7b-fp16-h200-tile16", "llama2-7b-fp16-h200-tile32"]]
    assert {"qkv", "scores", "attention", "output", "mlp"} <= set(row[2].split(", "))
