"""Safetensors directories: every family round-trips, every fault is one line."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoint_files import FP32, assert_same_bits, fails, make_random, new_model, refused, weights

from jaxkv.checkpoints import load
from jaxkv.checkpoints.fill import RopeLayout, flat_paths
from jaxkv.config import make_precision
from jaxkv.models.families import get_preset, parse_config

SIZES = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8},
    "gemma3": {"sliding_window": 8},
    "qwen2": {"hidden_size": 64},  # it has no head_dim
    "qwen3": {"tie_word_embeddings": True},
}


def make_model(kind, dtype=torch.float32, **changes):
    """A tiny transformers model with weights of random size, norms included."""
    torch.manual_seed(0)
    model = new_model(kind.removesuffix("-tied"), **(SIZES | MODELS[kind] | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of each kind, one file and sharded, with the model that wrote them."""
    made = {}
    for kind in MODELS:
        model = make_model(kind)
        for size in ("1GB", "20KB"):
            path = tmp_path_factory.mktemp(f"{kind}-{size}")
            model.save_pretrained(path, max_shard_size=size)
            made[kind, size] = (path, model)
    return made


@pytest.mark.parametrize("size", ["1GB", "20KB"])
@pytest.mark.parametrize("kind", MODELS)
def test_round_trip(saved, kind, size):
    path, model = saved[kind, size]
    shards = len(list(path.glob("*.safetensors")))
    assert shards == 1 if size == "1GB" else shards > 3
    checkpoint = load(str(path), precision=FP32)
    assert_same_bits(checkpoint, model.state_dict())
    assert checkpoint.config.family == kind.split("-")[0]
    assert checkpoint.config.tie_embeddings == model.config.tie_word_embeddings
    assert checkpoint.provenance.dtypes == {"fp32": sum(checkpoint.provenance.dtypes.values())}
    files = checkpoint.provenance.files
    assert {"config.json", *(p.name for p in path.glob("*.safetensors"))} <= set(files)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in files.values())


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_rounds_once_as_torch_does(tmp_path, name, stored):
    model = make_model("gemma3", stored)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] *= 1e-5  # fp16 subnormals
    model.save_pretrained(tmp_path)
    checkpoint = load(str(tmp_path), precision=make_precision(name))
    target = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name]
    assert_same_bits(checkpoint, {key: value.to(target) for key, value in model.state_dict().items()})


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
def test_config_of_either_transformers(saved, kind):
    """transformers 4 kept rope_theta beside the sizes, 5 keeps it in rope_parameters."""
    raw = json.loads((saved[kind, "1GB"][0] / "config.json").read_text())
    new = parse_config(raw, "x")
    old = {k: v for k, v in raw.items() if k not in ("rope_parameters", "layer_types")} | {"rope_theta": new.rope_theta}
    if kind == "gemma3":
        old |= {"rope_local_base_freq": new.local_rope_theta, "sliding_window_pattern": 6}
    assert parse_config(old, "x") == new
    changed = parse_config(old | {"rope_theta": 77.0}, "x")
    assert changed.rope_theta == 77.0


FULL, WINDOWED = "full_attention", "sliding_attention"


def test_layer_types():
    raw = {"model_type": "gemma3_text", "num_hidden_layers": 4}
    assert parse_config(raw | {"layer_types": [FULL, WINDOWED] * 2}, "x").window_pattern == (False, True)
    assert parse_config(raw | {"layer_types": [WINDOWED] * 4}, "x").window_pattern == (True,) * 5 + (False,)
    odd = parse_config(raw | {"layer_types": [WINDOWED, FULL, FULL, WINDOWED]}, "x")
    assert [odd.layer_window(i) is not None for i in range(4)] == [True, False, False, True]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
NOT_IMPLEMENTED = [
    ("qwen2_moe", {}, "model_type 'qwen2_moe'"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3", {"num_hidden_layers": 1, "layer_types": [WINDOWED]}, f"layer_types='{WINDOWED}'"),
    (None, {}, "model_type 'None'"),
    ("gemma3", {"text_config": {}}, "multimodal"),
    ("llama", {"rope_scaling": LLAMA3}, "rope_scaling needs factor, low_freq_factor and a greater high_freq_factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type='linear'"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type='yarn'"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.rope_type='linear'"),
    ("gemma3_text", {"rope_parameters": {FULL: {"rope_type": "linear"}}}, "rope_parameters.rope_type='linear'"),
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("gemma2", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
    ("gemma2", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("mistral", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    ("mistral", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("llama", {"sliding_window": 4096}, "sliding_window=4096"),
    ("gemma2", {"sliding_window": None}, "sliding_window is null"),
    ("gemma2", {"num_hidden_layers": 2, "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    ("gemma2", {"num_hidden_layers": 2, "layer_types": [FULL]}, "1 entries for 2 layers"),
    ("mistral", {"num_hidden_layers": 2, "layer_types": [FULL, WINDOWED]}, "layer_types"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
]


@pytest.mark.parametrize(("model_type", "raw", "words"), NOT_IMPLEMENTED)
def test_unimplemented_options_are_refused_by_name(model_type, raw, words):
    with refused(re.escape(words)):
        parse_config(raw | ({"model_type": model_type} if model_type else {}), "model-x")


def test_gemma_names_of_tanh_gelu():
    for value in ("gelu", "gelu_pytorch_tanh"):
        assert parse_config({"model_type": "gemma2", "hidden_act": value}, "x").activation == "gelu_tanh"


def rewrite(path, edit):
    """Loads the tensors of a directory, lets `edit` change them, and writes them back."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


def edit_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_all_misses_are_one_error(llama):
    def edit(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(32, 32)

    rewrite(llama, edit)
    message = fails(llama, "2 missing")
    for part in ("model.norm.weight", "layers.2.mlp.up_proj", "1 unknown: model.layers.0.self_attn.q_proj.bias"):
        assert part in message
    assert "layers.1.self_attn.o_proj.weight (is [32, 32], should be [32, 64])" in message


def test_harmless_buffers_long_lists_and_another_number_of_layers(llama):
    rewrite(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(str(llama), precision=FP32)
    rewrite(llama, lambda t: [t.pop(name) for name in list(t) if "mlp" in name or "self_attn" in name])
    assert len(fails(llama, r"missing: .* and \d+ more")) < 400
    edit_config(llama, num_hidden_layers=4000)
    fails(llama, "config.json says 4000 layers and the weights have")  # before a decoder is made


def test_tied_and_untied(tmp_path):
    model = make_model("llama-tied")
    model.save_pretrained(tmp_path)
    head = model.model.embed_tokens.weight.detach().clone()
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": head}))
    assert "head" not in flat_paths(load(str(tmp_path), precision=FP32).state)
    rewrite(tmp_path, lambda t: t["lm_head.weight"].__setitem__((0, 0), 5.0))
    fails(tmp_path, "tied embeddings but lm_head.weight differs")
    rewrite(tmp_path, lambda t: t.pop("lm_head.weight"))
    edit_config(tmp_path, tie_word_embeddings=False)
    fails(tmp_path, "untied embeddings but lm_head.weight is missing")


def test_integer_tensors(llama):
    rewrite(llama, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}))
    fails(llama, "dtype I8")


def test_overflow_names_the_tensor(llama):
    rewrite(llama, lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 4), 65520.0))
    fails(llama, r"model.layers.1.mlp.up_proj.weight: the weight 65520 .*float16", precision=make_precision("fp16"))
    rewrite(llama, lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 4), 65519.0))
    state = flat_paths(load(str(llama), precision=make_precision("fp16")).state)
    assert float(state["layers/1/mlp/up"][...].max()) == 65504.0
    assert state["layers/1/mlp/up"][...].dtype == jnp.float16


def test_directories_that_hold_no_weights(tmp_path, llama):
    fails(tmp_path / "nowhere", "does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    fails(empty, "has no weights")
    (empty / "config.json").write_text((llama / "config.json").read_text())
    (empty / "pytorch_model.bin").write_bytes(b"")
    fails(empty, "no safetensors weights, only pytorch_model.bin; convert")
    file = tmp_path / "weights.txt"
    file.write_text("")
    fails(file, "is a file but no .gguf")
    (llama / "config.json").write_text("{")
    fails(llama, "config.json: is not JSON .*download it again")
    (llama / "config.json").unlink()
    fails(llama, "no config.json")
    fails(llama, "revision belongs to a hub id", revision="main")


def test_missing_tokenizer_and_preset_mismatch(tmp_path):
    make_model("llama", vocab_size=300).save_pretrained(tmp_path)
    fails(tmp_path, "has no tokenizer")
    message = fails(tmp_path, "is not a test-llama2", config=get_preset("test-llama2"))
    assert "model_dim 32 (model test-llama2: 48)" in message
    assert "rope_theta" not in message


def test_random_weights():
    first, again, other = (make_random(seed=seed) for seed in (3, 3, 4))
    assert first.provenance.note == "random weights"
    assert weights(first) == weights(again)
    assert weights(first)["embed"] != weights(other)["embed"]
    fails("random:0", "name a model")
    fails("random:x", "whole number", config=first.config)


def test_sharding_by_path(saved):
    import jax

    asked = []

    def rule(path, shape):
        asked.append((path, shape))
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    checkpoint = load(str(saved["llama", "1GB"][0]), precision=FP32, sharding=rule)
    assert dict(asked)["layers/0/attn/q"] == (4, 16, 32)
    assert set(dict(asked)) == set(flat_paths(checkpoint.state))


def test_rope_layout_says_nothing_on_random_weights():
    rng = np.random.default_rng(0)
    layout = RopeLayout(64)
    for _ in range(32):
        layout.see(rng.normal(size=(256, 48)).astype(np.float32))
    layout.check("x")
