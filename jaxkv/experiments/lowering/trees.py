"""The order of a sum, recovered from its results alone (FPRev, arXiv 2411.00442). Imports neither jax nor flax.

Two summands are a large M and -M, the others a unit so small that M absorbs any number of them. The units that are
left in the result are those that did not meet M before -M did: the result tells how many summands there are below the
smallest partial sum that has both. These sizes, of enough pairs, give the tree of partial sums. Where a tensor core
adds several summands at once, several join the sum in one step.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Sizes = Callable[[np.ndarray], np.ndarray]  # pairs of summands [n, 2] -> [n] summands below what has both
Add = Callable[[np.ndarray, int], np.ndarray]  # pairs [n, 2], first of the units -> results [rows, n] of their tests
MOST_TESTS = 256  # for a summand: beyond, the order is like none that a kernel for many has
SHOWN = 6  # stretches of sizes that an error names


class NoTreeError(ValueError):
    """The results are those of no fixed order of summation."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """A partial sum as it grows: the first step holds what it begins with, each other what is added at once.

    It begins with a summand, and goes on with the larger of what is added (where they are equal, with that of the
    lowest summand), so that equal trees are equal objects, of which no more than log2(summands) lie inside each other.
    """

    steps: tuple[tuple["Term", ...], ...]

    def __len__(self) -> int:
        return sum(1 for _ in self.leaves())

    def leaves(self) -> Iterator[int]:
        """Its summands, in the order of the steps."""
        for step in self.steps:
            for term in step:
                if isinstance(term, Sum):
                    yield from term.leaves()
                else:
                    yield term


Term = int | Sum  # a summand by its number, or a partial sum


class _Growing:
    """A Sum that is being put together."""

    def __init__(self, leaf: int):
        self.least, self.size, self.steps = leaf, 1, list[list["_Growing"]]()
        self.leaf = leaf

    def freeze(self) -> Term:
        if not self.steps:
            return self.leaf
        return Sum(((self.leaf,), *(tuple(one.freeze() for one in step) for step in self.steps)))


def _join(terms: Sequence[_Growing]) -> _Growing:
    """What is added at once becomes one partial sum."""
    first, *others = sorted(terms, key=lambda term: (-term.size, term.least))
    first.steps.append(sorted(others, key=lambda term: term.least))
    first.least = min(term.least for term in terms)
    first.size = sum(term.size for term in terms)
    return first


def make_sum(*terms: Term | Sequence[Any]) -> Term:
    """The tree in which `terms` are added at once: summands, sums, or sequences that are such terms themselves."""

    def grow(term: Term | Sequence[Any]) -> _Growing:
        if isinstance(term, int | np.integer):
            return _Growing(int(term))
        if not isinstance(term, Sum):
            return _join([grow(one) for one in term])
        total = grow(term.steps[0][0])
        for step in term.steps[1:]:
            total = _join([total, *(grow(one) for one in step)])
        return total

    return grow(terms).freeze()


@dataclasses.dataclass
class _Open:
    """Summands whose order is not known yet: of `size` that come together, or fewer. One of them is the pivot.

    The terms of a step lie behind the pivot: those added to it in that step.
    """

    leaves: list[int]
    size: int
    step: list["_Open"]  # the step of another one that these are added in
    steps: list[list["_Open"]] = dataclasses.field(default_factory=list)
    term: _Growing | None = None

    @property
    def pivot(self) -> int:
        """The middle one: from an end, a sum from the other end would take a test for each two summands."""
        return self.leaves[len(self.leaves) // 2]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(self.pivot, other) for other in self.leaves if other != self.pivot]


def recover_tree(count: int, measure: Sizes) -> Term:
    """How a sum of `count` summands is added up.

    Takes some 2 * count tests, and for n summands that are added at once n * n / 2 more.
    Raises NoTreeError, which says what the first pivot's sizes were, if what is measured fits no tree.
    """
    top = _Open(list(range(count)), count + 1, [])
    opened: list[_Open] = []
    found, tests, said = [top], 0, ""
    while found:
        pairs = [pair for one in found for pair in one.pairs]
        tests += len(pairs)
        if tests > MOST_TESTS * count:
            raise NoTreeError(f"the order is not found in {tests} tests of {count} summands{said}")
        sizes = np.asarray(measure(np.asarray(pairs, np.int64).reshape(-1, 2)))
        said = said or _say_sizes(top, sizes)
        parts = np.split(sizes, np.cumsum([len(one.leaves) - 1 for one in found])[:-1])
        opened += found
        try:
            found = [more for one, part in zip(found, parts, strict=True) for more in _grow(one, part)]
        except NoTreeError as error:
            raise NoTreeError(f"{error}{said}") from None
    for one in reversed(opened):  # what a term is made of was opened after it
        one.term = _Growing(one.pivot)
        for step in one.steps:
            one.term = _join([one.term, *(other.term for other in step if other.term)])
    assert top.term is not None
    return top.term.freeze()


def _grow(one: _Open, sizes: np.ndarray) -> list[_Open]:
    """Orders the leaves by when they meet the pivot. Returns what is to be found out of them."""
    if np.any((sizes < 2) | (sizes > one.size)):
        raise NoTreeError(
            f"summand {one.pivot} is said to meet others in partial sums of {sizes.min()} to {sizes.max()}, "
            f"where they can have 2 to {one.size}"
        )
    others, more, together = np.asarray([leaf for leaf in one.leaves if leaf != one.pivot]), [], 1
    for size in np.unique(sizes).tolist():
        group = others[sizes == size].tolist()
        together += len(group)
        if size == one.size:  # they are added beside this one, not into it
            step = one.step
        elif size == together:
            step = list[_Open]()
            one.steps.append(step)
        else:
            raise NoTreeError(f"{together} summands come together with summand {one.pivot} where {size} are counted")
        more.append(_Open(group, size, step))
        step.append(more[-1])
    return more


def _say_sizes(top: _Open, sizes: np.ndarray) -> str:
    """In stretches of summands of one size."""
    others = [other for _, other in top.pairs]
    begins = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist()]
    ends = [*begins[1:], len(others)]
    told = [f"{others[a]} to {others[b - 1]} at {sizes[a]}" for a, b in zip(begins, ends, strict=True) if a < b]
    middle = max(0, np.searchsorted(ends, top.pivot).item() - SHOWN // 2)
    more = f", and {len(told) - SHOWN} stretches more" if len(told) > SHOWN else ""
    return f"; summand {top.pivot} meets " + ", ".join(told[middle : middle + SHOWN]) + more if told else ""


def find_sizes(tree: Term, pairs: np.ndarray) -> np.ndarray:
    """What a measurement of pairs [n, 2] gives if the sum is added up as the tree says: [n] summands."""
    sizes = np.ones(len(pairs), np.int64)
    if not isinstance(tree, Sum) or not len(pairs):
        return sizes
    terms = [(number, term) for number, step in enumerate(tree.steps) for term in step]
    leaves = [list(term.leaves()) if isinstance(term, Sum) else [term] for _, term in terms]
    lengths = [len(one) for one in leaves]
    flat = np.concatenate(leaves)
    own, step = np.zeros(flat.max() + 1, np.int64), np.zeros(flat.max() + 1, np.int64)
    own[flat] = np.repeat(np.arange(len(terms)), lengths)
    step[flat] = np.repeat([number for number, _ in terms], lengths)
    upto = np.cumsum(np.bincount(step[flat], minlength=len(tree.steps)))
    sizes = upto[step[pairs].max(axis=1)]
    inside = np.flatnonzero(own[pairs[:, 0]] == own[pairs[:, 1]])
    for number in np.unique(own[pairs[inside, 0]]).tolist():
        here = inside[own[pairs[inside, 0]] == number]
        sizes[here] = find_sizes(terms[number][1], pairs[here])
    return sizes


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What the summands of a test are.

    A sum with M must lose the units even if they come as a partial sum, and even if the adder keeps bits beyond the
    accumulator's last: `large` is more than `most` * `unit` by all bits of both. `most` units must be told exactly.
    """

    large: float
    unit: float
    most: int  # units in one test: the other summands are 0

    def __str__(self) -> str:
        return f"2^{math.log2(self.large):g} against units of 2^{math.log2(self.unit):g}, {self.most} in a test"

    def write(self, pairs: Any, first: Any, count: int, xp: types.ModuleType = np) -> Any:
        """The summands of each pair's test, [count, pairs], with units from `first` on; `xp` is NumPy or jax.numpy."""
        places = xp.arange(count)[:, None]
        units = xp.where((places >= first) & (places < first + self.most), self.unit, 0.0)
        return xp.where(places == pairs[:, 0], self.large, xp.where(places == pairs[:, 1], -self.large, units))


def measure_sizes(pairs: np.ndarray, count: int, numbers: Numbers, add: Add) -> np.ndarray:
    """Summands [pairs] below what has both of a pair [pairs, 2], from the units that are left.

    Raises NoTreeError if results are no whole numbers of units, or rows differ.
    """
    below = np.full(len(pairs), count, np.int64)
    for first in range(0, count, numbers.most):
        rows = add(pairs, first)
        units = rows[0] / numbers.unit
        if not np.all(np.isfinite(units)):
            raise NoTreeError("results are not finite: a partial sum has fewer bits of exponent than its summands")
        if not np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape)):
            raise NoTreeError("rows are not added up alike")
        left = np.rint(units)
        if not np.array_equal(left, units):
            raise NoTreeError("units are left in parts: the sum is not taken over these summands alone")
        below -= left.astype(np.int64)
    return below
