"""Mistral's own release format: consolidated.safetensors with its names and RoPE pairs, params.json as config.

The names and the order of rows are those of transformers' convert_mistral_weights_to_hf.py.
"""

import dataclasses
import pathlib
import re
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxkv.checkpoints.fill import SourceTensor
from jaxkv.config import ModelConfig
from jaxkv.files import read_json

_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    """params.json; a field that is not here would change the numbers."""

    dim: _Count
    n_layers: _Count
    head_dim: _Count
    hidden_dim: _Count
    n_heads: _Count
    n_kv_heads: _Count
    norm_eps: _Positive
    vocab_size: _Count
    rope_theta: _Positive = 10000.0
    sliding_window: _Count | None = None
    max_seq_len: _Count = 32768
    max_position_embeddings: _Count | None = None


def read_params(path: pathlib.Path) -> dict[str, Any]:
    """params.json as the fields of a config.json. Raises UserError on a field that is missing or not implemented."""
    params = read_json(path, _Params, "use a checkpoint in the Hugging Face layout")
    return {
        "model_type": "mistral",
        "vocab_size": params.vocab_size,
        "hidden_size": params.dim,
        "intermediate_size": params.hidden_dim,
        "num_hidden_layers": params.n_layers,
        "num_attention_heads": params.n_heads,
        "num_key_value_heads": params.n_kv_heads,
        "head_dim": params.head_dim,
        "max_position_embeddings": params.max_position_embeddings or params.max_seq_len,
        "rms_norm_eps": params.norm_eps,
        "rope_theta": params.rope_theta,
        "sliding_window": params.sliding_window,
        "tie_word_embeddings": False,
    }


def in_hf_terms(tensor: SourceTensor, config: ModelConfig) -> SourceTensor:
    """A tensor under its Hugging Face name; q and k with their RoPE pairs taken apart into halves."""
    match = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.weight", tensor.name)
    if match is None or match[2] not in _NAMES:
        return tensor
    name = f"model.layers.{match[1]}.{_NAMES[match[2]]}.weight" if match[1] else f"{_NAMES[match[2]]}.weight"
    if match[2] not in ("attention.wq", "attention.wk"):
        return dataclasses.replace(tensor, name=name)

    def read() -> np.ndarray:
        rows = tensor.read()
        return rows.reshape(-1, config.head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)

    return dataclasses.replace(tensor, name=name, read=read)
