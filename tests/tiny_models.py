"""Tiny random models of every family, as transformers' and as ours, and the logits of both arms of either."""

import dataclasses
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from jaxkv.cache import empty_cache
from jaxkv.checkpoints import load
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.checkpoints.hf_config import transformers_config
from jaxkv.config import make_precision
from jaxkv.decode import COMPILER_OPTIONS, Arms
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.families import get_preset
from jaxkv.rollout import Layout, Rows, slot_positions, start_rollout

torch.set_num_threads(1)  # tiny products: a second thread only waits for the first

FAMILIES = ("llama", "mistral", "gemma2", "gemma3", "llama3", "qwen2", "qwen3")
WINDOW = 10
TEXT = 40  # tokens, four windows
PREFILL = 16
SLOTS = 48
K_BIAS = 8.0

_PRESETS = {family: f"test-{family}" for family in FAMILIES} | {"llama": "test-llama2-gqa"}
_CAPS = {"attn_softcap": 3.0, "final_softcap": 1.5}  # they bite the scores and logits below, and are no powers of 2


def tiny_config(family, heads="gqa"):
    """Config of a tiny model; 'mha' has as many kv heads as query heads, and a LLaMA of that kind an untied head."""
    config = get_preset(_PRESETS[family])
    changes = {"num_layers": 2 if family == "llama" or family.startswith("gemma") else 1}
    if config.window is not None:
        changes["window"] = WINDOW
    if family == "gemma2":
        changes |= _CAPS
    if family == "gemma3":
        changes["window_pattern"] = (True, False)
    if heads == "mha":
        changes["num_kv_heads"] = config.num_query_heads
        if family == "llama":
            changes["tie_embeddings"] = False
    return dataclasses.replace(config, name=f"{family}-{heads}", **changes)


def save_random(config, path):
    """Saves a random transformers model of the config: logits of a few units, no norm weight at its initial value."""
    settings = transformers_config(config)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):  # those of k are large in Qwen2.5: up to a hundred and more
                value = torch.randn(weight.shape, generator=generator) * (K_BIAS if "k_proj" in name else 1)
            elif weight.ndim == 1:
                value = torch.rand(weight.shape, generator=generator) + 0.5 - config.norm_offset
            else:
                size = 0.2 if "embed" in name or "head" in name else weight.shape[1] ** -0.5
                if config.attn_softcap and ("q_proj" in name or "k_proj" in name):
                    size *= 2.2
                value = torch.randn(weight.shape, generator=generator) * size
            weight.copy_(value)
    model.save_pretrained(path)
    return path


def load_torch(path, dtype=torch.float32):
    """transformers' model of a directory, as users load it: weights rounded to `dtype`, RoPE frequencies in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.eval()


def torch_logits(model, tokens, first, prompt=None):
    """Logits [B, TEXT, V] float64 of transformers: without a cache, or with it filled by `prompt` slots, then stepped.

    Rows before `first` are padding and their logits mean nothing.
    """
    ids = torch.tensor(tokens[:, :TEXT], dtype=torch.long)
    slots = torch.arange(TEXT)[None]
    starts = torch.tensor(first)[:, None]
    mask = (slots >= starts).long() if any(first) else None
    positions = (slots - starts).clamp(min=0)
    cuts = [0, TEXT] if prompt is None else [0, *range(prompt, TEXT + 1)]
    parameters = inspect.signature(type(model).forward).parameters
    argument = "cache" if "cache" in parameters else "past_key_values"
    cache, parts = None, []
    for begin, end in itertools.pairwise(cuts):
        with torch.no_grad():
            out = model(
                input_ids=ids[:, begin:end],
                attention_mask=None if mask is None else mask[:, :end],
                position_ids=positions[:, begin:end],
                use_cache=prompt is not None,
                **({} if cache is None else {argument: cache}),
            )
        cache = out[argument] if prompt is not None else None
        parts.append(out.logits.double())
    return torch.cat(parts, 1).numpy()


def make_text(config, batch=2, seed=1):
    """Random token ids [B, SLOTS]; slots from TEXT on are zeros."""
    tokens = np.zeros((batch, SLOTS), np.int32)
    tokens[:, :TEXT] = np.random.default_rng(seed).integers(3, config.vocab_size, (batch, TEXT))
    return tokens


def run_arms(arms, state, tokens, first, prompt):
    """Rollouts of both arms forced along tokens [B, SLOTS]: arm -> Rollout."""
    batch = len(first)
    layout = Layout(batch=batch, prompt=prompt, prefill=PREFILL, slots=SLOTS, new_tokens=TEXT)
    rows = Rows(
        first=jnp.asarray(first, jnp.int32),
        prompt=jnp.asarray(prompt, jnp.int32),
        forced_until=jnp.full(batch, TEXT, jnp.int32),
        limit=jnp.full(batch, TEXT + 1, jnp.int32),
        problems=jnp.arange(batch, dtype=jnp.int32),
        seed=jnp.asarray(0, jnp.int32),
    )
    start = start_rollout(arms, tokens, rows, layout)
    return {
        "cached": arms.run_cached(state, tokens, rows, layout),
        "uncached": arms.run_uncached(state, start, rows, layout),
    }


def arm_logits(arms, state, tokens, first, prompt):
    """Logits of both arms along `tokens`, of rows from prompt - 1 on: arm -> [B, TEXT - prompt + 1, V] float64."""
    runs = run_arms(arms, state, tokens, first, prompt)
    assert all(run.nonfinite_step.tolist() == [-1] * len(first) for run in runs.values())
    return {arm: np.asarray(run.logits[:, : TEXT - prompt + 1], np.float64) for arm, run in runs.items()}


def real_rows(first, prompt):
    """[B, TEXT - prompt + 1] whether a row that `arm_logits` gives is text; the others are left padding."""
    return np.arange(prompt - 1, TEXT)[None] >= np.asarray(first)[:, None]


def scaled(state, factors):
    """The state with some weights multiplied: path -> factor."""
    leaves = {path: leaf[...] for path, leaf in flat_paths(state).items()}
    for path, factor in factors.items():
        wide = leaves[path].astype(jnp.float32) * factor
        leaves[path] = wide.astype(leaves[path].dtype)
    return with_leaves(state, leaves)


@functools.cache
def make_forward(config, precision):
    """One compiled forward (state, tokens, positions, cache, slot) -> (logits, cache, named values)."""
    graphdef, _ = abstract_decoder(config, precision)

    @functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def forward(state, tokens, positions, cache, slot=0):
        seen = {}

        def record(name, value):
            seen[name] = value
            return value

        model = nnx.merge(graphdef, state)
        hidden, cache = model(tokens, positions, cache, slot, record)
        return model.logits(hidden, record), cache, seen

    return forward


def run_whole(config, precision, state, tokens, first=None):
    """`make_forward` on all of tokens [B, T] from an empty cache."""
    batch, length = tokens.shape
    positions = slot_positions(np.arange(length), np.asarray(first or [0] * batch, np.int32), length)
    cache = empty_cache(config, precision, batch, length)
    return make_forward(config, precision)(state, jnp.asarray(tokens), positions, cache)


class TinyModels:
    """Tiny models by family and heads, and their compiled arms, each made once a session."""

    def __init__(self, make_directory):
        self._make_directory = make_directory
        self._cached = {}

    def _once(self, key, make):
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]

    def path(self, family, heads="gqa"):
        """Directory of the saved fp32 model."""
        make = lambda: save_random(tiny_config(family, heads), self._make_directory(f"{family}-{heads}"))  # noqa: E731
        return self._once(("path", family, heads), make)

    def torch(self, family, heads="gqa"):
        """transformers' fp32 model of that directory."""
        return self._once(("torch", family, heads), lambda: load_torch(self.path(family, heads)))

    def checkpoint(self, family, heads="gqa", precision="fp32"):
        """Our checkpoint of that directory; its config must come back as it was."""
        policy, config = make_precision(precision), tiny_config(family, heads)
        path = str(self.path(family, heads))
        return self._once((precision, family, heads), lambda: load(path, precision=policy, config=config))

    def run(self, family, precision="fp32", factors=(), **changes):
        """`run_whole` on a text [2, TEXT] of a model whose weights are `scaled` and whose config is changed so."""
        checkpoint = self.checkpoint(family, precision=precision)
        config, state = dataclasses.replace(checkpoint.config, **changes), scaled(checkpoint.state, dict(factors))
        return run_whole(config, make_precision(precision), state, make_text(config)[:, :TEXT])

    def truth(self, family, precision="fp32"):
        """Its float64 logits, of the weights of a precision."""
        checkpoint = self.checkpoint(family, precision=precision)
        text = make_text(checkpoint.config)[:, :TEXT]
        with jax.enable_x64(True):
            weights = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), checkpoint.state)
            logits = np.asarray(run_whole(checkpoint.config, make_precision("fp64"), weights, text)[0])
        assert logits.dtype == np.float64
        return logits

    def arms(self, family, heads="gqa", precision="fp32"):
        """Compiled arms and their prepared weights."""

        def make():
            checkpoint = self.checkpoint(family, heads, precision)
            arms = Arms(checkpoint.config, make_precision(precision))
            return arms, arms.prepare(checkpoint.state)

        return self._once(("arms", family, heads, precision), make)
