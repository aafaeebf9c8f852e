"""Safetensors files: checked by the format's own reader before any weight is read, read without its memory map."""

import functools
import json
import pathlib
import re

import ml_dtypes
import numpy as np

from jaxkv.checkpoints.fill import SourceTensor
from jaxkv.errors import UserError
from jaxkv.files import AGAIN, BROKEN, reading

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_NAMES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
SAFETENSORS_CODES = {name: code for code, name in _NAMES.items()}
# Buffers that old checkpoints carry; they are functions of the config.
_BUFFERS = re.compile(r".*rotary_emb\.inv_freq|(model\.)?layers\.\d+\.self_attn\.bias")


def list_tensors(path: pathlib.Path) -> list[SourceTensor]:
    """Tensors of one safetensors file, from its header alone.

    The data is read with plain reads later: pages of a memory map would count as ours, and all of them would stay.

    Raises:
      UserError: no file, truncated, no safetensors, a header that contradicts itself, or a dtype that is not a float.
    """
    from safetensors import SafetensorError, safe_open

    with reading(path, AGAIN, (SafetensorError, *BROKEN)), path.open("rb") as file, safe_open(path, framework="np"):
        begin = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(begin - 8))
    wanted = {name: entry for name, entry in header.items() if name != "__metadata__" and not _BUFFERS.fullmatch(name)}
    if odd := sorted({entry["dtype"] for entry in wanted.values()} - set(_DTYPES)):
        raise UserError(
            f"{path} holds tensors of dtype {', '.join(odd)}, which is not implemented; use an unquantized copy"
        )

    def read(code: str, shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
        dtype = np.dtype(_DTYPES[code])
        with reading(path):
            array = np.fromfile(path, dtype, (stop - start) // dtype.itemsize, offset=begin + start)
            return array.reshape(shape)

    return [
        SourceTensor(name, shape, _NAMES[code], functools.partial(read, code, shape, *entry["data_offsets"]))
        for name, entry in wanted.items()
        for code, shape in [(entry["dtype"], tuple(entry["shape"]))]
    ]
