"""In which order a product of the decoder adds on this device, recovered from its outputs (trees.py)."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import Precision
from jaxkv.decode import COMPILER_OPTIONS
from jaxkv.experiments.lowering.trees import NoTreeError, Term, add_up, count_below, make_tests, recover_tree
from jaxkv.models.layers import product


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of a decoder in isolation: `product` of layers.py with x and w of these shapes, all as `spec` says."""

    spec: str  # einsum, e.g. btd,fd->btf; w has a letter that x has not, along which tests lie side by side
    x: tuple[int, ...]
    w: tuple[int, ...]

    @property
    def summed(self) -> str:
        """The letter that is summed over."""
        inputs, out = self.spec.split("->")
        return next(letter for letter in inputs.split(",")[0] if letter not in out)

    @property
    def count(self) -> int:
        """Summands of an element."""
        return self.x[self.spec.index(self.summed)]


@dataclasses.dataclass(frozen=True)
class Recovered:
    """What was found out about a product.

    Attributes:
      tree: how an element is added up.
      again: whether a second recovery, with tests in other columns, gave the same tree.
      reproduced: elements of a product of random numbers that have the bits of this tree's sums, of how many.
    """

    tree: Term
    again: bool
    reproduced: tuple[int, int]


class Bench:
    """A product that is compiled once."""

    def __init__(self, of: Product, held: Precision):
        self.of, self.held = of, held
        inputs, self._out = of.spec.split("->")
        x, w = inputs.split(",")
        self._columns = next(letter for letter in w if letter not in x)
        self._width = of.w[w.index(self._columns)]
        self._w = w
        shapes = [jax.ShapeDtypeStruct(shape, held.operand) for shape in (of.x, of.w)]
        program = jax.jit(functools.partial(product, of.spec, precision=held), compiler_options=COMPILER_OPTIONS)
        self.compiled = program.lower(*shapes).compile()

    def run(self, x: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The product of x and a w that has columns [summands, width] for all that it is batched over.

        Returns [rows, width] float64, of the rows of all batches.
        """
        letters = {self.of.summed: 0, self._columns: 1}
        kept = [letter for letter in self._w if letter in letters]
        w = columns.transpose([letters[letter] for letter in kept])
        shape = [size if letter in letters else 1 for letter, size in zip(self._w, self.of.w, strict=True)]
        w = np.broadcast_to(w.reshape(shape), self.of.w)
        out = self.compiled(jnp.asarray(x, self.held.operand), jnp.asarray(w, self.held.operand))
        return np.moveaxis(np.asarray(out, np.float64), self._out.index(self._columns), -1).reshape(-1, self._width)

    def measure(self, pairs: np.ndarray, shift: int = 0) -> np.ndarray:
        """Summands below what has both of each pair; tests are moved on by `shift` columns.

        Raises NoTreeError if rows do not agree.
        """
        count, found = self.of.count, []
        large, unit, most = find_numbers(self.held)
        ones = np.ones(self.of.x, np.float32)
        for begin in range(0, len(pairs), self._width):
            some = pairs[begin : begin + self._width]
            left = []
            for first in range(0, count, most):
                chunk = slice(first, first + most)
                tests = np.zeros((count, self._width), np.float32)
                tests[:, : len(some)] = make_tests(some, count, large, unit, chunk)
                rows = np.roll(self.run(ones, np.roll(tests, shift, axis=1)), -shift, axis=1)[:, : len(some)] / unit
                if not np.all(rows == rows[:1]):  # NaN neither
                    raise NoTreeError("rows are not added up alike")
                left.append((chunk, rows[0]))
            found.append(count_below(some, count, left))
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def recover(self) -> Recovered:
        """The tree of an element, and what speaks for it. Raises NoTreeError."""
        tree = recover_tree(self.of.count, self.measure)
        shift = max(1, self._width // 3)
        again = tree == recover_tree(self.of.count, functools.partial(self.measure, shift=shift))
        return Recovered(tree, again, self._reproduce(tree))

    def _reproduce(self, tree: Term) -> tuple[int, int]:
        rng = np.random.default_rng(0)
        columns = rng.standard_normal((self.of.count, self._width), np.float32)
        row = rng.standard_normal(self.of.count, np.float32)
        columns, row = (np.asarray(jnp.asarray(v, self.held.activation), np.float32) for v in (columns, row))
        letters = self.of.spec.split(",")[0]
        shape = [self.of.count if letter == self.of.summed else 1 for letter in letters]
        found = self.run(np.broadcast_to(row.reshape(shape), self.of.x), columns)
        wide = jnp.promote_types(self.held.accumulation, jnp.float32)
        sums = add_up(tree, row[:, None].astype(np.float64) * columns, wide)
        rounded = np.asarray(jnp.asarray(sums, self.held.activation), np.float64)
        return int(np.sum(np.all(found == rounded, axis=0))), self._width


def find_numbers(held: Precision) -> tuple[float, float, int]:
    """A large number, a unit, and how many units a test may have so that the large one absorbs them, and all are told."""
    operand, out = jnp.finfo(held.operand), jnp.finfo(held.activation)
    most = 2 ** (out.nmant + 1)
    if jnp.finfo(held.accumulation).dtype == jnp.float64:
        return 2.0**100, 1.0, 2**20
    if operand.maxexp <= 16:
        return 2.0**15, 2.0**-20, min(most, 2048)
    return 2.0**45, 1.0, min(most, 2**20)


Recover = Callable[[Product, Precision], Recovered]


@functools.lru_cache(maxsize=64)
def recover(of: Product, held: Precision) -> Recovered:
    """As Bench.recover, once for each product."""
    return Bench(of, held).recover()
