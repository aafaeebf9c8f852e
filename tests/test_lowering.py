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
from jaxkv.experiments.lowering.targets import abstract_programs
from jaxkv.logits import _compare

PLATFORMS = ("cpu", "cuda", "tpu")
PROGRAMS = ("prefill", "decode", "recompute", "audit")


def check_exports(arms, programs=PROGRAMS, change=None):
    layout = set_up(make_prompts((5, 7)))[0]
    found = abstract_programs(arms, layout, change=change, tile=layout.slots // 2)
    for name in programs:
        program = found[name]
        exported = export.export(program.function, platforms=PLATFORMS)(*program.arguments, **program.statics)
        assert exported.platforms == PLATFORMS
        weights = jax.tree.leaves(program.arguments[0])
        assert [a.dtype for a in exported.in_avals[: len(weights)]] == [w.dtype for w in weights]
        if name in ("prefill", "decode"):
            kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(program.arguments[-1])]
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
    check_exports(small_arms("mistral", "fp16", sampler, STOP_IDS, "cuda"), ("decode", "recompute"))


def test_rollouts_without_logits_export():
    arms = Arms(small_config(), make_precision("bf16"), keep_logits=False, backend="tpu")
    check_exports(arms, ("decode", "recompute"))


@pytest.mark.parametrize(
    "spec",
    daily(
        ["hf:4,axis=channel,group=8,every=8"],
        ["kvarn:k2v2,tile=4,first=2", "hf:4,axis=channel,group=8,every=8", "turboquant:4,edges=0"],
    ),
)
def test_changed_caches_export(spec):
    arms = wide_arms("gemma2", "bf16", layers=1, backend="cuda")
    check_exports(arms, ("prefill", "decode"), quantized(spec))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_comparison_exports(dtype):
    logits = jax.ShapeDtypeStruct((12, 37), dtype)
    with jax.enable_x64(True):
        exported = export.export(_compare, platforms=PLATFORMS)(logits, logits)
    assert exported.platforms == PLATFORMS
    assert {a.dtype for a in exported.out_avals} == {jnp.dtype(bool), jnp.dtype(jnp.float64)}
