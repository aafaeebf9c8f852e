"""The walk names the operation, layer and position at which a planted bug enters, and nothing where there is none."""

import contextlib
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from planted_bugs import input_not_cast, lost, narrowed, positions_off, rotation_off
from small_models import PRESETS, WINDOWED, changed_state, make_prompts, small_config, small_state

from jaxkv import tracing
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Batch, Item, RunSpec, lay_out
from jaxkv.experiments.first_difference import compare_traces, fed_slots, find_first, names_that_fit
from jaxkv.rollout import force
from jaxkv.tracing import trace_cached, trace_uncached

TILE, WINDOW = 4, 9
LENGTHS = (14, 11)  # longer than the window
SPEC = RunSpec(new_tokens=4, batch_size=2, padding="left", bucket=4)
BATCH = Batch(tuple(Item(4 + i, tuple(p), "") for i, p in enumerate(make_prompts(LENGTHS))), False, False)


def other_arms(family, layers=1, **changes):
    config = dataclasses.replace(small_config(family, layers=layers), **changes)
    return Arms(config, make_precision("fp16"), tile=TILE)


clean_arms = functools.cache(other_arms)


@functools.cache
def state_of(family, layers=1):
    state = small_state(family, "fp16", layers=layers)
    if small_config(family).final_softcap:  # else the logits are too small for a cap to matter in every step
        state = changed_state(state, "final_norm/weight", slice(None), 3.0)
    return clean_arms(family, layers).prepare(state)


BUGS = {
    "keys cut to bf16": (lambda: narrowed("k."), "k of layer 0 at position 0 (float16,"),
    "positions off by one": (positions_off, "positions at position 0 (int32,"),
    "rotation off by one": (rotation_off, "q of layer 0 at position 0 (float16,"),
    "input not cast": (input_not_cast, "attn_norm of layer 0 at position 0 (float32 beside float16,"),
    "value lost": (lambda: lost("v.0", 6), "v of layer 0 at position 6 (float16,"),
}
CONFIGS = {
    "window off by one": ({"window": WINDOW + 1}, f"scores of layer 0 at position {WINDOW} (float16,"),
    "softcap dropped": ({"attn_softcap": None}, "scores of layer 0 at position 0 (float16,"),
    "final softcap dropped": ({"final_softcap": None}, f"logits at position {min(LENGTHS) - 1} (float16,"),
}
CASES = [(family, bug) for family in PRESETS for bug in list(BUGS)[:3]]
CASES += [("mistral", bug) for bug in list(BUGS)[3:]]
CASES += [(family, "window off by one") for family in WINDOWED]
CASES += [("gemma2", "softcap dropped"), ("gemma2", "final softcap dropped")]


def walk(cached, family, bug=contextlib.nullcontext):
    """Problem -> the first value in which arms part from clean ones along the cached one's tokens; None if none.

    Their programs are traced under the bug, and so are the dtypes that they are watched in.
    """
    clean, state = clean_arms(family), state_of(family)
    layout, tokens, rows = lay_out(BATCH, SPEC, clean.config, TILE)
    names = names_that_fit(clean, layout)
    with bug():
        tracing._list_values.cache_clear()
        a = trace_cached(cached, state, tokens, rows, layout, names)
    tracing._list_values.cache_clear()
    b = trace_uncached(clean, state, np.asarray(a.run.tokens), force(rows, a.run), layout, names)
    gaps = compare_traces(a, b, rows, layout)
    return {
        item.problem: find_first(gaps, fed_slots(rows, layout, a.run.lengths, row), int(rows.first[row]), row)
        for row, item in enumerate(BATCH.items)
    }


OFTEN = [("gemma2" if "softcap" in bug else "mistral", bug) for bug in BUGS | CONFIGS]


@pytest.mark.parametrize(("family", "bug"), daily(OFTEN, CASES))
def test_a_planted_bug_is_found_and_named(family, bug):
    if bug in BUGS:
        plant, expected = BUGS[bug]
        found = walk(other_arms(family), family, plant)
    else:
        changes, expected = CONFIGS[bug]
        found = walk(other_arms(family, **changes), family)
    assert set(found) == {4, 5}
    named = [str(difference) for difference in found.values()]
    if bug == "final softcap dropped":  # logits begin with the last prompt row
        assert named[0].startswith(f"first in logits at position {LENGTHS[0] - 1} ")
        assert named[1].startswith(f"first in logits at position {LENGTHS[1] - 1} ")
    else:
        assert all(name.startswith(f"first in {expected}") for name in named), named
    assert all(difference.max_abs > 0 or len(set(difference.dtypes)) == 2 for difference in found.values())


@pytest.mark.parametrize("family", daily(["mistral", "gemma2"], PRESETS))
def test_a_clean_model_has_no_difference(family):
    assert walk(clean_arms(family), family) == {4: None, 5: None}


@functools.cache
def small_trace():
    """A trace of some values of the cached arm, of two layers, its rows and layout."""
    arms = clean_arms("mistral", 2)
    layout, tokens, rows = lay_out(BATCH, SPEC, arms.config, TILE)
    names = ["resid_pre.0", "k.0", "scores.0", "resid_pre.1", "k.1"]
    return trace_cached(arms, state_of("mistral", 2), tokens, rows, layout, names), rows, layout


def first_of(trace, row=0):
    own, rows, layout = small_trace()
    counted = fed_slots(rows, layout, own.run.lengths, row)
    return find_first(compare_traces(trace, own, rows, layout), counted, int(rows.first[row]), row)


def changed(**values):
    own = small_trace()[0]
    named = {name.replace("_", "."): change(own.values[name.replace("_", ".")]) for name, change in values.items()}
    return dataclasses.replace(own, values=own.values | named)


def test_sizes_of_a_difference():
    own, rows, _ = small_trace()
    assert first_of(own) is None
    slot = int(rows.first[1]) + 3
    key = np.asarray(own.values["k.1"][1, slot], np.float64)
    found = first_of(changed(k_1=lambda k: k.at[1, slot].multiply(1.5).at[1, slot + 2].multiply(1.25)), row=1)
    assert (found.op, found.layer, found.position, found.dtypes) == ("k", 1, 3, ("float16", "float16"))
    assert found.places == 2
    assert found.relative == pytest.approx(0.5, rel=1e-3)
    assert found.max_abs == pytest.approx(np.abs(key).max() / 2, rel=0.5)
    assert first_of(changed(k_1=lambda k: k.at[1, slot].multiply(1.5)), row=0) is None
    assert first_of(changed(k_1=lambda k: k.astype(jnp.float32))).dtypes == ("float32", "float16")


def test_the_first_is_that_of_the_earliest_operation():
    early = changed(k_0=lambda k: k.at[0, 9].add(1), k_1=lambda k: k.at[0, 2].add(9))
    assert str(first_of(early)).startswith("first in k of layer 0 at position 9 (float16, max |diff| 1,")


def test_keys_after_the_query_and_slots_that_nothing_was_fed_to_do_not_count():
    own, _, layout = small_trace()
    assert first_of(changed(scores_0=lambda s: s.at[0, 3, :, :, 4:].set(7))) is None
    assert first_of(changed(scores_0=lambda s: s.at[0, 3, :, :, 3].set(7))).position == 3
    last = layout.prompt + int(own.run.lengths[0]) - 1
    assert first_of(changed(k_0=lambda k: k.at[0, last:].set(7))) is None
    assert first_of(changed(k_0=lambda k: k.at[0, last - 1].set(7))).op == "k"


def test_the_sign_of_zero_is_a_bit():
    zeroed = changed(k_0=lambda k: k.at[0, 5].set(0))
    negative = dataclasses.replace(zeroed, values=zeroed.values | {"k.0": zeroed.values["k.0"].at[0, 5].set(-0.0)})
    _, rows, layout = small_trace()
    gaps = compare_traces(zeroed, negative, rows, layout)
    assert not gaps["k.0"].equal[0, 5]
    assert gaps["k.0"].max_abs[0, 5] == 0
