"""Architecture and precision as data: every number a layer uses is a field here.

Letters: B batch, T query rows, S cache slots, D model width, F mlp width, N query heads, K kv heads,
G = N/K, H head dim, L layers, V vocabulary. Query head n = k*G + g.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxkv import files
from jaxkv.errors import UserError, nearest

DType = Any  # a jnp scalar type such as jnp.float16


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches RoPE (transformers, modeling_rope_utils.py, `llama3`): by wavelength, in tokens.

    Attributes:
      factor: frequencies of long waves are divided by it.
      low_freq_factor: waves longer than original_context / low_freq_factor are long.
      high_freq_factor: waves shorter than original_context / high_freq_factor stay; between the two it is blended.
      original_context: positions of the first training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


Rope = tuple[float, RopeScaling | None]  # base and scaling


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of one decoder. Two configs that differ in any field compute different logits.

    Attributes:
      name: preset or checkpoint name; no effect on the numbers.
      family: a key of models.families.FAMILIES: chooses a checkpoint's key table, never a layer's code path.
      vocab_size: V.
      num_layers: L.
      model_dim: D.
      mlp_dim: F.
      num_query_heads: N.
      num_kv_heads: K; N is a multiple of K.
      head_dim: H; even (RoPE rotates halves).
      context_length: most positions the model was trained for; longer prompts are refused.
      activation: 'silu' or 'gelu_tanh' on the gate.
      norm_eps: added to the mean square in RMSNorm.
      norm_offset: the weight is applied as (norm_offset + w): 0 for LLaMA, 1 for Gemma.
      norm_round_first: whether RMSNorm rounds to the activation dtype before it multiplies by the weight (LLaMA,
        Mistral) or after (Gemma).
      post_norms: whether attention and MLP outputs are normed before they join the residual stream.
      qk_norm: whether each head's q and k are normed before RoPE.
      rope_theta: RoPE base of global layers.
      local_rope_theta: RoPE base of windowed layers; None means rope_theta.
      query_scale: attention scores are multiplied by it.
      attn_softcap: scores become cap * tanh(scores / cap), before the mask; None means off.
      final_softcap: the same at the logits.
      window: a query sees keys at distance < window, in tokens; None means global.
      window_pattern: cycled over layers; True marks a windowed layer.
      tie_embeddings: whether the head is the transposed embedding table.
      embed_scale: embeddings are multiplied by it, rounded to the activation dtype first.
      qkv_bias: whether q, k and v have a bias, added before they are rounded.
      rope_scaling: of layers whose base is rope_theta; None means plain RoPE.

    A field with a default came later than stored checkpoints and records: `to_json` leaves it out at its default.
    """

    name: str
    family: str
    vocab_size: int
    num_layers: int
    model_dim: int
    mlp_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    activation: Literal["silu", "gelu_tanh"]
    norm_eps: float
    norm_offset: float
    norm_round_first: bool
    post_norms: bool
    qk_norm: bool
    rope_theta: float
    local_rope_theta: float | None
    query_scale: float
    attn_softcap: float | None
    final_softcap: float | None
    window: int | None
    window_pattern: tuple[bool, ...]
    tie_embeddings: bool
    embed_scale: float
    qkv_bias: bool = False
    rope_scaling: RopeScaling | None = None

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "model_dim", "mlp_dim", "num_query_heads", "num_kv_heads", "head_dim")
        if odd := [f"{key} {getattr(self, key)}" for key in sizes if getattr(self, key) < 1]:
            raise UserError(f"{self.name}: a model cannot have {', '.join(odd)}; fix the config")
        if self.num_query_heads % self.num_kv_heads:
            raise UserError(
                f"{self.name}: {self.num_query_heads} query heads do not divide into {self.num_kv_heads} kv heads; "
                "fix the config"
            )
        if self.head_dim % 2:
            raise UserError(f"{self.name}: head dim {self.head_dim} is odd and RoPE rotates halves; fix the config")
        if self.activation not in ("silu", "gelu_tanh"):
            raise UserError(f"{self.name}: activation '{self.activation}' is not implemented; known: silu, gelu_tanh")
        if self.window is not None and self.window < 1:
            raise UserError(f"{self.name}: a window of {self.window} sees no key; use a positive window or none")
        if not self.window_pattern:
            raise UserError(f"{self.name}: the window pattern is empty; use (False,) for a model without windows")

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Which layers see a window alone."""
        return tuple(self.layer_window(layer) is not None for layer in range(self.num_layers))

    def layer_window(self, layer: int) -> int | None:
        """Window of a layer in tokens, None if the layer is global."""
        return self.window if self.window_pattern[layer % len(self.window_pattern)] else None

    def layer_rope(self, layer: int) -> Rope:
        """RoPE base and scaling of a layer."""
        if self.layer_window(layer) is not None and self.local_rope_theta is not None:
            return self.local_rope_theta, None
        return self.rope_theta, self.rope_scaling

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` restores an equal config."""
        values = dataclasses.asdict(self) | {"window_pattern": list(self.window_pattern)}
        unused = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) == f.default]
        return {name: value for name, value in values.items() if name not in unused}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ModelConfig":
        """Restores what `to_json` gave. Raises UserError on unknown or missing fields, or one of another type."""
        fields = dataclasses.fields(cls)
        needed = {f.name for f in fields if f.default is dataclasses.MISSING}
        if odd := sorted((needed - set(values)) | (set(values) - {f.name for f in fields})):
            raise UserError(
                f"the stored model config is not this version's (fields {', '.join(odd)}); convert the checkpoint again"
            )
        return files.convert(values, cls, "the stored model config", "convert the checkpoint again")


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtype of every part of the computation. Models hold no dtype of their own.

    Attributes:
      name: 'fp16', 'bf16', 'fp32' or 'fp64', with the overrides appended, e.g. 'fp16+residual=fp32'.
      param: stored weights.
      activation: outputs of matrix products, attention weights, gate and up, inputs of every product.
      operand: dtype in which a product's operands, already rounded to `activation` or stored in `param`, are handed to
        it. Wider than `activation` changes no value, only the kernel that multiplies them.
      residual: the stream between layers.
      accumulation: dtype a product is returned in before it is rounded to `activation` (`preferred_element_type`).
        It bounds the accumulator from below; what the backend's kernel really adds in is its own choice.
      softmax: exponentials and their sum.
      norm: RMSNorm statistics.
      rope: angles, cosines and sines, before they are rounded to `activation`.
      cache: stored K and V.
      logits: the head's output.
      scores: q·k and what is done to it before the softmax: scale, softcap, mask. With a large bias on k the product
        can pass fp16's range before the scale brings it back (Qwen2.5).
      dot: matmul precision of 32-bit products; HIGHEST means true fp32, not TF32.
    """

    name: str
    param: DType
    activation: DType
    operand: DType
    residual: DType
    accumulation: DType
    softmax: DType
    norm: DType
    rope: DType
    cache: DType
    logits: DType
    scores: DType
    dot: jax.lax.Precision = jax.lax.Precision.HIGHEST

    def to_json(self) -> dict[str, str]:
        """Names of the dtypes, for records. `scores` is named only where it is not `activation`, as in old records."""
        return {
            f.name: (v if f.name == "name" else v.name if f.name == "dot" else jnp.dtype(v).name)
            for f in dataclasses.fields(self)
            for v in [getattr(self, f.name)]
            if f.name != "scores" or v != self.activation
        }

    def widened(self) -> "Precision":
        """The same values with 16-bit weights and operands held in fp32.

        XLA on a CPU widens the operands of most 16-bit products, weights included, at every call. Held wide from the
        start, they give the same products without that work, but XLA may lay them out for another kernel, which adds
        in another order: logits can differ in their last bits (tests/test_decode.py). A policy whose weights are to be
        rounded to another dtype first stays as it is.
        """
        if jnp.dtype(self.operand).itemsize >= 4 or self.param != self.activation:
            return self
        return dataclasses.replace(self, param=jnp.float32, operand=jnp.float32)


DTYPES: dict[str, DType] = {"fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32, "fp64": jnp.float64}


def dtype_from_name(name: str) -> DType:
    """Returns the jnp dtype of 'fp16', 'bf16', 'fp32' or 'fp64'. Raises UserError on another name."""
    if name not in DTYPES:
        raise UserError(f"unknown precision '{name}'{nearest(name, list(DTYPES))}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def make_precision(name: str, **parts: str | None) -> Precision:
    """Builds the policy that rounds where transformers' eager models round.

    Args:
      name: 'fp16', 'bf16', 'fp32' or 'fp64'.
      **parts: overrides by part, e.g. `residual='fp32'`; None leaves the default.

    Returns:
      A Precision. Softmax, norm statistics and rope tables are at least fp32, as in transformers.

    Raises:
      UserError: unknown precision or part.
    """
    base = dtype_from_name(name)
    wide = jnp.float64 if base == jnp.float64 else jnp.float32
    policy: dict[str, Any] = dict.fromkeys(
        ("param", "activation", "operand", "residual", "cache", "logits", "scores"), base
    )
    policy |= dict.fromkeys(("accumulation", "softmax", "norm", "rope"), wide)
    usual = dict(policy)
    overrides = {part: value for part, value in parts.items() if value is not None}
    for part, value in overrides.items():
        if part not in policy:
            raise UserError(
                f"unknown part '{part}' of a precision{nearest(part, list(policy))}; known: {', '.join(policy)}"
            )
        policy[part] = dtype_from_name(value)
    if "scores" not in overrides:
        policy["scores"] = policy["activation"]
    usual["scores"] = policy["activation"]
    changed = [part for part in sorted(overrides) if policy[part] != usual[part]]
    label = "+".join([name, *(f"{part}={overrides[part]}" for part in changed)])
    return Precision(name=label, **policy)
