"""Gemma-2: softcaps, alternating window, norms before and after, tied and scaled embedding, its own query scale."""

from jaxkv.config import ModelConfig


def _gemma2(
    name: str,
    *,
    layers: int,
    width: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    query_scalar: float,
    vocab: int = 256000,
    window: int = 4096,
    context: int = 8192,
    attn_softcap: float = 50.0,
    final_softcap: float = 30.0,
) -> ModelConfig:
    return ModelConfig(
        name=name, family="gemma2", vocab_size=vocab, num_layers=layers, model_dim=width, mlp_dim=mlp, num_query_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, context_length=context, activation="gelu_tanh", norm_eps=1e-6, norm_offset=1.0,
        norm_round_first=False, post_norms=True, qk_norm=False, rope_theta=10000.0, local_rope_theta=None, query_scale=query_scalar**-0.5,
        attn_softcap=attn_softcap, final_softcap=final_softcap, window=window, window_pattern=(True, False), tie_embeddings=True,
        embed_scale=width**0.5,
    )  # fmt: skip


PRESETS = {
    c.name: c
    for c in (
        _gemma2("gemma2-2b", layers=26, width=2304, mlp=9216, heads=8, kv_heads=4, head_dim=256, query_scalar=256),
        _gemma2("gemma2-9b", layers=42, width=3584, mlp=14336, heads=16, kv_heads=8, head_dim=256, query_scalar=256),
        _gemma2("gemma2-27b", layers=46, width=4608, mlp=36864, heads=32, kv_heads=16, head_dim=128, query_scalar=144),
        _gemma2(
            "test-gemma2",
            layers=4,
            width=48,
            mlp=96,
            heads=4,
            kv_heads=2,
            head_dim=16,
            query_scalar=24,
            vocab=259,
            window=24,
            context=512,
        ),
    )
}
