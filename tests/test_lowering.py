"""Every compiled program lowers for CPU, CUDA and TPU, on a machine that has none but the first."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from cases import daily
from jax import export
from quantized_models import quantized, wide_arms
from small_models import PRESETS, SAMPLERS, STOP_IDS, make_prompts, set_up, small_arms, small_config

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.logits import _compare
from jaxkv.rollout import start_rollout

PLATFORMS = ("cpu", "cuda", "tpu")
PROGRAMS = ("prefill", "cached_loop", "tile_loop", "audit_pass")
INT = jax.ShapeDtypeStruct((), jnp.int32)
FLAG = jax.ShapeDtypeStruct((), jnp.bool)


def abstract_arguments(arms, program, change=None):
    """Arguments of a program as shapes; nothing is allocated."""
    layout, tokens, rows = set_up(make_prompts((5, 7)))
    state = arms.abstract_state
    run = jax.eval_shape(lambda: start_rollout(arms, tokens, rows, layout))
    cache = jax.eval_shape(lambda: arms.make_cache(rows, layout, change))
    rows = jax.eval_shape(lambda: rows)
    logits = jax.ShapeDtypeStruct((layout.batch, arms.config.vocab_size), arms.precision.logits)
    prompt = jax.ShapeDtypeStruct((layout.batch, layout.prefill), jnp.int32)
    return {
        "prefill": ((state, prompt, rows, cache), {}),
        "cached_loop": ((state, logits, run, rows, INT, cache), {}),
        "tile_loop": ((state, run, rows, INT, cache, FLAG, FLAG), {"tile": layout.slots // 2}),
        "audit_pass": ((state, run.tokens, rows.first, rows.limit), {}),
    }[program]


def check_exports(arms, programs=PROGRAMS, change=None):
    for program in programs:
        args, statics = abstract_arguments(arms, program, change)
        exported = export.export(getattr(arms, program), platforms=PLATFORMS)(*args, **statics)
        assert exported.platforms == PLATFORMS
        weights = jax.tree.leaves(args[0])
        assert [a.dtype for a in exported.in_avals[: len(weights)]] == [w.dtype for w in weights]
        if program in ("prefill", "cached_loop"):
            kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(args[-1])]
            assert [(aval.shape, aval.dtype) for aval in exported.out_avals[-len(kinds) :]] == kinds


@pytest.mark.parametrize(
    ("family", "backend"),
    daily([("llama", "cpu"), ("gemma3", "cuda"), ("qwen2", "cuda")], itertools.product(PRESETS, ("cpu", "cuda"))),
)
def test_families_export(family, backend):
    arms = small_arms(family, "fp16", backend=backend)
    held = jnp.dtype(jnp.float32 if backend == "cpu" else jnp.float16)
    assert {w.dtype for w in jax.tree.leaves(arms.abstract_state)} == {held}
    check_exports(arms)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_precisions_export(precision):
    with jax.enable_x64(precision == "fp64"):
        check_exports(small_arms("gemma2", precision, backend="tpu"))


@pytest.mark.parametrize("sampler", daily(["greedy", "top_p"], SAMPLERS))
def test_samplers_export(sampler):
    check_exports(small_arms("mistral", "fp16", sampler, STOP_IDS, "cuda"), ("cached_loop", "tile_loop"))


def test_rollouts_without_logits_export():
    arms = Arms(small_config(), make_precision("bf16"), keep_logits=False, backend="tpu")
    check_exports(arms, ("cached_loop", "tile_loop"))


@pytest.mark.parametrize(
    "spec",
    daily(
        ["hf:4,axis=channel,group=8,every=8"],
        ["kvarn:k2v2,tile=4,first=2", "hf:4,axis=channel,group=8,every=8", "turboquant:4,edges=0"],
    ),
)
def test_changed_caches_export(spec):
    arms = wide_arms("gemma2", "bf16", layers=1, backend="cuda")
    check_exports(arms, ("prefill", "cached_loop"), quantized(spec))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_comparison_exports(dtype):
    logits = jax.ShapeDtypeStruct((12, 37), dtype)
    with jax.enable_x64(True):
        exported = export.export(_compare, platforms=PLATFORMS)(logits, logits)
    assert exported.platforms == PLATFORMS
    assert {a.dtype for a in exported.out_avals} == {jnp.dtype(bool), jnp.dtype(jnp.float64)}
