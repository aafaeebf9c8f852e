"""Orbax checkpoints of ours."""

import pathlib


def is_checkpoint(path: pathlib.Path) -> bool:
    return (path / "params" / "_CHECKPOINT_METADATA").exists()
