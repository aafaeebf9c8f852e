"""KVarN, KIVI, QuaRot and TurboQuant against NumPy readings of their recipes and published figures."""

import dataclasses
import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from cases import daily
from kv_inputs import compiled, normal, on_a_grid, real_kv, relative, run, spread, unpack

from jaxkv.interventions.quantizers import affine
from jaxkv.interventions.quantizers.kivi import Kivi
from jaxkv.interventions.quantizers.kvarn import AUXILIARIES, KVarN
from jaxkv.interventions.quantizers.quarot import QuaRot
from jaxkv.interventions.quantizers.turboquant import TurboQuant, lloyd_max

# KVarN


def kvarn_by_the_recipe(tile, q):
    """One tile [rows, columns] in float64, with the row scales folded as the recipe has them; scales kept in fp16."""
    fp16 = lambda x: np.asarray(x, np.float16).astype(np.float64)  # noqa: E731
    target = min(tile.std(0, ddof=1).min(), tile.std(1, ddof=1).min()) if q.target == "min" else 1.0
    low, high, least, most = (-np.inf, np.inf, 0, np.inf) if q.floor is None else (q.floor, 10, 1e-3, 1e3)

    def imbalance(x):
        power = 2 if q.criterion == "variance" else 1
        columns, rows = x.std(0, ddof=1) ** power, x.std(1, ddof=1) ** power
        return columns.max() / max(columns.min(), 1e-8) + rows.max() / max(rows.min(), 1e-8)

    w, u = np.zeros(tile.shape[1]), np.zeros(tile.shape[0])
    best, smallest = (w, u), imbalance(tile)
    apply = lambda w, u: tile / np.exp(w) / np.exp(u)[:, None]  # noqa: E731
    for _ in range(q.passes):
        w = np.clip(w + np.log(np.clip(apply(w, u).std(0, ddof=1) / target, least, most)), low, high)
        u = np.clip(u + np.log(np.clip(apply(w, u).std(1, ddof=1) / target, least, most)), low, high)
        now = imbalance(apply(w, u))
        if now < smallest * (1 - 1e-4) or q.keep == "last":
            best, smallest = (w, u), now
    t, s = fp16(np.exp(best[0])), np.exp(best[1])[:, None]
    balanced = tile / t / s
    step = np.maximum((balanced.max(1) - balanced.min(1)) / (2**q.bits - 1), 1e-10)[:, None]
    a, z = fp16(step * s), fp16(balanced.min(1)[:, None] * s)
    codes = np.clip(np.round((tile / t - z) / a), 0, 2**q.bits - 1)
    return codes, (codes * a + z) * t


SWITCHES = (
    {},
    {"bits": 4, "tile": 64},
    {"criterion": "variance", "passes": 3},
    {"keep": "last", "passes": 1},
    {"floor": None, "passes": 2},
    {"target": "min", "passes": 2},
    {"floor": -0.1, "passes": 4},
    {"passes": 0},
)


@pytest.mark.parametrize(
    ("side", "switches"),
    daily(zip(itertools.cycle("kv"), SWITCHES), itertools.product("kv", SWITCHES)),
    ids=str,
)
def test_kvarn_follows_the_recipe(side, switches):
    q = KVarN(side, aux="fp16", **switches)
    x = 0.8 * spread((1, 128, 2, 64))
    packed, read = run(q, x)
    codes = np.asarray(unpack(packed["codes"], q.bits))
    differing = 0
    for head in range(2):
        for start in range(0, 128, q.tile):
            tile = x[0, start : start + q.tile, head].astype(np.float64)
            expected = [y.T for y in kvarn_by_the_recipe(tile.T, q)] if side == "k" else kvarn_by_the_recipe(tile, q)
            differing += (codes[0, start : start + q.tile, head] != expected[0]).sum()
            assert relative(expected[1], read[0, start : start + q.tile, head]) < 0.02
    assert differing <= 0.002 * codes.size  # fp32 logs against fp64, at boundaries between codes


@pytest.mark.parametrize(
    ("seed", "switches"), [(1385, {"keep": "last"}), (1776, {"keep": "last"}), (2153, {"criterion": "variance"})]
)
def test_kvarn_chooses_its_pass(seed, switches):
    """Tiles with outliers where the most even pass is not the last, or is another by the other measure."""
    tile = np.random.default_rng(seed).standard_t(1.5, size=(16, 8)) * 3
    plain = KVarN("v", 2, tile=16, aux="fp16", hadamard=False)
    expected = []
    for q in (plain, dataclasses.replace(plain, **switches)):
        expected.append(kvarn_by_the_recipe(tile, q)[0])
        packed, _ = run(q, tile[None, :, None].astype(np.float32))
        assert np.array_equal(np.asarray(unpack(packed["codes"], 2))[0, :, 0], expected[-1])
    assert not np.array_equal(*expected)


def test_kvarn_floor_breaks_equivariance():
    """A tile of small spreads cannot be balanced; the same tile scaled up can, and so can it without the floor."""
    q = KVarN("k", aux="fp16", hadamard=False)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 128, 1, 128)) * np.exp(0.6 * rng.normal(size=(1, 128, 1, 1)))
    x = (x / max(x.std(1, ddof=1).max(), x.std(3, ddof=1).max())).astype(np.float32)
    error = lambda q, scale: relative(scale * x, run(q, (scale * x).astype(np.float32))[1])  # noqa: E731
    plain = dataclasses.replace(q, passes=0)
    assert relative(run(plain, x / 2)[1], run(q, x / 2)[1]) < 0.05  # all logs at the floor: a code flips here and there
    small, large, unbalanced = error(q, 0.5), error(q, 100), error(plain, 1)
    print(f"floor: {small:.3f} small, {large:.3f} scaled up, {unbalanced:.3f} plain")
    assert abs(large - 0.50) < 0.01
    assert abs(small - 0.777) < 0.03
    assert abs(small - unbalanced) < 0.001
    for free in (dataclasses.replace(q, floor=None), dataclasses.replace(q, target="min")):
        errors = [error(free, scale) for scale in (1e-3, 0.7, 100)]
        assert max(errors) / min(errors) < 1.005
        assert abs(errors[1] - large) < 0.01
        last = dataclasses.replace(free, keep="last")
        assert np.array_equal(8 * run(last, x)[1], run(last, 8 * x)[1])


@pytest.mark.parametrize(
    ("name", "side"),
    daily([("tiny-mistral", "k"), ("outliers", "v")], itertools.product(("tiny-mistral", "outliers"), "kv")),
)
def test_kvarn_without_a_floor_is_equivariant_bit_for_bit(name, side):
    """Passes that have converged differ by rounding alone, which must not choose among them."""
    x = spread((2, 256, 2, 64))
    x[..., [3, 40]] *= 12
    x = x if name == "outliers" else real_kv(name)[side][2:4, -256:]
    for q in (KVarN(side, floor=None), KVarN(side, target="min")):
        rotated = np.asarray(compiled(q, "rotate")(x))
        assert np.array_equal(8 * run(q, rotated)[1], run(q, 8 * rotated)[1])


def test_kvarn_bits():
    bits = KVarN("k").bits_per_element(128)

    def whole_bits(written):
        start, end = KVarN("k").window.packed(written)
        packed = int(end) - start
        return (packed * bits + (written - packed) * 16) / written

    for tokens, published in ((1024, 5.7), (4096, 3.1), (32768, 2.36)):  # with 128 and 128 tokens in 16 bits
        # The recent window runs from 0 to 127, so the published figure is that of the last token before a tile fills.
        assert abs(whole_bits(tokens - 1) - published) < 0.05
        assert whole_bits(tokens) < published


def test_kvarn_keeps_token_norms_better():
    """What it is for: at equal bits the largest tokens' norms err less than without passes."""
    x = real_kv("tiny-gemma2")["k"][:, 128:]
    methods = [KVarN("k", 2, aux="fp16", passes=passes) for passes in (8, 0)]
    turn = compiled(methods[0], "rotate")  # passes are none of its business
    with_passes, without = (np.asarray(turn(run(q, turn(x))[1])) for q in methods)
    norm = lambda y: np.abs(np.linalg.norm(y, axis=-1) / np.linalg.norm(x, axis=-1) - 1)  # noqa: E731
    assert np.quantile(norm(with_passes), 0.95) < 0.9 * np.quantile(norm(without), 0.95)
    assert relative(x, with_passes) < relative(x, without)


def test_eight_bit_scales():
    grid = np.arange(0xF8, dtype=np.uint8)
    auxiliary = AUXILIARIES["e5m3"]
    load, store = jax.jit(auxiliary.load), jax.jit(auxiliary.store)
    values = np.asarray(load(grid))
    assert np.array_equal(values, (grid.astype(np.uint16) << 7).view(np.float16).astype(np.float32))
    assert np.array_equal(store(values), grid)
    x = np.exp(normal(16 * len(grid)) * 3)
    stored = np.concatenate([load(store(part)) for part in x.reshape(16, -1)])
    half = x.astype(np.float16).astype(np.float32)
    nearest = values[np.abs(half[:, None] - values).argmin(1)]
    assert np.array_equal(np.abs(stored - half), np.abs(nearest - half))
    ends = np.resize(np.float32([1e9, 0.0]), len(grid))
    assert np.array_equal(load(store(ends)), np.resize([values[-1], 0], len(grid)))
    small = np.asarray(jax.jit(AUXILIARIES["e4m3"].store)(np.float32([1e-4, 1e9, 0.1])))
    assert np.array_equal(
        small.astype(np.float32), [0, 448, np.float32(np.float32(0.1).astype(ml_dtypes.float8_e4m3fn))]
    )


# Grids between extremes


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 64), (3, 128)])
def test_kivi(bits, group):
    x = spread((2, 256, 2, 64))
    keys = x.reshape(2, 256 // group, group, 2, 64).transpose(0, 1, 3, 4, 2)
    expected = on_a_grid(keys, bits).transpose(0, 1, 4, 2, 3).reshape(x.shape)
    assert np.array_equal(run(Kivi("k", bits, group), x)[1], expected)
    expected = on_a_grid(x.reshape(2, 256, 2, -1, min(group, 64)), bits).reshape(x.shape)
    assert np.array_equal(run(Kivi("v", bits, group), x)[1], expected)


def test_quarot():
    x = spread((1, 32, 2, 128))
    assert np.array_equal(run(QuaRot("k", 4), x)[1], on_a_grid(x, 4, 1e-5))
    tiny = x * np.float32(1e-7)  # the recipe's floor of 1e-5 under the range shows here
    assert relative(tiny, run(QuaRot("k", 4), tiny)[1]) > 3 * relative(x, run(QuaRot("k", 4), x)[1])


def test_division_is_true():
    x = np.abs(normal(5000))
    for by in (3, 15, 31, 127, 448):
        assert np.array_equal(jax.jit(affine.divide, static_argnums=1)(x, by), x / np.float32(by))


# TurboQuant


def test_lloyd_max_is_published():
    """Levels and errors of Max, "Quantizing for minimum distortion" (1960), table I."""
    tables = {
        1: ([0.7980], 0.3634),
        2: ([0.4528, 1.510], 0.1175),
        3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
        4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
    }
    x = np.linspace(-9, 9, 400001)
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    for bits, (positive, mse) in tables.items():
        levels = lloyd_max(bits)
        assert np.allclose(levels[2 ** (bits - 1) :], positive, rtol=6e-4)
        assert np.array_equal(levels, -levels[::-1])
        edges = (levels[1:] + levels[:-1]) / 2
        error = np.square(x - levels[np.searchsorted(edges, x)])
        assert abs(np.trapezoid(error * density, x) / mse - 1) < 2e-3
    levels = lloyd_max(8)
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
    means = np.bincount(cell, density * x) / np.bincount(cell, density)
    assert (np.diff(levels) > 0).all()
    assert np.allclose(means, levels, atol=2e-3)


@pytest.mark.parametrize("unit", [True, False])
def test_turboquant_keys(unit):
    x = spread((1, 64, 1, 64))
    packed, read = run(TurboQuant("k", 3, unit=unit), x)
    norms = np.linalg.norm(x, axis=-1, keepdims=True)
    levels = lloyd_max(3) / 8
    nearest = np.abs((x / norms)[..., None] - levels).argmin(-1)
    assert (np.asarray(unpack(packed["codes"], 3)) != nearest).mean() < 1e-3
    vectors = levels[nearest]
    vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True) if unit else vectors
    assert relative(vectors * norms, read) < 1e-3
    if unit:
        assert np.allclose(np.linalg.norm(read, axis=-1), norms[..., 0], rtol=1e-3)
    assert not TurboQuant("v").rotated
    assert [sorted(TurboQuant("k").exact_layers(n)) for n in (2, 3, 6)] == [[0, 1], [0, 2], [0, 1, 4, 5]]
