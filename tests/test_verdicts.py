"""Every statement that a report judges comes out each way, with the right answer, on planted records."""

import copy
import functools

import numpy as np
import pytest
from accumulation_records import KIVI, KVARN, make_quantizer
from accumulation_records import summary_of as summarize_quantizers
from injection_records import ERROR, error, make_change, make_control, quant, some
from layer_records import make_patching
from plain_records import judge as judge_study
from plain_records import summarize_injection
from scipy import stats
from study_records import align, drift_run, lead, make_run, make_samples

from jaxkv.reporting import rules, statistics
from jaxkv.reporting.rules import OPEN, RULES, Evidence, hold_all


def later(make):
    """Records that are made when they are asked for, not when the tests are collected."""
    return functools.partial(functools.partial, make)


@later
def part(count, agreeing=0, stop="eos"):
    samples = make_samples(count=count, flips=lambda p: (3,) if p >= agreeing else ())
    for sample in samples:
        for arm in sample["arms"].values():
            arm["stop"] = stop
    return [make_run(samples)]


@later
def score(problems, arm, precision):
    return [make_run(make_samples(precision, count=40, right=lead(problems, arm)), precision=precision)]


@later
def fall(kl):
    """FP16 with KL 1e-4, FP32 with what is told for each problem."""
    wide = make_samples("fp32")
    for problem, sample in enumerate(wide):
        sample["teacher_forced"]["kl"] = [kl(problem)] * 20
    return [make_run(make_samples("fp16")), make_run(wide, name="fp32", precision="fp32")]


@later
def flip(wide, count=80, tokens=250):
    """FP16 that flips once a sequence, FP32 that flips where told."""
    narrow = make_samples("fp16", count, tokens, flips=lambda p: (4,))
    found = make_samples("fp32", count, tokens, flips=wide)
    return [make_run(narrow), make_run(found, name="fp32", precision="fp32")]


@later
def drift(**shares):
    return [drift_run(family, *ends) for family, ends in shares.items()]


@later
def patch(**changes):
    return [make_run(make_patching(**changes), experiments=["patching"])]


@later
def through_one_program(count=12, still=False):
    """Plain arms that differ at every step, and aligned ones that do not, or still do."""
    aligned = align(make_samples(count=count, tokens=20 if count > 1 else 1))
    if still:
        for sample in aligned:
            sample["teacher_forced"] = copy.deepcopy(make_samples()[0]["teacher_forced"])
    return [make_run(make_samples()), make_run(aligned, name="aligned")]


@later
def rerun(runs, differing=0):
    """Runs of one problem whose arms were run again, of other bits in some."""
    made = []
    for number in range(runs):
        samples = make_samples(count=1, tokens=2)
        samples[0]["controls"]["cached_rerun"]["bit_equal"][0] = number >= differing
        made.append(make_run(samples, name=f"run {number}"))
    return made


@later
def again(others, arm=0, builds=False):
    """A run and others of its configuration, in each of which six problems are right in one arm alone."""
    made = []
    for number in range(1 + others):
        samples = make_samples(count=6, tokens=2, right=lead(6, arm if number == 1 else 0))
        build = str(number * builds)
        made.append(make_run(samples, name=f"run {number}", fingerprint=f"f{build}", versions={"jax": build}))
    return made


CLAIMS = {  # reproduced, not reproduced, cannot tell
    "C1": (part(120), part(120, 1), part(120, 120, "length")),
    "C2": (score(20, 0, "fp16"), score(20, 1, "fp16"), score(3, 0, "fp16")),
    "C2b": (score(20, 0, "bf16"), score(20, 1, "bf16"), score(3, 0, "bf16")),
    "C3a": (
        fall(lambda p: 1e-12 * (1 + p % 3)), fall(lambda p: 1e-8 * (1 + p % 3)),
        fall(lambda p: 2.6e-12 * 10 ** ((p % 3 - 1) / 2)),
    ),
    "C3b": (flip(lambda p: ()), flip(lambda p: (5,)), flip(lambda p: (), 12, 20)),
    "C3c": (flip(lambda p: ()), flip(lambda p: (5,) if p == 3 else ()), flip(lambda p: (), 3, 20)),
    "C4": (
        drift(mistral=(0.8, 0.2), gemma2=(0.2, 0.2)), drift(mistral=(0.2, 0.2), gemma2=(0.2, 0.2)),
        drift(mistral=(0.8, 0.2)),
    ),
    "C4b": (drift(mistral=(0.8, 0.2)), drift(mistral=(0.8, 0.7)), drift(mistral=(0.8, 0.4))),
    "C5a": (patch(back_state=range(11)), patch(back=range(11), back_state=range(11)), patch(back_state=range(6))),
    "C5b": (through_one_program(still=True), through_one_program(), through_one_program(1)),
    "C6a": (rerun(120), rerun(120, 1), rerun(12)),
    "C6b": (again(80), again(3, 1), again(12)),
    "C6c": (again(80, builds=True), again(3, 1, builds=True), again(12, builds=True)),
}  # fmt: skip
N = 60
CONTROL = some(45, N)
UNIFORM3 = error("uniform", (-1.5, 1.5), std=0.75**0.5, flips=1 / 6)
POINTS = error("points", (0, 0.8660254), std=0.8660254)
MEAN, SPREAD = error(numbers=(0.5, 0), mean=0.5, std=0.0), error("points", (0, 0.5))
ZERO_TWO, PLAIN = error("uniform", (0, 2), 1, 3**-0.5), error("uniform", (-1, 1), std=3**-0.5)
OURS = "kvarn:k2v2,tile=32,first=16"


def two(first, second, specs, names=("first", "second")):
    """Changes with a number of right answers and a KL each."""
    records = make_control(CONTROL)
    for name, spec, (right, kl) in zip(names, specs, (first, second), strict=True):
        records += make_change(name, spec, some(right, N), kl)
    return records


def worse_in_score(specs, names=("first", "second")):
    return tuple(two((right, 1.0), (other, 1.0), specs, names) for right, other in ((5, 42), (42, 5), (30, 30)))


def worse_in_kl(specs, names=("first", "second")):
    return tuple(two((30, kl), (30, other), specs, names) for kl, other in ((3.0, 1.0), (1.0, 3.0), (1.0, 1.0)))


def in_caches_alike(planted):
    for records in planted:
        for record in records:
            record["cache"] = record["cache"] and record["cache"] | {"packed": 1.0, "bits": 2.9}
    return planted


FLIPS, TOKEN = (UNIFORM3, POINTS), (ERROR | {"correlate": "token"}, ERROR)
METHODS = quant("Integer", 2.25, first=16), quant("KVarN", 2.9, first=16, block=32)
NAMED = ("uniform:-1.5,1.5", "uniform:-1,1")
CHANGES = {  # holds, does not hold, cannot tell
    "E1a": tuple(two((right, 1.0), (other, 1.0), FLIPS) for right, other in ((3, 42), (42, 42), (21, 42))),
    "E1b": worse_in_score(FLIPS), "E1c": worse_in_kl(FLIPS),
    "E2a": worse_in_score((MEAN, SPREAD)), "E2b": worse_in_kl((MEAN, SPREAD)),
    "E2c": worse_in_score((ZERO_TWO, PLAIN)), "E2d": worse_in_kl((ZERO_TWO, PLAIN)),
    "E3": tuple(two((right, 1.0), (30, 1.0), (UNIFORM3, PLAIN), NAMED) for right in (45, 10, 36)),
    "E4": tuple(two((right, 1.0), (other, 1.0), (UNIFORM3, PLAIN), NAMED) for right, other in
                ((42, 5), (5, 42), (30, 30))),
    "E5a": worse_in_score(TOKEN), "E5b": worse_in_kl(TOKEN),
    "E6a": in_caches_alike(worse_in_score(METHODS, ("int2", OURS))),
    "E6b": in_caches_alike(worse_in_kl(METHODS, ("int2", OURS))),
}  # fmt: skip


def beside(**rival):
    return make_quantizer(KVARN, extra=0.05, wobble=0.005) + make_quantizer(KIVI, **rival)


QUANTIZERS = {
    "K1a": tuple(make_quantizer(extra=extra) for extra in (0.1, -0.1, 0.0)),
    "K1b": tuple(make_quantizer(growth=growth) for growth in (0.1, -0.1, 0.0)),
    "K2": (beside(extra=0.1), beside(extra=0.02), beside(extra=0.05)),
    "K3a": tuple(make_quantizer(left=left) for left in
                 ((1.0, 0.5, 0.9, 0.3), (1.0, 0.9, 0.5, 0.3), (1.0, 0.9, 0.9, 0.3))),
    "K3b": tuple(make_quantizer(left=(1.0, 0.5, 0.9, least)) for least in (0.3, 0.9, 0.69)),
}  # fmt: skip
PLANTED = CLAIMS | CHANGES | QUANTIZERS


def judge(name, records):
    if name in CLAIMS:
        return judge_study(*records(), name=name)
    config = {"config": {"num_problems": N, "task": "arith"}, "fingerprint": "f"}
    summary = summarize_injection(records, config) if name in CHANGES else summarize_quantizers(records)
    return next(claim for claim in summary["claims"] if claim["id"] == name)


def test_every_rule_is_planted():
    assert list(PLANTED) == list(RULES)


@pytest.mark.parametrize("answer", range(3), ids=["holds", "does not hold", "cannot tell"])
@pytest.mark.parametrize("name", RULES)
def test_a_statement_comes_out_each_way(name, answer):
    words = ("reproduced", "not reproduced") if name in CLAIMS else ("holds", "does not hold")
    claim = judge(name, PLANTED[name][answer])
    assert claim["p"] is not None
    assert claim["verdict"] == (*words, "cannot tell")[answer], claim


def test_a_family_is_harder_to_convince_than_one_statement():
    claims = {"C1": (Evidence(0.02), []), "C2": (Evidence(1.0), [])}
    words = ("reproduced", "not reproduced")
    assert rules.decide({"C1": claims["C1"]}, words)[0]["verdict"] == "reproduced"
    first, second = rules.decide(claims, words)
    assert (first["verdict"], first["p"]) == ("cannot tell", 0.08)
    assert "by itself it would be 'reproduced' (p = 0.04)" in first["figure"][-1]
    assert second["verdict"] == "cannot tell"
    untested = rules.decide(claims | {"C2": (None, [])}, words)
    assert [claim["verdict"] for claim in untested] == ["reproduced", "cannot tell"]


def test_the_family_s_error_is_held():
    """Of many pages of ten statements that are all at their line, one in twenty has a verdict at most."""
    above = np.random.default_rng(0).random((2000, 10))
    wrong = 0
    for page in above:
        claims = {name: (Evidence(p, 1 - p), []) for name, p in zip(RULES, page.tolist(), strict=False)}
        wrong += any(claim["verdict"] != "cannot tell" for claim in rules.decide(claims, ("yes", "no")))
    assert wrong <= stats.binom.ppf(0.99, len(above), 0.05)
    assert wrong > 0


def test_one_of_many_refutes_no_sooner_than_one_alone():
    assert hold_all([Evidence(0.001, 1.0)] * 4).verdict == "holds"
    assert hold_all([Evidence(0.001, 1.0), OPEN]).verdict == "cannot tell"
    refuting = Evidence(1.0, 0.01)
    assert hold_all([refuting]).verdict == "does not hold"
    assert hold_all([refuting, OPEN, OPEN]).verdict == "cannot tell"
    assert hold_all([refuting, refuting], one_refutes=False).verdict == "does not hold"
    assert hold_all([refuting, Evidence(0.01, 1.0)], one_refutes=False).verdict == "cannot tell"
    assert hold_all([]) == OPEN


def test_holm_1979():
    """By hand: the least of four times 4, the next times 3, never below the one before."""
    found = statistics.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
