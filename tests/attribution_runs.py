"""Small models and records of attribution for tests. Programs are compiled, and records made, once a process."""

import functools

import jax.numpy as jnp
import numpy as np
from small_models import STOP_IDS, make_prompts, run_all, small_config, small_state

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.attribution.record import VARIANTS
from jaxkv.experiments.attribution.run import Attribution, run_pair
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.logits import bits
from jaxkv.models.alignment import align

TILE = 4
SPEC = RunSpec(new_tokens=12, batch_size=2, padding="left", bucket=8)


def make_arms(family="mistral", precision="fp16", layers=2):
    return Arms(small_config(family, layers=layers), make_precision(precision), stop_ids=STOP_IDS)


def differing(arms, state, variant, reference, rows, layout):
    """Steps at which a variant's arms differ in a bit."""
    pair = run_pair(arms, state, reference, rows, layout, align(TILE, VARIANTS[variant]))
    counted = np.arange(layout.new_tokens) < np.asarray(reference.lengths)[:, None]
    assert counted.sum() > 8
    differs = bits(pair.cached.logits) != bits(pair.uncached.logits)
    return int((np.asarray(jnp.any(differs, axis=-1)) & counted).sum())


ITEMS = [Item(4, tuple(make_prompts((9,))[0]), ""), Item(7, tuple(make_prompts((6,))[0]), "")]


@functools.cache
def small_run():
    """Records of every variant of a small model, with programs and weights."""
    arms = make_arms("mistral", "fp32", layers=1)
    state = arms.prepare(small_state("mistral", layers=1))
    return arms, state, run_all(Attribution(arms, state, SPEC, TILE), ITEMS)
