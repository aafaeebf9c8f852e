"""The trained checkpoints that come with the package."""

import pathlib

from jaxkv.errors import UserError, nearest

DEFAULT = "tiny-mistral"  # of the three, the one of which a text parts soonest in bf16, with another answer
SHIPPED = ("tiny-llama2", "tiny-mistral", "tiny-gemma2")

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def find_shipped(name: str) -> pathlib.Path:
    """Directory of a shipped checkpoint: in the package where it is installed, in `checkpoints/` of a checkout.

    Raises UserError if there is no such checkpoint, or its files are missing.
    """
    if name not in SHIPPED:
        raise UserError(f"no checkpoint '{name}' ships with jaxkv{nearest(name, list(SHIPPED))}: {', '.join(SHIPPED)}")
    for home in (_PACKAGE / "data", _PACKAGE.parent / "checkpoints"):
        if (home / name / "model.safetensors").exists():
            return home / name
    raise UserError(
        f"the files of {name} are missing from this installation; install jaxkv again, or train it in a checkout: "
        f"python checkpoints/train.py --model={name} --out=DIR"
    )
