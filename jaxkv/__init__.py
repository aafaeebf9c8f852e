"""Flax ports of LLaMA-2, Mistral and Gemma, decoded with and without a KV cache, and the difference measured.

    model = jaxkv.load("tiny-gemma2", precision="bf16")
    jaxkv.compare(model, "Ann has 3 apples and buys 4 more. How many apples does she have?")

Nothing heavy is imported until one of these is used (PEP 562).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.api import Comparison, Model, Run, compare, generate, load, read_run

__all__ = ["Comparison", "Model", "Run", "compare", "generate", "load", "read_run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from jaxkv import api

        return getattr(api, name)
    raise AttributeError(f"module 'jaxkv' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
