"""Converting or exporting a sharded checkpoint peaks below the model and an allowance, interpreter included.

JAXKV_MEMORY_GB sets the size of the synthetic model. The default is so small, and so is the allowance beside it, that
a second copy of the model would pass the limit.
"""

import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from cases import daily
from tokenizers import Tokenizer, models

# Over the model there are Python, JAX and transformers (about 0.4 GB), a tensor and Orbax's buffers.
GIGABYTES = float(os.environ.get("JAXKV_MEMORY_GB", "0.5"))
ALLOWANCE = 1.5e9 if GIGABYTES >= 1.5 else 0.8e9
WIDTH, LAYER_BYTES = 2304, 155.7e6


def write_sharded(directory, gigabytes: float, shards: int = 3) -> int:
    """A Gemma-2 of about `gigabytes` in bf16, filled with one small block over and over; returns its bytes."""
    vocab = 128000 if gigabytes >= 3 else 32000
    layers = max(1, round((gigabytes * 1e9 - 2 * vocab * WIDTH) / LAYER_BYTES))
    config = transformers.Gemma2Config(vocab_size=vocab, num_hidden_layers=layers)  # else of the size of Gemma-2 2B
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    named = [(name, tuple(value.shape)) for name, value in model.named_parameters()]  # the head is tied
    block = (np.random.default_rng(0).integers(0x3C00, 0x3D00, 1 << 20)).astype(np.uint16).tobytes()
    weight_map, total = {}, 0
    for shard in range(shards):
        part = named[shard::shards]
        header, end = {}, 0
        for name, shape in part:
            size = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        weight_map |= dict.fromkeys(header, file)
        encoded = json.dumps(header).encode()
        with open(directory / file, "wb") as out:
            out.write(struct.pack("<Q", len(encoded)) + encoded)
            for start in range(0, end, len(block)):
                out.write(block[: min(len(block), end - start)])
        total += end
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.save_pretrained(directory)
    Tokenizer(models.WordLevel({"<bos>": 0, "<eos>": 1, "a": 2}, unk_token="a")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"})
    )
    return total


# The command, then its own peak. Not ru_maxrss of the child: that begins at what the test process held when it forked.
MEASURED = """
import atexit, re, runpy, sys
status = lambda: open("/proc/self/status").read()
atexit.register(lambda: print("peak", re.search(r"VmHWM:\\s+(\\d+) kB", status())[1], flush=True))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc, which only Linux has")
@pytest.mark.parametrize("command", daily(["convert"], ["convert", "export"]))
def test_peak_is_below_model_and_allowance(tmp_path, command):
    source = tmp_path / "source"
    source.mkdir()
    model_bytes = write_sharded(source, GIGABYTES)
    arguments = [f"jaxkv.checkpoints.{command}", str(source), str(tmp_path / "dest"), "--dtype=fp16"]
    done = subprocess.run([sys.executable, "-c", MEASURED, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    peak = 1024 * int(done.stdout.split("peak ")[1])
    print(f"model {model_bytes / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB, over {(peak - model_bytes) / 1e9:.2f} GB")
    assert model_bytes < peak < model_bytes + ALLOWANCE
