"""Mistral-7B: LLaMA with grouped queries; a window of 4096 in v0.1, none since v0.2."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.models import llama
from jaxkv.models.hf_fields import Length, Size, read_fields, refuse
from jaxkv.models.llama import TEST_SIZES, TINY_SIZES, llama_config, read_sizes
from jaxkv.models.tables import LLAMA_KEYS, Family, by_name


def _windowed(config: ModelConfig, window: int | None) -> ModelConfig:
    pattern = (window is not None,)
    return dataclasses.replace(config, family="mistral", window=window, window_pattern=pattern)


def _mistral(name: str, vocab: int = 32000, theta: float = 10000.0, window: int | None = None) -> ModelConfig:
    sizes = llama_config(
        name, layers=32, width=4096, mlp=14336, heads=32, kv_heads=8, vocab=vocab, theta=theta, context=32768
    )
    return _windowed(sizes, window)


class Fields(llama.Fields, kw_only=True, frozen=True):
    """Defaults of transformers 5, models/mistral/configuration_mistral.py."""

    intermediate_size: Size = 14336
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Length = 131072
    sliding_window: Length | None = 4096


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'mistral'. Raises UserError on options we do not compute."""
    read = read_fields(raw, Fields, name)
    config = _windowed(read_sizes(read, name), read.sliding_window)
    # transformers' Mistral has one kind of layer; layer_types that say otherwise belong to Ministral.
    if read.window_pattern(name, config.window_pattern) != config.window_pattern:
        raise refuse(name, "layer_types", "mixed", "is not implemented for Mistral")
    return config


FAMILY = Family(
    name="mistral",
    title="Mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=LLAMA_KEYS,
    parse=parse_config,
    presets=by_name(
        _mistral("mistral-7b-v0.1", window=4096),
        _mistral("mistral-7b-v0.2", theta=1e6),
        _mistral("mistral-7b-v0.3", theta=1e6, vocab=32768),
        _windowed(llama_config("tiny-mistral", **TINY_SIZES, kv_heads=2), 64),
        _windowed(llama_config("test-mistral", **TEST_SIZES, kv_heads=2), 24),
    ),
    hub_ids={
        "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1",
        "mistral-7b-v0.2": "mistralai/Mistral-7B-Instruct-v0.2",
        "mistral-7b-v0.3": "mistralai/Mistral-7B-v0.3",
    },
    export=lambda config: {"hidden_act": "silu", "sliding_window": config.window},
    gguf=False,  # llama.cpp calls it llama
)
