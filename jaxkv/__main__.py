"""`jaxkv VERB ...` and `python -m jaxkv VERB ...`: finds the verb's module and calls it."""

import pkgutil
import sys

from jaxkv import stopping
from jaxkv.errors import UserError, nearest
from jaxkv.usage import VERBS, help_and_exit, main_help, show, version


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit code, if the verb does not exit by itself."""
    name, *rest = arguments if arguments is not None else sys.argv[1:] or ["-h"]
    if name in ("-h", "--help", "help"):
        show(main_help())
        return 0
    if name == "--version":
        try:
            print(f"jaxkv {version()}")
        except UserError as error:
            return _fail(str(error))
        return 0
    if name not in VERBS:
        return _fail(f"unknown verb '{name}'{nearest(name, list(VERBS))}; known: {', '.join(VERBS)}")
    verb = VERBS[name]
    sys.argv = [f"jaxkv {name}", *rest]
    help_and_exit(name)
    if verb.slow:
        stopping.watch(*([] if verb.lost is None else [verb.lost]))  # before imports that take seconds
    return pkgutil.resolve_name(verb.start)([*verb.before, *rest]) or 0


if __name__ == "__main__":
    sys.exit(main())
