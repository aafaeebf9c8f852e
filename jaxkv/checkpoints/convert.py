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
from collections.abc import Callable, Sequence

from absl import flags

from jaxkv.checkpoints import load, orbax
from jaxkv.checkpoints.fill import flat_paths
from jaxkv.cli import run_command
from jaxkv.config import make_precision
from jaxkv.errors import UserError
from jaxkv.models.families import get_preset
from jaxkv.writing import check_destination


def run_rewrite(command: str, arguments: Sequence[str], write: Callable[..., None]) -> None:
    """Runs convert or export: `write` gets the checkpoint, the destination and `dtype`, the name of one."""
    flags.DEFINE_string("dtype", "fp16", "dtype of the stored weights: fp16, bf16, fp32 or fp64")
    flags.DEFINE_string("revision", None, "branch, tag or commit of a hub id")
    flags.DEFINE_string("model", None, "preset that the source must be; needed for random:SEED")
    run_command(lambda argv: _rewrite(argv, command, write), [f"jaxkv {command}", *arguments])


def _rewrite(argv: Sequence[str], command: str, write: Callable[..., None]) -> None:
    """Reads a checkpoint from anywhere, rounded to --dtype, and writes it in another form, showing progress."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if len(argv) != 3:
        raise UserError(f"need exactly a source and a destination: python -m jaxkv.checkpoints.{command} SOURCE DEST")
    (source, destination), dtype, model = argv[1:], flags.FLAGS.dtype, flags.FLAGS.model
    check_destination(destination)
    precision = make_precision(dtype)
    config = get_preset(model) if model else None
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        reading = bars.add_task("reading", total=None)
        checkpoint = load(
            source,
            precision=precision,
            config=config,
            revision=flags.FLAGS.revision,
            progress=lambda done, of, name: bars.update(reading, completed=done, total=of),
        )
        bars.update(reading, description="writing")
        write(checkpoint, destination, dtype=dtype)
    billions = sum(leaf[...].size for leaf in flat_paths(checkpoint.state).values()) / 1e9
    told = f"{destination}: {checkpoint.config.name}, {billions:.3g} B parameters in {dtype}"
    console.print(told, highlight=False, soft_wrap=True)


def start(arguments: Sequence[str]) -> None:
    """The verb `convert`."""
    run_rewrite("convert", arguments, lambda checkpoint, destination, dtype: orbax.save(checkpoint, destination))


if __name__ == "__main__":
    start(sys.argv[1:])
