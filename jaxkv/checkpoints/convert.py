"""Converts a checkpoint to our own format: python -m jaxkv.checkpoints.convert SOURCE DEST."""

from jaxkv import stopping

if __name__ == "__main__":
    stopping.watch("nothing is written; run it again")  # before the imports below, which take seconds


from jaxkv.checkpoints import orbax
from jaxkv.checkpoints.rewrite import define_flags, rewrite
from jaxkv.cli import run_command


def main(argv: list[str]) -> None:
    """Reads the command line. Raises UserError on anything the user can mend."""
    rewrite(argv, "convert", lambda checkpoint, destination, dtype: orbax.save(checkpoint, destination))


if __name__ == "__main__":
    define_flags()
    run_command(main)
