"""Keys and values for tests of what is done to a cache: of shipped models on text they know, and random ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import empty_cache
from jaxkv.checkpoints import load
from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.interventions.cache_errors import CacheError, make_keys, site_number
from jaxkv.interventions.quantizers import packing
from jaxkv.interventions.quantizers.base import Quantizer
from jaxkv.interventions.quantizers.integers import Integer
from jaxkv.interventions.quantizers.kvarn import KVarN
from jaxkv.interventions.quantizers.turboquant import TurboQuant
from jaxkv.rollout import make_layout, make_rows
from jaxkv.tasks import arith

TOKENS = 512
PRECISION = make_precision("fp16")


@functools.cache
def real_kv(name: str = "tiny-gemma2") -> dict[str, np.ndarray]:
    """'k' (after RoPE) and 'v' of every layer, fp32 [L, TOKENS, K, H], from a few-shot arith prompt in fp16."""
    checkpoint = load(name, precision=PRECISION)
    text = "\n\n".join(f"{problem.question}\n{problem.solution}" for problem in arith.generate("test", 16))
    prompt = checkpoint.tokenizer.encode(text)[:TOKENS]
    assert len(prompt) == TOKENS
    return prefill_kv(checkpoint, prompt)


def prefill_kv(checkpoint: Checkpoint, prompt: list[int]) -> dict[str, np.ndarray]:
    """'k' (after RoPE) and 'v' of every layer, fp32 [L, n, K, H], of a prompt of n tokens in fp16."""
    arms = Arms(checkpoint.config, PRECISION)
    layout = make_layout([prompt], 0, 8, checkpoint.config)
    tokens, rows = make_rows([prompt], [0], 0, layout)
    cache = empty_cache(checkpoint.config, PRECISION, 1, layout.slots)
    _, cache = arms.prefill(arms.prepare(checkpoint.state), jnp.asarray(tokens), rows, cache)
    values = {side: np.concatenate([np.asarray(x, np.float32) for x in getattr(cache, side)]) for side in ("k", "v")}
    return {side: x[:, : len(prompt)] for side, x in values.items()}


def normal(*shape, seed: int = 0) -> np.ndarray:
    """Standard normal fp32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def spread(shape: tuple[int, ...], over: tuple[float, float] = (1.0, 0.5), seed: int = 1) -> np.ndarray:
    """Normal values [B, S, K, H] whose tokens and channels differ in scale."""
    tokens, channels = (
        size * normal(n, seed=seed + i) for i, (size, n) in enumerate(zip(over, shape[1::2], strict=True))
    )
    return (normal(*shape, seed=seed + 2) * np.exp(tokens)[:, None, None] * np.exp(channels)).astype(np.float32)


unpack = jax.jit(packing.unpack, static_argnums=1)


@functools.cache
def compiled(quantizer, method):
    """A method of a quantizer as a program."""
    return jax.jit(getattr(quantizer, method))


def run(quantizer, x):
    """What is packed and what is read, through compiled programs."""
    packed = compiled(quantizer, "quantize")(x)
    return packed, np.asarray(compiled(quantizer, "dequantize")(packed))


def relative(x, y) -> float:
    """|y - x| / |x|."""
    return float(np.linalg.norm(np.asarray(y) - np.asarray(x)) / np.linalg.norm(x))


def on_a_grid(groups: np.ndarray, bits: int, least: float = 0.0) -> np.ndarray:
    """Groups [..., n] rounded between their extremes, scale and zero in fp16, as the recipes have it."""
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = (np.maximum(high - low, np.float32(least)) / np.float32(2**bits - 1)).astype(np.float16).astype(np.float32)
    zero = low.astype(np.float16).astype(np.float32)
    return np.clip(np.round((groups - zero) / scale), 0, 2**bits - 1) * scale + zero


def repacks_alike(quantizer: Quantizer) -> bool:
    """Whether packing what was read back gives the same codes, for fp32 in between."""
    if isinstance(quantizer, Integer):
        return quantizer.bound == "whole"
    return not isinstance(quantizer, KVarN) and not (isinstance(quantizer, TurboQuant) and quantizer.coded)


def perturb(error: CacheError, rows, *, layer, side, positions, problems, seed, read_step=None):
    """Rows [B, T, K, H] of a site with their error, drawn and put together as a cache does it."""
    site = site_number(layer, side)
    if not error.touches(layer, side):
        return rows
    if not error.random:
        return error.change(rows, positions, None)
    keys = make_keys(jnp.asarray(site), positions, problems, seed, read_step)
    return error.change(rows, positions, error.sample(keys, rows.shape[2:]))
