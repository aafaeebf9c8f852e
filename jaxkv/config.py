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
    """How Llama 3.1 stretches RoPE (transformers, modeling_rope_utils.py, `llama3`): by wavelength, in tokens."""

    factor: float  # frequencies of long waves are divided by it
    low_freq_factor: float  # waves longer than original_context / low_freq_factor are long
    high_freq_factor: float  # waves shorter than original_context / high_freq_factor stay; others are blended
    original_context: int  # positions of the first training


Rope = tuple[float, RopeScaling | None]  # base and scaling


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of one decoder. Two configs that differ in any field compute different logits.

    A field with a default came later than stored checkpoints and records: `to_json` leaves it out at its default.
    """

    name: str  # preset or checkpoint name; no effect on the numbers
    family: str  # a key of models.families.FAMILIES: chooses a checkpoint's key table, never a layer's code path
    vocab_size: int  # V
    num_layers: int  # L
    model_dim: int  # D
    mlp_dim: int  # F
    num_query_heads: int  # N
    num_kv_heads: int  # K; N is a multiple of K
    head_dim: int  # H; even (RoPE rotates halves)
    context_length: int  # most positions the model was trained for; longer prompts are refused
    activation: Literal["silu", "gelu_tanh"]  # on the gate
    norm_eps: float  # added to the mean square in RMSNorm
    norm_offset: float  # the weight is applied as (norm_offset + w): 0 for LLaMA, 1 for Gemma
    # Whether RMSNorm rounds to the activation dtype before it multiplies by the weight (LLaMA, Mistral) or after it.
    norm_round_first: bool
    post_norms: bool  # whether attention and MLP outputs are normed before they join the residual stream
    qk_norm: bool  # whether each head's q and k are normed before RoPE
    rope_theta: float  # RoPE base of global layers
    local_rope_theta: float | None  # RoPE base of windowed layers; None means rope_theta
    query_scale: float  # attention scores are multiplied by it
    attn_softcap: float | None  # scores become cap * tanh(scores / cap), before the mask; None means off
    final_softcap: float | None  # the same at the logits
    window: int | None  # a query sees keys at distance < window, in tokens; None means global
    window_pattern: tuple[bool, ...]  # cycled over layers; True marks a windowed layer
    tie_embeddings: bool  # whether the head is the transposed embedding table
    embed_scale: float  # embeddings are multiplied by it, rounded to the activation dtype first
    qkv_bias: bool = False  # whether q, k and v have a bias, added before they are rounded
    rope_scaling: RopeScaling | None = None  # of layers whose base is rope_theta; None means plain RoPE

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
    """The dtype of every part of the computation. Models hold no dtype of their own."""

    name: str  # 'fp16', 'bf16', 'fp32' or 'fp64', with the overrides appended, e.g. 'fp16+residual=fp32'
    param: DType  # stored weights
    activation: DType  # outputs of matrix products, attention weights, gate and up, inputs of every product
    # In which a product's operands, already rounded to `activation` or stored in `param`, are handed to it. Wider than
    # `activation` changes no value, only the kernel that multiplies them.
    operand: DType
    residual: DType  # the stream between layers
    # In which a product is returned before it is rounded to `activation` (`preferred_element_type`). It bounds the
    # accumulator from below; what the backend's kernel really adds in is its own choice.
    accumulation: DType
    softmax: DType  # exponentials and their sum
    norm: DType  # RMSNorm statistics
    rope: DType  # angles, cosines and sines, before they are rounded to `activation`
    cache: DType  # stored K and V
    logits: DType  # the head's output
    # q·k and what is done to it before the softmax: scale, softcap, mask. With a large bias on k the product can pass
    # fp16's range before the scale brings it back (Qwen2.5).
    scores: DType
    dot: jax.lax.Precision = jax.lax.Precision.HIGHEST  # of 32-bit products; HIGHEST means true fp32, not TF32
    # Whether a product's fp32 sum is rounded to bf16 by an operation of its own. A TPU otherwise rounds each summand as
    # well where XLA makes a sum and its rounding one operation (analysis/tpu.md). Part of how a policy is held.
    rounds_apart: bool = False

    def to_json(self) -> dict[str, str]:
        """Names of the dtypes, for records. `scores` is named only where it is not `activation`, as in old records."""
        return {
            f.name: (v if f.name == "name" else v.name if f.name == "dot" else jnp.dtype(v).name)
            for f in dataclasses.fields(self)
            for v in [getattr(self, f.name)]
            if f.name != "rounds_apart" and (f.name != "scores" or v != self.activation)
        }

    def held_on(self, platform: str) -> "Precision":
        """The policy as programs for a platform (cpu, gpu, tpu) hold it: the same values, kernels of their own."""
        if platform == "cpu":
            return self.widened()
        return dataclasses.replace(self, rounds_apart=True) if platform == "tpu" else self

    def widened(self) -> "Precision":
        """The same values with 16-bit weights and operands held in fp32, unless weights are rounded otherwise first.

        XLA on a CPU widens the operands of most 16-bit products, weights included, at every call. Held wide they give
        the same products without that work, but XLA may lay them out for another kernel, which adds in another order:
        logits can differ in their last bits (tests/test_decode.py).
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
    """The policy that rounds where transformers' eager models round, but for parts given, e.g. `residual='fp32'`.

    Softmax, norm statistics and rope tables are at least fp32, as in transformers; scores are as activations are.
    Raises UserError on an unknown precision or part.
    """
    base = dtype_from_name(name)
    wide = jnp.float64 if base == jnp.float64 else jnp.float32
    usual: dict[str, Any] = dict.fromkeys(
        ("param", "activation", "operand", "residual", "cache", "logits", "scores"), base
    )
    usual |= dict.fromkeys(("accumulation", "softmax", "norm", "rope"), wide)
    given = {part: value for part, value in parts.items() if value is not None}
    for part in given:
        if part not in usual:
            raise UserError(
                f"unknown part '{part}' of a precision{nearest(part, list(usual))}; known: {', '.join(usual)}"
            )
    policy = usual | {part: dtype_from_name(value) for part, value in given.items()}
    usual["scores"] = policy["activation"]
    if "scores" not in given:
        policy["scores"] = policy["activation"]
    changed = [f"{part}={given[part]}" for part in sorted(given) if policy[part] != usual[part]]
    return Precision(name="+".join([name, *changed]), **policy)
