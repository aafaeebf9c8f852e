"""How two generations of one prompt compare."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def free_running(first: Sequence[int], second: Sequence[int]) -> dict[str, Any]:
    """Compares two generations of one prompt, each fed its own tokens, up to the end of the longer one.

    Where the shorter has stopped, its missing token differs. `first_diverged` is the index of the first difference;
    behind it `differing_after` of `compared_after` tokens differ.
    """
    length, shared = max(len(first), len(second)), min(len(first), len(second))
    differs = np.ones(length, bool)
    differs[:shared] = np.asarray(first[:shared], np.int64) != np.asarray(second[:shared], np.int64)
    if not differs.any():
        return {"diverged": False, "first_diverged": None, "differing_after": 0, "compared_after": 0}
    start = int(differs.argmax())
    differing, compared = int(differs[start + 1 :].sum()), length - start - 1
    return {"diverged": True, "first_diverged": start, "differing_after": differing, "compared_after": compared}
