"""Doctor: every detector finds what is planted and passes what is clean."""

import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shown import as_markdown
from test_doctor_findings import text_of, write

from jaxkv.config import make_precision
from jaxkv.experiments.doctor import operations
from jaxkv.experiments.doctor import run as doctor
from jaxkv.experiments.doctor.operations import Inputs, compile_program, make_operations
from jaxkv.experiments.doctor.report import conclude, describe, operand_kind
from jaxkv.experiments.doctor.run import SPARE_SECONDS, DoctorSpec, Programs, compile_all, measure_shapes, run_doctor
from jaxkv.experiments.doctor.shapes import (
    Tile,
    compare_bits,
    compare_company,
    compare_places,
    compute_tested,
    cover_tested,
    merge_figures,
)
from jaxkv.models.families import get_preset
from jaxkv.records import to_record

SPEC = DoctorSpec(
    dtypes=("fp16", "fp32"),
    rows=(1, 4, 8),
    slots=(16, 32),
    batches=(2,),
    filled=6,
    tested=4,
    process_rows=(1, 4),
    config=dataclasses.replace(get_preset("test-llama2-gqa"), num_layers=1),
    wide=(128, 32),
    workers=2,
)
TILE, CHANGED = [0, 1, 2, 3], [0, 5, 2, 3]  # 5 is a filling row of the same position


# Comparing bits.


def test_bits_and_not_values_are_compared():
    figure = compare_bits(np.array([0.0, 1.0, 2.0], np.float16), np.array([-0.0, 1.0, 2.0], np.float16))
    assert figure == {"elements": 3, "nonfinite": 0, "differ": 1, "max_ulp": 0.0}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("value", [1.0, 1.999, 24.0])
def test_ulp_is_the_spacing_of_the_larger_element(dtype, value):
    a = np.full(8, value, dtype)
    b = (a.view(f"u{a.dtype.itemsize}") + np.arange(8, dtype=f"u{a.dtype.itemsize}") % 2).view(a.dtype)
    figure = compare_bits(a, b)
    assert figure["differ"] == 4
    assert figure["max_ulp"] == (0.5 if float(b[1]) in (2.0, 32.0) else 1.0)


def test_a_difference_far_below_the_rest_is_no_large_one():
    a = np.array([1000.0, 1e-3], np.float32)
    figure = compare_bits(a, np.array([1000.0, -1e-3], np.float32))
    assert figure["differ"] == 1
    assert figure["max_ulp"] == pytest.approx(2e-3 / 2.0**-14)  # rms 707: one unit is 2^(9 - 23)


def test_what_is_not_finite_agrees_with_nothing():
    nan = np.array([np.nan, 1.0], np.float16)
    figure = compare_bits(nan, nan)
    assert figure == {"elements": 2, "nonfinite": 1, "differ": None, "max_ulp": None}
    assert describe([figure, compare_bits(nan[1:], nan[1:])]) == "not finite"


@pytest.mark.parametrize("other", [np.zeros(2, np.float32), np.zeros(1, np.float16)])
def test_other_dtypes_and_shapes_are_refused(other):
    with pytest.raises(ValueError, match="not comparable"):
        compare_bits(np.zeros(2, np.float16), other)


# What a row is computed with: the same rows everywhere, planted dependences found, each by its own question.

VALUES = np.random.default_rng(0).standard_normal((SPEC.pool_size, 64)).astype(np.float16)


PLANTS = {  # x [B, T, n], the tile, and how many tiles there were
    "clean": lambda x, tile, calls: x,
    "rows": lambda x, tile, calls: x * (1 + 2.0**-9 * (x.shape[1] > 4)),
    "slots": lambda x, tile, calls: x + 2.0**-8 * (tile.slots > 16),
    "batch": lambda x, tile, calls: x + 2.0**-8 * (len(x) > 1),
    "neighbours": lambda x, tile, calls: x + 2.0**-6 * x.mean(axis=0, keepdims=True) * (len(x) > 1),
    "following": lambda x, tile, calls: x + 2.0**-6 * (np.cumsum(x[:, ::-1], axis=1)[:, ::-1] - x) * tile.causal,
    "rerun": lambda x, tile, calls: x + 2.0**-8 * calls,
}


def planted(kind):
    """Programs under test, in which a row's result depends on one thing alone."""
    calls = []

    def run(tile: Tile):
        calls.append(tile)
        x = VALUES[tile.ids].astype(np.float32)
        return {"matmul": PLANTS[kind](x, tile, len(calls)).astype(np.float16)}

    rows = [SPEC.row_shape(n) for n in SPEC.rows] + [SPEC.row_shape(1, batch=n) for n in SPEC.batches]
    return dict.fromkeys([*rows, *map(SPEC.slot_shape, SPEC.slots)], run)


def flagged(questions):
    """Question -> counts at which something differs."""
    return {
        question: {n for n, figure in found["matmul"].items() if figure["differ"]}
        for question, found in questions.items()
        if found
    }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("clean", {}),
        ("rows", {"rows": {"8"}, "rows_from_most": {"4"}}),
        ("slots", {"slots": {"32"}}),
        ("batch", {"batch": {"2"}}),
        ("neighbours", {"batch": {"2"}, "neighbours": {"2"}}),
        ("following", {"following": {"4", "8"}}),
    ],
)
def test_a_planted_dependence_is_found_by_its_own_question(kind, expected):
    questions, hashes = measure_shapes(SPEC, planted(kind))
    found = {question: counts for question, counts in flagged(questions).items() if counts}
    assert found == expected
    assert set(hashes["matmul"]) == {"1", "4"}


def test_a_program_that_changes_from_run_to_run_is_found():
    questions, _ = measure_shapes(SPEC, planted("rerun"))
    assert flagged(questions)["rerun"] == {"all"}


def test_a_question_without_its_programs_has_no_figures():
    runs = planted("clean")
    del runs[SPEC.row_shape(1)]
    questions, hashes = measure_shapes(SPEC, runs)
    assert not questions["rows"]
    assert not questions["batch"]
    assert set(questions["rows_from_most"]["matmul"]) == {"4"}
    assert set(hashes["matmul"]) == {"4"}


def test_every_tested_row_is_computed_once_at_every_shape():
    for shape in planted("clean"):
        result = compute_tested(planted("clean")[shape], shape, SPEC)["matmul"]
        np.testing.assert_array_equal(result, VALUES[: SPEC.tested])


def test_rows_lie_at_their_own_positions_in_every_tile():
    for n in SPEC.rows:
        offsets = np.concatenate([SPEC.offsets(t.ids)[0] for t in cover_tested(SPEC.row_shape(n), SPEC)])
        np.testing.assert_array_equal(offsets, np.arange(max(n, SPEC.tested)))
    for variant in (0, 1):
        np.testing.assert_array_equal(SPEC.offsets(SPEC.filler(variant, np.arange(8))), np.arange(8))


def test_figures_are_merged():
    figures = [{"elements": 4, "nonfinite": 0, "differ": d, "max_ulp": float(d)} for d in (1, 3, 0)]
    assert merge_figures(figures) == {"elements": 12, "nonfinite": 0, "differ": 4, "max_ulp": 3.0}
    figures[1] |= {"nonfinite": 2, "differ": None, "max_ulp": None}
    assert merge_figures(figures) == {"elements": 12, "nonfinite": 2, "differ": None, "max_ulp": None}


def test_place_in_a_vector():
    base = np.linspace(-2, 2, 9, dtype=np.float32)
    rows = np.stack([np.concatenate([np.roll(np.exp(base), i), np.roll(np.tanh(base), i)]) for i in range(4)])
    assert compare_places(rows)["differ"] == 0
    rows[2, 0] *= np.float32(1 + 2.0**-22)
    figure = compare_places(rows)
    assert (figure["differ"], figure["elements"]) == (1, 72)


# The operations of a layer.


@pytest.fixture(scope="module")
def inputs():
    return Inputs(SPEC, make_precision("fp16"))


def programs_of(inputs, names, counts=(1, 4)):
    chosen = [op for op in make_operations(inputs) if op.name in names]
    return {shape: compile_program(shape, SPEC, chosen) for shape in map(SPEC.row_shape, counts)}


def whole_numbers(spec, x, w, precision, out=None):
    """A product whose terms and sums are exact, in whatever order they are added."""
    small = lambda a: jnp.clip(jnp.round(a.astype(jnp.float32) * 2), -3, 3)  # noqa: E731
    return jnp.einsum(spec, small(x), small(w)).astype(precision.activation)


def split_by_rows(spec, x, w, precision, out=None):
    """The same, but with more rows than one the sum is cut in two, each rounded to the activation dtype."""
    if spec != "btd,fd->btf" or x.shape[1] == 1:
        return whole_numbers(spec, x, w, precision)
    half = x.shape[-1] // 2
    parts = [whole_numbers(spec, x[..., s], w[..., s] * 0.3, precision) for s in (slice(half), slice(half, None))]
    return parts[0] * jnp.float16(1 / 3) + parts[1] * jnp.float16(1 / 3)


@pytest.mark.parametrize(("product", "guilty"), [(whole_numbers, []), (split_by_rows, ["matmul", "matmul_wide"])])
def test_a_product_that_adds_by_the_number_of_rows_is_found_and_an_exact_one_is_not(
    inputs, product, guilty, monkeypatch
):
    monkeypatch.setattr(operations, "product", product)
    core = ["matmul", "matmul_wide", "scores", "weighted_sum"]
    figures = measure_shapes(SPEC, programs_of(inputs, core))[0]["rows"]
    assert [name for name in core if figures[name]["4"]["differ"]] == guilty
    assert all(figures[name]["4"]["elements"] > 0 for name in core)


def test_a_layer_does_not_see_what_follows_but_does_see_what_precedes(inputs):
    shape = SPEC.row_shape(4)
    run = programs_of(inputs, ["layer", "softmax", "weighted_sum", "scores"], (4,))[shape]
    assert all(figure["differ"] == 0 for figure in compare_company(run, shape, SPEC).values())
    one, other = (run(Tile(np.array([ids]), shape.slots, causal=True)) for ids in (TILE, CHANGED))
    for key in ("layer", "weighted_sum"):
        assert [np.array_equal(one[key][0, t], other[key][0, t]) for t in range(4)] == [True, False, False, False]
    # The weights of slots that a row does not see are compared too, and are zeros.
    weights = one["softmax"].reshape(4, -1, shape.slots)
    assert [np.count_nonzero(weights[t].any(0)) for t in range(4)] == [SPEC.filled + t + 1 for t in range(4)]


def test_rows_apart_from_each_other_see_the_history_alone(inputs):
    shape = SPEC.row_shape(4)
    run = programs_of(inputs, ["layer", "weighted_sum"], (4,))[shape]
    one, other = (run(Tile(np.array([ids]), shape.slots)) for ids in (TILE, CHANGED))
    for key in one:
        assert [np.array_equal(one[key][0, t], other[key][0, t]) for t in range(4)] == [True, False, True, True]
    written = (values["layer"][0, 1, SPEC.config.model_dim :] for values in (one, other))
    assert not np.any(np.equal(*written))


def test_neighbours_bring_their_own_history(inputs):
    keys = inputs.cache(0, Tile(np.array([[0], [1], [4]]), 16), own=False)
    np.testing.assert_array_equal(keys[0], keys[1])
    assert np.all(keys[0, : SPEC.filled] != keys[2, : SPEC.filled])
    assert not np.any(keys[:, SPEC.filled :])


def test_contents_are_the_same_numbers_in_every_dtype_with_outliers(inputs):
    wide = Inputs(SPEC, make_precision("fp32"))
    x = wide.draw("x", (64, 48), outliers=20.0)
    np.testing.assert_array_equal(x.astype(np.float16), inputs.draw("x", (64, 48), outliers=20.0))
    channels = np.sort(np.sqrt(np.mean(x**2, axis=0)))
    assert channels[-3] > 10 * channels[-4]
    np.testing.assert_allclose(wide.weights[..., : SPEC.filled].sum(-1), 1, rtol=1e-5)
    held = inputs.draw("x", (64, 48), outliers=20.0, dtype=np.float32)
    np.testing.assert_array_equal(held, x.astype(np.float16))


# The whole.


def test_compilations_stop_when_time_is_up_and_a_fault_stays_alone():
    def fail():
        raise ValueError("no such dtype\nhere")

    programs = compile_all({"a": lambda: 1, "b": fail, "c": lambda: 2}, workers=1, seconds=60)
    assert programs.made == {"a": 1, "c": 2}
    assert programs.missing == {"b": "ValueError: no such dtype here"}
    programs = compile_all({"a": lambda: 1}, workers=1, seconds=-1)
    assert (programs.made, programs.missing) == ({}, {"a": "out of time"})
    programs = compile_all({"a": lambda: 1}, 1, SPARE_SECONDS - 1, spare={"b": lambda: 2})
    assert (programs.made, programs.missing) == ({"a": 1}, {"b": "out of time"})


def test_the_second_process_runs_beside_the_first(monkeypatch):
    begun, compiling = threading.Event(), threading.Event()

    def start(spec, seconds):
        begun.set()
        assert compiling.wait(60)
        raise RuntimeError("it was there")

    def compile_nothing(tasks, workers, seconds, spare):
        assert begun.wait(60)
        compiling.set()
        return Programs({}, dict.fromkeys(map(str, tasks | spare), "out of time"), {})

    monkeypatch.setattr(doctor, "compile_all", compile_nothing)
    found = run_doctor(SPEC, start)
    to_record(found)
    assert found["process"]["status"] == "cannot tell"
    assert found["compilations"] == 0


def test_the_ends_of_every_question_come_first():
    tasks, spare = doctor.plan(SPEC, dict.fromkeys(SPEC.dtypes, ()))
    first, planned = ([name for name in names if isinstance(name, tuple)] for names in (tasks, [*tasks, *spare]))
    needed = {SPEC.row_shape(n) for n in (*SPEC.process_rows, SPEC.rows[0])} | {SPEC.row_shape(1, SPEC.batches[-1])}
    needed |= {SPEC.slot_shape(SPEC.slots[0]), SPEC.slot_shape(SPEC.slots[-1])}
    assert {shape for shape, _ in first} == needed
    assert [(str(shape), dtype) for shape, dtype in planned[:4]] == [
        ("rows 1x1, 128 slots", "fp16"), ("rows 1x1, 128 slots", "fp32"),
        ("rows 1x4, 128 slots", "fp16"), ("rows 1x4, 128 slots", "fp32"),
    ]  # fmt: skip
    assert len(set(planned)) == len(planned) == 2 * (len(SPEC.rows) + len(SPEC.slots) + len(SPEC.batches))


@pytest.fixture(scope="module")
def record():
    compiled = []
    listener = lambda event, seconds, **_: compiled.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    found = run_doctor(SPEC)
    found["compiled"] = compiled.count("/jax/core/compile/backend_compile_duration")
    jax.monitoring.unregister_event_duration_listener(listener)
    return found


def test_end_to_end_on_this_device(record):
    to_record({name: found for name, found in record.items() if name != "compiled"})
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    shapes = len(SPEC.rows) + len(SPEC.slots) + len(SPEC.batches)
    # Every answer is there, and no program was compiled that is not counted.
    assert record["compilations"] == record["compiled"] == 2 + len(SPEC.dtypes) * shapes
    assert record["missing"] == {}
    assert record["process"] == {"status": "ok", "reason": None}
    for dtype in SPEC.dtypes:
        values = record["dtypes"][dtype]
        layer = values["rows"]["layer"]
        assert set(layer) == {"4", "8"}
        # 4 rows of residual, keys and values.
        assert layer["8"]["elements"] == 4 * (48 + 2 * 24)
        assert set(values["slots"]) == {"scores", "softmax", "weighted_sum", "attention"}
        for question in ("rows", "batch", "following"):
            assert set(values[question]) >= {"matmul", "matmul_wide", "scores", "softmax", "weighted_sum", "rmsnorm"}
        for question in ("following", "neighbours", "rerun"):
            assert not any(f["differ"] for by in values[question].values() for f in by.values())
        assert all(all(by.values()) for by in values["process"].values())
    assert set(record["dtypes"]["fp32"]["place"]) == {"exp_tanh"}
    assert set(record["dtypes"]["fp16"]["sum_bits"]) == {"fp32", "fp16"}
    assert operand_kind(record["dtypes"]["fp32"]["operand_bits"]["highest"]["64"]) == "fp32"
    if jax.default_backend() == "cpu":
        assert operand_kind(record["dtypes"]["fp32"]["operand_bits"]["default"]["64"]) == "fp32"
        held = record["dtypes"]["fp16"]["held"]
        assert held == {"param": "float32", "operand": "float32", "activation": "float16"}


def test_report_shows_every_answer(record):
    text, markdown = text_of(record), as_markdown(write(record))
    for part in ("weighted_sum", "4 rows, not 8", "32 slots, not 16", "another process", "precision default", "fp16"):
        assert part in text
        assert part in markdown
    for sentence in conclude(record):
        assert f"- {sentence}" in markdown
