"""All families under one roof: presets, hub ids, key tables, and which config.json belongs to which."""

from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.errors import UserError, nearest
from jaxkv.models import gemma2, gemma3, llama, mistral
from jaxkv.models.tables import KeyTable

FAMILIES = {"llama": llama, "mistral": mistral, "gemma2": gemma2, "gemma3": gemma3}
_MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "gemma2": "gemma2", "gemma3_text": "gemma3"}

PRESETS: dict[str, ModelConfig] = {name: c for family in FAMILIES.values() for name, c in family.PRESETS.items()}

# The released weights of each preset; instruction-tuned siblings have the same architecture and load with it too.
HUB_IDS: dict[str, str] = {
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1",
    "mistral-7b-v0.2": "mistralai/Mistral-7B-Instruct-v0.2",
    "mistral-7b-v0.3": "mistralai/Mistral-7B-v0.3",
    "gemma2-2b": "google/gemma-2-2b",
    "gemma2-9b": "google/gemma-2-9b",
    "gemma2-27b": "google/gemma-2-27b",
    "gemma3-270m": "google/gemma-3-270m",
    "gemma3-1b": "google/gemma-3-1b-pt",
}

# Commits that a preset's name stands for unless --revision says otherwise: those of the study's three models.
HUB_REVISIONS: dict[str, str] = {
    "llama2-7b": "01c7f73d771dfac7d292323805ebc428287df4f9",
    "mistral-7b-v0.3": "d8cadc02ac76bd617a919d50b092e59d2d110aff",
    "gemma2-2b": "c5ebcd40d208330abc697524c919956e692655cf",
}


def get_preset(name: str) -> ModelConfig:
    """Returns the config of a preset. Raises UserError, with the nearest name, on an unknown one."""
    if name not in PRESETS:
        raise UserError(f"unknown model '{name}'{nearest(name, list(PRESETS))}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def key_table(family: str) -> KeyTable:
    """Key table from Hugging Face names to ours."""
    return FAMILIES[family].KEYS


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig of a raw config.json.

    Args:
      raw: the parsed file.
      name: for the config and for error messages.

    Raises:
      UserError: a model type or an option that we do not implement, by its name.
    """
    model_type = raw.get("model_type")
    if model_type == "gemma3" or "vision_config" in raw or "text_config" in raw:
        raise UserError(
            f"{name}: model_type '{model_type}' is multimodal and only text models are implemented; "
            "use a text checkpoint, such as google/gemma-3-1b-pt"
        )
    if model_type not in _MODEL_TYPES:
        raise UserError(f"{name}: model_type '{model_type}' is not implemented; known: {', '.join(_MODEL_TYPES)}")
    return FAMILIES[_MODEL_TYPES[model_type]].parse_config(raw, name)
