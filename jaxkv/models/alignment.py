"""Which operations are computed in tiles of a fixed number of rows, whatever the number of rows of the call.

A decoder passes each of its operations that treats rows alike through a `Rowwise`, `rows(op_class, fn, *arrays)`.
`direct` calls the function on all rows at once, and the traced program is as if it were not there. An `Alignment` cuts
the rows of the chosen classes into tiles instead, so that their kernels no longer depend on how many rows a call has.

Every class runs in loops of its own, aligned or not: XLA then fuses nothing across its border, and two alignments
differ in row counts alone. Which classes are aligned is an argument of the compiled program, not part of it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Products of q, k and v; RoPE tables and rotation; q·k with scale and softcap; softmax and weighted sum; output
# projection; gate, up, activation and down; every RMSNorm; the head with its softcap. The rest (embedding and its
# scale, masks, residual additions) rounds each element by itself.
CLASSES = ("norms", "qkv", "rope", "scores", "attention", "output", "mlp", "head")

IN_TILES, AT_ONCE = "in_tiles", "at_once"  # names that a compiled program gives the two forms of a class

Rowwise = Callable[..., Any]  # (op_class, fn, *arrays, rows_in=axis of rows in arrays, rows_out=that in the results)


def direct(op_class: str, fn: Callable[..., Any], *arrays: Any, rows_in: int = 1, rows_out: int = 1) -> Any:
    """Calls fn on all rows at once."""
    del rows_in, rows_out
    with jax.named_scope(op_class):
        return fn(*arrays)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["on"], meta_fields=["tile"])
@dataclasses.dataclass(frozen=True)
class Alignment:
    """What a program aligns."""

    tile: int  # M, rows of a tile; part of the compiled program
    on: jax.Array  # [len(CLASSES)] booleans, the classes that run in tiles; the others run on all rows at once


class Alignments(NamedTuple):
    """What each of the arms' programs aligns; None for nothing."""

    prefill: Alignment | None = None
    decode: Alignment | None = None
    recompute: Alignment | None = None


PLAIN = Alignments()


def make_alignment(tile: int, classes: frozenset[str]) -> Alignment:
    """The alignment of these classes. Raises ValueError on an unknown one."""
    if unknown := classes - set(CLASSES):
        raise ValueError(f"unknown operation classes: {', '.join(sorted(unknown))}")
    return Alignment(tile, jnp.asarray([name in classes for name in CLASSES]))


def align(tile: int, classes: Mapping[str, Sequence[str]] | None) -> Alignments:
    """What programs align: of 'prefill', 'decode' and 'recompute' the classes; None for the plain programs."""
    if classes is None:
        return PLAIN
    return Alignments(**{program: make_alignment(tile, frozenset(names)) for program, names in classes.items()})


def make_rowwise(alignment: Alignment | None, slot: jax.Array | int) -> Rowwise:
    """How a call whose first row is at `slot` passes its operations."""
    return direct if alignment is None else functools.partial(_in_tiles, alignment, slot)


def _in_tiles(
    alignment: Alignment,
    slot: jax.Array | int,
    op_class: str,
    fn: Callable[..., Any],
    *arrays: Any,
    rows_in: int = 1,
    rows_out: int = 1,
) -> Any:
    """fn over T rows, in tiles of M rows if its class is aligned, else all at once.

    `arrays` are pytrees of arrays with T rows each, from that of `slot` on; fn makes of them a pytree of arrays, each
    row of which depends on that row of the arrays alone. The row of slot s is row s % M of its tile, so that one
    decoded row sits where it sits in a recomputation.
    """
    tile = alignment.tile
    T = jax.tree.leaves(arrays)[0].shape[rows_in]
    offset = slot % tile
    # T rows at any offset fit. One tile more than they need keeps slices and updates real in every program.
    length = (-(-T // tile) + 1) * tile

    def make_buffer(like: Any, axis: int) -> jax.Array:
        return jnp.zeros((*like.shape[:axis], length, *like.shape[axis + 1 :]), like.dtype)

    def put(buffer: jax.Array, value: jax.Array, start: Any, axis: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, value, start, axis)

    inputs = jax.tree.map(lambda x: put(make_buffer(x, rows_in), x, offset, rows_in), arrays)

    def run(count: jax.Array, size: int, first: Any, results: Any) -> Any:
        # The count is traced: XLA would inline a loop of one trip and fuse across its border.
        def body(index: jax.Array, results: Any) -> Any:
            start = first + index * size
            rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, rows_in), inputs)
            values = jax.lax.optimization_barrier(fn(*jax.lax.optimization_barrier(rows)))
            return jax.tree.map(lambda buffer, value: put(buffer, value, start, rows_out), results, values)

        return jax.lax.fori_loop(0, count, body, results)

    aligned = alignment.on[CLASSES.index(op_class)]
    results = jax.tree.map(lambda y: make_buffer(y, rows_out), jax.eval_shape(fn, *arrays))
    with jax.named_scope(op_class), jax.named_scope(IN_TILES):
        results = run(jnp.where(aligned, (offset + T + tile - 1) // tile, 0), tile, 0, results)
    with jax.named_scope(op_class), jax.named_scope(AT_ONCE):
        results = run(jnp.where(aligned, 0, 1), T, offset, results)
    return jax.tree.map(lambda y: jax.lax.dynamic_slice_in_dim(y, offset, T, rows_out), results)
