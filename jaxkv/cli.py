"""What the entry modules share: flags parsed and mistakes reported in one line, never a traceback."""

import sys
from collections.abc import Callable

from absl import app, flags, logging

from jaxkv.errors import UserError


def _fail(message: str, code: int) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _fail(f"{error}; see --help", 2)
    return argv


def describe_memory(error: Exception) -> str | None:
    """What to say when memory ran out, of the host or (as JAX and torch tell it) of a device; None for other errors."""
    remedy = "use a smaller model, --batch_size or --max_new_tokens"
    if isinstance(error, MemoryError):
        return f"out of memory; {remedy}"
    told = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")
    if isinstance(error, RuntimeError) and any(words in str(error) for words in told):
        return f"the device is out of memory; {remedy}"
    return None


def run_command(command: Callable[[list[str]], None]) -> None:
    """Runs an entry module: exit code 2 after a user's mistake, 130 after Ctrl-C, 1 when memory runs out.

    Args:
      command: gets the positional arguments, program name first.
    """

    def main(argv: list[str]) -> None:
        logging.set_verbosity(logging.ERROR)
        try:
            command(argv)
        except UserError as error:
            _fail(str(error), 2)
        except KeyboardInterrupt:
            _fail("stopped; nothing recorded is lost, and the same command goes on from there", 130)
        except (MemoryError, RuntimeError) as error:
            if (message := describe_memory(error)) is None:
                raise
            _fail(message, 1)

    app.run(main, flags_parser=_parse)
