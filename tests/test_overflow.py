"""fp16 that overflows: the part of the policy that mends it is found by running, and named in the report."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from small_models import VOCAB, small_config, small_state

from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.experiments.divergence.wording import describe_invalid
from jaxkv.experiments.overflow import describe_remedy, find_remedy

CONFIG, STATE = small_config("llama"), small_state("llama")
ITEM = Item(3, tuple(np.random.default_rng(0).integers(12, VOCAB, 9).tolist()), "a")
SPEC = RunSpec(new_tokens=4, bucket=8)


def scaled(factors: dict[str, float]):
    """Weights in fp16, those whose path ends so multiplied."""
    leaves = {}
    for path, leaf in flat_paths(STATE).items():
        factor = next((f for end, f in factors.items() if path.endswith(end)), 1.0)
        leaves[path] = jnp.asarray(leaf[...] * factor, jnp.float16)
    return with_leaves(STATE, leaves)


def search(factors: dict[str, float]):
    tried = []

    def make(parts):
        tried.append(dict(parts))
        arms = Arms(CONFIG, make_precision("fp16", **parts))
        return arms, arms.prepare(scaled(factors))

    return find_remedy(make, ITEM, SPEC), tried


@pytest.mark.parametrize(
    ("factors", "flags"),
    [
        ({"attn/q": 40.0, "attn/k": 40.0}, "--scores=fp32"),  # q·k near 1e5, q and k near 1e3
        ({"mlp/down": 4000.0}, None),  # an output of the MLP: a product, which no part alone widens
    ],
)
def test_the_part_that_overflows_is_found(factors, flags):
    remedy, tried = search(factors)
    assert tried[0] == {}
    assert (remedy.flags, remedy.broke) == (flags, True)


def test_two_parts_where_two_overflow():
    # Both branches stay below 65504, their sum on the stream does not.
    remedy, tried = search({"attn/q": 40.0, "attn/k": 40.0, "attn/o": 3000.0, "mlp/down": 300.0, "embed": 1000.0})
    assert remedy.flags == "--scores=fp32 --residual=fp32"
    assert len(tried) == 3


def test_a_run_without_a_fault_needs_nothing():
    found = search({})[0]
    assert (found.flags, found.broke) == (None, False)
    assert describe_remedy(make_precision("fp16"), found) == (
        "its numbers did not break again (tried on problem 3, 4 tokens)"
    )


def test_wider_scores_change_no_record_that_does_not_name_them():
    usual = make_precision("fp16")
    assert "scores" not in usual.to_json()
    assert make_precision("fp16", scores="fp32").to_json()["scores"] == "float32"
    assert make_precision("fp16", scores="fp32").name == "fp16+scores=fp32"
    # A policy that widens activations widens what follows from them.
    assert make_precision("fp16", activation="fp32").scores == jnp.float32


def test_the_remedy_is_in_the_message():
    group = {"reason": "qk, layer 0", "arm": "cached", "value": "inf", "samples": 4, "first_position": 0}
    remedy, _ = search({"attn/q": 40.0, "attn/k": 40.0})
    said = describe_invalid({"invalid": [group], "remedy": describe_remedy(make_precision("fp16"), remedy)})
    assert said == (
        "4 at qk, layer 0 (cached, inf, from position 0); --scores=fp32 keeps it finite (tried on problem 3, 4 tokens)"
    )
    lost = dataclasses.replace(remedy, flags=None)
    assert describe_remedy(make_precision("fp16"), lost).endswith("use --precision=bf16")
    assert "use" not in describe_remedy(make_precision("fp32"), lost)
