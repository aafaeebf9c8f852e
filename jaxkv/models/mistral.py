"""Mistral-7B: LLaMA with grouped queries; a window of 4096 in v0.1, none since v0.2."""

from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.models import llama
from jaxkv.models.hf_fields import Length, Size, read_fields, refuse
from jaxkv.models.llama import TEST_SIZES, TINY_SIZES, llama_config, read_sizes
from jaxkv.models.tables import LLAMA_KEYS, Family, by_name


def _windowed(window: int | None) -> dict[str, Any]:
    return {"family": "mistral", "window": window, "window_pattern": (window is not None,)}


def _mistral(name: str, window: int | None = None, **fields: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"num_layers": 32, "model_dim": 4096, "mlp_dim": 14336, "num_query_heads": 32}
    return llama_config(name, **sizes, num_kv_heads=8, context_length=32768, **_windowed(window), **fields)


class Fields(llama.Fields, kw_only=True, frozen=True):
    """Defaults of transformers 5, models/mistral/configuration_mistral.py."""

    intermediate_size: Size = 14336
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Length = 131072
    sliding_window: Length | None = 4096


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'mistral'. Raises UserError on options we do not compute."""
    read = read_fields(raw, Fields, name)
    config = read_sizes(read, name, **_windowed(read.sliding_window))
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
        _mistral("mistral-7b-v0.2", rope_theta=1e6),
        _mistral("mistral-7b-v0.3", rope_theta=1e6, vocab_size=32768),
        llama_config("tiny-mistral", **TINY_SIZES, num_kv_heads=2, **_windowed(64)),
        llama_config("test-mistral", **TEST_SIZES, num_kv_heads=2, **_windowed(24)),
    ),
    hub_ids={
        "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1",
        "mistral-7b-v0.2": "mistralai/Mistral-7B-Instruct-v0.2",
        "mistral-7b-v0.3": "mistralai/Mistral-7B-v0.3",
    },
    export=lambda config: {"hidden_act": "silu", "sliding_window": config.window},
    gguf=False,  # llama.cpp calls it llama
)
