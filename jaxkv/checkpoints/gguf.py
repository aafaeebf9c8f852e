"""GGUF checkpoints (llama.cpp's format): every block type that `gguf` dequantizes."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxkv import files
from jaxkv.checkpoints.checkpoint import Checkpoint, ConfigCheck, Progress, Provenance, Sharding
from jaxkv.checkpoints.fill import SourceTensor, count_dtypes, fill_state, match_tensors
from jaxkv.checkpoints.gguf_header import StoredTensor, find_parts, model_name
from jaxkv.checkpoints.gguf_tokenizer import build_tokenizer
from jaxkv.checkpoints.hf_tokenizer import check_template
from jaxkv.checkpoints.manifest import hash_files, unchanged
from jaxkv.checkpoints.tokenizer import Tokenizer, check_special_ids
from jaxkv.config import ModelConfig, Precision, RopeScaling
from jaxkv.errors import UserError
from jaxkv.files import AGAIN, reading
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.families import FAMILIES, key_table, parse_config
from jaxkv.models.hf_fields import Epsilon, Layers, Length, Positive, Size
from jaxkv.models.layers import rope_frequencies
from jaxkv.models.llama import llama3_scaling

_KNOWN = tuple(name for name, family in FAMILIES.items() if family.gguf)  # architectures
_ROPE_FREQS = "rope_freqs.weight"
_SAMPLE = "Of the 12 cafés,\n  which is the largest?  345.6"  # what every tokenizer must give back
_BLOCK = 1 << 22  # weights dequantized at a time
# llama.cpp does not store Gemma's query_pre_attn_scalar: it takes the head dim, and D / N for the 27B models, which it
# knows by their number of layers (llama-model.cpp, LLM_ARCH_GEMMA2 and LLM_ARCH_GEMMA3).
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}


def _shortest(value: float) -> float:
    """The decimal that a float32 was written from: 9.99999974e-06 is 1e-05."""
    return float(str(np.float32(value)))


class _Metadata(msgspec.Struct, kw_only=True):
    """What the metadata says under the architecture's name; lists go by layer."""

    embedding_length: Size
    block_count: Layers
    feed_forward_length: Size
    context_length: Length
    head_count: Size = msgspec.field(name="attention.head_count")
    head_count_kv: Size | None = msgspec.field(name="attention.head_count_kv", default=None)
    epsilon: Epsilon = msgspec.field(name="attention.layer_norm_rms_epsilon")
    key_length: Size | None = msgspec.field(name="attention.key_length", default=None)
    value_length: Size | None = msgspec.field(name="attention.value_length", default=None)
    rotated: Size | None = msgspec.field(name="rope.dimension_count", default=None)
    theta: Positive = msgspec.field(name="rope.freq_base", default=10000.0)
    local_theta: Positive | None = msgspec.field(name="rope.freq_base_swa", default=None)
    window: int | None = msgspec.field(name="attention.sliding_window", default=None)
    window_pattern: Layers | list[bool] | None = msgspec.field(name="attention.sliding_window_pattern", default=None)
    expert_count: int = 0
    attn_softcap: float | None = msgspec.field(name="attn_logit_softcapping", default=None)
    final_softcap: float | None = msgspec.field(name="final_logit_softcapping", default=None)


def _read_metadata(fields: dict[str, Any], arch: str, name: str) -> _Metadata:
    """What stands under the architecture's name. Raises UserError on an option that is not implemented."""
    for key, value in fields.items():
        if key.startswith(f"{arch}.rope.scaling.") and not (key.endswith(".type") and value == "none"):
            if key.endswith(".finetuned") or (key.endswith(".factor") and value in (0.0, 1.0)):
                continue
            raise UserError(f"{name}: GGUF option {key}={value!r} is not implemented; use a model without it")
    found = files.convert(
        {
            key.removeprefix(f"{arch}."): _shortest(value) if isinstance(value, float) else value
            for key, value in fields.items()
            if key.startswith(f"{arch}.")
        },
        _Metadata,
        f"{name}: GGUF metadata of {arch}",
        "convert the model again",
    )
    if found.expert_count > 0:
        raise UserError(
            f"{name}: GGUF option {arch}.expert_count={found.expert_count} is not implemented; use a dense model"
        )
    head_dim = found.key_length or found.embedding_length // found.head_count
    for key, value in (("attention.value_length", found.value_length), ("rope.dimension_count", found.rotated)):
        if value not in (None, head_dim):
            raise UserError(
                f"{name}: GGUF option {arch}.{key}={value} is not implemented beside a head dim of {head_dim}; "
                "use another model"
            )
    return found


def read_config(
    fields: dict[str, Any],
    vocab_size: int,
    tied: bool,
    preset: ModelConfig | None,
    name: str,
    rope_factors: np.ndarray | None = None,
) -> ModelConfig:
    """ModelConfig from GGUF metadata, through the same checks as a config.json.

    Args:
      fields: the metadata.
      vocab_size: rows of the embedding.
      tied: whether the file holds no head of its own.
      preset: the model asked for; tells Mistral from LLaMA.
      name: the source, for messages.
      rope_factors: the tensor rope_freqs.weight, by which RoPE's frequencies are divided; None where there is none.

    Raises:
      UserError: another architecture, a RoPE scaling that is none of ours, or a field that is missing or no such thing.
    """
    arch = fields.get("general.architecture")
    if not isinstance(arch, str) or arch not in _KNOWN:
        raise UserError(f"{name}: GGUF architecture '{arch}' is not implemented; known: {', '.join(_KNOWN)}")
    found = _read_metadata(fields, arch, name)
    heads, width = found.head_count, found.embedding_length
    head_dim = found.key_length or width // heads
    family, window = arch, found.window or None
    label = f"{fields.get('general.name')} {fields.get('general.basename')}".lower()
    if arch == "llama" and ((preset is not None and preset.family == "mistral") or "mistral" in label):
        family = "mistral"
        # llama.cpp's converter drops Mistral's window, so an early Mistral can only be told by the preset asked for.
        window = window or (preset.window if preset else None)
    raw: dict[str, Any] = {
        "model_type": FAMILIES[family].model_type,
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": found.feed_forward_length,
        "num_hidden_layers": found.block_count,
        "num_attention_heads": heads,
        "num_key_value_heads": found.head_count_kv or heads,
        "head_dim": head_dim,
        "max_position_embeddings": found.context_length,
        "rms_norm_eps": found.epsilon,
        "rope_theta": found.theta,
        "tie_word_embeddings": tied,
        "sliding_window": window,
    }
    if arch in _LAYERS_27B:
        raw |= _gemma_options(found, arch, head_dim)
    elif window is not None and family != "mistral":
        raise UserError(
            f"{name}: GGUF option {arch}.attention.sliding_window={window} is not implemented; use a model without it"
        )
    config = parse_config(raw, name)
    if rope_factors is None:
        return config
    return dataclasses.replace(config, rope_scaling=_read_scaling(config, rope_factors, preset, name))


def _gemma_options(found: _Metadata, arch: str, head_dim: int) -> dict[str, Any]:
    """Fields of config.json that Gemma alone has; a softcap of 0 is none."""
    heads, width, layers = found.head_count, found.embedding_length, found.block_count
    raw: dict[str, Any] = {"query_pre_attn_scalar": width // heads if layers == _LAYERS_27B[arch] else head_dim}
    caps = {"attn_logit_softcapping": found.attn_softcap, "final_logit_softcapping": found.final_softcap}
    raw |= {key: cap or None for key, cap in caps.items() if cap is not None}
    if found.local_theta is not None:
        raw["rope_local_base_freq"] = found.local_theta
    if (period := found.window_pattern) is not None:
        windowed = period if isinstance(period, list) else [(i + 1) % period != 0 for i in range(layers)]
        raw["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windowed]
    return raw


def _read_scaling(
    config: ModelConfig, factors: np.ndarray, preset: ModelConfig | None, name: str
) -> RopeScaling | None:
    """The scaling behind rope_freqs.weight, which llama.cpp's converter stores instead of its numbers.

    Tried are the preset's and, with the largest factor, that of all released Llamas.

    Raises:
      UserError: the factors are those of neither.
    """
    candidates = [None, llama3_scaling(float(factors.max(initial=1.0)))]
    if preset is not None:
        candidates.append(preset.rope_scaling)
    plain = rope_frequencies((config.rope_theta, None), config.head_dim, np.float64)
    for scaling in candidates:
        expected = plain / rope_frequencies((config.rope_theta, scaling), config.head_dim, np.float64)
        # The converter works in fp32; another scaling is off by far more.
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4, atol=0):
            return scaling
    raise UserError(
        f"{name}: tensor rope_freqs.weight holds a RoPE scaling other than Llama 3's, which is not implemented; "
        "use a model without it"
    )


def _undo(arch: str, gguf_name: str, config: ModelConfig) -> Callable[[np.ndarray], np.ndarray]:
    """What llama.cpp's converter did to a tensor, taken back on its fp32 values.

    It interleaves the RoPE halves of q and k for llama (kv heads by their own count) and stores Gemma's norms as 1 + w.
    """
    if arch == "llama" and gguf_name.endswith((".attn_q.weight", ".attn_k.weight")):
        return lambda w: w.reshape(-1, config.head_dim // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
    if config.norm_offset and gguf_name.endswith("norm.weight"):
        return lambda w: w - np.float32(config.norm_offset)
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
      path: the file, or any part of a split model: all parts are read.
      precision: its param dtype is what weights are rounded to.
      name: the source as the user gave it.
      preset: the model asked for; tells Mistral from LLaMA, which GGUF does not.
      check: called with the config before any weight is read; may raise, or rename it.
      sharding: a Sharding, or a function of path and shape.
      progress: called after each tensor.

    Raises:
      UserError: anything wrong with the file, in one line.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError("reading a .gguf file needs the package gguf; pip install 'jaxkv[gguf]'")
    paths = list(parts := find_parts(path))
    with unchanged(paths):
        fields = parts[paths[0]].fields
        stored = [tensor for part in parts.values() for tensor in part.tensors]
        config = _config_of(fields, stored, preset, model_name(path), name)
        if check is not None:
            config = check(config)
        graphdef, abstract = abstract_decoder(config, precision)
        arch = fields["general.architecture"]
        names = _hf_names(arch, config)
        tensors = [
            _source(tensor, names.get(tensor.name, tensor.name), arch, config)
            for tensor in stored
            if tensor.name != _ROPE_FREQS
        ]
        plan = match_tensors(config, abstract, tensors, name)
        tokenizer = _read_tokenizer(fields, name)
        check_special_ids(tokenizer, config.vocab_size, name)
        with reading(name, "use another quantization of the model", (NotImplementedError,)):
            state = fill_state(abstract, plan, config, name, sharding, progress)
        digests = hash_files(paths)
    generation = {
        k.removeprefix("general.sampling."): v for k, v in fields.items() if k.startswith("general.sampling.")
    }
    provenance = Provenance(name, "gguf", files=digests, dtypes=count_dtypes(tensors), add_bos=tokenizer.add_bos)
    return Checkpoint(config, graphdef, state, tokenizer, generation, provenance)


def _config_of(
    fields: dict[str, Any], stored: Sequence[StoredTensor], preset: ModelConfig | None, label: str, where: str
) -> ModelConfig:
    """The config, under the file's name. Raises UserError on what is not implemented or contradicts the tensors."""
    from gguf.quants import dequantize

    arch, tensors = str(fields.get("general.architecture")), {tensor.name: tensor for tensor in stored}
    if arch not in _KNOWN:
        read_config(fields, 0, False, preset, where)  # refuses it
    if odd := [name for name in tensors if name.startswith("rope_factors")]:
        raise UserError(f"{where}: tensor {odd[0]} (scaled RoPE) is not implemented; use a model without it")
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise UserError(f"{where}: tensor token_embd.weight is missing; use a complete file")
    factors = None
    if (freqs := tensors.get(_ROPE_FREQS)) is not None:
        with reading(f"{where}: tensor {_ROPE_FREQS}", kinds=(NotImplementedError,)):
            factors = dequantize(freqs.data, freqs.type)
    config = read_config(
        fields,
        tensors["token_embd.weight"].shape[0],
        "output.weight" not in tensors,
        preset,
        where,
        factors,
    )
    layers = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
    if config.num_layers != layers:  # before a decoder of that many is made
        raise UserError(
            f"{where}: {arch}.block_count is {config.num_layers}, and the file has {layers} layers; {AGAIN}"
        )
    return dataclasses.replace(config, name=label)


def _source(tensor: StoredTensor, name: str, arch: str, config: ModelConfig) -> SourceTensor:
    """A stored tensor under its Hugging Face name `name`, read by rows.

    Dequantizing takes several times its result, and the copy keeps pages of the mapped file out of JAX.
    """
    from gguf.quants import dequantize

    shape = tensor.shape

    def read() -> np.ndarray:
        values = np.empty(shape, np.float32)
        if len(shape) == 1:
            values[:] = dequantize(tensor.data, tensor.type)
        else:
            step = max(1, _BLOCK // shape[1])
            for start in range(0, shape[0], step):
                values[start : start + step] = dequantize(tensor.data[start : start + step], tensor.type)
        return _undo(arch, tensor.name, config)(values)

    return SourceTensor(name, shape, tensor.type.name, read)


def _hf_names(arch: str, config: ModelConfig) -> dict[str, str]:
    """llama.cpp's name of each tensor of a model -> its Hugging Face name, by llama.cpp's own table."""
    import gguf

    layers = config.num_layers
    table = gguf.get_tensor_name_map(next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), layers)
    wanted = [key.format(i=i) for key in key_table(config.family) for i in range(layers if "{i}" in key else 1)]
    named = {table.get_name(name, try_suffixes=(".weight", ".bias")): name for name in wanted}
    return {"output.weight": "lm_head.weight"} | {ours: name for ours, name in named.items() if ours is not None}


class _TokenizerRules(msgspec.Struct, kw_only=True):
    """What stands beside the columns of a tokenizer; a converter may write a flag as a number."""

    chat_template: str | None = msgspec.field(name="tokenizer.chat_template", default=None)
    add_bos: bool | int | None = msgspec.field(name="tokenizer.ggml.add_bos_token", default=None)
    eos: int | None = msgspec.field(name="tokenizer.ggml.eos_token_id", default=None)
    eot: int | None = msgspec.field(name="tokenizer.ggml.eot_token_id", default=None)
    eom: int | None = msgspec.field(name="tokenizer.ggml.eom_token_id", default=None)


def _read_tokenizer(fields: dict[str, Any], name: str) -> Tokenizer:
    rules = files.convert(fields, _TokenizerRules, name)
    with files.reading(name, kinds=(Exception,)):  # the Rust library has no class of its own
        hf = build_tokenizer(fields, name)
    hf.chat_template = rules.chat_template
    check_template(hf, name)
    add_bos = None if rules.add_bos is None else bool(rules.add_bos)
    tokenizer = Tokenizer(hf, add_bos=add_bos, eos_ids=[i for i in (rules.eos, rules.eot, rules.eom) if i is not None])
    if (back := tokenizer.decode(tokenizer.encode(_SAMPLE))) != _SAMPLE:
        raise UserError(
            f"{name}: the tokenizer cannot be trusted, it turns {_SAMPLE!r} into {back!r}; use another file"
        )
    return tokenizer
