"""Gemma-2: softcaps, alternating window, norms before and after, tied and scaled embedding, its own query scale."""

from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.errors import UserError
from jaxkv.models.hf_fields import HFConfig, Layers, Length, Positive, Size, read_fields, refuse
from jaxkv.models.llama import TINY_SIZES, llama_config
from jaxkv.models.tables import LLAMA_KEYS, Family, KeyTable, by_name

KEYS: KeyTable = {
    **LLAMA_KEYS,
    "model.layers.{i}.post_attention_layernorm.weight": "layers/{i}/attn_post_norm/weight",
    "model.layers.{i}.pre_feedforward_layernorm.weight": "layers/{i}/mlp_norm/weight",
    "model.layers.{i}.post_feedforward_layernorm.weight": "layers/{i}/mlp_post_norm/weight",
}


def gemma2_config(name: str, query_scalar: float = 256, **fields: Any) -> ModelConfig:
    """A Gemma-2 (arXiv 2408.00118) with these fields of ModelConfig, the others as usual."""
    usual: dict[str, Any] = {
        "family": "gemma2",
        "vocab_size": 256000,
        "head_dim": 256,
        "context_length": 8192,
        "activation": "gelu_tanh",
        "norm_eps": 1e-6,
        "norm_offset": 1.0,
        "norm_round_first": False,
        "post_norms": True,
        "query_scale": query_scalar**-0.5,
        "attn_softcap": 50.0,
        "final_softcap": 30.0,
        "window": 4096,
        "window_pattern": (True, False),
        "tie_embeddings": True,
        "embed_scale": fields["model_dim"] ** 0.5,
    }
    return llama_config(name, **(usual | fields))


TEST_SIZES: dict[str, Any] = {
    "model_dim": 48,
    "mlp_dim": 96,
    "num_query_heads": 4,
    "head_dim": 16,
    "vocab_size": 259,
    "window": 24,
    "context_length": 512,
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


def read_sizes(read: Fields, name: str, pattern: tuple[bool, ...], **fields: Any) -> ModelConfig:
    """A Gemma-2 config from what Gemma-2 and Gemma-3 share in config.json, and the fields of a family's own."""
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
        attn_softcap=read.attn_logit_softcapping,
        final_softcap=read.final_logit_softcapping,
        **fields,
    )


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'gemma2'. Raises UserError on options we do not compute."""
    read = read_fields(raw, Fields, name)
    theta, scaling = read.rope(name)
    pattern = read.window_pattern(name, (True, False))
    return read_sizes(read, name, pattern, rope_theta=theta, rope_scaling=scaling)


def export(config: ModelConfig) -> dict[str, Any]:
    """What transformers' config says beyond sizes and RoPE."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "sliding_window": config.window,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in config.windowed_layers],
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
        gemma2_config("gemma2-2b", num_layers=26, model_dim=2304, mlp_dim=9216, num_query_heads=8, num_kv_heads=4),
        gemma2_config("gemma2-9b", num_layers=42, model_dim=3584, mlp_dim=14336, num_query_heads=16, num_kv_heads=8),
        gemma2_config(
            "gemma2-27b",
            144,
            num_layers=46,
            model_dim=4608,
            mlp_dim=36864,
            num_query_heads=32,
            num_kv_heads=16,
            head_dim=128,
        ),
        gemma2_config("tiny-gemma2", 64, **TINY_SIZES, num_kv_heads=2, window=64),
        gemma2_config("test-gemma2", 24, **TEST_SIZES, num_layers=4, num_kv_heads=2),
    ),
    hub_ids={f"gemma2-{size}": f"google/gemma-2-{size}" for size in ("2b", "9b", "27b")},
    export=export,
)
