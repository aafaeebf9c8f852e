"""A planted cause is attributed to its class and no other; with every class aligned, the arms have the same bits."""

import jax.numpy as jnp
import pytest
from attribution_runs import TILE, differing, make_arms
from cases import daily
from small_models import make_prompts, set_up, small_state

from jaxkv.experiments.attribution.record import ALL, ALL_BUT, ALONE, FENCED, PLAIN, VARIANTS
from jaxkv.models import layers
from jaxkv.models.alignment import CLASSES, align

# llama in fp16 is below, mistral in fp32 in test_attribution.py.
CASES = [
    ("mistral", "fp16"), ("gemma2", "fp16"), ("gemma3", "fp16"),
    ("llama", "bf16"), ("gemma2", "bf16"),
    ("llama", "fp32"), ("gemma2", "fp32"), ("gemma3", "fp32"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "precision"), daily([("gemma3", "fp32")], CASES))
def test_all_aligned_is_exact(family, precision):
    deep = (family, precision) == ("gemma3", "fp32")  # with two RoPE bases; one layer is quicker to compile
    arms = make_arms(family, precision, layers=1 + deep)
    state = arms.prepare(small_state(family, precision, layers=1 + deep))
    layout, tokens, rows = set_up(make_prompts((4, 9)))
    reference, _ = arms.run_cached_keeping(state, tokens, rows, layout, align=align(TILE, VARIANTS[ALL]))
    assert differing(arms, state, ALL, reference, rows, layout) == 0
    if precision == "fp32":  # there the programs do differ
        assert differing(arms, state, FENCED, reference, rows, layout) > 8


PLANTS = {
    "qkv": lambda spec, w, config: spec == "btd,fd->btf" and w.shape[0] == config.num_query_heads * config.head_dim,
    "mlp": lambda spec, w, config: spec == "btf,df->btd" and w.shape[1] == config.mlp_dim,
    "output": lambda spec, w, config: spec == "btf,df->btd" and w.shape[1] != config.mlp_dim,
    "scores": lambda spec, w, config: spec == "btkgh,bskh->bkgts",
    "attention": lambda spec, w, config: spec == "bkgts,bskh->btkgh",
}


def plant(monkeypatch, op_class, config):
    """Makes one class's results depend on whether a call has one row."""
    real = layers.product
    if op_class in PLANTS:

        def product(spec, x, w, precision, out=None, bias=None):
            assert bias is None  # of a llama
            one = x.shape[3 if spec.startswith("bkgts") else 1] == 1
            if not (one and PLANTS[op_class](spec, w, config)):
                return real(spec, x, w, precision, out)
            half = x.shape[-1] // 2
            axis = 1 if op_class == "attention" else -1
            first, second = jnp.split(w, [half], axis=axis)
            return real(spec, x[..., :half], first, precision, out) + real(spec, x[..., half:], second, precision, out)

        monkeypatch.setattr(layers, "product", product)
    elif op_class == "norms":
        call = layers.RMSNorm.__call__
        monkeypatch.setattr(
            layers.RMSNorm,
            "__call__",
            lambda self, x, out: call(self, x * 1.002 if x.shape[1] == 1 else x, out) * (1 + (x.shape[1] == 1) / 512),
        )
    else:
        rotate = layers.apply_rope
        monkeypatch.setattr(layers, "apply_rope", lambda x, table: rotate(x, table) * (1 + (x.shape[1] == 1) / 512))


@pytest.mark.parametrize("op_class", daily(["mlp"], [c for c in CLASSES if c != "head"]))
def test_a_planted_cause_is_attributed_to_its_class_and_no_other(op_class, monkeypatch):
    """In fp16 this model's plain arms are bit-equal on a CPU, so that every difference is the plant's."""
    arms = make_arms("llama", "fp16", layers=1)
    plant(monkeypatch, op_class, arms.config)
    state = arms.prepare(small_state("llama", "fp16", layers=1))
    layout, tokens, rows = set_up(make_prompts((4, 9)))
    reference, _ = arms.run_cached_keeping(state, tokens, rows, layout, align=align(TILE, VARIANTS[FENCED]))
    variants = [v for v in VARIANTS if v != PLAIN or op_class == "mlp"]  # the plain programs are the slow half
    found = {v: differing(arms, state, v, reference, rows, layout) for v in variants}
    clean = {ALL, ALONE[op_class], ALONE["decode"]} | {ALL_BUT[c] for c in CLASSES if c != op_class}
    assert {v for v, steps in found.items() if steps == 0} == clean
