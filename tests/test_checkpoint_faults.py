"""Checkpoints as they lie on disks, and broken ones: read as transformers reads them, or refused in one line."""

import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import struct
import subprocess
import sys
import time

import gguf
import numpy as np
import pytest
import torch
import transformers
from cases import daily
from checkpoint_files import FP16, FP32, assert_same_bits, draw_weights, fails, refused
from safetensors.torch import load_file, save_file
from small_models import changed_state
from test_checkpoints_gguf import write_gguf
from test_checkpoints_hf import make_model

from jaxkv.checkpoints import load, orbax
from jaxkv.checkpoints.export import export
from jaxkv.checkpoints.fill import flat_paths
from jaxkv.checkpoints.gguf_header import find_parts
from jaxkv.checkpoints.manifest import write_manifest
from jaxkv.config import make_precision
from jaxkv.errors import UserError


def transformers_weights(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()


@pytest.fixture
def llama(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


# Folders


def test_a_single_file_wins_over_an_index_left_behind(llama):
    """Saved in shards, then, changed, as one file."""
    (llama / "model.safetensors").unlink()
    model = make_model("llama")
    model.save_pretrained(llama, max_shard_size="20KB")
    old = sorted(path.name for path in llama.glob("*.safetensors"))
    with torch.no_grad():
        model.model.norm.weight += 1
    save_file(dict(model.state_dict()), llama / "model.safetensors", metadata={"format": "pt"})
    checkpoint = load(str(llama), precision=FP32)
    assert_same_bits(checkpoint, transformers_weights(llama))
    assert_same_bits(checkpoint, model.state_dict())
    assert checkpoint.provenance.left_aside == (*old, "model.safetensors.index.json")
    assert "model.safetensors" in checkpoint.provenance.files
    assert not set(old) & set(checkpoint.provenance.files)
    assert checkpoint.provenance.to_json()["left_aside"] == [*old, "model.safetensors.index.json"]
    assert "left_aside" not in checkpoint.provenance.identity()


def test_stray_files_beside_an_index_are_named(tmp_path):
    model = make_model("mistral")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shutil.copy(next(tmp_path.glob("*.safetensors")), tmp_path / "consolidated.safetensors")
    checkpoint = load(str(tmp_path), precision=FP32)
    assert_same_bits(checkpoint, model.state_dict())
    assert checkpoint.provenance.left_aside == ("consolidated.safetensors",)
    (tmp_path / "model.safetensors.index.json").unlink()  # Mistral's folder on some mirrors
    checkpoint = load(str(tmp_path), precision=FP32)
    assert_same_bits(checkpoint, model.state_dict())
    assert checkpoint.provenance.left_aside == ("consolidated.safetensors",)
    model.save_pretrained(tmp_path / "other", max_shard_size="40KB")
    for path in (tmp_path / "other").glob("*.safetensors"):
        shutil.copy(path, tmp_path)
    fails(tmp_path, "shards of several saves")
    for path in (tmp_path / "other").glob("*.safetensors"):
        (tmp_path / path.name).unlink()
    next(tmp_path.glob("model-*.safetensors")).unlink()
    fails(tmp_path, r"holds \d+ of \d+ shards; download the rest")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "expected `object`, got `array`"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": 3}}', "expected `str`, got `int`"),
        ('{"weight_map": {"a": "../llama/model.safetensors"}}', "names '../llama/model.safetensors'"),
        ('{"weight_map": {"a": "x.bin"}}', "names 'x.bin'"),
        ('{"weight_map": {"a": "x.safetensors"}}', "lacks 1 of 1 shards: x.safetensors"),
        ('{"weight_map": {}}', "has no weights"),
    ],
)
def test_broken_index(llama, content, words):
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(content)
    fails(llama, words)


def original_mistral(state, head_dim):
    """The state dict under Mistral's names, RoPE halves interleaved: each of transformers' conversion steps undone."""
    names = {
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }  # fmt: skip
    found = {}
    for name, value in state.items():
        for theirs, short in names.items():
            name = name.replace(theirs, short)
        if "attention.wq" in name or "attention.wk" in name:
            value = value.view(-1, 2, head_dim // 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
        found[name.removeprefix("model.")] = value.contiguous()
    return found


def turned_scores(q, k, positions, pairs):
    """q . k after RoPE at two positions, by hand: `pairs` turns (0, 1), (2, 3), ..., else i with i + H/2."""
    half = len(q) // 2
    angles = 10000.0 ** (-np.arange(half) / half)

    def turn(x, position):
        z = x[0::2] + 1j * x[1::2] if pairs else x[:half] + 1j * x[half:]
        return z * np.exp(1j * angles * position)

    return (turn(q, positions[0]) * turn(k, positions[1]).conj()).real.sum()


def test_mistrals_own_file_alone(tmp_path):
    model = make_model("mistral")
    config = model.config
    original = original_mistral(model.state_dict(), config.head_dim)
    save_file(original, tmp_path / "consolidated.safetensors")
    params = {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "head_dim": config.head_dim,
        "hidden_dim": config.intermediate_size, "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads, "norm_eps": config.rms_norm_eps, "vocab_size": config.vocab_size,
        "sliding_window": config.sliding_window,
    }  # fmt: skip
    (tmp_path / "params.json").write_text(json.dumps(params))
    checkpoint = load(str(tmp_path), precision=FP32)
    assert_same_bits(checkpoint, model.state_dict())
    model.save_pretrained(tmp_path / "hf")
    expected = load(str(tmp_path / "hf"), precision=FP32).config
    assert dataclasses.replace(checkpoint.config, name="hf", context_length=expected.context_length) == expected
    assert set(checkpoint.provenance.files) == {"consolidated.safetensors", "params.json"}
    # The same scores as Mistral's RoPE, which turns pairs of the original rows.
    x = np.random.default_rng(0).normal(size=config.hidden_size)
    row = slice(config.head_dim, 2 * config.head_dim)
    before = [original[f"layers.1.attention.{name}.weight"].numpy()[row] @ x for name in ("wq", "wk")]
    state = flat_paths(checkpoint.state)
    after = [np.asarray(state[f"layers/1/attn/{name}"][...])[1] @ x for name in ("q", "k")]
    np.testing.assert_allclose(turned_scores(*after, (7, 3), False), turned_scores(*before, (7, 3), True), rtol=1e-6)
    for change, words in (
        ({"moe": {"num_experts": 8}}, "unknown field `moe`"),
        ({"dim": None}, "field dim: expected `int`, got `null`"),
        ({"n_layers": 0}, "field n_layers: expected `int` >= 1"),
    ):
        (tmp_path / "params.json").write_text(json.dumps(params | change))
        fails(tmp_path, f"params.json.*{words}")
    (tmp_path / "params.json").unlink()
    fails(tmp_path, "has weights but no config.json")


def test_lora_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base", "peft_type": "LORA"}')
    save_file({"base_model.model.q.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    fails(tmp_path, "LoRA adapter of owner/base, not a model; merge it into its base first")
    (tmp_path / "adapter_config.json").unlink()
    fails(tmp_path, "LoRA adapter, not a model")


def test_base_model_without_prefix(tmp_path):
    model = make_model("llama-tied")
    model.model.save_pretrained(tmp_path / "tied")
    assert "embed_tokens.weight" in load_file(tmp_path / "tied" / "model.safetensors")
    checkpoint = load(str(tmp_path / "tied"), precision=FP32)
    assert_same_bits(checkpoint, transformers_weights(tmp_path / "tied"))
    assert_same_bits(checkpoint, model.state_dict())
    make_model("llama").model.save_pretrained(tmp_path / "untied")
    fails(tmp_path / "untied", "base model without the head lm_head.weight.*AutoModelForCausalLM")


def test_wrapped_language_model(llama):
    tensors = {f"language_model.{name}": value for name, value in load_file(llama / "model.safetensors").items()}
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    fails(llama, "language_model.* multimodal model, and only text models")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("folder", " (is a directory|cannot be read .Is a directory)"),
        ("dangling", " cannot be read .No such file or directory"),
        ("empty", "(: is not JSON| cannot be read .*header too small)"),
        ("forbidden", " cannot be read .Permission denied.; "),
    ],
)
def test_no_readable_file(llama, name, fault, words, monkeypatch):
    file = llama / name
    real = pathlib.Path.open

    def refuse(path, *args, **options):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    if fault == "forbidden":
        monkeypatch.setattr(pathlib.Path, "open", refuse)
    else:
        file.unlink()
    make = {"folder": file.mkdir, "dangling": lambda: file.symlink_to(llama / "nowhere"), "empty": file.touch}
    make.get(fault, bool)()
    fails(llama, name + words)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [{}, "x", -1, 10**9, 1e9, [1, None], [[1]], True])
def test_stop_ids(llama, name, value):
    file = llama / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": value}))
    fails(llama, rf"({name}|model config).*eos_token_id.*; ")


# Safetensors


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shape":[32]', b'"shape":[%d,4]' % (1 << 62)),
        (b'"data_offsets":[0,', b'"data_offsets":[-4,'),
        (b'"F32"', b'"F99"'),
        (b"layers.1.input_layernorm", b"layers.0.input_layernorm"),  # a name that occurs twice
    ],
)
def test_header_that_contradicts_itself(llama, old, new):
    """More of them are in tests/malformed.py."""
    path = llama / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].replace(old, new)
    assert header != content[8 : 8 + length]
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    fails(llama, r"model.safetensors cannot be read \(Error while deserializing header: .*; copy or download it again")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<Q", 1 << 63) + b"{}", "header too large"),
        (struct.pack("<Q", 99_999_999) + b"{}" * 50, "invalid header length"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "invalid JSON in header"),
        (struct.pack("<Q", 2) + b"[]", "invalid JSON in header"),
        (struct.pack("<Q", 3) + b'{"\xff', "invalid UTF-8 in header"),
        (struct.pack("<Q", 2) + b"{}", "missing"),
        (struct.pack("<Q", 2) + b"{}abc", "file not fully covered"),
    ],
)
def test_no_header(llama, content, words):
    (llama / "model.safetensors").write_bytes(content)
    fails(llama, words)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_that_are_not_finite(llama, dtype, value):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(llama / "model.safetensors").items()}
    tensors["model.layers.2.mlp.up_proj.weight"][-1, -1] = value
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    for precision in ("fp16", "bf16", "fp32"):
        fails(llama, "model.layers.2.mlp.up_proj.weight: a weight is NaN or infinite", make_precision(precision))


def test_weights_that_became_infinite_are_not_written(tmp_path):
    checkpoint = draw_weights()
    bad = dataclasses.replace(checkpoint, state=changed_state(checkpoint.state, "layers/1/attn/q", (0, 0, 0), np.nan))
    for write in (orbax.save, export):
        with refused("a weight is NaN or infinite"):
            write(bad, tmp_path / "dest")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changes_while_it_is_read(llama, tmp_path):
    """What is hashed is what is read, or nothing is."""
    write_gguf(tmp_path / "tiny.gguf")
    orbax.save(draw_weights(precision=FP32), tmp_path / "ours")
    for source, file in (
        (llama, llama / "model.safetensors"),
        (tmp_path / "tiny.gguf", tmp_path / "tiny.gguf"),
        (tmp_path / "ours", tmp_path / "ours" / "params" / "embed" / "0.0"),
    ):

        def touch(done, of, name, file=file):
            if done == 2:
                os.utime(file, ns=(1, 1))

        fails(source, f"{file.name} changed while it was read", progress=touch)


# GGUF


@pytest.fixture
def parts(tmp_path):
    """A model in parts as gguf's own writer splits it, and its state dict."""
    state = write_gguf(tmp_path / "tiny.gguf", split=10)
    return sorted(tmp_path.glob("tiny-*.gguf")), state


def test_split_model_is_read_whole(parts):
    paths, state = parts
    assert len(paths) > 2
    for path in paths:
        checkpoint = load(str(path), precision=FP32)
        assert_same_bits(checkpoint, state)
        assert not checkpoint.config.tie_embeddings
        assert checkpoint.config.name == "tiny"
        assert set(checkpoint.provenance.files) == {part.name for part in paths}


def test_split_model_with_faults(parts, tmp_path):
    paths, _ = parts
    whole = [path.read_bytes() for path in paths]
    paths[1].unlink()
    fails(paths[0], rf"lacks 1 of {len(paths)} parts: {paths[1].name}")
    paths[1].write_bytes(whole[2])
    fails(paths[0], f"says that it is part 3 of {len(paths)}, not 2 of {len(paths)}")
    paths[1].write_bytes(whole[1])
    shutil.copy(paths[0], tmp_path / "model.gguf")
    fails(tmp_path / "model.gguf", f"is part 1 of {len(paths)} of a split model and is not named so; rename it to NAME")
    names = [tensor.name for tensor in gguf.GGUFReader(paths[0]).tensors]
    twice = names[1].encode()
    same = next(t.name.encode() for t in gguf.GGUFReader(paths[1]).tensors if len(t.name) == len(twice))
    paths[1].write_bytes(whole[1].replace(same, twice, 1))
    fails(paths[2], f"{names[1]} is in more than one part")
    paths[1].write_bytes(whole[1])
    paths[2].write_bytes(whole[2][:-1000])
    fails(paths[0], f"{paths[2].name} is truncated or no GGUF file")
    paths[2].write_bytes(whole[2])
    key = b"split.tensors.count" + struct.pack("<I", 5)
    at = whole[0].index(key) + len(key)
    (count,) = struct.unpack_from("<i", whole[0], at)
    paths[0].write_bytes(whole[0][:at] + struct.pack("<i", count + 1) + whole[0][at + 4 :])
    fails(paths[0], f"the parts hold {count} tensors of {count + 1}")


@pytest.mark.parametrize(("version", "words"), [(b"\0\0\0\3", "of big-endian machines"), (b"\1\0\0\0", "format 1")])
def test_formats_that_are_not_read(tmp_path, version, words):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + version + content[8:])
    fails(path, words)


def test_one_flipped_bit(tmp_path):
    """Whatever bit of a header flips: a model of the right size, or one line, and soon."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    whole = bytearray(path.read_bytes())
    end = gguf.GGUFReader(path).data_offset
    expected = load(str(path), precision=FP32)
    shapes = {name: leaf.shape for name, leaf in flat_paths(expected.state).items()}
    rng = random.Random(0)
    begin_infos = whole.index(b"token_embd.weight")
    positions = {*range(24), *rng.sample(range(24, end), 100), *rng.sample(range(begin_infos, end), 60)}
    refused = 0
    for position in sorted(positions):
        bit = 1 << rng.randrange(8)
        whole[position] ^= bit
        path.write_bytes(whole)
        whole[position] ^= bit
        start = time.monotonic()
        try:
            found = load(str(path), precision=FP32)
            assert {name: leaf.shape for name, leaf in flat_paths(found.state).items()} == shapes, position
        except UserError:
            refused += 1
        assert time.monotonic() - start < 10, position  # seconds on a busy machine; 0.1 on an idle one
    assert refused > 40


def test_lengths_are_checked_before_anything_is_allocated(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    key = b"tokenizer.ggml.scores"
    at = whole.index(key) + len(key) + 8  # after the types of the array and of its items
    for where, size in ((8, 8), (16, 8), (at, 8), (24, 8)):  # tensors, entries, items, the first key's length
        for value in (1 << 62, 1 << 34, len(whole)):
            path.write_bytes(whole[:where] + struct.pack("<Q", value) + whole[where + size :])
            start = time.monotonic()
            with refused("truncated or no GGUF file"):
                find_parts(path)
            assert time.monotonic() - start < 3


# Our own format


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "dest"
    orbax.save(draw_weights(), path)
    return path


@pytest.fixture
def ours(stored, tmp_path):
    return pathlib.Path(shutil.copytree(stored, tmp_path / "ours"))


def touch_metadata(path, edit):
    file = path / "params" / "_CHECKPOINT_METADATA"
    values = json.loads(file.read_text())
    edit(values["custom_metadata"]["jaxkv"])
    file.write_text(json.dumps(values))


def touch_config(**values):
    return lambda path: touch_metadata(path, lambda kept: kept["config"].update(values))


def drop(name):
    return lambda path: touch_metadata(path, lambda kept: kept.pop(name))


def write(name, content):
    return lambda path: (path / name).write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        touch_config(rope_theta=77.0),
        write("params/embed/0.0", b"\0" * 259 * 48 * 2),
        lambda path: (path / "params/_CHECKPOINT_METADATA").unlink(),
        write("tokenizer/chat_template.jinja", b"x"),
        lambda path: (path / "params/embed/0.0").unlink(),
        lambda path: shutil.rmtree(path / "tokenizer"),
    ],
)
def test_what_was_written_is_checked(ours, change, capfd):
    change(ours)
    fails(ours, r"is not as it was written \(\d+ (missing|changed|added): .*convert the original again", FP16)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (touch_config(num_layers=2), "holds 3 layers, and its config says 2;"),
        (touch_config(num_layers=10**9), "holds 3 layers, and its config says 1000000000"),
        (touch_config(num_kv_heads="4"), "stored model config: field num_kv_heads: expected `int`, got `str`"),
        (touch_config(model_dim=None), "field model_dim: expected `int`, got `null`"),
        (touch_config(num_kv_heads=0), "ours: .*num_kv_heads 0"),
        (touch_config(head_dim=10), "layers/0/attn/k, .* and 8 more does not fit the stored config"),
        (touch_config(query_norm=True), "query_norm"),
        (drop("config"), "missing required field `config`"),
        (drop("provenance"), "missing required field `provenance`"),
        (lambda path: touch_metadata(path, lambda kept: kept.update(dtype="int3")), "invalid enum value 'int3'"),
        (lambda path: touch_metadata(path, lambda kept: kept.update(format=3)), "field format: invalid enum value 3"),
        (write("params/_CHECKPOINT_METADATA", b"{"), "not one of jaxkv's|cannot be read"),
        (write("tokenizer/jaxkv_tokenizer.json", b'{"kind": 3}'), "tokenizer"),
    ],
)
def test_what_another_version_wrote_is_checked(ours, change, words, capfd):
    change(ours)
    write_manifest(ours)
    fails(ours, words, FP16)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (write("params/embed/.zarray", b"{"), "embed/.zarray: is not JSON"),
        (write("params/embed/.zarray", b'{"shape": [259, 48], "chunks": [259, 48]}'), "field `compressor`"),
        (lambda path: (path / "params/embed/0.0").unlink(), "embed holds 0 of 1 chunks"),
        (write("params/embed/0.0", b"\0" * 10), "has a chunk that is not 24864 bytes long"),
        (lambda path: shutil.rmtree(path / "params/embed"), "embed does not fit the stored config"),
    ],
)
def test_without_a_manifest_the_arrays_are_checked(ours, change, words, capfd):
    """As a checkpoint of the first format, which had none."""
    touch_metadata(ours, lambda kept: kept.update(format=1))
    (ours / "manifest.json").unlink()
    assert "without a manifest" in load(str(ours), precision=FP16).provenance.note
    change(ours)
    fails(ours, words, FP16)
    assert capfd.readouterr().err == ""


def test_manifest_gone_or_broken(ours):
    manifest = ours / "manifest.json"
    whole = manifest.read_bytes()
    for content, words in ((b"{", "manifest.json: is not JSON"), (b'{"format": 9, "files": {}}', "field format")):
        manifest.write_bytes(content)
        fails(ours, words)
    manifest.unlink()
    fails(ours, "lacks its manifest.json; copy it too")
    manifest.write_bytes(whole)
    load(str(ours), precision=FP16)
    fails(ours / "params", "is the inside of an Orbax checkpoint")


def test_arrays_identify_an_orbax_checkpoint(tmp_path):
    """Two conversions of one model are the same weights; other weights at the same path are not."""
    identities = []
    for seed in (1, 1, 2):
        checkpoint = draw_weights(seed=seed)
        provenance = dataclasses.replace(checkpoint.provenance, source="somewhere")
        shutil.rmtree(tmp_path / "ours", ignore_errors=True)
        orbax.save(dataclasses.replace(checkpoint, provenance=provenance), tmp_path / "ours")
        identities.append(load(str(tmp_path / "ours"), precision=FP16).provenance.identity())
    assert identities[0] == identities[1]
    assert identities[0]["files"]["params"] != identities[2]["files"]["params"]
    assert identities[0]["files"]["tokenizer"] == identities[2]["files"]["tokenizer"]


# Writing


FULL = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of a file's size there")
@pytest.mark.parametrize("command", daily(["convert"], ["convert", "export"]))
def test_writes_that_fail_leave_nothing(llama, tmp_path, command):
    """The system refuses a file past some size, as a full disk would: a real write fails inside each library."""
    arguments = [f"jaxkv.checkpoints.{command}", str(llama), str(tmp_path / "new" / "dest")]
    done = subprocess.run([sys.executable, "-c", FULL, *arguments], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    words = r"error: cannot write .*dest \(File too large\); choose another destination or free some space"
    assert re.fullmatch(words, done.stderr.strip())
    assert list(tmp_path.iterdir()) == [llama]


def test_a_full_disk_inside_the_libraries(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def full(*args, **options):
        raise ValueError('RESOURCE_EXHAUSTED: Error writing local file "/x": No space left on device [28]')

    monkeypatch.setattr(ocp.Checkpointer, "save", full)
    with refused(r"cannot write .*dest \(No space left on device\); "):
        orbax.save(draw_weights(), tmp_path / "new" / "dest")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("save", [orbax.save, export])
def test_nothing_of_the_users_is_overwritten(tmp_path, save):
    checkpoint = draw_weights()
    (tmp_path / "empty").mkdir()
    save(checkpoint, tmp_path / "empty")
    load(str(tmp_path / "empty"), precision=FP16)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for name, words in (
        ("file", "exists and is not empty"),
        ("folder", "exists and is not empty"),
        ("link", "exists and is not empty"),
        ("file/below", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null byte"),
    ):
        with refused(words):
            save(checkpoint, str(tmp_path / name))
        assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "notes.txt").read_text() == "kept"
