"""Small models whose heads suit every quantizer, and what tests of changed caches share."""

import dataclasses
import functools

import numpy as np
from flax import nnx
from small_models import PRESETS, small_config

from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import ModelConfig, make_precision
from jaxkv.decode import Arms
from jaxkv.interventions.quantized_cache import Quantization
from jaxkv.interventions.quantizers import parse_cache_quant
from jaxkv.models.decoder import Decoder
from jaxkv.rollout import make_layout, make_rows

HEAD_DIM = 32
FAMILIES = tuple(PRESETS)


def wide_config(family: str = "mistral", layers: int = 2) -> ModelConfig:
    """Two layers with heads of 32 channels, and windows shorter than the texts where the family has them."""
    return dataclasses.replace(small_config(family, layers=layers), head_dim=HEAD_DIM, context_length=512)


@functools.cache
def wide_state(family: str = "mistral", precision: str = "fp16", layers: int = 2) -> nnx.State:
    """Random weights so large that the next token depends on the whole text."""
    state = nnx.split(Decoder(wide_config(family, layers), make_precision("fp32"), nnx.Rngs(1)))[1]
    rng = np.random.default_rng(2)
    leaves = {}
    for path, leaf in flat_paths(state).items():
        noise = rng.normal(size=leaf[...].shape) * 0.3
        param = make_precision(precision).param
        leaves[path] = (leaf[...] + noise if leaf[...].ndim == 1 else noise).astype(param)
    return with_leaves(state, leaves)


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
