"""What the family files share: the form of a key table, and what makes a family."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.config import ModelConfig

# Source name pattern -> our path; {i} is the layer. The elements are in the same order on both sides.
KeyTable = dict[str, str]

LLAMA_KEYS: KeyTable = {
    "model.embed_tokens.weight": "embed",
    "model.layers.{i}.input_layernorm.weight": "layers/{i}/attn_norm/weight",
    "model.layers.{i}.self_attn.q_proj.weight": "layers/{i}/attn/q",
    "model.layers.{i}.self_attn.k_proj.weight": "layers/{i}/attn/k",
    "model.layers.{i}.self_attn.v_proj.weight": "layers/{i}/attn/v",
    "model.layers.{i}.self_attn.o_proj.weight": "layers/{i}/attn/o",
    "model.layers.{i}.post_attention_layernorm.weight": "layers/{i}/mlp_norm/weight",
    "model.layers.{i}.mlp.gate_proj.weight": "layers/{i}/mlp/gate",
    "model.layers.{i}.mlp.up_proj.weight": "layers/{i}/mlp/up",
    "model.layers.{i}.mlp.down_proj.weight": "layers/{i}/mlp/down",
    "model.norm.weight": "final_norm/weight",
    "lm_head.weight": "head",
}
QK_NORM_KEYS: KeyTable = {
    f"model.layers.{{i}}.self_attn.{x}_norm.weight": f"layers/{{i}}/attn/{x}_norm/weight" for x in "qk"
}
QKV_BIAS_KEYS: KeyTable = {f"model.layers.{{i}}.self_attn.{x}_proj.bias": f"layers/{{i}}/attn/{x}_bias" for x in "qkv"}


@dataclasses.dataclass(frozen=True)
class Family:
    """What one family file adds up to."""

    name: str  # of ours, and llama.cpp's architecture where `gguf` is set
    title: str  # for people
    model_type: str  # in config.json
    architecture: str  # the class of transformers' model
    keys: KeyTable  # from Hugging Face names to ours
    parse: Callable[[Mapping[str, Any], str], ModelConfig]  # of a raw config.json and a name; raises UserError
    presets: Mapping[str, ModelConfig]  # by name; those named test-* and tiny-* have no hub id
    hub_ids: Mapping[str, str]  # preset -> the released weights; siblings of the same architecture load with it too
    export: Callable[[ModelConfig], dict[str, Any]]  # what transformers' config says beyond sizes and RoPE
    two_rope_bases: bool = False  # whether transformers' config has one for windowed layers
    gguf: bool = True  # whether llama.cpp has an architecture of this name


def by_name(*configs: ModelConfig) -> dict[str, ModelConfig]:
    """Configs by their names."""
    return {config.name: config for config in configs}


def source_shape(path: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of a parameter's source: head axes merged, q [N,H,D] -> [N*H,D], o [D,N,H] -> [D,N*H], biases to [N*H]."""
    if path.endswith("_bias"):
        return (math.prod(shape),)
    if len(shape) < 3:
        return tuple(shape)
    return (shape[0], math.prod(shape[1:])) if path.endswith("/o") else (math.prod(shape[:-1]), shape[-1])


def differing_fields(found: ModelConfig, wanted: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs differ, as (found, wanted); names do not count."""
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name != "name"]
    pairs = {name: (getattr(found, name), getattr(wanted, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
