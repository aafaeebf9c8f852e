"""What every reader returns."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxkv.checkpoints.tokenizer import AnyTokenizer
from jaxkv.config import ModelConfig

Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None] | None
Progress = Callable[[int, int, str], None]  # done, of, name of the tensor just placed
ConfigCheck = Callable[[ModelConfig], ModelConfig]  # raises on a config that is not wanted, may rename it


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model ready to run; `nnx.merge(graphdef, state)` is the decoder.

    Attributes:
      config: architecture.
      graphdef: structure of the decoder.
      state: parameters in the precision's param dtype, at the paths of the decoder (embed, layers/0/attn/q, ...).
      tokenizer: text to ids and back.
      generation: raw values of the model's generation config, for the record; never applied.
      provenance: source, kind, revision, files (name -> sha256), dtypes (original dtype -> number of tensors),
        add_bos, and for random weights a `note` that says so.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    state: nnx.State
    tokenizer: AnyTokenizer
    generation: dict[str, Any]
    provenance: dict[str, Any]
