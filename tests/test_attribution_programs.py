"""Programs with an alignment: what they are made of, and which rows share a tile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attribution_runs import TILE, make_arms
from small_models import PRESETS, make_prompts, set_up, small_state

from jaxkv.decode import empty_cache
from jaxkv.models.alignment import CLASSES, make_alignment, make_rowwise
from jaxkv.rollout import start_rollout


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "jaxpr"):
                    yield from equations(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from equations(inner)


def trace(arms, program, given):
    """Jaxpr of a program of the plain arms, with an alignment or without."""
    layout, tokens, rows = set_up(make_prompts((4, 7)))
    state = small_state(arms.config.family, "fp16")
    cache = empty_cache(arms.config, arms.precision, 2, layout.slots)
    run = start_rollout(arms, tokens, rows, layout)
    logits = jnp.zeros((2, arms.config.vocab_size), arms.precision.logits)
    calls = {
        "prefill": (arms._prefill, (state, jnp.asarray(tokens[:, : layout.prefill]), rows, cache)),
        "decode": (arms._cached_loop, (state, logits, run, rows, 20, cache)),
        "recompute": (
            functools.partial(arms._tile_loop, tile=layout.slots),
            (state, run, rows, 20, cache, True, False),
        ),
    }
    function, arguments = calls[program]
    if given is not None:
        function = functools.partial(function, alignment=given)
    return jax.make_jaxpr(function)(*arguments)


def products(jaxpr):
    """Shapes of the results of all products."""
    return [e.outvars[0].aval.shape for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]


@pytest.mark.parametrize("program", ["prefill", "decode", "recompute"])
@pytest.mark.parametrize("family", PRESETS)
def test_without_alignment_the_program_is_the_bare_one(family, program, monkeypatch):
    arms = make_arms(family)
    jaxpr = trace(arms, program, None)
    names = [e.primitive.name for e in equations(jaxpr.jaxpr)]
    assert "optimization_barrier" not in names
    assert names.count("while") == {"prefill": 0, "decode": 1, "recompute": 2}[program]
    assert names.count("dot_general") == 2 * (3 + 2 + 1 + 3) + 1
    bare = lambda given, slot: lambda op, fn, *arrays, **axes: fn(*arrays)  # noqa: E731
    monkeypatch.setattr("jaxkv.models.decoder.make_rowwise", bare)
    assert str(trace(arms, program, None)) == str(jaxpr)


@pytest.mark.parametrize("program", ["prefill", "decode", "recompute"])
def test_an_aligned_program_holds_each_product_in_both_row_counts(program):
    arms, tile = make_arms("llama"), 6  # no other size is 6
    plain, aligned = trace(arms, program, None), trace(arms, program, make_alignment(tile, frozenset()))
    assert not any(tile in shape for shape in products(plain))
    assert len(products(aligned)) == 2 * len(products(plain))
    assert sum(tile in shape for shape in products(aligned)) == len(products(plain))
    # One compilation serves every choice of classes.
    assert str(aligned) == str(trace(arms, program, make_alignment(tile, frozenset({"mlp"}))))


def count_rows(x):
    """The row's place in the call, and 100 times the call's number of rows."""
    return 3 * x, jnp.broadcast_to(jnp.arange(x.shape[1])[None, :], x.shape[:2]) + 100 * x.shape[1]


@pytest.mark.parametrize(("slot", "rows"), [(0, 8), (0, 7), (3, 5), (6, 1), (7, 6)])
def test_the_row_of_a_slot_has_its_place_in_a_tile(slot, rows):
    x, slots = jnp.arange(2.0 * rows * 3).reshape(2, rows, 3), np.arange(slot, slot + rows)
    run = jax.jit(lambda given, x, slot: make_rowwise(given, slot)("mlp", count_rows, x))
    for classes, expected in ((["mlp"], slots % TILE + 100 * TILE), (["qkv"], np.arange(rows) + 100 * rows)):
        values, places = run(make_alignment(TILE, frozenset(classes)), x, slot)
        np.testing.assert_array_equal(values, 3 * x)
        np.testing.assert_array_equal(places, [expected, expected])


def test_each_class_has_its_own_switch():
    x = jnp.zeros((2, 7, 3))
    run = jax.jit(lambda given, x: {c: make_rowwise(given, 0)(c, count_rows, x)[1][0, 0] for c in CLASSES})
    for on in CLASSES:
        found = run(make_alignment(TILE, frozenset({on})), x)
        assert {c for c, rows in found.items() if rows == 100 * TILE} == {on}
        assert {int(rows) for c, rows in found.items() if c != on} == {700}


def test_tiles_along_other_axes():
    x = jnp.arange(2.0 * 5 * 3).reshape(2, 1, 5, 3)
    rows = make_rowwise(make_alignment(TILE, frozenset({"scores"})), jnp.asarray(2))
    result = rows("scores", lambda x: jnp.swapaxes(x, 1, 2) * x.shape[2], x, rows_in=2, rows_out=1)
    np.testing.assert_array_equal(result, TILE * jnp.swapaxes(x, 1, 2))


def test_an_unknown_class_is_refused():
    with pytest.raises(ValueError, match="unknown operation classes: mpl"):
        make_alignment(TILE, frozenset({"mpl"}))
