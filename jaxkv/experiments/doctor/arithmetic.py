"""In what does a product really compute? Errors against float64 tell operand rounding, accumulators and dropped casts.

Each probe makes inputs with a known exact answer and judges what a function under test returns. None of them looks at
compiled code: they say what the numbers are compatible with.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import DTYPES, DType

MOST_BITS = 24.0  # reported for an error of zero: no more than fp32 can show
FEATURES = 64  # outputs of a probed product
LENGTHS = {"fp32": 256, "fp16": 2048, "bf16": 2048}  # terms of its sum; in a long one fp32's own rounding shows
MANY, SINGLE = 64, 8  # its rows; how many of them are also computed alone
NARROW = ("fp16", "bf16")
Dot = Callable[[np.ndarray, np.ndarray], np.ndarray]  # x [rows, K], w [features, K] -> [rows, features]


def round_mantissa(x: np.ndarray, places: int) -> np.ndarray:
    """float32 x with its mantissa rounded to `places` bits after the leading one (TF32: 10, bf16: 7), to nearest."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, places + 1)), exponent - places - 1).astype(np.float32)


def exact_product(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x W^T in float64 and the root of each sum of squared terms, [rows, features] both."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    return x @ w.T, np.sqrt(np.square(x) @ np.square(w).T)


def relative_error(y: np.ndarray, exact: np.ndarray, norm: np.ndarray) -> float:
    """Root mean square of a product's error over the root of the sum of its squared terms."""
    return float(np.sqrt(np.mean(np.square((y.astype(np.float64) - exact) / norm))))


def _bits(error: float, places: int) -> float | None:
    if not math.isfinite(error):
        return None
    return MOST_BITS if error == 0 else min(MOST_BITS, places - math.log2(error))


def operand_bits(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> float | None:
    """Mantissa bits to which operands would have to be rounded for y = x W^T to be off as much as it is.

    Measured by rounding these operands to 10 bits and scaling: an error half as large is one bit more. Rounding in the
    sum counts in, so true fp32 shows fewer than its 23 bits.

    Args:
      x: [rows, K] float32.
      w: [features, K] float32.
      y: [rows, features], the product under test; None is returned if it is not finite.
    """
    exact, norm = exact_product(x, w)
    rounded = exact_product(round_mantissa(x, 10), round_mantissa(w, 10))[0]
    error, unit = relative_error(y, exact, norm), relative_error(rounded, exact, norm)
    return _bits(error / unit, 10)


@dataclasses.dataclass(frozen=True)
class Cancelling:
    """Sums that nearly cancel, so that rounding on the way shows whatever dtype the known rest is returned in.

    Attributes:
      x: [rows, K].
      w: [features, K].
      exact: [rows, features] float64.
      norm: root of the sum of squared terms.
    """

    x: np.ndarray
    w: np.ndarray
    exact: np.ndarray
    norm: np.ndarray


def make_cancelling(dtype: DType, rows: int, length: int, seed: int, exact_terms: bool) -> Cancelling:
    """Random sums with a term added that cancels them.

    Each (row, feature) has a slot of the sum to itself, scattered among the others, which holds minus the sum rounded
    to the dtype. What is left is of the size of a partial sum's rounding: were it much smaller, two partial sums would
    round to opposite numbers, and their errors cancel.

    Args:
      dtype: a 16-bit dtype.
      rows: how many.
      length: terms of a sum, the cancelling ones included.
      seed: of the numbers.
      exact_terms: whether weights are 1 or -1, so that a product rounded to the dtype is still exact.
    """
    rng = np.random.default_rng([seed, exact_terms])
    length -= FEATURES
    x = rng.standard_normal((rows, length)).astype(dtype)
    w = rng.choice([-1.0, 1.0], (FEATURES, length)) if exact_terms else rng.standard_normal((FEATURES, length))
    w = w.astype(dtype)
    order = rng.permutation(length + FEATURES)
    x = np.concatenate([x, -exact_product(x, w)[0].astype(dtype)], axis=1)[:, order]
    w = np.concatenate([w, np.eye(FEATURES, dtype=dtype)], axis=1)[:, order]
    return Cancelling(x, w, *exact_product(x, w))


def sum_bits(sums: Cancelling, y: np.ndarray) -> float | None:
    """Bits of a sum: -log2 of its error relative to the root of the sum of its squared terms; None if not finite."""
    return _bits(relative_error(y, sums.exact, sums.norm), 0)


def off_grid(x: np.ndarray, dtype: DType) -> float:
    """Share of float32 numbers that are not representable in a 16-bit dtype."""
    return float(np.mean(x.astype(dtype).astype(np.float32) != x))


def _row_by_row(dot: Dot, x: np.ndarray, w: np.ndarray) -> dict[str, np.ndarray]:
    """A product of many rows, and the first rows one at a time."""
    return {"1": np.concatenate([dot(row[None], w) for row in x[:SINGLE]]), str(MANY): dot(x, w)}


def measure_operands(dot: Dot, seed: int = 0) -> dict[str, float | None]:
    """Operand bits of a float32 product, by number of rows (`operand_bits`)."""
    rng = np.random.default_rng([seed, 1])
    x, w = (rng.standard_normal((rows, LENGTHS["fp32"]), np.float32) for rows in (MANY, FEATURES))
    return {rows: operand_bits(x[: len(y)], w, y) for rows, y in _row_by_row(dot, x, w).items()}


def measure_sums(dot: Dot, dtype: str, seed: int = 0) -> dict[str, dict[str, float | None]]:
    """Bits of a 16-bit product's sum by number of rows (`sum_bits`), with and without exact terms.

    Few bits with exact terms tell of partial sums in 16 bits, few bits without them alone of rounded products.
    """
    found: dict[str, dict[str, float | None]] = {"1": {}, str(MANY): {}}
    for terms in ("exact", "rounded"):
        sums = make_cancelling(DTYPES[dtype], MANY, LENGTHS[dtype], seed, terms == "exact")
        for rows, y in _row_by_row(dot, sums.x, sums.w).items():
            part = Cancelling(sums.x, sums.w, sums.exact[: len(y)], sums.norm[: len(y)])
            found[rows][terms] = sum_bits(part, y)
    return found


def cast_inputs(dtype: DType, seed: int = 0) -> dict[str, np.ndarray]:
    """What the cast probe computes with: float32 and 16-bit numbers, and a one that the compiler cannot see."""
    rng = np.random.default_rng([seed, 2])

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    wide = {"x": normal(4096), "a": normal(MANY, 128).astype(dtype), "b": normal(FEATURES, 128).astype(dtype)}
    return wide | {n: normal(4096).astype(dtype) for n in ("p", "q", "r")} | {"one": np.ones((), np.float32)}


def measure_casts(given: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], dtype: DType) -> dict[str, float]:
    """Share of results that were not rounded to the 16-bit dtype where the program says so.

    Args:
      given: `cast_inputs`.
      found: what `cast_program` made of it.
      dtype: the 16-bit dtype.
    """
    chain = ((given["p"] + given["q"]).astype(dtype) * given["r"]).astype(dtype)
    shares = {name: off_grid(found[name], dtype) for name in ("elementwise", "product", "widened")}
    return shares | {"chain": float(np.mean(found["chain"] != chain))}


# The functions under test. Everything is an argument: nothing can be folded, not even a product with one.


def cast_program(given: Mapping[str, jax.Array], dtype: DType) -> dict[str, jax.Array]:
    """Where numbers are to be rounded to 16 bits.

    elementwise: by a cast between float32 operations. product: by one after a product, as in layers.product. widened:
    by a 16-bit operation, whose result is then used in float32. chain: by a 16-bit operation before another.
    """
    one, wide = given["one"], jnp.float32
    product = dot_program(given["a"], given["b"], wide, jax.lax.Precision.HIGHEST)
    return {
        "elementwise": (given["x"] * one).astype(dtype).astype(wide) * one,
        "product": product.astype(dtype).astype(wide) * one,
        "widened": (given["p"] * given["q"]).astype(wide) * one,
        "chain": (given["p"] + given["q"]) * given["r"],
    }


def dot_program(x: jax.Array, w: jax.Array, out: DType, precision: jax.lax.Precision) -> jax.Array:
    """x W^T of [rows, K] and [features, K], returned in `out`."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=out)


def dot_variants(dtype: str) -> dict[str, tuple[DType, jax.lax.Precision]]:
    """What is asked of a product, name -> (result dtype, precision): both precisions, or both result dtypes."""
    highest, default = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT
    if dtype == "fp32":
        return {"highest": (jnp.float32, highest), "default": (jnp.float32, default)}
    return {"fp32": (jnp.float32, highest), dtype: (DTYPES[dtype], highest)}


Given = dict[str, Any]


def make_given(dtypes: Sequence[str], dots: bool = True) -> Given:
    """Arguments of `program`: zeros for the products, which callers replace, and the inputs of the casts."""
    shapes = {(d, variant, rows) for d in dtypes for variant in dot_variants(d) for rows in (1, MANY)}
    return {
        "dots": {
            key: tuple(np.zeros((rows, LENGTHS[key[0]]), DTYPES[key[0]]) for rows in (key[2], FEATURES))
            for key in (shapes if dots else ())
        },
        "casts": {d: cast_inputs(DTYPES[d]) for d in dtypes if d in NARROW},
    }


def program(given: Given) -> Given:
    """Every probe of every dtype, each on operands of its own."""
    dots = {}
    for key, (x, w) in given["dots"].items():
        out, precision = dot_variants(key[0])[key[1]]
        dots[key] = dot_program(x, w, out, precision)
    return {
        "dots": dots,
        "casts": {d: cast_program(args, DTYPES[d]) for d, args in given["casts"].items()},
    }


def measure_arithmetic(
    dtypes: Sequence[str], ours: Callable[[Given], Given], default: Callable[[Given], Given]
) -> dict[str, dict[str, Any]]:
    """All of this module's figures by dtype.

    Args:
      dtypes: 'fp16', 'bf16', 'fp32'.
      ours: `program` compiled with our options.
      default: `program` without products, compiled with XLA's own options.

    Returns:
      fp32: {'operand_bits': {precision: {rows: bits}}}; else {'sum_bits': {result dtype: {rows: {terms: bits}}},
      'casts_dropped': {'ours' or 'default': {where: share}}}.
    """
    given, given_default = jax.device_put((make_given(dtypes), make_given(dtypes, dots=False)))
    held = make_given(dtypes, dots=False)["casts"]

    def dot(dtype: str, variant: str) -> Dot:
        def multiply(x: np.ndarray, w: np.ndarray) -> np.ndarray:
            key = (dtype, variant, len(x))
            return np.asarray(ours(given | {"dots": given["dots"] | {key: (x, w)}})["dots"][key])

        return multiply

    casts = {"ours": jax.device_get(ours(given)["casts"]), "default": jax.device_get(default(given_default)["casts"])}
    figures: dict[str, dict[str, Any]] = {}
    for d in dtypes:
        if d not in NARROW:
            figures[d] = {"operand_bits": {name: measure_operands(dot(d, name)) for name in dot_variants(d)}}
            continue
        figures[d] = {
            "sum_bits": {name: measure_sums(dot(d, name), d) for name in dot_variants(d)},
            "casts_dropped": {options: measure_casts(held[d], found[d], DTYPES[d]) for options, found in casts.items()},
        }
    return figures
