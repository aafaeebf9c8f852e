"""Checkpoints in the Hugging Face layout: a directory of safetensors."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxkv.checkpoints.checkpoint import Checkpoint, ConfigCheck, Progress, Sharding
from jaxkv.checkpoints.fill import SourceTensor, count_dtypes, fill_state, flat_paths, match_tensors, shorten
from jaxkv.checkpoints.hf_tokenizer import TOKENIZER_FILES, read_tokenizer
from jaxkv.config import Precision
from jaxkv.errors import UserError
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.families import key_table, parse_config

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_NAMES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
SAFETENSORS_CODES = {name: code for code, name in _NAMES.items()}
# Buffers that old checkpoints carry; they are functions of the config.
_BUFFERS = re.compile(r".*rotary_emb\.inv_freq|model\.layers\.\d+\.self_attn\.bias")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object. Raises UserError if the file is no such thing."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object; download it again")
    return value


def hash_files(paths: Sequence[pathlib.Path]) -> dict[str, str]:
    """sha256 of each file by its name."""
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def list_tensors(path: pathlib.Path) -> list[SourceTensor]:
    """Tensors of one safetensors file, from its header alone.

    The data is read with plain reads later: pages of a memory map would count as ours, and all of them would stay.

    Raises:
      UserError: the file is truncated, is no safetensors file, or holds a dtype that is not a float.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError("header past the end")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} has no readable safetensors header: truncated or not safetensors; download it again"
        ) from None
    if size < end:
        raise UserError(f"{path} is truncated ({size} bytes of {end}); download it again")
    odd = sorted({entry["dtype"] for name, entry in header.items() if not _BUFFERS.fullmatch(name)} - set(_DTYPES))
    if odd:
        raise UserError(
            f"{path} holds tensors of dtype {', '.join(odd)}, which is not implemented; use an unquantized copy"
        )

    def read(name: str) -> np.ndarray:
        entry = header[name]
        start, stop = entry["data_offsets"]
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        array = np.fromfile(path, dtype, (stop - start) // dtype.itemsize, offset=8 + length + start)
        return array.reshape(entry["shape"])

    return [
        SourceTensor(name, tuple(entry["shape"]), _NAMES[entry["dtype"]], functools.partial(read, name))
        for name, entry in header.items()
        if not _BUFFERS.fullmatch(name)
    ]


def weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a directory.

    Raises:
      UserError: none there, or a shard of the index is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    elif (directory / "model.safetensors").exists():
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
        parts = {match[2] for name in names if (match := re.search(r"-(\d+)-of-(\d+)\.safetensors$", name))}
        if len(parts) == 1 and int(next(iter(parts))) != len(names):
            raise UserError(f"{directory} holds {len(names)} of {int(next(iter(parts)))} shards; download the rest")
    if not names:
        other = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if other:
            raise UserError(
                f"{directory} has no safetensors weights, only {shorten(other, 2)}; convert them first: "
                "load them with transformers and save_pretrained"
            )
        raise UserError(f"{directory} has no weights; give a directory with *.safetensors, a .gguf file or a hub id")
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise UserError(f"{directory} lacks {len(missing)} of {len(names)} shards: {shorten(missing)}; download them")
    return [directory / name for name in names]


def as_ids(*values: Any) -> tuple[int, ...]:
    """Token ids from ints, lists of ints and None."""
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return tuple(int(item) for item in flat if item is not None)


def read_hf(
    directory: pathlib.Path,
    precision: Precision,
    *,
    name: str,
    check: ConfigCheck | None = None,
    sharding: Sharding = None,
    progress: Progress | None = None,
    revision: str | None = None,
) -> Checkpoint:
    """Reads a directory in the Hugging Face layout.

    Args:
      directory: holds config.json, safetensors and tokenizer files.
      precision: its param dtype is what weights are rounded to, once.
      name: the source as the user gave it.
      check: called with the config before any weight is read; may raise, or rename it.
      sharding: a Sharding, or a function of path and shape.
      progress: called after each tensor.
      revision: recorded.

    Raises:
      UserError: anything wrong with the files, in one line.
    """
    if not (directory / "config.json").exists():
        weight_files(directory)  # its message is the better one where there are no weights either
        raise UserError(f"{directory} has weights but no config.json; download it too")
    raw = read_json(directory / "config.json")
    config = dataclasses.replace(parse_config(raw, name), name=name.rstrip("/").split("/")[-1])
    if check is not None:
        config = check(config)
    generation_file = directory / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    files = weight_files(directory)
    tensors = [tensor for path in files for tensor in list_tensors(path)]
    repeated = sorted({t.name for t in tensors if sum(o.name == t.name for o in tensors) > 1}) if len(files) > 1 else []
    if repeated:
        raise UserError(f"{directory} holds {shorten(repeated)} in more than one shard; download the weights again")
    graphdef, abstract = abstract_decoder(config, precision)
    shapes = {path: leaf.shape for path, leaf in flat_paths(abstract).items()}
    plan = match_tensors(config, shapes, key_table(config.family), tensors, name)
    eos_ids = as_ids(raw.get("eos_token_id"), generation.get("eos_token_id"))
    tokenizer = read_tokenizer(directory, config, eos_ids)
    used = [directory / "config.json", generation_file, *(directory / n for n in TOKENIZER_FILES), *files]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # hashing overlaps with reading
        hashes = pool.submit(hash_files, [path for path in used if path.exists()])
        state = fill_state(abstract, plan, config, name, sharding, progress)
        digests = hashes.result()
    provenance = {
        "source": name,
        "kind": "safetensors",
        "revision": revision,
        "files": digests,
        "dtypes": count_dtypes(tensors),
        "add_bos": tokenizer.add_bos,
    }
    return Checkpoint(config, graphdef, state, tokenizer, generation, provenance)
