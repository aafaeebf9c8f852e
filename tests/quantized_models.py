"""Small models whose heads suit every quantizer, and what tests of changed caches share."""

import dataclasses
import functools

from flax import nnx
from small_models import NEW_TOKENS, PRESETS, make_prompts, random_state, small_config

from jaxkv.config import ModelConfig, make_precision
from jaxkv.decode import Arms
from jaxkv.interventions.quantized_cache import Quantization
from jaxkv.interventions.quantizers import parse_cache_quant
from jaxkv.rollout import make_layout, make_rows

HEAD_DIM = 32
FAMILIES = tuple(PRESETS)
UNEQUAL = (4, 7, 6)


def wide_config(family: str = "mistral", layers: int = 2) -> ModelConfig:
    """Two layers with heads of 32 channels, and windows shorter than the texts where the family has them."""
    return dataclasses.replace(small_config(family, layers=layers), head_dim=HEAD_DIM, context_length=512)


@functools.cache
def wide_arms(family: str = "mistral", precision: str = "fp16", layers: int = 2, **options) -> Arms:
    """Arms of such a model."""
    return Arms(wide_config(family, layers), make_precision(precision), **options)


def quantized(spec: str | None) -> Quantization | None:
    """The change of a cache that `spec` asks for; None for None."""
    return None if spec is None else Quantization(parse_cache_quant(spec))


def set_up(prompts: list[list[int]], new_tokens: int, problems: list[int] | None = None, bucket: int = 8):
    """Layout, token buffer and rows of a batch."""
    layout = make_layout(prompts, new_tokens, bucket, wide_config())
    return layout, *make_rows(prompts, problems or list(range(len(prompts))), 0, layout)


@functools.cache
def weights_of(arms: Arms) -> nnx.State:
    """Prepared random weights."""
    return arms.prepare(random_state(arms.config, arms.precision.name))


def run_wide(arms: Arms, change=None, lengths=UNEQUAL, seeds=(0, 1, 2), new_tokens=NEW_TOKENS):
    """A free run over a changed cache with left padding: Rollout and cache, rows and layout. Seeds are the problems."""
    prompts = [make_prompts((n,), seed)[0] for n, seed in zip(lengths, seeds, strict=False)]
    layout, tokens, rows = set_up(prompts, new_tokens, list(seeds[: len(prompts)]))
    cache = arms.make_cache(rows, layout, change)
    return arms.run_cached_keeping(weights_of(arms), tokens, rows, layout, cache), rows, layout
