"""LLaMA 2, Llama 3.x and the SmolLM2 models, which share an architecture: sizes, keys, config."""

from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig, RopeScaling
from jaxkv.models.hf_fields import HFConfig, Layers, Length, Size, read_fields, refuse
from jaxkv.models.tables import LLAMA_KEYS, Family, by_name


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
    scaling: RopeScaling | None = None,
    context: int = 4096,
    eps: float = 1e-5,
    tied: bool = False,
    head_dim: int | None = None,
) -> ModelConfig:
    """A LLaMA of the given sizes (arXiv 2307.09288, 2407.21783)."""
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
        rope_scaling=scaling,
    )


def _smollm2(name: str, layers: int, width: int, mlp: int, heads: int, kv_heads: int, theta: float) -> ModelConfig:
    sizes: dict[str, Any] = {"layers": layers, "width": width, "mlp": mlp, "heads": heads, "kv_heads": kv_heads}
    return llama_config(name, **sizes, theta=theta, vocab=49152, context=8192, tied=True)


def llama3_scaling(factor: float, original_context: int = 8192) -> RopeScaling:
    """The scaling of every released Llama 3.1, 3.2 and 3.3; they differ in the factor."""
    return RopeScaling(factor, 1.0, 4.0, original_context)


def _llama3(name: str, factor: float, **sizes: Any) -> ModelConfig:
    usual: dict[str, Any] = {"kv_heads": 8, "vocab": 128256, "theta": 5e5, "context": 131072}
    return llama_config(name, **(usual | sizes), scaling=llama3_scaling(factor))


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

PRESETS = by_name(
    llama_config("llama2-7b", layers=32, width=4096, mlp=11008, heads=32, kv_heads=32),
    llama_config("llama2-13b", layers=40, width=5120, mlp=13824, heads=40, kv_heads=40),
    llama_config("llama2-70b", layers=80, width=8192, mlp=28672, heads=64, kv_heads=8),
    _llama3("llama3.1-8b", layers=32, width=4096, mlp=14336, heads=32, factor=8.0),
    _llama3("llama3.2-1b", layers=16, width=2048, mlp=8192, heads=32, factor=32.0, tied=True),
    _llama3("llama3.2-3b", layers=28, width=3072, mlp=8192, heads=24, factor=32.0, tied=True),
    _smollm2("smollm2-135m", 30, 576, 1536, 9, 3, 100000.0),
    _smollm2("smollm2-360m", 32, 960, 2560, 15, 5, 100000.0),
    _smollm2("smollm2-1.7b", 24, 2048, 8192, 32, 32, 130000.0),
    llama_config("tiny-llama2", **TINY_SIZES, kv_heads=4),
    llama_config("test-llama2", **TEST_SIZES, kv_heads=4),
    llama_config("test-llama2-gqa", **TEST_SIZES, kv_heads=2, tied=True),
    # Waves of 6 to 350 tokens, so that some stay, some are blended and some are stretched.
    llama_config(
        "test-llama3", **TEST_SIZES, kv_heads=2, head_dim=16, tied=True, theta=100.0, scaling=llama3_scaling(8.0, 64)
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


def read_sizes(read: HFConfig, name: str) -> ModelConfig:
    """A LLaMA config from the fields that LLaMA, Mistral and Qwen share."""
    read.require_plain(name)
    read.require_unset(name, "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    if read.hidden_act not in ("silu", "swish"):
        raise refuse(name, "hidden_act", read.hidden_act, "is not implemented (known: silu, swish)")
    theta, scaling = read.rope(name)
    return llama_config(name, **read.sizes(), theta=theta, scaling=scaling)


def read_global(read: HFConfig, name: str) -> ModelConfig:
    """`read_sizes` of a family without windows."""
    if any(read.window_pattern(name, (False,))):
        raise refuse(name, "layer_types", "sliding_attention", "is not implemented for this family")
    return read_sizes(read, name)


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
