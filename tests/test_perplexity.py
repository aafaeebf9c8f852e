"""Perplexity: windows cover a text, both arms' likelihoods are those of plain forwards, and a changed cache shows."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from injection_records import ERROR, quant
from plain_records import summarize_perplexity, summarize_study, write_blocks
from scipy.special import log_softmax
from shown import show_by
from small_models import changed_state, small_config, small_state, unaudited
from study_records import make_run

from jaxkv.cache import empty_cache
from jaxkv.checkpoints.tokenizer import ByteTokenizer, Tokenizer
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.experiments.changes import Change, list_runs, make_changes
from jaxkv.experiments.driver import run_missing
from jaxkv.experiments.perplexity.report import write_perplexity
from jaxkv.experiments.perplexity.run import Perplexity, score_tokens, tokenize
from jaxkv.records import to_plain, to_record
from jaxkv.reporting import document
from jaxkv.tasks.perplexity import Window, aggregate, plan_windows

TEXT = "The river föx runs.\n Past nine  quiet towns, to the sea — and back."
VOCAB = ByteTokenizer.vocab_size
CONTEXT, STRIDE = 6, 12
SPEC = RunSpec(new_tokens=STRIDE, batch_size=2, bucket=8)
CLEAN_RUN = list_runs([Change(None)], (0,))


@functools.cache
def make_arms(family="mistral", precision="fp32", tile=None, stop_ids=()):
    arms = unaudited(Arms(small_config(family, VOCAB, 1), make_precision(precision), stop_ids=stop_ids, tile=tile))
    return arms, arms.prepare(small_state(family, precision, VOCAB, 1))


def make_windows(text=TEXT, context=CONTEXT, stride=STRIDE):
    tokenizer = ByteTokenizer()
    return plan_windows(text, *tokenize(tokenizer, text), context, stride, tokenizer.bos_id)


@functools.cache
def small_run(family="mistral", precision="fp32", tile=None):
    return records_of(*make_arms(family, precision, tile), make_windows())


def records_of(arms, state, windows):
    return [r for batch, _ in run_windows(Perplexity(arms, state, SPEC, CLEAN_RUN, windows)) for r in batch]


def items_of(windows):
    return [Item(window.index, window.context, "") for window in windows]


def run_windows(runner, done=frozenset()):
    return run_missing(runner, items_of(runner.windows.values()), done)


# Windows.


@given(st.text(st.sampled_from("aé— \n"), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 7), st.booleans())
def test_windows_cover_a_text_once(text, given_tokens, stride, bos):
    ids, ends = tokenize(ByteTokenizer(), text)
    context = given_tokens + bos
    if len(ids) <= given_tokens:
        with pytest.raises(UserError, match="longer text"):
            plan_windows(text, ids, ends, context, stride, 257 if bos else None)
        return
    windows = plan_windows(text, ids, ends, context, stride, 257 if bos else None)
    assert [t for w in windows for t in w.scored] == ids[given_tokens:]
    assert [w.index for w in windows] == list(range(len(windows)))
    for window in windows:
        assert len(window.context) == context
        assert (window.context[0] == 257) is bos
        begin = window.index * stride
        assert list(window.context[bos:] + window.scored) == ids[begin : begin + given_tokens + len(window.scored)]
        assert len(window.scored) <= stride
    head = text[: ends[given_tokens - 1]]
    assert sum(w.bytes for w in windows) == len(text.encode()) - len(head.encode())
    assert sum(w.words for w in windows) == len(text.split()) - len(head.split())


def test_offsets_of_a_transformers_tokenizer_are_those_of_bytes():
    wrapped = Tokenizer(ByteTokenizer().to_transformers())
    ids, ends = tokenize(wrapped, TEXT)
    assert ids == tokenize(ByteTokenizer(), TEXT)[0]
    windows = plan_windows(TEXT, ids, ends, CONTEXT, STRIDE, wrapped.bos_id)
    assert [w.scored for w in windows] == [w.scored for w in make_windows()]
    assert sum(w.bytes for w in windows) == sum(w.bytes for w in make_windows())


@pytest.mark.parametrize(("context", "stride"), [(1, 4), (0, 4), (4, 0)])
def test_windows_refuse(context, stride):
    with pytest.raises(UserError, match="cannot be cut"):
        make_windows(context=context, stride=stride)


def test_aggregate():
    records = [
        {"tokens": 3, "bytes": 6, "words": 1, "nats": {"cached": 3.0, "uncached": 1.5}},
        {"tokens": 1, "bytes": 2, "words": 0, "nats": {"cached": 1.0, "uncached": 0.5}},
    ]
    found = aggregate(iter(records), "cached")
    assert found["perplexity"] == pytest.approx(math.e)
    assert found["word_perplexity"] == pytest.approx(math.exp(4))
    assert found["byte_perplexity"] == pytest.approx(math.exp(0.5))
    assert found["bits_per_byte"] == pytest.approx(0.5 / math.log(2))
    assert (found["tokens"], found["bytes"], found["words"], found["nats"]) == (4, 8, 1, 4.0)
    assert aggregate(records, "uncached")["perplexity"] == pytest.approx(math.exp(0.5))
    assert "word_perplexity" not in aggregate(records[1:], "cached")
    assert aggregate([], "cached") is None
    far = [{"tokens": 1, "bytes": 1, "words": 1, "nats": {"cached": 1e4}}]
    assert aggregate(far, "cached")["perplexity"] == math.inf


# Likelihoods.


def test_score_tokens():
    logits = np.random.default_rng(0).normal(size=(5, 11)).astype(np.float32) * 9
    tokens = [3, 10, 0]
    wide = logits.astype(np.float64)
    expected = np.log(np.exp(wide).sum(-1))[:3] - wide[range(3), tokens]
    np.testing.assert_allclose(score_tokens(jnp.asarray(logits), tokens), expected, rtol=1e-14)


@functools.cache
def plain_forward(family):
    arms, _ = make_arms(family)

    @jax.jit
    def forward(state, text):
        model = nnx.merge(arms.graphdef, state)
        cache = empty_cache(arms.config, arms.precision, *text.shape)
        hidden, _ = model(text, jnp.arange(text.shape[1], dtype=jnp.int32)[None], cache, 0)
        return model.logits(hidden)[0]

    return forward


def forward_nats(family, window):
    """Sum of -ln p over a window's scored tokens from one plain forward over all of it, in float64."""
    text = np.zeros((1, CONTEXT + STRIDE), np.int32)  # rows do not see what follows them
    text[0, : CONTEXT + len(window.scored)] = window.context + window.scored
    logits = np.asarray(plain_forward(family)(make_arms(family)[1], text), np.float64)
    places = range(CONTEXT - 1, CONTEXT - 1 + len(window.scored))
    return -float(log_softmax(logits, axis=-1)[places, window.scored].sum())


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_both_arms_have_the_likelihoods_of_a_plain_forward(family):
    for record, window in zip(small_run(family), make_windows(), strict=True):
        expected = forward_nats(family, window)
        for arm in ("cached", "uncached"):
            assert record["nats"][arm] == pytest.approx(expected, rel=1e-5)  # two shapes of one fp32 forward


def test_records():
    records, windows = small_run(), make_windows()
    assert [r["key"] for r in records] == [["perplexity", w.index, "none", 0] for w in windows]
    assert len(windows[-1].scored) < STRIDE  # the last window is a short one
    for record, window in zip(records, windows, strict=True):
        assert to_plain(record) == record
        to_record(record)
        assert record["steps"] == record["tokens"] == len(window.scored)
        assert (record["bytes"], record["words"]) == (window.bytes, window.words)


def test_aligned_arms_are_equal_bit_for_bit():
    for record in small_run(tile=4):
        assert record["nats"]["cached"] == record["nats"]["uncached"]
        assert record["logits"] == {"kl": 0.0, "flips": 0, "max_abs": 0.0, "bit_equal": record["tokens"]}


def test_changed_caches_stand_beside_one_uncached_arm():
    arms, state = make_arms()
    runs = list_runs(make_changes(["normal:0.1,0", "normal:0,0.25"], [], arms.config), seeds=(0, 1))
    runner = Perplexity(arms, state, SPEC, runs, make_windows()[:3])
    batches = list(run_windows(runner))
    drawn = [("none", 0), ("normal:0.1,0", 0), ("normal:0,0.25", 0), ("normal:0,0.25", 1)]
    keys = [("perplexity", index, *run) for batch in ((0, 1), (2,)) for run in drawn for index in batch]
    records = [record for batch, _ in batches for record in batch]
    assert [tuple(record["key"]) for record in records] == keys
    assert [list(timing["seconds"]) for _, timing in batches] == [["cached", "uncached"], *[["cached"]] * 3] * 2
    for record in records:
        to_record(to_plain(record))
        clean = small_run()[record["problem"]]
        assert record["nats"]["uncached"] == clean["nats"]["uncached"]
        if record["change"] == "none":
            assert record == clean
        else:
            assert record["nats"]["cached"] != clean["nats"]["cached"]
            assert record["logits"]["kl"] > 1e3 * clean["logits"]["kl"]
    assert len({record["nats"]["cached"] for record in records if record["problem"] == 0}) == len(drawn)
    done = frozenset(tuple(record["key"][1:]) for record in records if record["change"] != "normal:0.1,0")
    resumed = run_windows(runner, done)
    assert [r for batch, _ in resumed for r in batch] == [r for r in records if r["change"] == "normal:0.1,0"]


def test_a_study_has_its_perplexities():
    runs = [make_run(small_run(), "text", experiments=["perplexity"])]
    study = summarize_study(runs)
    page = document.to_markdown("t", write_blocks(runs))
    row = next(line for line in to_markdown(study["conditions"][0]["perplexity"]).splitlines() if "| none |" in line)
    assert page.index("## Perplexity") < page.index("### text") < page.index(row)


SATURATED = "fp8:e4m3,scale=0.001"  # holds what is at most .448


def run_changed(family, errors=(), quants=()):
    """The runner of two windows under one change, the clean run and the changed one."""
    arms, state = make_arms(family)
    _, change = make_changes(errors, quants, arms.config)
    runner = Perplexity(arms, state, SPEC, list_runs([change], (0,)), make_windows()[:2])
    clean = runner.begin(runner.plan(items_of(make_windows()[:2]))[0], [])
    return runner, clean, runner.run(clean, (change, 0))


def records_of_change(runner, clean, ran):
    (variant,) = runner.variants.values()
    items = enumerate(items_of(runner.windows.values()))
    return to_plain([runner.record(item, row, clean, variant, ran) for row, item in items])


@functools.cache
def saturated_run():
    """With its records; heads of 16 channels."""
    found = run_changed("gemma2", quants=[SATURATED])
    return *found, records_of_change(*found)


def test_a_record_says_what_was_done_to_the_cache():
    runner, clean, ran, records = saturated_run()
    ((change, _),) = runner.variants.values()
    for row, record in enumerate(records):
        to_record(record)
        assert record["spec"] == to_plain(change.describe(runner.arms.config.head_dim))
        written = np.asarray(clean.cache.positions[row]) >= 0
        for side, stored in (("k", clean.cache.k), ("v", clean.cache.v)):
            values = np.abs(np.asarray(stored, np.float64)[:, row, written])
            assert record["saturated"][side] == (values > 0.448).sum() > 0
        assert record["saturated"]["elements"] == 2 * values.size
        stored = sum(leaf[row].nbytes for leaf in jax.tree.leaves((ran.cache.k, ran.cache.v)))
        found = {"bytes": stored, "written": CONTEXT + STRIDE - 1, "bits": 8.0, "exact_bits": 32.0, "packed": 1.0}
        assert record["cache"] == found
        before = small_run("gemma2")[row]
        assert (before["spec"], before["saturated"]) == (None, None)
        assert before["cache"] == found | {"bytes": 4 * stored, "bits": 32.0, "packed": 0.0}


def test_a_cache_that_broke_though_no_logit_shows_it():
    runner, clean, ran = run_changed("mistral", errors=["normal:0.1,0"])
    last = int(np.asarray(ran.cache.positions[1]).argmax())
    values = (ran.cache.v[0], ran.cache.v[0].at[1, last, 0, 0].set(jnp.inf))  # as if of two layers
    ran = dataclasses.replace(ran, cache=dataclasses.replace(ran.cache, k=ran.cache.k * 2, v=values))
    whole, broken = records_of_change(runner, clean, ran)
    assert whole["status"] == "ok"
    place = {"arm": "cached", "step": None, "layer": 1, "op": "v", "position": CONTEXT + STRIDE - 2, "value": "inf"}
    assert broken["invalid"] == place
    assert broken["nats"] is broken["logits"] is None
    to_record(broken)


def test_numbers_that_are_not_finite():
    arms, state = make_arms()
    windows = make_windows()
    token = windows[0].scored[0]
    broken = changed_state(state, "embed", (token, 0), np.inf)
    records = records_of(arms, broken, windows[:1])
    assert [r["status"] for r in records] == ["invalid"]
    assert records[0]["nats"] is records[0]["logits"] is None
    to_record(records[0])


def test_refusals():
    arms, state = make_arms(stop_ids=(ord("n"),))
    with pytest.raises(UserError, match=r"holds a token that ends a text \(110\)"):
        Perplexity(arms, state, SPEC, CLEAN_RUN, make_windows())
    arms, state = make_arms()
    long = Window(0, tuple(range(60)), tuple(range(9)), 9, 1)
    with pytest.raises(UserError, match="window of 72 tokens exceeds the context of 64"):
        Perplexity(arms, state, SPEC, CLEAN_RUN, [long])


# The summary.

FAULT = {"arm": "cached", "layer": 0, "op": "k", "position": 1, "step": 0, "value": "nan"}
INVALID = {"status": "invalid", "invalid": FAULT, "nats": None, "logits": None}


def make_change(change, factor, seed=0, **more):
    """Records of a change under which the cached arm loses so much more than the uncached one."""
    more = {"spec": ERROR} | more
    records = []
    for record in small_run():
        nats = {"cached": record["nats"]["uncached"] * factor, "uncached": record["nats"]["uncached"]}
        named = {"change": change, "seed": seed, "key": ["perplexity", record["problem"], change, seed]}
        records.append(record | named | more | {"nats": nats})
    return records


shown, to_markdown, _ = show_by(write_perplexity)


def test_summary():
    worse = [*make_change("normal:0,0.25", 1.1), *make_change("normal:0,0.25", 1.3, seed=1)]
    summary = summarize_perplexity([*small_run(), *worse], {"config": {"num_problems": len(small_run()) + 3}})
    clean, changed = summary["changes"]
    assert (clean["change"], changed["change"], changed["seeds"]) == ("none", "normal:0,0.25", [0, 1])
    total, tokens = sum(r["nats"]["uncached"] for r in small_run()), sum(r["tokens"] for r in small_run())
    assert clean["uncached"]["perplexity"] == pytest.approx(math.exp(total / tokens))
    assert clean["ratio"]["mean"] == pytest.approx(1, abs=1e-5)
    assert changed["ratio"]["mean"] == pytest.approx(math.exp(0.2 * total / tokens))
    assert changed["ratio"]["interval"][0] < changed["ratio"]["mean"] < changed["ratio"]["interval"][1]
    assert changed["windows"] == len(small_run())
    assert changed["cached"]["tokens"] == 2 * tokens
    page = to_markdown(summary)
    assert f"UNFINISHED: 3 of {len(small_run()) + 3} problems have no record yet" in page
    assert f"| normal:0,0.25 | {len(small_run())} | {2 * tokens} |" in page
    assert f"{changed['ratio']['mean']:.6g}" in page
    text = shown(summary)
    for found in (clean, changed):
        row = next(line for line in text.splitlines() if line.startswith(found["change"]))
        assert f"{found['ratio']['mean']:.6g}" in row
    low, high = (f"{end:.6g}" for end in changed["ratio"]["interval"])
    assert f"[{low}," in text
    assert high in text
    assert next(line for line in page.splitlines() if line.startswith("| none |")).split(" | ")[-3:-1] == ["32", "0"]
    assert "none valid" in shown(summary | {"changes": [changed | {"windows": 0}]}, 200)


def test_what_a_format_cannot_hold_is_said():
    """Case 16 of clipping: in the table for a terminal as on the page."""
    clean, changed = small_run("gemma2")[:2], saturated_run()[3]
    summary = summarize_perplexity([*clean, *changed])
    found = [record["saturated"] for record in changed]
    count, total = sum(each["k"] + each["v"] for each in found), sum(each["elements"] for each in found)
    for text in (to_markdown(summary), shown(summary, 200)):
        assert f"`{SATURATED}`: {count} of {total} elements lie outside its format." in text
        assert "packed nothing" not in text
    row = next(line for line in to_markdown(summary).splitlines() if line.startswith(f"| {SATURATED} |"))
    assert row.split(" | ")[-3:] == ["8", "100", f"{changed[0]['cache']['bytes']} |"]
    mean = f"{summary['changes'][1]['ratio']['mean']:.6g}"
    row = next(line for line in shown(summary).splitlines() if mean in line)
    assert row.split()[1:3] == ["2", "8"]
    held = [record | {"saturated": {"k": 0, "v": 0, "elements": 99}} for record in changed]
    for records in (clean, [*clean, *held]):
        assert "lie outside" not in shown(summarize_perplexity(records), 80)


def test_a_quantizer_that_packed_nothing_is_named():
    spec, name = quant(bits=4.25, first=64), "int4,first=64"
    whole = small_run()[0]["cache"]
    for packed in (0.0, 0.5):
        cache = whole | {"packed": packed, "bits": 32 - 27.75 * packed}
        records = make_change(name, 1.1, spec=spec, cache=cache)
        for record in records:
            to_record(record)
        summary = summarize_perplexity([*small_run(), *make_change("normal:0,0.25", 1.2), *records])
        for text in (to_markdown(summary), shown(summary, 200)):
            assert text.count("packed nothing") == (packed == 0)
            assert (f"`{name}` packed nothing" in text) == (packed == 0)


def test_windows_that_a_change_breaks_are_valid_ones_of_the_text():
    worse, count = make_change("normal:0,0.25", 1.1), len(small_run())
    for left in (0, 1, count):
        changed = [*worse[:left], *(record | INVALID for record in worse[left:])]
        summary = summarize_perplexity([*small_run(), *changed])
        assert [summary["problems"][name] for name in ("asked", "total", "ok")] == [count] * 3
        for text in (to_markdown(summary), shown(summary, 200)):
            assert f"{count} of {count} problems valid" in text
            note = f"`normal:0,0.25` has {left} valid windows, others than the clean cache's {count}"
            note += ": its uncached" if left else "."
            assert (note in text) == (left < count)
            assert "`none` has" not in text
        # Without the clean cache there is none to go by.
        alone = summarize_perplexity(changed)
        assert alone["problems"]["ok"] == left
        assert "others than" not in to_markdown(alone)


def test_summary_leaves_out_invalid_windows():
    broken = [record | INVALID for record in small_run()]
    summary = summarize_perplexity([broken[0], *small_run()[1:]])
    assert summary["changes"][0]["windows"] == len(small_run()) - 1
    assert "`none`: 1 samples invalid at k, layer 0 (cached, nan); counted nowhere." in to_markdown(summary)
    assert "none valid" in to_markdown(summarize_perplexity(broken))
