"""Our own checkpoints: arrays in Orbax, with config, tokenizer and provenance beside them.

DEST/params/         Orbax (zarr, one file a tensor); its custom metadata holds config, provenance and versions
DEST/tokenizer/      tokenizer files
DEST/manifest.json   sha256 of all these files; format 1 had none
"""

import contextlib
import dataclasses
import importlib.metadata
import logging
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import jax
import msgspec
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxkv.checkpoints import manifest
from jaxkv.checkpoints.checkpoint import Checkpoint, ConfigCheck, Progress, Provenance, Sharding
from jaxkv.checkpoints.fill import cast, flat_paths, not_finite, place, shorten, with_leaves
from jaxkv.checkpoints.hf_tokenizer import load_tokenizer
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.files import convert, read_json, reading
from jaxkv.models.decoder import abstract_decoder
from jaxkv.writing import new_directory

_REMEDY = "convert the original again"
_NO_MANIFEST = "stored without a manifest, so changes since then cannot be noticed"


class _Metadata(msgspec.Struct):
    """What `save` records in Orbax's custom metadata."""

    format: Literal[1, 2]
    config: dict[str, Any]
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    generation: dict[str, Any]
    provenance: Provenance
    versions: dict[str, str]


def is_checkpoint(path: pathlib.Path) -> bool:
    """Whether a directory is one of ours, whole or not."""
    return any((path / name).exists() for name in (manifest.FILE, "params/_CHECKPOINT_METADATA", "params/_METADATA"))


@contextlib.contextmanager
def _checkpointer(largest: int = 0) -> Iterator[Any]:
    """Orbax's, for arrays of at most so many bytes. Its progress notes stay off the terminal; its errors are raised."""
    import orbax.checkpoint as ocp
    from absl import logging as notes

    # Compression and OCDBT both keep further copies of the data in memory, and weights hardly compress.
    limit = math.ceil(largest / 1e9) + 1
    handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=limit, use_ocdbt=False, use_compression=False)
    before = notes.get_verbosity()
    notes.set_verbosity(notes.FATAL)
    try:
        with ocp.Checkpointer(handler) as found:
            yield found
    finally:
        notes.set_verbosity(before)


@contextlib.contextmanager
def _forgotten_writes() -> Iterator[None]:
    """When a write fails, each of those under way tells of it by a traceback of its own: asyncio's, or Python's where
    the event loop is gone.

    After a failure they may still come, so what keeps them back stays.
    """
    hook, tasks = sys.unraisablehook, logging.getLogger("asyncio")
    level = tasks.level

    def drop(found: Any) -> None:
        if str(found.exc_value) != "Event loop is closed":
            hook(found)

    sys.unraisablehook = drop
    tasks.setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # one that had not begun
    yield
    sys.unraisablehook = hook
    tasks.setLevel(level)


def save(checkpoint: Checkpoint, directory: str | pathlib.Path) -> None:
    """Writes a checkpoint; `restore` gives back the same bits.

    Raises UserError if the destination is not empty or cannot be written, or a weight is NaN or infinite.
    """
    import orbax.checkpoint as ocp

    arrays = {key: leaf[...] for key, leaf in flat_paths(checkpoint.state).items()}
    for key, array in arrays.items():
        _require_finite(array, key)
    metadata = {
        "format": 2,
        "config": checkpoint.config.to_json(),
        "dtype": str(next(iter(arrays.values())).dtype),
        "generation": checkpoint.generation,
        "provenance": checkpoint.provenance.to_json(),
        "versions": {name: importlib.metadata.version(name) for name in ("jaxkv", "orbax-checkpoint", "jax")},
    }
    with new_directory(directory) as partial:
        checkpoint.tokenizer.save(partial / "tokenizer")
        with _forgotten_writes(), _checkpointer(max(array.nbytes for array in arrays.values())) as writer:
            tree = ocp.args.PyTreeSave(unflatten_dict(arrays, sep="/"))
            writer.save(partial / "params", args=tree, custom_metadata={"jaxkv": metadata})
        manifest.write_manifest(partial)


def _require_finite(array: jax.Array, name: str) -> None:
    if not jax.numpy.isfinite(array).all():
        raise not_finite(name)


def _read_metadata(path: pathlib.Path) -> _Metadata:
    """What `save` recorded. Raises UserError if it is not there, of another format or of another type."""
    where = path / "params"
    with reading(where, _REMEDY, (Exception,)), _checkpointer() as reader:
        found = (reader.metadata(where.absolute()).custom_metadata or {}).get("jaxkv")
    if not found:
        raise UserError(f"{path} is an Orbax checkpoint but not one of jaxkv's; {_REMEDY}")
    return convert(found, _Metadata, f"{where}: jaxkv's metadata", _REMEDY)


def _read_config(metadata: _Metadata, path: pathlib.Path) -> ModelConfig:
    try:
        return ModelConfig.from_json(metadata.config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


class _Array(msgspec.Struct):
    """.zarray, as zarr's second format has it."""

    shape: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)], ...]
    chunks: tuple[Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)], ...]
    compressor: dict[str, Any] | None


def _list_arrays(params: pathlib.Path, itemsize: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored arrays by path, each with all of its chunks: zarr reads zeros where one is missing.

    Raises UserError if a chunk is missing or is not whole.
    """
    stored = {}
    for file in sorted(params.glob("*/.zarray")):
        folder, array = file.parent, read_json(file, _Array, _REMEDY)
        chunks = math.prod(-(-size // part) for size, part in zip(array.shape, array.chunks, strict=False))
        there = [path for path in folder.iterdir() if path != file]
        if len(there) != chunks:
            raise UserError(f"{folder} holds {len(there)} of {chunks} chunks; {_REMEDY}")
        size = math.prod(array.chunks) * itemsize
        if array.compressor is None and any(path.stat().st_size != size for path in there):
            raise UserError(f"{folder} has a chunk that is not {size} bytes long; {_REMEDY}")
        stored[folder.name.replace(".", "/")] = array.shape
    return stored


def _match_arrays(
    path: pathlib.Path, stored: Mapping[str, tuple[int, ...]], config: ModelConfig, precision: Precision
) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder whose parameters the stored arrays are, without values. Raises UserError if they are not."""
    layers = {name.split("/")[1] for name in stored if name.startswith("layers/")}
    if len(layers) != config.num_layers:  # before a decoder of that many is made
        raise UserError(f"{path} holds {len(layers)} layers, and its config says {config.num_layers}; {_REMEDY}")
    graphdef, abstract = abstract_decoder(config, precision)
    wanted = {name: tuple(leaf.shape) for name, leaf in flat_paths(abstract).items()}
    odd = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
    if odd:
        raise UserError(f"{path}: {shorten(odd)} does not fit the stored config; {_REMEDY}")
    return graphdef, abstract


def restore(
    path: pathlib.Path, *, precision: Precision, check: ConfigCheck, sharding: Sharding, progress: Progress | None
) -> Checkpoint:
    """Reads a checkpoint that `save` wrote, on any number of devices; arguments as in `load`.

    Raises UserError if it is not a checkpoint of ours, or its arrays do not fit its config.
    """
    with manifest.unchanged(manifest.list_files(path)):
        hashes = manifest.hash_tree(path)
        if listed := os.path.lexists(path / manifest.FILE):
            manifest.check_manifest(path, hashes)
        metadata = _read_metadata(path)
        if metadata.format > 1 and not listed:
            raise UserError(f"{path} lacks its {manifest.FILE}; copy it too, or {_REMEDY}")
        config = check(_read_config(metadata, path))
        dtype = np.dtype(jax.numpy.dtype(metadata.dtype))
        graphdef, abstract = _match_arrays(path, _list_arrays(path / "params", dtype.itemsize), config, precision)
        state = _read_arrays(path, abstract, dtype, sharding, progress)
        with reading(path / "tokenizer", _REMEDY, (Exception,)):
            tokenizer = load_tokenizer(path / "tokenizer")
    origin = metadata.provenance
    provenance = dataclasses.replace(
        origin,
        source=str(path),
        kind="orbax",
        files=manifest.summarize(hashes),
        note="; ".join(filter(None, (origin.note, None if listed else _NO_MANIFEST))) or None,
        converted_from={"source": origin.source, "kind": origin.kind, "files": origin.files},
        converted_by=metadata.versions,
        stored_dtype=metadata.dtype,
    )
    return Checkpoint(config, graphdef, state, tokenizer, metadata.generation, provenance)


def _read_arrays(
    path: pathlib.Path, abstract: nnx.State, stored: np.dtype, sharding: Sharding, progress: Progress | None
) -> nnx.State:
    """The state, one group of arrays after another: a layer's, and the rest one by one.

    Raises UserError if they do not fit it.
    """
    leaves = flat_paths(abstract)
    groups: dict[str, dict[str, Any]] = {}
    for key, leaf in leaves.items():
        layer = "/".join(key.split("/")[:2])
        groups.setdefault(layer if key.startswith("layers/") else key, {})[key] = leaf
    arrays: dict[str, jax.Array] = {}
    with reading(path, _REMEDY, (Exception,)), _checkpointer() as reader:
        for group in groups.values():
            for key, array in _read_group(reader, path / "params", group, stored, sharding).items():
                if isinstance(array, np.ndarray):
                    array = place(cast(array, array.shape, leaves[key].dtype, key), key, sharding)
                else:
                    _require_finite(array, key)
                arrays[key] = array
                if progress is not None:
                    progress(len(arrays), len(leaves), key)
    return with_leaves(abstract, arrays)


def _read_group(
    reader: Any, params: pathlib.Path, leaves: Mapping[str, Any], stored: np.dtype, sharding: Sharding
) -> dict[str, Any]:
    """Arrays of some parameters: on their devices, or on the host where they are still to be rounded.

    The rounding is ours because XLA's may flush subnormal numbers and does not report an overflow.
    """
    import orbax.checkpoint as ocp

    args = {}
    for path, leaf in leaves.items():
        where = sharding(path, tuple(leaf.shape)) if callable(sharding) else sharding
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if where is None else where
        args[path] = (
            ocp.ArrayRestoreArgs(dtype=leaf.dtype, sharding=where)
            if np.dtype(leaf.dtype) == stored
            else ocp.RestoreArgs(restore_type=np.ndarray, dtype=stored)
        )
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, stored) for path, leaf in leaves.items()}
    request = ocp.args.PyTreeRestore(
        item=unflatten_dict(shapes, sep="/"), restore_args=unflatten_dict(args, sep="/"), partial_restore=True
    )
    return dict(flatten_dict(reader.restore(params.absolute(), args=request), sep="/"))
