"""Faults in the plain programs, which the aligned gate cannot see: none passes for rounding, and honest runs do.

Forty-two honest conditions: families, precisions and what else a run may change. The largest ratio of their arms'
distances at any step was 1.5 in 16 bits and 3.9 in fp32 on a CPU, and 8.0 and 2.2 in 12272 steps of real models on an
H200; `cause.FACTOR` is 16.
"""

import dataclasses
import functools

import numpy as np
import planted_bugs
import pytest
from cases import daily
from small_models import OTHERS, PRESETS, SAMPLERS, VOCAB, small_config, small_state, unaudited

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Item, RunSpec, plan_batches
from jaxkv.experiments.divergence import cause
from jaxkv.experiments.divergence.cause import CANNOT_TELL, EQUAL, FACTOR, FAULT, ROUNDING, Distance, Evidence
from jaxkv.experiments.divergence.run import compare_row, run_batch

PRECISIONS = ("fp16", "bf16", "fp32")
SPEC = RunSpec(new_tokens=12, bucket=8, control_problems=0, stepwise_problems=0, truth_problems=99)


def make_items(*lengths):
    rng = np.random.default_rng(0)
    return [Item(n, tuple(rng.integers(12, VOCAB, size).tolist()), "") for n, size in enumerate(lengths)]


def run(arms, family, items, spec=SPEC):
    """Samples as the experiment records them, less the texts."""
    state = arms.prepare(small_state(family, arms.precision.name.partition("+")[0], layers=arms.config.num_layers))
    samples = []
    for batch in plan_batches(items, spec):
        ran = run_batch(arms, state, batch, spec)
        samples += [compare_row(arms, item, row, ran, spec) for row, item in enumerate(batch.items)]
    return samples


def of_model(samples_by_precision, precision):
    """The verdict on a precision of a model that was run in these, by what a study makes of their records."""
    distances = {p: cause.measure_distance(samples) for p, samples in samples_by_precision.items()}
    apart = {
        p: np.concatenate([s["teacher_forced"]["mean_abs"] for s in samples])
        for p, samples in samples_by_precision.items()
    }
    sizes = {p: float(found[found > 0].mean()) if found.any() else 0.0 for p, found in apart.items()}
    return cause.decide(
        Evidence(
            differs=any(not all(s["teacher_forced"]["bit_equal"]) for s in samples_by_precision[precision]),
            aligned=True,  # the gate passes: it runs none of these programs
            distances=list(distances.values()),
            wide="fp32" in distances,
            falls=[cause.falls(p, sizes[p], sizes["fp32"]) for p in sizes if p != "fp32" and "fp32" in sizes],
            full_gate=False,
            strays=any(cause.strays(found, float(apart[p].max())) for p, found in distances.items()),
        )
    )


FAULTS = {
    "position in the step": ("cached_loop", planted_bugs.positions_off),
    "rotation in the step": ("cached_loop", planted_bugs.rotation_off),
    "rotation in the prefill": ("prefill", planted_bugs.rotation_off),
    "window in the step": ("cached_loop", planted_bugs.window_off),
    "window uncached": ("tile_loop", planted_bugs.window_off),
    "mask in the step": ("cached_loop", planted_bugs.first_key_lost),
    "mask in the prefill": ("prefill", planted_bugs.first_key_lost),
    "softcap in the step": ("cached_loop", planted_bugs.softcap_lost),
    "scale in the step": ("cached_loop", lambda: planted_bugs.scaled("qk.", 1.01)),
    "K in bf16 in the step": ("cached_loop", lambda: planted_bugs.narrowed("k.")),
    "V in bf16 in the prefill": ("prefill", lambda: planted_bugs.narrowed("v.")),
    "norm in bf16 in the step": ("cached_loop", planted_bugs.narrow_norm),
    "cache written in bf16 uncached": ("tile_loop", lambda: planted_bugs.narrowed("v.")),
}
WINDOWED, CAPPED = ("mistral", "gemma2", "gemma3"), ("gemma2",)


def suits(fault, family):
    return (family in WINDOWED or "window" not in fault) and (family in CAPPED or "softcap" not in fault)


@functools.cache
def clean_arms(family, precision, layers):
    return unaudited(Arms(small_config(family, layers=layers), make_precision(precision), SAMPLERS["greedy"], ()))


@functools.cache
def honest(family, precision, layers):
    return run(clean_arms(family, precision, layers), family, make_items(21))  # longer than the window of 9


@pytest.mark.parametrize(
    ("fault", "family"),
    daily(
        [(fault, "gemma2" if "window" in fault or "softcap" in fault else "llama") for fault in FAULTS],
        [(fault, family) for fault in FAULTS for family in PRESETS if suits(fault, family)],
    ),
)
def test_a_fault_is_never_rounding(fault, family):
    """Even if fp16, where it can hide below the rounding, shows nothing of it."""
    program, bug = FAULTS[fault]
    layers = 1 + (family in WINDOWED and "mask" in fault)  # the second, without a window, sees the first key
    faulty = planted_bugs.planted_arms(clean_arms(family, "fp32", layers), program, bug)
    samples = {"fp16": honest(family, "fp16", layers), "fp32": run(faulty, family, make_items(21))}
    assert cause.measure_distance(samples["fp32"]).faulty
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
    assert cause.decide(dataclasses.replace(PLAIN, **changes)) == verdict


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
    assert cause.falls(narrow, *sizes) is said


def test_float64_itself_is_no_fault():
    """Beside a float64 run the float64 arms are at its own noise, one of them at 0."""
    zero, noise = {"rms": [0.0] * 5}, {"rms": [7e-16] * 5}
    found = cause.measure_distance([{"truth": {"cached": noise, "uncached": zero}}])
    assert (found.ratio, found.beyond) == (1.0, 0)


# Honest runs.


def run_otherwise(family, precision, lengths=(21,), sampler="greedy", parts=(), layers=2, **changes):
    """A run that the settings tell from the usual one: a row of 21 tokens, greedy, padded, two layers."""
    policy = make_precision(precision, **({} if precision == "fp32" else dict.fromkeys(parts, "fp32")))
    arms = unaudited(Arms(small_config(family, layers=layers), policy, SAMPLERS[sampler], ()))
    return run(arms, family, make_items(*lengths), dataclasses.replace(SPEC, **changes))


# Windows are of 9 tokens.
OTHER = {
    "llama": {"lengths": (21, 21, 21), "sampler": "temperature", "batch_size": 3, "seed": 5},
    "llama3": {"lengths": (1,), "bucket": 32},
    "mistral": {"uncached_length": "bucket:8"},
    "gemma2": {"lengths": (21, 5, 14), "sampler": "top_k", "batch_size": 3, "padding": "left"},
    "gemma3": {"lengths": (48,), "sampler": "top_p"},
    "qwen2": {"lengths": (30,), "uncached": "stepwise"},
    "qwen3": {"lengths": (33,), "parts": ("residual", "scores")},
}
WIDER = {"parts": ("residual", "scores"), "layers": 1}  # in fp32 the programs are those of the faults above


@pytest.mark.parametrize(
    ("family", "setting"),
    daily(
        [("llama", WIDER)],
        [("llama", WIDER), *((family, setting) for family in PRESETS | OTHERS for setting in ({}, OTHER[family]))],
    ),
)
def test_an_honest_run_is_no_fault(family, setting):
    samples = {precision: run_otherwise(family, precision, **setting) for precision in PRECISIONS}
    for precision, found in samples.items():
        distance = cause.measure_distance(found)
        assert distance.worst < FACTOR
        assert 1 / 4 < distance.ratio < 4
        equal = all(all(s["teacher_forced"]["bit_equal"]) for s in found)  # kernels of a CPU may round alike
        assert of_model(samples, precision) == (EQUAL if equal else ROUNDING)
