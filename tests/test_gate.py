"""The gate finds each planted bug that fp32 lets pass, says where it begins, and passes clean models."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from planted_bugs import input_not_cast, lost, patched_call, planted_arms, positions_off, window_off
from small_models import PRESETS, SAMPLERS, STOP_IDS, VOCAB, WINDOWED, changed_state, small_config, small_state, taken

from jaxkv import decode
from jaxkv.cache import KVCache, empty_cache
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments.batches import Batch, Item, RunSpec, lay_out
from jaxkv.experiments.gate import first_cache_difference, run_gate
from jaxkv.experiments.probe import probe_state, probe_tolerance
from jaxkv.models import decoder, layers

FP32_LOGITS = {"rtol": 0, "atol": 5e-5}
TILE, NEW_TOKENS = 8, 12
# Past position 256, where bf16 has no odd integers, and past the window, which is so long that one key weighs little.
LENGTHS, WINDOW = (259, 252), 200
SPEC = RunSpec(new_tokens=NEW_TOKENS, batch_size=2, padding="left", bucket=8)
ITEMS = [
    Item(4 + i, tuple(np.random.default_rng(10 + i).integers(12, VOCAB, n).tolist()), "") for i, n in enumerate(LENGTHS)
]
BATCH = Batch(tuple(ITEMS), controls=False, stepwise=False)


def make_config(family, layers=2):
    config = dataclasses.replace(small_config(family, layers=layers), context_length=512)
    return dataclasses.replace(config, window=WINDOW) if config.window else config


def new_arms(family, precision, tile=None, config=None, sampler="greedy", layers=2, **parts):
    policy = make_precision(precision, **parts)
    return Arms(config or make_config(family, layers), policy, SAMPLERS[sampler], STOP_IDS, tile=tile)


clean_arms = functools.cache(new_arms)


@functools.cache
def state_of(family, precision, layers=2):
    return clean_arms(family, precision, TILE, layers=layers).prepare(small_state(family, precision, layers=layers))


def found(call) -> str:
    with pytest.raises(UserError, match="the gate failed") as caught:
        call()
    return str(caught.value)


def gate(family, precision, cached=None, plain=None, layers=2):
    clean = clean_arms(family, precision, TILE, layers=layers)
    return run_gate(cached or clean, clean, state_of(family, precision, layers), ITEMS, SPEC, 2, plain=plain)


# Planted bugs: each a context in which a program is traced.


@contextlib.contextmanager
def rotated_wide():
    """K rotated in fp32, by cosines in fp32, and cut at the end."""
    rope, table = layers.apply_rope, decoder.rope_table
    calls = itertools.cycle((False, True))  # q, then k

    def wide_table(positions, theta, head_dim, precision):
        return table(positions, theta, head_dim, dataclasses.replace(precision, activation=jnp.float32))

    def wide_rope(x, wide):
        if next(calls):
            return rope(x.astype(jnp.float32), wide).astype(x.dtype)
        return rope(x, tuple(part.astype(x.dtype) for part in wide))

    with mock.patch.object(layers, "apply_rope", wide_rope), mock.patch.object(decoder, "rope_table", wide_table):
        yield


def positions_in_activation_dtype():
    original = decoder.rope_table

    def table(positions, theta, head_dim, precision):
        return original(positions.astype(precision.activation), theta, head_dim, precision)

    return mock.patch.object(decoder, "rope_table", table)


def stale_slot():
    """The last slot still holds a key of another text, said to be at position 100."""

    def change(tokens, positions, cache, slot):
        keep = lambda x: x.at[:, -1].set(x[:, 20])  # noqa: E731
        stale = KVCache(tuple(map(keep, cache.k)), tuple(map(keep, cache.v)), cache.positions.at[:, -1].set(100))
        return tokens, positions, stale, slot

    return patched_call(change)


slot_not_written = functools.partial(lost, "v.1", 120)  # the last layer's value never reaches the cache


@functools.cache
def buggy_arms(bug, family, precision, layers=2):
    if bug == "window":
        return new_arms(family, precision, TILE, dataclasses.replace(make_config(family), window=WINDOW + 1))
    return planted_arms(clean_arms(family, precision, TILE, layers=layers), "tile_loop", BUGS[bug][0])


BUGS = {
    "rotated": (rotated_wide, "k of layer 0 at position 1 "),
    "positions": (positions_in_activation_dtype, "k of layer 0 at position 257 "),
    "cast": (input_not_cast, "k of layer 0 at position 0 "),
    "stale": (stale_slot, "k of layer 1 at position 100 "),
    "unwritten": (slot_not_written, "v of layer 1 at position 120 "),
    "window": (None, f"k of layer 1 at position {WINDOW} "),
}
NARROW = [(b, f, "bf16") for b in ("rotated", "positions", "cast") for f in PRESETS]
NARROW += [("rotated", "mistral", "fp16"), ("cast", "gemma3", "fp16")]
STRUCTURAL = [(b, f, "bf16") for b in ("stale", "unwritten") for f in PRESETS]
STRUCTURAL += [("window", f, "bf16") for f in WINDOWED]
OFTEN = [(bug, "mistral", "bf16") for bug in BUGS]  # each bug once


@pytest.mark.parametrize(("bug", "family", "precision"), daily(OFTEN, NARROW + STRUCTURAL))
def test_a_planted_bug_is_found_and_named(bug, family, precision):
    message = found(lambda: gate(family, precision, buggy_arms(bug, family, precision)))
    assert f"first in {BUGS[bug][1]}" in message


def both_arms(bug, family, precision):
    """The cached arm of one layer with a bug, and the uncached arm along its tokens."""
    clean, state = clean_arms(family, precision, TILE, layers=1), state_of(family, precision, 1)
    layout, tokens, rows = lay_out(BATCH, SPEC, clean.config, TILE)
    cached, _ = buggy_arms(bug, family, precision, 1).run_cached_keeping(state, tokens, rows, layout)
    return cached, clean.run_forced(state, cached, rows, layout)


@pytest.mark.parametrize(
    ("bug", "family"),
    daily(
        [("rotated", "mistral")],
        [("rotated", "mistral"), ("positions", "mistral"), ("cast", "mistral"), ("rotated", "gemma3")],
    ),
)
def test_fp32_lets_the_16_bit_bugs_pass(bug, family):
    cached, uncached = both_arms(bug, family, "fp32")
    np.testing.assert_allclose(cached.logits, uncached.logits, **FP32_LOGITS)
    assert np.abs(uncached.logits).max() > 1


@pytest.mark.parametrize(
    ("precision", "cache", "family"),
    daily(
        [("bf16", "fp16", "mistral")],
        [*(("fp16", "bf16", f) for f in PRESETS), ("bf16", "fp16", "mistral")],
    ),
)
def test_a_cache_of_another_dtype_is_found(precision, cache, family):
    message = found(lambda: gate(family, precision, new_arms(family, precision, TILE, cache=cache)))
    names = {"fp16": "float16", "bf16": "bfloat16"}
    assert f"whose cache is {names[precision]}" in message
    assert re.search(
        rf"first in k of layer 0 at position 0 \({names[cache]} beside {names[precision]}, max \|diff\| ", message
    )


# Clean models.


@pytest.mark.parametrize(
    ("family", "precision"),
    daily(
        [("mistral", "bf16"), ("mistral", "fp32"), ("gemma3", "fp16")],  # test_generate.py has the others aligned
        itertools.product(PRESETS, ("fp16", "bf16", "fp32")),
    ),
)
def test_a_clean_model_passes(family, precision):
    layers = 1 if precision == "fp32" else 2
    no_plain = (precision, family) in [("fp32", "llama"), ("fp32", "gemma2")]
    plain = None if no_plain else clean_arms(family, precision, layers=layers)
    result = gate(family, precision, plain=plain, layers=layers)
    assert (result["passed"], result["problems"], result["tile"]) == (True, 2, TILE)
    assert 0 < result["steps"] <= 2 * NEW_TOKENS
    tolerance = 64 * np.finfo(np.float32).eps if precision == "fp32" else 0.0
    assert plain is None or result["plain"] == {"passed": True, "tolerance": tolerance, "steps": 2 * NEW_TOKENS}


def test_a_sampler_and_equal_lengths_pass():
    arms = new_arms("gemma2", "fp16", TILE, sampler="temperature", layers=1)
    items = [Item(i, ITEMS[0].prompt[: 5 + i % 2], "") for i in range(5)]
    spec = dataclasses.replace(SPEC, padding="equal", seed=3)
    result = run_gate(arms, arms, state_of("gemma2", "fp16", 1), items, spec, 3)
    assert result["problems"] == 4  # whole batches
    assert "plain" not in result


def test_a_row_that_overflows_in_both_arms_passes_and_in_one_does_not():
    arms, clean = clean_arms("mistral", "fp16", TILE, layers=1), small_state("mistral", "fp16", layers=1)
    begun = Batch(tuple(dataclasses.replace(item, prompt=item.prompt[:9]) for item in ITEMS), False, False)
    layout, tokens, rows = lay_out(begun, SPEC, arms.config, TILE)
    run, _ = arms.run_cached_keeping(arms.prepare(clean), tokens, rows, layout)
    bad = next(t for t in taken(run, layout)[0][1:] if t not in STOP_IDS)
    short = [Item(i, tuple(t for t in item.prompt if t != bad)[:9], "") for i, item in enumerate(ITEMS)]
    head = {"head": (bad, slice(None))}
    forcing = changed_state(clean, "head", head["head"], 40.0)  # it is soon drawn
    state = arms.prepare(changed_state(forcing, "embed", (bad, 0), np.inf))
    result = run_gate(arms, arms, state, short, SPEC, 2)
    assert result["steps"] < 2 * NEW_TOKENS

    broken = copy.copy(arms)
    broken.tile_loop = lambda _, *rest, **named: arms.tile_loop(state, *rest, **named)
    whole = arms.prepare(forcing)
    assert "stops being finite (cached at" in found(lambda: run_gate(broken, arms, whole, short, SPEC, 2))


# Bugs in the plain regime's own programs, which the aligned regime does not run.


def one_slot_off():
    return patched_call(lambda tokens, positions, cache, slot: (tokens, positions, cache, slot + 1))


PLAIN_BUGS = {
    "loop: position": ("cached_loop", positions_off, "positions at position 252 "),
    "loop: slot": ("cached_loop", one_slot_off, "positions at position 252 "),
    "loop: rotation": ("cached_loop", rotated_wide, "k of layer 0 at position 252 "),
    "loop: positions": ("cached_loop", positions_in_activation_dtype, "k of layer 0 at position 257 "),
    "loop: cast": ("cached_loop", input_not_cast, "k of layer 0 at position 2"),
    "loop: stale": ("cached_loop", stale_slot, "k of layer 1 at position 252 "),
    "loop: window": ("cached_loop", window_off, "k of layer 1 at position 252 "),
    "prefill: slot": ("prefill", one_slot_off, "positions at position 0 "),
    "prefill: rotation": ("prefill", rotated_wide, "k of layer 0 at position 1 "),
    "prefill: positions": ("prefill", positions_in_activation_dtype, "k of layer 0 at position 257 "),
    "prefill: unwritten": ("prefill", slot_not_written, "v of layer 1 at position 120 "),
    "uncached: window": ("tile_loop", window_off, f"k of layer 1 at position {WINDOW} "),
}
# A bug of the same program is found in the same tensor, or the same bug in another program.
NIGHTLY_PLAIN_BUGS = (
    *("loop: position", "loop: rotation", "loop: positions", "loop: window"),
    *("prefill: slot", "prefill: positions"),
)


def plain_gate(family, precision, plain):
    """The gate with the aligned part left out: it is clean here."""
    with mock.patch("jaxkv.experiments.gate._check_aligned") as aligned:
        aligned.return_value = mock.Mock(lengths=jnp.zeros(2, jnp.int32))
        return gate(family, precision, plain=plain)


@pytest.mark.parametrize(
    ("bug", "family", "precision"),
    daily(
        [(bug, "mistral", "bf16") for bug in PLAIN_BUGS if bug not in NIGHTLY_PLAIN_BUGS],
        [
            *((bug, "mistral", "bf16") for bug in PLAIN_BUGS),
            *itertools.product(("loop: position", "loop: rotation"), ("llama", "gemma2", "gemma3"), ("fp16",)),
            *((f"loop: {bug}", "mistral", "fp32") for bug in ("position", "window")),
        ],
    ),
)
def test_a_bug_in_a_plain_program_is_found(bug, family, precision):
    program, plant, where = PLAIN_BUGS[bug]
    plain = planted_arms(clean_arms(family, precision), program, plant)
    assert f"first in {where}" in found(lambda: plain_gate(family, precision, plain))


def test_plain_logits_of_another_row_are_found():
    plain = copy.copy(clean_arms("mistral", "bf16"))
    prefill = plain.prefill

    def other_row(state, tokens, rows, cache, align):
        shape = empty_cache(plain.config, plain.precision, *cache.positions.shape)
        logits, _ = prefill(state, tokens, dataclasses.replace(rows, prompt=rows.prompt - 1), shape, align)
        return logits, prefill(state, tokens, rows, cache, align)[1]

    plain.prefill = other_row
    message = found(lambda: plain_gate("mistral", "bf16", plain))
    assert "differ in the logits of problem 4 from step 0 on" in message


def test_a_cache_that_all_programs_make_in_another_dtype_is_found(monkeypatch):
    other = dataclasses.replace(make_precision("fp16"), cache=jnp.bfloat16)
    monkeypatch.setattr(decode, "empty_cache", lambda config, _, *sizes: empty_cache(config, other, *sizes))
    arms, state = new_arms("mistral", "fp16", TILE, layers=1), state_of("mistral", "fp16", 1)
    message = found(lambda: run_gate(arms, arms, state, ITEMS, SPEC, 2))
    assert "from the precision, whose cache is float16 and theirs bfloat16" in message


# The parts.


def test_the_first_difference_is_that_of_the_lowest_position():
    config, precision = small_config(), make_precision("fp16")
    a = empty_cache(config, precision, 2, 8)
    first, filled = np.asarray([0, 3]), np.arange(8) >= np.asarray([[0], [3]])
    assert first_cache_difference(a, a, first, filled) is None
    v = a.v[1].at[0, 4, 0, 0].set(0.5).at[1, 5, 0, 0].set(-2.0)
    other = dataclasses.replace(a, v=(a.v[0], v))
    found = first_cache_difference(a, other, first, filled)
    assert (found.op, found.layer, found.position, found.max_abs) == ("v", 1, 2, 2)
    zero = dataclasses.replace(a, k=(-a.k[0], a.k[1]))
    assert first_cache_difference(a, zero, first, filled).op == "k"  # -0 is not +0
    assert first_cache_difference(a, other, first, filled & (np.arange(8) < 4)) is None
    moved = dataclasses.replace(a, positions=a.positions.at[1, 7].set(4))
    assert first_cache_difference(a, moved, first, filled, tolerance=0.5).position == 4


@pytest.mark.parametrize("family", daily(["mistral", "gemma3"], PRESETS))
def test_the_probe_is_exact_for_the_families(family):
    for precision in ("fp16", "bf16"):
        arms = new_arms(family, precision)
        assert probe_tolerance(arms.config, arms.precision, 512) == 0
        assert probe_tolerance(arms.config, make_precision(precision, accumulation=precision), 512) is None
        pairs = zip(*map(jax.tree.leaves, (probe_state(arms), arms.abstract_state)), strict=True)
        assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)
    assert 0 < probe_tolerance(arms.config, make_precision("fp32"), 512) < 1e-5
