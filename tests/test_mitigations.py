"""The mitigations experiment: float64 stays where it belongs, and distances and costs say what they should."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_records import summarize_mitigations
from small_models import changed_state, make_prompts, random_state, small_config, unaudited

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments import truth
from jaxkv.experiments.batches import Item, RunSpec, lay_out, plan_batches
from jaxkv.experiments.divergence.run import compare_row, run_batch
from jaxkv.experiments.driver import run_missing
from jaxkv.experiments.mitigations import run as mitigations
from jaxkv.experiments.mitigations.run import Mitigations, hold, make_variants
from jaxkv.logits import DISTANCE_FIELDS, measure_distance
from jaxkv.records import RunDirectory, read_lines, to_line, to_plain, to_record

SPEC = RunSpec(new_tokens=7, seed=3, bucket=8)  # 15 slots, and 16 in tiles
NAMES = ("fp16", "fp32", "fp32+param=fp16", "fp16 aligned")
PAIR = ("fp32", "fp16 aligned")
PROBLEMS = (10, 11, 12)
CONFIG = dataclasses.replace(small_config(), num_layers=1, window_pattern=(False,))


repeat_arms = functools.cache(lambda *given, **named: unaudited(Arms(*given, **named)))


@pytest.fixture(autouse=True)
def compile_once(monkeypatch):
    """Programs of the same arms are compiled once for all tests, audits not at all."""
    monkeypatch.setattr(mitigations, "Arms", repeat_arms)


make_state = functools.cache(lambda: random_state(CONFIG, "fp32"))


def choose(*names):
    return {name: make_variants(4)[name] for name in names}


def make_items(count=3):
    return [Item(10 + i, tuple(prompt), "a") for i, prompt in enumerate(make_prompts((6, 8, 7, 8, 6)[:count]))]


def run(names=NAMES, items=None, done=(), state=None, repeats=0, spec=SPEC):
    """Records and timings; 16-bit weights stay narrow, as on an accelerator."""
    records, timings = [], []
    variants = choose(*names)
    runner = Mitigations(CONFIG, state or make_state(), spec, variants, repeats=repeats, backend="cuda")
    for new, timing in run_missing(runner, items or make_items(), frozenset(done)):
        assert not jax.config.read("jax_enable_x64")
        records += new
        timings.append(timing)
    return to_plain(records), timings


@functools.cache
def undisturbed():
    """All records, and timings with the cost of each variant. Other tests copy before they change."""
    return run(repeats=1)


def records_of(name):
    found = [record for record in undisturbed()[0] if record["variant"] == name]
    assert [record["problem"] for record in found] == list(PROBLEMS)
    return found


def mean_rms(record, arm="cached", reference="given"):
    return np.mean(record["distance"][arm][reference]["rms"])


# The variants.


def test_variants_are_what_their_names_say():
    variants = make_variants(16)
    assert list(variants) == [
        "fp16", "fp16+accumulation=fp16", "fp16+residual=fp32", "fp16 outputs fp32", "bf16", "bf16+residual=fp32",
        "fp32", "fp32+param=fp16", "fp16 aligned",
    ]  # fmt: skip
    assert {name: variant.tile for name, variant in variants.items() if variant.tile} == {"fp16 aligned": 16}
    wide = variants["fp16 outputs fp32"].precision
    narrow = [part for part, dtype in wide.to_json().items() if dtype == "float16"]
    assert narrow == ["param", "operand", "cache"]
    assert wide.widened() == wide
    mixed = variants["fp32+param=fp16"].precision.to_json()
    assert [part for part, dtype in mixed.items() if dtype == "float16"] == ["param"]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_weights_are_rounded_however_they_are_held(backend):
    state = make_state()
    for variant in choose("fp16", "fp32+param=fp16", "fp32").values():
        arms = Arms(CONFIG, variant.precision, backend=backend)
        for given, held in zip(*map(jax.tree.leaves, (state, hold(arms, state))), strict=True):
            assert held.dtype == jnp.dtype(arms.held.param)
            np.testing.assert_array_equal(held, given.astype(variant.param).astype(jnp.float32))


def test_outputs_in_fp32_round_at_the_next_product():
    """Its products are of 16-bit numbers and its results of 32 bits: more than fp16 has."""
    arms = Arms(CONFIG, make_variants(4)["fp16 outputs fp32"].precision)
    layout, tokens, rows = lay_out(plan_batches(make_items(1), SPEC)[0], SPEC, CONFIG)
    prompt, cache = jnp.asarray(tokens[:, : layout.prefill]), arms.make_cache(rows, layout)
    logits = np.asarray(arms.prefill(hold(arms, make_state()), prompt, rows, cache)[0])
    assert logits.dtype == np.float32
    assert np.mean(logits != logits.astype(np.float16)) > 0.9


# float64.


def test_float64_does_not_leak(monkeypatch):
    """x64 is on for the float64 arms alone, and the others give what they give without them."""
    seen = []

    def watch(module, name):
        inner = getattr(module, name)

        def watched(arms, *arguments):
            result = inner(arms, *arguments)
            logits = result.logits if hasattr(result, "logits") else result.cached.logits
            seen.append((arms.precision.name, jax.config.read("jax_enable_x64"), logits.dtype.name))
            return result

        monkeypatch.setattr(module, name, watched)

    for where, name in ((Arms, "run_cached"), (Arms, "run_forced"), (mitigations, "run_batch")):
        watch(where, name)
    records, _ = run(PAIR, make_items(1))
    assert {entry for entry in seen if entry[0] == "fp64"} == {("fp64", True, "float64")}
    assert {entry for entry in seen if entry[0] != "fp64"} == {("fp32", False, "float32"), ("fp16", False, "float16")}
    assert not jax.config.read("jax_enable_x64")
    (batch,) = plan_batches(make_items(1), dataclasses.replace(SPEC, control_problems=0, stepwise_problems=0))
    arms = repeat_arms(CONFIG, make_precision("fp32"), backend="cuda")
    alone = compare_row(arms, batch.items[0], 0, run_batch(arms, arms.prepare(make_state()), batch, SPEC), SPEC)
    for name in ("teacher_forced", "free_running", "headroom", "shapes"):
        assert to_plain(alone)[name] == records[0][name]


def test_x64_goes_off_after_a_fault(monkeypatch):
    monkeypatch.setattr(Arms, "run_cached", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(PAIR, make_items(1))
    assert not jax.config.read("jax_enable_x64")


def test_x64_from_outside_is_refused():
    with jax.enable_x64(True), pytest.raises(UserError, match="leave --precision=fp64 out"):
        Mitigations(CONFIG, make_state(), SPEC, make_variants(4))


def test_distances_are_first_principles():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 6)) * 2, rng.normal(size=(3, 6)).astype(np.float32)
    a[2] = b[2]
    with jax.enable_x64(True):
        found = measure_distance(jnp.asarray(a), jnp.asarray(b), 3)
    softmax = [np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (a, b.astype(np.float64))]
    assert tuple(found) == DISTANCE_FIELDS
    np.testing.assert_allclose(found["kl"], (softmax[0] * np.log(softmax[0] / softmax[1])).sum(1), atol=1e-12)
    np.testing.assert_allclose(found["rms"], np.sqrt(np.mean((a - b) ** 2, 1)))
    np.testing.assert_allclose(found["max_abs"], np.abs(a - b).max(1))
    assert found["flip"] == (a.argmax(1) != b.argmax(1)).tolist()
    assert found["kl"][2] == found["rms"][2] == 0
    with pytest.raises(ValueError, match="no truth"):
        measure_distance(jnp.asarray(b), jnp.asarray(b), 3)
    a[1, 0] = np.nan
    with jax.enable_x64(True), pytest.raises(ValueError, match="not finite"):
        measure_distance(jnp.asarray(a), jnp.asarray(b), 3)


# What the records say.


def test_every_record_keeps_the_schema():
    records, timings = undisturbed()
    assert [tuple(r["key"]) for r in records] == [("mitigations", p, name) for p in PROBLEMS for name in NAMES]
    for record in records:
        to_record(record)
        assert record["status"] == "ok"
        assert record["tokens"]["fp64"] == records[4 * (record["problem"] - 10)]["tokens"]["fp64"]
    assert [t["variant"] for t in timings if t["cost"]] == list(NAMES)
    assert [t["variant"] for t in timings] == list(NAMES) * len(PROBLEMS)


def test_the_aligned_arms_have_no_differing_bit():
    for record in records_of("fp16 aligned"):
        assert all(record["teacher_forced"]["bit_equal"])
        assert not record["free_running"]["diverged"]
        assert record["distance"]["cached"] == record["distance"]["uncached"]
        assert mean_rms(record) > 1e-4  # equal is not exact
    assert not all(bit for record in records_of("fp32") for bit in record["teacher_forced"]["bit_equal"])


def test_fp32_is_nearer_to_fp64_than_fp16_and_weights_are_told_apart():
    for fp16, fp32, mixed in zip(*map(records_of, ("fp16", "fp32", "fp32+param=fp16")), strict=True):
        for arm in ("cached", "uncached"):
            assert mean_rms(fp32, arm) * 100 < mean_rms(fp16, arm)
            assert mean_rms(mixed, arm, "rounded") * 100 < mean_rms(mixed, arm)
            np.testing.assert_allclose(mean_rms(mixed, arm), np.mean(mixed["distance"]["weights"]["rms"]), rtol=0.01)
            assert mean_rms(fp16, arm, "rounded") > 1e-4
            assert fp32["distance"][arm]["given"] == fp32["distance"][arm]["rounded"]
        assert not any(fp32["distance"]["weights"]["rms"])
        assert mixed["distance"]["weights"] == fp16["distance"]["weights"]


@pytest.mark.parametrize(("method", "nearer"), [("_cached_loop", "uncached"), ("_tile_loop", "cached")])
def test_a_perturbed_arm_is_the_farther_one(monkeypatch, method, nearer):
    class Worse(Arms):
        pass

    def perturbed(self, state, *arguments, **options):
        return getattr(Arms, method)(self, jax.tree.map(lambda leaf: leaf * 1.003, state), *arguments, **options)

    functools.update_wrapper(perturbed, getattr(Arms, method))  # jit reads the names of donated arguments
    setattr(Worse, method, perturbed)
    monkeypatch.setattr(mitigations, "Arms", Worse)
    records, _ = run(["fp32"], make_items(5))
    (variant,) = summarize_mitigations(records, [])["variants"]
    for reference in ("given", "rounded"):
        judged = variant["distance"][reference]["nearer"]
        assert judged["rms"]["nearer"] == nearer
        assert (judged["kl"]["mean"] > 0) == (nearer == "uncached")


def test_numbers_that_break_are_no_agreement(monkeypatch):
    """A weight that fp16 cannot hold breaks fp16 and leaves fp32 alone."""
    monkeypatch.setattr(mitigations, "Arms", Arms)
    broken = changed_state(make_state(), "embed", (slice(None), 0), 1e5)
    records, _ = run(["fp16", "fp32"], make_items(2), state=broken)
    for record in records:
        to_record(record)
        assert record["status"] == ("invalid" if record["variant"] == "fp16" else "ok")
    assert records[0]["invalid"]["op"] == "resid_pre"
    broken, whole = summarize_mitigations(records, [])["variants"]
    assert broken["problems"] == {"total": 2, "ok": 0, "invalid": 2}
    assert broken["teacher_forced"] is broken["distance"] is broken["diverged"] is None
    assert whole["distance"]["given"]["cached"]["rms"]["mean"] > 0


# Resumption.


@pytest.mark.parametrize(
    ("done", "batches"),
    [
        (
            [(10, "fp32"), (10, "fp16 aligned"), (11, "fp32")],
            [(11, "fp16 aligned"), (12, "fp32"), (12, "fp16 aligned")],
        ),
        ([(p, name) for p in PROBLEMS for name in PAIR if (p, name) != (11, "fp32")], [(11, "fp32")]),
    ],
)
def test_a_resumed_run_does_what_is_missing_and_yields_the_same_bytes(tmp_path, monkeypatch, done, batches):
    whole = [record for record in undisturbed()[0] if record["variant"] in PAIR]
    with RunDirectory.open(tmp_path, {}) as directory:
        for record in whole:
            if (record["problem"], record["variant"]) in done:
                directory.append(record)
    slots, inner = set(), truth.Float64Model.run
    monkeypatch.setattr(truth.Float64Model, "run", lambda *given: slots.add(given[4].slots) or inner(*given))
    with RunDirectory.open(tmp_path, {}) as directory:
        kept = [key[1:] for key in directory.done_keys()]
        rest, timings = run(PAIR, done=kept)
        for record in rest:
            directory.append(record)
        assert [(t["problems"][0], t["variant"]) for t in timings] == batches
        order = {tuple(record["key"]): to_line(record) for record in whole}
        assert sorted(map(to_line, read_lines(directory.path / "samples.jsonl"))) == sorted(order.values())
    assert slots == {15}  # whatever is missing, the truth has one shape
    assert run(PAIR, done=[(p, name) for p in PROBLEMS for name in PAIR]) == ([], [])


def test_a_batch_of_two_gives_a_record_each():
    spec = dataclasses.replace(SPEC, batch_size=2, padding="left")
    records, timings = run(["fp32"], make_items(3), spec=spec)
    assert [record["problem"] for record in records] == [10, 11, 12]
    assert [timing["problems"] for timing in timings] == [[10, 11], [12]]
    assert run(["fp32"], make_items(3), [(10, "fp32"), (12, "fp32")], spec=spec)[0] == records[1:2]
    for record, alone in zip(records, records_of("fp32"), strict=True):
        assert record["tokens"] == alone["tokens"]
        assert mean_rms(record) < 1e-4


# Cost.


def test_costs_count_what_is_held():
    costs = {timing["variant"]: timing["cost"] for timing in undisturbed()[1] if timing["cost"]}
    numbers = sum(leaf.size for leaf in jax.tree.leaves(make_state()))
    for name, cost in costs.items():
        size = 4 if name == "fp32" else 2
        assert cost["bytes"]["weights"] == cost["bytes"]["weights_as_stored"] == size * numbers
        slots, cached = cost["shapes"]["slots"], 4 if "fp32" in name else 2
        entries = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
        assert cost["bytes"]["cache"] == slots * (entries * cached + 4)
        peak = cost["bytes"]["program_peak"]
        assert peak is None or peak > cost["bytes"]["weights"]
        assert len(cost["ms_a_token"]) == len(cost["prefill_ms"]) == 1
        assert cost["ms_a_token"][0] > 0
