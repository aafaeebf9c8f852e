"""Checkpoints in the Hugging Face layout, a directory of safetensors, and in that of Mistral's own releases.

Mistral's is consolidated.safetensors, with its own names and RoPE pairs, and params.json as config. The names and the
order of rows are those of transformers' convert_mistral_weights_to_hf.py.
"""

import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from jaxkv.checkpoints.checkpoint import Checkpoint, ConfigCheck, Progress, Provenance, Sharding
from jaxkv.checkpoints.fill import SourceTensor, count_dtypes, fill_state, match_tensors, shorten
from jaxkv.checkpoints.hf_tokenizer import TOKENIZER_FILES, read_tokenizer
from jaxkv.checkpoints.manifest import hash_files, unchanged
from jaxkv.checkpoints.safetensors import WeightFiles, find_weights, list_tensors
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.files import convert, read_json
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.families import parse_config
from jaxkv.models.hf_fields import Positive, Size

_MISTRAL_NAMES = {
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


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    """params.json under the names of config.json; a field that is not here would change the numbers."""

    hidden_size: Size = msgspec.field(name="dim")
    num_hidden_layers: Size = msgspec.field(name="n_layers")
    head_dim: Size
    intermediate_size: Size = msgspec.field(name="hidden_dim")
    num_attention_heads: Size = msgspec.field(name="n_heads")
    num_key_value_heads: Size = msgspec.field(name="n_kv_heads")
    rms_norm_eps: Positive = msgspec.field(name="norm_eps")
    vocab_size: Size
    rope_theta: Positive = 10000.0
    sliding_window: Size | None = None
    max_seq_len: Size = 32768
    max_position_embeddings: Size | None = None


def read_hf(
    directory: pathlib.Path,
    name: str,
    *,
    precision: Precision,
    check: ConfigCheck,
    sharding: Sharding,
    progress: Progress | None,
    revision: str | None = None,
) -> Checkpoint:
    """Reads a directory; `name` is the source as the user gave it, `revision` is recorded, the rest is as in `load`.

    Raises UserError on anything wrong with the files, in one line.
    """
    weights = find_weights(directory)
    settings = ["config.json", "generation_config.json", *TOKENIZER_FILES]
    settings += ["params.json"] * weights.mistral_layout
    used = [path for file in settings if (path := directory / file).is_file()] + list(weights.files)
    with unchanged(used):
        raw = _read_config(directory, weights)
        config = check(dataclasses.replace(parse_config(raw, name), name=name.rstrip("/").split("/")[-1]))
        file = directory / "generation_config.json"
        generation = read_json(file, dict[str, Any]) if os.path.lexists(file) else {}
        eos_ids = _stop_ids(raw, config.vocab_size, directory / "config.json")
        eos_ids += _stop_ids(generation, config.vocab_size, file)
        tensors = _list_all(weights, config, directory)
        _check_layers(tensors, config, name)
        graphdef, abstract = abstract_decoder(config, precision)
        plan = match_tensors(config, abstract, tensors, name)
        tokenizer = read_tokenizer(directory, config, eos_ids)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # hashing overlaps with reading
            hashes = pool.submit(hash_files, used)
            state = fill_state(abstract, plan, config, name, sharding, progress)
            digests = hashes.result()
    provenance = Provenance(
        source=name,
        kind="safetensors",
        revision=revision,
        files=digests,
        dtypes=count_dtypes(tensors),
        add_bos=tokenizer.add_bos,
        left_aside=weights.left_aside,
    )
    return Checkpoint(config, graphdef, state, tokenizer, generation, provenance)


def _read_config(directory: pathlib.Path, weights: WeightFiles) -> dict[str, Any]:
    """The fields of config.json, or of Mistral's params.json where its own weights stand alone."""
    if os.path.lexists(directory / "config.json"):
        return read_json(directory / "config.json", dict[str, Any])
    if not weights.mistral_layout or not os.path.lexists(directory / "params.json"):
        raise UserError(f"{directory} has weights but no config.json; download it too")
    raw = msgspec.structs.asdict(
        read_json(directory / "params.json", _Params, "use a checkpoint in the Hugging Face layout")
    )
    longest = raw.pop("max_seq_len")
    raw["max_position_embeddings"] = raw["max_position_embeddings"] or longest
    return raw | {"model_type": "mistral", "tie_word_embeddings": False}


def _stop_ids(raw: Mapping[str, Any], vocab_size: int, where: pathlib.Path) -> list[int]:
    """Ids that end a generation. Raises UserError if they are no ids of the vocabulary."""
    value = raw.get("eos_token_id")
    several = value if isinstance(value, list) else [] if value is None else [value]
    ids = convert(several, list[int], f"{where}: eos_token_id", "mend the file or download it again")
    if odd := [i for i in ids if not 0 <= i < vocab_size]:
        raise UserError(
            f"{where}: eos_token_id {odd[0]} is no id of a vocabulary of {vocab_size}; "
            "use a model and a tokenizer that belong together"
        )
    return ids


def _check_layers(tensors: Iterable[SourceTensor], config: ModelConfig, name: str) -> None:
    """Before a decoder of that many layers is made. Raises UserError if the weights have another number of them."""
    found = {parts[2] for t in tensors if (parts := t.name.split("."))[:2] == ["model", "layers"] and len(parts) > 2}
    if found and len(found) != config.num_layers:  # without any, all that is missing is told later
        raise UserError(
            f"{name}: config.json says {config.num_layers} layers and the weights have {len(found)}; "
            "check that both belong together"
        )


def _list_all(weights: WeightFiles, config: ModelConfig, directory: pathlib.Path) -> list[SourceTensor]:
    """Tensors of all files under their Hugging Face names.

    Raises UserError if a file is broken, a tensor occurs twice, or the names are those of another kind of model.
    """
    tensors = [tensor for path in weights.files for tensor in list_tensors(path)]
    if weights.mistral_layout:
        tensors = [_in_hf_terms(tensor, config) for tensor in tensors]
    counts = collections.Counter(tensor.name for tensor in tensors)
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise UserError(f"{directory} holds {shorten(repeated)} in more than one shard; download the weights again")
    if wrapped := [name for name in counts if "language_model." in name]:
        raise UserError(
            f"{directory} holds {wrapped[0]}: the weights of a multimodal model, and only text models are "
            "implemented; save its language model alone"
        )
    if "embed_tokens.weight" not in counts or any(name.startswith("model.") for name in counts):
        return tensors
    # AutoModel.save_pretrained writes the decoder without its wrapper, so without prefix and head.
    if not config.tie_embeddings and "lm_head.weight" not in counts:
        raise UserError(
            f"{directory} holds a base model without the head lm_head.weight, which its config says is not tied to the "
            "embeddings; save it with AutoModelForCausalLM, not AutoModel"
        )
    return [
        tensor if tensor.name == "lm_head.weight" else dataclasses.replace(tensor, name=f"model.{tensor.name}")
        for tensor in tensors
    ]


def _in_hf_terms(tensor: SourceTensor, config: ModelConfig) -> SourceTensor:
    """One of Mistral's tensors under its Hugging Face name; q and k with their RoPE pairs taken apart into halves."""
    match = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.weight", tensor.name)
    if match is None or match[2] not in _MISTRAL_NAMES:
        return tensor
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    name = f"{prefix}{_MISTRAL_NAMES[match[2]]}.weight"
    if match[2] not in ("attention.wq", "attention.wk"):
        return dataclasses.replace(tensor, name=name)

    def read() -> np.ndarray:
        rows = tensor.read()
        return rows.reshape(-1, config.head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)

    return dataclasses.replace(tensor, name=name, read=read)
