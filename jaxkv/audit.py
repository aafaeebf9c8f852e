"""Where a sample's numbers stop being finite, and how near they came to it.

A NaN's argmax is the same index in both arms, so an overflow would pass for perfect agreement. Each sample is
therefore run once more through an uncached forward that reports the largest magnitude of every named value: an
overflow that a softcap later hides is found too.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.config import Precision
from jaxkv.rollout import AnyArms, Rollout, Rows

_PART = {"resid_pre": "residual", "resid_mid": "residual", "attn_out": "residual", "mlp_out": "residual"}
_PART |= {"k": "cache", "v": "cache", "qk": "scores", "scores": "scores", "head": "logits", "logits": "logits"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row's audit.

    `invalid` is None, or {'layer', 'op', 'position', 'value'}: the first op in order of execution with a value that is
    not finite, the first absolute position at which it is so there, and 'inf' or 'nan'. `headroom` is {'max_abs',
    'layer', 'op', 'limit'} of the finite value nearest to its dtype's maximum.
    """

    invalid: dict[str, Any] | None
    headroom: dict[str, Any]


def part_of(op: str) -> str:
    """The part of the policy whose dtype holds an operation's output."""
    return _PART.get(op, "activation")


def audit_rows(arms: AnyArms, state: Any, run: Rollout, rows: Rows) -> list[Finding]:
    """Audits each row of a rollout in one uncached forward, over its prompt and the tokens it was fed.

    The last token of a finished row was fed to nobody; that of a row which broke off is where it broke.
    """
    end = rows.prompt + jnp.maximum(run.lengths - (run.nonfinite_step < 0), 0)
    peaks = {
        name.split(" ")[1]: np.asarray(p) for name, p in arms.audit_pass(state, run.tokens, rows.first, end).items()
    }
    return [_find(peaks, arms.precision, row, int(rows.first[row])) for row in range(run.tokens.shape[0])]


def _find(peaks: dict[str, np.ndarray], precision: Precision, row: int, first: int) -> Finding:
    invalid: dict[str, Any] | None = None
    nearest: tuple[float, dict[str, Any]] = (-1.0, {})
    for name, rows in peaks.items():
        op, _, number = name.partition(".")
        layer, values = int(number) if number else None, rows[row]
        finite = np.isfinite(values)
        if invalid is None and not finite.all():
            slot = int(np.argmin(finite))
            value = "nan" if np.isnan(values[slot]) else "inf"
            invalid = {"layer": layer, "op": op, "position": slot - first, "value": value}
        limit = float(jnp.finfo(getattr(precision, part_of(op))).max)
        largest = float(values[finite].max(initial=0.0))
        if largest / limit > nearest[0]:
            nearest = (largest / limit, {"max_abs": largest, "layer": layer, "op": op, "limit": limit})
    return Finding(invalid, nearest[1])
