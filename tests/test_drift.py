"""Drift is exactly zero where arms are identical and at the embedding, what is recorded is what the traces hold."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from flax import nnx
from plain_records import summarize_drift
from sample_records import damage
from shown import show_by
from small_models import WINDOWED, make_prompts, run_all, run_broken, small_config, small_state, unaudited

from jaxkv.cache import empty_cache
from jaxkv.checkpoints.fill import flat_paths
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Item, RunSpec, plan_batches
from jaxkv.experiments.drift import run as drift
from jaxkv.experiments.drift.record import SEGMENTS, TENSORS
from jaxkv.experiments.drift.report import conclude, write_drift
from jaxkv.experiments.drift.run import Drift, plan_bins, repeat_kv_heads
from jaxkv.experiments.first_difference import fed_slots
from jaxkv.experiments.traced_runs import run_reference
from jaxkv.models.decoder import abstract_decoder
from jaxkv.records import to_line, to_record
from jaxkv.rollout import force, slot_positions
from jaxkv.tracing import list_values, trace_cached, trace_uncached, watched_cache

RUN = {"fingerprint": "ab"}
SPEC = RunSpec(new_tokens=6, batch_size=2, padding="left", bucket=8)
ITEMS = [Item(4, tuple(make_prompts((11,))[0]), ""), Item(7, tuple(make_prompts((8,), 1)[0]), "")]


@pytest.fixture(autouse=True)
def compile_once(monkeypatch):
    """Programs of the same arms are compiled once for all tests."""
    monkeypatch.setattr(drift, "Arms", repeat_arms)


repeat_arms = functools.cache(Arms)


@functools.cache
def make_arms(family="mistral", precision="fp32", tile=None, layers=2):
    arms = Arms(small_config(family, layers=layers), make_precision(precision), tile=tile)
    return arms if tile is None else unaudited(arms), arms.prepare(small_state(family, precision, layers=layers))


@functools.cache
def small_run(*variant):
    return run_all(Drift(*make_arms(*variant), SPEC), ITEMS)


@functools.cache
def small_reference():
    """Programs, weights and reference of the batch of `small_run`."""
    arms, state = make_arms()
    return arms, state, run_reference(arms, state, plan_batches(ITEMS, SPEC)[0], SPEC)


def watched_names():
    """Those whose figures a record has: programs that watch others would be compiled apart."""
    arms, _, reference = small_reference()
    return [name for name in list_values(arms, 2, reference.layout.slots) if name.split(".")[0] in TENSORS]


def watch(trace, names, **changes):
    """A trace of the reference's batch."""
    arms, state, reference = small_reference()
    given = {"rows": reference.forced, "layout": reference.layout} | changes
    return trace(arms, state, reference.text, names=names, **given)


# What the traces say.


@pytest.mark.parametrize(
    ("family", "precision"),
    daily([("mistral", "fp32")], [("mistral", "fp32"), ("mistral", "fp16"), ("gemma2", "fp16"), ("llama", "fp32")]),
)
def test_identical_arms_have_no_drift_anywhere(family, precision):
    records = small_run(family, precision, 2, 1)
    assert [r["problem"] for r in records] == [4, 7]
    for record in records:
        assert record["first"] == {"prompt": None, "decoded": None}
        assert record["path"]["name"] == []
        assert record["logits"] == {"kl": 0.0, "flips": 0, "max_abs": 0.0, "bit_equal": record["steps"]}
        variants = [record] if family == "llama" else [record, record["repeated"]]
        for variant, tensor, segment in itertools.product(variants, TENSORS, SEGMENTS):
            column = variant["layers"][tensor][segment]
            assert not np.any([column[figure] for figure in ("relative", "cosine", "max_abs")])
            assert set(column["bit_equal"]) == {record["places"][segment]}
        for tensor in TENSORS:
            assert not np.any([record["grid"][tensor][figure] for figure in ("relative", "cosine")])
    assert (records[0]["repeated"] is None) == (family == "llama")
    text = "\n".join(conclude(summarize_drift(records, RUN)))
    assert "In decoded positions no value of any operation differs in 2 problems." in text


def test_the_embedding_never_drifts_and_the_rest_does():
    for record in small_run():
        places = record["places"]
        assert places == {"prompt": record["prompt_tokens"], "decoded": record["steps"] - 1}
        for variant in (record, record["repeated"]):
            stream = variant["layers"]["resid_pre"]
            for segment in SEGMENTS:
                assert stream[segment]["relative"][0] == stream[segment]["cosine"][0] == 0
                assert stream[segment]["bit_equal"][0] == places[segment]
            assert 0 < stream["decoded"]["relative"][-1] < 1e-5
        first, names = record["first"]["decoded"], record["path"]["name"]
        assert names[0] == f"{first['op']}.{first['layer']}"
        assert names[-2:] == ["final_norm", "logits"]
        assert record["path"]["bit_equal"][0] == places["decoded"] - first["places"]


def test_figures_are_those_of_the_values():
    _, _, reference = small_reference()
    layout, names = reference.layout, watched_names()
    traces = [watch(trace, names).values for trace in (trace_cached, trace_uncached)]
    row, record = 1, small_run()[1]
    fed = fed_slots(reference.rows, layout, reference.cached.lengths, row) & (np.arange(layout.slots) >= layout.prompt)
    for tensor in TENSORS:
        a, b = (np.asarray(values[f"{tensor}.1"][row], np.float64)[fed] for values in traces)
        a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
        size = lambda z: np.linalg.norm(z, axis=1)  # noqa: E731
        column = record["layers"][tensor]["decoded"]
        assert column["relative"][1] == pytest.approx(np.mean(size(a - b) / size(b)), rel=6e-3)
        turned = size(a / size(a)[:, None] - b / size(b)[:, None]) ** 2 / 2
        assert column["cosine"][1] == pytest.approx(np.mean(turned), rel=6e-3)
        assert column["max_abs"][1] == pytest.approx(np.abs(a - b).max(), rel=6e-3)
        assert column["bit_equal"][1] == int((a == b).all(1).sum())


def test_watched_keys_and_values_are_those_of_the_cache():
    arms, state, reference = small_reference()
    names = watched_names()
    cached = watch(trace_cached, names)
    cache = watched_cache(arms, reference.rows, reference.layout, names, None)
    prompts = jnp.asarray(reference.text[:, : reference.layout.prefill])
    _, cache = arms.prefill(state, prompts, reference.rows, cache)
    prompt = reference.layout.prompt
    np.testing.assert_array_equal(cache.cache.k[0][:, :prompt], cached.values["k.0"][:, :prompt])
    np.testing.assert_array_equal(cache.cache.v[1][:, :prompt], cached.values["v.1"][:, :prompt])
    assert cached.positions.max() == prompt + int(reference.cached.lengths.max()) - 2 - int(reference.rows.first.min())


def test_uncached_values_of_a_row_do_not_depend_on_what_follows():
    """So one pass over the whole text has the values of the recomputation at each step."""
    reference, names = small_reference()[2], watched_names()
    whole = watch(trace_uncached, names)
    short = dataclasses.replace(reference.cached, lengths=jnp.minimum(reference.cached.lengths, 3))
    cut = watch(trace_uncached, names, rows=force(reference.rows, short))
    end = reference.layout.prompt + 2
    for name in names:
        np.testing.assert_array_equal(whole.values[name][:, :end], cut.values[name][:, :end])
    np.testing.assert_array_equal(whole.run.logits[:, :3], cut.run.logits[:, :3])


@pytest.mark.parametrize("family", daily(["gemma2", "qwen2"], [*WINDOWED, "qwen2"]))  # Qwen2 has biases of k and v
def test_repeated_heads_are_an_equal_model(family):
    config, precision = small_config(family, layers=1), make_precision("fp32")
    state = small_state(family, layers=1)
    wide, repeated = repeat_kv_heads(config, state)
    assert wide.num_kv_heads == config.num_query_heads > config.num_kv_heads
    wanted = flat_paths(abstract_decoder(wide, precision)[1])
    assert {path: leaf.shape for path, leaf in flat_paths(repeated).items()} == {p: x.shape for p, x in wanted.items()}
    tokens = jnp.asarray(make_prompts((12, 12)))
    positions = slot_positions(jnp.arange(12), jnp.zeros(2, jnp.int32), 12)

    def logits(config, state):
        @jax.jit
        def forward(state):
            model = nnx.merge(abstract_decoder(config, precision)[0], state)
            return model.logits(model(tokens, positions, empty_cache(config, precision, 2, 12), 0)[0])

        return forward(state)

    given = np.asarray(logits(config, state))
    np.testing.assert_allclose(logits(wide, repeated), given, rtol=0, atol=5e-5)
    assert np.abs(given).max() > 1


# Records.


def test_records_are_valid_and_small():
    for record in small_run():
        plain = json.loads(to_line(record))
        to_record(plain)
        assert plain["grid"]["bins"][-1][1] == sum(plain["places"].values())


def test_a_grid_stays_within_its_room():
    assert plan_bins({"prompt": 3, "decoded": 2}, 2) == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert plan_bins({"prompt": 3, "decoded": 0}, 2) == [[0, 1], [1, 2], [2, 3]]
    for layers in (6, 30, 80):
        bins = plan_bins({"prompt": 1000, "decoded": 255}, layers)
        assert [pair[0] for pair in bins] == [0, *(pair[1] for pair in bins[:-1])]
        assert [bins[len(bins) // 2 - 1][1], bins[-1][1]] == [1000, 1255]
        assert len(bins) * (layers + 1) * len(TENSORS) * 3 * 9 < 160_000


def test_a_problem_that_overflows_has_no_figures():
    arms, state = make_arms()
    records, alone, place = run_broken(lambda broken: Drift(arms, broken, SPEC), state, ITEMS)
    for record in records + alone:
        to_record(json.loads(to_line(record)))
    assert [record["status"] for record in records] == ["invalid", "ok"]
    assert records[0]["invalid"]["op"] == "resid_pre"
    assert records[0]["invalid"]["position"] == place
    summary = summarize_drift(alone, RUN)
    assert summary["status"] == "invalid"
    assert conclude(summary) == ["There is no sample with finite numbers, so nothing can be said of drift."]


# What is said of them.


def plain_records():
    return [json.loads(to_line(record)) for record in small_run()]


shown, to_markdown, _ = show_by(write_drift)


def say(*records):
    return "\n".join(conclude(summarize_drift(records, RUN)))


def test_sentences():
    first, second = plain_records()
    summary = summarize_drift([first, second], RUN)
    assert json.loads(json.dumps(summary)) == summary
    text, places = say(first, second), sum(summary["places"].values())
    assert f"The embedding is equal in every bit at {places} of {places} positions" in text
    assert "of that leaves the first layer already" in text
    assert "Watching these values changed no bit of either arm's logits" in text
    assert "over 2 problems is wide and rough" in text
    watched = damage(first, "instrumented_bit_equal.figures.cached", 0)
    assert "made other programs of the watched arms" in say(watched, second)
    broken = damage(first, "layers.resid_pre.prompt.bit_equal.0", 1)
    assert "THE EMBEDDING DIFFERS at 10 of" in say(broken, second)


def test_more_or_less_drift_is_said_only_beyond_the_interval():
    records = []
    for problem in range(6):
        record = damage(plain_records()[0], "problem", problem) | {"key": ["drift", problem]}
        for tensor in TENSORS:
            size = 3e-3 if tensor == "k" else 1e-3 + (-1) ** problem * 1e-4
            for layers, value in ((record["layers"], 1e-3), (record["repeated"]["layers"], size)):
                column, first = layers[tensor]["decoded"], int(tensor == "resid_pre")
                column["relative"][first:] = [value] * 2
                column["bit_equal"][first:] = [0] * 2
        records.append(record)
    text = say(*records)
    assert "Drift of K, mean over layers: 0.001 as it is, 0.003 with repeated heads" in text
    assert text.count("more with repeated heads") == 1
    assert text.count("not distinguishable") == 4


def test_an_unfinished_run_says_so():
    summary = summarize_drift(plain_records()[:1], {"config": {"num_problems": 5}})
    assert "UNFINISHED: 4 of 5 problems have no record yet" in to_markdown(summary)
    assert "With one problem there are no intervals." in to_markdown(summary)
    assert conclude(summarize_drift([], RUN)) == ["There is no sample yet, so nothing can be said of drift."]


def test_tables_show_every_layer_in_80_columns():
    summary = summarize_drift(plain_records(), RUN)
    text, markdown = shown(summary), to_markdown(summary)
    for layer in ("0", "1", "out"):
        assert f"\n{layer} " in text
        assert f"\n| {layer} |" in markdown
