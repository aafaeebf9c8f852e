"""The injection experiment: changes of nothing, changes of something, their records, and runs that are resumed."""

import dataclasses
import functools
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from quantized_models import wide_config
from small_models import SAMPLERS, unaudited
from test_divergence import Scoring

from jaxkv.checkpoints import ByteTokenizer
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments.batches import Item, RunSpec, lay_out, plan_batches
from jaxkv.experiments.changes import ERROR_SEEDS, SEED_ERRORS, SEED_QUANTS, list_runs, make_changes
from jaxkv.experiments.driver import run_missing
from jaxkv.experiments.experiment import EXPERIMENTS
from jaxkv.experiments.injection.report import SEED_TABLE
from jaxkv.experiments.injection.run import Injection
from jaxkv.experiments.record_parts import CLEAN
from jaxkv.options import CacheOptions, Options
from jaxkv.records import to_plain, to_record

TOKENIZER = ByteTokenizer()
SPEC = RunSpec(new_tokens=10, seed=3, batch_size=2, bucket=8)
LENGTHS = (6, 8, 6)
CONFIG = dataclasses.replace(wide_config(), num_layers=1, vocab_size=TOKENIZER.vocab_size, context_length=64)


def make_items(lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [Item(10 + i, tuple(rng.integers(0, 128, n).tolist()), "a") for i, n in enumerate(lengths)]


@functools.cache
def make_arms(sampler):
    return unaudited(Arms(CONFIG, make_precision("fp16"), SAMPLERS[sampler], TOKENIZER.eos_ids))


@functools.cache
def make_state():
    """Weights so large that the next token depends on the whole text."""
    state, rng = make_arms("greedy").abstract_state, np.random.default_rng(2)
    leaves = {path: rng.normal(size=leaf.shape) * 0.3 for path, leaf in flat_paths(state).items()}
    return with_leaves(
        state, {path: jnp.asarray(x.astype(np.float16).astype(np.float32)) for path, x in leaves.items()}
    )


def run(errors=(), quants=(), seeds=(0,), sampler="greedy", lengths=LENGTHS, done=frozenset(), spec=SPEC):
    runs = list_runs(make_changes(errors, quants, CONFIG), seeds)
    runner = Injection(make_arms(sampler), make_state(), spec, runs, TOKENIZER, Scoring())
    records = [record for new, _ in run_missing(runner, make_items(lengths), done) for record in to_plain(new)]
    for record in records:
        to_record(record)
        json.dumps(record, allow_nan=False)
    found = {tuple(record["key"][1:]): record for record in records}
    assert len(found) == len(records)
    return found


QUANT = "fp8:e4m3,scale=0.002232142857142857,first=4"  # 1/448: it holds what is at most 1 in magnitude


@pytest.fixture(scope="module")
def some_records():
    return run(("normal:0,0.5", "truncate:2"), (QUANT,), seeds=(4, 5))


def test_one_record_a_problem_change_and_seed(some_records):
    runs = [(CLEAN, 0), (QUANT, 0), ("normal:0,0.5", 4), ("normal:0,0.5", 5), ("truncate:2", 0)]
    assert sorted(some_records) == sorted((problem, *each) for problem in (10, 11, 12) for each in runs)
    assert all(record["status"] == "ok" for record in some_records.values())


def test_changes_change_what_seeds_and_levels_key(some_records):
    for problem in (10, 11, 12):
        kl = [np.mean(some_records[problem, name, seed]["teacher_forced"]["kl"]) for name, seed in
              (("normal:0,0.5", 4), ("normal:0,0.5", 5), ("truncate:2", 0), (QUANT, 0))]  # fmt: skip
        assert len(set(kl)) == 4
        assert min(kl) > 0


def test_free_run_and_text_are_the_changed_arms_own(some_records):
    for (problem, name, _), record in some_records.items():
        tokens, clean = record["run"]["tokens"], some_records[problem, CLEAN, 0]["run"]["tokens"]
        assert record["run"]["text"] == TOKENIZER.decode(tokens).partition("#")[0]
        if name != CLEAN:
            assert record["free_running"]["diverged"] == (tokens != clean)
            assert len(record["teacher_forced"]["kl"]) == len(clean)
            first = next((i for i, flip in enumerate(record["teacher_forced"]["flip"]) if flip), None)
            if None not in (first, record["free_running"]["first_diverged"]):
                assert record["free_running"]["first_diverged"] == first  # greedy: they part at the first flip
    assert any(record["free_running"]["diverged"] for (_, name, _), record in some_records.items() if name != CLEAN)


@pytest.mark.parametrize(
    ("sampler", "errors", "quants"),
    [
        ("greedy", ("normal:0,0", "uniform:0,0;draw=read"), ()),
        pytest.param("greedy", (), ("mask:16",), marks=pytest.mark.nightly),
        pytest.param("temperature", ("normal:0,0",), (), marks=pytest.mark.nightly),
    ],
)
def test_a_change_of_nothing_is_the_clean_run_bit_for_bit(sampler, errors, quants):
    records = run(errors, quants, (7,), sampler)
    assert len(records) == 3 * (1 + len(errors) + len(quants))
    for (problem, name, _), record in records.items():
        if name != CLEAN:
            assert all(record["teacher_forced"]["bit_equal"]), name
            assert not any(record["teacher_forced"]["kl"])
            assert record["run"] == records[problem, CLEAN, 0]["run"]
            assert not record["free_running"]["diverged"]


def test_the_error_has_a_seed_of_its_own():
    """Another sampler seed changes what is drawn, not the error: along one text the logits stay as they were."""
    errors = ("normal:0,0.5",)
    one, other = (run(errors, seeds=(4,), spec=dataclasses.replace(SPEC, seed=seed)) for seed in (3, 9))
    for key in one:
        assert one[key]["teacher_forced"] == other[key]["teacher_forced"]  # greedy: the same clean tokens
        assert (one[key]["sampling"]["seed"], other[key]["sampling"]["seed"]) == (3, 9)


def test_an_interrupted_run_ends_as_an_undisturbed_one(some_records):
    done = frozenset(key for key in list(some_records)[:7] if key[0] != 12)
    again = run(("normal:0,0.5", "truncate:2"), (QUANT,), seeds=(4, 5), done=done)
    assert again == {key: record for key, record in some_records.items() if key not in done}
    assert not run(("normal:0,0.5",), seeds=(4,), done=frozenset(some_records))


def test_seeds_and_levels_share_a_program(some_records):
    programs = make_arms("greedy").prefill, make_arms("greedy").cached_loop
    before = [program._cache_size() for program in programs]
    run(("normal:0.1,0.25", "normal:0,0"), seeds=(1, 2))
    assert [program._cache_size() for program in programs] == before
    assert some_records


def test_numbers_that_overflow_are_invalid():
    records = run(("normal:1e20,0", "normal:0,0.1"), lengths=(6, 6))
    for problem in (10, 11):
        broken = records[problem, "normal:1e+20,0", 0]
        assert broken["status"] == "invalid"
        assert broken["invalid"]["arm"] == "changed (along clean)"
        assert broken["teacher_forced"] is broken["free_running"] is None
        assert broken["run"]["stop"] == "invalid"
        assert records[problem, "normal:0,0.1", 0]["status"] == "ok"


def test_an_overflow_that_no_logit_shows_is_found_in_the_cache():
    """The last position's row is seen by its own step alone; keys of -inf have weight 0 there."""
    from jaxkv.cache import empty_cache
    from jaxkv.experiments.cache_measures import find_fault

    cache = empty_cache(CONFIG, make_precision("fp16"), 2, 8)
    positions = jnp.asarray([[-1, 0, 1, 2, 3, -1, -1, -1]] * 2)
    cache = dataclasses.replace(cache, positions=positions)
    assert find_fault("x", cache, 0) is None
    hidden = dataclasses.replace(cache, k=(cache.k[0].at[1, 0].set(jnp.nan),))  # an empty slot
    assert find_fault("x", hidden, 1) is None
    broken = dataclasses.replace(cache, v=(cache.v[0].at[1, 3, 0, 2].set(jnp.inf),))
    assert find_fault("x", broken, 0) is None
    assert find_fault("x", broken, 1) == {
        "arm": "x", "step": None, "layer": 0, "op": "v", "position": 2, "value": "inf",
    }  # fmt: skip


def test_bits_and_bytes_are_those_of_the_cache(some_records):
    heads, size = CONFIG.num_kv_heads, CONFIG.head_dim
    for problem, length in zip((10, 11, 12), LENGTHS, strict=True):
        whole, changed = some_records[problem, CLEAN, 0], some_records[problem, QUANT, 0]
        clean, packed = whole["cache"], changed["cache"]
        written = length + len(whole["run"]["tokens"]) - 1
        assert clean["written"] == packed["written"] == written
        slots = whole["shapes"]["slots"]
        assert (clean["bytes"], clean["bits"], clean["packed"]) == (2 * slots * heads * size * 2, 16, 0)
        assert packed["packed"] == pytest.approx((written - 4) / written)
        body = changed["spec"]["k"]["bits"]
        assert packed["bits"] == pytest.approx((4 * 16 + (written - 4) * body) / written)
        assert packed["bytes"] < clean["bytes"]
        assert some_records[problem, "normal:0,0.5", 4]["cache"] == clean


def test_saturated_elements_are_counted(some_records):
    """Of what is packed: the first four tokens are not."""
    layout, tokens, rows = lay_out(plan_batches(make_items(), SPEC)[0], SPEC, CONFIG)
    _, cache = make_arms("greedy").run_cached_keeping(make_state(), tokens, rows, layout)
    for row, problem in enumerate((10, 12)):
        found = some_records[problem, QUANT, 0]["saturated"]
        written = np.asarray(cache.positions[row]) >= 4
        for side, stored in (("k", cache.k), ("v", cache.v)):
            values = np.abs(np.asarray(stored, np.float64)[:, row, written])
            assert found[side] == (values > 1).sum() > 0
        assert found["elements"] == 2 * values.size
    assert all(record["saturated"] is None for key, record in some_records.items() if key[1] == CLEAN)


@pytest.mark.parametrize("batch", daily([2], [2, 1]))
def test_left_padding_keeps_a_problems_error(batch):
    """Its noise does not see the neighbours; only the arithmetic of other shapes differs."""
    spec = dataclasses.replace(SPEC, batch_size=batch)
    alone = run(("normal:0,0.3",), seeds=(4,), lengths=(6,) * batch, spec=spec)
    padded = run(("normal:0,0.3",), seeds=(4,), lengths=(6, 8), spec=dataclasses.replace(SPEC, padding="left"))
    assert padded[10, CLEAN, 0]["shapes"]["left_pad"] == 2
    a, b = (found[10, "normal:0,0.3", 4]["teacher_forced"]["kl"] for found in (alone, padded))
    np.testing.assert_allclose(a[:3], b[:3], rtol=0.1)


@pytest.mark.parametrize(
    ("errors", "quants", "said"),
    [
        (("normal:0,1;layers=5",), (), "--cache_error=normal:0,1;layers=5: layers go from 0 to 0"),
        (("normal:0,1;heads=0-9",), (), "heads go from 0 to"),
        (("normal:0,1", "normal:0,1.0"), (), "asks for normal:0,1 a second time"),
        ((), ("none",), "the clean arm always runs"),
        ((), ("kvarn:2,tile=128",), "--cache_quant=kvarn:2,tile=128: a tile of 128 tokens"),
    ],
)
def test_changes_that_cannot_be_made(errors, quants, said):
    with pytest.raises(UserError) as caught:
        make_changes(errors, quants, CONFIG)
    assert said in str(caught.value)


def test_the_command_runs_what_is_asked_for_and_the_seed_study_by_default(some_records):
    asked = CacheOptions(("normal:0,0.5", "truncate:2"), (QUANT,), error_seeds=(4, 5))
    checkpoint = types.SimpleNamespace(config=CONFIG, tokenizer=TOKENIZER)
    parts = {"arms": make_arms("greedy"), "state": make_state(), "spec": SPEC, "task": Scoring()}
    condition = types.SimpleNamespace(options=Options(cache=asked), checkpoint=checkpoint, **parts)
    make_runner = EXPERIMENTS["injection"].make_runner
    assert make_runner(condition).variants.keys() == {key[1:] for key in some_records}
    condition.options = Options()
    drawn = (len(SEED_ERRORS) - 1) * len(ERROR_SEEDS) + 1  # normal:0.5,0 draws nothing
    assert len(make_runner(condition).variants) == 1 + len(SEED_QUANTS) + drawn
    assert set(SEED_TABLE) <= {change.name for change in make_changes(SEED_ERRORS, SEED_QUANTS)}
