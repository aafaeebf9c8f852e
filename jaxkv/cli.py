"""What the entry modules share: flags parsed and mistakes reported in one line, never a traceback."""

import os
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging

from jaxkv import stopping
from jaxkv.errors import UserError, describe_memory
from jaxkv.files import read_text

FLAGFILE = "--flagfile"


def _fail(message: str, code: int) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def read_flagfile(path: str, outer: Sequence[str] = ()) -> list[str]:
    """The flags of a flagfile, with those of the flagfiles that it names.

    absl reads such files too, but not those with a byte order mark, and it drops what is no flag.

    Args:
      path: of a UTF-8 file with one flag a line; lines that begin with # or // are comments.
      outer: the files that name this one.

    Raises:
      UserError: a file that cannot be read or names itself, or a line that is no flag.
    """
    path = os.path.expanduser(path)
    if path in outer:
        raise UserError(f"{path} names itself by {FLAGFILE}; drop that line")
    found: list[str] = []
    for number, line in enumerate(map(str.strip, read_text(path).split("\n")), start=1):
        if not line or line.startswith(("#", "//")):
            continue
        if not line.startswith("-") or not line.isprintable():
            shown = ascii(line) if not line.isprintable() else f"'{line}'"
            raise UserError(f"{path} line {number}: {shown:.60} is no flag; write one flag a line as --name=value")
        flag, _, inner = line.partition("=")
        if flag.split()[0] not in (FLAGFILE, FLAGFILE[1:]):
            found.append(line)
        elif not inner.strip():
            raise UserError(f"{path} line {number}: {FLAGFILE} names no file; write {FLAGFILE}=FILE")
        else:
            found += read_flagfile(inner.strip(), [*outer, path])
    return found


def expand_flagfiles(arguments: Sequence[str]) -> list[str]:
    """Arguments with the flags of each flagfile in its place. Raises UserError as `read_flagfile`."""
    found: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, _, path = argument.partition("=")
        if name not in (FLAGFILE, FLAGFILE[1:]):
            found.append(argument)
        elif path := path or next(rest, ""):
            found += read_flagfile(path)
        else:
            raise UserError(f"{FLAGFILE} names no file; write {FLAGFILE}=FILE")
    return found


def parse_flags(argv: Sequence[str], found: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Parses flags, those of flagfiles too.

    Returns:
      What is left: the program's name, and arguments that are no flags.

    Raises:
      UserError: an unknown flag, a value that it cannot have, or what `read_flagfile` raises.
    """
    try:
        return found([*argv[:1], *expand_flagfiles(argv[1:])])
    except flags.Error as error:
        raise UserError(f"{error}; see --help") from error


def _parse(argv: list[str]) -> list[str]:
    try:
        return parse_flags(argv)
    except UserError as error:
        _fail(str(error), 2)
    return argv


def run_command(command: Callable[[list[str]], None]) -> None:
    """Runs an entry module.

    Exit code 2 after a user's mistake, 130 after Ctrl-C and 143 after SIGTERM (jaxkv.stopping), 1 when memory runs out.

    Args:
      command: gets the positional arguments, program name first.
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

    app.run(main, flags_parser=_parse)
