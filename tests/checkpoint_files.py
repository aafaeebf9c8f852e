"""Checkpoints beside the state dicts that transformers has of them, and loads that must end in one line."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxkv.checkpoints import ByteTokenizer, load
from jaxkv.checkpoints.checkpoint import Checkpoint, Provenance
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import make_precision
from jaxkv.errors import UserError
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.families import FAMILIES, get_preset, key_table

FP32, FP16 = make_precision("fp32"), make_precision("fp16")
VARIABLES = {
    "JAXKV_SMOLLM2_GGUF": "the GGUF file of SmolLM2-135M-Instruct",
    "JAXKV_GEMMA3_GGUF": "the GGUF file of Gemma-3 270M",
    "JAXKV_QWEN_GGUF": "the GGUF file of Qwen2.5-Coder-0.5B-Instruct",
    "JAXKV_GSM8K_DIR": "a folder with gsm8k_test.jsonl, gsm8k_train.jsonl, ifeval.jsonl and HumanEval.jsonl.gz",
    "JAXKV_HUMANEVAL": "HumanEval.jsonl.gz",
}
KEY = "tokenizer.ggml."
WORDS = ["<unk>", "<s>", "</s>", "hello", "world", "go", "<end>"]


@contextlib.contextmanager
def refused(words):
    """The body ends in an error of one line that holds `words`."""
    with pytest.raises(UserError) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(words, message), message


def fails(path, words, precision=FP32, **options):
    """The error of a load: one line that holds `words`."""
    with refused(words) as caught:
        load(str(path), precision=precision, **options)
    return str(caught.value)


def make_random(preset="test-llama2", precision=FP16, seed=1, **options):
    """Random weights of a preset."""
    return load(f"random:{seed}", precision=precision, config=get_preset(preset), **options)


def draw_weights(preset="test-llama2", precision=FP16, seed=1):
    """As `make_random`, but of weights that numpy draws: an initialiser is compiled for every shape."""
    config, tokenizer = get_preset(preset), ByteTokenizer()
    (graphdef, abstract), rng = abstract_decoder(config, precision), np.random.default_rng(seed)
    leaves = {
        path: jnp.asarray((rng.normal(size=leaf.shape) * 0.2 + (len(leaf.shape) == 1)).astype(leaf.dtype))
        for path, leaf in flat_paths(abstract).items()
    }
    provenance = Provenance(f"random:{seed}", "random", add_bos=tokenizer.add_bos, note="random weights")
    return Checkpoint(config, graphdef, with_leaves(abstract, leaves), tokenizer, {}, provenance)


def new_model(family, **sizes):
    """transformers' model of a family, of these sizes."""
    import transformers

    config = transformers.AutoConfig.for_model(FAMILIES[family].model_type, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def keeping_programs():
    """The environment of a process that keeps its compiled programs where the tests do."""
    return os.environ | {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}


def run_module(command, *arguments):
    """The command convert or export in a process of its own."""
    done = [sys.executable, "-m", f"jaxkv.checkpoints.{command}", *map(str, arguments)]
    return subprocess.run(done, capture_output=True, text=True, env=keeping_programs())


def assert_same_bits(checkpoint, state_dict):
    """Every parameter is that of the state dict, to the bit."""
    params = flat_paths(checkpoint.state)
    left = set(params)
    for name, path in key_table(checkpoint.config.family).items():
        for layer in range(checkpoint.config.num_layers if "{i}" in name else 1):
            key = path.format(i=layer)
            if key in params:
                theirs = state_dict[name.format(i=layer)].contiguous()
                kind = {2: torch.int16, 4: torch.int32}[theirs.element_size()]
                ours = np.asarray(params[key][...]).reshape(theirs.shape)
                ours = ours.view(f"u{ours.dtype.itemsize}")
                np.testing.assert_array_equal(ours, theirs.view(kind).numpy().view(ours.dtype), err_msg=key)
                left.discard(key)
    assert not left


def weights(checkpoint, dtype=None):
    """Dtype, shape and bytes of each parameter, rounded to a dtype if one is given."""
    arrays = {path: np.asarray(leaf[...]) for path, leaf in flat_paths(checkpoint.state).items()}
    arrays = {path: array if dtype is None else array.astype(dtype) for path, array in arrays.items()}
    return {path: (array.dtype, array.shape, array.tobytes()) for path, array in arrays.items()}


def finish_gguf(writer):
    """Writes what a GGUFWriter was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def named_file(variable):
    """The real file that an environment variable names; without it the test is skipped."""
    if not os.environ.get(variable):
        pytest.skip(f"set {variable} to {VARIABLES[variable]}")
    return pathlib.Path(os.environ[variable])


def make_fields(**columns):
    """The metadata of a tokenizer as a GGUF file has it."""
    return {KEY + name: column for name, column in columns.items()}


def read_fields(path):
    """The metadata of a GGUF file."""
    import gguf

    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def make_tokenizer(*, adds_bos=True, template=None, kind=None):
    """A tokenizer of transformers of seven words."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    kind = kind or transformers.PreTrainedTokenizerFast
    hf = kind(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    hf.chat_template = template
    return hf
