"""Converts a checkpoint to our own format.

    python -m jaxkv.checkpoints.convert SOURCE DEST --dtype=bf16

SOURCE is a directory, a .gguf file, a hub id (--revision=COMMIT) or random:SEED (--model=PRESET); --dtype is of the
stored weights: fp16 (if not set), bf16, fp32 or fp64.
"""

from jaxkv import stopping

if __name__ == "__main__":
    from jaxkv.usage import help_and_exit

    help_and_exit("convert")
    stopping.watch("nothing is written; run it again")  # before the imports below, which take seconds


import sys

from jaxkv.checkpoints import orbax
from jaxkv.checkpoints.rewrite import define_flags, rewrite
from jaxkv.cli import run_command


def main(argv: list[str]) -> None:
    """Reads the command line. Raises UserError on anything the user can mend."""
    rewrite(argv, "convert", lambda checkpoint, destination, dtype: orbax.save(checkpoint, destination))


def start(arguments: list[str]) -> None:
    """The verb `convert`."""
    define_flags()
    run_command(main, ["jaxkv convert", *arguments])


if __name__ == "__main__":
    start(sys.argv[1:])
