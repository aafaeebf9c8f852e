"""Weights with which no sum is ever rounded, so that any two programs of a model must agree bit for bit.

Cached and uncached programs differ in 16 bits because they add in another order. Under these weights there is no order
to speak of: every product with a weight matrix has one term that is not zero, the mean squares are those of a few equal
powers of two (beside which the rest vanishes in fp32), and attention is uniform, so that its sums are those of small
multiples of one number. All else is elementwise. What remains is what a cache must get right: which token stands at
which position, which keys a row sees, in which dtype each number is held.

The residual stream has a first quarter of signs, which tell the token, and after it places for what each layer finds:
heads (how many keys were seen, and the sum of their values) and mlp. Later keys and mlps read them, and so do the
logits, so that an error in any layer is handed on. With zero queries the scores are zero: what goes wrong in queries,
scores or their softcap alone is not seen, and a window is seen only where a text is longer.

With 16-bit activations and at least fp32 for sums, norms and softmax this is exact up to 4096 slots, if the embedding
scale leaves a signed embedding few bits (`probe_tolerance`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import ModelConfig, Precision
from jaxkv.decode import Arms

SIGN = 2.0**14  # of a sign in the residual stream: 2^13 times what stands beside it
LARGE = 2.0**15  # of the one entry before a post norm that fixes its mean square


def _embedding(config: ModelConfig, precision: Precision) -> tuple[float, int]:
    """The value to store so that an embedding becomes about SIGN, and how many significant bits that then has."""
    dtype, residual = np.dtype(precision.activation), np.dtype(precision.residual)
    factor = np.asarray(config.embed_scale, dtype)
    best = (0.0, 64)
    for target in (1.0, 1.5, 1.25, 1.75, *(1 + i / 16 for i in range(1, 16, 2))):
        near = np.asarray(SIGN * target / 2 / float(factor), dtype)
        unit = float(np.asarray(jnp.finfo(dtype).eps)) * float(near)
        for step in range(-2, 3):
            stored = np.asarray(float(near) + step * unit / 2, dtype)
            value = float((stored.astype(residual) * factor.astype(residual)).astype(residual))
            mantissa = int(math.frexp(value)[0] * 2**53)
            bits = 53 - ((mantissa & -mantissa).bit_length() - 1)
            if bits < best[1]:
                best = (float(stored), bits)
    return best


def probe_tolerance(config: ModelConfig, precision: Precision, slots: int) -> float | None:
    """How far two programs may part under the probe, relative to the largest number of a tensor: 0 where all is exact.

    A few units in the last place where it nearly is, as with 32-bit activations; None where the policy rounds sums to
    16 bits, so that nothing can be said.
    """
    summed = (precision.accumulation, precision.softmax, precision.norm, precision.rope)
    if min(jnp.dtype(part).itemsize for part in summed) < 4:
        return None
    few = 2 * _embedding(config, precision)[1] + math.ceil(math.log2(config.model_dim // 4)) <= 24
    narrow = jnp.dtype(precision.activation).itemsize == 2
    if narrow and few and slots <= 4096 and config.model_dim % 4 == 0:
        return 0.0
    return (4 if narrow else 64) * float(jnp.finfo(precision.activation).eps)


def _pick(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Zeros [shape] with values at (row, column)."""
    weight = np.zeros(shape, np.float32)
    weight[rows, columns] = values
    return weight


def _embed_and_head(config: ModelConfig, precision: Precision, kept: Any) -> dict[str, jax.Array]:
    """Embedding and, where they are not tied, head [V, D], in the dtype `kept` of the prepared weights."""
    V, D, signs = config.vocab_size, config.model_dim, config.model_dim // 4
    embed = jnp.zeros((V, D), kept).at[:, :signs].set(jax.random.rademacher(jax.random.key(0), (V, signs), kept))
    embed = embed.at[:, 0].set(1) * jnp.asarray(_embedding(config, precision)[0], kept)
    own = jax.random.uniform(jax.random.key(1), (V,), jnp.float32, 1, 2) * 2.0 ** round(
        -2 - math.log2(config.embed_scale)
    )
    place = signs + jnp.arange(V) % (D - signs)  # the last norm leaves the places alone, so that a logit has one term
    embed = embed.at[jnp.arange(V), place].set(own.astype(precision.param).astype(kept))
    if config.tie_embeddings:
        return {"embed": embed}
    return {"embed": embed, "head": jnp.zeros((V, D), kept).at[jnp.arange(V), place].set(1)}


def probe_state(arms: Arms) -> nnx.State:
    """The probe's weights for the programs of `arms` (already prepared)."""
    config = arms.config
    D, F, N, K, H, L = (
        config.model_dim, config.mlp_dim, config.num_query_heads, config.num_kv_heads, config.head_dim,
        config.num_layers,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    signs = D // 4
    places = [p[:64] for p in np.array_split(np.arange(signs, D), L)]  # of each layer: heads first, then mlp
    of_heads, of_mlp = [p[: -(-3 * len(p) // 4)] for p in places], [p[-(-3 * len(p) // 4) :] for p in places]
    half = H // 2

    def coin(n) -> np.ndarray:
        return rng.choice(np.asarray([-1.0, 1.0], np.float32), n)

    def read(rows: np.ndarray, width: int, layer: int, gain: float) -> np.ndarray:
        """Rows in turn read a sign and a place of the layer before, or of the embedding."""
        before = places[layer - 1] if layer else np.arange(signs, D)
        found = np.arange(len(rows)) % 2 == 1
        columns = np.where(found, rng.choice(before, len(rows)), rng.integers(0, signs, len(rows)))
        values = coin(len(rows)) * rng.uniform(0.5, 1, len(rows)) * np.where(found, gain, 1)
        return _pick((width, D), rows, columns, values)

    def norm(scale: float, first: float = 1.0) -> np.ndarray:
        weight = scale * rng.uniform(1, 2, D).astype(np.float32)  # so that the norm rounds what stands in the places
        weight[:signs] = first
        return weight - config.norm_offset

    def post_norm() -> np.ndarray:
        return norm(2.0 ** round(math.log2(2 * LARGE / D**0.5)), 0.0)

    def layer_weights(layer: int) -> dict[str, Any]:
        # RoPE turns pairs (i, i + H/2); with one of the two at zero it adds nothing. A norm of k leaves room for two.
        kept = np.arange(min(2, half) if config.qk_norm else half)
        k = read((np.arange(K)[:, None] * H + kept).reshape(-1), K * H, layer, 16.0)
        v = _pick((K * H, D), np.arange(K * H), rng.integers(0, signs, K * H), coin(K * H) * 0.5)
        v[::H] = 0
        v[::H, 0] = 1.0  # the same for all tokens
        o, down = np.zeros((D, N, H), np.float32), np.zeros((D, F), np.float32)
        heads, units = of_heads[layer], of_mlp[layer]
        o[heads, np.arange(len(heads)) % N, rng.integers(1, H, len(heads))] = 2.0**-2
        down[units, 1 + rng.permutation(F - 1)[: len(units)]] = 2.0**-4
        gate, up = (read(np.arange(F), F, layer, 4.0) for _ in range(2))
        gate[0] = up[0] = 0
        gate[0, 0] = up[0, 0] = 1.0
        if config.post_norms:
            o[0, 0, 0], down[0, 0] = LARGE / 2, LARGE / 4
        found = {
            "attn_norm/weight": norm(2.0**8), "mlp_norm/weight": norm(2.0**8), "attn/q": np.zeros((N, H, D)),
            "attn/k": k.reshape(K, H, D), "attn/v": v.reshape(K, H, D), "attn/o": o,
            "mlp/gate": gate, "mlp/up": up, "mlp/down": down,
        }  # fmt: skip
        if config.post_norms:
            found |= {"attn_post_norm/weight": post_norm(), "mlp_post_norm/weight": post_norm()}
        if config.qk_norm:
            found |= {f"attn/{x}_norm/weight": rng.uniform(1, 2, H) - config.norm_offset for x in "qk"}
        if config.qkv_bias:  # a k has one term, to which a bias adds in the same way in every program
            k_bias = np.zeros((K, H), np.float32)
            k_bias[:, kept] = rng.uniform(8, 16, (K, len(kept)))
            found |= {"attn/q_bias": np.zeros((N, H)), "attn/k_bias": k_bias, "attn/v_bias": np.zeros((K, H))}
        return {f"layers/{layer}/{name}": value for name, value in found.items()}

    wanted = flat_paths(arms.abstract_state)
    leaves = {"final_norm/weight": norm(2.0**12, 0.0), **_embed_and_head(config, arms.precision, wanted["embed"].dtype)}
    for layer in range(L):  # one at a time: the host never holds more than one wide
        for path, value in layer_weights(layer).items():
            leaves[path] = jnp.asarray(value, arms.precision.param).astype(wanted[path].dtype)
    return with_leaves(arms.abstract_state, {path: jnp.asarray(leaves[path], x.dtype) for path, x in wanted.items()})
