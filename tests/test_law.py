"""The law of flips against flips that are drawn, counted and sorted, and the fit on its page."""

import dataclasses
import importlib
import pathlib

import numpy as np
import pytest
import reference_metrics as metrics

from jaxkv.experiments.law import NEAR, check_law, predict, sort_flips
from jaxkv.experiments.record_parts import Comparison


def draw(noise: float, steps: int = 20000, vocabulary: int = 40, seed: int = 0, dtype=np.float32):
    """Logits of two arms that differ by independent noise, and their comparison."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(steps, vocabulary)) * 3
    other = logits + rng.normal(size=logits.shape) * noise
    return metrics.compare_logits(logits.astype(dtype), other.astype(dtype))


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.08])
def test_both_forms_meet_the_count(noise):
    found = draw(noise)
    said = predict(found["margin"], found["shift"])
    count = int(found["flip"].sum())
    # Counts scatter by their root; at wide noise a third token takes part, which the law leaves out.
    for rate in (said.linear, said.convolution):
        assert abs(rate * said.steps - count) < 4 * count**0.5 + 0.12 * count
    assert said.shift == pytest.approx(noise * 2**0.5 * (2 / np.pi) ** 0.5, rel=0.03)


def test_margins_of_one_run_and_the_noise_of_another_predict_it():
    margins = draw(1e-6, seed=1)["margin"]
    found = draw(0.03, seed=2)
    said = predict(margins, found["shift"])
    count = int(found["flip"].sum())
    assert abs(said.linear * len(found["flip"]) - count) < 4 * count**0.5 + 0.12 * count


def test_by_hand():
    said = predict([0.0, 0.1, 0.2, 5.0], [0.1, -0.1, 0.3, 0.0])
    # Above each margin lie 3, 1, 1, 0 of 4 shifts; two shifts equal the margin 0.1.
    assert said.convolution == pytest.approx((3 + (1 + 2 / 2) + 1 + 0) / 16 / 2)
    assert said.density == pytest.approx(0.75 / NEAR)
    assert said.shift == pytest.approx(0.125)
    assert said.linear == pytest.approx(0.75 / NEAR * 0.125 / 2)


def test_no_shift_no_flip():
    said = predict([0.0, 0.0, 1.0], [0.0, 0.0])
    assert (said.linear, said.convolution) == (0.0, 0.0)


@pytest.mark.parametrize(("margins", "shifts"), [([], [1.0]), ([1.0], []), ([-1.0], [1.0]), ([np.nan], [0.0])])
def test_what_is_no_margin_is_refused(margins, shifts):
    with pytest.raises(ValueError, match="the law needs"):
        predict(margins, shifts)


def test_flips_are_sorted():
    unit = 2.0**-9
    kinds = sort_flips(
        [True, True, True, True, False], [0.0, 0.0, unit, 3 * unit, 0.0], [unit, 0.0, unit, unit, 0.0], [unit] * 5
    )
    assert kinds == {"tie_in_one": 1, "tie_in_both": 1, "swap_by_one_unit": 1, "more": 1}


def test_flips_of_rounded_logits_are_sorted_as_they_stand():
    found = draw(0.004, dtype=np.float16)
    kinds = sort_flips(found["flip"], found["margin"], found["margin_other"], found["unit"])
    assert sum(kinds.values()) == int(found["flip"].sum())
    assert kinds["tie_in_one"] > 0


NEWER = {"margin_other", "shift", "unit"}


def test_a_condition_is_its_samples_together():
    parts = [draw(0.01, steps=300, seed=seed, dtype=np.float16) for seed in (5, 6)]
    samples = [{name: column.tolist() for name, column in part.items()} for part in parts]
    found = check_law([Comparison(**sample) for sample in samples])
    margins, shifts = (np.concatenate([part[name] for part in parts]) for name in ("margin", "shift"))
    assert found["prediction"] == dataclasses.asdict(predict(margins, shifts))
    assert found["flips"] == sum(int(part["flip"].sum()) for part in parts) == sum(found["kinds"].values())
    assert found["ties"]["reference"] == int((margins == 0).sum())
    assert found["choice_flips"] is None
    chosen = [Comparison(**s, choice_flip=[True] + [False] * 299) for s in samples]
    assert check_law(chosen)["choice_flips"] == 2
    assert check_law([Comparison(**{n: samples[0][n] for n in set(samples[0]) - NEWER})]) is None  # a record of before
    assert check_law([]) is None


def test_the_fit_on_the_page_finds_what_was_drawn(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "analysis")
    script, rng = importlib.import_module("law"), np.random.default_rng(0)
    predicted = np.exp(rng.uniform(0, 5, 400))
    ratio, exponent = script.fit(predicted, rng.poisson(predicted).astype(float))
    for said in (ratio, exponent):
        low, high = map(float, said.split("[")[1].rstrip("]").split(", "))
        assert low < 1 < high
        assert high - low < 0.2
