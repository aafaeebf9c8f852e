"""Rounding or a fault: what the plain programs themselves say, beside the aligned gate.

The aligned regime runs neither the prefill nor the one-row step, so that a fault of theirs passes it. Two measures look
at the plain programs:

* **Distance to float64.** By rounding both arms are about equally far from a float64 run. An arm with a fault is as far
  as the fault is large, which shows best in fp32, where rounding is small.
* **Fall.** From 16 bits to fp32 a rounding difference falls as the dtypes' units do. What does not fall is no rounding.

A verdict is one on the problems that were run. Not seen are:

* what both arms and the float64 run get wrong alike, for which the tests against transformers are;
* a window or a position that no text here reaches;
* a fault below the rounding of fp32, or with texts that are not followed in float64, below `STRAY` times its size.

Which arm has a fault, no ratio says: the float64 run goes through the code of the uncached arm, and errs with it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

EQUAL, ROUNDING, FAULT, CANNOT_TELL = "equal", "rounding", "fault", "cannot tell"
# At any of 13000 steps of honest runs on an H200 and a CPU one arm was at most 8.0 times as far as the other, in bf16;
# in fp32 3.9 times.
FACTOR = 16.0
# Of steps, and steps, beyond FACTOR: one ill-conditioned step is no fault, and no rounding either.
SHARE, FEWEST = 0.1, 3
HUGE = 1000.0  # at one step alone: the first one is all that the prefill's head is seen in
# At 60000 steps of fp32 on an H200 the arms were at most 12 times as far apart as at the median step, in 16 bits 13.
STRAY = 100.0
FLOOR = 1e-13  # RMS below which float64's own rounding decides
UNITS = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-23}
ORDERS = 1.5  # by which a fall may miss that of the units: kernels sum in other orders and dtypes


@dataclasses.dataclass(frozen=True)
class Distance:
    """Both arms' distance to float64 in a condition, over all `steps` of the `sequences`.

    Medians of the RMS over V of the `cached` and the `uncached` arm's logit error, and of their `ratio`; steps at which
    the cached arm is the `nearer` one, and at which one arm is `beyond` FACTOR times as far as the other; and how many
    times as far it is at the `worst`.
    """

    sequences: int
    steps: int
    cached: float
    uncached: float
    ratio: float
    nearer: int
    beyond: int
    worst: float

    @property
    def faulty(self) -> bool:
        """Whether rounding cannot be all."""
        return self.worst > HUGE or self.beyond >= max(FEWEST, SHARE * self.steps)

    @property
    def doubtful(self) -> bool:
        """Whether some step is not as rounding has it."""
        return self.beyond > 0


def strays(found: Distance, apart: float) -> bool:
    """Whether the arms part, at a step without float64 beside it, by more than rounding makes where there is one.

    `apart` is the mean over V of the arms' absolute difference, where it is largest. The arms cannot be farther apart
    than both are from float64, so a fault shows that begins in other texts than those `found` is of: at a window or a
    position that only they reach.
    """
    return apart > STRAY * max(found.cached + found.uncached, FLOOR)


def read_distance(summary: Mapping[str, Any]) -> Distance | None:
    """The distance in a summary of 'divergence', where it lies as plain values; None where there is none."""
    found = summary.get("truth")
    return None if found is None else Distance(**found)


def describe_distance(found: Distance) -> str:
    """In a line for a table or a report."""
    beside = f"cached {found.ratio:.2g} times as far as uncached (median of {found.steps} steps)"
    if found.faulty:
        far = f"one arm is over {FACTOR:g} times as far at {found.beyond} of {found.steps} steps"
        return f"FAULT, not rounding: {far}, {found.worst:.2g} at most; {beside}"
    return f"{beside}, nearer at {found.nearer}"


def measure_distance(samples: Sequence[Mapping[str, Any]]) -> Distance | None:
    """Both arms' distance to float64, from samples of 'divergence'; None if none has one."""
    kept = [s["truth"] for s in samples if s.get("truth") and s["truth"]["cached"]["rms"]]
    if not kept:
        return None
    cached, uncached = (np.concatenate([t[arm]["rms"] for t in kept]) for arm in ("cached", "uncached"))
    ratio = np.maximum(cached, FLOOR) / np.maximum(uncached, FLOOR)
    return Distance(
        sequences=len(kept),
        steps=len(ratio),
        cached=float(np.median(cached)),
        uncached=float(np.median(uncached)),
        ratio=float(np.median(ratio)),
        nearer=int((cached < uncached).sum()),
        beyond=int(((ratio > FACTOR) | (ratio < 1 / FACTOR)).sum()),
        worst=float(np.maximum(ratio, 1 / ratio).max()),
    )


def falls(narrow: str, narrow_size: float, wide_size: float) -> bool | None:
    """Whether a difference, linear in the logits, falls from 'fp16' or 'bf16' to fp32 as rounding must; None of 0."""
    if not narrow_size or narrow not in UNITS:
        return None
    if not wide_size:
        return True
    return abs(math.log10(narrow_size / wide_size) - math.log10(UNITS[narrow] / UNITS["fp32"])) <= ORDERS


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known of a model's plain programs in one precision.

    Attributes:
      differs: whether any plain step has other bits.
      aligned: True if no aligned step differs and enough were tried to set beside the plain ones, False if one does.
      distances: to float64, of this precision and of the model's other ones on the same device and shapes.
      wide: whether an fp32 run of the model is among them, of each sampler: another sampler is another program.
      falls: from 16 bits to fp32, of each 16-bit precision; None where it cannot be told.
      full_gate: whether the plain programs passed the gate with weights that nothing rounds.
      strays: whether, in any of those, the arms part at other steps as at the float64 run's they do not (`strays`).
    """

    differs: bool
    aligned: bool | None
    distances: Sequence[Distance]
    wide: bool
    falls: Sequence[bool | None]
    full_gate: bool
    strays: bool

    @property
    def odd(self) -> bool:
        """Whether some step is not as rounding has it, though no fault is shown."""
        return self.strays or False in self.falls or any(d.doubtful for d in self.distances)


def decide(known: Evidence) -> str:
    """The verdict, one of EQUAL, ROUNDING, FAULT and CANNOT_TELL.

    A fault in any precision is one of the model's code: the others are not called rounding beside it. Rounding takes
    the aligned regime's word that the cache can be exact, and evidence about the plain programs: float64 distances that
    include fp32's, and a fall where two precisions were run; or the full gate. A step that neither explains
    leaves it open.
    """
    if known.aligned is False or any(d.faulty for d in known.distances):
        return FAULT
    if not known.differs:
        return EQUAL
    if known.odd:
        return CANNOT_TELL
    plain = known.full_gate or (known.wide and bool(known.distances))
    return ROUNDING if known.aligned and plain else CANNOT_TELL
