"""fp16 that overflows: the part of the policy that mends it is found by running, and named in the report."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from small_models import VOCAB, small_config, small_state

from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.experiments.divergence.wording import describe_invalid
from jaxkv.experiments.overflow import find_remedy

ITEM = Item(3, tuple(np.random.default_rng(0).integers(12, VOCAB, 9).tolist()), "a")
SPEC = RunSpec(new_tokens=4, bucket=8)


@functools.cache
def make_arms(layers: int, **parts: str) -> Arms:
    return Arms(small_config("llama", layers=layers), make_precision("fp16", **parts))


def scaled(factors: dict[str, float], layers: int):
    """Weights in fp16, those whose path ends so multiplied."""
    state, leaves = small_state("llama", layers=layers), {}
    for path, leaf in flat_paths(state).items():
        factor = next((f for end, f in factors.items() if path.endswith(end)), 1.0)
        leaves[path] = jnp.asarray(leaf[...] * factor, jnp.float16)
    return with_leaves(state, leaves)


def search(factors: dict[str, float], precision: str = "fp16", layers: int = 1):
    """What is said, and the parts that were tried."""
    tried = []

    def make(parts):
        tried.append(dict(parts))
        arms = make_arms(layers, **parts)
        return arms, arms.prepare(scaled(factors, layers))

    return find_remedy(make, ITEM, SPEC, make_precision(precision)), tried


SCORES = {"attn/q": 40.0, "attn/k": 40.0}  # q·k near 1e5, q and k near 1e3
PRODUCT = {"mlp/down": 4000.0}  # an output of the MLP: a product, which no part alone widens


@pytest.mark.parametrize(
    ("factors", "layers", "said", "tries"),
    [
        ({}, 1, "its numbers did not break again", 1),
        (SCORES, 1, "--scores=fp32 keeps it finite", 2),
        # Each branch stays below 65504; their sum on the stream, after two layers, does not.
        pytest.param(
            SCORES | {"attn/o": 3000.0, "mlp/down": 300.0, "embed": 1000.0},
            2,
            "--scores=fp32 --residual=fp32 keeps it finite",
            3,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_parts_that_overflow_are_found(factors, layers, said, tries):
    remedy, tried = search(factors, layers=layers)
    assert remedy == f"{said} (tried on problem 3, 4 tokens)"
    assert tried[0] == {}
    assert len(tried) == tries


MENDS = {"fp16": "; use --precision=bf16", "bf16": ": the weights may be damaged"}


@pytest.mark.parametrize("precision", MENDS)
def test_what_no_part_mends_is_said(precision):
    remedy, _ = search(PRODUCT, precision)
    assert remedy == f"no part of the policy alone mends it (tried on problem 3, 4 tokens){MENDS[precision]}"


def test_wider_scores_change_no_record_that_does_not_name_them():
    usual = make_precision("fp16")
    assert "scores" not in usual.to_json()
    assert make_precision("fp16", scores="fp32").to_json()["scores"] == "float32"
    assert make_precision("fp16", scores="fp32").name == "fp16+scores=fp32"
    # A policy that widens activations widens what follows from them.
    assert make_precision("fp16", activation="fp32").scores == jnp.float32


def test_the_remedy_is_in_the_message():
    group = {"reason": "qk, layer 0", "arm": "cached", "value": "inf", "samples": 4, "first_position": 0}
    said = describe_invalid({"invalid": [group], "remedy": "--scores=fp32 keeps it finite"})
    assert said == "4 at qk, layer 0 (cached, inf, from position 0); --scores=fp32 keeps it finite"
