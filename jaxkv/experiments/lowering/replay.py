"""A sum added up again in the order of its tree, under several rules of rounding. Imports neither jax nor flax."""

from typing import Literal, get_args

import numpy as np

from jaxkv.experiments.lowering.trees import Sum, Term

# fused: a product is not rounded before it is added (a fused multiply-add). rounded: it is. cut25 and so on: what is
# added at once is cut at so many bits below the largest exponent, and the sum cut to fp32, as in tensor cores: of
# Hopper and Blackwell 25, of Turing, Ampere and Ada 24, of Volta 23 (MMA-Sim, arXiv 2511.10909). Of the two that a sum
# begins with, no result tells which was first, but under 'fused' one product is rounded: that of the lower one; under
# 'fused second' of the other.
Rule = Literal["fused", "fused second", "rounded", "cut25", "cut24", "cut23"]
RULES: tuple[Rule, ...] = get_args(Rule)
ZERO = -126  # exponent of a zero in a tensor core


def adds_at_once(tree: Term) -> bool:
    """Whether a step adds several summands, as in a tensor core."""
    if not isinstance(tree, Sum):
        return False
    return any(
        sum(not isinstance(term, Sum) for term in step) > 1 or any(map(adds_at_once, step)) for step in tree.steps
    )


def replay(tree: Term, x: np.ndarray, w: np.ndarray, dtype: np.dtype, rule: Rule, least: int = ZERO) -> np.ndarray:
    """The sums [columns] of x [summands] times w [summands, columns] in the order of `tree`.

    Partial sums have `dtype`. Products are taken in float64: of two fp32 numbers they are exact. Two roundings in a row
    (float64, then fp32) differ from one in some 1 of 2^29 cases. Where a step adds several, they are added one after
    the other unless they are cut. `least` is the smallest exponent of x's and w's own dtype: a smaller number is
    subnormal.
    """
    if rule.startswith("cut"):
        return _Cut(x, w, int(rule.removeprefix("cut")), least).add(tree).astype(dtype)
    wide = np.promote_types(dtype, np.float64)
    products = x[:, None].astype(wide) * w
    if rule == "rounded":
        products = products.astype(dtype).astype(wide)
    return _add(tree, products, dtype, second=rule == "fused second")


def _add(term: Term, products: np.ndarray, dtype: np.dtype, second: bool) -> np.ndarray:
    if not isinstance(term, Sum):
        return products[term]
    first, *rest = (one for step in term.steps for one in step)
    if second and not isinstance(rest[0], Sum):
        first, rest[0] = rest[0], first
    total = _add(first, products, dtype, second).astype(dtype)
    for one in rest:
        total = (total.astype(products.dtype) + _add(one, products, dtype, second)).astype(dtype)
    return total


class _Cut:
    """Sums of a tensor core; what it has summed is added in fp32 where partial sums meet without a summand."""

    def __init__(self, x: np.ndarray, w: np.ndarray, bits: int, least: int):
        self.products = x[:, None].astype(np.float64) * w
        factors = _find_exponents(x, least)[:, None] + _find_exponents(w, least)
        self.exponents = np.where(self.products == 0, 2 * ZERO, factors)  # of the factors: a product is not normalized
        self.bits = bits

    def add(self, term: Term) -> np.ndarray:
        """[columns], float64 that holds fp32."""
        if not isinstance(term, Sum):
            return self.products[term]
        total = np.zeros(self.products.shape[1])
        held = [one for one in term.steps[0] if not isinstance(one, Sum)]  # goes into the next step
        for step in term.steps[1:]:
            parts = [self.add(one) for one in step if isinstance(one, Sum)]
            held += [one for one in step if not isinstance(one, Sum)]
            if held:
                total = self._cut(held, [total, *parts])
            else:
                for part in parts:
                    total = (total + part).astype(np.float32).astype(np.float64)
            held = []
        return total

    def _cut(self, leaves: list[int], others: list[np.ndarray]) -> np.ndarray:
        values = np.concatenate([self.products[leaves], others])
        exponents = np.concatenate([self.exponents[leaves], [_find_exponents(one, ZERO) for one in others]])
        grid = np.exp2(exponents.max(axis=0).astype(np.float64) - self.bits)
        return _cut_to_fp32((np.trunc(values / grid)).sum(axis=0) * grid)


def _find_exponents(values: np.ndarray, least: int) -> np.ndarray:
    return np.where(values == 0, ZERO, np.maximum(np.frexp(values)[1] - 1, least))


def _cut_to_fp32(values: np.ndarray) -> np.ndarray:
    near = values.astype(np.float32)
    far = np.abs(near.astype(np.float64)) > np.abs(values)
    return np.where(far, np.nextafter(near, np.float32(0)), near).astype(np.float64)
