"""Safetensors: which files of a folder are the model's weights, and what they hold."""

import dataclasses
import functools
import json
import os
import pathlib
import re

import msgspec
import numpy as np

from jaxkv.checkpoints.fill import SourceTensor, shorten
from jaxkv.config import dtype_from_name
from jaxkv.errors import UserError
from jaxkv.files import AGAIN, BROKEN, decode_json, read_bytes, read_json, reading

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_NAMES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
SAFETENSORS_CODES = {name: code for code, name in _NAMES.items()}
# Buffers that old checkpoints carry; they are functions of the config.
_BUFFERS = re.compile(r".*rotary_emb\.inv_freq|(model\.)?layers\.\d+\.self_attn\.bias")


def list_tensors(path: pathlib.Path) -> list[SourceTensor]:
    """Tensors of one file, from its header alone, which the format's own reader has checked.

    The data is read with plain reads later: pages of a memory map would count as ours, and all of them would stay.
    Raises UserError on a file that is broken, or a dtype that is not a float.
    """
    from safetensors import SafetensorError, safe_open

    with reading(path, AGAIN, (SafetensorError, *BROKEN)), path.open("rb") as file, safe_open(path, framework="np"):
        begin = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(begin - 8))
    wanted = {name: entry for name, entry in header.items() if name != "__metadata__" and not _BUFFERS.fullmatch(name)}
    if odd := sorted({entry["dtype"] for entry in wanted.values()} - set(_NAMES)):
        raise UserError(
            f"{path} holds tensors of dtype {', '.join(odd)}, which is not implemented; use an unquantized copy"
        )

    def read(code: str, shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
        dtype = np.dtype(dtype_from_name(_NAMES[code]))
        with reading(path):
            array = np.fromfile(path, dtype, (stop - start) // dtype.itemsize, offset=begin + start)
            return array.reshape(shape)

    return [
        SourceTensor(name, shape, _NAMES[code], functools.partial(read, code, shape, *entry["data_offsets"]))
        for name, entry in wanted.items()
        for code, shape in [(entry["dtype"], tuple(entry["shape"]))]
    ]


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The weights of a folder."""

    files: tuple[pathlib.Path, ...]  # what is read
    left_aside: tuple[str, ...]  # weight files, and an index, that are not
    mistral_layout: bool  # Mistral's own consolidated.safetensors, with its names and order of rows


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Adapter(msgspec.Struct):
    base_model_name_or_path: str | None = None


def find_weights(directory: pathlib.Path) -> WeightFiles:
    """The safetensors files that transformers would load: model.safetensors, before an index and its shards.

    Without either, one complete set of numbered shards is taken, or whatever else there is; Mistral's own
    consolidated.safetensors only if it stands alone. Raises UserError if none is there, a shard is missing, or the
    folder holds a LoRA adapter.
    """
    with reading(directory, "check the path"):
        present = set(os.listdir(directory))
    names = sorted(name for name in present if name.endswith(".safetensors"))
    _refuse_adapter(directory, present)
    own = [name for name in names if not name.startswith("consolidated")]
    if SINGLE in present:
        chosen = [SINGLE]
    elif INDEX in present:
        chosen = _indexed(directory, present)
    else:
        chosen = _unindexed(directory, own or names)
    if not chosen:
        _refuse_empty(directory, present)
    left = set(names) - set(chosen) | ({INDEX} & present if chosen == [SINGLE] else set())
    files = tuple(directory / name for name in chosen)
    return WeightFiles(files, tuple(sorted(left)), chosen[0] not in own and INDEX not in present)


def _refuse_adapter(directory: pathlib.Path, present: set[str]) -> None:
    if "adapter_config.json" not in present and not any(name.startswith("adapter_model.") for name in present):
        return
    base = None
    if "adapter_config.json" in present:
        base = read_json(directory / "adapter_config.json", _Adapter).base_model_name_or_path
    raise UserError(
        f"{directory} holds a LoRA adapter{f' of {base}' if base else ''}, not a model; merge it into its base first "
        "(peft: merge_and_unload, then save_pretrained) and give that folder"
    )


def _indexed(directory: pathlib.Path, present: set[str]) -> list[str]:
    names = sorted(set(decode_json(read_bytes(directory / INDEX), _Index, directory / INDEX).weight_map.values()))
    if odd := [name for name in names if os.path.basename(name) != name or not name.endswith(".safetensors")]:
        raise UserError(f"{directory / INDEX} names {odd[0]!r}, no safetensors file beside it; download it again")
    if missing := [name for name in names if name not in present]:
        raise UserError(f"{directory} lacks {len(missing)} of {len(names)} shards: {shorten(missing)}; download them")
    return names


def _unindexed(directory: pathlib.Path, names: list[str]) -> list[str]:
    """The one set of numbered shards among some files, or all files if none is numbered."""
    sets: dict[tuple[str, int], list[re.Match[str]]] = {}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        sets.setdefault((match["stem"], int(match["count"])), []).append(match)
    if not sets:
        return names
    if len(sets) > 1:
        found = [f"{stem} of {count}" for stem, count in sorted(sets)]
        raise UserError(
            f"{directory} has no {INDEX} and shards of several saves ({shorten(found)}); keep those of one of them"
        )
    (((_, count), shards),) = sets.items()
    if [int(shard["number"]) for shard in shards] != list(range(1, count + 1)):
        raise UserError(f"{directory} holds {len(shards)} of {count} shards; download the rest")
    return [shard[0] for shard in shards]


def _refuse_empty(directory: pathlib.Path, present: set[str]) -> None:
    other = sorted(name for name in present if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if other:
        raise UserError(
            f"{directory} has no safetensors weights, only {shorten(other, 2)}; convert them first: "
            "load them with transformers and save_pretrained"
        )
    raise UserError(f"{directory} has no weights; give a directory with *.safetensors, a .gguf file or a hub id")
