"""All families under one roof: presets, hub ids, key tables, and which config.json belongs to which."""

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxkv.config import ModelConfig
from jaxkv.errors import UserError, nearest
from jaxkv.models import gemma2, gemma3, llama, mistral, qwen2, qwen3
from jaxkv.models.hf_fields import read_fields
from jaxkv.models.tables import Family, KeyTable

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (llama, mistral, gemma2, gemma3, qwen2, qwen3)
}

PRESETS: dict[str, ModelConfig] = {n: config for family in FAMILIES.values() for n, config in family.presets.items()}

# The released weights of each preset; instruction-tuned siblings have the same architecture and load with it too.
HUB_IDS: dict[str, str] = {name: hub_id for family in FAMILIES.values() for name, hub_id in family.hub_ids.items()}

# Commits that a preset's name stands for unless --revision says otherwise: those of the study's three models.
HUB_REVISIONS: dict[str, str] = {
    "llama2-7b": "01c7f73d771dfac7d292323805ebc428287df4f9",
    "mistral-7b-v0.3": "d8cadc02ac76bd617a919d50b092e59d2d110aff",
    "gemma2-2b": "c5ebcd40d208330abc697524c919956e692655cf",
}


def public_presets() -> str:
    """Names of the presets for people, grouped by family, in one line."""
    groups = (
        (family.title, [name for name in family.presets if not name.startswith("test-")])
        for family in FAMILIES.values()
    )
    return "; ".join(f"{title}: {', '.join(names)}" for title, names in groups)


def get_preset(name: str) -> ModelConfig:
    """Returns the config of a preset. Raises UserError, with the nearest name, on an unknown one."""
    if name not in PRESETS:
        public = [known for known in PRESETS if not known.startswith("test-")]
        raise UserError(f"unknown model '{name}'{nearest(name, public)}; known: {public_presets()}")
    return PRESETS[name]


def key_table(family: str) -> KeyTable:
    """Key table from Hugging Face names to ours."""
    return FAMILIES[family].keys


class _Kind(msgspec.Struct):
    model_type: str | None = None


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """ModelConfig, of this name, of a raw config.json.

    Raises UserError on a model type or an option that we do not implement, or on a field that is no such thing.
    """
    kind = read_fields(raw, _Kind, name)
    if kind.model_type == "gemma3" or "vision_config" in raw or "text_config" in raw:
        raise UserError(
            f"{name}: model_type '{kind.model_type}' is multimodal and only text models are implemented; "
            "use a text checkpoint, such as google/gemma-3-1b-pt"
        )
    by_type = {family.model_type: family for family in FAMILIES.values()}
    if kind.model_type not in by_type:
        raise UserError(f"{name}: model_type '{kind.model_type}' is not implemented; known: {', '.join(by_type)}")
    return by_type[kind.model_type].parse(raw, name)
