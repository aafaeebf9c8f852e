"""GGUF files: our tensors are those of transformers to the bit, on tiny written files and on real ones if named."""

import dataclasses
import math
import sys

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoint_files import FP32, assert_same_bits, fails, finish_gguf, named_file, new_model
from gguf import GGMLQuantizationType as QuantType

from jaxkv.checkpoints import load
from jaxkv.checkpoints.fill import flat_paths
from jaxkv.config import RopeScaling
from jaxkv.models.families import get_preset

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
TOKENS += ["\u2581a", "he", "ll", "llo", "hello", "\u2581hello"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} b{% endif %}"
)
ARCHES = ("llama", "gemma2", "gemma3", "qwen2", "qwen3")
GEMMA = ("gemma2", "gemma3")
HEAD_DIMS = {"gemma2": 32, "gemma3": 32, "qwen3": 128}  # transformers reads no other from a GGUF of Qwen3


def write_gguf(
    path, arch="llama", quant=QuantType.F32, *,
    permute=1, trained=False, change=None, skip=(), extra=(), split=0, **settings,
):  # fmt: skip
    """A tiny model as llama.cpp's converter would write it; returns the state dict of the same model in transformers.

    `quant` is of the matrices. q and k rows are permuted `permute` times (once is right for llama), and have the norms
    that training leaves if `trained`. `change` edits the writer before tensors are added, names in `skip` are left out,
    `extra` are added, `split` is tensors a part, and `settings` go to the transformers config.
    """
    sizes = {
        "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIMS.get(arch, 16),
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    torch.manual_seed(0)
    model = new_model(arch, **(sizes | settings))
    config, state = model.config, {name: torch.randn_like(value) * 0.3 for name, value in model.state_dict().items()}
    for name in state:
        if trained and name.endswith(("q_proj.weight", "k_proj.weight")):  # rows of a frequency share their norm
            scale = torch.linspace(2.0, 0.5, config.head_dim // 2).repeat(state[name].shape[0] * 2 // config.head_dim)
            state[name] = state[name] * scale[:, None]
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]

    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6 if arch == "gemma3" else 10000.0)
    if arch in (*GEMMA, "qwen3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch in GEMMA:
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(TOKENS) - 259)])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(TOKENS) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if change is not None:
        change(writer)

    arches = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(arches[arch], config.num_hidden_layers)
    for name, value in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        short = "output.weight" if name == "lm_head.weight" else names.get_name(name, try_suffixes=(".weight", ".bias"))
        if short in skip:
            continue
        array = value.float().numpy().copy()
        if arch == "llama" and short.endswith(("attn_q.weight", "attn_k.weight")):
            for _ in range(permute):
                array = array.reshape(-1, 2, config.head_dim // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if arch in GEMMA and short.endswith("norm.weight"):
            array = array + np.float32(1)
        kind = quant if array.ndim == 2 else QuantType.F32
        writer.add_tensor(short, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    for name, array in extra:
        writer.add_tensor(name, array)
    finish_gguf(writer)
    return state


def read_by_transformers(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.state_dict(), model.config


@pytest.mark.parametrize("quant", [QuantType.F32, QuantType.F16, QuantType.BF16, QuantType.Q8_0, QuantType.Q4_1])
@pytest.mark.parametrize("arch", ARCHES)
def test_same_bits_as_transformers(tmp_path, arch, quant):
    path = tmp_path / "tiny.gguf"
    state = write_gguf(path, arch, quant)
    checkpoint = load(str(path), precision=FP32)
    if quant == QuantType.F32 and arch not in GEMMA:
        assert_same_bits(checkpoint, state)
    theirs, config = read_by_transformers(path)
    assert_same_bits(checkpoint, theirs)
    assert checkpoint.config.rope_theta == (1e6 if arch == "gemma3" else 10000.0)
    assert checkpoint.config.norm_eps == 1e-5
    assert checkpoint.config.head_dim == HEAD_DIMS.get(arch, 16)
    assert checkpoint.config.tie_embeddings == (arch in GEMMA)
    assert checkpoint.config.family == arch
    assert checkpoint.provenance.dtypes[quant.name] > 1
    if arch in GEMMA:
        assert checkpoint.config.window == config.sliding_window
        assert checkpoint.config.attn_softcap == config.attn_logit_softcapping


@pytest.mark.parametrize("quant", ["Q4_0", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0"])
def test_other_block_types(tmp_path, quant):
    """Every type that gguf can write and dequantize is read; values equal gguf's own."""
    kind = QuantType[quant]
    size = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256} if quant.startswith("TQ") else {}
    state = write_gguf(tmp_path / "tiny.gguf", "llama", kind, **size)
    checkpoint = load(str(tmp_path / "tiny.gguf"), precision=FP32)
    source = state["model.layers.1.mlp.up_proj.weight"].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(source, kind), kind)
    np.testing.assert_array_equal(np.asarray(flat_paths(checkpoint.state)["layers/1/mlp/up"][...]), expected)


def test_tied_llama_and_mistral(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tie_word_embeddings=True)
    assert load(str(path), precision=FP32).config.tie_embeddings
    write_gguf(path, change=lambda w: w.add_name("Mistral 7B"))
    assert load(str(path), precision=FP32).config.family == "mistral"


def factors_of(head_dim, theta, factor, low=1.0, high=4.0, length=8192):
    """rope_freqs.weight as llama.cpp's converter computes it (convert_hf_to_gguf.py, LlamaModel)."""
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            factors.append(1)
        elif wavelength > length / low:
            factors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_told_from_its_factors(tmp_path, factor):
    """The file holds factors of frequencies, not the numbers that they come from."""
    path = tmp_path / "tiny.gguf"

    def change(writer):
        writer.kv_data[0]["llama.rope.freq_base"].value = 5e5

    factors = factors_of(16, 5e5, factor)
    assert ((factors > 1.01) & (factors < factor - 0.01)).any()
    state = write_gguf(path, change=change, extra=[("rope_freqs.weight", factors)])
    checkpoint = load(str(path), precision=FP32)
    assert checkpoint.config.rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)
    assert_same_bits(checkpoint, state)
    write_gguf(path, change=change, extra=[("rope_freqs.weight", np.ones(8, "f"))])
    assert load(str(path), precision=FP32).config.rope_scaling is None


def test_other_rope_factors(tmp_path):
    path = tmp_path / "tiny.gguf"
    preset = dataclasses.replace(
        get_preset("test-llama3"), model_dim=64, vocab_size=len(TOKENS), context_length=128, rope_theta=1e4,
        tie_embeddings=False,
    )  # fmt: skip
    known = factors_of(16, 1e4, 8.0, length=64)
    write_gguf(path, extra=[("rope_freqs.weight", known)])
    fails(path, "rope_freqs.weight holds a RoPE scaling other than Llama 3's")
    assert load(str(path), precision=FP32, config=preset).config.rope_scaling == preset.rope_scaling
    for factors in (known[:-1], known * np.float32(1.01), np.full(8, np.nan, "f"), np.zeros(8, "f")):
        write_gguf(path, extra=[("rope_freqs.weight", factors)])
        fails(path, "rope_freqs.weight holds a RoPE scaling other than Llama 3's", config=preset)


def test_a_head_of_its_own_beside_a_tied_preset(tmp_path):
    """As in Qwen2.5's files: what the file holds counts, and the config of the run says so."""
    path = tmp_path / "tiny.gguf"
    state = write_gguf(path, "qwen2", num_attention_heads=4, hidden_size=64)
    preset = dataclasses.replace(
        get_preset("test-qwen2"), model_dim=64, head_dim=16, query_scale=0.25, vocab_size=len(TOKENS),
        context_length=128, norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip
    assert preset.tie_embeddings
    checkpoint = load(str(path), precision=FP32, config=preset)
    assert checkpoint.config == dataclasses.replace(preset, tie_embeddings=False)
    assert_same_bits(checkpoint, state)
    write_gguf(path, "qwen2", tie_word_embeddings=True)
    assert load(str(path), precision=FP32, config=preset).config == preset
    fails(path, "is not a test-qwen2: tie_embeddings True", config=dataclasses.replace(preset, tie_embeddings=False))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.embedding_length", "64", "field embedding_length: expected `int`, got `str`"),
        ("llama.block_count", 0, "field block_count: expected `int` >= 1"),
        ("llama.block_count", 1 << 31, "block_count: expected `int`"),
        ("llama.block_count", 5, "block_count is 5, and the file has 3 layers"),
        ("llama.attention.head_count", 0, "field attention.head_count: expected `int` >= 1"),
        ("llama.attention.head_count", 1 << 20, "head_dim: expected `int` >= 1"),
        ("llama.attention.head_count_kv", "2", "field attention.head_count_kv: expected"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "field attention.layer_norm_rms_epsilon"),
        ("llama.rope.freq_base", -1.0, "field rope.freq_base"),
        ("llama.context_length", None, "missing required field `context_length`"),
        ("llama.attention.sliding_window", 8, "sliding_window=8"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.type='yarn' is not implemented"),
        ("llama.rope.scaling.factor", 4.0, "llama.rope.scaling.factor=4.0 is not implemented"),
        ("llama.expert_count", 8, "llama.expert_count=8"),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count=8"),
    ],
)
def test_metadata_of_another_type(tmp_path, key, value, words):
    def change(writer):
        writer.kv_data[0].pop(key, None)
        kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
        if value is not None:
            writer.add_key_value(key, value, kinds[type(value)])

    write_gguf(tmp_path / "tiny.gguf", change=change)
    fails(tmp_path / "tiny.gguf", words)


def test_gemma_window_pattern_and_bases(tmp_path):
    def change(writer):
        writer.add_sliding_window_pattern([False, True, False])
        writer.add_rope_freq_base_swa(5000.0)

    write_gguf(tmp_path / "tiny.gguf", "gemma3", change=change)
    config = load(str(tmp_path / "tiny.gguf"), precision=FP32).config
    assert [config.layer_window(i) is not None for i in range(3)] == [False, True, False]
    assert [config.layer_rope(i)[0] for i in range(3)] == [1e6, 5000.0, 1e6]


@pytest.mark.parametrize("permute", [0, 1, 2])
def test_permuted_once_or_else_told(tmp_path, permute, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, permute=permute, trained=True, num_hidden_layers=12)
    if permute == 1:
        load(str(path), precision=FP32)
    else:
        fails(path, "permuted once too often" if permute == 0 else "RoPE pairs where halves are expected")
        monkeypatch.setenv("JAXKV_TRUST_ROPE_LAYOUT", "1")
        load(str(path), precision=FP32)


def test_faults(tmp_path):
    path = tmp_path / "tiny.gguf"
    bias = ("blk.0.attn_q.bias", np.zeros(64, "f"))
    write_gguf(path, skip=("blk.1.ffn_up.weight", "output_norm.weight"), extra=[bias])
    fails(path, "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; 1 unknown: blk.0.attn_q.bias")
    write_gguf(path, extra=[("rope_factors_long.weight", np.ones(8, "f"))])
    fails(path, "rope_factors_long.weight .*not implemented")
    write_gguf(path)
    fails(path, "is not a test-llama2: .*model_dim 64", config=get_preset("test-llama2"))


def test_truncated_and_foreign_files(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    for keep in (len(whole) - 1000, 5000, 100, 10, 0):
        path.write_bytes(whole[:keep])
        fails(path, "truncated or no GGUF file")
    path.write_bytes(b"something else entirely, long enough to hold a header" * 10)
    fails(path, "truncated or no GGUF file")
    writer = gguf.GGUFWriter(path, "qwen2moe")
    writer.add_block_count(1)
    finish_gguf(writer)
    fails(path, "architecture 'qwen2moe' is not implemented; known: llama, gemma2, gemma3, qwen2, qwen3$")


def test_without_the_gguf_package(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    fails(tmp_path / "tiny.gguf", r"pip install 'jaxkv\[gguf\]'")


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_bos_rule_of_the_file(tmp_path, add_bos):
    def change(writer):
        writer.add_chat_template(TEMPLATE)
        writer.add_eot_token_id(261)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    path = tmp_path / "tiny.gguf"
    write_gguf(path, change=change)
    checkpoint = load(str(path), precision=FP32)
    tokenizer = checkpoint.tokenizer
    expected = add_bos is not False  # llama.cpp adds BOS to such a vocabulary where the file is silent
    assert tokenizer.add_bos == checkpoint.provenance.add_bos == expected
    assert tokenizer.encode("hello").count(1) == int(expected)
    assert tokenizer.encode("<s>hello").count(1) == 1
    assert tokenizer.decode(tokenizer.encode("hello hello")).strip() == "hello hello"
    assert tokenizer.eos_ids == (2, 261)
    assert tokenizer.chat([{"role": "user", "content": "hello"}]).count(1) == 1
    assert tokenizer.chat([{"role": "user", "content": "<s>hello"}])[:2] != [1, 1]


@pytest.mark.weights
@pytest.mark.parametrize(
    ("variable", "preset", "add_bos"),
    [
        ("JAXKV_SMOLLM2_GGUF", "smollm2-135m", False),
        ("JAXKV_GEMMA3_GGUF", "gemma3-270m", True),
        ("JAXKV_QWEN_GGUF", "qwen2.5-coder-0.5b", False),
    ],
)
def test_real_file(variable, preset, add_bos):
    path = named_file(variable)
    checkpoint = load(str(path), precision=FP32, config=get_preset(preset))  # its RoPE layout is checked on the way
    theirs, config = read_by_transformers(path)
    assert_same_bits(checkpoint, theirs)
    # Qwen's releases tie the head; llama.cpp's files hold one of its own, in another block type.
    tied = config.tie_word_embeddings
    assert tied == ("qwen" not in preset and get_preset(preset).tie_embeddings)
    assert checkpoint.config == dataclasses.replace(get_preset(preset), tie_embeddings=tied)
    tokenizer = checkpoint.tokenizer
    assert tokenizer.add_bos == add_bos
    ids = tokenizer.encode("The sky is blue.")
    assert (ids[0] == tokenizer.bos_id) == add_bos
    assert tokenizer.decode(ids) == "The sky is blue."
