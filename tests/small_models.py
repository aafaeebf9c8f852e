"""Small models for tests of decoding. Programs are compiled, and weights made, once a process."""

import copy
import dataclasses
import functools

import jax
import numpy as np
from flax import nnx

from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import ModelConfig, make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.driver import run_missing
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.families import get_preset
from jaxkv.rollout import Layout, Rollout, Rows, make_layout, make_rows, start_rollout
from jaxkv.sampling import make_sampler

PRESETS = {
    "llama": "test-llama2",
    "mistral": "test-mistral",
    "gemma2": "test-gemma2",
    "gemma3": "test-gemma3",
    "qwen2": "test-qwen2",
}
OTHERS = {"llama3": "test-llama3", "qwen3": "test-qwen3"}  # families that differ from one of those in a detail
WINDOWED = [family for family, name in PRESETS.items() if get_preset(name).window is not None]
VOCAB = 37
STOP_IDS = (5, 11)
NEW_TOKENS = 12
BUCKET = 8
SAMPLERS = {
    "greedy": make_sampler("greedy"),
    "temperature": make_sampler("temperature", temperature=0.9),
    "top_k": make_sampler("top_k", temperature=1.0, top_k=5),
    "top_p": make_sampler("top_p", top_p=0.8),
}


def small_config(family: str = "mistral", vocab: int = VOCAB, layers: int = 2) -> ModelConfig:
    """Two layers, with a window shorter than the texts in the first where the family has windows."""
    base = get_preset((PRESETS | OTHERS)[family])
    changes = {"name": f"small-{family}", "num_layers": layers, "vocab_size": vocab, "context_length": 64}
    if base.window:
        changes |= {"window": 9, "window_pattern": (True, False)}
    return dataclasses.replace(base, **changes)


def random_state(config: ModelConfig, precision: str) -> nnx.State:
    """Weights so large that the next token depends on the whole text; one layer has those of the first of two.

    Made by numpy: to compile an initialiser for every shape takes longer than many a test.
    """
    state = abstract_decoder(config, make_precision("fp32"))[1]
    rng, norm = np.random.default_rng(2), np.float32(1.0 - config.norm_offset)
    leaves = {}
    for path, leaf in flat_paths(state).items():
        noise = rng.normal(size=leaf.shape) * 0.3
        value = norm + noise.astype(np.float32) if noise.ndim == 1 else noise
        leaves[path] = jax.numpy.asarray(value, make_precision(precision).param)
    return with_leaves(state, leaves)


@functools.cache
def small_state(family: str = "mistral", precision: str = "fp32", vocab: int = VOCAB, layers: int = 2) -> nnx.State:
    """Weights of a small model."""
    return random_state(small_config(family, vocab, layers), precision)


def changed_state(state: nnx.State, path: str, index, value: float) -> nnx.State:
    """The state with one place of one weight changed."""
    leaves = {name: leaf[...] for name, leaf in flat_paths(state).items()}
    leaves[path] = leaves[path].at[index].set(value)
    return with_leaves(state, leaves)


@functools.cache
def small_arms(
    family: str = "mistral",
    precision: str = "fp32",
    sampler: str = "greedy",
    stop_ids: tuple[int, ...] = (),
    backend: str | None = None,
    layers: int = 2,
) -> Arms:
    """Arms of a small model."""
    return Arms(
        small_config(family, layers=layers), make_precision(precision), SAMPLERS[sampler], stop_ids, backend=backend
    )


def find_nothing(state: nnx.State, tokens: jax.Array, first: jax.Array, end: jax.Array) -> dict[str, np.ndarray]:
    """An audit without its program, which is the largest, and few tests ask what it finds."""
    return {"00000 logits": np.zeros(tokens.shape)}


def unaudited(arms: Arms) -> Arms:
    """The arms with audits that find nothing."""
    arms = copy.copy(arms)
    arms.audit_pass = find_nothing
    return arms


def make_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random prompts without stop ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(12, VOCAB, n).tolist() for n in lengths]


def set_up(
    prompts: list[list[int]], problems: list[int] | None = None, seed: int = 0
) -> tuple[Layout, np.ndarray, Rows]:
    """Layout, token buffer and rows of a batch."""
    layout = make_layout(prompts, NEW_TOKENS, BUCKET, small_config())
    return layout, *make_rows(prompts, problems or list(range(len(prompts))), seed, layout)


def step_uncached(
    arms: Arms, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout, length: str = "padded"
) -> Rollout:
    """The uncached arm stepped from where `tokens` and `rows` start."""
    return arms.run_uncached(state, start_rollout(arms, tokens, rows, layout), rows, layout, length)


def run_foreign(arms: Arms, state: nnx.State, tokens: np.ndarray, rows: Rows, layout: Layout, seed: int = 9) -> Rollout:
    """The cached arm with the noise of another seed: a reference with tokens of its own."""
    return arms.run_cached(state, tokens, dataclasses.replace(rows, seed=jax.numpy.int32(seed)), layout)


def taken(run: Rollout, layout: Layout) -> list[list[int]]:
    """Each row's own tokens."""
    tokens = np.asarray(run.tokens)[:, layout.prompt :]
    return [tokens[row, :length].tolist() for row, length in enumerate(np.asarray(run.lengths))]


def bits(x) -> np.ndarray:
    """The array's bits: -0 and +0 differ, NaN equals itself."""
    array = np.ascontiguousarray(x)
    return array.view(bool if array.dtype == bool else f"u{array.dtype.itemsize}")


def same_bits(a, b) -> bool:
    """Whether two pytrees hold the same arrays bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(bits(x), bits(y)) for x, y in pairs)


def run_all(runner, items, done=frozenset()):
    """All records of an experiment that are not done."""
    return [record for records, _ in run_missing(runner, items, done) for record in records]


def run_broken(make_runner, state, items, spared=()):
    """Records with weights that overflow at the first item's token at a place, of both items and of this one twice.

    The token is none of the second prompt's, and none of those `spared`.
    """
    place, token = next((i, t) for i, t in enumerate(items[0].prompt) if t not in (*items[1].prompt, *spared))
    runner = make_runner(changed_state(state, "embed", (token, 0), np.inf))
    twice = [dataclasses.replace(items[0], problem=problem) for problem in (1, 2)]
    return run_all(runner, items), run_all(runner, twice), place
