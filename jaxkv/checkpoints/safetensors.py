"""Safetensors files: their headers, checked by the format's own rules before any weight is read."""

import functools
import math
import pathlib
import re
import struct
from typing import Annotated

import ml_dtypes
import msgspec
import numpy as np

from jaxkv.checkpoints.fill import SourceTensor
from jaxkv.errors import UserError
from jaxkv.files import AGAIN, decode_json, reading

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_NAMES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
SAFETENSORS_CODES = {name: code for code, name in _NAMES.items()}
# Buffers that old checkpoints carry; they are functions of the config.
_BUFFERS = re.compile(r".*rotary_emb\.inv_freq|(model\.)?layers\.\d+\.self_attn\.bias")
_LONGEST_HEADER = 100_000_000  # bytes, as in the format's own reader

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]


class _Entry(msgspec.Struct):
    """A tensor of the header; offsets are bytes from the end of the header."""

    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


def list_tensors(path: pathlib.Path) -> list[SourceTensor]:
    """Tensors of one safetensors file, from its header alone.

    The data is read with plain reads later: pages of a memory map would count as ours, and all of them would stay.

    Raises:
      UserError: no file, truncated, no safetensors, a header that contradicts itself, or a dtype that is not a float.
    """
    begin, content = _read_header(path)
    found = decode_json(content, dict[str, msgspec.Raw], path)
    found.pop("__metadata__", None)
    entries = {name: decode_json(bytes(raw), _Entry, f"{path}: tensor {name}") for name, raw in found.items()}
    wanted = {name: entry for name, entry in entries.items() if not _BUFFERS.fullmatch(name)}
    if odd := sorted({entry.dtype for entry in wanted.values()} - set(_DTYPES)):
        raise UserError(
            f"{path} holds tensors of dtype {', '.join(odd)}, which is not implemented; use an unquantized copy"
        )
    _check_layout(path, entries, begin)

    def read(entry: _Entry) -> np.ndarray:
        dtype, (start, stop) = np.dtype(_DTYPES[entry.dtype]), entry.data_offsets
        with reading(path):
            array = np.fromfile(path, dtype, (stop - start) // dtype.itemsize, offset=begin + start)
            return array.reshape(entry.shape)

    return [
        SourceTensor(name, tuple(entry.shape), _NAMES[entry.dtype], functools.partial(read, entry))
        for name, entry in wanted.items()
    ]


def _read_header(path: pathlib.Path) -> tuple[int, bytes]:
    """Where the data begins, and the JSON before it."""
    with reading(path), path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _LONGEST_HEADER + 1
        content = file.read(length) if length <= _LONGEST_HEADER else b""
    if len(content) != length:
        raise UserError(f"{path} has no readable safetensors header: truncated or not safetensors; {AGAIN}")
    return 8 + length, content


def _check_layout(path: pathlib.Path, entries: dict[str, _Entry], begin: int) -> None:
    """Ranges follow each other without gap or overlap up to the end of the file, and each holds its shape.

    A name that occurs twice in the header leaves a gap here, since JSON keeps the last of them; not if both have one
    range, where the last counts.
    """
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != end or stop < start:
            fault = "overlaps another tensor" if start < end else "leaves a gap" if start > end else "runs backwards"
            raise UserError(f"{path}: tensor {name} at bytes {start} to {stop} {fault}; {AGAIN}")
        end = stop
        if entry.dtype in _DTYPES:
            size = math.prod(entry.shape) * np.dtype(_DTYPES[entry.dtype]).itemsize
            if size != stop - start:
                raise UserError(
                    f"{path}: tensor {name} of shape {entry.shape} in {entry.dtype} takes {size} bytes, "
                    f"and the header gives it {stop - start}; {AGAIN}"
                )
    size, whole = path.stat().st_size, begin + end
    if size != whole:
        what = f"is truncated ({size} bytes of {whole})" if size < whole else f"has {size - whole} bytes after its end"
        raise UserError(f"{path} {what}; {AGAIN}")
