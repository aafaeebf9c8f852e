"""A record that is at fault is refused by its field."""

import accumulation_records
import injection_records
import pytest
from injection_records import ERROR
from layer_records import make_attribution, make_drift, make_patching
from sample_records import damage, make_invalid, make_sample
from study_records import make_parity
from test_doctor_findings import made_record
from test_mitigations_table import make_mitigation
from test_record_types import KEPT

from jaxkv.experiments.attribution.record import ALL, ALONE
from jaxkv.experiments.patching.record import INTO_CACHED, VALUES
from jaxkv.records import to_record

CHANGED = injection_records.make_record(0, "x", ERROR)
MADE = {
    "divergence": make_sample(),
    "divergence, invalid": make_invalid(),
    "injection": CHANGED,
    "injection, clean": injection_records.make_record(0),
    "injection, invalid": injection_records.make_broken(CHANGED),
    "mitigations": make_mitigation(),
    "mitigations, invalid": make_mitigation(sample=make_invalid(10)),
    "accumulation": accumulation_records.make_record(0),
    "perplexity": next(record for record in KEPT.values() if record["experiment"] == "perplexity"),
    "drift": make_drift(count=1)[0],
    "patching": make_patching(count=1)[0],
    "attribution": make_attribution(0, ALONE["mlp"], 1.0),
    "parity": make_parity(count=1)[0],
    "doctor": made_record(),
}
PAIR = "jax uncached | jax cached"
DIFFERENCE = {"op": "k", "layer": 0, "position": 0, "max_abs": 1.0, "relative": 1.0, "places": 1}
FAULTS = {
    "divergence": [
        ("problem", "3", "^problem: "),
        ("problem", -1, "^problem: "),
        ("key", ["divergence", 4], "^key: "),
        ("shapes.slots", -1, "^shapes.slots: "),
        ("sampling.sampler", "beam", "^sampling.sampler: "),
        ("sampling.temperature", 0.0, "^sampling.temperature: "),
        ("sampling.top_k", 1.5, "^sampling.top_k: "),
        ("status", "fine", "^status: "),
        ("invalid", {"arm": "cached"}, "^invalid.layer: "),
        ("headroom.max_abs", float("inf"), "^headroom.max_abs: "),
        ("headroom.limit", 0, "^headroom.limit: "),
        ("arms.cached.tokens", [1, 2.0], r"^arms.cached.tokens\[1\]: "),
        ("arms.cached.tokens", [0, 1, 2], "4 entries, expected 3"),
        ("arms.cached.tokens.3", -1, r"tokens\[3\]: expected `int` >= 0"),
        ("arms.uncached.tokens.0", 77, "tokens that say True"),
        ("arms.cached.stop", "invalid", "^arms.cached.stop: "),
        ("arms.uncached.scores.strict.correct", None, "^arms.uncached.scores.strict.correct: "),
        ("teacher_forced.js", [0.0], "^teacher_forced.js: "),
        ("teacher_forced.js.1", "nan", r"^teacher_forced.js\[1\]: "),
        ("teacher_forced.kl.1", -1e-3, r"^teacher_forced.kl\[1\]: "),
        ("teacher_forced.flip", [0, 0, 0, 0], r"^teacher_forced.flip\[0\]: "),
        ("teacher_forced.bit_equal", [True] * 4, r"^teacher_forced.bit_equal\[0\]: "),
        ("free_running.diverged", True, "^free_running.first_diverged: "),
        ("free_running.differing_after", 2, "^free_running.differing_after: "),
        ("controls.uncached_rerun", {}, "^controls.uncached_rerun.flip: "),
        ("controls.cached_rerun", make_sample(3, 3)["teacher_forced"], "controls.cached_rerun"),
        ("label_change.numeric", "changed", "^label_change.numeric: "),
    ],
    "divergence, invalid": [
        (path, make_sample()["teacher_forced" if path.startswith("controls") else path], "no agreement")
        for path in ("teacher_forced", "free_running", "controls.cached_rerun")
    ],
    "injection": [
        ("key", ["injection", 0, "x", 1], "^key"),
        ("spec", None, "^spec"),
        ("spec.family", "noise", "^spec.family"),
        ("run.scores", {}, "^run.scores"),
        ("run.scores.strict.correct", 1, "^run.scores.strict.correct"),
        ("run.stop", "invalid", "^run.stop"),
        ("teacher_forced", None, "^teacher_forced"),
        ("teacher_forced.kl.0", float("nan"), r"^teacher_forced.kl\[0\]"),
        ("free_running", None, "^free_running"),
        ("cache.bits", 0.0, "^cache.bits"),
        ("cache.packed", 1.5, "^cache.packed"),
    ],
    "injection, clean": [("teacher_forced", CHANGED["teacher_forced"], "^teacher_forced"), ("spec", ERROR, "^spec")],
    "injection, invalid": [("teacher_forced", CHANGED["teacher_forced"], "^teacher_forced")],
    "mitigations": [
        ("key", ["mitigations", 1, "x"], "^key"),
        ("tokens.fp64", [0, 1], "^distance.cached.given"),
        ("tokens.cached", [0, 1], "^teacher_forced"),
        ("distance.cached.given.rms", [0.0], "^distance.cached.given.rms"),
        ("distance.uncached.rounded.kl.0", -1.0, "^distance.uncached.rounded.kl"),
        ("free_running", None, "^free_running"),
        ("status", "invalid", "^invalid"),
        ("status", "fine", "^status"),
    ],
    "mitigations, invalid": [("teacher_forced", make_mitigation()["teacher_forced"], "^teacher_forced")],
    "accumulation": [
        ("regime", "later", "^regime"),
        ("bins.0.1", 99, "^bins"),
        ("attention_error.error", [], "^attention_error.error"),
        ("logits.places.0", 50, "^logits.places"),
        ("logits.kl_sum", -1.0, "^logits.kl_sum"),
        ("stored.k.norm_share.0", 2.0, "^stored.k.norm_share"),
        ("stored.v.relative.0", None, "^stored.v.relative"),
        ("instrumented_bit_equal.changed", None, "^instrumented_bit_equal.changed"),
        ("storage.bytes", -1, "^storage.bytes"),
    ],
    "perplexity": [
        ("tokens", 0, "tokens: expected `int` >= 1"),
        ("steps", 1, "steps: 1 beside"),
        ("nats.cached", -1.0, "nats.cached: expected `float` >= 0.0"),
        ("nats", None, "nats: missing"),
        ("logits.flips", 99, "logits.flips: 99 is more than"),
        ("logits.kl", -1.0, "logits.kl: expected `float` >= 0.0"),
        ("logits.bit_equal", 8, "although all their logits are equal"),
        ("key", ["perplexity", 0], "key: expected"),
        ("bytes", -1, "bytes: expected `int` >= 0"),
        ("spec", {"family": "quant", "k": None, "v": None}, "spec: expected null"),
        ("cache", None, "cache: expected `object`, got `null`"),
        ("saturated", {"k": 2, "v": 2, "elements": 3}, "saturated.k: 4 is more than 3"),
    ],
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
        # Keys of mappings are named too, which msgspec writes as [...].
        (f"pairs.{PAIR}.kl.0", -1.0, r"^pairs\.jax uncached \| jax cached\.kl\[0\]: expected `float` >= 0\.0$"),
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
        to_record(damage(MADE[name], path, value))
