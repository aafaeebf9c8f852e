"""Converts a checkpoint to our own format: python -m jaxkv.checkpoints.convert SOURCE DEST."""

from absl import flags

from jaxkv.cli import run_command
from jaxkv.errors import UserError

_DTYPE = flags.DEFINE_string("dtype", "fp16", "dtype of the stored weights: fp16, bf16, fp32 or fp64")
_REVISION = flags.DEFINE_string("revision", None, "branch, tag or commit of a hub id")
_MODEL = flags.DEFINE_string("model", None, "preset that the source must be; needed for random:SEED")


def convert(
    source: str, destination: str, *, dtype: str, revision: str | None = None, model: str | None = None
) -> None:
    """Reads a checkpoint from anywhere and writes it to `destination` in `dtype`, showing progress.

    Raises:
      UserError: one line, the fault and the remedy.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from jaxkv.checkpoints import load, orbax
    from jaxkv.checkpoints.fill import num_parameters
    from jaxkv.config import make_precision
    from jaxkv.models.families import get_preset

    orbax.check_destination(destination)
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
            revision=revision,
            progress=lambda done, of, name: bars.update(reading, completed=done, total=of),
        )
        bars.update(reading, description="writing")
        orbax.save(checkpoint, destination)
    billions = num_parameters(checkpoint.state) / 1e9
    console.print(f"{destination}: {checkpoint.config.name}, {billions:.3g} B parameters in {dtype}", highlight=False)


def main(argv: list[str]) -> None:
    """Reads the command line. Raises UserError on anything the user can mend."""
    if len(argv) != 3:
        raise UserError("need exactly a source and a destination: python -m jaxkv.checkpoints.convert SOURCE DEST")
    convert(argv[1], argv[2], dtype=_DTYPE.value, revision=_REVISION.value, model=_MODEL.value)


if __name__ == "__main__":
    run_command(main)
