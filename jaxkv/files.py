"""The door for files from outside: each kind is read into a typed value, and whatever is wrong ends in one line.

Every reader of a file that a user, a hub or another program wrote goes through here. The line names the file, the place
in it where there is one, the fault and the remedy. The type asked for is the schema: a field that is missing, null, of
another type or out of its bounds is refused by its name.
"""

import contextlib
import errno
import gzip
import os
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from jaxkv.errors import UserError

T = TypeVar("T")
Path = str | os.PathLike[str]
AGAIN = "copy or download it again"

# What decoders of other people raise on a file that is broken inside.
BROKEN = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    EOFError,
    MemoryError,
    OSError,
    zlib.error,
)


@contextlib.contextmanager
def reading(where: Path, remedy: str = AGAIN, kinds: tuple[type[BaseException], ...] = BROKEN) -> Iterator[None]:
    """Turns what a foreign decoder raises on a broken file (`kinds`) into a UserError that names file and remedy.

    A UserError that was raised inside stays as it is.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{where} cannot be read ({explain(error)}); {remedy}") from error


def explain(error: BaseException) -> str:
    """An exception in a few words, without the path that the message names anyway."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


def read_bytes(path: Path, remedy: str = "check the path") -> bytes:
    """The content of a file. Raises UserError if there is none, or it is a directory or may not be read."""
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        told = "is a directory, not a file" if error.errno == errno.EISDIR else f"cannot be read ({explain(error)})"
        raise UserError(f"{path} {told}; {remedy}") from error
    except ValueError as error:  # a zero byte in the name
        raise UserError(f"{str(path)!r} is no path ({error}); {remedy}") from error


def to_text(content: bytes, where: Path) -> str:
    """UTF-8 as text; a byte order mark is dropped. Raises UserError with the line that is something else."""
    try:
        return content.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{where} line {line}: is not UTF-8; save the file as UTF-8") from error


def read_text(path: Path, remedy: str = "check the path") -> str:
    """A text file in UTF-8. Raises UserError as `read_bytes` and `to_text`."""
    return to_text(read_bytes(path, remedy), path)


def unzip(content: bytes, where: Path) -> bytes:
    """The content of a gzip file. Raises UserError if it is broken anywhere."""
    with reading(where):
        return gzip.decompress(content)


def decode_json(content: bytes | str, kind: type[T], where: Path, remedy: str = AGAIN) -> T:
    """One JSON value of a type, e.g. dict[str, Any] or a msgspec.Struct with bounds.

    Raises UserError if it is not JSON or not of that type; `where` is the file, and the line if there are several.
    """
    content = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    try:
        return msgspec.json.decode(content.removeprefix(b"\xef\xbb\xbf"), type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(error, where, remedy) from error
    except (msgspec.DecodeError, *BROKEN) as error:
        raise UserError(f"{where}: is not JSON ({explain(error)}); {remedy}") from error


def read_json(path: Path, kind: type[T], remedy: str = AGAIN) -> T:
    """A JSON file as a value of a type. Raises UserError as `read_bytes` and `decode_json`."""
    return decode_json(read_bytes(path, remedy), kind, path, remedy)


def convert(value: Any, kind: type[T], where: Path, remedy: str = AGAIN) -> T:
    """A plain value (numbers, strings, lists, dicts) as one of a type. Raises UserError if it is none."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _misfit(error, where, remedy) from error


def check(value: Any, kind: type[T]) -> T:
    """A plain value as one of a type whose `__post_init__` begin their messages with the field at fault and a colon.

    Raises ValueError if it is none, which starts with the dotted name of the field at fault.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        told, _, place = str(error).partition(" - at `$")
        fields = _name_keys(re.findall(r"[^.`\[\]]+|\[.+?\]", place), value, kind, str(error))
        if named := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", told):
            fields += f".{named[2]}"
            told = "missing" if named[1] == "missing required" else "unknown field"
        elif isinstance(error.__cause__, ValueError):
            field, _, told = told.partition(": ")
            fields += f".{field}" if field else ""
        else:
            told = re.sub(r"`float` [<>]= -?1\.79769\d+e\+308", "a finite number", told[:1].lower() + told[1:])
        raise ValueError(f"{fields.removeprefix('.')}: {told}") from error


def _name_keys(parts: list[str], value: Any, kind: type, said: str) -> str:
    """The path of a fault with the keys of dicts, which msgspec writes as [...]: those without which it is another."""
    path, here = "", value
    around: list[tuple[Any, Any]] = []  # the containers that `here` is in, outermost first, and where in them

    def fails_alike(key: Any) -> bool:
        whole: Any = {key: here[key]}
        for held, place in reversed(around):
            whole = held | {place: whole} if isinstance(held, dict) else [*held[:place], whole, *held[place + 1 :]]
        try:
            msgspec.convert(whole, kind)
        except msgspec.ValidationError as error:
            return str(error) == said
        return False

    for part in parts:
        key: Any = part
        if part == "[...]":
            key = next(filter(fails_alike, here), [*here][-1])
            here = {key: here[key]}
        elif part.startswith("["):
            key = int(part[1:-1])
        path += part if isinstance(key, int) else f".{key}"
        around.append((here, key))
        here = here[key]
    return path


def _misfit(error: msgspec.ValidationError, where: Path, remedy: str) -> UserError:
    """'config.json: field hidden_size: expected `int`, got `null`; ...' from msgspec's 'Expected ... - at `$.x`'."""
    told, _, place = str(error).partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    told = (told[:1].lower() + told[1:]).replace(r" matching regex '\\S'", " that is not blank")
    return UserError(f"{where}: {f'field {place}: ' if place else ''}{told}; {remedy}")
