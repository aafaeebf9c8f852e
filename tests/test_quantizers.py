"""What every cache quantizer promises, on random and on real keys and values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from kv_inputs import TOKENS, real_kv, relative, repacks_alike, spread, unpack
from quantized_models import HEAD_DIM, wide_config
from small_models import same_bits

from jaxkv.cache import KVCache
from jaxkv.config import make_precision
from jaxkv.experiments.cache_measures import count_saturated
from jaxkv.interventions.quantized_cache import Quantization
from jaxkv.interventions.quantizers import Window, hadamard, nbytes, packing, parse_cache_quant, split_error

SPECS = (
    *("kvarn:2", "kvarn:3", "kvarn:8", "kvarn:2,floor=none", "kvarn:2,target=min,rotate=off"),
    *("kivi:2", "kivi:4", "kivi:8", "kivi:2,group=128", "quarot:2", "quarot:4", "quarot:8"),
    *("turboquant:2", "turboquant:3", "turboquant:4", "turboquant:8", "turboquant:4,unit=off"),
    *("turboquant:3,unit=off,values=codebook", "kivi:2,rotate=on", "quarot:4,rotate=off", "kvarn:2,passes=0"),
    *("llama:q8_0", "llama:q5_0", "llama:q5_1", "llama:q4_0", "llama:q4_1", "mask:2", "mask:4", "mask:8", "mask:12"),
    *("fp8:e4m3", "fp8:e5m2", "fp8:e4m3,scale=token", "fp8:e5m2,scale=token"),
    *("int8", "int4", "int2", "int8,bound=half", "int4,bound=half", "hf:2", "hf:4", "hf:8", "hf:4,axis=channel"),
)
# One of each path through the code, for tests that compile several shapes.
PATHS = (
    *("kvarn:2", "kivi:2", "quarot:4", "turboquant:2", "llama:q8_0", "llama:q5_1", "llama:q4_0", "mask:12", "int4"),
    *("fp8:e4m3,scale=token", "hf:4", "hf:4,axis=channel", "hf:4,axis=channel,anchor=end"),
)
BITS_OF = ("kvarn:{}", "kvarn:{},aux=fp16", "kivi:{}", "quarot:{}", "turboquant:{}", "int{}", "mask:{}", "hf:{}")
INPUTS = ("random", "tiny-llama2", "tiny-gemma2")


def cases(specs):
    """Both sides of what treats them differently, one of what does not."""
    return [(spec, side) for spec in specs for side in ("kv" if spec.startswith(("kvarn", "kivi", "turbo")) else "k")]


EVERY = pytest.mark.parametrize(("spec", "side"), daily(cases(PATHS[:-1]), cases(SPECS)))
FEW = [("kvarn:2", "k"), ("kivi:2", "v"), ("turboquant:2", "k"), ("llama:q5_1", "k"), ("hf:4,axis=channel", "k")]
SOME = pytest.mark.parametrize(("spec", "side"), daily(FEW, cases(PATHS)))
# Spread over tokens and channels, as real caches have it, and values that fp16 holds exactly.
RANDOM = spread((2, 256, 2, 64)).astype(np.float16).astype(np.float32)


def make(spec, side):
    return getattr(parse_cache_quant(spec).stored_as(jnp.float16), side).quantizer


@functools.cache
def programs(spec, side):
    """Compiled quantize and dequantize."""
    quantizer = make(spec, side)
    return jax.jit(quantizer.quantize), jax.jit(quantizer.dequantize)


@functools.cache
def inputs(name, side):
    """[2, 256, 2, 64]: random, or two layers of a shipped model."""
    return jnp.asarray(RANDOM if name == "random" else real_kv(name)[side][2:4, -256:, :2])


@functools.cache
def results(spec, side, name="random"):
    """What is packed and what is read of one input, in the method's own basis."""
    quantize, dequantize = programs(spec, side)
    packed = quantize(make(spec, side).rotate(inputs(name, side)))
    return packed, dequantize(packed)


def error(spec, side, x):
    quantize, dequantize = programs(spec, side)
    x = make(spec, side).rotate(jnp.asarray(x, jnp.float32))
    return relative(x, dequantize(quantize(x)))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8, 12, 16, 32])
def test_packing_is_the_identity(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 5, 40), dtype=np.uint64).astype(np.uint32)
    packed = jax.jit(packing.pack, static_argnums=1)(codes, bits)
    assert (packed.shape, packed.dtype) == ((3, 5, 5 * bits), np.uint8)
    assert np.array_equal(unpack(packed, bits), codes)
    whole = sum(int(code) << (bits * j) for j, code in enumerate(codes[0, 0]))  # low bits first, as one number
    assert bytes(np.asarray(packed[0, 0])) == whole.to_bytes(5 * bits, "little")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rotation_is_orthonormal_and_keeps_scores(head_dim):
    rotate = jax.jit(hadamard.rotate)
    matrix = np.asarray(rotate(np.eye(head_dim, dtype=np.float32)))
    assert np.array_equal(matrix, matrix.T)
    assert np.array_equal(np.abs(matrix), np.full_like(matrix, np.float32(head_dim**-0.5)))
    assert np.allclose(matrix @ matrix, np.eye(head_dim), atol=1e-6)
    assert matrix[1, 0] > 0 > matrix[1, 1]  # Sylvester's order
    q, k = np.random.default_rng(1).normal(size=(2, 50, head_dim)).astype(np.float32)
    once = [np.asarray(rotate(x)) for x in (q, k)]
    rotated = [x.astype(np.float64) for x in once]
    assert np.allclose(rotated[0] @ rotated[1].T, q.astype(np.float64) @ k.T, atol=2e-5)
    assert np.allclose(rotate(once[0]), q, atol=2e-6)


@pytest.mark.parametrize(("spec", "side"), cases(SPECS))
def test_stated_bits_are_counted_bytes(spec, side):
    quantizer = make(spec, side)
    for head_dim in (64, 128, 256):
        quantizer.check(head_dim, TOKENS)
        packed = jax.eval_shape(quantizer.quantize, jax.ShapeDtypeStruct((2, 512, 3, head_dim), jnp.float16))
        assert nbytes(packed) * 8 == quantizer.bits_per_element(head_dim) * 2 * 512 * 3 * head_dim


@SOME
def test_rows_and_heads_stand_alone(spec, side):
    """vmap, a loop over rows and heads, and the whole batch give the same bits."""
    quantize, dequantize = programs(spec, side)
    for name in INPUTS[:2]:
        packed, read = jax.tree.map(np.asarray, results(spec, side, name))
        x = np.asarray(make(spec, side).rotate(inputs(name, side)))
        for row in range(x.shape[0]):
            alone = quantize(x[row : row + 1])
            assert same_bits(alone, jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], packed))
            assert same_bits(dequantize(alone), read[row : row + 1])
        head = quantize(x[:1, :, 1:])
        assert same_bits(dequantize(head), read[:1, :, 1:])
    rows = x.reshape(x.shape[0], 1, *x.shape[1:])
    mapped = jax.jit(jax.vmap(make(spec, side).quantize))(rows)
    assert same_bits(mapped, jax.tree.map(lambda leaf: leaf[:, None], packed))


@pytest.mark.parametrize(("spec", "side"), daily(FEW, cases(PATHS[:-1])))
def test_storage_divides_along_tokens(spec, side):
    """A cache may write new tiles where they belong and read any: leaves lie in proportion on axis 1."""
    quantize, _ = programs(spec, side)
    packed, _ = jax.tree.map(np.asarray, results(spec, side))
    size = max(128, make(spec, side).granularity)
    part = quantize(np.asarray(make(spec, side).rotate(inputs("random", side)))[:, size:])
    for name, leaf in packed.items():
        assert same_bits(part[name], leaf[:, leaf.shape[1] * size // 256 :]), name


@EVERY
def test_fixed_point(spec, side):
    quantizer = make(spec, side)
    for name in INPUTS:
        packed, read = results(spec, side, name)
        again = programs(spec, side)[0](read)
        if repacks_alike(quantizer):
            for leaf in ("codes", "blocks"):
                assert np.array_equal(packed.get(leaf, 0), again.get(leaf, 0)), name
            assert np.allclose(programs(spec, side)[1](again), read, rtol=2e-3, atol=1e-6)


@EVERY
def test_extremes_and_constant_groups(spec, side):
    quantize, dequantize = programs(spec, side)
    bits = make(spec, side).bits_per_element(64)
    read = lambda x: np.asarray(dequantize(quantize(jnp.asarray(np.broadcast_to(x, RANDOM.shape), jnp.float32))))  # noqa: E731
    assert not read(0.0).any()
    for constant in (1.0, -3.0, 1e-3):  # not rotated: each group holds one value
        got = read(constant)
        assert np.isfinite(got).all()
        if "mask" not in spec:
            assert np.allclose(got, constant, rtol=0.26 if bits < 4 else 0.08, atol=2e-3 if "fp8" in spec else 0), (
                constant
            )
    for most in (1.0, 300.0, 60000.0):
        signs = np.where(np.random.default_rng(0).random(RANDOM.shape) < 0.5, -most, most)
        got = read(signs)
        assert np.isfinite(got).all()
        if "mask:2" not in spec:
            assert (np.sign(got) == np.sign(signs)).mean() > (0.99 if "turbo" not in spec else 0.9)
        assert (np.abs(got) <= 1.4 * most).all()


@pytest.mark.parametrize(("family", "side"), daily([("kivi:{}", "v"), ("int{}", "k")], cases(BITS_OF)))
def test_more_bits_err_less(family, side):
    for name in INPUTS[1:]:
        errors = [error(family.format(bits), side, inputs(name, side)) for bits in (2, 4, 8)]
        print(name, family, side, errors)
        assert errors[0] > 1.05 * errors[1] > 2 * errors[2]


@EVERY
def test_small_values_fare_no_worse(spec, side):
    """Case 15: a floor under the scale ruins a cache of 1e-3. Where a recipe has one, that is shown."""
    x = np.asarray(inputs("tiny-llama2", side))
    x = x / np.std(x)
    errors = [error(spec, side, x * np.float32(scale)) for scale in (1.0, 1e-3)]
    if spec == "fp8:e4m3":
        assert errors[1] > 10 * errors[0]  # a static scale of 1 cannot hold it
    elif spec == "fp8:e5m2" or "mask" in spec:
        assert errors[1] < 2.5 * errors[0] or spec in ("mask:2", "mask:4")  # exponents end
    else:
        assert errors[1] < 1.25 * errors[0]


UNEQUAL = ("mask:2", "mask:4", "fp8:e4m3")


@pytest.mark.parametrize(("spec", "side"), daily(cases(PATHS[:-1]), [c for c in cases(SPECS) if c[0] not in UNEQUAL]))
def test_scale_equivariance(spec, side):
    """A power of two changes exponents alone. KVarN's floor breaks it: tests/test_quantizer_recipes.py."""
    x = np.asarray(make(spec, side).rotate(inputs("tiny-llama2", side)))
    quantize, dequantize = programs(spec, side)
    plain, scaled = (np.asarray(dequantize(quantize(x * by))) / by for by in np.float32([1, 8]))
    if "kvarn" in spec and "none" not in spec and "min" not in spec:
        assert abs(relative(x, scaled) / relative(x, plain) - 1) < 0.1
    elif "mask" in spec or spec == "fp8:e5m2":  # the smallest values have no exponent to spare
        assert relative(plain, scaled) < 1e-3
    else:
        assert np.array_equal(plain, scaled)


# With one key or value of 1e12, in token 5 of a bf16 cache: elements that count, by token of its row and head.
CLIPPED = {
    "int8": {5: 64}, "int4,bound=half": {5: 64}, "fp8:e4m3,scale=token": {5: 64}, "fp8:e5m2": {5: 1},
    "quarot:2": {5: 64}, "turboquant:4": {5: 64}, "mask:8,of=fp16": {5: 1}, "mask:8,of=bf16": {},
    "llama:q8_0": {5: 32}, "llama:q4_0": {5: 32}, "llama:q5_1": {5: 32}, "hf:4": {5: 64},
    "hf:4,axis=channel": dict.fromkeys(range(64), 1), "kivi:2": dict.fromkeys(range(32), 1),
}  # fmt: skip


MIXED = cases(["kvarn:2", "kvarn:8", "kvarn:2,aux=e4m3"])  # here elements share their scales with rows and columns


@pytest.mark.parametrize(
    ("spec", "side"),
    daily([*cases(CLIPPED), ("kvarn:2", "k"), ("kvarn:2,aux=e4m3", "v")], [*cases(CLIPPED), *MIXED]),
)
def test_what_a_clipped_scale_spoils_is_counted(spec, side):
    """K or V in bf16 go far beyond fp16, in which scales, zeros and norms are kept."""
    quantizer = make(spec, side)
    saturated = jax.jit(quantizer.saturated)
    x = RANDOM.astype(jnp.bfloat16)
    assert not np.asarray(saturated(x)).any()
    for value in (1e12, -1e12):
        changed = x.copy()
        changed[0, 5, 1, 3] = value
        counts = np.array(saturated(changed))
        row = counts[0, :, 1].copy()
        counts[0, :, 1] = 0
        assert not counts.any()
        found = {int(token): int(row[token]) for token in row.nonzero()[0]}
        if "kvarn" in spec:  # the element's own, and what shares a row or column of the tile with it
            assert found[5] >= 1
            assert max(found) < 128
        else:
            expected = {5: 32} if (spec, side) == ("kivi:2", "v") else CLIPPED[spec]
            assert found == expected
    larger = (RANDOM * np.float32([1, 1e15])[:, None, None, None]).astype(jnp.bfloat16)
    assert (np.asarray(saturated(larger))[1] > 0).all() == (spec != "mask:8,of=bf16")


@pytest.mark.parametrize(
    ("spec", "elements"),
    [
        ("kivi:2,group=8,window=16,first=5", 8),  # positions 13 to 20
        pytest.param("kivi:2,group=8,window=16,first=0,recent=0", 8, marks=pytest.mark.nightly),  # 8 to 15
        ("hf:4,axis=channel,group=8,anchor=end,every=4", 8),
        ("int8,first=15", HEAD_DIM),
        ("int8,first=16", 0),
        ("int8,recent=19", 0),
        ("turboquant:4", 0),  # all two layers stay exact
    ],
)
def test_groups_are_counted_by_position(spec, elements):
    """Rows of a batch lie in other slots, and groups begin at a row's first packed token."""
    config, precision = wide_config(), make_precision("bf16")
    starts, slots = np.array([3, 0]), 34
    positions = np.maximum(np.arange(slots) - starts[:, None], -1)
    x = np.random.default_rng(0).normal(size=(2, slots, config.num_kv_heads, HEAD_DIM))
    x[[0, 1], starts + 15, 0, 7] = 1e12
    layers = (jnp.asarray(x, jnp.bfloat16),) * config.num_layers
    quant = parse_cache_quant(spec)
    changed = Quantization(quant).make_cache(config, precision, 2, slots)
    changed = dataclasses.replace(changed, positions=jnp.asarray(positions), prompt=jnp.asarray(slots - starts))
    counts = count_saturated(quant, KVCache(layers, layers, jnp.asarray(positions)), changed)
    assert counts[:, 0].tolist() == [config.num_layers * elements] * 2
    assert (counts[:, 2] > 0).all() == (spec != "turboquant:4")


def test_which_formats_end_before_the_caches_dtype():
    in_fp16 = {"fp8:e4m3", "mask:8,of=fp16", "turboquant:4", "kvarn:2", "int8"}
    ends = {spec for spec in in_fp16 if make(spec, "k").has_end(jnp.float16)}
    assert ends == {"fp8:e4m3", "turboquant:4", "kvarn:2"}
    assert all(make(spec, "k").has_end(jnp.bfloat16) for spec in [*in_fp16, "kvarn:8", "hf:4", "fp8:e4m3,scale=token"])
    assert not make("mask:8,of=bf16", "k").has_end(jnp.bfloat16)
    assert not make("turboquant:4", "v").has_end(jnp.float16)


def test_windows():
    everything = Window()
    assert [everything.packed(n) for n in (0, 1, 7)] == [(0, 0), (0, 1), (0, 7)]
    tiles = Window(first=128, block=128)
    assert [int(tiles.packed(n)[1]) for n in (0, 128, 255, 256, 383, 384)] == [128, 128, 128, 256, 256, 384]
    recent = Window(recent=128)
    assert [int(recent.packed(n)[1]) for n in (100, 128, 129, 400)] == [0, 0, 1, 272]
    both = Window(first=4, recent=8, block=16)
    assert [int(both.packed(n)[1]) for n in (27, 28, 43, 44)] == [4, 20, 20, 36]
    prompt = Window(block=128, from_prompt=True)
    assert [int(prompt.packed(n, 50)[1]) for n in (20, 50, 177, 178, 306)] == [20, 50, 50, 178, 306]
    lengths, starts = jnp.asarray([177, 178]), jnp.asarray([50, 50])
    assert np.array_equal(jax.jit(lambda n, p: prompt.packed(n, p)[1])(lengths, starts), [50, 178])


def test_error_splits_into_norm_and_direction():
    x, y = (np.random.default_rng(seed).normal(size=(7, 64)).astype(np.float32) for seed in (0, 1))
    split = jax.jit(split_error)
    norm, direction = split(x, y)
    assert np.allclose(norm + direction, np.sum(np.square(x - y), -1), rtol=1e-5)
    assert np.allclose(split(x, 3 * x)[1], 0, atol=1e-3)
    cosine = np.sum(x * y, -1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
    expected = 2 * np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1) * (1 - cosine)
    assert np.allclose(direction, expected, rtol=1e-4)
