"""The parts of a decoder layer. Every number comes from ModelConfig, every dtype from Precision.

Weights keep their output first and their input last, as checkpoints do: a one-row product then reads each weight row
in one run. With the input first, a LLaMA-2-7B step on an H200 took 6.2 ms, since XLA's column sums fill the GPU badly.

Each layer names its intermediate values and passes them through a hook, `hook(name, value) -> value`, so that a
caller can record or replace any of them. In order of execution: `resid_pre.l attn_norm.l q.l k.l v.l qk.l scores.l
attn_weights.l attn_heads.l attn_proj.l attn_out.l resid_mid.l mlp_norm.l gate.l up.l mlp_act.l mlp_down.l mlp_out.l`,
then `resid_pre.L final_norm head logits`. `k.l` and `v.l` are the rows about to enter the cache; `attn_proj.l` and
`mlp_down.l` are outputs before a post norm, `attn_out.l` and `mlp_out.l` what joins the residual stream; `qk.l` and
`head` are products before scale and softcap, `scores.l` is masked. Values are [B, T, ...], except `qk.l scores.l
attn_weights.l`, which are [B, K, G, T, S].
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import EMPTY, Hook, LayerCache
from jaxkv.config import DType, ModelConfig, Precision, Rope
from jaxkv.models.alignment import Rowwise, direct

ATTENTION_SHAPED = ("qk.", "scores.", "attn_weights.")  # names of values [B, K, G, T, S]


def no_hook(name: str, value: jax.Array) -> jax.Array:
    """Leaves every value as it is."""
    del name
    return value


def scale(x: jax.Array, factor: float, wide: DType) -> jax.Array:
    """x * factor rounded once to x.dtype; a bare Python factor would itself be rounded to 16 bits first."""
    return (x.astype(wide) * factor).astype(x.dtype)


def softcap(x: jax.Array, cap: float | None, wide: DType) -> jax.Array:
    """cap * tanh(x / cap), rounded after each of the three operations as transformers does (Gemma-2, section 2)."""
    if cap is None:
        return x
    return scale(jnp.tanh((x.astype(wide) / cap).astype(x.dtype)), cap, wide)


def product(
    spec: str,
    x: jax.Array,
    w: jax.Array,
    precision: Precision,
    out: DType | None = None,
    bias: nnx.Param | None = None,
) -> jax.Array:
    """einsum in the policy's dtypes, plus a bias along the last axis, rounded to `out` (default: the activation's)."""
    y = jnp.einsum(
        spec,
        x.astype(precision.operand),
        w.astype(precision.operand),
        precision=precision.dot,
        preferred_element_type=precision.accumulation,
    )
    if bias is not None:
        y = y + bias[...].reshape(-1).astype(precision.operand).astype(y.dtype)
    out = precision.activation if out is None else out
    if precision.rounds_apart and (y.dtype, out) == (jnp.float32, jnp.bfloat16):
        y = jax.lax.reduce_precision(y, exponent_bits=8, mantissa_bits=7)
    return y.astype(out)


def visible(query_positions: jax.Array, key_positions: jax.Array, window: int | None) -> jax.Array:
    """[B, T, S] which keys a query sees: filled slots, at its own position or before, at distance < window, if any.

    Positions are absolute, [B, T] of the queries and [B, S] of the keys, -1 where a slot is empty.
    """
    q, k = query_positions[:, :, None], key_positions[:, None, :]
    seen = (k != EMPTY) & (k <= q)
    return seen if window is None else seen & (q - k < window)


def rope_frequencies(rope: Rope, head_dim: int, dtype: DType) -> np.ndarray:
    """[H/2] radians per position (arXiv 2104.09864), scaled operation by operation as transformers does."""
    (theta, scaling), kind = rope, np.dtype(dtype)
    exponents = np.arange(0, head_dim, 2, dtype=kind) / kind.type(head_dim)
    # NumPy's own fp32 power is off by a unit at every seventh exponent or so, torch's hardly ever: round a wider one.
    frequencies: np.ndarray = 1 / np.power(float(theta), exponents.astype(np.float64)).astype(kind)
    if scaling is None:
        return frequencies
    wide: np.ndarray = frequencies.astype(kind if kind.itemsize >= 4 else np.float32)
    length, low, high = scaling.original_context, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = (1 / wide) * (2 * math.pi)  # torch multiplies by a reciprocal where a number is divided by a tensor
    long, short = wavelengths > length / low, wavelengths < length / high
    scaled = np.where(long, wide / scaling.factor, wide)
    smooth = ((1 / wavelengths) * length - low) / (high - low)
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    return np.where(long | short, scaled, blended).astype(kind)


def rope_table(positions: jax.Array, rope: Rope, head_dim: int, precision: Precision) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, 1, H] of RoPE, computed in `rope` and rounded to `activation`."""
    frequencies = rope_frequencies(rope, head_dim, precision.rope)
    angles = positions[:, :, None, None].astype(precision.rope) * jnp.asarray(frequencies)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles).astype(precision.activation), jnp.sin(angles).astype(precision.activation)


def rounded(x: jax.Array) -> jax.Array:
    """x, kept from being fused with what it enters: a product is rounded before it is summed, in every program.

    Left to itself XLA may fuse a product and its sum into one rounding, or not, by what else a program does. No barrier
    of its own outlives its passes, but it looks through no choice between a value and the same value clipped.
    """
    most = jnp.finfo(x.dtype).max
    return jnp.where(jnp.abs(x) <= most, jnp.clip(x, -most, most), x)


def apply_rope(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the halves of each head of x [B, T, *, H]; both products are rounded, as in transformers."""
    cos, sin = table
    first, second = jnp.split(x, 2, axis=-1)
    return rounded(x * cos) + rounded(jnp.concatenate([-second, first], axis=-1) * sin)


class RMSNorm(nnx.Module):
    """Root mean square norm (arXiv 1910.07467) over the last axis."""

    def __init__(self, width: int, config: ModelConfig, precision: Precision):
        self.config, self.precision = config, precision
        self.weight = nnx.Param(jnp.full((width,), 1.0 - config.norm_offset, precision.param))

    def __call__(self, x: jax.Array, out: DType) -> jax.Array:
        config, norm = self.config, self.precision.norm
        wide = x.astype(norm)
        y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.norm_eps)
        weight = self.weight[...]
        if config.norm_round_first:
            return y.astype(out) * (weight.astype(out) + config.norm_offset)
        return (y * (weight.astype(norm) + config.norm_offset)).astype(out)


def init_weight(rngs: nnx.Rngs | None, shape: tuple[int, ...], fan_in: int, precision: Precision) -> nnx.Param:
    """A weight of normal noise; of zeros without `rngs`, where the shape is all (drawing is slow to trace)."""
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, precision.param))
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value.astype(precision.param))


# From queries [B, T, N, H], keys and values [B, S, K, H] in the cache's dtype, and which of them each query sees
# [B, T, S], to the heads' outputs [B, T, N, H]. Both arms of a run use the same (attention.py has them all).
Attend = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, ModelConfig, Precision, int, Hook, Rowwise],
    jax.Array,
]


def eager(q, k, v, seen, config: ModelConfig, precision: Precision, layer: int, hook: Hook, rows: Rowwise) -> jax.Array:
    """Every score at once, rounded where transformers' eager attention rounds (an Attend)."""
    B, T, _, H = q.shape
    wide = precision.softmax

    def score(q):
        return product("btkgh,bskh->bkgts", q, k.astype(precision.activation), precision, precision.scores)

    def cap(scores):
        return softcap(scale(scores, config.query_scale, wide), config.attn_softcap, wide)

    def weigh(scores):
        return jax.nn.softmax(scores.astype(wide), axis=-1).astype(precision.activation)

    def combine(weights):
        return product("bkgts,bskh->btkgh", weights, v.astype(precision.activation), precision)

    q = q.reshape(B, T, config.num_kv_heads, -1, H)
    scores = hook(f"qk.{layer}", rows("scores", score, q, rows_out=3))
    scores = rows("scores", cap, scores, rows_in=3, rows_out=3)
    scores = hook(f"scores.{layer}", jnp.where(seen[:, None, None], scores, jnp.finfo(scores.dtype).min))
    weights = hook(f"attn_weights.{layer}", rows("attention", weigh, scores, rows_in=3, rows_out=3))
    return rows("attention", combine, weights, rows_in=3).reshape(B, T, -1, H)


class Attention(nnx.Module):
    """Grouped-query attention over a cache. q [N,H,D], k v [K,H,D], o [D,N,H]; q_bias [N,H], k_bias v_bias [K,H]."""

    def __init__(self, config: ModelConfig, precision: Precision, layer: int, rngs: nnx.Rngs | None, attend: Attend):
        self.config, self.precision, self.layer, self.attend = config, precision, layer, attend
        D, N, K, H = config.model_dim, config.num_query_heads, config.num_kv_heads, config.head_dim
        self.q = init_weight(rngs, (N, H, D), D, precision)
        self.k = init_weight(rngs, (K, H, D), D, precision)
        self.v = init_weight(rngs, (K, H, D), D, precision)
        self.o = init_weight(rngs, (D, N, H), N * H, precision)
        self.q_bias = init_weight(rngs, (N, H), 1, precision) if config.qkv_bias else None
        self.k_bias = init_weight(rngs, (K, H), 1, precision) if config.qkv_bias else None
        self.v_bias = init_weight(rngs, (K, H), 1, precision) if config.qkv_bias else None
        if config.qk_norm:
            self.q_norm = RMSNorm(H, config, precision)
            self.k_norm = RMSNorm(H, config, precision)

    def __call__(
        self,
        x,
        query_positions,
        cache: LayerCache,
        key_positions,
        slot,
        table,
        hook: Hook = no_hook,
        rows: Rowwise = direct,
    ):
        """Attends from normed x [B, T, D] to the cache after x's own keys and values are written from `slot` on.

        A query position [B, T] of -1 is a padding row, whose key and value enter the cache as zeros; key positions
        [B, S] have this call's in them already. `table` is RoPE's cos and sin for the queries, `rows` how operations
        are passed (alignment.py). Returns the output [B, T, D] and the layer's cache with the rows in it.
        """
        config, precision, layer = self.config, self.precision, self.layer
        B, T, D = x.shape
        H = config.head_dim

        # Heads are split after the product: as plain matrices the weights find faster kernels. A bias joins the sum
        # before its one rounding, as in torch's `addmm`.
        def project(x):
            return tuple(
                product("btd,fd->btf", x, w[...].reshape(-1, D), precision, bias=bias).reshape(*x.shape[:2], -1, H)
                for w, bias in ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
            )

        q, k, v = rows("qkv", project, x)
        if config.qk_norm:
            q = rows("norms", lambda q: self.q_norm(q, precision.activation), q)
            k = rows("norms", lambda k: self.k_norm(k, precision.activation), k)
        filled = (query_positions != EMPTY)[:, :, None, None]
        q = hook(f"q.{layer}", rows("rope", apply_rope, q, table))
        k = hook(f"k.{layer}", jnp.where(filled, rows("rope", apply_rope, k, table), 0).astype(precision.cache))
        v = hook(f"v.{layer}", jnp.where(filled, v, 0).astype(precision.cache))
        cache = cache.write(k, v, slot)
        k_slots, v_slots = cache.read()

        seen = visible(query_positions, key_positions, config.layer_window(layer))
        heads = self.attend(cache.rotate_queries(q), k_slots, v_slots, seen, config, precision, layer, hook, rows)

        def project_out(heads):
            return product("btf,df->btd", heads, self.o[...].reshape(D, -1), precision)

        heads = hook(f"attn_heads.{layer}", cache.rotate_heads(heads))
        out = hook(f"attn_proj.{layer}", rows("output", project_out, heads.reshape(B, T, -1)))
        return out, cache


class MLP(nnx.Module):
    """Gated MLP: down(act(gate x) * up x). gate up [F,D], down [D,F]."""

    def __init__(self, config: ModelConfig, precision: Precision, layer: int, rngs: nnx.Rngs | None):
        self.config, self.precision, self.layer = config, precision, layer
        D, F = config.model_dim, config.mlp_dim
        self.gate = init_weight(rngs, (F, D), D, precision)
        self.up = init_weight(rngs, (F, D), D, precision)
        self.down = init_weight(rngs, (D, F), F, precision)

    def __call__(self, x: jax.Array, hook: Hook = no_hook, rows: Rowwise = direct) -> jax.Array:
        config, precision, layer = self.config, self.precision, self.layer

        def multiply(spec, w, x):
            return product(spec, x, w[...], precision)

        def gated(gate, up):
            activation = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}[config.activation]
            return activation(gate.astype(precision.softmax)).astype(gate.dtype) * up

        gate = hook(f"gate.{layer}", rows("mlp", functools.partial(multiply, "btd,fd->btf", self.gate), x))
        up = hook(f"up.{layer}", rows("mlp", functools.partial(multiply, "btd,fd->btf", self.up), x))
        act = hook(f"mlp_act.{layer}", rows("mlp", gated, gate, up))
        down = rows("mlp", functools.partial(multiply, "btf,df->btd", self.down), act)
        return hook(f"mlp_down.{layer}", down)
