"""The transformers config of one of ours: the inverse of families.parse_config. Needs no torch."""

from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.errors import UserError
from jaxkv.models.families import FAMILIES, parse_config
from jaxkv.models.tables import differing_fields


def transformers_config(config: ModelConfig) -> Any:
    """The transformers config of the same architecture. Raises UserError with the fields that it cannot express."""
    settings = _settings(config)
    found = parse_config(settings.to_dict(), config.name)
    odd = differing_fields(found, config)
    layers = range(config.num_layers)
    if [found.layer_window(layer) for layer in layers] == [config.layer_window(layer) for layer in layers]:
        odd.pop("window_pattern", None)  # written another way
    if odd:
        fields = ", ".join(f"{key} {wanted} (it says {said})" for key, (said, wanted) in odd.items())
        raise UserError(
            f"{config.name}: {type(settings).__name__} of transformers cannot express {fields}; "
            "keep the checkpoint in our own format"
        )
    return settings


def _settings(config: ModelConfig) -> Any:
    import transformers

    family = FAMILIES[config.family]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    if family.two_rope_bases:
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
        rope = {"full_attention": rope, "sliding_attention": local}
    sizes: dict[str, Any] = {
        "architectures": [family.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": rope,
    }
    return transformers.AutoConfig.for_model(family.model_type, **sizes, **family.export(config))
