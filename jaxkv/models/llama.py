"""LLaMA-2 and the SmolLM2 models, which share its architecture: sizes, keys, config."""

from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.models.tables import LLAMA_KEYS, HFConfig

KEYS = LLAMA_KEYS


def llama_config(
    name: str,
    *,
    layers: int,
    width: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    vocab: int = 32000,
    theta: float = 10000.0,
    context: int = 4096,
    eps: float = 1e-5,
    tied: bool = False,
    head_dim: int | None = None,
) -> ModelConfig:
    """A LLaMA-2 of the given sizes (arXiv 2307.09288)."""
    head_dim = head_dim or width // heads
    return ModelConfig(
        name=name,
        family="llama",
        vocab_size=vocab,
        num_layers=layers,
        model_dim=width,
        mlp_dim=mlp,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        activation="silu",
        norm_eps=eps,
        norm_offset=0.0,
        norm_round_first=True,
        post_norms=False,
        qk_norm=False,
        rope_theta=theta,
        local_rope_theta=None,
        query_scale=head_dim**-0.5,
        attn_softcap=None,
        final_softcap=None,
        window=None,
        window_pattern=(False,),
        tie_embeddings=tied,
        embed_scale=1.0,
    )


def _smollm2(name: str, layers: int, width: int, mlp: int, heads: int, kv_heads: int, theta: float) -> ModelConfig:
    sizes: dict[str, Any] = {"layers": layers, "width": width, "mlp": mlp, "heads": heads, "kv_heads": kv_heads}
    return llama_config(name, **sizes, theta=theta, vocab=49152, context=8192, tied=True)


# Of the checkpoints that ship with the package, in every family.
TINY_SIZES: dict[str, Any] = {
    "layers": 6,
    "width": 256,
    "mlp": 512,
    "heads": 4,
    "head_dim": 64,
    "vocab": 1024,
    "context": 1024,
    "tied": True,
}

TEST_SIZES: dict[str, Any] = {"layers": 3, "width": 48, "mlp": 96, "heads": 4, "vocab": 259, "context": 512}

PRESETS = {
    c.name: c
    for c in (
        llama_config("llama2-7b", layers=32, width=4096, mlp=11008, heads=32, kv_heads=32),
        llama_config("llama2-13b", layers=40, width=5120, mlp=13824, heads=40, kv_heads=40),
        llama_config("llama2-70b", layers=80, width=8192, mlp=28672, heads=64, kv_heads=8),
        _smollm2("smollm2-135m", 30, 576, 1536, 9, 3, 100000.0),
        _smollm2("smollm2-360m", 32, 960, 2560, 15, 5, 100000.0),
        _smollm2("smollm2-1.7b", 24, 2048, 8192, 32, 32, 130000.0),
        llama_config("tiny-llama2", **TINY_SIZES, kv_heads=4),
        llama_config("test-llama2", **TEST_SIZES, kv_heads=4),
        llama_config("test-llama2-gqa", **TEST_SIZES, kv_heads=2, tied=True),
    )
}

# transformers 5, models/llama/configuration_llama.py
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": None,
}


def read_sizes(read: HFConfig) -> ModelConfig:
    """A LLaMA-2 config from the fields that LLaMA and Mistral share."""
    read.require_plain()
    read.require_unset("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    read.activation("hidden_act", {"silu": "silu", "swish": "silu"})
    return llama_config(
        read.name,
        layers=read["num_hidden_layers"],
        width=read["hidden_size"],
        mlp=read["intermediate_size"],
        heads=read["num_attention_heads"],
        kv_heads=read["num_key_value_heads"] or read["num_attention_heads"],
        head_dim=read["head_dim"],
        vocab=read["vocab_size"],
        theta=read.rope_theta(),
        context=read["max_position_embeddings"],
        eps=read["rms_norm_eps"],
        tied=read["tie_word_embeddings"],
    )


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'llama'. Raises UserError on options we do not compute."""
    read = HFConfig(raw, name, DEFAULTS)
    read.require_unset("sliding_window")
    if any(read.window_pattern((False,))):
        raise read.refuse("layer_types", "sliding_attention", "is not implemented for LLaMA")
    return read_sizes(read)
