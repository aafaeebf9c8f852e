"""Reference of the per-token metrics, in float64 on the host; `jaxkv.logits` is tested against it."""

import ml_dtypes
import numpy as np
from scipy.special import log_softmax


def compare_logits(reference: np.ndarray, other: np.ndarray) -> dict[str, np.ndarray]:
    """Compares two arms' finite logits [n, V], of one float dtype, token by token, as `jaxkv.logits` says.

    The lowest id wins a tie; js is at most log 2 (Lin 1991, eq. 3.4 with equal weights). The reference's top two tokens
    swap where margin + shift < 0.
    """
    bits = np.dtype(f"u{reference.dtype.itemsize}")
    equal = np.all(np.ascontiguousarray(reference).view(bits) == np.ascontiguousarray(other).view(bits), axis=1)
    a, b = reference.astype(np.float64), other.astype(np.float64)
    log_p, log_q = log_softmax(a, axis=1), log_softmax(b, axis=1)
    order = np.argsort(-a, axis=1, kind="stable")[:, :2]  # the lowest id first among equals
    first, second = (np.take_along_axis(a, order[:, place, None], 1)[:, 0] for place in (0, 1))
    gap = np.subtract(*(np.take_along_axis(b, order[:, place, None], 1)[:, 0] for place in (0, 1)))
    other = np.partition(b, -2, axis=1)
    kind = ml_dtypes.finfo(reference.dtype)
    return {
        "flip": a.argmax(axis=1) != b.argmax(axis=1),
        "kl": _divergence(log_p, log_q, log_q - log_p),
        "kl_reverse": _divergence(log_q, log_p, log_p - log_q),
        "js": _jensen_shannon(log_p, log_q),
        "max_abs": np.abs(b - a).max(axis=1),
        "mean_abs": np.abs(b - a).mean(axis=1),
        "margin": first - second,
        "margin_other": other[:, -1] - other[:, -2],
        "shift": gap - (first - second),
        "unit": np.ldexp(float(kind.eps), np.frexp(np.maximum(np.abs(first), float(kind.tiny)))[1] - 1),
        "bit_equal": equal,
    }


def _divergence(log_p: np.ndarray, log_q: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """KL(p || q) over the last axis: sum of p * (exp(d) - 1 - d), d = shift = log(q / p), each term of which is >= 0.

    The usual sum of -p * d is equal, since both distributions add up to 1, but cancels: at d near 1e-8 it is noise.
    """
    p = np.exp(log_p)
    small = np.clip(shift, -1e-3, 1e-3)
    series = small**2 * (1 / 2 + small * (1 / 6 + small * (1 / 24 + small / 120)))
    middle = np.minimum(shift, 50.0)
    excess = np.where(np.abs(shift) < 1e-3, series, np.expm1(middle) - middle)
    terms = np.where(shift > 50.0, np.exp(log_q) - p - p * shift, p * excess)
    return terms.sum(axis=-1)


def _jensen_shannon(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2; exactly 0 where p and q are the same."""

    def to_middle(d: np.ndarray) -> np.ndarray:
        """log(m / p) for d = log(q / p)."""
        near = np.log1p(np.expm1(np.minimum(d, 30.0)) / 2)
        return np.where(d > 30.0, np.logaddexp(0.0, d) - np.log(2), near)

    difference = log_q - log_p
    log_m = np.logaddexp(log_p, log_q) - np.log(2)
    return (_divergence(log_p, log_m, to_middle(difference)) + _divergence(log_q, log_m, to_middle(-difference))) / 2
