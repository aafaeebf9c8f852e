"""What a quantized cache stores and shows, step by step, beside the quantizers' own functions on the same rows.

Caches that differ in traced settings share their programs; layers are packed in one loop with the same bits.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from quantized_models import HEAD_DIM, quantized, run_wide, set_up, weights_of, wide_arms, wide_config
from small_models import make_prompts, same_bits

from jaxkv.cache import EMPTY, empty_cache
from jaxkv.config import make_precision
from jaxkv.decode import COMPILER_OPTIONS, Arms
from jaxkv.errors import UserError
from jaxkv.interventions import quantized_cache
from jaxkv.interventions.quantized_cache import Quantization, cache_bytes, effective_bits
from jaxkv.interventions.quantized_side import SideStore
from jaxkv.interventions.quantizers import parse_cache_quant
from jaxkv.models.families import get_preset

FP16 = make_precision("fp16")
CONFIG = dataclasses.replace(wide_config(), num_layers=1)
K = CONFIG.num_kv_heads
SLOTS, PREFILL, STEPS = 72, 24, 40
LENGTHS = (7, 20, 13)
SPECS = (
    *("kvarn:k2v3,tile=16,first=5", "kvarn:2,tile=8,first=0,rotate=off,recent=3", "kivi:2,group=8,window=16"),
    *("k=quarot:4;v=int4,first=2", "k=turboquant:4,edges=0;v=fp8:e4m3,scale=token", "k=llama:q4_0;v=mask:8,recent=5"),
    *("hf:2,every=12", "hf:4,axis=channel,group=8,every=12,first=3", "hf:2,axis=channel,group=8,anchor=end,every=12"),
    *("k=none;v=kivi:4,group=16,window=32", "k=hf:2,every=9;v=none"),
)


def make_rows(lengths, seed=0):
    """Keys and values of whole texts by position, fp16 [B, n, K, H], spread over tokens; row b is keyed by b."""
    made = {}
    for side, offset in (("k", 0), ("v", 100)):
        texts = []
        for b, length in enumerate(lengths):
            rng = np.random.default_rng((seed, b, offset))
            n = length + STEPS
            text = rng.normal(size=(n, K, HEAD_DIM)) * np.exp(rng.normal(size=(n, 1, 1)))
            texts.append(text.astype(np.float16))
        made[side] = texts
    return made


@functools.cache
def programs(spec):
    """Prefill and a loop of one-row steps, through the cache as a decoder meets it; both give what queries see."""

    def call(cache, k, v, positions, slot):
        turn = cache.begin(positions, slot)
        layer = turn.layer(0).write(k, v, slot)
        return turn.finish([layer]), layer.read()

    def loop(cache, k, v, first, prompt):
        def body(carry, rows):
            cache, slot = carry
            cache, views = call(cache, *rows, (slot - first)[:, None], slot)
            return (cache, slot + 1), views

        (cache, _), views = jax.lax.scan(body, (cache, prompt), (k, v))
        return cache, views

    return tuple(jax.jit(fn, compiler_options=COMPILER_OPTIONS) for fn in (call, loop))


def place(texts, lengths, prompt):
    """Prefill rows [B, PREFILL, K, H], left-padded to `prompt`, and decoded rows [STEPS, B, 1, K, H]."""
    early = np.zeros((len(texts), PREFILL, K, HEAD_DIM), np.float16)
    late = np.stack([text[length:] for text, length in zip(texts, lengths, strict=True)], axis=1)[:, :, None]
    for b, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        early[b, prompt - length : prompt] = text[:length]
    return early, late


@functools.cache
def run(spec, lengths=LENGTHS, precision="fp16", seed=0, compiled=None):
    """The cache at the end, and what every call saw: k and v as lists of [B, S, K, H]; also the rows placed.

    By the programs that were compiled for `compiled`, if that is another one.
    """
    prompt = max(lengths)
    first = np.asarray([prompt - n for n in lengths], np.int32)
    cache = quantized(spec).make_cache(CONFIG, make_precision(precision), len(lengths), SLOTS)
    rows = {side: place(texts, lengths, prompt) for side, texts in make_rows(lengths, seed).items()}
    early, late = zip(*rows.values(), strict=True)
    slots = np.arange(PREFILL, dtype=np.int32)[None]
    positions = np.where((slots >= first[:, None]) & (slots < prompt), slots - first[:, None], EMPTY)
    prefill, loop = programs(compiled or spec)
    cache, views = prefill(cache, *early, positions, 0)
    cache, later = loop(cache, *late, jnp.asarray(first), jnp.asarray(prompt))
    seen = {side: [np.asarray(views[i]), *np.asarray(later[i])] for i, side in enumerate("kv")}
    return cache, seen, rows


def reference(quant, rows, lengths):
    """What each call is to see of one side by position: for every call and row, [written, K, H] in fp16."""
    quantizer, window = quant.quantizer, quant.window
    rotate = jax.jit(quantizer.rotate)
    turned = [np.asarray(rotate(rows[0])), np.stack([np.asarray(rotate(x)) for x in rows[1]])]
    prompt, expected = max(lengths), [[] for _ in range(STEPS + 1)]
    quantize, dequantize = jax.jit(quantizer.quantize), jax.jit(quantizer.dequantize)
    room = SLOTS // quantizer.granularity * quantizer.granularity  # one program: a tile sees no other
    pad = lambda x: np.pad(x.astype(np.float32), ((0, room - len(x)), (0, 0), (0, 0)))[None]  # noqa: E731
    for b, length in enumerate(lengths):
        text = np.concatenate([turned[0][b, prompt - length : prompt], turned[1][:, b, 0]])
        first = min(window.first, len(text))
        if not quantizer.whole_history:
            read = np.asarray(dequantize(quantize(pad(text[first:][:room]))))[0].astype(np.float16)
        held, packed = np.zeros((0, *text.shape[1:]), np.float32), 0
        for call in range(STEPS + 1):
            written = length + call
            before = 0 if call == 0 else written - 1
            ends = [int(window.packed(n, length)[1]) if n or not window.from_prompt else 0 for n in (before, written)]
            if quantizer.whole_history and ends[1] > packed:
                history = np.concatenate([held, text[max(packed, first) : ends[1]].astype(np.float32)])
                new = np.asarray(dequantize(quantize(pad(history), jnp.asarray([len(history)]))))[0, : len(history)]
            else:
                new = held
            exact = quantizer.own == "step" or (quantizer.own == "prompt" and call == 0)
            end, store = (packed if quantizer.whole_history else ends[0], held) if exact else (ends[1], new)
            end = max(first, end)
            shown = text[:written].copy()
            body = store.astype(np.float16) if quantizer.whole_history else read[: end - first]
            if exact and call == 0:
                body = body[:0]
            shown[first : first + len(body)] = body
            expected[call].append(shown)
            held, packed = new, max(packed, ends[1])
    return expected


@pytest.mark.parametrize("spec", daily([SPECS[i] for i in (0, 2, 5, 8)], SPECS))
def test_reads_are_the_quantizers_own_at_every_step(spec):
    """Position by position and step by step, the bits of quantize and dequantize on each row alone."""
    cache, seen, rows = run(spec)
    quant = parse_cache_quant(spec).stored_as(FP16.cache)
    changed = 0
    for side in "kv":
        sided, views = getattr(quant, side), seen[side]
        if sided.quantizer is None:
            early, late = rows[side]
            expected = np.zeros((len(LENGTHS), SLOTS, K, HEAD_DIM), np.float16)
            expected[:, :PREFILL] = early
            for call, view in enumerate(views):
                if call:
                    expected[:, max(LENGTHS) + call - 1] = late[call - 1, :, 0]
                assert same_bits(view, expected)
            continue
        wanted = reference(sided, rows[side], LENGTHS)
        for call, view in enumerate(views):
            for b, length in enumerate(LENGTHS):
                start = max(LENGTHS) - length
                assert same_bits(view[b, start : start + length + call], wanted[call][b]), (side, call, b)
                assert not view[b, :start].any()
                assert not view[b, start + length + call :].any()
        changed += int((np.asarray(cache.packed(0)["kv".index(side)])).sum())
    assert changed > len(LENGTHS) * 16


ALONE = (SPECS[1], SPECS[2], SPECS[8])


@pytest.mark.parametrize("spec", daily([SPECS[0], SPECS[8]], [SPECS[0], *ALONE]))
def test_neighbours_and_left_padding_change_no_bit(spec):
    """Other neighbours, of other lengths, so that a row's slots move: what is stored of it stays."""
    cache, seen, _ = run(spec)
    other, moved, _ = run(spec, (7, 11, 13))
    for row in (0, 2):
        for a, b in zip((*cache.k, *cache.v), (*other.k, *other.v), strict=True):
            assert same_bits(jax.tree.map(lambda x: x[row], a), jax.tree.map(lambda x: x[row], b))  # noqa: B023
        for side in "kv":
            start, to = max(LENGTHS) - LENGTHS[row], 13 - LENGTHS[row]
            for call in (0, 1, STEPS):
                n = LENGTHS[row] + call
                assert same_bits(seen[side][call][row, start : start + n], moved[side][call][row, to : to + n])


@pytest.mark.parametrize("spec", daily(ALONE[1:2], ALONE))
def test_a_row_by_itself_has_the_bits_it_has_in_a_batch(spec):
    """One row takes slices where a batch takes gathers; a vmapped row is the third way."""
    cache, seen, _ = run(spec)
    alone, views, _ = run(spec, LENGTHS[:1])
    for a, b in zip((*cache.k, *cache.v), (*alone.k, *alone.v), strict=True):
        assert same_bits(jax.tree.map(lambda x: x[:1], a), b)
    start = max(LENGTHS) - LENGTHS[0]
    n = LENGTHS[0] + STEPS
    for side in "kv":
        assert same_bits(seen[side][STEPS][0, start : start + n], views[side][STEPS][0, :n])


def test_vmap_is_a_loop():
    _, _, rows = run(ALONE[1])

    def prefill(k, v, positions):
        turn = quantized(ALONE[1]).make_cache(CONFIG, FP16, 1, SLOTS).begin(positions[None], 0)
        layer = turn.layer(0).write(k[None], v[None], 0)
        return turn.finish([layer]), layer.read()

    positions = np.where(np.arange(PREFILL) < 21, np.arange(PREFILL), EMPTY)
    k, v = rows["k"][0], rows["v"][0]
    mapped = jax.jit(jax.vmap(prefill, in_axes=(0, 0, None)), compiler_options=COMPILER_OPTIONS)(k, v, positions)
    one = jax.jit(prefill, compiler_options=COMPILER_OPTIONS)
    for row in range(len(LENGTHS)):
        assert same_bits(jax.tree.map(lambda x: x[row], mapped), one(k[row], v[row], positions))  # noqa: B023


@pytest.mark.parametrize("spec", SPECS)
def test_stated_bits_are_counted_bytes(spec):
    """At every size: packed positions at the method's bits, windows and what may wait at the cache's."""
    quant = parse_cache_quant(spec)
    for slots, precision in ((72, "fp16"), (127, "fp32"), (9, "bf16")):
        cache = jax.eval_shape(lambda: Quantization(quant).make_cache(CONFIG, make_precision(precision), 2, slots))  # noqa: B023
        elements = 2 * K * HEAD_DIM
        width = 8 * jnp.dtype(make_precision(precision).cache).itemsize
        stated = 0.0
        for side, store, plan in zip("kv", (cache.k[0], cache.v[0]), cache.plans(0), strict=True):
            sided = getattr(quant, side)
            if sided.quantizer is None:
                stated += slots * width * elements
                continue
            window = sided.window
            start = min(window.first, slots)
            wait = min(window.recent + window.block - 1, slots - start)
            packed = plan.capacity
            assert store.first.shape[1] == start
            assert store.recent.shape[1] == wait
            if window.from_prompt:
                assert slots - start <= packed < slots - start + 8
            else:
                assert start + packed == max(start, int(window.packed(slots)[1]))
            stated += (packed * sided.quantizer.bits_per_element(HEAD_DIM) + (start + wait) * width) * elements
            if getattr(sided.quantizer, "anchor", "start") == "end" and packed:  # a group more, and a row's shift
                stated += 32 * elements + 32 * 2
        assert 8 * cache_bytes(cache) == stated
        assert effective_bits(cache, CONFIG) == stated / (2 * slots * elements)


def test_a_2_bit_cache_of_32k_tokens_is_a_fifth_at_most():
    config = dataclasses.replace(get_preset("llama2-7b"), num_layers=2)
    changed = jax.eval_shape(lambda: quantized("kvarn:k2v2").make_cache(config, FP16, 1, 1 << 15))
    plain = jax.eval_shape(lambda: empty_cache(config, FP16, 1, 1 << 15))
    assert cache_bytes(plain) == 2 * 2 * (1 << 15) * 4096 * 2
    assert changed.positions.shape == plain.positions.shape
    assert cache_bytes(changed) <= 0.2 * cache_bytes(plain)
    assert effective_bits(changed, config) == (32640 * 2.25 + 255 * 16) / 32768  # the paper: 2.36


# Programs.

CELLS = (
    SPECS[0],
    "kvarn:k2v3,tile=16,rotate=off,first=5",
    "kvarn:k2v3,tile=16,normalize=off,first=5",
    "k=kvarn:2,tile=16,rotate=off,first=5;v=kvarn:3,tile=16,normalize=off,first=5",
)
PARTED = ((0, 1), (0, 2), (1, 3), (2, 3))  # cells that differ, and yet they do what they say


def test_rotation_and_normalisation_share_one_program():
    run(SPECS[0])
    before = [program._cache_size() for program in programs(SPECS[0])]
    runs = [run(spec, compiled=SPECS[0])[1] for spec in CELLS]
    assert [program._cache_size() for program in programs(SPECS[0])] == before
    for first, second in PARTED:
        assert not np.array_equal(*(np.stack([*run["k"], *run["v"]]) for run in (runs[first], runs[second])))


@pytest.mark.nightly
def test_rotation_and_normalisation_share_the_arms_programs():
    arms = wide_arms("gemma2")
    before = arms.prefill._cache_size(), arms.cached_loop._cache_size()
    logits = [np.asarray(run_wide(arms, quantized(spec), (21, 14), new_tokens=6)[0][0].logits) for spec in CELLS]
    assert (arms.prefill._cache_size() - before[0], arms.cached_loop._cache_size() - before[1]) == (1, 1)
    for first, second in PARTED:
        assert not np.array_equal(logits[first], logits[second])


def prefill(arms, spec=None, call=lambda program, *arguments: program(*arguments)):
    """Logits and cache after the prefill of two prompts; nothing else is compiled."""
    prompts = [make_prompts((n,), seed)[0] for seed, n in enumerate((21, 14))]
    layout, tokens, rows = set_up(prompts, 6)
    cache = arms.make_cache(rows, layout, quantized(spec))
    return call(arms.prefill, weights_of(arms), jnp.asarray(tokens[:, : layout.prefill]), rows, cache)


@pytest.mark.parametrize(
    ("side", "settings"),
    daily(
        [("k", ""), ("k", ",passes=0"), ("v", ",passes=3,rotate=off")],
        itertools.product("kv", ("", ",rotate=off", ",passes=0", ",passes=3,rotate=off")),
    ),
)
def test_a_traced_setting_has_the_bits_of_a_static_one(side, settings):
    quantizer = getattr(parse_cache_quant(f"kvarn:2,tile=16{settings}"), side).quantizer
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 32, 2, 32)) * np.geomspace(0.1, 9, 32), jnp.float16)

    def work(quantizer, x):
        rotated = quantizer.rotate(x)
        return rotated, quantizer.quantize(rotated)

    traced = jax.jit(work)(jax.tree.map(jnp.asarray, quantizer), x)
    assert same_bits(traced, jax.jit(functools.partial(work, quantizer))(x))


def test_a_head_without_a_rotation_is_left_as_it_is():
    quantizer = jax.tree.map(jnp.asarray, parse_cache_quant("kvarn:2,rotate=off").k.quantizer)
    x = jnp.ones((2, 24))
    assert same_bits(jax.jit(lambda quantizer, x: quantizer.rotate(x))(quantizer, x), x)


@pytest.mark.parametrize(
    "spec",
    daily(
        ["quarot:4,first=3"],
        [CELLS[0], "kivi:k2v2,group=8,window=8", "turboquant:3,edges=0", "quarot:4,first=3"],
    ),
)
def test_layers_packed_in_a_loop_have_the_bits_of_layers_packed_one_by_one(spec, monkeypatch):
    logits, cache = prefill(wide_arms(), spec)
    late = []

    def never(plan, rows):
        late.append(plan is not None and rows.shape[1] > 1)
        return False

    monkeypatch.setattr(quantized_cache, "_packs_late", never)
    one_by_one, other = prefill(Arms(wide_config(), make_precision("fp16")), spec)  # traced anew
    assert any(late)
    assert same_bits(logits, one_by_one)
    assert same_bits((cache.k, cache.v), (other.k, other.v))


@pytest.mark.parametrize("layers", ["global", "windowed"])
def test_layers_that_are_left_hold_what_the_clean_cache_does(layers):
    config = wide_config("gemma2")
    assert set(config.windowed_layers) == {True, False}
    arms = wide_arms("gemma2")
    runs = layers == "global"
    _, cache = prefill(arms, f"int4,layers={layers}", *([] if runs else [jax.eval_shape]))
    for layer, windowed in enumerate(config.windowed_layers):
        packed = windowed == (layers == "windowed")
        assert isinstance(cache.k[layer], SideStore) == isinstance(cache.v[layer], SideStore) == packed
    if runs:  # Gemma-2 begins with a windowed layer, whose rows no packed one has changed
        _, clean = prefill(arms)
        assert same_bits((cache.k[0], cache.v[0]), (clean.k[0], clean.v[0]))


def test_bits_count_the_layers_that_are_left():
    config, bits = wide_config("gemma2"), {}
    for layers in ("all", "global", "windowed"):
        cache = jax.eval_shape(lambda: quantized(f"int4,layers={layers}").make_cache(config, FP16, 1, 64))  # noqa: B023
        bits[layers] = effective_bits(cache, config)
    share = sum(config.windowed_layers) / config.num_layers
    assert bits["all"] == parse_cache_quant("int4").k.quantizer.bits_per_element(config.head_dim)
    assert bits["windowed"] == pytest.approx(share * bits["all"] + (1 - share) * 16)
    assert bits["global"] == pytest.approx((1 - share) * bits["all"] + share * 16)


def test_a_model_without_windows_refuses_windowed_layers_before_anything_runs():
    config = dataclasses.replace(wide_config("gemma2"), window=None, window_pattern=(False,))
    with pytest.raises(UserError, match="no windowed layer"):
        quantized("int4,layers=windowed").make_cache(config, wide_arms("gemma2").precision, 1, 64)
