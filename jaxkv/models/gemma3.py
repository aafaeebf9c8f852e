"""Gemma-3 text models: QK norm, two RoPE bases, five windowed layers to one global."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.models import gemma2
from jaxkv.models.tables import HFConfig, KeyTable

KEYS: KeyTable = {
    **gemma2.KEYS,
    "model.layers.{i}.self_attn.q_norm.weight": "layers/{i}/attn/q_norm/weight",
    "model.layers.{i}.self_attn.k_norm.weight": "layers/{i}/attn/k_norm/weight",
}


def _gemma3(name: str, local_theta: float = 1e4, **sizes: Any) -> ModelConfig:
    """A Gemma-3 of the given sizes (arXiv 2503.19786)."""
    usual: dict[str, Any] = {
        "vocab": 262144,
        "window": 512,
        "context": 32768,
        "window_pattern": (True,) * 5 + (False,),
        "theta": 1e6,
        "attn_softcap": None,
        "final_softcap": None,
    }
    base = gemma2.gemma2_config(name, **(usual | sizes))
    return dataclasses.replace(base, family="gemma3", qk_norm=True, local_rope_theta=local_theta)


PRESETS = {
    c.name: c
    for c in (
        _gemma3("gemma3-270m", layers=18, width=640, mlp=2048, heads=4, kv_heads=1),
        _gemma3("gemma3-1b", layers=26, width=1152, mlp=6912, heads=4, kv_heads=1),
        _gemma3("test-gemma3", **gemma2.TEST_SIZES, layers=6, kv_heads=1, query_scalar=16),
    )
}

# transformers 5, models/gemma3/configuration_gemma3.py (Gemma3TextConfig)
DEFAULTS: dict[str, Any] = {
    **gemma2.DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'gemma3_text'. Raises UserError on options we do not compute."""
    read = HFConfig(raw, name, DEFAULTS)
    theta = read.rope_theta(1e6, layer_type="full_attention")
    local_theta = read.rope_theta(1e4, key="rope_local_base_freq", layer_type="sliding_attention")
    period = raw.get("sliding_window_pattern") or 6
    pattern = read.window_pattern((True,) * (period - 1) + (False,))
    base = gemma2.read_sizes(read, theta, pattern)
    return dataclasses.replace(base, family="gemma3", qk_norm=True, local_rope_theta=local_theta)
