"""GGUF headers, checked by llama.cpp's rules against the file's size before anything is allocated; split models."""

import dataclasses
import math
import mmap
import pathlib
import re
import struct
from typing import Any

import numpy as np

from jaxkv.checkpoints.fill import shorten
from jaxkv.errors import UserError
from jaxkv.files import AGAIN

_MAGIC = b"GGUF"
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # type of a value -> struct's letter
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file: its shape, outermost dimension first, block type and bytes by rows [..., B]."""

    name: str
    shape: tuple[int, ...]
    type: Any  # gguf.GGMLQuantizationType
    data: np.ndarray


@dataclasses.dataclass(frozen=True)
class Header:
    """What a header says of the file.

    Attributes:
      fields: metadata: numbers, strings and lists of them.
      tensors: in the order of the file.
      part: number of this file among those of a split model, from 0.
      parts: how many files the model is split into; 0 or 1 if it is not.
      total: number of tensors in all parts.
    """

    fields: dict[str, Any]
    tensors: tuple[StoredTensor, ...]
    part: int
    parts: int
    total: int


class _Bytes:
    """A file read from its start; a length past its end is an error, not an allocation."""

    def __init__(self, data: mmap.mmap, stored: np.ndarray):
        self.data, self.stored, self.place = data, stored, 0

    def skip(self, count: int) -> int:
        start, self.place = self.place, self.place + count
        if self.place > len(self.data):
            raise ValueError(f"a length of {count} bytes at byte {start} goes past its end")
        return start

    def numbers(self, letter: str, count: int = 1) -> tuple[Any, ...]:
        start = self.skip(count * struct.calcsize("<" + letter))
        return struct.unpack_from(f"<{count}{letter}", self.data, start)

    def number(self, letter: str) -> Any:
        return self.numbers(letter)[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self.skip(size)
        return self.data[start : start + size].decode()

    def value(self, kind: int) -> Any:
        """A number, a string, a list of strings, or numbers as they lie in the file."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        item, count = self.number("I"), self.number("Q")
        if item == _STRING:
            return [self.text() for _ in range(count)]
        dtype = np.dtype("<" + _NUMBERS[item])
        start = self.skip(count * dtype.itemsize)
        return self.stored[start : self.place].view(dtype)


def read_header(path: pathlib.Path) -> Header:
    """Walks through the header of a GGUF file.

    Raises:
      UserError: no GGUF file, truncated, or a count, length, type, offset or alignment that cannot be right.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _walk(_Bytes(data, np.memmap(path, mode="r")))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path") from error
    except KeyError as error:
        raise UserError(f"{path} is truncated or no GGUF file (type {error} is unknown); {AGAIN}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path} is truncated or no GGUF file ({error}); {AGAIN}") from error


def _walk(data: _Bytes) -> Header:
    if data.data[:4] != _MAGIC:
        raise ValueError(f"it begins with {data.data[:4]!r}")
    data.skip(4)
    if (version := data.number("I")) not in (2, 3):
        other = " of big-endian machines" if version & 0xFFFF == 0 else f" {version}"
        raise ValueError(f"format{other}, not 2 or 3")
    tensors, entries = data.number("Q"), data.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(entries):
        key = data.text()
        if key in fields:
            raise ValueError(f"{key} occurs twice")
        fields[key] = data.value(data.number("I"))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment not in [1 << bit for bit in range(32)]:
        raise ValueError(f"an alignment of {alignment} bytes")
    places, end = _walk_tensors(data, tensors, alignment)
    begin, stored = data.place + -data.place % alignment, data.stored
    if begin + end > len(stored):
        raise ValueError(f"{len(stored)} bytes of {begin + end}")
    # Only now: a damaged count may span the whole file, and Python's numbers take several times its bytes.
    fields = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in fields.items()}
    found = []
    for name, (shape, kind, offset, rows) in places.items():
        held = stored[begin + offset : begin + offset + math.prod(rows)].reshape(rows)
        found.append(StoredTensor(name, shape, kind, held))
    split = [int(fields.get(f"split.{key}", 0)) for key in ("no", "count", "tensors.count")]
    return Header(fields, tuple(found), *split)


def _walk_tensors(data: _Bytes, count: int, alignment: int) -> tuple[dict[str, tuple[Any, ...]], int]:
    """Each tensor's shape, block type, offset and shape in bytes, and where the last ends.

    Each begins where the one before it ended, aligned.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    found: dict[str, tuple[Any, ...]] = {}
    due = end = 0
    for _ in range(count):
        name = data.text()
        dims = data.number("I")
        if name in found or not 1 <= dims <= 4:
            raise ValueError(f"tensor {name} occurs twice" if name in found else f"tensor {name} has {dims} dimensions")
        shape = data.numbers("Q", dims)[::-1]
        kind = GGMLQuantizationType(data.number("I"))
        block, size = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise ValueError(f"tensor {name} has the shape {list(shape)} in blocks of {block}")
        if (offset := data.number("Q")) != due:
            raise ValueError(f"tensor {name} begins at {offset}, not at {due}")
        rows = (*shape[:-1], shape[-1] // block * size)
        found[name] = (shape, kind, offset, rows)
        end = due + math.prod(rows)
        due = end + -end % alignment
    return found, end


def find_parts(path: pathlib.Path) -> dict[pathlib.Path, Header]:
    """The header of each file of the model that a GGUF file is or is a part of, in their order.

    Raises:
      UserError: a file is broken, a part is missing or another model's, or the parts hold other tensors than they say.
    """
    first = read_header(path)
    if first.parts < 2:
        return {path: first}
    match = _PART.fullmatch(path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (first.part + 1, first.parts):
        raise UserError(
            f"{path} is part {first.part + 1} of {first.parts} of a split model and is not named so; "
            f"rename it to NAME-{first.part + 1:05d}-of-{first.parts:05d}.gguf, beside the others"
        )
    paths = [path.with_name(f"{match['stem']}-{i + 1:05d}-of-{first.parts:05d}.gguf") for i in range(first.parts)]
    if missing := [part.name for part in paths if not part.exists()]:
        raise UserError(f"{path} lacks {len(missing)} of {len(paths)} parts: {shorten(missing)}; download them")
    headers = [read_header(part) for part in paths]
    for number, (part, header) in enumerate(zip(paths, headers, strict=True)):
        if (header.part, header.parts) != (number, first.parts):
            raise UserError(
                f"{part} says that it is part {header.part + 1} of {header.parts}, not {number + 1} of {first.parts}; "
                "use the parts of one model"
            )
    names = [tensor.name for header in headers for tensor in header.tensors]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path}: {shorten(twice)} is in more than one part; download the parts again")
    if len(names) != first.total:
        raise UserError(
            f"{path}: the parts hold {len(names)} tensors of {first.total}; use the parts of one model, or {AGAIN}"
        )
    return dict(zip(paths, headers, strict=True))


def model_name(path: pathlib.Path) -> str:
    """The file's name without its ending and its number among the parts."""
    match = _PART.fullmatch(path.name)
    return match["stem"] if match else path.stem
