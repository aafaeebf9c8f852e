"""Reading checkpoints: safetensors, GGUF, Orbax, the hub, shipped or random weights, all into one form."""

import dataclasses
import functools
import os
import pathlib
import re
from typing import Any

import jax
from flax import nnx

from jaxkv import hub
from jaxkv.checkpoints import orbax
from jaxkv.checkpoints.checkpoint import Checkpoint, Progress, Provenance, Sharding
from jaxkv.checkpoints.fill import flat_paths, place, with_leaves
from jaxkv.checkpoints.gguf import read_gguf
from jaxkv.checkpoints.hf import read_hf
from jaxkv.checkpoints.shipped import SHIPPED, find_shipped
from jaxkv.checkpoints.tokenizer import ByteTokenizer, Tokenizer
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.files import explain
from jaxkv.models.decoder import Decoder
from jaxkv.models.families import HUB_IDS, HUB_REVISIONS
from jaxkv.models.tables import differing_fields

__all__ = ["ByteTokenizer", "Checkpoint", "Tokenizer", "load"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")


def load(
    source: str,
    *,
    precision: Precision,
    config: ModelConfig | None = None,
    revision: str | None = None,
    sharding: Sharding = None,
    progress: Progress | None = None,
    tell: hub.Tell | None = None,
) -> Checkpoint:
    """Loads a model from wherever it is.

    Args:
      source: a directory with safetensors, a .gguf file, an Orbax directory of ours, 'random:SEED', a hub id, the name
        of a preset that has one, or that of a shipped checkpoint.
      precision: weights are rounded once, from the file's dtype (GGUF: from fp32) to its param dtype.
      config: the preset that the source should be; required for random weights. Where it ties its embeddings and the
        source holds a head of its own, the checkpoint's config says so.
      revision: branch, tag or commit of a hub id; a preset's name has one pinned (families.HUB_REVISIONS).
      sharding: a Sharding, or a function of parameter path and shape that gives one; None is the default device.
      progress: called after each tensor with (done, of, name).
      tell: called about once a second of a download with how far it is.

    Raises:
      UserError: one line, the fault and the remedy.
    """
    if source.startswith("random:"):
        return _random(source, precision, config, sharding)
    options: dict[str, Any] = {
        "precision": precision,
        "check": functools.partial(_agree, source, config),
        "sharding": sharding,
        "progress": progress,
    }
    path, exists = _find(source)
    if not exists and source not in SHIPPED:
        return _from_hub(source, revision, path, tell, **options)
    if revision is not None:
        what = "is a local path" if exists else "ships with jaxkv"
        raise UserError(f"a revision belongs to a hub id, and {source} {what}; drop --revision")
    return _from_disk(source, path, config, **options) if exists else read_hf(find_shipped(source), source, **options)


def _agree(source: str, config: ModelConfig | None, found: ModelConfig) -> ModelConfig:
    """The config of what was found, once it is what was asked for. Raises UserError."""
    if config is None:
        return found
    # The same model, stored with a head of its own (GGUF often holds it in another block type than the embedding).
    own_head = config.tie_embeddings and not found.tie_embeddings
    wanted = dataclasses.replace(config, tie_embeddings=False) if own_head else config
    if odd := differing_fields(found, wanted):
        odd = {"family": odd["family"]} if "family" in odd else odd  # then all the rest differs too
        fields = ", ".join(f"{key} {a} (model {config.name}: {b})" for key, (a, b) in odd.items())
        raise UserError(f"{source} is not a {config.name}: {fields}; choose the --model that fits or another source")
    return wanted


def _find(source: str) -> tuple[pathlib.Path, bool]:
    """The path that a source would be, and whether something is there."""
    if not source:
        raise UserError("the checkpoint's name is empty; name a directory, a .gguf file or a hub id")
    try:
        path = pathlib.Path(source).expanduser()
        return path, os.path.lexists(path) and bool(path.stat())
    except (OSError, ValueError, RuntimeError) as error:  # no permission, a dangling link, a zero byte, no such ~user
        raise UserError(f"{source!r} cannot be read ({explain(error)}); check the path") from error


def _from_disk(source: str, path: pathlib.Path, config: ModelConfig | None, **options: Any) -> Checkpoint:
    """What lies at a path that exists."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{source} is a file but no .gguf; give the directory of a safetensors or Orbax checkpoint")
        return read_gguf(path, name=source, preset=config, **options)
    if not path.is_dir():
        raise UserError(f"{source} is neither a file nor a directory; give a checkpoint")
    if (path / "_CHECKPOINT_METADATA").exists():
        raise UserError(f"{source} is the inside of an Orbax checkpoint; give the directory above it")
    return orbax.restore(path, **options) if orbax.is_checkpoint(path) else read_hf(path, source, **options)


def _from_hub(
    source: str, revision: str | None, path: pathlib.Path, tell: hub.Tell | None, **options: Any
) -> Checkpoint:
    hub_id = HUB_IDS.get(source, source)
    local = source.startswith((".", "/", "~")) or path.suffix == ".gguf"
    if local or not _HUB_ID.fullmatch(hub_id):
        raise UserError(
            f"{source} does not exist; give a directory, a .gguf file, a hub id (owner/name), random:SEED or "
            f"a shipped model ({', '.join(SHIPPED)})"
        )
    directory, commit = hub.download(hub_id, revision or HUB_REVISIONS.get(source), tell)
    checkpoint = read_hf(directory, hub_id, revision=commit, **options)
    hub.check_digests(directory, checkpoint.provenance.files)
    return checkpoint


def _random(source: str, precision: Precision, config: ModelConfig | None, sharding: Sharding) -> Checkpoint:
    seed = source.removeprefix("random:")
    if not re.fullmatch("[0-9]{1,10}", seed) or int(seed) >= 1 << 32:
        raise UserError(f"'{source}' needs a whole number below 2**32 as seed; for example random:0")
    if config is None:
        raise UserError(f"{source} needs to know the architecture; name a model, for example --model=test-gemma2")
    graphdef, state = nnx.split(Decoder(config, precision, nnx.Rngs(int(seed))))
    if sharding is not None:
        arrays = {path: jax.device_get(leaf[...]) for path, leaf in flat_paths(state).items()}
        state = with_leaves(state, {path: place(array, path, sharding) for path, array in arrays.items()})
    tokenizer = ByteTokenizer()
    provenance = Provenance(source, "random", add_bos=tokenizer.add_bos, note="random weights")
    return Checkpoint(config, graphdef, state, tokenizer, {}, provenance)
