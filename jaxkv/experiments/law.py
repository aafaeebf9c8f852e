"""A law for flips: how often rounding swaps the two best tokens, from margins and a noise scale alone.

Let m >= 0 be the margin of the reference's two best logits and s the shift of that gap between the arms. The two swap
where m + s < 0. If s is as often up as down, and independent of m, the share of steps with a flip is

    P(flip) = E[P(|s| > m)] / 2                (convolution of the two distributions)
            ~ f(0) * E|s| / 2                  (if the density f of margins is flat near 0 on the scale of s)

f belongs to model and text, E|s| to precision, device, batch, engine or quantizer: from the margins of one fp32 run
and a noise scale the law says how many tokens flip. It leaves out a third token that overtakes both, and a shift that
depends on the margin.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from jaxkv.experiments.record_parts import Comparison

NEAR = 0.5  # logits; the density at 0 is taken as the mean density of margins below this


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the law says of a condition from the margins of so many steps: flips per token by its two forms.

    `density` is f(0), per logit, `shift` E|s|, in logits.
    """

    steps: int
    density: float
    shift: float
    linear: float
    convolution: float


def predict(margins: npt.ArrayLike, shifts: npt.ArrayLike) -> Prediction:
    """Flips per token by the law, from margins [n] of the reference and shifts [k] of the gap.

    They may be of other steps, the margins of an fp32 run of the same model and text. Raises ValueError on no margins
    or shifts, a number that is not finite, or a negative margin.
    """
    m, s = np.asarray(margins, np.float64), np.abs(np.asarray(shifts, np.float64))
    if not m.size or not s.size or not np.isfinite(m).all() or not np.isfinite(s).all() or m.min() < 0:
        raise ValueError("the law needs finite margins of at least 0 and finite shifts")
    density, shift = float(np.mean(m < NEAR)) / NEAR, float(s.mean())
    return Prediction(m.size, density, shift, density * shift / 2, _convolve(m, s))


def _convolve(m: np.ndarray, s: np.ndarray) -> float:
    """E[P(|s| > m)] / 2; a shift that makes a tie of a margin flips it half as often, by the ids of the two."""
    ordered = np.sort(s)
    above = s.size - np.searchsorted(ordered, m, side="right")
    level = s.size - np.searchsorted(ordered, m, side="left") - above
    return float(np.mean(above + np.where(m > 0, level, 0) / 2) / s.size / 2)


COLUMNS = ("margin", "shift", "flip", "margin_other", "unit")  # of a comparison, that the law asks for
KINDS = ("tie_in_one", "tie_in_both", "swap_by_one_unit", "more")


def sort_flips(flip: npt.ArrayLike, margin: npt.ArrayLike, other: npt.ArrayLike, unit: npt.ArrayLike) -> dict[str, int]:
    """Flips [n] by how near the two tokens were, kind -> count.

    `margin` is the reference's, `other` the other arm's own, `unit` the spacing of numbers at the top logit.
    """
    flipped = np.asarray(flip, bool)
    a, b, one = (np.asarray(x, np.float64)[flipped] for x in (margin, other, unit))
    ties = (a == 0).astype(int) + (b == 0)
    near = (ties == 0) & (a <= one) & (b <= one)
    counts = [(ties == 1).sum(), (ties == 2).sum(), near.sum(), ((ties == 0) & ~near).sum()]
    return dict(zip(KINDS, map(int, counts), strict=True))


def check_law(comparisons: Sequence[Comparison]) -> dict[str, Any] | None:
    """`check_steps` of a condition's samples; None if they lack what it needs or have no step."""
    kept = [c for c in comparisons if c.shift]
    if not kept:
        return None
    chosen = [c.choice_flip for c in kept if c.choice_flip is not UNSET]
    choice_flips = int(np.sum([np.sum(c) for c in chosen])) if len(chosen) == len(kept) else None
    return check_steps({name: np.concatenate([getattr(c, name) for c in kept]) for name in COLUMNS}, choice_flips)


def check_steps(columns: Mapping[str, np.ndarray], choice_flips: int | None = None) -> dict[str, Any]:
    """The law beside what was counted along teacher-forced steps, of which each of COLUMNS has an entry.

    Gives `prediction` from the condition's own margins and shifts, argmax `flips` that were counted, their `kinds`
    (`sort_flips`), `ties`, steps with an exact tie in the reference, in the other arm and in both, and `choice_flips`,
    steps at which the arms choose other tokens under the shared noise; None in older records.
    """
    margin, shift, flip, other, unit = (columns[name] for name in COLUMNS)
    ties = {"reference": margin == 0, "other": other == 0, "both": (margin == 0) & (other == 0)}
    return {
        "prediction": dataclasses.asdict(predict(margin, shift)),
        "flips": int(np.sum(flip)),
        "kinds": sort_flips(flip, margin, other, unit),
        "ties": {name: int(np.sum(steps)) for name, steps in ties.items()},
        "choice_flips": choice_flips,
    }
