"""The page on the law of flips is what the kept steps give."""

import dataclasses
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


@pytest.fixture(scope="module")
def conditions(script):
    return script.load()


def test_the_page_says_what_the_steps_say(script, conditions):
    assert (script.HERE / "README.md").read_text() == script.render(script.make_rows(conditions))


def test_a_changed_step_changes_the_page(script, conditions):
    first = conditions[0]
    samples = [dict(sample) for sample in first.samples]
    samples[0]["flip"] = ~samples[0]["flip"]
    changed = [dataclasses.replace(first, samples=samples), *conditions[1:]]
    assert (script.HERE / "README.md").read_text() != script.render(script.make_rows(changed))


def test_the_fit_finds_what_was_drawn(script):
    rng = np.random.default_rng(0)
    predicted = np.exp(rng.uniform(0, 5, 400))
    ratio, exponent = script.fit(predicted, rng.poisson(predicted).astype(float))
    for said in (ratio, exponent):
        low, high = map(float, said.split("[")[1].rstrip("]").split(", "))
        assert low < 1 < high
        assert high - low < 0.2
