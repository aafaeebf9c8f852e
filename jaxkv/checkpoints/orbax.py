"""Our own checkpoints: arrays in Orbax, with config, tokenizer and provenance beside them.

DEST/params/      Orbax (zarr, one file a tensor); its custom metadata holds config, provenance and versions
DEST/tokenizer/   tokenizer files
"""

import contextlib
import importlib.metadata
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxkv.checkpoints.checkpoint import Checkpoint, ConfigCheck, Progress, Sharding
from jaxkv.checkpoints.destination import new_directory
from jaxkv.checkpoints.fill import cast, flat_paths, place, with_leaves
from jaxkv.checkpoints.tokenizer import load_tokenizer
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.models.decoder import abstract_decoder

_FORMAT = 1


def is_checkpoint(path: pathlib.Path) -> bool:
    """Whether a directory is one of ours."""
    return (path / "params" / "_CHECKPOINT_METADATA").exists()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax's progress notes off the terminal; its errors are raised."""
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _handler(largest: int = 0) -> Any:
    import orbax.checkpoint as ocp

    # Compression and OCDBT both keep further copies of the data in memory, and weights hardly compress.
    limit = math.ceil(largest / 1e9) + 1
    return ocp.PyTreeCheckpointHandler(save_concurrent_gb=limit, use_ocdbt=False, use_compression=False)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{'a/b': x} as {'a': {'b': x}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def save(checkpoint: Checkpoint, directory: str | pathlib.Path) -> None:
    """Writes a checkpoint; `restore` gives back the same bits.

    Raises:
      UserError: the destination is not empty, or cannot be written.
    """
    import orbax.checkpoint as ocp

    arrays = {key: leaf[...] for key, leaf in flat_paths(checkpoint.state).items()}
    metadata = {
        "format": _FORMAT,
        "config": checkpoint.config.to_json(),
        "dtype": str(next(iter(arrays.values())).dtype),
        "generation": checkpoint.generation,
        "provenance": checkpoint.provenance,
        "versions": {name: importlib.metadata.version(name) for name in ("jaxkv", "orbax-checkpoint", "jax")},
    }
    with new_directory(directory) as partial:
        checkpoint.tokenizer.save(partial / "tokenizer")
        with _quiet(), ocp.Checkpointer(_handler(max(array.nbytes for array in arrays.values()))) as writer:
            writer.save(
                partial / "params", args=ocp.args.PyTreeSave(_nest(arrays)), custom_metadata={"jaxkv": metadata}
            )


def read_metadata(path: pathlib.Path) -> dict[str, Any]:
    """What `save` recorded. Raises UserError if it is not there or of another format."""
    import orbax.checkpoint as ocp

    with _quiet(), ocp.Checkpointer(_handler()) as reader:
        found = (reader.metadata((path / "params").absolute()).custom_metadata or {}).get("jaxkv")
    if not found or found.get("format") != _FORMAT:
        raise UserError(
            f"{path} is an Orbax checkpoint but not one of jaxkv's (format {_FORMAT}); convert the original"
        )
    return found


def restore(
    directory: str | pathlib.Path,
    precision: Precision,
    *,
    check: ConfigCheck | None = None,
    sharding: Sharding = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Reads a checkpoint that `save` wrote, on any number of devices.

    Args:
      directory: DEST of `save`.
      precision: weights stored in another dtype than its param dtype are rounded once.
      check: called with the config before any weight is read; may raise, or rename it.
      sharding: a Sharding, or a function of path and shape; None is the default device.
      progress: called after each tensor.

    Raises:
      UserError: not a checkpoint of ours, or its arrays do not fit its config.
    """
    import orbax.checkpoint as ocp

    path = pathlib.Path(directory).expanduser()
    metadata = read_metadata(path)
    config = ModelConfig.from_json(metadata["config"])
    if check is not None:
        config = check(config)
    graphdef, abstract = abstract_decoder(config, precision)
    leaves = flat_paths(abstract)
    stored = np.dtype(jax.numpy.dtype(metadata["dtype"]))
    arrays: dict[str, jax.Array] = {}
    with _quiet(), ocp.Checkpointer(_handler()) as reader:
        for group in _groups(list(leaves)):
            try:
                read = _read_group(reader, path / "params", {key: leaves[key] for key in group}, stored, sharding)
            except (ValueError, KeyError, OSError, FileNotFoundError) as error:
                raise UserError(f"{directory} is damaged ({error}); convert the original again") from None
            for key, array in read.items():
                if tuple(array.shape) != tuple(leaves[key].shape):
                    raise UserError(f"{directory}: {key} does not fit the stored config; convert the original again")
                if isinstance(array, np.ndarray):
                    array = place(cast(array, array.shape, leaves[key].dtype, key), key, sharding)
                arrays[key] = array
                if progress is not None:
                    progress(len(arrays), len(leaves), key)
    tokenizer = load_tokenizer(path / "tokenizer")
    origin = metadata["provenance"]
    provenance = {
        **origin,
        "source": str(directory),
        "kind": "orbax",
        "converted_from": {"source": origin["source"], "kind": origin["kind"]},
        "converted_by": metadata["versions"],
        "stored_dtype": metadata["dtype"],
    }
    return Checkpoint(config, graphdef, with_leaves(abstract, arrays), tokenizer, metadata["generation"], provenance)


def _groups(paths: list[str]) -> list[list[str]]:
    """Parameters read together: a layer's, and the rest one by one."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        parts = path.split("/")
        groups.setdefault("/".join(parts[:2]) if parts[0] == "layers" else path, []).append(path)
    return list(groups.values())


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
    request = ocp.args.PyTreeRestore(item=_nest(shapes), restore_args=_nest(args), partial_restore=True)
    return _flatten(reader.restore(params.absolute(), args=request))
