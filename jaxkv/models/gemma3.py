"""Gemma-3 text models: QK norm, two RoPE bases, five windowed layers to one global."""

from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.models import gemma2
from jaxkv.models.hf_fields import Layers, Length, Positive, Size, read_fields
from jaxkv.models.tables import QK_NORM_KEYS, Family, by_name

OWN: dict[str, Any] = {"family": "gemma3", "qk_norm": True}


def _gemma3(name: str, query_scalar: float = 256, **fields: Any) -> ModelConfig:
    """A Gemma-3 (arXiv 2503.19786)."""
    usual: dict[str, Any] = {
        "vocab_size": 262144,
        "window": 512,
        "context_length": 32768,
        "window_pattern": (True,) * 5 + (False,),
        "rope_theta": 1e6,
        "local_rope_theta": 1e4,
        "attn_softcap": None,
        "final_softcap": None,
    }
    return gemma2.gemma2_config(name, query_scalar, **(OWN | usual | fields))


class Fields(gemma2.Fields, kw_only=True, frozen=True):
    """Defaults of transformers 5, models/gemma3/configuration_gemma3.py (Gemma3TextConfig)."""

    vocab_size: Size = 262208
    max_position_embeddings: Length = 131072
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    rope_local_base_freq: Positive | None = None
    sliding_window_pattern: Layers | None = None


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json of model_type 'gemma3_text'. Raises UserError on options we do not compute."""
    read = read_fields(raw, Fields, name)
    theta, scaling = read.rope(name, 1e6, layer_type="full_attention")
    local_theta, _ = read.rope(name, 1e4, "rope_local_base_freq", "sliding_attention")
    period = read.sliding_window_pattern or 6
    pattern = read.window_pattern(name, (True,) * (period - 1) + (False,))
    ropes: dict[str, Any] = {"rope_theta": theta, "local_rope_theta": local_theta, "rope_scaling": scaling}
    return gemma2.read_sizes(read, name, pattern, **OWN, **ropes)


FAMILY = Family(
    name="gemma3",
    title="Gemma 3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=gemma2.KEYS | QK_NORM_KEYS,
    parse=parse_config,
    presets=by_name(
        _gemma3("gemma3-270m", num_layers=18, model_dim=640, mlp_dim=2048, num_query_heads=4, num_kv_heads=1),
        _gemma3("gemma3-1b", num_layers=26, model_dim=1152, mlp_dim=6912, num_query_heads=4, num_kv_heads=1),
        _gemma3("test-gemma3", 16, **gemma2.TEST_SIZES, num_layers=6, num_kv_heads=1),
    ),
    hub_ids={"gemma3-270m": "google/gemma-3-270m", "gemma3-1b": "google/gemma-3-1b-pt"},
    export=gemma2.export,
    two_rope_bases=True,
)
