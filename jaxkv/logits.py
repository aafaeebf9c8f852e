"""Two arms' logits compared step by step, in float64, where they lie.

The difference of two fp32 arms is near 1e-11 nats of KL, far below what fp32 arithmetic could tell from zero, so the
comparison itself runs with x64 on. A test holds it beside a NumPy reference.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FIELDS = (
    "flip", "kl", "kl_reverse", "js", "max_abs", "mean_abs", "margin", "margin_other", "shift", "unit", "bit_equal",
)  # fmt: skip
DISTANCE_FIELDS = ("flip", "kl", "rms", "max_abs")


def bits(x: jax.Array) -> jax.Array:
    """The array's bits as unsigned integers: NaN equals itself, and -0 differs from +0."""
    return x if x.dtype == bool else jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """KL(p || q) in nats as the sum of p * (exp(d) - 1 - d), d = log q - log p: no term is negative, none cancels."""
    d = log_q - log_p
    small = jnp.clip(d, -1e-3, 1e-3)
    series = small**2 * (1 / 2 + small * (1 / 6 + small * (1 / 24 + small / 120)))
    middle = jnp.minimum(d, 50.0)
    terms = jnp.exp(log_p) * jnp.where(jnp.abs(d) < 1e-3, series, jnp.expm1(middle) - middle)
    far = jnp.exp(log_q) - jnp.exp(log_p) * (1 + d)  # expm1 would overflow where p is nearly 0 beside q
    return jnp.sum(jnp.where(d > 50.0, far, terms))


def _unit(value: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Spacing of a dtype's numbers at a value (a power of two); that of its smallest normal number near 0."""
    kind = jnp.finfo(dtype)
    exponent = jnp.frexp(jnp.maximum(jnp.abs(value), float(kind.tiny)))[1] - 1
    return jnp.ldexp(jnp.asarray(float(kind.eps), jnp.float64), exponent)


def _compare_step(pair: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    """Metrics of one step's logits, reference [V] against other [V]."""
    reference, other = pair
    a, b = reference.astype(jnp.float64), other.astype(jnp.float64)
    log_a, log_b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    log_mean = jnp.logaddexp(log_a, log_b) - jnp.log(2.0)
    # Not top_k, which orders -0 below 0: ties go to the lowest id, as in the arms.
    first = jnp.argmax(a)
    second = jnp.argmax(jnp.where(jnp.arange(a.size) == first, -jnp.inf, a))
    margin, other_top = a[first] - a[second], jax.lax.top_k(b, 2)[0]
    difference = jnp.abs(a - b)
    equal = jnp.all(bits(reference) == bits(other))
    finite = jnp.all(jnp.isfinite(a)) & jnp.all(jnp.isfinite(b))
    # The compiler may evaluate the two softmaxes differently, so that equal logits would be 1e-32 nats apart.
    apart = lambda value: jnp.where(equal, 0.0, value)  # noqa: E731
    return {
        "flip": first != jnp.argmax(b),
        "kl": apart(_kl(log_a, log_b)),
        "kl_reverse": apart(_kl(log_b, log_a)),
        "js": apart((_kl(log_a, log_mean) + _kl(log_b, log_mean)) / 2),
        "max_abs": jnp.max(difference),
        "mean_abs": jnp.mean(difference),
        "margin": margin,
        "margin_other": other_top[0] - other_top[1],
        "shift": b[first] - b[second] - margin,
        "unit": _unit(a[first], reference.dtype),
        "bit_equal": equal,
        "finite": finite,
    }


@jax.jit
def _compare(reference: jax.Array, other: jax.Array) -> dict[str, jax.Array]:
    # A step at a time: float64 copies of [n, V] would be four times the fp16 logits, several times over.
    return jax.lax.map(_compare_step, (reference, other), batch_size=8)


def compare_logits(reference: jax.Array, other: jax.Array, steps: int) -> dict[str, list]:
    """Metrics of the first steps of two arms' logits [n, V] on the same tokens; the uncached arm is the reference.

    Lists of `steps` values: flip (argmax differs), kl = KL(reference || other), kl_reverse and js in nats, max_abs and
    mean_abs logit difference, margin (reference's top-1 minus top-2), margin_other (the other arm's own), shift (by how
    much the gap of the reference's top two is another in the other arm), unit (spacing of the dtype's numbers at the
    reference's top logit), bit_equal. Raises ValueError if the dtypes or shapes differ, or a logit that counts is not
    finite (such a sample is invalid, not equal).
    """
    if reference.shape != other.shape or reference.dtype != other.dtype:
        raise ValueError(f"logits differ in kind: {reference.shape} {reference.dtype}, {other.shape} {other.dtype}")
    return _run(_compare, reference, other, steps, FIELDS)


def _run(program: Any, a: jax.Array, b: jax.Array, steps: int, fields: tuple[str, ...]) -> dict[str, list]:
    with jax.enable_x64(True):
        values = jax.device_get(program(a, b))
    if not np.all(values["finite"][:steps]):
        raise ValueError("a compared logit is not finite")
    return {name: values[name][:steps].tolist() for name in fields}


def _distance_step(pair: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    """Distance of one step's logits [V] from the truth [V]."""
    truth, logits = (x.astype(jnp.float64) for x in pair)
    difference = logits - truth
    kl = _kl(jax.nn.log_softmax(truth), jax.nn.log_softmax(logits))
    return {
        "flip": jnp.argmax(truth) != jnp.argmax(logits),
        "kl": jnp.where(jnp.all(difference == 0), 0.0, kl),
        "rms": jnp.sqrt(jnp.mean(jnp.square(difference))),
        "max_abs": jnp.max(jnp.abs(difference)),
        "finite": jnp.all(jnp.isfinite(truth)) & jnp.all(jnp.isfinite(logits)),
    }


@jax.jit
def _distance(truth: jax.Array, logits: jax.Array) -> dict[str, jax.Array]:
    return jax.lax.map(_distance_step, (truth, logits), batch_size=8)


def measure_distance(truth: jax.Array, logits: jax.Array, steps: int) -> dict[str, list]:
    """Distance of the first steps of an arm's logits [n, V] from a float64 run on the same tokens.

    Lists of `steps` values: flip (argmax differs), kl = KL(truth || arm) in nats, and rms and max_abs over V of the
    logit difference, shifts common to all logits included. Raises ValueError if the truth is not float64, the shapes
    differ, or a logit that counts is not finite.
    """
    if truth.shape != logits.shape or truth.dtype != np.float64:
        raise ValueError(f"no truth for these logits: {truth.shape} {truth.dtype}, {logits.shape} {logits.dtype}")
    return _run(_distance, truth, logits, steps, DISTANCE_FIELDS)
