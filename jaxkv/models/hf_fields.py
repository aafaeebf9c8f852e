"""config.json as a typed value: the fields that decide numbers, with bounds; the rest that would is refused by name.

A field that is missing has transformers' default, which each family states. Null is allowed where it is there.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from jaxkv import files
from jaxkv.config import RopeScaling
from jaxkv.errors import UserError

# Bounds are far past any model: they keep a damaged number from being computed with for minutes.
Layers = Annotated[int, Meta(ge=1, le=4096)]
Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Length = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]
Epsilon = Annotated[float, Meta(gt=0, lt=1)]


class RopeParameters(msgspec.Struct, kw_only=True, frozen=True):
    """`rope_scaling` or `rope_parameters`, flat or one for each type of layer."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: float | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Length | None = None
    full_attention: "RopeParameters | None" = None
    sliding_attention: "RopeParameters | None" = None


class HFConfig(msgspec.Struct, kw_only=True, frozen=True):
    """What config.json says in every family; a family gives the defaults that transformers' class has."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size | None
    max_position_embeddings: Length
    head_dim: Size | None = None
    rms_norm_eps: Epsilon = 1e-6
    tie_word_embeddings: bool = False
    hidden_act: str | None = None
    rope_theta: Positive | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    layer_types: list[str] | None = None
    sliding_window: Length | None = None
    eos_token_id: int | list[int] | None = None
    # No family computes these.
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    quantization_config: dict[str, Any] | None = None
    use_bidirectional_attention: bool | None = None
    rope_interleaved: bool | None = None
    pretraining_tp: int | None = None
    partial_rotary_factor: float | None = None
    # Gemma alone computes these.
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    query_pre_attn_scalar: float | None = None

    def require_plain(self, name: str) -> None:
        """Raises UserError on what no family here implements."""
        self.require_unset(name, "attention_bias", "mlp_bias", "quantization_config", "use_bidirectional_attention")
        self.require_unset(name, "rope_interleaved")
        if (self.pretraining_tp or 1) > 1:
            raise refuse(name, "pretraining_tp", self.pretraining_tp)
        if (self.partial_rotary_factor or 1.0) != 1.0:
            raise refuse(name, "partial_rotary_factor", self.partial_rotary_factor)

    def sizes(self) -> dict[str, Any]:
        """What every family reads in the same way, by ModelConfig's names; a head dim of None is that of the widths."""
        return {
            "num_layers": self.num_hidden_layers,
            "model_dim": self.hidden_size,
            "mlp_dim": self.intermediate_size,
            "num_query_heads": self.num_attention_heads,
            "num_kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "context_length": self.max_position_embeddings,
            "norm_eps": self.rms_norm_eps,
            "tie_embeddings": self.tie_word_embeddings,
        }

    def require_unset(self, name: str, *keys: str) -> None:
        """Raises UserError if an option is on that would change the numbers."""
        for key in keys:
            if value := getattr(self, key):
                raise refuse(name, key, value)

    def rope(
        self, name: str, default: float = 10000.0, key: str = "rope_theta", layer_type: str | None = None
    ) -> tuple[float, RopeScaling | None]:
        """RoPE base and scaling of a `layer_type` (None in a family of one base), wherever transformers keeps them.

        transformers 4 wrote the base to `key`, beside `rope_scaling`; 5 writes both into `rope_parameters`, for models
        with two bases one for each layer type. `rope_scaling` wins where both are there (transformers,
        modeling_rope_utils.py, `convert_rope_params_to_dict`). Raises UserError on another scaling than Llama 3's, or
        one that lacks a number.
        """
        scaled = self.rope_scaling not in (None, RopeParameters())
        option = "rope_scaling" if scaled else "rope_parameters"
        params = getattr(self, option) or RopeParameters()
        if params.full_attention or params.sliding_attention:
            if layer_type is None:
                raise refuse(name, option, "per layer type", "is not implemented for this family")
            params = getattr(params, layer_type) or RopeParameters()
        elif layer_type == "sliding_attention":
            params = RopeParameters()  # a flat one is that of the global layers
        if (params.partial_rotary_factor or 1.0) != 1.0:
            raise refuse(name, f"{option}.partial_rotary_factor", params.partial_rotary_factor)
        theta = params.rope_theta or getattr(self, key) or default
        rope_type = params.rope_type or params.type or "default"
        if rope_type == "default":
            if (params.factor or 1.0) != 1.0:
                raise refuse(name, f"{option}.factor", params.factor, "without a rope_type is not implemented")
            return theta, None
        if rope_type != "llama3" or layer_type == "sliding_attention":
            raise refuse(name, f"{option}.rope_type", rope_type)
        factor, low, high = params.factor, params.low_freq_factor, params.high_freq_factor
        if factor is None or low is None or high is None or high <= low:
            raise UserError(
                f"{name}: config option {option} needs factor, low_freq_factor and a greater high_freq_factor for "
                f"rope_type llama3, and has {factor}, {low} and {high}; fix the config"
            )
        return theta, RopeScaling(
            factor, low, high, params.original_max_position_embeddings or self.max_position_embeddings
        )

    def window_pattern(self, name: str, usual: tuple[bool, ...]) -> tuple[bool, ...]:
        """Shortest cycle that gives `layer_types`; the family's usual one where it fits or nothing is said."""
        types, layers = self.layer_types, self.num_hidden_layers
        if types is None:
            return usual
        known = {"sliding_attention": True, "full_attention": False}
        odd = sorted(set(types) - set(known))
        if odd or len(types) != layers:
            what = f"with {', '.join(odd)}" if odd else f"of {len(types)} entries for {layers} layers"
            raise UserError(f"{name}: config option layer_types {what} is not implemented; fix the config")
        flags = tuple(known[kind] for kind in types)
        cycles = [usual, *(flags[:period] for period in range(1, layers + 1))]
        return next(c for c in cycles if all(flags[i] == c[i % len(c)] for i in range(layers)))


Fields = TypeVar("Fields", bound=msgspec.Struct)


def read_fields(raw: Mapping[str, Any], kind: type[Fields], name: str) -> Fields:
    """A raw config.json as a family's type. Raises UserError, with the field's name, on a value that is none."""
    return files.convert(dict(raw), kind, f"{name}: model config", "fix the config or download it again")


def refuse(name: str, key: str, value: Any, why: str = "is not implemented") -> UserError:
    """The error for an option that we do not compute."""
    return UserError(f"{name}: config option {key}={value!r} {why}; use a checkpoint without it")
