"""Doctor's arithmetic: planted roundings, accumulators and dropped casts, simulated in NumPy, are told apart."""

import jax
import numpy as np
import pytest

from jaxkv.config import DTYPES
from jaxkv.decode import COMPILER_OPTIONS
from jaxkv.experiments.doctor import arithmetic
from jaxkv.experiments.doctor.operations import compile_with
from jaxkv.experiments.doctor.report import operand_kind, sum_kind


def float_product(x, w):
    return x.astype(np.float32) @ w.astype(np.float32).T


def rounded_operands(places):
    return lambda x, w: float_product(arithmetic.round_mantissa(x, places), arithmetic.round_mantissa(w, places))


def split_in_three(x, w):
    """What 'bf16x3' does: operands as two bf16 numbers, the product of the two small ones left out."""
    high = [a.astype(DTYPES["bf16"]).astype(np.float32) for a in (x, w)]
    low = [(a - h).astype(DTYPES["bf16"]).astype(np.float32) for a, h in zip((x, w), high, strict=True)]
    return float_product(high[0], high[1]) + float_product(high[0], low[1]) + float_product(low[0], high[1])


def sequential(x, w, dtype, round_terms=False):
    """Adds term after term in a dtype."""
    total = np.zeros((len(x), len(w)), dtype)
    for k in range(x.shape[1]):
        terms = x[:, None, k].astype(np.float32) * w[None, :, k].astype(np.float32)
        total = (total + (terms.astype(x.dtype) if round_terms else terms).astype(dtype)).astype(dtype)
    return total


@pytest.mark.parametrize(
    ("multiply", "kind", "bits"),
    [
        (rounded_operands(10), "TF32", 10),
        (rounded_operands(7), "bf16", 7),
        (rounded_operands(4), "less than bf16", 4),
        (split_in_three, "several bf16 products", None),
        (float_product, "fp32", None),
        (lambda x, w: sequential(x, w, np.float32), "fp32", None),
    ],
)
def test_operand_rounding_is_told_from_fp32(multiply, kind, bits):
    found = arithmetic.measure_operands(multiply)
    assert set(found) == {"1", "64"}
    for value in found.values():
        assert operand_kind(value) == kind
        assert bits is None or value == pytest.approx(bits, abs=0.1)


def test_operand_rounding_of_many_rows_only():
    found = arithmetic.measure_operands(lambda x, w: (rounded_operands(10) if len(x) > 1 else float_product)(x, w))
    assert {rows: operand_kind(bits) for rows, bits in found.items()} == {"1": "fp32", "64": "TF32"}


def tree(x, w, dtype):
    """Adds neighbours pairwise in a dtype: the fewest roundings a sum in it can have."""
    terms = (x[:, None].astype(np.float32) * w[None].astype(np.float32)).astype(dtype)
    while terms.shape[-1] > 1:
        terms = terms[..., ::2] + terms[..., 1::2]
    return terms[..., 0]


def halves(x, w):
    """Two fp32 partial sums, each rounded to 16 bits before they meet (split-K with 16-bit partials)."""
    cut = x.shape[1] // 2
    parts = [float_product(x[:, s], w[:, s]).astype(x.dtype) for s in (slice(cut), slice(cut, None))]
    return (parts[0] + parts[1]).astype(x.dtype)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_accumulation_is_told_from_its_errors(dtype, monkeypatch):
    monkeypatch.setattr(arithmetic, "SINGLE", 1)
    monkeypatch.setattr(arithmetic, "MANY", 2)
    narrow = DTYPES[dtype]
    wide = "sum in fp32"
    for multiply, kind in (
        (float_product, wide),
        (lambda x, w: float_product(x, w).astype(narrow), wide),
        (lambda x, w: sequential(x, w, np.float32), wide),
        (lambda x, w: sequential(x, w, np.float32, round_terms=True), "products rounded to 16 bits"),
        (lambda x, w: sequential(x, w, narrow), "16-bit partial sums"),
        (lambda x, w: tree(x, w, narrow), "16-bit partial sums"),
        (halves, "16-bit partial sums"),
        (lambda x, w: np.full((len(x), len(w)), np.nan), "not finite"),
    ):
        found = arithmetic.measure_sums(multiply, dtype)
        assert [sum_kind(bits) for bits in found.values()] == [kind, kind]
        if kind == "products rounded to 16 bits":  # each by up to half a unit, uniformly: some 0.4 units
            expected = {"fp16": 12.4, "bf16": 9.4}[dtype]
            assert [bits["rounded"] for bits in found.values()] == pytest.approx([expected] * 2, abs=0.3)


def test_cancelling_sums_are_small_and_their_terms_survive_sixteen_bits_or_not():
    for exact in (True, False):
        x, w = arithmetic.make_cancelling(np.float16, 4, 2048, exact)
        assert x.shape == (4, 2048)
        sums, norm = arithmetic.exact_product(x, w)
        assert 0 < np.max(np.abs(sums) / norm) < 2.0**-8
        terms = x[:, None].astype(np.float32) * w[None].astype(np.float32)
        assert np.array_equal(terms.astype(np.float16), terms) == exact


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("drop", [None, "elementwise", "product", "widened", "chain"])
def test_a_dropped_cast_is_found_where_it_is(dtype, drop):
    narrow, given = DTYPES[dtype], arithmetic.cast_inputs(DTYPES[dtype])
    p, q, r = (given[n].astype(np.float32) for n in ("p", "q", "r"))

    def cut(x, where):
        return x if drop == where else x.astype(narrow).astype(np.float32)

    found = {
        "elementwise": cut(given["x"], "elementwise"),
        "product": cut(float_product(given["a"], given["b"]), "product"),
        "widened": cut(p * q, "widened"),
        "chain": (cut(p + q, "chain") * r).astype(narrow),
    }
    shares = arithmetic.measure_casts(given, found, narrow)
    assert {where for where, share in shares.items() if share} == ({drop} if drop else set())
    assert drop is None or shares[drop] > 0.1


def test_one_program_says_the_same_of_every_probe():
    """The compiled probes, and that a bf16 rounding which XLA drops by default is one of those found."""
    given = arithmetic.make_given(["bf16"])
    ours = compile_with(COMPILER_OPTIONS, arithmetic.program, given)
    default = compile_with({"xla_allow_excess_precision": True}, arithmetic.program, given | {"dots": {}})
    figures = arithmetic.measure_arithmetic(["bf16"], ours, default)["bf16"]
    assert not any(figures["casts_dropped"]["ours"].values())
    if jax.default_backend() == "cpu":
        assert figures["casts_dropped"]["default"]["widened"] > 0.5
        assert all(sum_kind(bits) == "sum in fp32" for bits in figures["sum_bits"]["fp32"].values())
