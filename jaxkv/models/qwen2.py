"""Qwen2 and Qwen2.5, Coder models included: LLaMA with a bias on q, k and v."""

from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.models.hf_fields import HFConfig, Layers, Length, Size, read_fields
from jaxkv.models.llama import TEST_SIZES, llama_config, read_global
from jaxkv.models.tables import LLAMA_KEYS, QKV_BIAS_KEYS, Family, by_name

OWN: dict[str, Any] = {"family": "qwen2", "qkv_bias": True}


def _qwen2(name: str, **fields: Any) -> ModelConfig:
    """A Qwen2.5 (arXiv 2412.15115), as its instruction-tuned release has it."""
    usual: dict[str, Any] = {"vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "context_length": 32768}
    return llama_config(name, **(OWN | usual | {"tie_embeddings": True} | fields))


_SIZES: dict[str, dict[str, Any]] = {
    "0.5b": {"num_layers": 24, "model_dim": 896, "mlp_dim": 4864, "num_query_heads": 14, "num_kv_heads": 2},
    "1.5b": {"num_layers": 28, "model_dim": 1536, "mlp_dim": 8960, "num_query_heads": 12, "num_kv_heads": 2},
    "7b": {"num_layers": 28, "model_dim": 3584, "mlp_dim": 18944, "num_query_heads": 28, "num_kv_heads": 4}
    | {"vocab_size": 152064, "tie_embeddings": False},
}
_KINDS = {"qwen2.5": "Qwen/Qwen2.5", "qwen2.5-coder": "Qwen/Qwen2.5-Coder"}


class Fields(HFConfig, kw_only=True, frozen=True):
    """Defaults of transformers 5, models/qwen2/configuration_qwen2.py."""

    vocab_size: Size = 151936
    hidden_size: Size = 4096
    intermediate_size: Size = 22016
    num_hidden_layers: Layers = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = 32
    max_position_embeddings: Length = 32768
    hidden_act: str | None = "silu"
    use_sliding_window: bool = False  # without it `sliding_window` means nothing


def read_qwen(read: Fields, name: str, **fields: Any) -> ModelConfig:
    """A LLaMA config from the fields that Qwen2 and Qwen3 share; no released dense model has windows."""
    read.require_unset(name, "use_sliding_window")
    return read_global(read, name, **fields)


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'qwen2'. Raises UserError on options we do not compute."""
    return read_qwen(read_fields(raw, Fields, name), name, **OWN)


FAMILY = Family(
    name="qwen2",
    title="Qwen2.5",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=LLAMA_KEYS | QKV_BIAS_KEYS,
    parse=parse_config,
    presets=by_name(
        *(_qwen2(f"{kind}-{size}", **sizes) for kind in _KINDS for size, sizes in _SIZES.items()),
        _qwen2("test-qwen2", **TEST_SIZES, num_kv_heads=2),
    ),
    hub_ids={f"{kind}-{size}": f"{hub}-{size.upper()}-Instruct" for kind, hub in _KINDS.items() for size in _SIZES},
    export=lambda config: {"hidden_act": "silu", "use_sliding_window": False},
)
