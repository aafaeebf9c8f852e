"""Checkpoints beside the state dicts that transformers has of them, and loads that must end in one line."""

import re

import numpy as np
import pytest
import torch

from jaxkv.checkpoints import load
from jaxkv.checkpoints.fill import flat_paths
from jaxkv.config import make_precision
from jaxkv.errors import UserError
from jaxkv.models.families import key_table

FP32, FP16 = make_precision("fp32"), make_precision("fp16")
WORDS = ["<unk>", "<s>", "</s>", "hello", "world", "go", "<end>"]


def fails(path, words, precision=FP32, **options):
    """The error of a load: one line that holds `words`."""
    with pytest.raises(UserError) as caught:
        load(str(path), precision=precision, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(words, message), message
    return message


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


def weights(checkpoint):
    """Dtype, shape and bytes of each parameter."""
    arrays = {path: np.asarray(leaf[...]) for path, leaf in flat_paths(checkpoint.state).items()}
    return {path: (array.dtype, array.shape, array.tobytes()) for path, array in arrays.items()}


def finish_gguf(writer):
    """Writes what a GGUFWriter was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
