"""Which cases of a product run in every test run; the others are for the night."""

import pytest


def daily(kept, cases):
    """The cases, those that `kept` lacks marked `nightly`. What is kept must be among them."""
    kept, cases = list(kept), list(cases)
    assert all(case in cases for case in kept), [case for case in kept if case not in cases]
    marked = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [
        case if case in kept else pytest.param(*values, marks=pytest.mark.nightly)
        for case, values in zip(cases, marked, strict=True)
    ]
