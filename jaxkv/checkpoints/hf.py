"""Checkpoints in the Hugging Face layout: a directory of safetensors."""

import collections
import concurrent.futures
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxkv.checkpoints.checkpoint import Checkpoint, ConfigCheck, Progress, Provenance, Sharding
from jaxkv.checkpoints.fill import SourceTensor, count_dtypes, fill_state, flat_paths, match_tensors, shorten
from jaxkv.checkpoints.folder import WeightFiles, find_weights
from jaxkv.checkpoints.hf_tokenizer import TOKENIZER_FILES, read_tokenizer
from jaxkv.checkpoints.manifest import hash_files, unchanged
from jaxkv.checkpoints.mistral_format import in_hf_terms, read_params
from jaxkv.checkpoints.safetensors import list_tensors
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.files import convert, read_json
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.families import key_table, parse_config


def stop_ids(values: Iterable[Any], vocab_size: int, where: pathlib.Path | str) -> tuple[int, ...]:
    """Ids that end a generation: each value is an id, a list of ids or None.

    Raises:
      UserError: a value is something else, or an id is not in the vocabulary.
    """
    ids: list[int] = []
    for value in values:
        several = value if isinstance(value, list) else [] if value is None else [value]
        ids += convert(several, list[int], f"{where}: eos_token_id", "mend the file or download it again")
    if odd := [i for i in ids if not 0 <= i < vocab_size]:
        raise UserError(
            f"{where}: eos_token_id {odd[0]} is no id of a vocabulary of {vocab_size}; "
            "use a model and a tokenizer that belong together"
        )
    return tuple(ids)


def read_hf(
    directory: pathlib.Path,
    precision: Precision,
    *,
    name: str,
    check: ConfigCheck | None = None,
    sharding: Sharding = None,
    progress: Progress | None = None,
    revision: str | None = None,
) -> Checkpoint:
    """Reads a directory in the Hugging Face layout.

    Args:
      directory: holds config.json, safetensors and tokenizer files.
      precision: its param dtype is what weights are rounded to, once.
      name: the source as the user gave it.
      check: called with the config before any weight is read; may raise, or rename it.
      sharding: a Sharding, or a function of path and shape.
      progress: called after each tensor.
      revision: recorded.

    Raises:
      UserError: anything wrong with the files, in one line.
    """
    weights = find_weights(directory)
    settings = ["config.json", "generation_config.json", *TOKENIZER_FILES]
    settings += ["params.json"] * weights.mistral_layout
    used = [path for file in settings if (path := directory / file).is_file()] + list(weights.files)
    with unchanged(used):
        raw = _read_config(directory, weights)
        config = dataclasses.replace(parse_config(raw, name), name=name.rstrip("/").split("/")[-1])
        if check is not None:
            config = check(config)
        generation, eos_ids = _read_generation(directory, raw, config.vocab_size)
        tensors = _list_all(weights, config, directory)
        _check_layers(tensors, config, name)
        graphdef, abstract = abstract_decoder(config, precision)
        shapes = {path: leaf.shape for path, leaf in flat_paths(abstract).items()}
        plan = match_tensors(config, shapes, key_table(config.family), tensors, name)
        tokenizer = read_tokenizer(directory, config, eos_ids)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # hashing overlaps with reading
            hashes = pool.submit(hash_files, used)
            state = fill_state(abstract, plan, config, name, sharding, progress)
            digests = hashes.result()
    provenance = Provenance(
        source=name,
        kind="safetensors",
        revision=revision,
        files=digests,
        dtypes=count_dtypes(tensors),
        add_bos=tokenizer.add_bos,
        left_aside=weights.left_aside,
    )
    return Checkpoint(config, graphdef, state, tokenizer, generation, provenance)


def _read_config(directory: pathlib.Path, weights: WeightFiles) -> dict[str, Any]:
    """The fields of config.json, or of Mistral's params.json where its own weights stand alone."""
    if os.path.lexists(directory / "config.json"):
        return read_json(directory / "config.json", dict[str, Any])
    if weights.mistral_layout and os.path.lexists(directory / "params.json"):
        return read_params(directory / "params.json")
    raise UserError(f"{directory} has weights but no config.json; download it too")


def _read_generation(
    directory: pathlib.Path, raw: Mapping[str, Any], vocab_size: int
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The fields of generation_config.json, none if there is no such file, and the stop ids of both configs."""
    file = directory / "generation_config.json"
    generation = read_json(file, dict[str, Any]) if os.path.lexists(file) else {}
    own = stop_ids([raw.get("eos_token_id")], vocab_size, directory / "config.json")
    return generation, own + stop_ids([generation.get("eos_token_id")], vocab_size, file)


def _check_layers(tensors: Iterable[SourceTensor], config: ModelConfig, name: str) -> None:
    """Before a decoder of that many layers is made. Raises UserError if the weights have another number of them."""
    found = {parts[2] for t in tensors if (parts := t.name.split("."))[:2] == ["model", "layers"] and len(parts) > 2}
    if found and len(found) != config.num_layers:  # without any, all that is missing is told later
        raise UserError(
            f"{name}: config.json says {config.num_layers} layers and the weights have {len(found)}; "
            "check that both belong together"
        )


def _list_all(weights: WeightFiles, config: ModelConfig, directory: pathlib.Path) -> list[SourceTensor]:
    """Tensors of all files under their Hugging Face names.

    Raises:
      UserError: a file is broken, a tensor occurs twice, or the names are those of another kind of model.
    """
    tensors = [tensor for path in weights.files for tensor in list_tensors(path)]
    if weights.mistral_layout:
        tensors = [in_hf_terms(tensor, config) for tensor in tensors]
    counts = collections.Counter(tensor.name for tensor in tensors)
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise UserError(f"{directory} holds {shorten(repeated)} in more than one shard; download the weights again")
    if wrapped := [name for name in counts if "language_model." in name]:
        raise UserError(
            f"{directory} holds {wrapped[0]}: the weights of a multimodal model, and only text models are "
            "implemented; save its language model alone"
        )
    if "embed_tokens.weight" not in counts or any(name.startswith("model.") for name in counts):
        return tensors
    # AutoModel.save_pretrained writes the decoder without its wrapper, so without prefix and head.
    if not config.tie_embeddings and "lm_head.weight" not in counts:
        raise UserError(
            f"{directory} holds a base model without the head lm_head.weight, which its config says is not tied to the "
            "embeddings; save it with AutoModelForCausalLM, not AutoModel"
        )
    return [
        tensor if tensor.name == "lm_head.weight" else dataclasses.replace(tensor, name=f"model.{tensor.name}")
        for tensor in tensors
    ]
