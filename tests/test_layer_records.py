"""A record of drift, patching, attribution, parity or doctor that is at fault is refused by its field."""

import pytest
from layer_records import altered, make_attribution, make_drift, make_patching
from study_records import make_parity
from test_doctor_findings import made_record

from jaxkv.experiments.attribution.record import ALL, ALONE
from jaxkv.experiments.patching.record import INTO_CACHED, VALUES
from jaxkv.records import to_record

MADE = {
    "drift": make_drift(count=1)[0],
    "patching": make_patching(count=1)[0],
    "attribution": make_attribution(0, ALONE["mlp"], 1.0),
    "parity": make_parity(count=1)[0],
    "doctor": made_record(),
}
PAIR = "jax uncached | jax cached"
DIFFERENCE = {"op": "k", "layer": 0, "position": 0, "max_abs": 1.0, "relative": 1.0, "places": 1}
FAULTS = {
    "drift": [
        ("experiment", "divergence", "missing|unknown field"),
        ("key", ["drift", 5], "key: expected"),
        ("instrumented_bit_equal.walk.cached", 99, "instrumented_bit_equal.walk.cached: 99 is more than"),
        ("layers.k.prompt.relative", [0.1], "layers.k.prompt.cosine: 3 entries, expected 1"),
        ("layers.v.decoded.bit_equal.0", 99, r"layers.v.decoded.bit_equal\[0\]: 99 of"),
        ("layers.v.decoded.bit_equal.0", 9, r"layers.v.decoded.bit_equal\[0\]: 9 of 9, beside a difference of 0.0"),
        ("logits.flips", 77, "logits.flips: 77 is more than"),
        ("grid.bins.0", [1, 2], r"grid.bins\[0\]: expected \[0, end\]"),
        ("first.decoded", DIFFERENCE | {"dtypes": ["float32"]}, "first.decoded.dtypes: expected `array` of length 2"),
        ("path.relative", [], "path.relative: 0 entries, expected"),
        ("repeated", None, "repeated: missing"),
        ("status", "invalid", "invalid"),
    ],
    "patching": [
        ("experiment", "drift", "missing|unknown field"),
        ("direction", "cached", "direction: invalid enum value 'cached'"),
        ("patch", "Q", "patch: 'Q' is not one of"),
        ("key", ["patching", 0, INTO_CACHED, VALUES], "key: expected"),
        ("instrumented_bit_equal.cached", 99, "instrumented_bit_equal.cached: 99 is more than"),
        ("gap.kl", -1.0, "gap.kl: expected `float` >= 0.0"),
        ("gap.flips", 99, "gap.flips: 99 is more than"),
        ("gap.bit_equal", 10, "gap.bit_equal: 10 is more than 9"),
        ("all.recovered", 9, "all.recovered: 9 is more than"),
        ("unchanged", 77, "unchanged: 77 is more than"),
        ("by_layer.kl", [], "by_layer.kl: 0"),
        ("by_layer.layer.2", 4, "by_layer.layer: 4 is more than 3"),
        ("grid.kl.1", [0.0], "grid.kl: 1 entries, expected 2"),
        ("trajectory.agreeing", 7, "agreeing: 7 is more than"),
        ("trajectory.agreeing", None, "trajectory.agreeing: missing"),
        ("status", "invalid", "invalid"),
    ],
    "attribution": [
        ("experiment", "divergence", "missing|unknown field"),
        ("variant", "norms", "variant: 'norms' is not one of"),
        ("aligned", None, "aligned: not what variant"),
        ("key", ["attribution", 0, ALL], "key: expected"),
        ("steps", 3, "teacher_forced: .* entries, expected 3"),
        ("moved.cached", 99, "moved.cached: 99 is more than"),
        ("status", "invalid", "invalid: "),
        ("tile", -1, "tile: expected `int` >= 0"),
    ],
    "parity": [
        (f"pairs.{PAIR}.kl", [0.0], r"pairs.jax uncached \| jax cached"),
        ("cosine", [2.0], "cosine"),
        ("choices.jax cached", [1], "choices.jax cached"),
        ("layers.bit_equal.jax cached", 99, "layers.bit_equal.jax cached"),
        (f"layers.distance.{PAIR}.mean", [-1.0], "layers.distance"),
        ("status", "invalid", "invalid"),
    ],
    "doctor": [
        ("dtypes.fp16.rows.layer.4.differ", 101, "^dtypes.fp16.rows.layer.4.differ:"),
        ("dtypes.fp16.rows.layer.4", {"elements": 1}, "^dtypes.fp16.rows.layer.4.nonfinite:"),
        ("dtypes.fp16.rows.layer.4.nonfinite", 1, "^dtypes.fp16.rows.layer.4.differ:"),
        ("dtypes.fp16.rows.layer.4.max_ulp", 1.0, "^dtypes.fp16.rows.layer.4.max_ulp:"),
        ("dtypes.fp16.rows.layer.4.elements", 0, "^dtypes.fp16.rows.layer.4.elements:"),
        ("dtypes.fp16.process.layer.1", 1, "^dtypes.fp16.process.layer.1:"),
        ("dtypes.fp16.sum_bits.fp16.1.exact", float("nan"), "^dtypes.fp16.sum_bits.fp16.1.exact:"),
        ("dtypes.fp16.casts_dropped.ours.chain", None, "^dtypes.fp16.casts_dropped.ours.chain:"),
        ("process.status", "fine", "^process.status:"),
        ("key", ["doctor", "another"], "^key:"),
        ("seconds", None, "^seconds:"),
    ],
}


@pytest.mark.parametrize(
    ("name", "path", "value", "said"), [(name, *fault) for name, faults in FAULTS.items() for fault in faults]
)
def test_a_record_at_fault_is_named(name, path, value, said):
    to_record(MADE[name])
    with pytest.raises(ValueError, match=said):
        to_record(altered(MADE[name], path, value))
