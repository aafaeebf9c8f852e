"""The transformers config of one of ours: the inverse of families.parse_config. Needs no torch."""

from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.errors import UserError
from jaxkv.models.families import parse_config
from jaxkv.models.tables import differing_fields

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def transformers_config(config: ModelConfig) -> Any:
    """Returns the transformers config of the same architecture.

    Raises:
      UserError: fields that the family's transformers config cannot express, by name.
    """
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

    common: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
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
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.family == "llama":
        return transformers.LlamaConfig(**common, hidden_act="silu", rope_parameters=rope)
    if config.family == "mistral":
        return transformers.MistralConfig(
            **common, hidden_act="silu", rope_parameters=rope, sliding_window=config.window
        )
    windowed = [config.layer_window(layer) is not None for layer in range(config.num_layers)]
    gemma = common | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "sliding_window": config.window,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
        "attn_logit_softcapping": config.attn_softcap,
        "final_logit_softcapping": config.final_softcap,
    }
    if config.family == "gemma2":
        return transformers.Gemma2Config(**gemma, rope_parameters=rope)
    local = rope | {"rope_theta": config.local_rope_theta}
    return transformers.Gemma3TextConfig(**gemma, rope_parameters={"full_attention": rope, "sliding_attention": local})
