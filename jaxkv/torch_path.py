"""The PyTorch path: transformers' own models of our configs. Needs the `torch` extra; imported only when asked for."""

from typing import Any

from jaxkv.config import ModelConfig


def transformers_config(config: ModelConfig) -> Any:
    """Returns the transformers config of the same architecture."""
    import transformers

    common: dict[str, Any] = {
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
