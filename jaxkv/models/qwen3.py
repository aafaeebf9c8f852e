"""Qwen3, the dense models: LLaMA with normed heads of q and k, and a head dim of its own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.models import qwen2
from jaxkv.models.hf_fields import Size, read_fields
from jaxkv.models.llama import TEST_SIZES, llama_config
from jaxkv.models.tables import LLAMA_KEYS, QK_NORM_KEYS, Family, by_name


def _normed(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, family="qwen3", qk_norm=True)


def _qwen3(name: str, **sizes: Any) -> ModelConfig:
    """A Qwen3 of the given sizes (arXiv 2505.09388), as its post-trained release has them."""
    usual: dict[str, Any] = {"vocab": 151936, "theta": 1e6, "eps": 1e-6, "context": 40960, "kv_heads": 8}
    return _normed(llama_config(name, **(usual | sizes), head_dim=128))


class Fields(qwen2.Fields, kw_only=True, frozen=True):
    """Defaults of transformers 5, models/qwen3/configuration_qwen3.py."""

    head_dim: Size = 128


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'qwen3'. Raises UserError on options we do not compute."""
    return _normed(qwen2.read_qwen(read_fields(raw, Fields, name), name))


FAMILY = Family(
    name="qwen3",
    title="Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=LLAMA_KEYS | QK_NORM_KEYS,
    parse=parse_config,
    presets=by_name(
        _qwen3("qwen3-0.6b", layers=28, width=1024, mlp=3072, heads=16, tied=True),
        _qwen3("qwen3-1.7b", layers=28, width=2048, mlp=6144, heads=16, tied=True),
        _qwen3("qwen3-8b", layers=36, width=4096, mlp=12288, heads=32),
        _normed(llama_config("test-qwen3", **TEST_SIZES, kv_heads=2, head_dim=16, eps=1e-6, theta=1e6, tied=True)),
    ),
    hub_ids={f"qwen3-{size}": f"Qwen/Qwen3-{size.upper()}" for size in ("0.6b", "1.7b", "8b")},
    export=qwen2.FAMILY.export,
)
