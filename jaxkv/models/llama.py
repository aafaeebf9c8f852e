"""LLaMA-2 and the SmolLM2 models, which share its architecture: sizes."""

from jaxkv.config import ModelConfig


def _llama(
    name: str,
    *,
    layers: int,
    width: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    vocab: int = 32000,
    theta: float = 10000.0,
    context: int = 4096,
    eps: float = 1e-5,
    tied: bool = False,
    head_dim: int | None = None,
) -> ModelConfig:
    head_dim = head_dim or width // heads
    return ModelConfig(
        name=name, family="llama", vocab_size=vocab, num_layers=layers, model_dim=width, mlp_dim=mlp, num_query_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, context_length=context, activation="silu", norm_eps=eps, norm_offset=0.0,
        norm_round_first=True, post_norms=False, qk_norm=False, rope_theta=theta, local_rope_theta=None, query_scale=head_dim**-0.5,
        attn_softcap=None, final_softcap=None, window=None, window_pattern=(False,), tie_embeddings=tied, embed_scale=1.0,
    )  # fmt: skip


PRESETS = {
    c.name: c
    for c in (
        _llama("llama2-7b", layers=32, width=4096, mlp=11008, heads=32, kv_heads=32),
        _llama("llama2-13b", layers=40, width=5120, mlp=13824, heads=40, kv_heads=40),
        _llama("llama2-70b", layers=80, width=8192, mlp=28672, heads=64, kv_heads=8),
        _llama(
            "smollm2-135m",
            layers=30,
            width=576,
            mlp=1536,
            heads=9,
            kv_heads=3,
            vocab=49152,
            theta=100000.0,
            context=8192,
            tied=True,
        ),
        _llama(
            "smollm2-360m",
            layers=32,
            width=960,
            mlp=2560,
            heads=15,
            kv_heads=5,
            vocab=49152,
            theta=100000.0,
            context=8192,
            tied=True,
        ),
        _llama(
            "smollm2-1.7b",
            layers=24,
            width=2048,
            mlp=8192,
            heads=32,
            kv_heads=32,
            vocab=49152,
            theta=130000.0,
            context=8192,
            tied=True,
        ),
        _llama("test-llama2", layers=3, width=48, mlp=96, heads=4, kv_heads=4, vocab=259, context=512),
        _llama("test-llama2-gqa", layers=3, width=48, mlp=96, heads=4, kv_heads=2, vocab=259, context=512, tied=True),
    )
}
