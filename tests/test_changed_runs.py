"""Runs of models over quantized caches: quantizers of nothing, neighbours, forced runs, devices, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_models
from cases import daily
from jax import export
from quantized_models import FAMILIES, quantized, set_up
from small_models import SAMPLERS, make_prompts, same_bits

from jaxkv.cache import KVCache
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.rollout import force, start_rollout

wide_arms, wide_config, wide_state = (  # one layer is quicker to compile
    functools.partial(make, layers=1)
    for make in (quantized_models.wide_arms, quantized_models.wide_config, quantized_models.wide_state)
)
NEW_TOKENS = 12
UNEQUAL = (4, 7, 6)


@functools.cache
def run(family, precision, spec=None, lengths=UNEQUAL, seeds=(0, 1, 2), sampler="temperature"):
    """A free run with left padding."""
    options = {"sampler": SAMPLERS[sampler]}
    arms = wide_arms(family, precision, **options)
    prompts = [make_prompts((n,), seed)[0] for n, seed in zip(lengths, seeds, strict=True)]
    layout, tokens, rows = set_up(prompts, NEW_TOKENS, list(seeds))
    state, cache = arms.prepare(wide_state(family, precision)), arms.make_cache(rows, layout, quantized(spec))
    return arms.run_cached_keeping(state, tokens, rows, layout, cache)


@pytest.mark.parametrize("family", daily(["mistral"], FAMILIES))
def test_packing_that_changes_nothing_changes_no_bit(family):
    """fp16 values whose bits are all kept, packed, with windows, and read back; a prefill and a loop."""
    clean, _ = run(family, "fp16")
    packed, cache = run(family, "fp16", "mask:16,first=3,recent=4")
    assert same_bits(clean, packed)
    assert int(cache.packed(0)[0].sum()) == sum(n + NEW_TOKENS - 1 - 7 for n in UNEQUAL)


@pytest.mark.parametrize(
    ("family", "precision", "spec"),
    daily(
        [("gemma2", "fp32", "mask:32,first=3,recent=4"), ("mistral", "bf16", "mask:16,first=3,recent=4")],
        [
            *((family, "fp32", "mask:32,first=3,recent=4") for family in FAMILIES),
            ("gemma3", "fp32", "mask:32,of=fp32"),
            ("mistral", "bf16", "mask:16,first=3,recent=4"),
        ],
    ),
)
def test_packing_that_changes_nothing_changes_no_bit_in_other_precisions(family, precision, spec):
    """In fp32 XLA fused RoPE's products with their sum by what followed it, until they were rounded by themselves."""
    packed, cache = run(family, precision, spec)
    assert same_bits(run(family, precision)[0], packed)
    assert cache.quant.k.quantizer.of == precision  # whether named or not


@pytest.mark.parametrize(("family", "precision"), daily([("gemma3", "fp16")], [("llama", "fp32"), ("gemma3", "fp16")]))
def test_none_is_the_clean_run(family, precision):
    assert same_bits(run(family, precision)[0], run(family, precision, "none")[0])


@pytest.mark.parametrize("spec", daily(["hf:2,every=5"], ["kvarn:2,tile=4,first=2", "hf:2,every=5"]))
def test_neighbours_change_no_bit(spec):
    """Of a row's logits and of what is stored of it; the batch has its shape."""
    (a, cache), (b, other) = (run("gemma2", "fp16", spec, seeds=seeds) for seeds in ((0, 1, 2), (7, 1, 8)))
    assert not same_bits(a.logits[0], b.logits[0])
    pick = lambda tree: jax.tree.map(lambda x: x[1], tree)  # noqa: E731
    assert same_bits((a.logits[1], a.tokens[1]), (b.logits[1], b.tokens[1]))
    assert same_bits(pick((cache.k, cache.v)), pick((other.k, other.v)))
    clean, _ = run("gemma2", "fp16")
    if spec.startswith("hf"):  # a prefill sees its rows as they are, and hf rotates none
        assert same_bits(a.logits[:, 0], clean.logits[:, 0])
    assert not same_bits(a.logits, clean.logits)


def test_a_forced_run_follows_the_clean_one():
    reference, _ = run("mistral", "fp16", sampler="greedy")
    arms = wide_arms("mistral", "fp16", sampler=SAMPLERS["greedy"])
    layout, _, rows = set_up([make_prompts((n,), seed)[0] for seed, n in enumerate(UNEQUAL)], NEW_TOKENS)
    forced = force(rows, reference)
    state = arms.prepare(wide_state("mistral", "fp16"))
    cache = arms.make_cache(forced, layout, quantized("int2"))
    along, _ = arms.run_cached_keeping(state, np.asarray(reference.tokens), forced, layout, cache)
    assert same_bits(along.tokens, reference.tokens)
    assert same_bits(along.lengths, reference.lengths)
    assert not same_bits(along.logits, reference.logits)
    assert not same_bits(along.choices, reference.choices)


def test_the_aligned_regime_is_refused():
    layout, _, rows = set_up(make_prompts((4,)), NEW_TOKENS)
    arms = Arms(wide_config(), make_precision("fp16"), tile=8)
    assert isinstance(arms.make_cache(rows, layout), KVCache)
    with pytest.raises(UserError, match="no aligned regime"):
        arms.make_cache(rows, layout, quantized("int8"))


@pytest.mark.parametrize(
    "spec",
    daily(
        ["hf:4,axis=channel,group=8,every=8"],
        ["kvarn:k2v2,tile=4,first=2", "hf:4,axis=channel,group=8,every=8", "turboquant:4,edges=0"],
    ),
)
def test_programs_lower_for_every_device(spec):
    arms = wide_arms("gemma2", "bf16", backend="cuda")
    layout, tokens, rows = set_up(make_prompts((5, 7)), NEW_TOKENS)
    start = jax.eval_shape(lambda: start_rollout(arms, tokens, rows, layout))
    cache = jax.eval_shape(lambda: arms.make_cache(rows, layout, quantized(spec)))
    logits = jax.ShapeDtypeStruct((2, arms.config.vocab_size), arms.precision.logits)
    prompt = jax.ShapeDtypeStruct((2, layout.prefill), jnp.int32)
    end = jax.ShapeDtypeStruct((), jnp.int32)
    platforms = ("cpu", "cuda", "tpu")
    for program, given in (
        (arms.prefill, (arms.abstract_state, prompt, rows, cache)),
        (arms.cached_loop, (arms.abstract_state, logits, start, rows, end, cache)),
    ):
        exported = export.export(program, platforms=platforms)(*given)
        assert exported.platforms == platforms
        kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache)]
        assert [(aval.shape, aval.dtype) for aval in exported.out_avals[-len(kinds) :]] == kinds
