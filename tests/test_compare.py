"""The comparison on the device against its NumPy reference, and the audit against a recomputation."""

import dataclasses
import functools
import itertools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_metrics as metrics
from cases import daily
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from small_models import NEW_TOKENS, changed_state, make_prompts, set_up, small_arms, small_state, taken

from jaxkv import decode
from jaxkv.audit import audit_rows
from jaxkv.cache import empty_cache
from jaxkv.decode import Arms
from jaxkv.logits import FIELDS, compare_logits
from jaxkv.models.layers import ATTENTION_SHAPED, visible
from jaxkv.rollout import slot_positions

V = 37
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]
EXACT = ("flip", "bit_equal", "max_abs", "margin", "margin_other", "shift", "unit")


def check(reference, other, rtol=1e-12, atol=0):
    """Compares both ways and returns the device's figures."""
    found = compare_logits(jnp.asarray(reference), jnp.asarray(other), len(reference))
    wanted = metrics.compare_logits(np.asarray(reference), np.asarray(other))
    assert tuple(found) == FIELDS == tuple(wanted)
    for name, column in wanted.items():
        if name in EXACT:
            assert found[name] == column.tolist()
        else:
            np.testing.assert_allclose(found[name], column, rtol=rtol, atol=atol, err_msg=name)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gap", [3.0, 1e-1, 1e-3, 0.0])
def test_figures_are_those_of_the_reference(dtype, gap):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(40, 500)) * 4
    b = a + rng.normal(size=a.shape) * gap
    found = check(jnp.asarray(a, dtype), jnp.asarray(b, dtype))
    assert found["bit_equal"] == [not gap] * 40
    for name in () if gap else ("flip", "kl", "kl_reverse", "js", "max_abs", "mean_abs"):
        assert not any(found[name])


@pytest.mark.parametrize("scale", [1e-5, 1e-6, 2e-7])
def test_kl_far_below_fp32_rounding(scale):
    """fp32 arms differ by some 1e-6: a KL of 1e-13, which fp32 could not tell from 0."""
    rng = np.random.default_rng(1)
    a = rng.normal(size=(40, 500)).astype(np.float32)
    b = (a + rng.normal(size=a.shape) * scale).astype(np.float32)
    found = check(a, b, rtol=1e-9)  # the shift itself, log q - log p, is known to 1e-16 / scale
    assert 0 < max(found["kl"]) < 2 * scale**2
    assert min(found["kl"]) > scale**2 / 100
    d = b.astype(np.float64) - a
    p = np.exp(a.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    variance = (p * d**2).sum(1) - (p * d).sum(1) ** 2
    np.testing.assert_allclose(found["kl"], variance / 2, rtol=1e-4)


finite = functools.partial(st.floats, allow_nan=False, allow_infinity=False)
# XLA takes fp32 numbers below 1e-38 for 0.
VALUES = {
    np.float16: st.one_of(finite(width=16), st.sampled_from([0.0, -0.0, 65504.0, -65504.0, 6e-8])),
    np.float32: st.one_of(
        finite(-100, 100, width=32, allow_subnormal=False), st.sampled_from([0.0, -0.0, 1e4, -1e4, 3e38, -3e38])
    ),
}


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_odd_values(data):
    dtype = data.draw(st.sampled_from([np.float16, np.float32]))
    shape = (3, 6)
    pair = [data.draw(arrays(dtype, shape, elements=VALUES[dtype])) for _ in range(2)]
    if data.draw(st.booleans()):
        pair[1][0] = pair[0][0]
    found = check(*pair, rtol=1e-9, atol=1e-15)
    for name in found:
        if name not in ("flip", "bit_equal", "shift"):
            assert min(found[name]) >= 0
    for step in range(3):
        if found["bit_equal"][step]:
            assert not found["flip"][step]
            assert all(found[name][step] == 0 for name in ("kl", "kl_reverse", "js", "max_abs", "mean_abs"))


def test_signed_zeros_are_equal_numbers_of_unequal_bits():
    a, b = (np.asarray([[1.0, zero, 2.0, 0.5, -1.0, 0.25]] * 3, np.float32) for zero in (0.0, -0.0))
    found = check(a, b)
    assert found["bit_equal"] == [False] * 3
    assert found["max_abs"] == found["kl"] == found["js"] == [0.0] * 3


def test_ties_go_to_the_lowest_id_and_have_no_margin():
    a = np.asarray([[1.0, 3.0, 3.0, 0.0, 0.0, 0.0]] * 3, np.float16)
    b = a.copy()
    b[1, 1] = 2
    found = check(a, b)
    assert found["margin"] == [0.0] * 3
    assert found["margin_other"] == [0.0, 1.0, 0.0]
    assert found["shift"] == [0.0, -1.0, 0.0]
    assert found["unit"] == [2.0**-9] * 3
    assert found["flip"] == [False, True, False]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_logits_are_no_agreement(value, side):
    pair = [np.zeros((4, V), np.float16), np.zeros((4, V), np.float16)]
    pair[side][2, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        compare_logits(*map(jnp.asarray, pair), 3)
    assert compare_logits(*map(jnp.asarray, pair), 2)["bit_equal"] == [True, True]


def test_unlike_logits_are_refused():
    a = jnp.zeros((4, V), jnp.float16)
    with pytest.raises(ValueError, match="differ in kind"):
        compare_logits(a, a.astype(jnp.float32), 4)
    with pytest.raises(ValueError, match="differ in kind"):
        compare_logits(a, a[:, 1:], 4)


# The audit.


@functools.cache
def plain_forward(arms, end):
    """A compiled forward over `end` slots that returns every named value, and the list of their names."""
    names = []

    def forward(state, tokens, positions):
        values = []

        def hook(name, value):
            names.append(name)
            values.append(value)
            return value

        model = nnx.merge(arms.graphdef, state)
        hidden, _ = model(tokens, positions, empty_cache(arms.config, arms.precision, 1, end), 0, hook)
        model.logits(hidden, hook)
        return values

    return jax.jit(forward), names


def recorded(arms, state, run, rows, row):
    """Largest magnitudes of one row over what it was fed, reduced in NumPy: name -> [positions]."""
    first, end = int(rows.first[row]), int(rows.prompt + run.lengths[row]) - 1
    positions = slot_positions(jnp.arange(end, dtype=jnp.int32), rows.first[row : row + 1], end)
    forward, names = plain_forward(arms, end)
    values = forward(state, run.tokens[row : row + 1, :end], positions)
    peaks = {}
    for name, value in zip(names, values, strict=True):
        magnitude = np.abs(np.asarray(value, np.float64)[0])
        if name.startswith(ATTENTION_SHAPED):
            window = arms.config.layer_window(int(name.split(".")[1]))
            seen = np.asarray(visible(positions, positions, window))[0]
            magnitude = np.moveaxis(np.where(seen, magnitude, 0), 2, 0)
        peaks[name] = magnitude.reshape(end, -1).max(1)[first:]
    return peaks


def audited(family, precision, state=None, lengths=(7, 3), limit=NEW_TOKENS, layers=2):
    arms = small_arms(family, precision, layers=layers)
    state = arms.prepare(state or small_state(family, precision, layers=layers))
    layout, tokens, rows = set_up(make_prompts(lengths))
    rows = dataclasses.replace(rows, limit=jnp.full(len(lengths), layout.prompt + limit, jnp.int32))
    run = arms.run_cached(state, tokens, rows, layout)
    return arms, state, layout, run, rows, audit_rows(arms, state, run, rows)


@pytest.mark.parametrize(("family", "precision", "layers"), [("mistral", "fp32", 1), ("gemma2", "fp16", 2)])
def test_magnitudes_and_headroom_are_those_of_a_plain_forward(family, precision, layers):
    arms, state, _, run, rows, findings = audited(family, precision, layers=layers)
    limits, ends = jnp.finfo(arms.precision.activation), rows.prompt + run.lengths - 1
    passed = arms.audit_pass(state, run.tokens, rows.first, ends)
    found = {name.split(" ")[1]: np.asarray(magnitudes) for name, magnitudes in passed.items()}
    for row, (finding, first, end) in enumerate(zip(findings, rows.first.tolist(), ends.tolist(), strict=True)):
        peaks = recorded(arms, state, run, rows, row)
        assert list(found) == list(peaks)
        for name, values in peaks.items():
            rtol = max(4 * float(limits.eps), 1e-4)
            np.testing.assert_allclose(found[name][row, first:end], values, rtol=rtol, err_msg=name)
            assert not found[name][row, :first].any()
            assert not found[name][row, end:].any()
        name, peak = max(((name, values.max()) for name, values in peaks.items()), key=lambda pair: pair[1])
        op, _, layer = name.partition(".")
        assert finding.invalid is None
        assert (finding.headroom["op"], finding.headroom["layer"]) == (op, int(layer) if layer else None)
        assert finding.headroom["max_abs"] == pytest.approx(peak, rel=max(4 * float(limits.eps), 1e-5))
        assert finding.headroom["limit"] == float(limits.max)


@pytest.mark.parametrize(
    ("path", "index", "op", "layer"),
    [
        ("layers/0/attn_norm/weight", 3, "attn_norm", 0),
        ("layers/0/attn/v", (0, 0, 0), "v", 0),
        ("layers/1/attn/q", (0, 0, 0), "q", 1),
        ("layers/1/attn/o", (0, 0, 0), "attn_proj", 1),
        ("layers/1/mlp/gate", (0, 0), "gate", 1),
        ("layers/1/mlp/down", (0, 0), "mlp_down", 1),
        ("final_norm/weight", 0, "final_norm", None),
        ("head", (0, 0), "head", None),
    ],
)
def test_the_first_op_that_is_not_finite_is_named(path, index, op, layer):
    _, _, _, run, _, findings = audited(
        "mistral", "fp16", changed_state(small_state("mistral", "fp16"), path, index, np.inf)
    )
    assert run.nonfinite_step.tolist() == [0, 0]
    for finding in findings:
        assert (finding.invalid["op"], finding.invalid["layer"], finding.invalid["position"]) == (op, layer, 0)
        assert np.isfinite(finding.headroom["max_abs"])


@pytest.mark.parametrize(
    ("family", "length"), daily([("mistral", 40)], itertools.product(("mistral", "gemma2"), (3, 15, 40)))
)
def test_a_nan_is_found_where_it_begins_whatever_the_rows(family, length):
    """A compiled maximum on a CPU drops NaN from some 16 rows on; the fault then showed in a later operation."""
    state = changed_state(small_state(family, "fp32", layers=1), "layers/0/attn/q", (1, 2, 0), np.nan)
    _, _, _, run, _, findings = audited(family, "fp32", state, lengths=(length,), layers=1)
    assert run.nonfinite_step.tolist() == [0]
    assert findings[0].invalid == {"layer": 0, "op": "q", "position": 0, "value": "nan"}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_nan_is_found_whatever_the_backend_makes_of_its_maximum(keeps):
    """A maximum gives a NaN on one backend and passes it over on another; neither hides it or moves it."""

    def largest(x, axis):
        return jnp.max(x if keeps else jnp.where(jnp.isnan(x), -jnp.inf, x), axis=axis)

    state = changed_state(small_state("mistral", "fp32", layers=1), "layers/0/attn/q", (1, 2, 0), np.nan)
    arms, state, _, run, rows, _ = audited("mistral", "fp32", state, lengths=(40,), layers=1)
    fresh = Arms(arms.config, arms.precision)
    with mock.patch.object(decode, "jnp", types.SimpleNamespace(**vars(jnp) | {"max": largest})):
        (finding,) = audit_rows(fresh, state, run, rows)
    assert finding.invalid == {"layer": 0, "op": "q", "position": 0, "value": "nan"}


def test_a_fault_is_placed_at_its_token():
    """Of two rows one meets the broken token: at its third position, whatever its padding."""
    clean = audited("mistral", "fp16")
    prompt = make_prompts((7, 3))[1]
    token = prompt[2]
    assert token not in make_prompts((7, 3))[0]
    state = changed_state(small_state("mistral", "fp16"), "embed", (token, 5), np.inf)
    limit = next((i for i, t in enumerate(taken(clean[3], clean[2])[0]) if t == token), NEW_TOKENS)
    assert limit >= 2
    _, _, _, run, _, findings = audited("mistral", "fp16", state, limit=limit)
    assert findings[0].invalid is None
    assert findings[1].invalid == {"layer": 0, "op": "resid_pre", "position": 2, "value": "inf"}
    assert run.nonfinite_step.tolist() == [-1, 0]


def test_a_last_token_that_nobody_was_fed_is_not_audited():
    """With a limit at the broken token no arm computes with it; one step later both would."""
    _, _, layout, run, _, _ = audited("mistral", "fp16")
    tokens = taken(run, layout)[0]
    step = next(i for i, t in enumerate(tokens) if t not in tokens[:i] + make_prompts((7, 3))[0] and i)
    state = changed_state(small_state("mistral", "fp16"), "embed", (tokens[step], 5), np.inf)
    for limit, broken in (
        (step + 1, None),
        (step + 2, {"layer": 0, "op": "resid_pre", "position": 7 + step, "value": "inf"}),
    ):
        *_, findings = audited("mistral", "fp16", state, limit=limit)
        assert findings[0].invalid == broken
