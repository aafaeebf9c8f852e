"""In what does a product really compute? Errors against float64 tell operand rounding, accumulators and dropped casts.

Each probe makes inputs with a known exact answer and judges what a function under test returns. None of them looks at
compiled code: they say what the numbers are compatible with.
"""

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

    Takes float32 x [rows, K] and w [features, K], and y [rows, features]; None if that is not finite. Measured by
    rounding these operands to 10 bits and scaling: an error half as large is one bit more. Rounding in the sum counts
    in, so true fp32 shows fewer than its 23 bits.
    """
    exact, norm = exact_product(x, w)
    rounded = exact_product(round_mantissa(x, 10), round_mantissa(w, 10))[0]
    error, unit = relative_error(y, exact, norm), relative_error(rounded, exact, norm)
    return _bits(error / unit, 10)


def make_cancelling(dtype: DType, rows: int, length: int, exact_terms: bool) -> tuple[np.ndarray, np.ndarray]:
    """Operands [rows, length] and [features, length] in a 16-bit dtype, whose random sums nearly cancel.

    Rounding on the way then shows whatever dtype the known rest is returned in. Each (row, feature) has a slot of the
    sum to itself, scattered among the others, which holds minus the sum rounded to the dtype. What is left is of the
    size of a partial sum's rounding: were it much smaller, two partial sums would round to opposite numbers, and their
    errors cancel. With exact terms weights are 1 or -1, so that a product rounded to the dtype is still exact.
    """
    rng = np.random.default_rng([0, exact_terms])
    length -= FEATURES
    x = rng.standard_normal((rows, length)).astype(dtype)
    w = rng.choice([-1.0, 1.0], (FEATURES, length)) if exact_terms else rng.standard_normal((FEATURES, length))
    w = w.astype(dtype)
    order = rng.permutation(length + FEATURES)
    x = np.concatenate([x, -exact_product(x, w)[0].astype(dtype)], axis=1)[:, order]
    return x, np.concatenate([w, np.eye(FEATURES, dtype=dtype)], axis=1)[:, order]


def _row_by_row(dot: Dot, x: np.ndarray, w: np.ndarray) -> dict[str, np.ndarray]:
    """A product of many rows, and the first rows one at a time."""
    return {"1": np.concatenate([dot(row[None], w) for row in x[:SINGLE]]), str(MANY): dot(x, w)}


def measure_operands(dot: Dot) -> dict[str, float | None]:
    """Operand bits of a float32 product, by number of rows (`operand_bits`)."""
    rng = np.random.default_rng([0, 1])
    x, w = (rng.standard_normal((rows, LENGTHS["fp32"]), np.float32) for rows in (MANY, FEATURES))
    return {rows: operand_bits(x[: len(y)], w, y) for rows, y in _row_by_row(dot, x, w).items()}


def measure_sums(dot: Dot, dtype: str) -> dict[str, dict[str, float | None]]:
    """Bits of a 16-bit product's sum by number of rows, with and without exact terms; None if it is not finite.

    They are -log2 of its error relative to the root of the sum of its squared terms. Few bits with exact terms tell of
    partial sums in 16 bits, few bits without them alone of rounded products.
    """
    found: dict[str, dict[str, float | None]] = {"1": {}, str(MANY): {}}
    for terms in ("exact", "rounded"):
        x, w = make_cancelling(DTYPES[dtype], MANY, LENGTHS[dtype], terms == "exact")
        exact, norm = exact_product(x, w)
        for rows, y in _row_by_row(dot, x, w).items():
            found[rows][terms] = _bits(relative_error(y, exact[: len(y)], norm[: len(y)]), 0)
    return found


def cast_inputs(dtype: DType) -> dict[str, np.ndarray]:
    """What the cast probe computes with: float32 and 16-bit numbers, and a one that the compiler cannot see."""
    rng = np.random.default_rng([0, 2])
    shapes = {"x": (4096,), "a": (MANY, 128), "b": (FEATURES, 128)} | dict.fromkeys("pqr", (4096,))
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    narrow = {name: values.astype(dtype) for name, values in drawn.items() if name != "x"}
    return {"x": drawn["x"], **narrow, "one": np.ones((), np.float32)}


def measure_casts(given: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], dtype: DType) -> dict[str, float]:
    """Share of results, of `cast_program` on `cast_inputs`, that were not rounded to 16 bits where it says so."""
    rounded = {name: found[name].astype(dtype).astype(np.float32) for name in ("elementwise", "product", "widened")}
    rounded["chain"] = ((given["p"] + given["q"]).astype(dtype) * given["r"]).astype(dtype)
    return {name: float(np.mean(found[name] != numbers)) for name, numbers in rounded.items()}


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


def make_given(dtypes: Sequence[str]) -> Given:
    """Arguments of `program`: zeros for the products, which callers replace, and the inputs of the casts."""
    return {
        "dots": {
            (d, variant, rows): tuple(np.zeros((n, LENGTHS[d]), DTYPES[d]) for n in (rows, FEATURES))
            for d in dtypes
            for variant in dot_variants(d)
            for rows in (1, MANY)
        },
        "casts": {d: cast_inputs(DTYPES[d]) for d in dtypes if d in NARROW},
    }


def program(given: Given) -> Given:
    """Every probe of every dtype, each on operands of its own."""
    return {
        "dots": {key: dot_program(x, w, *dot_variants(key[0])[key[1]]) for key, (x, w) in given["dots"].items()},
        "casts": {d: cast_program(args, DTYPES[d]) for d, args in given["casts"].items()},
    }


def measure_arithmetic(
    dtypes: Sequence[str], ours: Callable[[Given], Given], default: Callable[[Given], Given]
) -> dict[str, dict[str, Any]]:
    """All of this module's figures by dtype, as the record has them.

    `ours` is `program` compiled with our options, `default` the same without products, with XLA's own options.
    """
    held = make_given(dtypes)
    given = jax.device_put(held)

    def dot(dtype: str, variant: str) -> Dot:
        def multiply(x: np.ndarray, w: np.ndarray) -> np.ndarray:
            key = (dtype, variant, len(x))
            return np.asarray(ours(given | {"dots": given["dots"] | {key: (x, w)}})["dots"][key])

        return multiply

    found = {"ours": ours(given)["casts"], "default": default(given | {"dots": {}})["casts"]}
    found = {options: jax.device_get(casts) for options, casts in found.items()}

    def measure(d: str) -> dict[str, Any]:
        if d not in NARROW:
            return {"operand_bits": {name: measure_operands(dot(d, name)) for name in dot_variants(d)}}
        return {
            "sum_bits": {name: measure_sums(dot(d, name), d) for name in dot_variants(d)},
            "casts_dropped": {
                options: measure_casts(held["casts"][d], casts[d], DTYPES[d]) for options, casts in found.items()
            },
        }

    return {d: measure(d) for d in dtypes}
