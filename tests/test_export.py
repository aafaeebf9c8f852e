"""Exported directories: transformers computes our logits from them, and we read back the same bits."""

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest
import torch
import transformers
from cases import daily
from checkpoint_files import FP16, FP32, draw_weights, make_random, make_tokenizer, refused, run_module, weights
from safetensors import safe_open
from test_checkpoints_gguf import write_gguf
from tiny_models import FAMILIES, TEXT, load_torch, make_text, run_whole, torch_logits

from jaxkv.checkpoints import ByteTokenizer, Tokenizer, export, load, orbax
from jaxkv.checkpoints.hf_config import transformers_config
from jaxkv.config import make_precision
from jaxkv.models.families import PRESETS, get_preset, parse_config

# That of tests/test_parity.py, for the same sums.
TOLERANCE = 2e-5
TEXTS = ["", " ", "Of the 12 cafés,\n  which?  345.6", "I'll\t\r\n\x00\x7f", "中文 \U0001f642 e\u0301\ufeff"]
TEXTS += [" " * 40 + "x"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }} {% endfor %}"


def with_tokenizer(checkpoint, tokenizer, **generation):
    return dataclasses.replace(checkpoint, tokenizer=tokenizer, generation=generation)


def stored(path):
    """Dtype, shape and bytes of each tensor in a file, as the safetensors library reads it."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: (t.dtype, tuple(t.shape), t.view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("family", "heads"),
    daily([("llama", "mha"), ("gemma3", "gqa"), ("qwen2", "gqa")], itertools.product(FAMILIES, ("mha", "gqa"))),
)
def test_transformers_computes_our_logits(tiny, tmp_path, family, heads):
    """Four windows of text; the file is, tensor by tensor, what transformers itself would have saved."""
    checkpoint = tiny.checkpoint(family, heads)
    export.export(checkpoint, str(tmp_path / "dest"), dtype="fp32")
    text = make_text(checkpoint.config)[:, :TEXT]
    ours = np.asarray(run_whole(checkpoint.config, FP32, checkpoint.state, text)[0])
    model = load_torch(tmp_path / "dest")
    theirs = torch_logits(model, text, [0, 0])
    difference = np.abs(ours - theirs).max()
    print(f"{family} {heads}: {difference:.2g}")
    assert np.abs(theirs).max() > 1
    assert difference < TOLERANCE
    assert stored(tmp_path / "dest" / "model.safetensors") == stored(tiny.path(family, heads) / "model.safetensors")
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path")
    before, after = (dict(m.config.to_dict()) for m in (tiny.torch(family, heads), model))
    assert {k: v for k, v in before.items() if k not in ids} == {k: v for k, v in after.items() if k not in ids}


TEST_PRESETS = [name for name in PRESETS if name.startswith("test-")]
DTYPES = ("fp16", "bf16", "fp32")


@pytest.mark.parametrize(
    ("preset", "dtype"),
    daily(zip(TEST_PRESETS, itertools.cycle(DTYPES)), itertools.product(TEST_PRESETS, DTYPES)),
)
def test_round_trip_is_bit_exact(tmp_path, preset, dtype):
    checkpoint = draw_weights(preset, make_precision(dtype))
    export.export(checkpoint, str(tmp_path / "dest"), dtype=dtype)
    again = load(str(tmp_path / "dest"), precision=make_precision(dtype))
    assert weights(again) == weights(checkpoint)
    assert dataclasses.replace(again.config, name=preset) == checkpoint.config
    assert again.provenance.dtypes == {dtype: len(weights(checkpoint))}
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    settings = transformers.AutoConfig.from_pretrained(tmp_path / "dest")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dest")
    assert type(model).__name__ == settings.architectures[0]
    assert settings.dtype == model.dtype == kind


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rounds_once(tmp_path, dtype):
    checkpoint = draw_weights("test-gemma2", FP32)
    export.export(checkpoint, str(tmp_path / "wide"), dtype="fp32")
    export.export(checkpoint, str(tmp_path / "narrow"), dtype=dtype)
    policy = make_precision(dtype)
    assert weights(load(str(tmp_path / "narrow"), precision=policy)) == weights(
        load(str(tmp_path / "wide"), precision=policy)
    )


def test_a_weight_past_the_range_leaves_nothing_behind(tmp_path):
    checkpoint = draw_weights("test-gemma2", FP32)
    checkpoint.state["layers"][1]["mlp"]["up"][...] = checkpoint.state["layers"][1]["mlp"]["up"][...] * 1e6
    with refused(r"model.layers.1.mlp.up_proj.weight: the weight .* float16"):
        export.export(checkpoint, str(tmp_path / "dest"))
    assert list(tmp_path.iterdir()) == []


def test_large_models_are_sharded(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_SHARD_BYTES", 20_000)
    checkpoint = draw_weights("test-llama2", make_precision("bf16"))
    export.export(checkpoint, str(tmp_path / "dest"), dtype="bf16")
    files = sorted(path.name for path in (tmp_path / "dest").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    sizes = [sum(len(data) for _, _, data in stored(tmp_path / "dest" / file).values()) for file in files]
    assert [size for size in sizes if size > 20_000] == [2 * 259 * 48] * 2  # embedding and head
    assert len(sizes) < 20
    index = json.loads((tmp_path / "dest" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert weights(load(str(tmp_path / "dest"), precision=make_precision("bf16"))) == weights(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dest")
    assert model.state_dict()["lm_head.weight"].view(torch.uint8).numpy().tobytes() == weights(checkpoint)["head"][2]


def test_every_preset_is_the_config_of_its_export(tmp_path):
    for name, preset in PRESETS.items():
        transformers_config(preset).save_pretrained(tmp_path)
        assert parse_config(json.loads((tmp_path / "config.json").read_text()), name) == preset
        read = transformers.AutoConfig.from_pretrained(tmp_path)
        assert parse_config(read.to_dict(), name) == preset


@pytest.mark.parametrize(
    ("preset", "changes", "words"),
    [
        ("test-llama2", {"final_softcap": 30.0}, "LlamaConfig of transformers cannot express final_softcap 30.0"),
        ("test-llama2", {"window": 8, "window_pattern": (True,)}, "window 8 .* window_pattern"),
        ("test-llama2", {"embed_scale": 2.0}, "embed_scale 2.0"),
        ("test-mistral", {"window_pattern": (True, False)}, "MistralConfig .* window_pattern"),
        ("test-mistral", {"qk_norm": True}, "qk_norm True"),
        ("test-llama3", {"qkv_bias": True}, "LlamaConfig .* qkv_bias True"),
        ("test-qwen2", {"qkv_bias": False}, "Qwen2Config .* qkv_bias False"),
        ("test-qwen3", {"qk_norm": False}, "Qwen3Config .* qk_norm False"),
        ("test-gemma2", {"query_scale": 0.3}, "Gemma2Config .* query_scale 0.3"),
        ("test-gemma2", {"activation": "silu"}, "activation silu"),
        ("test-gemma2", {"local_rope_theta": 5e3}, "local_rope_theta 5000"),
        ("test-gemma3", {"norm_offset": 0.0}, "Gemma3TextConfig .* norm_offset 0.0"),
        ("test-gemma2", {"vocab_size": 258}, "eos_token_id 258 is no id of a vocabulary of 258"),
    ],
)
def test_what_transformers_cannot_express_is_refused_by_name(tmp_path, preset, changes, words):
    config = dataclasses.replace(get_preset(preset), **changes)
    with refused(words):
        export.export(dataclasses.replace(draw_weights(preset), config=config), str(tmp_path / "dest"))
    assert list(tmp_path.iterdir()) == []


def test_a_window_pattern_written_another_way_is_none_of_them():
    pattern = (True, False, True, False)
    settings = transformers_config(dataclasses.replace(get_preset("test-gemma2"), window_pattern=pattern))
    assert settings.layer_types == ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize("add_bos", [True, False])
def test_byte_tokenizer(tmp_path, add_bos):
    ours = ByteTokenizer(add_bos=add_bos)
    export.export(with_tokenizer(draw_weights("test-gemma2", FP32), ours), str(tmp_path / "dest"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "dest")
    rng = random.Random(0)
    planes = [*range(0x800), *range(0xE000, 0x110000, 997)]
    texts = [*TEXTS, "".join(map(chr, rng.sample(planes, 999)))]
    for text in texts:
        assert theirs(text)["input_ids"] == ours.encode(text)
    for _ in range(20):
        ids = [rng.randrange(259) for _ in range(50)]
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    again = load(str(tmp_path / "dest"), precision=FP16).tokenizer
    assert again.to_json() == ours.to_json() | {"kind": "huggingface"}
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (257, 258, 256)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_tokenizer_generation_config_and_ids(tmp_path, adds_bos):
    ours = Tokenizer(make_tokenizer(adds_bos=adds_bos, template=TEMPLATE), eos_ids=[6])
    values = {"temperature": 0.6, "do_sample": True, "eos_token_id": 2, "pad_token_id": 5, "temp": 0.7}
    export.export(with_tokenizer(draw_weights("test-gemma2", FP32), ours, **values), str(tmp_path / "dest"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "dest")
    assert theirs("hello world")["input_ids"] == ours.encode("hello world") == [1] * adds_bos + [3, 4]
    assert theirs.chat_template == TEMPLATE
    again = load(str(tmp_path / "dest"), precision=FP16)
    assert again.tokenizer.to_json() == ours.to_json()
    ids = {"bos_token_id": 1, "eos_token_id": [2, 6], "pad_token_id": 5}
    assert again.generation == {"temperature": 0.6, "do_sample": True} | ids
    read = transformers.GenerationConfig.from_pretrained(tmp_path / "dest")
    settings = transformers.AutoConfig.from_pretrained(tmp_path / "dest")
    for name, value in ids.items():
        assert getattr(read, name) == getattr(settings, name) == value
    assert read.temperature == 0.6


def test_tokenizer_that_its_class_would_rebuild(tmp_path):
    """LlamaTokenizer makes its pipeline from the vocabulary alone; what was loaded is what must be written."""
    ours = Tokenizer(make_tokenizer(kind=type("LlamaTokenizer", (transformers.PreTrainedTokenizerFast,), {})))
    export.export(with_tokenizer(draw_weights("test-llama2", FP32), ours), str(tmp_path / "dest"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "dest")
    assert theirs("hello world")["input_ids"] == [1, 3, 4]


def test_tokenizer_that_cannot_be_said_is_refused(tmp_path):
    ours = Tokenizer(make_tokenizer(adds_bos=False), add_bos=True)
    with refused("would not read this tokenizer back"):
        export.export(with_tokenizer(draw_weights("test-gemma2", FP32), ours), str(tmp_path / "dest"))
    assert list(tmp_path.iterdir()) == []


def test_gguf_and_orbax_sources(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", "gemma2")
    sources = [load(str(tmp_path / "tiny.gguf"), precision=FP32)]
    orbax.save(sources[0], tmp_path / "orbax")
    sources.append(load(str(tmp_path / "orbax"), precision=FP32))
    for number, source in enumerate(sources):
        export.export(source, str(tmp_path / f"dest{number}"), dtype="fp32")
        again = load(str(tmp_path / f"dest{number}"), precision=FP32)
        assert weights(again) == weights(source)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / f"dest{number}")
        for text in TEXTS:
            assert theirs(text)["input_ids"] == again.tokenizer.encode(text) == source.tokenizer.encode(text)


def test_command(tmp_path):
    done = run_module("export", "random:3", tmp_path / "dest", "--model=test-gemma3", "--dtype=bf16")
    assert done.returncode == 0, done.stderr
    assert "test-gemma3, 0.0" in done.stderr
    bf16 = make_precision("bf16")
    again = load(str(tmp_path / "dest"), precision=bf16, config=get_preset("test-gemma3"))
    assert weights(again) == weights(make_random("test-gemma3", bf16, seed=3))
