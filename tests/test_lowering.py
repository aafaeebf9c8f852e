"""Every compiled program lowers for CPU, CUDA and TPU, on a machine that has none but the first."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from jax import export
from small_models import PRESETS, SAMPLERS, STOP_IDS, make_prompts, set_up, small_arms, small_config, small_state

from jaxkv.cache import empty_cache
from jaxkv.config import make_precision
from jaxkv.decode import COMPILER_OPTIONS, Arms
from jaxkv.logits import _compare
from jaxkv.rollout import start_rollout

PLATFORMS = ("cpu", "cuda", "tpu")
PROGRAMS = ("prefill", "cached_loop", "tile_loop", "audit_pass")
INT = jax.ShapeDtypeStruct((), jnp.int32)
FLAG = jax.ShapeDtypeStruct((), jnp.bool)


def abstract_arguments(arms, program):
    """Arguments of a program as shapes; nothing is allocated."""
    layout, tokens, rows = set_up(make_prompts((5, 7)))
    state = arms.abstract_state
    run = jax.eval_shape(lambda: start_rollout(arms, tokens, rows, layout))
    rows = jax.eval_shape(lambda: rows)
    cache = jax.eval_shape(lambda: empty_cache(arms.config, arms.precision, layout.batch, layout.slots))
    logits = jax.ShapeDtypeStruct((layout.batch, arms.config.vocab_size), arms.precision.logits)
    prompt = jax.ShapeDtypeStruct((layout.batch, layout.prefill), jnp.int32)
    return {
        "prefill": ((state, prompt, rows, cache), {}),
        "cached_loop": ((state, logits, run, rows, INT, cache), {}),
        "tile_loop": ((state, run, rows, INT, cache, FLAG, FLAG), {"tile": layout.slots // 2}),
        "audit_pass": ((state, run.tokens, rows.first, rows.limit), {}),
    }[program]


def check_exports(arms, programs=PROGRAMS):
    for program in programs:
        args, statics = abstract_arguments(arms, program)
        exported = export.export(getattr(arms, program), platforms=PLATFORMS)(*args, **statics)
        assert exported.platforms == PLATFORMS
        weights = jax.tree.leaves(args[0])
        assert [a.dtype for a in exported.in_avals[: len(weights)]] == [w.dtype for w in weights]


@pytest.mark.parametrize(
    ("family", "backend"),
    daily([("llama", "cpu"), ("gemma3", "cuda"), ("qwen2", "cuda")], itertools.product(PRESETS, ("cpu", "cuda"))),
)
def test_families_export(family, backend):
    arms = small_arms(family, "fp16", backend=backend)
    assert {w.dtype for w in jax.tree.leaves(arms.abstract_state)} == {
        jnp.dtype(jnp.float32 if backend == "cpu" else jnp.float16)
    }
    check_exports(arms)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_precisions_export(precision):
    check_exports(small_arms("gemma2", precision, backend="tpu"))


def test_fp64_exports():
    with jax.enable_x64(True):
        check_exports(small_arms("gemma2", "fp64"))


@pytest.mark.parametrize("sampler", daily(["greedy", "top_p"], SAMPLERS))
def test_samplers_export(sampler):
    check_exports(small_arms("mistral", "fp16", sampler, STOP_IDS, "cuda"), ("cached_loop", "tile_loop"))


def test_rollouts_without_logits_export():
    arms = Arms(small_config(), make_precision("bf16"), keep_logits=False, backend="tpu")
    check_exports(arms, ("cached_loop", "tile_loop"))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_comparison_exports(dtype):
    logits = jax.ShapeDtypeStruct((12, 37), dtype)
    with jax.enable_x64(True):
        exported = export.export(_compare, platforms=PLATFORMS)(logits, logits)
    assert exported.platforms == PLATFORMS
    assert {a.dtype for a in exported.out_avals} == {jnp.dtype(bool), jnp.dtype(jnp.float64)}


def test_exported_program_computes_the_same():
    """XLA's options belong to the compilation: an exported program takes them again where it is called."""
    arms = small_arms("mistral", "fp16")
    state = arms.prepare(small_state("mistral", "fp16"))
    layout, tokens, rows = set_up(make_prompts((5, 7)))
    args, _ = abstract_arguments(arms, "prefill")
    exported = export.export(arms.prefill, platforms=PLATFORMS)(*args)

    def arguments():
        cache = empty_cache(arms.config, arms.precision, layout.batch, layout.slots)
        return state, jnp.asarray(tokens[:, : layout.prefill]), rows, cache

    logits, cache = jax.jit(exported.call, compiler_options=COMPILER_OPTIONS)(*arguments())
    expected_logits, expected_cache = arms.prefill(*arguments())
    np.testing.assert_array_equal(logits, expected_logits)
    jax.tree.map(np.testing.assert_array_equal, cache, expected_cache)
