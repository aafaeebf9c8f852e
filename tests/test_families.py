"""Families as data: presets, stored configs, what config.json may hold, and what a family costs."""

import hashlib
import json
import math
import re

import pytest
import transformers

from jaxkv.config import ModelConfig
from jaxkv.errors import UserError
from jaxkv.models.families import FAMILIES, HUB_IDS, PRESETS, get_preset, parse_config, public_presets

# sha256 of each preset's JSON as it was stored before configs had fields with defaults.
STORED = {
    "llama2-7b": "74ba6816171be104", "llama2-13b": "52b7dd61059ae894", "llama2-70b": "f774f265be9e404f",
    "smollm2-135m": "487e49fccf863105", "smollm2-360m": "db27ac65ba35ae09", "smollm2-1.7b": "46937c964f02aee7",
    "tiny-llama2": "cf20ec0eb9d04201", "test-llama2": "40bb5e3f8a2cfabe", "test-llama2-gqa": "f6e942e95098b4e6",
    "mistral-7b-v0.1": "5bdb8a9d93214556", "mistral-7b-v0.2": "86b06fd57dcf16cd", "mistral-7b-v0.3": "680381d603ae3b56",
    "tiny-mistral": "e4184c7c434ec162", "test-mistral": "2f6a111e857bb986", "gemma2-2b": "39a69273c3b64ec4",
    "gemma2-9b": "4709157e8aab7abd", "gemma2-27b": "b01936e3d365c1bb", "tiny-gemma2": "7b582e473f7da1ff",
    "test-gemma2": "263247c387808a0d", "gemma3-270m": "6240eb45e8cddbdc", "gemma3-1b": "bccad75e53585a3a",
    "test-gemma3": "88e4489790e01354",
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_stored_configs_stay_what_they_were(name):
    """A new field at its default is in no stored checkpoint and in no record."""
    stored = json.dumps(get_preset(name).to_json(), sort_keys=True)
    assert hashlib.sha256(stored.encode()).hexdigest().startswith(STORED[name])


@pytest.mark.parametrize("name", PRESETS)
def test_a_stored_config_comes_back(name):
    preset = get_preset(name)
    again = ModelConfig.from_json(json.loads(json.dumps(preset.to_json())))
    assert again == preset
    assert hash(again) == hash(preset)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": "4"}, "field num_layers: expected `int`, got `str`"),
        ({"window_pattern": None}, "field window_pattern"),
        ({"rope_scaling": {"factor": 8.0}}, "field rope_scaling"),
        ({"rope_scaling": 8.0}, "field rope_scaling"),
        ({"qkv_bias": 1}, "field qkv_bias: expected `bool`, got `int`"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"another": 1}, r"fields another\)"),
    ],
)
def test_a_stored_config_of_another_type_is_refused(change, words):
    with pytest.raises(UserError, match=words):
        ModelConfig.from_json(get_preset("test-gemma2").to_json() | change)


NUMBERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
NULLABLE = ("num_key_value_heads", "head_dim", "rope_theta", "sliding_window")
ODD = (None, [], {}, "16", 0, -1, math.nan, math.inf, True, 10**30)
TYPES = {family.model_type: name for name, family in FAMILIES.items()}


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("field", NUMBERS + NULLABLE)
def test_a_number_that_is_none_is_named(model_type, field):
    for value in ODD:
        if value is None and field in NULLABLE:
            continue
        with pytest.raises(UserError) as caught:
            parse_config({"model_type": model_type, field: value}, "some/model")
        message = str(caught.value)
        assert re.match(rf"some/model: model config: field {field}: expected .*; fix the config", message), message


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"model_type": 3}, "model_type"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"model_type": "gemma2", "attn_logit_softcapping": "50"}, "attn_logit_softcapping"),
        ({"model_type": "gemma2", "final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": "1e4"}, "rope_local_base_freq"),
        ({"model_type": "llama", "rope_parameters": [1]}, "rope_parameters"),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta"),
        ({"model_type": "llama", "rope_scaling": "linear"}, "rope_scaling"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": "8"}}, "rope_scaling.factor"),
        ({"model_type": "llama", "layer_types": [3]}, r"layer_types\[0\]"),
        ({"model_type": "llama", "tie_word_embeddings": None}, "tie_word_embeddings"),
        ({"model_type": "llama", "hidden_act": ["silu"]}, "hidden_act"),
        ({"model_type": "llama", "eos_token_id": {}}, "eos_token_id"),
        ({"model_type": "llama", "attention_bias": "no"}, "attention_bias"),
        ({"model_type": "llama", "pretraining_tp": "1"}, "pretraining_tp"),
        ({"model_type": "llama", "partial_rotary_factor": [0.5]}, "partial_rotary_factor"),
        ({"model_type": "llama", "quantization_config": 4}, "quantization_config"),
        ({"model_type": "qwen2", "use_sliding_window": "yes"}, "use_sliding_window"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim"),
    ],
)
def test_a_field_of_another_type_is_named(raw, field):
    with pytest.raises(UserError, match=rf"x: model config: field {field}: expected .*; fix the config"):
        parse_config(raw, "x")


def test_what_transformers_writes_as_null_means_the_default():
    nulls = (
        "num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "rope_theta", "layer_types",
        "quantization_config", "pretraining_tp", "partial_rotary_factor", "sliding_window", "eos_token_id",
        "attn_logit_softcapping", "use_bidirectional_attention",
    )  # fmt: skip
    plain = parse_config({"model_type": "llama"}, "x")
    assert parse_config({"model_type": "llama"} | dict.fromkeys(nulls), "x") == plain
    assert (plain.num_kv_heads, plain.head_dim, plain.rope_theta) == (32, 128, 10000.0)
    assert parse_config({"model_type": "llama", "eos_token_id": [1, 2], "rope_theta": 10000}, "x") == plain


@pytest.mark.parametrize("name", FAMILIES)
def test_an_empty_config_is_that_of_transformers(name):
    family = FAMILIES[name]
    theirs = transformers.AutoConfig.for_model(family.model_type)
    ours = parse_config({"model_type": family.model_type}, "x")
    assert parse_config(theirs.to_dict(), "x") == ours
    assert ours.family == name


def test_scaled_rope_in_either_form():
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = numbers | {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    sizes = {"model_type": "llama", "max_position_embeddings": 131072}
    old = parse_config(sizes | {"rope_theta": 5e5, "rope_scaling": scaling}, "x")
    assert parse_config(sizes | {"rope_parameters": scaling | {"rope_theta": 5e5}}, "x") == old
    assert old.rope_scaling == get_preset("llama3.1-8b").rope_scaling
    theirs = transformers.LlamaConfig(rope_theta=5e5, rope_scaling=dict(scaling), max_position_embeddings=131072)
    assert parse_config(theirs.to_dict(), "x") == old
    silent = {key: value for key, value in scaling.items() if not key.startswith("original")}
    assert parse_config(sizes | {"rope_scaling": silent}, "x").rope_scaling.original_context == 131072
    with pytest.raises(UserError, match=r"greater high_freq_factor .* 8\.0, 1\.0 and 1\.0"):
        parse_config(sizes | {"rope_scaling": scaling | {"high_freq_factor": 1.0}}, "x")


def test_hub_ids():
    assert {name for name in PRESETS if not name.startswith(("test-", "tiny-"))} == set(HUB_IDS)
    assert HUB_IDS["qwen2.5-coder-0.5b"] == "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    assert HUB_IDS["llama3.2-1b"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert HUB_IDS["qwen3-8b"] == "Qwen/Qwen3-8B"


def test_messages_name_public_presets_by_family():
    names = public_presets()
    assert "test-" not in names
    assert "Qwen2.5: qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-coder-0.5b" in names
    assert all(name in names for name in (*HUB_IDS, "tiny-gemma2"))
    for wrong in ("lama2-7b", "test-llama9", "zzz", "?"):
        with pytest.raises(UserError) as caught:
            get_preset(wrong)
        assert "test-" not in str(caught.value).replace(wrong, "")
        assert names in str(caught.value)
