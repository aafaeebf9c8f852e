"""Orders of summation: trees of known sums, and of a product on this device."""

import fractions
import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summation_trees import blocks, chain, core, lanes, pairwise

from jaxkv.config import make_precision
from jaxkv.experiments.lowering import summation
from jaxkv.experiments.lowering.replay import replay
from jaxkv.experiments.lowering.shapes import describe, same_order
from jaxkv.experiments.lowering.summation import Bench, Product, choose_numbers
from jaxkv.experiments.lowering.trees import (
    NoTreeError,
    Numbers,
    Sum,
    find_sizes,
    make_sum,
    measure_sizes,
    recover_tree,
)


@functools.cache
def recover(of, held):
    """A recovery that several tests look at."""
    return Bench(of, held).recover()


WIDE = Numbers(2.0**100, 1.0, 2**20)  # of fp32
FP16 = choose_numbers(make_precision("fp16"))[0]
K, N = 576, 256
ROW, ROWS = Product("btd,fd->btf", (1, 1, K), (N, K)), Product("btd,fd->btf", (1, 16, K), (N, K))


def add_all(values):
    return functools.reduce(np.add, values)


def add_pairs(values):
    while len(values) > 1:
        values = [values[at] + values[at + 1] for at in range(0, len(values), 2)]
    return values[0]


def add_core(values, spare=2, step=16, exponents=None):
    """As a tensor core: what is added at once is cut at the bits of its largest and some, and the sum to fp32."""
    exponents = find_exponents(values) if exponents is None else np.where(values == 0, -126, exponents)
    total = np.zeros(values.shape[1])
    for at in range(0, len(values), step):
        terms = np.concatenate([values[at : at + step].astype(np.float64), total[None]])
        most = np.maximum(exponents[at : at + step].max(axis=0), find_exponents(total))
        last = np.exp2(most - 23.0 - spare)
        exact = np.trunc(terms / last).sum(axis=0) * last
        near = exact.astype(np.float32)
        total = np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near).astype(np.float64)
    return total.astype(np.float32)


def find_exponents(values):
    return np.frexp(np.where(values == 0, 2.0**-126, values))[1] - 1


def tree_of(add, count, numbers=WIDE):
    """The tree of a sum, from its results alone."""

    def run(pairs, first):
        return add(numbers.write(pairs, first, count).astype(np.float32))[None]

    return recover_tree(count, lambda pairs: measure_sizes(pairs, count, numbers, run))


def np_sum(values):
    return np.ascontiguousarray(values.T).sum(axis=1)


KNOWN = {
    "one": (1, lambda v: v[0], 0),
    "two": (2, add_all, make_sum(0, 1)),
    "in sequence": (100, add_all, chain(range(100))),
    "from the last": (100, lambda v: add_all(v[::-1]), chain(range(99, -1, -1))),
    "lanes": (96, lambda v: add_pairs([add_all(v[lane::8]) for lane in range(8)]), pairwise(lanes(96, 8))),
    "lanes and rest": (
        99,
        lambda v: add_all([add_pairs([add_all(v[lane:96:8]) for lane in range(8)]), *v[96:]]),
        chain([pairwise(lanes(96, 8)), 96, 97, 98]),
    ),
    "pairwise": (64, lambda v: add_pairs(list(v)), pairwise(list(range(64)))),
    "blocks": (128, lambda v: add_all([add_all(v[at : at + 32]) for at in range(0, 128, 32)]), chain(blocks(128, 32))),
    # vdpbf16ps adds the second of two products first: no result tells which of the first two was.
    "pairs": (32, lambda v: add_all(v[[at ^ 1 for at in range(32)]]), chain(at ^ 1 for at in range(32))),
    # numpy/_core/src/umath/loops_utils.h.src: eight sums of every eighth number, joined pairwise; halves beyond 128.
    "numpy, 128": (128, np_sum, pairwise(lanes(128, 8))),
    "numpy, 256": (
        256,
        np_sum,
        make_sum(pairwise(lanes(128, 8)), pairwise([chain(range(128 + lane, 256, 8)) for lane in range(8)])),
    ),
    "tensor core": (128, add_core, core(range(128))),
    "two accumulators": (
        128,
        lambda v: (
            add_core(v.reshape(4, 2, 16, -1)[:, 0].reshape(64, -1))
            + add_core(v.reshape(4, 2, 16, -1)[:, 1].reshape(64, -1))
        ),
        make_sum(*(core([at + i for at in range(begin, 128, 32) for i in range(16)]) for begin in (0, 16))),
    ),
    "split tensor core": (
        256,
        lambda v: add_pairs([add_core(v[at : at + 64]) for at in range(0, 256, 64)]),
        pairwise([core(range(at, at + 64)) for at in range(0, 256, 64)]),
    ),
    "all at once": (24, lambda v: add_core(v, step=24), make_sum(*range(24))),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_order_is_recovered(name):
    count, add, tree = KNOWN[name]
    assert tree_of(add, count) == tree


@pytest.mark.parametrize("spare", [0, 2, 4])
def test_fp16_tells_a_tensor_core_that_keeps_more_bits(spare):
    """Of units of 2^-20, of which 2^15 absorbs 2048 in fp32, 1024 outlive it where two bits more are kept."""
    add, old = functools.partial(add_core, spare=spare), Numbers(2.0**15, 2.0**-20, 2048)
    assert tree_of(add, 1152, FP16) == core(range(1152))
    if spare:
        with pytest.raises(NoTreeError, match=r"; summand 576 meets 0 to .* at "):
            tree_of(add, 1152, old)
    else:
        assert tree_of(add, 1152, old) == core(range(1152))


@pytest.mark.parametrize("spare", [0, 3])
def test_normal_numbers_of_fp16_tell_it_too(spare):
    numbers = choose_numbers(make_precision("fp16"))[1]
    assert numbers.unit >= float(jnp.finfo(jnp.float16).tiny)
    assert tree_of(functools.partial(add_core, spare=spare), 256, numbers) == core(range(256))


@st.composite
def random_trees(draw):
    """A tree as nested lists, of some of which more than two are added at once."""
    terms = list(draw(st.permutations(range(draw(st.integers(2, 24))))))
    while len(terms) > 1:
        begin, several = draw(st.integers(0, len(terms) - 2)), draw(st.integers(2, 4))
        terms[begin : begin + several] = [terms[begin : begin + several]]
    return terms[0]


def listed(tree):
    return [tree] if isinstance(tree, int) else [leaf for one in tree for leaf in listed(one)]


def sum_listed(tree, values):
    """What is added at once is cut at the last bit of the largest."""
    if isinstance(tree, int):
        return values[tree]
    return add_core(np.stack([sum_listed(one, values) for one in tree]), spare=0, step=len(tree))


def met(tree, a, b):
    """Summands of the smallest list that has both."""
    inner = next((one for one in tree if not isinstance(one, int) and {a, b} <= set(listed(one))), None)
    return len(listed(tree)) if inner is None else met(inner, a, b)


def nested_depth(tree):
    """Sums inside each other."""
    return 1 + max(nested_depth(one) for step in tree.steps for one in step) if isinstance(tree, Sum) else 0


@settings(max_examples=60, deadline=None)
@given(random_trees())
def test_random_trees_are_recovered(nested):
    count = len(listed(nested))
    tree = tree_of(functools.partial(sum_listed, nested), count)
    assert tree == make_sum(*nested)
    assert sorted(tree.leaves()) == list(range(count))
    assert 2 ** nested_depth(tree) <= count
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    assert find_sizes(tree, np.asarray(pairs)).tolist() == [met(nested, a, b) for a, b in pairs]


def exact(values):
    return np.asarray([math.fsum(column) for column in values.T])


def shuffled(values, rng=np.random.default_rng(0)):  # noqa: B008  # its state goes on from call to call
    return add_all(rng.permutation(values))


@pytest.mark.parametrize(
    ("add", "fault"),
    [
        (exact, "64 summands come together with summand 32 where 2 are counted; summand 32 meets 0 to 63 at 2"),
        (shuffled, "come together|said to meet"),
        (lambda v: add_all(v * np.float32(0.3)), "units are left in parts"),
        (lambda v: add_all(v.astype(np.float16)), "results are not finite"),
        (lambda v: add_all(np.concatenate([v, np.ones_like(v)])), "partial sums of -"),
    ],
)
def test_what_has_no_order_is_refused(add, fault):
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(NoTreeError, match=fault):
        tree_of(add, 64)


def test_more_counted_than_come_together_is_refused():
    with pytest.raises(NoTreeError, match="21 summands come together with summand 32 where 40 are counted"):
        recover_tree(64, lambda pairs: np.where(np.arange(len(pairs)) < 20, 40, 64))


def test_a_tree_that_fits_no_other_pairs_is_refused(monkeypatch):
    monkeypatch.setattr(summation, "recover_tree", lambda count, measure: chain(range(count)))
    with pytest.raises(NoTreeError, match="pairs do not fit the tree of others, first"):
        Bench(ROW, make_precision("fp32")).recover()


def test_many_at_once_end_in_an_error():
    with pytest.raises(NoTreeError, match="not found in"):
        recover_tree(600, lambda pairs: np.full(len(pairs), 600))


def exact_core(x, w, bits):
    """A tensor core's sum of 16 products at once, in whole numbers: MMA-Sim's fused_dot_add, arXiv 2511.10909."""
    total = 0.0
    for at in range(0, len(x), 16):
        terms = [(fractions.Fraction(a) * fractions.Fraction(b), math.frexp(a)[1] + math.frexp(b)[1] - 2)
                 for a, b in zip(x[at : at + 16], w[at : at + 16], strict=True)]  # fmt: skip
        terms.append((fractions.Fraction(total), math.frexp(total)[1] - 1 if total else -126))
        unit = fractions.Fraction(2) ** (max(exponent for _, exponent in terms) - bits)
        exact = sum(math.trunc(value / unit) for value, _ in terms) * unit
        size = fractions.Fraction(2) ** (math.frexp(float(exact))[1] - 24)
        total = float(math.trunc(exact / size) * size)
    return total


@pytest.mark.parametrize("bits", [23, 24, 25])
def test_cut_sums_are_a_tensor_cores(bits):
    rng = np.random.default_rng(bits)
    x = rng.standard_normal(64).astype(np.float16).astype(np.float32)
    w = rng.standard_normal((64, 40)).astype(np.float16).astype(np.float32)
    expected = [exact_core(x.tolist(), column.tolist(), bits) for column in w.T]
    assert replay(core(range(64)), x, w, np.dtype(np.float32), f"cut{bits}").tolist() == expected
    others = replay(core(range(64)), x, w, np.dtype(np.float32), "fused").tolist()
    assert others != expected


def test_fused_and_rounded_products():
    """Of 1 + 2^-12 squared, 2^-24 is lost if it is rounded, and kept if it is added to -1 first."""
    x, w = np.float32([1, 1 + 2.0**-12]), np.float32([[-1], [1 + 2.0**-12]])
    tree, kind = make_sum(0, 1), np.dtype(np.float32)
    assert replay(tree, x, w, kind, "fused").tolist() == [2.0**-11 + 2.0**-24]
    for rule in ("rounded", "fused second"):
        assert replay(tree, x, w, kind, rule).tolist() == [2.0**-11]
    assert replay(tree, x[::-1], w[::-1], kind, "fused second").tolist() == [2.0**-11 + 2.0**-24]


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "fp64"])
def test_large_numbers_outweigh_all_units(name):
    """By all bits of the accumulator and three or four more; and the number of units is told exactly by the result."""
    held = make_precision(name)
    for numbers in choose_numbers(held):
        bits = jnp.finfo(held.accumulation).nmant + (3 if numbers.unit == 2.0**-14 else 4)
        assert numbers.large / (numbers.most * numbers.unit) > 2.0**bits
        assert numbers.most <= 2 ** (jnp.finfo(held.activation).nmant + 1)
        assert float(np.asarray(numbers.unit).astype(held.operand)) == numbers.unit
        assert numbers.large < float(jnp.finfo(held.operand).max)


@pytest.mark.parametrize("of", [ROW, ROWS], ids=["row", "rows"])
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_a_product_on_this_device(name, of):
    found = recover(of, make_precision(name).widened())
    assert sorted(found.tree.leaves()) == list(range(K))
    assert (found.again, found.columns, found.reproduced["fused"]) == (True, N, N)
    assert found.rounding == ("fused" if name == "fp32" else "either")  # 16-bit products are exact in fp32


def test_units_may_be_subnormal():
    found = recover(ROWS, make_precision("fp16"))
    assert (found.numbers, found.again, found.rounding) == (FP16, True, "either")


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_another_tree_has_other_bits(name):
    """Though results are rounded to 16 bits."""
    equal = Bench(ROW, make_precision(name).widened())._reproduce(chain(range(K)))
    assert max(equal.values()) < N / 4


class TensorCore(Bench):
    """Adds 16 at once, as a Hopper GPU."""

    def multiply(self, x, w):
        row, columns = np.asarray(x, np.float64)[0, 0, :, None], np.asarray(w, np.float64).T
        exponents = np.frexp(row)[1] + np.frexp(columns)[1] - 2
        return add_core(row * columns, exponents=exponents).astype(self.held.activation)[None], True


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_tensor_core_is_told_by_its_bits(name):
    found = TensorCore(Product("btd,fd->btf", (1, 1, 128), (64, 128)), make_precision(name)).recover()
    assert (found.tree, found.again, found.rounding) == (core(range(128)), True, "cut25")


def test_a_product_of_batches():
    heads = Product("bth,bsh->bts", (2, 3, 64), (2, 32, 64))
    found = recover(heads, make_precision("fp32"))
    assert found.again
    assert found.rounding == "fused"


PERMUTATION = np.random.default_rng(3).permutation(K)


def relabel(tree, numbers):
    if not isinstance(tree, Sum):
        return numbers[tree]
    begin, *steps = tree.steps
    return functools.reduce(
        lambda total, step: make_sum(total, *(relabel(one, numbers) for one in step)), steps, relabel(begin[0], numbers)
    )


class Permuted(Bench):
    """The same program, whose operands are in another order."""

    def multiply(self, x, w):
        return super().multiply(x[..., PERMUTATION], w[..., PERMUTATION])


def test_another_order_is_seen():
    plain = recover(ROW, make_precision("fp32")).tree
    moved = Permuted(ROW, make_precision("fp32")).recover()
    assert not same_order(describe(plain), describe(moved.tree))
    assert moved.tree == relabel(plain, PERMUTATION.tolist())
    assert moved.again


def test_rows_in_different_orders_have_no_tree(monkeypatch):
    own = summation.product
    monkeypatch.setattr(
        summation,
        "product",
        lambda spec, x, w, precision: jnp.concatenate(
            [own(spec, x[:, :1], w, precision), own(spec, x[:, 1:], w[..., ::-1], precision)], axis=1
        ),
    )
    with pytest.raises(NoTreeError, match="rows are not added up alike"):
        Bench(ROWS, make_precision("fp32")).recover()


def test_other_numbers_are_tried(monkeypatch):
    """Against units of 1, 2^20 absorbs none in fp32."""
    bad, good = Numbers(2.0**20, 1.0, 2**20), choose_numbers(make_precision("fp32"))[0]
    monkeypatch.setattr(summation, "choose_numbers", lambda held: (bad, good))
    found = Bench(ROW, make_precision("fp32")).recover()
    assert found.numbers == good
    assert found.tree == recover(ROW, make_precision("fp32")).tree
    monkeypatch.setattr(summation, "choose_numbers", lambda held: (bad, bad))
    with pytest.raises(NoTreeError, match=r"with 2\^20 against units of 2\^0, 1048576 in a test: .* with 2\^20"):
        Bench(ROW, make_precision("fp32")).recover()
