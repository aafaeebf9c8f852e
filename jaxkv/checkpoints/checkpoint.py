"""What every reader returns."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx

from jaxkv.checkpoints.tokenizer import AnyTokenizer
from jaxkv.config import ModelConfig

Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None] | None
Progress = Callable[[int, int, str], None]  # done, of, name of the tensor just placed
ConfigCheck = Callable[[ModelConfig], ModelConfig]  # raises on a config that is not wanted, may rename it


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where weights come from, and what identifies them."""

    source: str  # as the user gave it
    kind: Literal["safetensors", "gguf", "orbax", "random", "trained"]
    revision: str | None = None  # commit of a hub id, or of the code that trained it
    # Name -> sha256 of what was read; for Orbax `params` and `tokenizer`, each over the hashes of its files.
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, int] = dataclasses.field(default_factory=dict)  # original dtype -> number of tensors
    add_bos: bool | None = None  # whether the tokenizer puts BOS first
    note: str | None = None  # what a reader must know, as that the weights are random
    left_aside: tuple[str, ...] = ()  # weight files in the same folder that were not read
    converted_from: dict[str, str | dict[str, str]] | None = None  # source, kind and files of an Orbax checkpoint's
    converted_by: dict[str, str] | None = None  # versions of the packages that made it
    stored_dtype: str | None = None  # of its arrays

    def to_json(self) -> dict[str, Any]:
        """Plain values for a record; the fields from `note` on only where they say something."""
        values = dataclasses.asdict(self) | {"left_aside": list(self.left_aside)}
        optional = ("note", "left_aside", "converted_from", "converted_by", "stored_dtype")
        return {key: value for key, value in values.items() if value or key not in optional}

    def identity(self) -> dict[str, Any]:
        """What decides the numbers: all but the place, save for random weights, which are their seed."""
        place = {"left_aside"} if self.kind == "random" else {"source", "left_aside"}
        return {key: value for key, value in self.to_json().items() if key not in place}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model ready to run; `nnx.merge(graphdef, state)` is the decoder."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    state: nnx.State  # in the precision's param dtype, at the paths of the decoder (embed, layers/0/attn/q, ...)
    tokenizer: AnyTokenizer
    generation: dict[str, Any]  # raw values of the model's generation config, for the record; never applied
    provenance: Provenance
