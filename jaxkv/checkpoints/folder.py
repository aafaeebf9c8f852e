"""Which files of a folder are the model's weights, and which are left aside."""

import dataclasses
import os
import pathlib
import re

import msgspec

from jaxkv.checkpoints.fill import shorten
from jaxkv.errors import UserError
from jaxkv.files import decode_json, read_bytes, read_json, reading

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The weights of a folder.

    Attributes:
      files: what is read.
      left_aside: names of weight files, and of an index, that are not read.
      mistral_layout: whether they are Mistral's own (consolidated.safetensors), with its names and order of rows.
    """

    files: tuple[pathlib.Path, ...]
    left_aside: tuple[str, ...] = ()
    mistral_layout: bool = False


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Adapter(msgspec.Struct):
    base_model_name_or_path: str | None = None


def find_weights(directory: pathlib.Path) -> WeightFiles:
    """The safetensors files that transformers would load: model.safetensors, before an index and its shards.

    Without either, one complete set of numbered shards is taken, or whatever else there is; Mistral's own
    consolidated.safetensors only if it stands alone.

    Raises:
      UserError: none there, a shard is missing, or the folder holds a LoRA adapter.
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
    return WeightFiles(files, tuple(sorted(left)), mistral_layout=chosen[0] not in own and INDEX not in present)


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
    sets: dict[tuple[str, int], list[str]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            sets.setdefault((match["stem"], int(match["count"])), []).append(name)
    if not sets:
        return names
    if len(sets) > 1:
        found = [f"{stem} of {count}" for stem, count in sorted(sets)]
        raise UserError(
            f"{directory} has no {INDEX} and shards of several saves ({shorten(found)}); keep those of one of them"
        )
    (((_, count), shards),) = sets.items()
    if [int(_SHARD.fullmatch(name)["number"]) for name in shards] != list(range(1, count + 1)):  # type: ignore[index]
        raise UserError(f"{directory} holds {len(shards)} of {count} shards; download the rest")
    return shards


def _refuse_empty(directory: pathlib.Path, present: set[str]) -> None:
    other = sorted(name for name in present if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if other:
        raise UserError(
            f"{directory} has no safetensors weights, only {shorten(other, 2)}; convert them first: "
            "load them with transformers and save_pretrained"
        )
    raise UserError(f"{directory} has no weights; give a directory with *.safetensors, a .gguf file or a hub id")
