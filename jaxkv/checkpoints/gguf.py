"""GGUF checkpoints (llama.cpp's format): llama, gemma2 and gemma3, every block type that `gguf` dequantizes."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxkv.checkpoints.checkpoint import Checkpoint, ConfigCheck, Progress, Sharding
from jaxkv.checkpoints.fill import SourceTensor, count_dtypes, fill_state, flat_paths, match_tensors
from jaxkv.checkpoints.gguf_tokenizer import build_tokenizer
from jaxkv.checkpoints.hf import as_ids, hash_files
from jaxkv.checkpoints.tokenizer import Tokenizer
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.families import key_table, parse_config

# llama.cpp's tensor names in Hugging Face terms; what a name means for a family is in the family's own key table.
_COMMON = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_NAMES = _COMMON | {"ffn_norm": "post_attention_layernorm"}
_GEMMA_NAMES = _COMMON | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAMES = {"llama": _LLAMA_NAMES, "gemma2": _GEMMA_NAMES, "gemma3": _GEMMA_NAMES}
_SAMPLE = "Of the 12 cafés,\n  which is the largest?  345.6"  # what every tokenizer must give back
_BLOCK = 1 << 22  # weights dequantized at a time
# llama.cpp does not store Gemma's query_pre_attn_scalar: it takes the head dim, and D / N for the 27B models, which it
# knows by their number of layers (llama-model.cpp, LLM_ARCH_GEMMA2 and LLM_ARCH_GEMMA3).
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}


def _shortest(value: float) -> float:
    """The decimal that a float32 was written from: 9.99999974e-06 is 1e-05."""
    return float(str(np.float32(value)))


def read_config(
    fields: dict[str, Any], vocab_size: int, tied: bool, preset: ModelConfig | None, name: str
) -> ModelConfig:
    """ModelConfig from GGUF metadata, through the same checks as a config.json.

    Raises:
      UserError: another architecture, RoPE scaling, or a field that is missing.
    """
    arch = fields.get("general.architecture")
    if arch not in _NAMES:
        raise UserError(f"{name}: GGUF architecture '{arch}' is not implemented; known: {', '.join(_NAMES)}")

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{key}", default)
        return _shortest(value) if isinstance(value, float) else value

    def need(key: str) -> Any:
        if (value := get(key)) is None:
            raise UserError(f"{name}: the GGUF metadata lacks {arch}.{key}; convert the model again")
        return value

    for key in fields:
        if key.startswith(f"{arch}.rope.scaling.") and not (key.endswith(".type") and fields[key] == "none"):
            if key.endswith(".finetuned") or (key.endswith(".factor") and fields[key] in (0.0, 1.0)):
                continue
            raise UserError(f"{name}: GGUF option {key}={fields[key]!r} is not implemented; use a model without it")
    if (experts := get("expert_count", 0)) > 0:
        raise UserError(f"{name}: GGUF option {arch}.expert_count={experts} is not implemented; use a dense model")
    heads, width, layers = need("attention.head_count"), need("embedding_length"), need("block_count")
    head_dim = get("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise UserError(
                f"{name}: GGUF option {arch}.{key}={get(key)} is not implemented beside a head dim of {head_dim}; "
                "use another model"
            )
    family = "gemma3_text" if arch == "gemma3" else arch
    label = f"{fields.get('general.name')} {fields.get('general.basename')}".lower()
    if arch == "llama" and ((preset is not None and preset.family == "mistral") or "mistral" in label):
        family = "mistral"
    raw: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "tie_word_embeddings": tied,
    }
    if arch == "llama":
        # llama.cpp's converter drops Mistral's window, so an early Mistral can only be told by the preset asked for.
        window = get("attention.sliding_window", preset.window if family == "mistral" and preset else None)
        raw["sliding_window"] = window or None
    else:
        raw["sliding_window"] = need("attention.sliding_window")
        raw["query_pre_attn_scalar"] = width // heads if layers == _LAYERS_27B[arch] else head_dim
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := get(key)) is not None:
                raw[key] = cap or None
        if (local := get("rope.freq_base_swa")) is not None:
            raw["rope_local_base_freq"] = local
        period = get("attention.sliding_window_pattern")
        if isinstance(period, list):
            raw["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in period]
        elif period is not None:
            raw["layer_types"] = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    return parse_config(raw, name)


def _undo(arch: str, gguf_name: str, config: ModelConfig) -> Callable[[np.ndarray], np.ndarray]:
    """What llama.cpp's converter did to a tensor, taken back on its fp32 values.

    It interleaves the RoPE halves of q and k for llama (kv heads by their own count) and stores Gemma's norms as 1 + w.
    """
    if arch == "llama" and gguf_name.endswith((".attn_q.weight", ".attn_k.weight")):
        return lambda w: w.reshape(-1, config.head_dim // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
    if arch != "llama" and gguf_name.endswith("norm.weight"):
        return lambda w: w - np.float32(1)
    return lambda w: w


def read_gguf(
    path: pathlib.Path,
    precision: Precision,
    *,
    name: str,
    preset: ModelConfig | None = None,
    check: ConfigCheck | None = None,
    sharding: Sharding = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Reads a GGUF file: dequantized to fp32, then rounded once to the param dtype.

    Args:
      path: the file.
      precision: its param dtype is what weights are rounded to.
      name: the source as the user gave it.
      preset: the model asked for; tells Mistral from LLaMA, which GGUF does not.
      check: called with the config before any weight is read; may raise, or rename it.
      sharding: a Sharding, or a function of path and shape.
      progress: called after each tensor.

    Raises:
      UserError: anything wrong with the file, in one line.
    """
    try:
        import gguf
        from gguf.quants import dequantize
    except ImportError:
        raise UserError("reading a .gguf file needs the package gguf; pip install 'jaxkv[gguf]'") from None
    try:
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
        raise UserError(f"{name} is truncated or no GGUF file ({error}); download it again") from None

    reader.fields.clear()  # a large vocabulary takes most of a gigabyte here

    arch = str(fields.get("general.architecture"))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    odd = [tensor for tensor in stored if tensor.startswith(("rope_freqs", "rope_factors"))]
    if odd and arch in _NAMES:
        raise UserError(f"{name}: tensor {odd[0]} (scaled RoPE) is not implemented; use a model without it")
    if "token_embd.weight" not in stored and arch in _NAMES:
        raise UserError(f"{name}: tensor token_embd.weight is missing; use a complete file")
    vocab_size = int(stored["token_embd.weight"].shape[1]) if "token_embd.weight" in stored else 0
    config = dataclasses.replace(
        read_config(fields, vocab_size, "output.weight" not in stored, preset, name), name=path.stem
    )
    if check is not None:
        config = check(config)
    names = _NAMES[arch]

    def read(tensor: Any) -> np.ndarray:
        # By rows: dequantizing takes several times its result, and the copy keeps pages of the mapped file out of JAX.
        shape = tuple(int(n) for n in tensor.shape[::-1])
        values = np.empty(shape, np.float32)
        if len(shape) == 1:
            values[:] = dequantize(tensor.data, tensor.tensor_type)
        else:
            step = max(1, _BLOCK // shape[1])
            for start in range(0, shape[0], step):
                values[start : start + step] = dequantize(tensor.data[start : start + step], tensor.tensor_type)
        return _undo(arch, tensor.name, config)(values)

    def source(tensor: Any) -> SourceTensor:
        shape = tuple(int(n) for n in tensor.shape[::-1])
        return SourceTensor(_hf_name(tensor.name, names), shape, tensor.tensor_type.name, lambda: read(tensor))

    tensors = [source(tensor) for tensor in reader.tensors]
    graphdef, abstract = abstract_decoder(config, precision)
    shapes = {key: leaf.shape for key, leaf in flat_paths(abstract).items()}
    plan = match_tensors(config, shapes, key_table(config.family), tensors, name)
    tokenizer = _read_tokenizer(fields, name)
    try:
        state = fill_state(abstract, plan, config, name, sharding, progress)
    except NotImplementedError as error:
        raise UserError(f"{name}: {error}; use another quantization of the model") from None
    generation = {
        k.removeprefix("general.sampling."): v for k, v in fields.items() if k.startswith("general.sampling.")
    }
    provenance = {
        "source": name,
        "kind": "gguf",
        "revision": None,
        "files": hash_files([path]),
        "dtypes": count_dtypes(tensors),
        "add_bos": tokenizer.add_bos,
    }
    return Checkpoint(config, graphdef, state, tokenizer, generation, provenance)


def _hf_name(name: str, names: dict[str, str]) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in names:
        return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"
    return f"{names[parts[0]]}.{parts[1]}" if len(parts) == 2 and parts[0] in names else name


def _read_tokenizer(fields: dict[str, Any], name: str) -> Tokenizer:
    key = "tokenizer.ggml."
    hf = build_tokenizer(fields, name)
    hf.chat_template = fields.get("tokenizer.chat_template")
    add_bos = fields.get(f"{key}add_bos_token")
    stops = as_ids(*(fields.get(f"{key}{word}_token_id") for word in ("eos", "eot", "eom")))
    tokenizer = Tokenizer(hf, add_bos=None if add_bos is None else bool(add_bos), eos_ids=stops)
    if (back := tokenizer.decode(tokenizer.encode(_SAMPLE))) != _SAMPLE:
        raise UserError(
            f"{name}: the tokenizer cannot be trusted, it turns {_SAMPLE!r} into {back!r}; use another file"
        )
    return tokenizer
