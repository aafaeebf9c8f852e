"""How two generations of one prompt compare."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def free_running(first: Sequence[int], second: Sequence[int]) -> dict[str, Any]:
    """Compares two generations of one prompt, each fed its own tokens.

    Both are followed to the end of the longer one; where the shorter has stopped, its missing token differs.

    Returns:
      diverged: whether the generations differ anywhere.
      first_diverged: index of the first difference, None if there is none.
      differing_after: differing tokens behind that index.
      compared_after: tokens behind that index.
    """
    length, shared = max(len(first), len(second)), min(len(first), len(second))
    differs = np.ones(length, bool)
    differs[:shared] = np.asarray(first[:shared], np.int64) != np.asarray(second[:shared], np.int64)
    if not differs.any():
        return {"diverged": False, "first_diverged": None, "differing_after": 0, "compared_after": 0}
    start = int(differs.argmax())
    after = differs[start + 1 :]
    return {
        "diverged": True,
        "first_diverged": start,
        "differing_after": int(after.sum()),
        "compared_after": len(after),
    }
