"""What the commands convert and export share: flags, progress, and one line at the end."""

from collections.abc import Callable

from absl import flags

from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.errors import UserError


def define_flags() -> None:
    """Defines the commands' flags."""
    flags.DEFINE_string("dtype", "fp16", "dtype of the stored weights: fp16, bf16, fp32 or fp64")
    flags.DEFINE_string("revision", None, "branch, tag or commit of a hub id")
    flags.DEFINE_string("model", None, "preset that the source must be; needed for random:SEED")


def rewrite(argv: list[str], command: str, write: Callable[[Checkpoint, str, str], None]) -> None:
    """Reads a checkpoint from anywhere, rounded to --dtype, and writes it in another form, showing progress.

    Args:
      argv: the command line: program, source, destination.
      command: name of the module, for the message.
      write: gets the checkpoint, the destination and the dtype's name.

    Raises:
      UserError: one line, the fault and the remedy.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from jaxkv.checkpoints import load
    from jaxkv.checkpoints.destination import check_destination
    from jaxkv.checkpoints.fill import num_parameters
    from jaxkv.config import make_precision
    from jaxkv.models.families import get_preset

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
        write(checkpoint, destination, dtype)
    billions = num_parameters(checkpoint.state) / 1e9
    console.print(
        f"{destination}: {checkpoint.config.name}, {billions:.3g} B parameters in {dtype}",
        highlight=False,
        soft_wrap=True,
    )
