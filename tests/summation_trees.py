"""Trees of sums that are added up in known orders."""

import functools

from jaxkv.experiments.lowering.trees import make_sum


def chain(terms):
    return functools.reduce(make_sum, terms)


def pairwise(terms):
    while len(terms) > 1:
        terms = [make_sum(*terms[at : at + 2]) for at in range(0, len(terms), 2)]
    return terms[0]


def core(leaves, step=16):
    """Steps of a tensor core."""
    return functools.reduce(lambda tree, at: make_sum(tree, *leaves[at : at + step]), range(step, len(leaves), step),
                            make_sum(*leaves[:step]))  # fmt: skip


def lanes(count, width):
    return [chain(range(lane, count, width)) for lane in range(width)]


def blocks(count, length):
    return [chain(range(at, at + length)) for at in range(0, count, length)]
