"""Gemma-3 text models: QK norm, two RoPE bases, five windowed layers to one global."""

from jaxkv.config import ModelConfig


def _gemma3(
    name: str,
    *,
    layers: int,
    width: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 256,
    query_scalar: float = 256,
    vocab: int = 262144,
    window: int = 512,
    context: int = 32768,
) -> ModelConfig:
    return ModelConfig(
        name=name, family="gemma3", vocab_size=vocab, num_layers=layers, model_dim=width, mlp_dim=mlp, num_query_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, context_length=context, activation="gelu_tanh", norm_eps=1e-6, norm_offset=1.0,
        norm_round_first=False, post_norms=True, qk_norm=True, rope_theta=1e6, local_rope_theta=1e4, query_scale=query_scalar**-0.5,
        attn_softcap=None, final_softcap=None, window=window, window_pattern=(True,) * 5 + (False,), tie_embeddings=True,
        embed_scale=width**0.5,
    )  # fmt: skip


PRESETS = {
    c.name: c
    for c in (
        _gemma3("gemma3-270m", layers=18, width=640, mlp=2048, heads=4, kv_heads=1),
        _gemma3("gemma3-1b", layers=26, width=1152, mlp=6912, heads=4, kv_heads=1),
        _gemma3(
            "test-gemma3",
            layers=6,
            width=48,
            mlp=96,
            heads=4,
            kv_heads=1,
            head_dim=16,
            query_scalar=16,
            vocab=259,
            window=24,
            context=512,
        ),
    )
}
