"""Mistral-7B: grouped-query attention; a window of 4096 in v0.1, none since v0.2."""

from jaxkv.config import ModelConfig


def _mistral(
    name: str,
    *,
    vocab: int = 32000,
    theta: float = 10000.0,
    window: int | None = None,
    layers: int = 32,
    width: int = 4096,
    mlp: int = 14336,
    heads: int = 32,
    kv_heads: int = 8,
    context: int = 32768,
) -> ModelConfig:
    head_dim = width // heads
    return ModelConfig(
        name=name, family="mistral", vocab_size=vocab, num_layers=layers, model_dim=width, mlp_dim=mlp, num_query_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, context_length=context, activation="silu", norm_eps=1e-5, norm_offset=0.0,
        norm_round_first=True, post_norms=False, qk_norm=False, rope_theta=theta, local_rope_theta=None, query_scale=head_dim**-0.5,
        attn_softcap=None, final_softcap=None, window=window, window_pattern=(window is not None,), tie_embeddings=False, embed_scale=1.0,
    )  # fmt: skip


PRESETS = {
    c.name: c
    for c in (
        _mistral("mistral-7b-v0.1", window=4096),
        _mistral("mistral-7b-v0.2", theta=1e6),
        _mistral("mistral-7b-v0.3", theta=1e6, vocab=32768),
        _mistral("test-mistral", layers=3, width=48, mlp=96, heads=4, kv_heads=2, vocab=259, window=24, context=512),
    )
}
