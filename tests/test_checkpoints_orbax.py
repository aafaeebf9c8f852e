"""Our own checkpoints: the same bits back, on any number of devices; the convert command; tokenizers."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import transformers
from cases import daily
from checkpoint_files import (
    FP16,
    fails,
    keeping_programs,
    make_random,
    make_tokenizer,
    refused,
    run_module,
    weights,
)
from commands import start_in_process
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxkv.checkpoints import ByteTokenizer, Tokenizer, convert, load, orbax
from jaxkv.checkpoints.hf_tokenizer import load_tokenizer
from jaxkv.config import make_precision
from jaxkv.models.families import get_preset


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    checkpoint = make_random("test-gemma3")
    path = tmp_path_factory.mktemp("orbax") / "dest"
    orbax.save(checkpoint, path)
    return path, checkpoint


ROUND_TRIPS = [("test-mistral", name) for name in ("fp16", "bf16", "fp32")]
ROUND_TRIPS += [(f"test-{family}", "bf16") for family in ("llama3", "qwen2", "qwen3")]


@pytest.mark.parametrize(("model", "name"), daily([("test-mistral", "fp32"), ("test-qwen2", "bf16")], ROUND_TRIPS))
def test_round_trip_is_bit_exact(tmp_path, model, name):
    precision = make_precision(name)
    checkpoint = make_random(model, precision)
    orbax.save(checkpoint, tmp_path / "dest")
    again = load(str(tmp_path / "dest"), precision=precision, config=get_preset(model))
    assert weights(again) == weights(checkpoint)
    assert again.config == checkpoint.config
    assert again.tokenizer.to_json() == checkpoint.tokenizer.to_json()
    assert again.generation == checkpoint.generation
    assert again.provenance.kind == "orbax"
    assert again.provenance.converted_from == {"source": "random:1", "kind": "random", "files": {}}
    assert again.provenance.note == "random weights"
    assert again.provenance.converted_by["jaxkv"]
    assert nnx.merge(again.graphdef, again.state).embed[...].dtype == precision.param


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_restores_to_another_dtype(saved, name):
    path, checkpoint = saved
    wanted = make_precision(name)
    assert weights(load(str(path), precision=wanted)) == weights(checkpoint, wanted.param)


def test_restore_that_overflows_names_the_tensor(tmp_path):
    checkpoint = make_random(precision=make_precision("fp32"))
    checkpoint.state["layers"][1]["mlp"]["up"][...] = checkpoint.state["layers"][1]["mlp"]["up"][...] * 1e6
    orbax.save(checkpoint, tmp_path / "dest")
    fails(tmp_path / "dest", r"layers/1/mlp/up: the weight .* float16", FP16)


DEVICES = """
import sys, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxkv.checkpoints import load
from jaxkv.checkpoints.fill import flat_paths
from jaxkv.config import make_precision

count, source, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
assert len(jax.devices()) == count
mesh = jax.make_mesh((count,), ("model",), axis_types=(AxisType.Auto,))

def rule(path, shape):
    axis = next((i for i, size in enumerate(shape) if size % count == 0), None)
    return NamedSharding(mesh, P() if axis is None else P(*[None] * axis, "model"))

for name in ("fp16", "fp32"):
    for sharding in (rule, NamedSharding(mesh, P())):
        leaves = flat_paths(load(source, precision=make_precision(name), sharding=sharding).state)
        for path, leaf in leaves.items():
            array = leaf[...]
            wanted = sharding(path, array.shape) if callable(sharding) else sharding
            assert array.sharding.is_equivalent_to(wanted, array.ndim), path
            assert array.dtype == make_precision(name).param, path
            assert len(array.sharding.device_set) == count, path
        if name == "fp16":
            np.savez(out, **{path.replace("/", "."): np.asarray(leaf[...]) for path, leaf in leaves.items()})
"""


@pytest.mark.parametrize("count", daily([4], [1, 2, 4]))
def test_restores_on_other_device_counts(saved, tmp_path, count):
    path, checkpoint = saved
    out = tmp_path / "out.npz"
    env = keeping_programs() | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", DEVICES, str(count), str(path), str(out)], env=env, check=True)
    found = {key.replace(".", "/"): (array.dtype, array.shape, array.tobytes()) for key, array in np.load(out).items()}
    assert found == weights(checkpoint)


def test_saves_a_sharded_state(tmp_path):
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    checkpoint = make_random(sharding=NamedSharding(mesh, PartitionSpec("model")))
    orbax.save(checkpoint, tmp_path / "dest")
    assert weights(load(str(tmp_path / "dest"), precision=FP16)) == weights(checkpoint)


def test_a_crash_leaves_nothing_under_the_name(saved, tmp_path, monkeypatch):
    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        orbax.save(saved[1], tmp_path / "dest")
    assert list(tmp_path.iterdir()) == []


def test_foreign_checkpoints(tmp_path):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "foreign" / "params", {"a": np.zeros(3)})
    fails(tmp_path / "foreign", "not one of jaxkv's", FP16)


def test_convert_command(tmp_path):
    done = run_module("convert", "random:3", tmp_path / "dest", "--model=test-gemma2", "--dtype=bf16")
    assert done.returncode == 0, done.stderr
    bf16 = make_precision("bf16")
    expected = make_random("test-gemma2", bf16, seed=3)
    assert weights(load(str(tmp_path / "dest"), precision=bf16)) == weights(expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere", "taken"], "exists and is not empty"),  # before anything is read
        (["random:0"], "need exactly a source and a destination"),
        (["random:0", "dest", "--dtyp=fp16"], "Unknown command line flag 'dtyp'"),
        (["/nowhere", "dest"], "/nowhere does not exist"),
        (["random:0", "dest"], "random:0 needs to know the architecture"),
        (["random:0", "dest", "--model=gemma2-2"], "did you mean 'gemma2-2b'"),
        (["random:0", "dest", "--dtype=fp8"], "unknown precision 'fp8'"),
    ],
)
def test_convert_faults_are_one_line(tmp_path, arguments, words):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("kept")
    with refused(words):
        start_in_process(convert, *[tmp_path / a if a in ("taken", "dest") else a for a in arguments])
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "file"]


def test_a_fault_ends_the_command(tmp_path):
    done = run_module("convert", "/nowhere", tmp_path / "dest")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("error: /nowhere does not exist")
    assert done.stderr.strip().count("\n") == 0, done.stderr


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}go{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_tokenizer_honours_the_original(adds_bos):
    hf = make_tokenizer(adds_bos=adds_bos, template=TEMPLATE)
    tokenizer = Tokenizer(hf, eos_ids=[6, 2])
    assert tokenizer.add_bos == adds_bos
    assert tokenizer.encode("hello world") == hf("hello world")["input_ids"] == [1] * adds_bos + [3, 4]
    assert tokenizer.encode("<s> hello").count(1) == 1
    assert tokenizer.decode([1, 3, 4, 2]) == hf.decode([3, 4])
    assert tokenizer.eos_ids == (2, 6)
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (1, 7)
    assert tokenizer.chat(HELLO) == tokenizer.chat([{"role": "user", "content": "<s> hello"}]) == [1, 3, 5]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_tokenizer_is_saved_whole(tmp_path, adds_bos):
    tokenizer = Tokenizer(make_tokenizer(adds_bos=not adds_bos, template=TEMPLATE), add_bos=adds_bos, eos_ids=[6])
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.to_json() == tokenizer.to_json()
    assert again.encode("hello world") == tokenizer.encode("hello world") == [1] * adds_bos + [3, 4]
    assert again.chat(HELLO) == tokenizer.chat(HELLO)


def test_templates_that_give_nothing():
    for tokenizer in (Tokenizer(make_tokenizer()), ByteTokenizer()):
        assert not tokenizer.has_chat_template
        with refused("no chat template"):
            tokenizer.chat(HELLO)
    with refused("no system role"):
        Tokenizer(make_tokenizer(template="{{ raise_exception('no system role') }}")).chat(HELLO)


def test_bytes(tmp_path):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("h\u00e9\n")
    assert ids == [257, 104, 0xC3, 0xA9, 10]
    assert tokenizer.decode([*ids, *tokenizer.eos_ids, tokenizer.pad_id]) == "h\u00e9\n"
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).to_json() == tokenizer.to_json()
    with refused(r"nowhere/jaxkv_tokenizer.json cannot be read .*; convert"):
        load_tokenizer(tmp_path / "nowhere")


def test_generation_config_is_kept_and_stop_ids_gathered(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=7, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, eos_token_id=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    make_tokenizer(template=TEMPLATE).save_pretrained(tmp_path / "hf")
    values = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [2, 6]}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(values))
    start_in_process(convert, tmp_path / "hf", tmp_path / "dest")
    for source in ("hf", "dest"):
        checkpoint = load(str(tmp_path / source), precision=FP16)
        assert checkpoint.generation == values
        assert checkpoint.tokenizer.eos_ids == (2, 6)
        assert checkpoint.tokenizer.encode("hello") == [1, 3]
        assert checkpoint.tokenizer.has_chat_template
        assert checkpoint.provenance.dtypes == {"fp32": 12}
        files = checkpoint.provenance.files
        assert set(files) >= ({"model.safetensors"} if source == "hf" else {"params", "tokenizer"})
    assert "model.safetensors" in checkpoint.provenance.converted_from["files"]
