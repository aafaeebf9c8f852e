"""In which order a product of the decoder adds on this device, recovered from its outputs (trees.py)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import Precision
from jaxkv.decode import COMPILER_OPTIONS
from jaxkv.experiments.lowering.replay import RULES, Rule, adds_at_once, replay
from jaxkv.experiments.lowering.trees import NoTreeError, Numbers, Term, find_sizes, measure_sizes, recover_tree
from jaxkv.models.layers import product

CHECKS = 1024  # pairs, drawn at random, of which each tree must give the sizes that are measured


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
      numbers: what told it.
      again: whether a second recovery, with tests in other columns, gave the same tree.
      reproduced: for each rule of rounding that was tried, the columns of a product of random numbers that cancel whose
        bits, in every row, are those of this tree's sums.
      columns: of how many.
    """

    tree: Term
    numbers: Numbers
    again: bool
    reproduced: dict[Rule, int]
    columns: int

    @property
    def rounding(self) -> str:
        """The first rule that gives all bits, 'either' where products are exact, so that two do, or 'neither'."""
        fit = [rule for rule, equal in self.reproduced.items() if equal == self.columns]
        return "either" if {"fused", "rounded"} <= set(fit) else fit[0] if fit else "neither"


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
        self._ones = jnp.asarray(np.ones(of.x, held.operand))
        self._write = jax.jit(self._write_tests, static_argnames="numbers")
        self._place = jax.jit(self._place_columns)
        self._arrange = jax.jit(self._arrange_rows)

    def _place_columns(self, columns: jax.Array) -> jax.Array:
        """The w that has columns [summands, width] for all that it is batched over."""
        letters = {self.of.summed: 0, self._columns: 1}
        w = columns.transpose([letters[letter] for letter in self._w if letter in letters])
        shape = [size if letter in letters else 1 for letter, size in zip(self._w, self.of.w, strict=True)]
        return jnp.broadcast_to(w.reshape(shape), self.of.w).astype(self.held.operand)

    def _write_tests(self, pairs: jax.Array, first: jax.Array, numbers: Numbers) -> jax.Array:
        """On the device, since they are larger by far than their pairs."""
        return self._place_columns(numbers.write(pairs, first, self.of.count, jnp))

    def multiply(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Their product as [rows, width], of the rows of all batches, and whether all rows are the first one's."""
        return self._arrange(self.compiled(x, w))

    def _arrange_rows(self, out: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = jnp.moveaxis(out, self._out.index(self._columns), -1).reshape(-1, self._width)
        return rows, jnp.all(rows == rows[:1])

    def measure(self, pairs: np.ndarray, numbers: Numbers, shift: int = 0) -> np.ndarray:
        """Summands [pairs] below what has both of each pair [pairs, 2]; tests are moved on by `shift` columns.

        Raises NoTreeError if results are those of no such sum, or rows do not agree.
        """

        def add(some: np.ndarray, first: int) -> np.ndarray:
            full = np.roll(np.resize(some, (self._width, 2)), shift, axis=0)
            rows, agree = self.multiply(self._ones, self._write(full, first, numbers=numbers))
            if agree:
                rows = rows[:1]  # the others need not leave the device
            return np.roll(np.asarray(rows, np.float64), -shift, axis=1)[:, : len(some)]

        parts = [pairs[begin : begin + self._width] for begin in range(0, len(pairs), self._width)]
        sizes = [measure_sizes(part, self.of.count, numbers, add) for part in parts]
        return np.concatenate(sizes) if sizes else np.empty(0, np.int64)

    def recover(self) -> Recovered:
        """The tree of an element, and what speaks for it. Raises NoTreeError, which names all that was tried."""
        faults = []
        for numbers in choose_numbers(self.held):
            try:
                return self.recover_with(numbers)
            except NoTreeError as error:
                faults.append(f"with {numbers}: {error}")
        raise NoTreeError("; ".join(faults))

    def recover_with(self, numbers: Numbers) -> Recovered:
        """As `recover`, with these numbers alone."""
        count, shift = self.of.count, max(1, self._width // 3)
        tree = recover_tree(count, functools.partial(self.measure, numbers=numbers))
        pairs = np.random.default_rng(1).integers(0, count, (CHECKS, 2))
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        wrong = np.flatnonzero(self.measure(pairs, numbers, 2 * shift) != find_sizes(tree, pairs))
        if len(wrong):
            a, b = pairs[wrong[0]].tolist()
            raise NoTreeError(f"{len(wrong)} of {len(pairs)} pairs do not fit the tree of others, first {a} and {b}")
        again = tree == recover_tree(count, functools.partial(self.measure, numbers=numbers, shift=shift))
        return Recovered(tree, numbers, again, self._reproduce(tree), self._width)

    def _reproduce(self, tree: Term) -> dict[Rule, int]:
        x, w = (jnp.asarray(values, self.held.activation) for values in _draw_cancelling(self.of.count, self._width))
        shape = [self.of.count if letter == self.of.summed else 1 for letter in self.of.spec.split(",")[0]]
        rows = jnp.broadcast_to(x.reshape(shape), self.of.x).astype(self.held.operand)
        found = np.asarray(self.multiply(rows, self._place(w))[0], np.float64)
        wide = np.dtype(jnp.promote_types(self.held.accumulation, jnp.float32))
        factors = np.asarray(x, wide), np.asarray(w, wide)
        least = int(jnp.finfo(self.held.activation).minexp)
        equal: dict[Rule, int] = {}
        for rule in RULES:
            if not rule.startswith("cut") or (adds_at_once(tree) and wide == jnp.float32):
                sums = jnp.asarray(replay(tree, *factors, wide, rule, least), self.held.accumulation)
                rounded = np.asarray(sums.astype(self.held.activation), np.float64)
                equal[rule] = int(np.sum(np.all(found == rounded, axis=0)))
        return equal


def _draw_cancelling(count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """x [count] and w [count, width] whose products cancel in pairs, drawn at random.

    Their sum is what rounding made of 0: all its bits tell of the order, even if it is rounded to 16 bits at the end.
    Each is scaled by 2^4, so that it is no subnormal number of fp16 either.
    """
    rng = np.random.default_rng(0)
    half = count // 2
    one, other = np.split(rng.permutation(count)[: 2 * half], 2)
    x, w = np.zeros(count, np.float32), np.zeros((count, width), np.float32)
    x[one] = x[other] = 16 * rng.standard_normal(half, np.float32)
    w[one] = 16 * rng.standard_normal((half, width), np.float32)
    w[other] = -w[one]
    return x, w


def choose_numbers(held: Precision) -> tuple[Numbers, ...]:
    """Numbers that tell a tree, those that take the fewest tests first.

    An adder may keep bits beyond the accumulator's last: a Hopper GPU's tensor cores keep two (MMA-Sim, arXiv
    2511.10909), so that 1024 units of 2^-20 outlive 2^15. These numbers allow for four more. fp16 has 2^39 from its
    largest power of two to its smallest, which is subnormal; its normal numbers allow for three, and take many tests.
    """
    most = 2 ** (min(jnp.finfo(dtype).nmant for dtype in (held.activation, held.accumulation)) + 1)
    fp16 = (Numbers(2.0**15, 2.0**-24, min(most, 2048)), Numbers(2.0**15, 2.0**-14, 7))
    if jnp.finfo(held.operand).maxexp <= 16:
        return fp16
    numbers = Numbers(2.0**100, 1.0, min(most, 2**20))
    # M must not pass the largest number of a dtype that partial sums may be rounded to.
    narrow = any(jnp.finfo(dtype).maxexp <= 16 for dtype in (held.activation, held.accumulation))
    return (numbers, *fp16) if narrow else (numbers,)
