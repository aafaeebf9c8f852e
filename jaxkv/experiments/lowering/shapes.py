"""What the tree of a sum looks like, in a few numbers and one line. Imports neither jax nor flax."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from jaxkv.experiments.lowering.trees import Sum, Term

Joined = Literal["", "in sequence", "pairwise", "at once", "in turn"]
FEW = 6  # summands that an irregular order is shown by
KEPT = 16  # stretches and partial sums that are kept for a picture
MOST_SAID = 3  # parts that a line names


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of summands that are added step by step, or partial sums that are joined.

    Attributes:
      summands: how many are below it.
      joined: how `times` parts are added up; 'in turn' if one after the other but not alike, and empty for a run.
      times: how many parts are joined, 1 for a run.
      parts: the one that all parts are like, or each if they differ; none for a run.
      steps: of a run: how many summands a step adds, each number once.
      stride: of a run: distance of one summand to the next, -1 if it is the one before; 0 if there is no one distance.
      block: of a run: so many neighbours come one after the other, the next ones `stride` further on.
      order: of a run without a stride: its first summands, from the lowest.
      apart: whether it is a partial sum of its own; else its summands are added to what was before.
    """

    summands: int
    joined: Joined = ""
    times: int = 1
    parts: tuple["Part", ...] = ()
    steps: tuple[int, ...] = (1,)
    stride: int = 1
    block: int = 1
    order: tuple[int, ...] = ()
    apart: bool = True


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """A tree of a sum as a record keeps it.

    Attributes:
      summands: how many are added.
      partial_sums: runs of summands that are added step by step.
      lengths: summands of such a run, each number once, in ascending order.
      at_once: how many summands a step adds, each number once: (1,) without a tensor core.
      strides: distances between a run's summands, as `Part.stride`, each once.
      joined: how the partial sums are joined, from the runs to the whole, e.g. 'in sequence, pairwise'.
      depth: roundings in a row, at most: the product's is not counted.
      part: its parts.
      order: the partial sums in the order in which they are joined, KEPT at most, numbered by their lowest summand.
      stretches: (partial sum, summands) of neighbours from summand 0 on, KEPT at most.
      text: one line for a reader.
      key: equal for equal trees, and for no others.
    """

    summands: int
    partial_sums: int
    lengths: tuple[int, ...]
    at_once: tuple[int, ...]
    strides: tuple[int, ...]
    joined: str
    depth: int
    part: Part
    order: tuple[int, ...]
    stretches: tuple[tuple[int, int], ...]
    text: str
    key: str


def describe(tree: Term) -> TreeShape:
    """What a tree looks like."""
    part = _outline(tree)
    sums = list(_walk(tree)) if isinstance(tree, Sum) else []
    runs = [_outline_run(one.steps[: _run_steps(one)]) for one in sums] or [part]
    order, stretches = _place(sums) if sums else ((0,), ((0, 1),))
    return TreeShape(
        summands=part.summands,
        partial_sums=len(runs),
        lengths=tuple(sorted({run.summands for run in runs})),
        at_once=tuple(sorted({step for run in runs for step in run.steps})),
        strides=tuple(sorted({run.stride for run in runs})),
        joined=", ".join(_list_joins(part)),
        depth=_find_depth(tree),
        part=part,
        order=order,
        stretches=stretches,
        text=_say(part),
        key=hashlib.sha256(_write(tree).encode()).hexdigest()[:16],
    )


def same_order(one: TreeShape, other: TreeShape) -> bool:
    """Whether both sums are added up in the same order. Raises ValueError if they have not the same length."""
    if one.summands != other.summands:
        raise ValueError(f"sums of {one.summands} and of {other.summands} summands have no order in common")
    return one.key == other.key


def _walk(tree: Sum) -> Iterator[Sum]:
    """It and its partial sums, in the order in which they are joined."""
    yield tree
    for step in tree.steps:
        for term in step:
            if isinstance(term, Sum):
                yield from _walk(term)


def _write(term: Term) -> str:
    if not isinstance(term, Sum):
        return str(term)
    return "(" + "+".join(",".join(map(_write, step)) for step in term.steps) + ")"


def _find_depth(term: Term) -> int:
    if not isinstance(term, Sum):
        return 0
    depth = 0
    for step in term.steps[1:]:
        depth = max(depth, *map(_find_depth, step)) + 1
    return depth


def _place(sums: Sequence[Sum]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """`order` and `stretches` of a TreeShape."""
    own = [[term for step in one.steps for term in step if not isinstance(term, Sum)] for one in sums]
    numbers = {one: number for number, one in enumerate(sorted(range(len(own)), key=lambda one: min(own[one])))}
    owner = np.empty(sum(map(len, own)), np.int64)
    for one, leaves in enumerate(own):
        owner[leaves] = numbers[one]
    stretches = itertools.islice(itertools.groupby(owner.tolist()), KEPT)
    return tuple(numbers[one] for one in range(len(own)))[:KEPT], tuple((n, len(list(same))) for n, same in stretches)


def _is_run(step: Sequence[Term]) -> bool:
    return not any(isinstance(term, Sum) for term in step)


def _run_steps(tree: Sum) -> int:
    """Steps before the first one that adds a partial sum."""
    return next((number for number, step in enumerate(tree.steps) if not _is_run(step)), len(tree.steps))


def _outline(term: Term) -> Part:
    if not isinstance(term, Sum):
        return Part(1)
    count = _run_steps(term)
    items = [_outline_run(term.steps[:count])]
    for alone, steps in itertools.groupby(term.steps[count:], _is_run):
        if alone:
            items.append(_outline_run(list(steps), apart=False))
        else:
            items += [_outline_step(step) for step in steps]
    return _fold(items[0], items[1:]) or _list_parts(items)


def _outline_step(step: Sequence[Term]) -> Part:
    """What is added to a partial sum at once, at least one partial sum of it."""
    parts = tuple(_outline(term) for term in step)
    if len(parts) == 1:
        return parts[0]
    kept = parts[:1] if len(set(parts)) == 1 else parts
    return Part(sum(part.summands for part in parts), "at once", len(parts), kept)


def _outline_run(steps: Sequence[Sequence[Term]], apart: bool = True) -> Part:
    """A run of summands; if it is `apart`, what it begins with enters together with the next step."""
    sizes = [len(step) for step in steps]
    if apart and len(sizes) > 1 and sizes[1] > 1:
        sizes[:2] = [sizes[0] + sizes[1]]
    leaves = [term for step in steps for term in step if not isinstance(term, Sum)]
    stride, block = _find_stride(np.asarray(leaves))
    if not stride and apart:
        # The first two can be told by no result: the lower one stands first.
        stride, block = _find_stride(np.asarray([leaves[1], leaves[0], *leaves[2:]]))
    least = min(leaves)
    order = () if stride else tuple(leaf - least for leaf in leaves[:FEW])
    return Part(len(leaves), steps=tuple(sorted(set(sizes))), stride=stride, block=block, order=order, apart=apart)


def _find_stride(leaves: np.ndarray) -> tuple[int, int]:
    """The stride and block of a run, as in Part."""
    apart = np.diff(leaves)
    if not len(apart) or np.all(apart == apart[0]):
        return int(apart[0]) if len(apart) else 1, 1
    jumps = np.flatnonzero(apart != 1)
    block = int(jumps[0]) + 1
    even = np.all((jumps + 1) % block == 0) and len(jumps) == (len(leaves) - 1) // block
    if block > 1 and even and np.all(apart[jumps] == apart[jumps[0]]):
        return int(apart[jumps[0]]) + block - 1, block
    return 0, 1


def _repeat(part: Part, times: int, joined: Joined) -> Part:
    return Part(part.summands * times, "pairwise" if times == 2 else joined, times, (part,))


def _fold(total: Part, rest: Sequence[Part]) -> Part | None:
    """The regular form of a partial sum to which others are added, if it has one."""
    if not rest:
        return total
    doubled = 0
    while doubled < len(rest) and rest[doubled] == (_repeat(total, 2**doubled, "pairwise") if doubled else total):
        doubled += 1
    same = next((number for number, part in enumerate(rest) if part != total), len(rest))
    joins: list[tuple[int, Part]] = []  # how many of the rest can be taken, and what they give
    if doubled > 1:
        joins.append((doubled, _repeat(total, 2**doubled, "pairwise")))
    joins += [(number, _repeat(total, number + 1, "in sequence")) for number in dict.fromkeys((same, 1)) if same]
    if rest[0].joined == "at once" and rest[0].parts == (total,):
        joins.append((1, _repeat(total, rest[0].times + 1, "at once")))
    found = (_fold(joined, rest[number:]) for number, joined in joins)
    return next((folded for folded in found if folded), None)


def _list_parts(items: Sequence[Part]) -> Part:
    """Parts that differ: the longest beginning that has a regular form, then the others, equal neighbours as one."""
    total, kept = items[0], list(items[1:])
    for number in range(len(kept), 0, -1):
        if folded := _fold(items[0], kept[:number]):
            total, kept = folded, kept[number:]
            break
    parts = [total]
    for part, same in itertools.groupby(kept):
        times = len(list(same))
        parts.append(part if times == 1 else _repeat(part, times, "in sequence"))
    return Part(sum(part.summands for part in parts), "in turn", len(parts), tuple(parts))


def _list_joins(part: Part) -> list[str]:
    if not part.joined:
        return []
    inner = _list_joins(part.parts[0]) if len(part.parts) == 1 else []
    return [*inner, part.joined]


def _say(part: Part) -> str:
    if not part.joined:
        return _say_run(part)
    if len(part.parts) > 1:
        return _say_parts(part)
    (one,), joined = part.parts, f"joined {part.joined}"
    if one.joined:
        return f"{_say(one)}; {part.times} of these {joined}"
    return f"{part.times} partial sums of {_say_place(one)}, {one.summands} each, {_say_steps(one)}; {joined}"


def _say_parts(part: Part) -> str:
    if part.times <= MOST_SAID and part.joined == "in turn":
        return "; then ".join([_say(part.parts[0]), *map(_say_later, part.parts[1:])])
    lengths = {one.summands for one in part.parts}
    ends = f"{min(lengths)} to {max(lengths)} summands" if len(lengths) > 1 else f"{min(lengths)} summands each"
    return f"{part.times} parts of {ends}, {'one after the other' if part.joined == 'in turn' else 'at once'}"


def _say_later(part: Part) -> str:
    return _say(part) if part.joined or not part.apart or part.summands == 1 else f"a partial sum of {_say(part)}"


def _say_run(part: Part) -> str:
    if part.summands == 1:
        return "1 summand"
    if part.stride in (0, -1):
        place = "from the last to the first" if part.stride else f"in another order {_say_order(part)}"
        return f"{part.summands} summands, {_say_steps(part)}, {place}"
    if part.stride == 1:
        return f"{part.summands} summands, {_say_steps(part)}"
    return f"{_say_place(part)}, {part.summands} in all, {_say_steps(part)}"


def _say_order(part: Part) -> str:
    return f"({', '.join(map(str, part.order))}{', ...' * (part.summands > FEW)})"


def _say_steps(part: Part) -> str:
    if part.steps == (1,):
        return "in sequence"
    if len(part.steps) == 1:
        times = part.summands // part.steps[0]
        return f"{part.steps[0]} at once" if times == 1 else f"in {times} steps of {part.steps[0]} at once"
    return f"in steps of {part.steps[0]} to {part.steps[-1]} at once"


def _say_place(part: Part) -> str:
    if not part.stride:
        return f"summands in another order {_say_order(part)}"
    if part.block > 1:
        return f"{part.block} neighbours of every {part.stride} summands"
    if part.stride == 1:
        return "neighbouring summands"
    if part.stride == -1:
        return "neighbouring summands from the last"
    return f"every {_ordinal(part.stride)} summand"


def _ordinal(number: int) -> str:
    if number < 0:
        return f"{_ordinal(-number)} from the last"
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
