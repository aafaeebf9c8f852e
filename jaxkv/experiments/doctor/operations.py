"""The classes of operation of a decoder as functions under test, and the programs that compute them.

A program of one shape and dtype computes every operation, each on inputs of its own, so that no two products share an
operand that the compiler could merge.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import EMPTY, Slots
from jaxkv.config import DType, Precision
from jaxkv.decode import COMPILER_OPTIONS
from jaxkv.experiments.doctor.shapes import DoctorSpec, Results, Run, Shape, Tile, cover_tested
from jaxkv.models.decoder import DecoderLayer
from jaxkv.models.layers import Attention, RMSNorm, eager, product, rope_table


def _flat(array: Any) -> np.ndarray:
    """[B, T, ...] as [B, T, n]."""
    return np.asarray(array).reshape(*array.shape[:2], -1)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One class of operation as a function under test: (weights, inputs of a tile) -> output, traced.

    `rows` takes from an output and its tile what belongs to each row, [B, T, n], without slots that the row does not
    see. `shapes` are the kinds of programs that it takes part in.
    """

    name: str  # in the record
    inputs: Callable[[Tile], Any]
    apply: Callable[[Any, Any], Any]
    weights: Any = ()  # arrays that every call gets
    rows: Callable[[Any, Tile], np.ndarray] = lambda out, tile: _flat(out)
    shapes: tuple[str, ...] = ("rows",)


class Inputs:
    """Seeded contents at a realistic scale, a few channels of outliers included, rounded to one dtype.

    What a row holds is drawn once for the whole pool, so that it has the same bits in every tile.
    """

    def __init__(self, spec: DoctorSpec, precision: Precision):
        self.spec, self.precision, self.config = spec, precision, spec.config
        config, size = spec.config, spec.pool_size
        K, H = config.num_kv_heads, config.head_dim
        G = config.num_query_heads // K
        # A second history belongs to the rows of another sequence in a batch.
        self.history = [self.draw(f"history {n}", (2, spec.filled, K, H), outliers=4.0) for n in "kv"]
        self.own = [self.draw(f"own {n}", (size, K, H), outliers=4.0) for n in "kv"]
        self.scores = self.draw("scores", (size, K, G, spec.filled + max(spec.rows)), scale=3.0)
        e = np.exp(self.scores.astype(np.float32))
        self.weights = (e / e[..., : spec.filled].sum(-1, keepdims=True)).astype(precision.activation)

    def draw(
        self, name: str, shape: tuple[int, ...], scale: float = 1.0, outliers: float = 1.0, dtype: DType | None = None
    ) -> np.ndarray:
        """Normal numbers, before rounding the same in every dtype; three channels are `outliers` times larger.

        They are rounded to the activation dtype; a wider `dtype` only holds them.
        """
        rng = np.random.default_rng([self.spec.seed, *name.encode()])
        values = rng.standard_normal(shape, np.float32) * np.float32(scale)
        values[..., [1, shape[-1] // 3, shape[-1] - 2]] *= np.float32(outliers)
        rounded = values.astype(self.precision.activation)
        return rounded if dtype is None else rounded.astype(dtype)

    def slot(self, tile: Tile) -> np.ndarray:
        """Slot at which the tile's rows are written, an int32 scalar."""
        return np.asarray(self.spec.filled + self.spec.offsets(tile.ids)[0, 0], np.int32)

    def positions(self, tile: Tile) -> np.ndarray:
        """[B, T] absolute positions."""
        return (self.spec.filled + self.spec.offsets(tile.ids)).astype(np.int32)

    def visible(self, tile: Tile) -> np.ndarray:
        """[B, T, S] which slots a row sees."""
        end = self.positions(tile)[:, :, None] + 1 if tile.causal else self.spec.filled
        return np.broadcast_to(np.arange(tile.slots) < end, (*tile.ids.shape, tile.slots))

    def cache(self, which: int, tile: Tile, own: bool) -> np.ndarray:
        """[B, S, K, H] keys (0) or values (1): the history, the tile's own if asked for, then zeros."""
        B, T = tile.ids.shape
        cache = np.zeros((B, tile.slots, *self.history[which].shape[2:]), self.history[which].dtype)
        cache[:, : self.spec.filled] = self.history[which][(tile.ids[:, 0] >= self.spec.tested).astype(int)]
        if own:
            start = int(self.slot(tile))
            cache[:, start : start + T] = self.own[which][tile.ids]
        return cache

    def key_positions(self, tile: Tile) -> np.ndarray:
        """[B, S] positions of the slots that some row of the tile may see, EMPTY elsewhere."""
        B, T = tile.ids.shape
        slots = np.arange(tile.slots)
        end = int(self.slot(tile)) + T if tile.causal else self.spec.filled
        return np.broadcast_to(np.where(slots < end, slots, EMPTY), (B, tile.slots)).astype(np.int32)

    def over_slots(self, values: np.ndarray, tile: Tile) -> np.ndarray:
        """[B, K, G, T, S] of the tile's rows, from values [rows, K, G, slots] of the pool; zeros after the last."""
        held = values[tile.ids][..., : tile.slots]
        room = [(0, 0)] * (held.ndim - 1) + [(0, tile.slots - held.shape[-1])]
        return np.ascontiguousarray(np.moveaxis(np.pad(held, room), 1, 3))


def random_state(make: Callable[[], nnx.Module], inputs: Inputs, name: str) -> tuple[nnx.GraphDef, Any]:
    """Graphdef and seeded weights of a module, made without compiling anything."""
    graphdef, state = nnx.split(nnx.eval_shape(make))

    def fill(path: Any, leaf: Any) -> np.ndarray:
        label, shape = f"{name} {jax.tree_util.keystr(path)}", leaf.shape
        if len(shape) > 1:
            return inputs.draw(label, shape, scale=shape[-1] ** -0.5, dtype=leaf.dtype)
        near_one = 1 - inputs.config.norm_offset + inputs.draw(label, shape, scale=0.1).astype(np.float32)
        return near_one.astype(inputs.precision.activation).astype(leaf.dtype)

    return graphdef, jax.tree_util.tree_map_with_path(fill, state)


def _matmul(name: str, inputs: Inputs, fan_in: int, width: int) -> Operation:
    x = inputs.draw(f"{name} x", (inputs.spec.pool_size, fan_in), outliers=20.0)
    precision = inputs.precision
    return Operation(
        name,
        inputs=lambda tile: x[tile.ids],
        apply=lambda w, x: product("btd,fd->btf", x, w, precision),
        weights=inputs.draw(f"{name} w", (width, fan_in), fan_in**-0.5, dtype=precision.param),
    )


def _attention_core(inputs: Inputs) -> list[Operation]:
    """Scores, softmax and weighted sum, each on inputs of its own."""
    config, precision, spec = inputs.config, inputs.precision, inputs.spec
    K, N = config.num_kv_heads, config.num_query_heads
    q = inputs.draw("q", (spec.pool_size, K, N // K, config.head_dim), outliers=2.0)

    def softmax(_: Any, x: tuple[jax.Array, jax.Array]) -> jax.Array:
        values = jnp.where(x[1][:, None, None], x[0], jnp.finfo(x[0].dtype).min)
        return jax.nn.softmax(values.astype(precision.softmax), axis=-1).astype(precision.activation)

    def history_part(out: Any, tile: Tile) -> np.ndarray:
        return _flat(np.moveaxis(np.asarray(out)[..., : spec.filled], 3, 1))

    def weights_of_rows(out: Any, tile: Tile) -> np.ndarray:
        # Where rows see each other, the weights of what they do not see must be the same too: zeros.
        return _flat(np.moveaxis(np.asarray(out), 3, 1)) if tile.causal else history_part(out, tile)

    def attended(tile: Tile) -> tuple[np.ndarray, np.ndarray]:
        weights = np.where(inputs.visible(tile)[:, None, None], inputs.over_slots(inputs.weights, tile), 0)
        return weights, inputs.cache(1, tile, own=tile.causal)

    return [
        Operation(
            "scores",
            inputs=lambda tile: (q[tile.ids], inputs.cache(0, tile, own=tile.causal)),
            apply=lambda _, x: product("btkgh,bskh->bkgts", x[0], x[1], precision),
            rows=history_part,
            shapes=("rows", "slots"),
        ),
        Operation(
            "softmax",
            inputs=lambda tile: (inputs.over_slots(inputs.scores, tile), inputs.visible(tile)),
            apply=softmax,
            rows=weights_of_rows,
            shapes=("rows", "slots"),
        ),
        Operation(
            "weighted_sum",
            inputs=attended,
            apply=lambda _, x: product("bkgts,bskh->btkgh", x[0], x[1], precision),
            shapes=("rows", "slots"),
        ),
    ]


def _rmsnorm(inputs: Inputs, resid: np.ndarray) -> Operation:
    config, precision = inputs.config, inputs.precision
    graphdef, state = random_state(lambda: RMSNorm(config.model_dim, config, precision), inputs, "rmsnorm")
    return Operation(
        "rmsnorm",
        inputs=lambda tile: resid[tile.ids],
        apply=lambda w, x: nnx.merge(graphdef, w)(x, precision.activation),
        weights=state,
    )


def _module(name: str, module: Any, inputs: Inputs, x: np.ndarray, shapes: tuple[str, ...]) -> Operation:
    """A whole layer, or its attention, on rows x [rows, D] of the pool; what it writes to the cache is a result too."""
    config, precision = inputs.config, inputs.precision
    graphdef, state = random_state(lambda: module(config, precision, 0, nnx.Rngs(0), eager), inputs, name)

    def apply(w: Any, given: Any) -> Any:
        x, positions, k, v, key_positions, slot = given
        table = rope_table(positions, config.layer_rope(0), config.head_dim, precision)
        out, slots = nnx.merge(graphdef, w)(x, positions, Slots(k, v), key_positions, slot, table)
        return out, slots.k, slots.v

    def rows(out: Any, tile: Tile) -> np.ndarray:
        start = int(inputs.slot(tile))
        written = [np.asarray(cache)[:, start : start + tile.ids.shape[1]] for cache in out[1:]]
        return np.concatenate([_flat(part) for part in (out[0], *written)], axis=-1)

    def given(tile: Tile) -> Any:
        caches = [inputs.cache(which, tile, own=False) for which in (0, 1)]
        return x[tile.ids], inputs.positions(tile), *caches, inputs.key_positions(tile), inputs.slot(tile)

    return Operation(name, given, apply, state, rows, shapes)


def _elementwise(inputs: Inputs) -> Operation:
    """exp and tanh in fp32. Row i holds the same numbers as row 0, moved on by i places (`compare_places`)."""
    base = inputs.draw("elementwise", (inputs.config.model_dim + 1,), scale=4.0)
    pool = np.stack([np.roll(base, i) for i in range(inputs.spec.pool_size)])
    return Operation(
        "exp_tanh",
        inputs=lambda tile: pool[tile.ids],
        apply=lambda _, x: (jnp.exp(x), jnp.tanh(x)),
        rows=lambda out, tile: np.concatenate([_flat(part) for part in out], axis=-1),
    )


def make_operations(inputs: Inputs) -> list[Operation]:
    """The classes of operation of a decoder."""
    D, size = inputs.config.model_dim, inputs.spec.pool_size
    resid = inputs.draw("resid", (size, D), scale=2.0, outliers=30.0)
    normed = inputs.draw("normed", (size, D), outliers=10.0)
    operations = [
        _matmul("matmul", inputs, D, D),
        _matmul("matmul_wide", inputs, *inputs.spec.wide),
        *_attention_core(inputs),
        _rmsnorm(inputs, resid),
        _module("layer", DecoderLayer, inputs, resid, ("rows",)),
        _module("attention", Attention, inputs, normed, ("slots",)),
    ]
    if inputs.precision.name == "fp32":  # softmax and activations are in fp32 under every policy: once is enough
        operations.append(_elementwise(inputs))
    return [dataclasses.replace(op, weights=jax.device_put(op.weights)) for op in operations]


def compile_with(options: Mapping[str, Any] | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """The function compiled for arguments of that kind, with these XLA options."""
    return jax.jit(function, compiler_options=dict(options) if options else None).lower(*arguments).compile()


def compile_program(shape: Shape, spec: DoctorSpec, operations: Sequence[Operation]) -> Run:
    """One program of a shape: every operation of a dtype that takes part. Their weights are on the device."""
    chosen = {op.name: op for op in operations if shape.operations in op.shapes}
    held = {name: op.weights for name, op in chosen.items()}

    def program(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: op.apply(weights[name], inputs[name]) for name, op in chosen.items()}

    def inputs(tile: Tile) -> dict[str, Any]:
        return {name: op.inputs(tile) for name, op in chosen.items()}

    compiled = compile_with(COMPILER_OPTIONS, program, held, inputs(cover_tested(shape, spec)[0]))

    def run(tile: Tile) -> Results:
        outputs = jax.device_get(compiled(held, inputs(tile)))
        return {name: chosen[name].rows(output, tile) for name, output in outputs.items()}

    return run
