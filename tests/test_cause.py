"""Faults in the plain programs, which the aligned gate cannot see: none passes for rounding, and honest runs do."""

import copy
import dataclasses
import functools

import numpy as np
import pytest
from cases import daily
from judged_runs import of_model
from planted_bugs import (
    first_key_lost,
    narrow_norm,
    narrowed,
    positions_off,
    rotation_off,
    scaled,
    softcap_lost,
    window_off,
)
from small_models import PRESETS, SAMPLERS, VOCAB, small_config, small_state

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Item, RunSpec, plan_batches
from jaxkv.experiments.divergence.cause import (
    CANNOT_TELL,
    EQUAL,
    FAULT,
    ROUNDING,
    Distance,
    Evidence,
    decide,
    falls,
    measure_distance,
)
from jaxkv.experiments.divergence.run import compare_row, run_batch

# Longer than the window, which is 9 here.
ITEM = Item(0, tuple(np.random.default_rng(0).integers(12, VOCAB, 21).tolist()), "")
SPEC = RunSpec(new_tokens=12, bucket=8, control_problems=0, stepwise_problems=0, truth_problems=1)


@functools.cache
def clean_arms(family, precision):
    config = small_config(family, layers=1 + (family in WINDOWED))  # one with a window and one without
    return Arms(config, make_precision(precision), SAMPLERS["greedy"], ())


def run(arms, family):
    """Samples as the experiment records them, less the texts."""
    (batch,) = plan_batches([ITEM], SPEC)
    ran = run_batch(
        arms, arms.prepare(small_state(family, arms.precision.name, layers=arms.config.num_layers)), batch, SPEC
    )
    return [compare_row(arms, ITEM, 0, ran, SPEC)]


def planted(family, precision, program, bug):
    """The arms with one program traced under a bug."""
    clean = clean_arms(family, precision)
    traced = getattr(Arms(clean.config, clean.precision, clean.sampler, clean.stop_ids), program)

    def call(*args, **kwargs):
        with bug():
            return traced(*args, **kwargs)

    arms = copy.copy(clean)
    setattr(arms, program, call)
    return arms


FAULTS = {
    "position in the step": ("cached_loop", positions_off),
    "rotation in the step": ("cached_loop", rotation_off),
    "rotation in the prefill": ("prefill", rotation_off),
    "window in the step": ("cached_loop", window_off),
    "window uncached": ("tile_loop", window_off),
    "mask in the step": ("cached_loop", first_key_lost),
    "mask in the prefill": ("prefill", first_key_lost),
    "softcap in the step": ("cached_loop", softcap_lost),
    "scale in the step": ("cached_loop", lambda: scaled("qk.", 1.01)),
    "K in bf16 in the step": ("cached_loop", lambda: narrowed("k.")),
    "V in bf16 in the prefill": ("prefill", lambda: narrowed("v.")),
    "norm in bf16 in the step": ("cached_loop", narrow_norm),
    "cache written in bf16 uncached": ("tile_loop", lambda: narrowed("v.")),
}
WINDOWED, CAPPED = ("mistral", "gemma2", "gemma3"), ("gemma2",)


def suits(fault, family):
    return (family in WINDOWED or "window" not in fault) and (family in CAPPED or "softcap" not in fault)


@functools.cache
def honest(family, precision):
    return run(clean_arms(family, precision), family)


@pytest.mark.parametrize(
    ("fault", "family"),
    daily(
        [(fault, "mistral" if "window" in fault else "gemma2" if "softcap" in fault else "llama") for fault in FAULTS],
        [(fault, family) for fault in FAULTS for family in PRESETS if suits(fault, family)],
    ),
)
def test_a_fault_is_never_rounding(fault, family):
    """Even if fp16, where it can hide below the rounding, shows nothing of it."""
    program, bug = FAULTS[fault]
    samples = {"fp16": honest(family, "fp16"), "fp32": run(planted(family, "fp32", program, bug), family)}
    assert measure_distance(samples["fp32"]).faulty
    assert {of_model(samples, p) for p in samples} == {FAULT}


FINE = Distance(2, 24, 1e-6, 1e-6, 1.0, 12, 0, 2.0)
BAD = dataclasses.replace(FINE, beyond=5)
PLAIN = Evidence(True, True, [FINE], True, [True], False, False)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, ROUNDING),
        ({"distances": [FINE, BAD]}, FAULT),
        ({"aligned": False}, FAULT),
        ({"aligned": None}, CANNOT_TELL),
        ({"wide": False}, CANNOT_TELL),
        ({"distances": [], "wide": True}, CANNOT_TELL),
        ({"distances": [], "wide": False, "falls": [], "full_gate": True}, ROUNDING),
        ({"falls": [False]}, CANNOT_TELL),
        ({"distances": [FINE, dataclasses.replace(FINE, beyond=1)]}, CANNOT_TELL),
        ({"strays": True}, CANNOT_TELL),
        ({"strays": True, "full_gate": True}, CANNOT_TELL),
        ({"differs": False}, EQUAL),
        ({"differs": False, "distances": [BAD]}, FAULT),
    ],
)
def test_each_verdict_has_its_evidence(changes, verdict):
    assert decide(dataclasses.replace(PLAIN, **changes)) == verdict


def test_one_ill_conditioned_step_is_no_fault():
    assert not dataclasses.replace(FINE, beyond=2).faulty
    assert dataclasses.replace(FINE, beyond=1).doubtful
    assert dataclasses.replace(FINE, beyond=3).faulty
    assert not dataclasses.replace(FINE, steps=1000, beyond=99).faulty
    assert dataclasses.replace(FINE, steps=1000, beyond=1, worst=2000.0).faulty


@pytest.mark.parametrize(
    ("narrow", "sizes", "said"),
    [
        ("fp16", (8e-2, 1e-5), True),  # 3.9 orders, as the units
        ("fp16", (8e-2, 8e-2), False),
        ("fp16", (8e-2, 1e-3), False),
        ("bf16", (6e-1, 1e-5), True),
        ("bf16", (6e-1, 0.0), True),
        ("fp16", (0.0, 1e-5), None),
        ("fp64", (1e-12, 1e-5), None),
    ],
)
def test_a_rounding_falls_as_the_units_do(narrow, sizes, said):
    assert falls(narrow, *sizes) is said


def test_float64_itself_is_no_fault():
    """Beside a float64 run the float64 arms are at its own noise, one of them at 0."""
    zero, noise = {"rms": [0.0] * 5}, {"rms": [7e-16] * 5}
    found = measure_distance([{"truth": {"cached": noise, "uncached": zero}}])
    assert (found.ratio, found.beyond) == (1.0, 0)
