"""What the family files share: the form of a key table, and a reader of Hugging Face configs that refuses by name."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.errors import UserError

# Source name pattern -> our path; {i} is the layer. The elements are in the same order on both sides.
KeyTable = Mapping[str, str]

LLAMA_KEYS: KeyTable = {
    "model.embed_tokens.weight": "embed",
    "model.layers.{i}.input_layernorm.weight": "layers/{i}/attn_norm/weight",
    "model.layers.{i}.self_attn.q_proj.weight": "layers/{i}/attn/q",
    "model.layers.{i}.self_attn.k_proj.weight": "layers/{i}/attn/k",
    "model.layers.{i}.self_attn.v_proj.weight": "layers/{i}/attn/v",
    "model.layers.{i}.self_attn.o_proj.weight": "layers/{i}/attn/o",
    "model.layers.{i}.post_attention_layernorm.weight": "layers/{i}/mlp_norm/weight",
    "model.layers.{i}.mlp.gate_proj.weight": "layers/{i}/mlp/gate",
    "model.layers.{i}.mlp.up_proj.weight": "layers/{i}/mlp/up",
    "model.layers.{i}.mlp.down_proj.weight": "layers/{i}/mlp/down",
    "model.norm.weight": "final_norm/weight",
    "lm_head.weight": "head",
}


def source_shape(path: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape that the source of a parameter must have: head axes merged, q [N,H,D] -> [N*H,D], o [D,N,H] -> [D,N*H]."""
    if len(shape) < 3:
        return tuple(shape)
    return (shape[0], math.prod(shape[1:])) if path.endswith("/o") else (math.prod(shape[:-1]), shape[-1])


class HFConfig:
    """A raw config.json with the defaults of its transformers config class."""

    def __init__(self, raw: Mapping[str, Any], name: str, defaults: Mapping[str, Any]):
        self.raw, self.name, self.defaults = raw, name, defaults

    def __getitem__(self, key: str) -> Any:
        return self.raw[key] if key in self.raw else self.defaults[key]

    def refuse(self, key: str, value: Any, why: str = "is not implemented") -> UserError:
        """The error for an option that we do not compute."""
        return UserError(f"{self.name}: config option {key}={value!r} {why}; use a checkpoint without it")

    def require_unset(self, *keys: str) -> None:
        """Raises UserError if an option is on that would change the numbers."""
        for key in keys:
            if self.raw.get(key):
                raise self.refuse(key, self.raw[key])

    def require_plain(self) -> None:
        """Raises UserError on what no family here implements."""
        self.require_unset("attention_bias", "mlp_bias", "quantization_config", "use_bidirectional_attention")
        self.require_unset("rope_interleaved")
        if (self.raw.get("pretraining_tp") or 1) > 1:
            raise self.refuse("pretraining_tp", self.raw["pretraining_tp"])
        if (self.raw.get("partial_rotary_factor") or 1.0) != 1.0:
            raise self.refuse("partial_rotary_factor", self.raw["partial_rotary_factor"])

    def activation(self, key: str, known: Mapping[str, str]) -> str:
        """Our name of the activation under `key`."""
        value = self[key]
        if value not in known:
            raise self.refuse(key, value, f"is not implemented (known: {', '.join(known)})")
        return known[value]

    def rope_theta(self, default: float = 10000.0, key: str = "rope_theta", layer_type: str | None = None) -> float:
        """RoPE base, wherever this version of transformers keeps it; refuses scaled RoPE.

        transformers 4 wrote `rope_theta` beside `rope_scaling`; 5 writes both into `rope_parameters`, for models with
        two bases one dict per layer type (transformers, modeling_rope_utils.py).
        """
        theta = self.raw.get(key)
        for option in ("rope_scaling", "rope_parameters"):
            params = self.raw.get(option) or {}
            if any(isinstance(value, Mapping) for value in params.values()):
                if layer_type is None:
                    raise self.refuse(option, dict(params), "per layer type is not implemented for this family")
                params = params.get(layer_type) or {}
            rope_type = params.get("rope_type", params.get("type", "default"))
            if rope_type != "default":
                raise self.refuse(f"{option}.rope_type", rope_type)
            if (params.get("partial_rotary_factor") or 1.0) != 1.0:
                raise self.refuse(f"{option}.partial_rotary_factor", params["partial_rotary_factor"])
            theta = params.get("rope_theta", theta)
        return float(default if theta is None else theta)

    def window_pattern(self, usual: tuple[bool, ...]) -> tuple[bool, ...]:
        """Shortest cycle that gives `layer_types`; the family's usual one where it fits or nothing is said."""
        types, layers = self.raw.get("layer_types"), self["num_hidden_layers"]
        if types is None:
            return usual
        known = {"sliding_attention": True, "full_attention": False}
        odd = sorted(set(map(str, types)) - set(known))
        if odd or len(types) != layers:
            what = f"with {', '.join(odd)}" if odd else f"of {len(types)} entries for {layers} layers"
            raise UserError(f"{self.name}: config option layer_types {what} is not implemented; fix the config")
        flags = tuple(known[kind] for kind in types)
        cycles = [usual, *(flags[:period] for period in range(1, layers + 1))]
        return next(c for c in cycles if all(flags[i] == c[i % len(c)] for i in range(layers)))


def differing_fields(found: ModelConfig, wanted: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs differ, as (found, wanted); names do not count."""
    a, b = found.to_json(), wanted.to_json()
    return {key: (a[key], b[key]) for key in a if key != "name" and a[key] != b[key]}
