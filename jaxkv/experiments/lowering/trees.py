"""The order of a sum, recovered from its results alone (FPRev, arXiv 2411.00442).

Two summands are a large M and -M, the others a unit so small that M absorbs any number of them. The units that are left
in the result are those that did not meet M before -M did: the result tells how many summands there are below the
smallest partial sum that has both. These sizes, of enough pairs, give the tree of partial sums. Where a tensor core adds
several summands at once, several join the sum in one step.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Union

import numpy as np

Sizes = Callable[[np.ndarray], np.ndarray]  # pairs of summands [n, 2] -> [n] summands below what has both
MOST_TESTS = 256  # for a summand: beyond, the order is like none that a kernel for many has


class NoTreeError(ValueError):
    """The results are those of no fixed order of summation."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """A partial sum as it grows: the first step holds what it begins with, each other what is added at once."""

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


Term = Union[int, Sum]  # a summand by its number, or a partial sum


@dataclasses.dataclass
class _Open:
    """Summands of which the first begins a partial sum that is added in `step`, where `size` have come together."""

    leaves: list[int]
    size: int
    step: list["Term | _Open"]
    steps: "list[list[Term | _Open]]" = dataclasses.field(default_factory=list)


def recover_tree(count: int, measure: Sizes) -> Term:
    """How a sum of `count` summands is added up. Raises NoTreeError if what is measured fits no tree."""
    top = _Open(list(range(count)), count + 1, [])
    found, tests = [top], 0
    while found:
        pairs = [(one.leaves[0], other) for one in found for other in one.leaves[1:]]
        tests += len(pairs)
        if tests > MOST_TESTS * count:
            raise NoTreeError(f"the order is not found in {tests} tests of {count} summands")
        sizes = np.asarray(measure(np.asarray(pairs, np.int64).reshape(-1, 2)))
        ends = np.cumsum([len(one.leaves) - 1 for one in found])
        found = [more for one, part in zip(found, np.split(sizes, ends[:-1]), strict=True) for more in _grow(one, part)]
    return _close(top)


def _grow(one: _Open, sizes: np.ndarray) -> list[_Open]:
    """Orders the leaves by when they meet the first one. Returns what is to be found out of them."""
    if np.any((sizes < 2) | (sizes > one.size)):
        raise NoTreeError(f"summand {one.leaves[0]} is said to meet another in a partial sum of {sizes.max()}")
    one.step.append(one)
    one.steps.append([one.leaves[0]])
    others, more, together = np.asarray(one.leaves[1:]), [], 1
    for size in np.unique(sizes).tolist():
        group = others[sizes == size].tolist()
        together += len(group)
        if size not in (one.size, together):
            raise NoTreeError(f"{together} summands come together where {size} are counted")
        if size == one.size:  # they are added beside this one, not into it
            more.append(_Open(group, size, one.step))
        else:
            one.steps.append([])
            more.append(_Open(group, size, one.steps[-1]))
    return more


def _close(term: "Term | _Open") -> Term:
    if not isinstance(term, _Open):
        return term
    steps = tuple(tuple(map(_close, step)) for step in term.steps)
    return steps[0][0] if len(steps) == 1 else Sum(steps)


def add_up(term: Term, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The sum of values [summands, ...] in that order, rounded to `dtype` after each step and before none.

    What enters in one step is added one after the other. Values are wider than `dtype`: a product of two of its numbers
    is not rounded before it is added, as in a fused multiply-add.
    """
    if not isinstance(term, Sum):
        return values[term].astype(dtype)
    total = values[term.steps[0][0]].astype(dtype) if not isinstance(term.steps[0][0], Sum) else None
    assert total is not None, "a partial sum begins with a summand"
    for step in term.steps[1:]:
        for one in step:
            part = add_up(one, values, dtype) if isinstance(one, Sum) else values[one]
            total = (total.astype(values.dtype) + part).astype(dtype)
    return total


def make_tests(pairs: np.ndarray, count: int, large: float, unit: float, chunk: slice) -> np.ndarray:
    """The summands of each pair's test, [count, pairs] float32: units in `chunk` alone, whose number is told exactly."""
    tests = np.zeros((count, len(pairs)), np.float32)
    tests[chunk] = unit
    tests[pairs[:, 0], np.arange(len(pairs))] = large
    tests[pairs[:, 1], np.arange(len(pairs))] = -large
    return tests


def count_below(pairs: np.ndarray, count: int, left: Sequence[tuple[slice, np.ndarray]]) -> np.ndarray:
    """Summands below what has both of a pair, from the units [pairs] that were left of those of each chunk.

    Raises NoTreeError if they are no whole numbers.
    """
    below = np.full(len(pairs), count, np.int64)
    for _, units in left:
        whole = np.rint(units)
        if not np.array_equal(whole, units):
            raise NoTreeError("units are left in parts: the sum is not taken over these summands alone")
        below -= whole.astype(np.int64)
    return below
