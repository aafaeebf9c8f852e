"""Writes a checkpoint as transformers does (`save_pretrained`).

    python -m jaxkv.checkpoints.export SOURCE DEST --dtype=bf16

SOURCE is a directory, a .gguf file, a hub id (--revision=COMMIT) or random:SEED (--model=PRESET); --dtype is of the
written weights: fp16 (if not set), bf16, fp32 or fp64.
"""

from jaxkv import stopping

if __name__ == "__main__":
    from jaxkv.usage import help_and_exit

    help_and_exit("export")
    stopping.watch("nothing is written; run it again")  # before the imports below, which take seconds


import json
import math
import pathlib
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory

from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.checkpoints.convert import run_rewrite
from jaxkv.checkpoints.fill import SourceTensor, cast, flat_paths, tensor_names
from jaxkv.checkpoints.hf_config import transformers_config
from jaxkv.checkpoints.hf_tokenizer import read_tokenizer
from jaxkv.checkpoints.safetensors import INDEX, SAFETENSORS_CODES
from jaxkv.checkpoints.tokenizer import ByteTokenizer, write_transformers
from jaxkv.config import dtype_from_name
from jaxkv.errors import UserError
from jaxkv.files import convert
from jaxkv.models.tables import source_shape
from jaxkv.writing import new_directory

_SHARD_BYTES = 5_000_000_000  # more goes into several files with an index
_SAMPLE = "Of the 12 cafés,\n  which is the largest?  345.6"  # what the written tokenizer must encode as before


def export(checkpoint: Checkpoint, destination: str, *, dtype: str = "fp16") -> None:
    """Writes a directory that transformers loads: AutoModelForCausalLM, AutoTokenizer, GenerationConfig.

    A tensor is read, rounded once if it is not stored in `dtype` ('fp16', 'bf16', 'fp32' or 'fp64'), and written before
    the next. Raises UserError if the destination is taken or cannot be written, a weight has no finite value in
    `dtype`, or transformers has no way to say what the config or the tokenizer does.
    """
    settings = transformers_config(checkpoint.config)
    tokenizer = checkpoint.tokenizer
    hf = tokenizer.to_transformers() if isinstance(tokenizer, ByteTokenizer) else tokenizer.hf
    ids = _special_ids(checkpoint, hf)
    settings.dtype = jnp.dtype(dtype_from_name(dtype)).name
    for name, value in ids.items():
        setattr(settings, name, value)
    with new_directory(destination) as partial:
        settings.save_pretrained(partial)
        _write_json(partial / "generation_config.json", _generation(checkpoint.generation, ids))
        write_transformers(hf, partial)
        _name_plain_class(partial / "tokenizer_config.json")
        _check_tokenizer(checkpoint, partial)
        _write_weights(checkpoint, partial, dtype)


def _special_ids(checkpoint: Checkpoint, hf: Any) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id; None where there is none."""
    stops, vocab_size = list(checkpoint.tokenizer.eos_ids), checkpoint.config.vocab_size
    pad = checkpoint.generation.get("pad_token_id", hf.pad_token_id)
    ids: dict[str, Any] = {
        "bos_token_id": checkpoint.tokenizer.bos_id,
        "eos_token_id": (stops[0] if len(stops) == 1 else stops) or None,
        "pad_token_id": None if pad is None else convert(pad, int, "generation config: pad_token_id"),
    }
    for name, value in ids.items():
        if any(i is not None and not 0 <= i < vocab_size for i in (value if isinstance(value, list) else [value])):
            raise UserError(
                f"{checkpoint.config.name}: the tokenizer's {name} {value} is no id of a vocabulary of {vocab_size}; "
                "use a model and a tokenizer that belong together"
            )
    return ids


def _generation(generation: Mapping[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own generation config, less what transformers has no name for, with the ids of `config.json`."""
    import transformers

    known = vars(transformers.GenerationConfig())
    kept = {name: value for name, value in generation.items() if name in known}
    return kept | {name: value for name, value in ids.items() if value is not None}


def _name_plain_class(path: pathlib.Path) -> None:
    """A model's own tokenizer class may rebuild the pipeline from its parts; the plain one runs tokenizer.json."""
    if (path.parent / "tokenizer.json").exists():
        _write_json(path, json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _check_tokenizer(checkpoint: Checkpoint, directory: pathlib.Path) -> None:
    before = checkpoint.tokenizer
    after = read_tokenizer(directory, checkpoint.config, before.eos_ids)
    rules = ("add_bos", "bos_id", "eos_ids")
    if before.encode(_SAMPLE) != after.encode(_SAMPLE) or any(getattr(before, r) != getattr(after, r) for r in rules):
        raise UserError(
            f"{checkpoint.config.name}: transformers would not read this tokenizer back as it is; "
            "keep the checkpoint in our own format"
        )


def _write_weights(checkpoint: Checkpoint, directory: pathlib.Path, dtype: str) -> None:
    leaves = flat_paths(checkpoint.state)
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    target = np.dtype(dtype_from_name(dtype))

    def tensor(name: str, path: str) -> SourceTensor:
        shape = source_shape(path, shapes[path])
        return SourceTensor(name, shape, dtype, lambda: cast(np.asarray(leaves[path][...]), shape, target, name))

    names = tensor_names(checkpoint.config, shapes)
    tensors = {name: tensor(name, path) for name, path in names.items()}
    split = split_state_dict_into_shards_factory(
        tensors,  # type: ignore[arg-type]
        get_storage_size=lambda one: math.prod(one.shape) * target.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_SHARD_BYTES,
    )
    for file, part in split.filename_to_tensors.items():
        _write_safetensors(directory / file, [tensors[name] for name in part], target.itemsize)
    if split.is_sharded:
        _write_json(directory / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _write_safetensors(path: pathlib.Path, tensors: Sequence[SourceTensor], itemsize: int) -> None:
    """One file, tensor by tensor: safetensors' own writer wants all of them in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + math.prod(tensor.shape) * itemsize
        code = SAFETENSORS_CODES[tensor.dtype]
        header[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns its data to 8 bytes
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            out.write(tensor.read().reshape(-1).view(np.uint8).data)


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def start(arguments: Sequence[str]) -> None:
    """The verb `export`."""
    run_rewrite("export", arguments, export)


if __name__ == "__main__":
    start(sys.argv[1:])
