"""The fit on the page on the law of flips."""

import importlib.util
import pathlib
import sys

import numpy as np
import pytest

ANALYSIS = pathlib.Path(__file__).parents[1] / "analysis"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ANALYSIS))
    try:
        spec = importlib.util.spec_from_file_location("kept_law", ANALYSIS / "law.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["kept_law"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_the_fit_finds_what_was_drawn(script):
    rng = np.random.default_rng(0)
    predicted = np.exp(rng.uniform(0, 5, 400))
    ratio, exponent = script.fit(predicted, rng.poisson(predicted).astype(float))
    for said in (ratio, exponent):
        low, high = map(float, said.split("[")[1].rstrip("]").split(", "))
        assert low < 1 < high
        assert high - low < 0.2
