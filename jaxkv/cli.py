"""What the entry modules share: flags parsed and mistakes reported in one line, never a traceback."""

import math
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from jaxkv import stopping
from jaxkv.errors import UserError, describe_memory, nearest
from jaxkv.files import read_text
from jaxkv.options import Option

FLAGFILE = "--flagfile"
_PACKAGE = pathlib.Path(__file__).resolve().parent


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


class _Parser(flags.ArgumentParser):
    """Reads what an option is given: numbers in bounds, and lists without empty items and without one twice."""

    def __init__(self, option: Option):
        self.option, self.listed = option, option.several or option.axis is not None
        whole = "whole " if option.kind is int else ""
        self._wanted = f"{whole}number in the range [{option.low}, {option.high}]"
        self.syntactic_help = "a comma separated list" if self.listed else f"a {self._wanted}"

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):
            return argument  # a default
        if not self.listed:
            return self._read(argument)
        items = flags.ListParser().parse(argument)
        if "" in (items or [""]):
            raise ValueError("an item is empty; drop the comma too many, or leave the flag out")
        values = [self._read(item) for item in items]
        if len(set(values)) != len(values):
            raise ValueError("names a value twice; drop one")
        return values

    def _read(self, text: str) -> str | int | float:
        option = self.option
        if option.kind is str:
            return text
        try:
            value = option.kind(text)
        except ValueError:
            value = math.nan
        if not option.low <= value <= option.high:
            raise ValueError(f"'{text:.30}' is no {self._wanted}")
        return value


def define(option: Option, found: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flag of an option."""
    name, default, text = option.flag, option.default, option.explain()
    if option.repeated:
        flags.DEFINE_multi_string(name, list(default), text, flag_values=found)
    elif option.kind is bool:
        flags.DEFINE_bool(name, default, text, flag_values=found)
    else:
        parser = _Parser(option)
        if parser.listed:
            default = list(default if option.axis is None else option.axis)
        serializer = flags.CsvListSerializer(",") if parser.listed else flags.ArgumentSerializer()
        flags.DEFINE(parser, name, default, text, flag_values=found, serializer=serializer)


def _find_flagfile(path: str) -> str:
    """A flagfile as given, or by its name alone one of those that come with the package."""
    path = os.path.expanduser(path)
    if os.path.exists(path) or pathlib.PurePath(path).name != path:
        return path
    homes = (_PACKAGE / "data" / "launch", _PACKAGE.parent / "launch")
    shipped = {file.stem: str(file) for home in homes for file in sorted(home.glob("*.flags"))}
    name = path.removesuffix(".flags")
    if name not in shipped:
        raise UserError(f"there is no flagfile {path}{nearest(name, list(shipped))}; check the path")
    return shipped[name]


def read_flagfile(path: str, outer: Sequence[str] = ()) -> list[str]:
    """The flags of a UTF-8 file with one a line and comments after # or //, and of the flagfiles that it names.

    absl reads such files too, but not those with a byte order mark, and it drops what is no flag. The name alone of one
    that comes with the package will do, as in `--flagfile=paper`; `outer` are the files that name this one. Raises
    UserError on a file that cannot be read or names itself, and on a line that is no flag.
    """
    path = _find_flagfile(path)
    if path in outer:
        raise UserError(f"{path} names itself by {FLAGFILE}; drop that line")
    found: list[str] = []
    for number, line in enumerate(map(str.strip, read_text(path).split("\n")), start=1):
        if not line or line.startswith(("#", "//")):
            continue
        if not line.startswith("-") or not line.isprintable():
            shown = ascii(line) if not line.isprintable() else f"'{line}'"
            raise UserError(f"{path} line {number}: {shown:.60} is no flag; write one flag a line as --name=value")
        found += expand_flagfiles([line], [*outer, path], f"{path} line {number}: ")
    return found


def expand_flagfiles(arguments: Sequence[str], outer: Sequence[str] = (), where: str = "") -> list[str]:
    """Arguments with the flags of each flagfile in its place. Raises UserError as `read_flagfile`.

    `outer` are the flagfiles that the arguments stand in, and a fault begins with `where`.
    """
    found: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, _, path = argument.partition("=")
        if argument == "--":  # what follows is no flag
            return [*found, argument, *rest]
        if name.partition(" ")[0] not in (FLAGFILE, FLAGFILE[1:]):
            found.append(argument)
        elif path := path or next(rest, ""):
            found += read_flagfile(path.strip(), outer)
        else:
            raise UserError(f"{where}{FLAGFILE} names no file; write {FLAGFILE}=FILE")
    return found


def _spell(argument: str) -> str:
    """A flag with underscores where it was given dashes, and -v by its long name."""
    name, equals, value = argument.partition("=")
    if name == "-v":
        return "--verbose"
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else argument


def parse_flags(argv: Sequence[str], found: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Parses flags, those of flagfiles too. Returns the program's name and the arguments that are no flags.

    Raises UserError on an unknown flag, on a value that it cannot have, and as `read_flagfile`.
    """
    try:
        given = expand_flagfiles(argv[1:])
        flagged = given.index("--") if "--" in given else len(given)
        return found([*argv[:1], *map(_spell, given[:flagged]), *given[flagged:]])
    except flags.Error as error:
        raise UserError(f"{error}; see --help") from error


def _parse(argv: list[str]) -> list[str]:
    try:
        return parse_flags(argv)
    except UserError as error:
        _fail(str(error), 2)


def run_command(command: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Runs an entry module, whose command gets the positional arguments, program name first.

    Exit code 2 after a user's mistake, 130 after Ctrl-C and 143 after SIGTERM (jaxkv.stopping), 1 when memory runs out.
    """

    def main(argv: list[str]) -> None:
        logging.set_verbosity(logging.ERROR)
        with stopping.unwinding():
            try:
                command(argv)
            except UserError as error:
                if not stopping.stopped():
                    _fail(str(error), 2)
            except (MemoryError, RuntimeError) as error:
                if stopping.stopped() or (message := describe_memory(error)) is None:
                    raise
                _fail(message, 1)

    app.run(main, argv, flags_parser=_parse)
