"""Gemma-2: softcaps, alternating window, norms before and after, tied and scaled embedding, its own query scale."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.errors import UserError
from jaxkv.models.hf_fields import HFConfig, Layers, Length, Positive, Size, read_fields, refuse
from jaxkv.models.llama import TINY_SIZES
from jaxkv.models.tables import LLAMA_KEYS, Family, KeyTable, by_name

KEYS: KeyTable = {
    **LLAMA_KEYS,
    "model.layers.{i}.post_attention_layernorm.weight": "layers/{i}/attn_post_norm/weight",
    "model.layers.{i}.pre_feedforward_layernorm.weight": "layers/{i}/mlp_norm/weight",
    "model.layers.{i}.post_feedforward_layernorm.weight": "layers/{i}/mlp_post_norm/weight",
}


def gemma2_config(
    name: str,
    *,
    layers: int,
    width: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 256,
    query_scalar: float = 256,
    vocab: int = 256000,
    window: int | None = 4096,
    window_pattern: tuple[bool, ...] = (True, False),
    context: int = 8192,
    theta: float = 10000.0,
    eps: float = 1e-6,
    attn_softcap: float | None = 50.0,
    final_softcap: float | None = 30.0,
    tied: bool = True,
) -> ModelConfig:
    """A Gemma-2 of the given sizes (arXiv 2408.00118)."""
    return ModelConfig(
        name=name,
        family="gemma2",
        vocab_size=vocab,
        num_layers=layers,
        model_dim=width,
        mlp_dim=mlp,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        activation="gelu_tanh",
        norm_eps=eps,
        norm_offset=1.0,
        norm_round_first=False,
        post_norms=True,
        qk_norm=False,
        rope_theta=theta,
        local_rope_theta=None,
        query_scale=query_scalar**-0.5,
        attn_softcap=attn_softcap,
        final_softcap=final_softcap,
        window=window,
        window_pattern=window_pattern,
        tie_embeddings=tied,
        embed_scale=width**0.5,
    )


TEST_SIZES: dict[str, Any] = {
    "width": 48,
    "mlp": 96,
    "heads": 4,
    "head_dim": 16,
    "vocab": 259,
    "window": 24,
    "context": 512,
}


class Fields(HFConfig, kw_only=True, frozen=True):
    """Defaults of transformers 5, models/gemma2/configuration_gemma2.py."""

    vocab_size: Size = 256000
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: Size = 8
    num_key_value_heads: Size = 4
    max_position_embeddings: Length = 8192
    head_dim: Size = 256
    tie_word_embeddings: bool = True
    hidden_activation: str | None = "gelu_pytorch_tanh"
    sliding_window: Length | None = 4096
    query_pre_attn_scalar: Positive = 256
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0


def read_sizes(read: Fields, name: str, theta: float, pattern: tuple[bool, ...]) -> ModelConfig:
    """A Gemma-2 config from the fields that Gemma-2 and Gemma-3 share."""
    read.require_plain(name)
    # transformers computes `hidden_activation`; Gemma configs keep `hidden_act` for old readers, 'gelu' meaning tanh.
    if read.hidden_activation != "gelu_pytorch_tanh":
        raise refuse(name, "hidden_activation", read.hidden_activation, "is not implemented (known: gelu_pytorch_tanh)")
    if read.hidden_act not in (None, "gelu", "gelu_pytorch_tanh"):
        raise refuse(name, "hidden_act", read.hidden_act)
    if any(pattern) and read.sliding_window is None:
        raise UserError(f"{name}: the config has windowed layers but sliding_window is null; fix the config")
    return gemma2_config(
        name,
        **read.sizes(),
        query_scalar=read.query_pre_attn_scalar,
        window=read.sliding_window,
        window_pattern=pattern,
        theta=theta,
        attn_softcap=read.attn_logit_softcapping,
        final_softcap=read.final_logit_softcapping,
    )


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'gemma2'. Raises UserError on options we do not compute."""
    read = read_fields(raw, Fields, name)
    theta, scaling = read.rope(name)
    config = read_sizes(read, name, theta, read.window_pattern(name, (True, False)))
    return dataclasses.replace(config, rope_scaling=scaling)


def export(config: ModelConfig) -> dict[str, Any]:
    """What transformers' config says beyond sizes and RoPE."""
    windowed = [config.layer_window(layer) is not None for layer in range(config.num_layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "sliding_window": config.window,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
        "attn_logit_softcapping": config.attn_softcap,
        "final_logit_softcapping": config.final_softcap,
    }


FAMILY = Family(
    name="gemma2",
    title="Gemma 2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=KEYS,
    parse=parse_config,
    presets=by_name(
        gemma2_config("gemma2-2b", layers=26, width=2304, mlp=9216, heads=8, kv_heads=4),
        gemma2_config("gemma2-9b", layers=42, width=3584, mlp=14336, heads=16, kv_heads=8),
        gemma2_config(
            "gemma2-27b", layers=46, width=4608, mlp=36864, heads=32, kv_heads=16, head_dim=128, query_scalar=144
        ),
        gemma2_config("tiny-gemma2", **TINY_SIZES, kv_heads=2, query_scalar=64, window=64),
        gemma2_config("test-gemma2", **TEST_SIZES, layers=4, kv_heads=2, query_scalar=24),
    ),
    hub_ids={f"gemma2-{size}": f"google/gemma-2-{size}" for size in ("2b", "9b", "27b")},
    export=export,
)
