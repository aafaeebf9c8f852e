"""Flax ports of LLaMA-2, Mistral and Gemma, decoded with and without a KV cache, and the difference measured."""
