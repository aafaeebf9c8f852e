"""GGUF headers, checked by llama.cpp's rules against the file's size before anything is allocated; split models."""

import dataclasses
import math
import mmap
import pathlib
import re
import struct
from typing import Any

from jaxkv.checkpoints.fill import shorten
from jaxkv.errors import UserError
from jaxkv.files import AGAIN

_MAGIC = b"GGUF"
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # type of a value -> struct's letter
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclasses.dataclass(frozen=True)
class Header:
    """What a header says of the file.

    Attributes:
      tensors: names in the order of the file.
      part: number of this file among those of a split model, from 0.
      parts: how many files the model is split into; 0 or 1 if it is not.
      total: number of tensors in all parts.
    """

    tensors: tuple[str, ...]
    part: int
    parts: int
    total: int


class _Bytes:
    """A file read from its start; a length past its end is an error, not an allocation."""

    def __init__(self, data: mmap.mmap):
        self.data, self.place, self.order = data, 0, "<"

    def skip(self, count: int) -> int:
        start, self.place = self.place, self.place + count
        if self.place > len(self.data):
            raise ValueError(f"a length of {count} bytes at byte {start} goes past its end")
        return start

    def number(self, letter: str) -> Any:
        code = self.order + letter
        return struct.unpack_from(code, self.data, self.skip(struct.calcsize(code)))[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self.skip(size)
        return self.data[start : start + size].decode()

    def value(self, kind: int) -> Any:
        """A number, a string, or None for an array, which is passed over."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        item, count = self.number("I"), self.number("Q")
        if item == _STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            self.skip(count * struct.calcsize(self.order + _NUMBERS[item]))
        return None


def read_header(path: pathlib.Path) -> Header:
    """Walks through the header of a GGUF file.

    Raises:
      UserError: no GGUF file, truncated, or a count, length, type, offset or alignment that cannot be right.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _walk(_Bytes(data))
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
    if data.number("I") & 0xFFFF == 0:  # a version as the other byte order has it
        data.order = ">"
    tensors, entries = data.number("Q"), data.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(entries):
        key = data.text()
        if key in fields:
            raise ValueError(f"{key} occurs twice")
        fields[key] = data.value(data.number("I"))
    alignment = fields.get("general.alignment", 32)
    if alignment not in [1 << bit for bit in range(32)]:
        raise ValueError(f"an alignment of {alignment} bytes")
    names, end = _walk_tensors(data, tensors, alignment)
    begin = data.place + -data.place % alignment
    if begin + end > len(data.data):
        raise ValueError(f"{len(data.data)} bytes of {begin + end}")
    split = [int(fields.get(f"split.{key}", 0)) for key in ("no", "count", "tensors.count")]
    return Header(tuple(names), *split)


def _walk_tensors(data: _Bytes, count: int, alignment: int) -> tuple[dict[str, None], int]:
    """Names of the tensors, and where the last one ends: each begins where the one before it ended, aligned."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    names: dict[str, None] = {}
    due = end = 0
    for _ in range(count):
        name = data.text()
        dims = data.number("I")
        if name in names or not 1 <= dims <= 4:
            raise ValueError(f"tensor {name} occurs twice" if name in names else f"tensor {name} has {dims} dimensions")
        names[name] = None
        shape = [data.number("Q") for _ in range(dims)]
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(data.number("I"))]
        if 0 in shape or shape[0] % block:
            raise ValueError(f"tensor {name} has the shape {shape} in blocks of {block}")
        if (offset := data.number("Q")) != due:
            raise ValueError(f"tensor {name} begins at {offset}, not at {due}")
        end = due + math.prod(shape) // block * size
        due = end + -end % alignment
    return names, end


def find_parts(path: pathlib.Path) -> list[pathlib.Path]:
    """All files of the model that a GGUF file is or is a part of, in their order.

    Raises:
      UserError: a file is broken, a part is missing or another model's, or the parts hold other tensors than they say.
    """
    first = read_header(path)
    if first.parts < 2:
        return [path]
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
    names = [name for header in headers for name in header.tensors]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path}: {shorten(twice)} is in more than one part; download the parts again")
    if len(names) != first.total:
        raise UserError(
            f"{path}: the parts hold {len(names)} tensors of {first.total}; use the parts of one model, or {AGAIN}"
        )
    return paths


def model_name(path: pathlib.Path) -> str:
    """The file's name without its ending and its number among the parts."""
    match = _PART.fullmatch(path.name)
    return match["stem"] if match else path.stem
