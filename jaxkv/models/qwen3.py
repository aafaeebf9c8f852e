"""Qwen3, the dense models: LLaMA with normed heads of q and k, and a head dim of its own."""

from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.models import qwen2
from jaxkv.models.hf_fields import Size, read_fields
from jaxkv.models.llama import TEST_SIZES, llama_config
from jaxkv.models.tables import LLAMA_KEYS, QK_NORM_KEYS, Family, by_name

OWN: dict[str, Any] = {"family": "qwen3", "qk_norm": True}


def _qwen3(name: str, **fields: Any) -> ModelConfig:
    """A Qwen3 (arXiv 2505.09388), as its post-trained release has it."""
    usual: dict[str, Any] = {"vocab_size": 151936, "rope_theta": 1e6, "norm_eps": 1e-6, "context_length": 40960}
    return llama_config(name, **(OWN | usual | {"num_kv_heads": 8, "head_dim": 128} | fields))


class Fields(qwen2.Fields, kw_only=True, frozen=True):
    """Defaults of transformers 5, models/qwen3/configuration_qwen3.py."""

    head_dim: Size = 128


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'qwen3'. Raises UserError on options we do not compute."""
    return qwen2.read_qwen(read_fields(raw, Fields, name), name, **OWN)


FAMILY = Family(
    name="qwen3",
    title="Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=LLAMA_KEYS | QK_NORM_KEYS,
    parse=parse_config,
    presets=by_name(
        _qwen3("qwen3-0.6b", num_layers=28, model_dim=1024, mlp_dim=3072, num_query_heads=16, tie_embeddings=True),
        _qwen3("qwen3-1.7b", num_layers=28, model_dim=2048, mlp_dim=6144, num_query_heads=16, tie_embeddings=True),
        _qwen3("qwen3-8b", num_layers=36, model_dim=4096, mlp_dim=12288, num_query_heads=32),
        _qwen3("test-qwen3", **TEST_SIZES, num_kv_heads=2, head_dim=16, tie_embeddings=True),
    ),
    hub_ids={f"qwen3-{size}": f"Qwen/Qwen3-{size.upper()}" for size in ("0.6b", "1.7b", "8b")},
    export=qwen2.FAMILY.export,
)
