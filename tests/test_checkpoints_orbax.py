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
from checkpoint_files import FP16, make_tokenizer
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxkv.checkpoints import ByteTokenizer, Tokenizer, load, orbax
from jaxkv.checkpoints.fill import flat_paths
from jaxkv.checkpoints.hf_tokenizer import load_tokenizer
from jaxkv.config import make_precision
from jaxkv.errors import UserError
from jaxkv.models.families import get_preset


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    checkpoint = load("random:1", precision=FP16, config=get_preset("test-gemma3"))
    path = tmp_path_factory.mktemp("orbax") / "dest"
    orbax.save(checkpoint, path)
    return path, checkpoint


def arrays(checkpoint):
    return {path: np.asarray(leaf[...]) for path, leaf in flat_paths(checkpoint.state).items()}


def assert_same_bits(a, b):
    assert set(a) == set(b)
    for path in a:
        assert a[path].dtype == b[path].dtype
        np.testing.assert_array_equal(a[path].view(np.uint8), b[path].view(np.uint8), err_msg=path)


ROUND_TRIPS = [("test-mistral", name) for name in ("fp16", "bf16", "fp32")]
ROUND_TRIPS += [(f"test-{family}", "bf16") for family in ("llama3", "qwen2", "qwen3")]


@pytest.mark.parametrize(("model", "name"), daily([("test-mistral", "fp32"), ("test-qwen2", "bf16")], ROUND_TRIPS))
def test_round_trip_is_bit_exact(tmp_path, model, name):
    precision = make_precision(name)
    checkpoint = load("random:1", precision=precision, config=get_preset(model))
    orbax.save(checkpoint, tmp_path / "dest")
    again = load(str(tmp_path / "dest"), precision=precision, config=get_preset(model))
    assert_same_bits(arrays(again), arrays(checkpoint))
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
    again = arrays(load(str(path), precision=wanted))
    assert_same_bits(again, {key: value.astype(wanted.param) for key, value in arrays(checkpoint).items()})


def test_restore_that_overflows_names_the_tensor(tmp_path):
    checkpoint = load("random:1", precision=make_precision("fp32"), config=get_preset("test-llama2"))
    checkpoint.state["layers"][1]["mlp"]["up"][...] = checkpoint.state["layers"][1]["mlp"]["up"][...] * 1e6
    orbax.save(checkpoint, tmp_path / "dest")
    with pytest.raises(UserError, match=r"layers/1/mlp/up: the weight .* float16"):
        load(str(tmp_path / "dest"), precision=FP16)


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
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", DEVICES, str(count), str(path), str(out)], env=env, check=True)
    assert_same_bits({key.replace(".", "/"): value for key, value in np.load(out).items()}, arrays(checkpoint))


def test_saves_a_sharded_state(tmp_path):
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    checkpoint = load("random:1", precision=FP16, config=get_preset("test-llama2"), sharding=sharding)
    orbax.save(checkpoint, tmp_path / "dest")
    assert_same_bits(arrays(load(str(tmp_path / "dest"), precision=FP16)), arrays(checkpoint))


def test_destination_must_be_empty(saved, tmp_path):
    path, checkpoint = saved
    with pytest.raises(UserError, match="exists and is not empty"):
        orbax.save(checkpoint, path)
    empty = tmp_path / "empty"
    empty.mkdir()
    orbax.save(checkpoint, empty)
    assert orbax.is_checkpoint(empty)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="exists and is not empty"):
        orbax.save(checkpoint, tmp_path / "file")


def test_a_crash_leaves_nothing_under_the_name(saved, tmp_path, monkeypatch):
    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        orbax.save(saved[1], tmp_path / "dest")
    assert list(tmp_path.iterdir()) == []


def test_damaged_and_foreign_checkpoints(saved, tmp_path):
    import shutil

    import orbax.checkpoint as ocp

    broken = tmp_path / "broken"
    shutil.copytree(saved[0], broken)
    shutil.rmtree(next((broken / "params").glob("embed*")))
    with pytest.raises(UserError, match=r"not as it was written .2 missing: params/embed"):
        load(str(broken), precision=FP16)
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "foreign" / "params", {"a": np.zeros(3)})
    with pytest.raises(UserError, match="not one of jaxkv's"):
        load(str(tmp_path / "foreign"), precision=FP16)


def test_stored_config_of_another_version(saved, tmp_path):
    import shutil

    old = tmp_path / "old"
    shutil.copytree(saved[0], old)
    file = old / "params" / "_CHECKPOINT_METADATA"
    file.write_text(file.read_text().replace('"qk_norm"', '"query_norm"').replace('"format": 2', '"format": 1'))
    (old / "manifest.json").unlink()
    with pytest.raises(UserError, match="qk_norm, query_norm"):
        load(str(old), precision=FP16)


def run_convert(*arguments):
    command = [sys.executable, "-m", "jaxkv.checkpoints.convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_convert_command(tmp_path):
    done = run_convert("random:3", tmp_path / "dest", "--model=test-gemma2", "--dtype=bf16")
    assert done.returncode == 0, done.stderr
    bf16 = make_precision("bf16")
    expected = load("random:3", precision=bf16, config=get_preset("test-gemma2"))
    assert_same_bits(arrays(load(str(tmp_path / "dest"), precision=bf16)), arrays(expected))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere", "taken"], "exists and is not empty"),  # before anything is read
        (["random:0"], "error: need exactly a source and a destination"),
        (["random:0", "dest", "--dtyp=fp16"], "error: Unknown command line flag 'dtyp'"),
        pytest.param(["/nowhere", "dest"], "error: /nowhere does not exist", marks=pytest.mark.nightly),
        pytest.param(["random:0", "dest"], "error: random:0 needs to know the architecture", marks=pytest.mark.nightly),
        pytest.param(["random:0", "dest", "--model=gemma2-2"], "did you mean 'gemma2-2b'", marks=pytest.mark.nightly),
        pytest.param(["random:0", "dest", "--dtype=fp8"], "error: unknown precision 'fp8'", marks=pytest.mark.nightly),
    ],
)
def test_convert_faults_are_one_line(tmp_path, arguments, words):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("kept")
    done = run_convert(*[str(tmp_path / a) if a in ("taken", "dest") else a for a in arguments])
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "file"]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}go{% endif %}"
)


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
    assert tokenizer.chat([{"role": "user", "content": "hello"}]) == [1, 3, 5]
    assert tokenizer.chat([{"role": "user", "content": "<s> hello"}]) == [1, 3, 5]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_tokenizer_is_saved_whole(tmp_path, adds_bos):
    tokenizer = Tokenizer(make_tokenizer(adds_bos=not adds_bos, template=TEMPLATE), add_bos=adds_bos, eos_ids=[6])
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "hello world"}]
    assert again.to_json() == tokenizer.to_json()
    assert again.encode("hello world") == tokenizer.encode("hello world") == [1] * adds_bos + [3, 4]
    assert again.chat(messages) == tokenizer.chat(messages)


def test_no_chat_template():
    for tokenizer in (Tokenizer(make_tokenizer(adds_bos=True)), ByteTokenizer()):
        assert not tokenizer.has_chat_template
        with pytest.raises(UserError, match="no chat template"):
            tokenizer.chat([{"role": "user", "content": "hello"}])


def test_template_that_refuses():
    tokenizer = Tokenizer(make_tokenizer(adds_bos=True, template="{{ raise_exception('no system role') }}"))
    with pytest.raises(UserError, match="no system role"):
        tokenizer.chat([{"role": "system", "content": "hello"}])


def test_bytes(tmp_path):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("h\u00e9\n")
    assert ids == [257, 104, 0xC3, 0xA9, 10]
    assert tokenizer.decode([*ids, *tokenizer.eos_ids, tokenizer.pad_id]) == "h\u00e9\n"
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).to_json() == tokenizer.to_json()
    with pytest.raises(UserError, match=r"nowhere/jaxkv_tokenizer.json cannot be read .*; convert"):
        load_tokenizer(tmp_path / "nowhere")


def test_generation_config_is_kept_and_stop_ids_gathered(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=7, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, eos_token_id=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    make_tokenizer(adds_bos=True, template=TEMPLATE).save_pretrained(tmp_path / "hf")
    values = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [2, 6]}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(values))
    done = run_convert(tmp_path / "hf", tmp_path / "dest")
    assert done.returncode == 0, done.stderr
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
