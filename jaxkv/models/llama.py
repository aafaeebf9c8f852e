"""LLaMA 2, Llama 3.x and the SmolLM2 models, which share an architecture: sizes, keys, config."""

from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig, RopeScaling
from jaxkv.models.hf_fields import HFConfig, Layers, Length, Size, read_fields, refuse
from jaxkv.models.tables import LLAMA_KEYS, Family, by_name


def llama_config(name: str, **fields: Any) -> ModelConfig:
    """A LLaMA (arXiv 2307.09288, 2407.21783) with these fields of ModelConfig, the others as LLaMA 2 has them."""
    head_dim = fields.get("head_dim") or fields["model_dim"] // fields["num_query_heads"]
    usual: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 32000,
        "context_length": 4096,
        "activation": "silu",
        "norm_eps": 1e-5,
        "norm_offset": 0.0,
        "norm_round_first": True,
        "post_norms": False,
        "qk_norm": False,
        "rope_theta": 10000.0,
        "local_rope_theta": None,
        "query_scale": head_dim**-0.5,
        "attn_softcap": None,
        "final_softcap": None,
        "window": None,
        "window_pattern": (False,),
        "tie_embeddings": False,
        "embed_scale": 1.0,
    }
    return ModelConfig(name=name, **(usual | fields | {"head_dim": head_dim}))


def _smollm2(name: str, theta: float = 1e5, **fields: Any) -> ModelConfig:
    return llama_config(name, **fields, vocab_size=49152, context_length=8192, rope_theta=theta, tie_embeddings=True)


def llama3_scaling(factor: float, original_context: int = 8192) -> RopeScaling:
    """The scaling of every released Llama 3.1, 3.2 and 3.3; they differ in the factor."""
    return RopeScaling(factor, 1.0, 4.0, original_context)


def _llama3(name: str, factor: float, **fields: Any) -> ModelConfig:
    usual: dict[str, Any] = {"num_kv_heads": 8, "vocab_size": 128256, "rope_theta": 5e5, "context_length": 131072}
    return llama_config(name, **(usual | fields), rope_scaling=llama3_scaling(factor))


# Of the checkpoints that ship with the package, in every family.
TINY_SIZES: dict[str, Any] = {
    "num_layers": 6,
    "model_dim": 256,
    "mlp_dim": 512,
    "num_query_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "context_length": 1024,
    "tie_embeddings": True,
}
TEST_SIZES: dict[str, Any] = {
    "num_layers": 3,
    "model_dim": 48,
    "mlp_dim": 96,
    "num_query_heads": 4,
    "vocab_size": 259,
    "context_length": 512,
}

PRESETS = by_name(
    llama_config("llama2-7b", num_layers=32, model_dim=4096, mlp_dim=11008, num_query_heads=32, num_kv_heads=32),
    llama_config("llama2-13b", num_layers=40, model_dim=5120, mlp_dim=13824, num_query_heads=40, num_kv_heads=40),
    llama_config("llama2-70b", num_layers=80, model_dim=8192, mlp_dim=28672, num_query_heads=64, num_kv_heads=8),
    _llama3("llama3.1-8b", 8.0, num_layers=32, model_dim=4096, mlp_dim=14336, num_query_heads=32),
    _llama3("llama3.2-1b", 32.0, num_layers=16, model_dim=2048, mlp_dim=8192, num_query_heads=32, tie_embeddings=True),
    _llama3("llama3.2-3b", 32.0, num_layers=28, model_dim=3072, mlp_dim=8192, num_query_heads=24, tie_embeddings=True),
    _smollm2("smollm2-135m", num_layers=30, model_dim=576, mlp_dim=1536, num_query_heads=9, num_kv_heads=3),
    _smollm2("smollm2-360m", num_layers=32, model_dim=960, mlp_dim=2560, num_query_heads=15, num_kv_heads=5),
    _smollm2("smollm2-1.7b", 1.3e5, num_layers=24, model_dim=2048, mlp_dim=8192, num_query_heads=32, num_kv_heads=32),
    llama_config("tiny-llama2", **TINY_SIZES, num_kv_heads=4),
    llama_config("test-llama2", **TEST_SIZES, num_kv_heads=4),
    llama_config("test-llama2-gqa", **TEST_SIZES, num_kv_heads=2, tie_embeddings=True),
    # Waves of 6 to 350 tokens, so that some stay, some are blended and some are stretched.
    llama_config(
        "test-llama3",
        **TEST_SIZES,
        num_kv_heads=2,
        head_dim=16,
        tie_embeddings=True,
        rope_theta=100.0,
        rope_scaling=llama3_scaling(8.0, 64),
    ),
)


class Fields(HFConfig, kw_only=True, frozen=True):
    """Defaults of transformers 5, models/llama/configuration_llama.py."""

    vocab_size: Size = 32000
    hidden_size: Size = 4096
    intermediate_size: Size = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    max_position_embeddings: Length = 2048
    hidden_act: str | None = "silu"


def read_sizes(read: HFConfig, name: str, **fields: Any) -> ModelConfig:
    """A LLaMA config from what LLaMA, Mistral and Qwen share in config.json, and the fields of a family's own."""
    read.require_plain(name)
    read.require_unset(name, "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    if read.hidden_act not in ("silu", "swish"):
        raise refuse(name, "hidden_act", read.hidden_act, "is not implemented (known: silu, swish)")
    theta, scaling = read.rope(name)
    return llama_config(name, **read.sizes(), rope_theta=theta, rope_scaling=scaling, **fields)


def read_global(read: HFConfig, name: str, **fields: Any) -> ModelConfig:
    """`read_sizes` of a family without windows."""
    if any(read.window_pattern(name, (False,))):
        raise refuse(name, "layer_types", "sliding_attention", "is not implemented for this family")
    return read_sizes(read, name, **fields)


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'llama'. Raises UserError on options we do not compute."""
    read = read_fields(raw, Fields, name)
    read.require_unset(name, "sliding_window")
    return read_global(read, name)


FAMILY = Family(
    name="llama",
    title="LLaMA 2, Llama 3 and SmolLM2",
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=LLAMA_KEYS,
    parse=parse_config,
    presets=PRESETS,
    hub_ids={
        "llama2-7b": "meta-llama/Llama-2-7b-hf",
        "llama2-13b": "meta-llama/Llama-2-13b-hf",
        "llama2-70b": "meta-llama/Llama-2-70b-hf",
        "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
        "llama3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
        "llama3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
        "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
        "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    },
    export=lambda config: {"hidden_act": "silu"},
)
