"""The first screen says what records say and no more: eight planted situations, from records alone."""

import pytest
from plain_records import to_typed
from sample_records import make_invalid, make_sample
from study_records import as_torch, make_run, make_samples

from jaxkv.overview.first_screen import Status, describe
from jaxkv.overview.gather import name_precision

COUNT, TOKENS = 12, 20
GATE = {"passed": True, "problems": COUNT, "steps": COUNT * TOKENS, "tile": 8}
FULL = GATE | {"plain": {"passed": True, "steps": 96, "tolerance": 0}}


def with_gate(run, gate):
    run.run["sessions"][0]["gate"] = gate
    return run


def say(*runs):
    return describe([to_typed(run) for run in runs])


def parted(problem):
    return (5, 9) if problem % 3 == 0 else ()


def make_equal():
    """Samples whose logits are the same in every bit."""
    samples = make_samples(count=COUNT)
    for sample in samples:
        sample["teacher_forced"] = sample["controls"]["cached_rerun"]
    return samples


def break_off(cached, uncached):
    """Invalid samples whose arms took so many tokens of TOKENS before they broke off, or all of them."""
    samples = []
    for problem in range(3):
        sample = make_invalid(problem)
        for arm, taken in (("cached", cached), ("uncached", uncached)):
            own = make_sample(tokens=taken)["arms"]["cached"]
            sample["arms"][arm] = own | {"stop": "invalid"}
        samples.append(sample)
    return samples


def add_truth(samples, cached, uncached):
    """Distances to float64 of so many times the difference of the arms."""
    for sample in samples[:2]:
        moved = sample["teacher_forced"]["max_abs"]
        for arm, times in (("cached", cached), ("uncached", uncached)):
            found = {"flip": [False] * TOKENS, "kl": [0.0] * TOKENS, "rms": [times * m for m in moved]}
            sample.setdefault("truth", {})[arm] = found | {"max_abs": found["rms"]}
    return samples


def test_equal():
    found = say(with_gate(make_run(make_equal()), GATE))
    assert found.status is Status.EQUAL
    assert "the cache changes nothing that was seen: at all 240 steps of 12 texts" in found.means
    assert "Up to 22 % of such texts may still differ" in found.how  # 1 - 0.05 ** (1 / 12)
    assert "same bits in both controls" in found.how
    assert [tile.value for tile in found.tiles] == ["0 %", "0 %", "0"]
    assert "0 of 12 texts; 95 % upper bound 22 % of texts" in found.tiles[0].detail


def test_rounding():
    found = say(with_gate(make_run(make_samples(flips=parted)), FULL))
    assert found.status is Status.ROUNDING
    assert "differ at 240 of 240 steps, and 4 of 12 texts go on in other words" in found.means
    assert "through one program, cache on, none of 12 texts differs" in found.how
    assert "Nothing is broken" in found.todo
    assert found.tiles[0].value == "33 %"
    assert found.tiles[1].detail.startswith("8 of 240 tokens in 12 texts, 95 % [")


def test_without_evidence_on_the_plain_programs_it_is_not_called_rounding():
    found = say(with_gate(make_run(make_samples(flips=parted)), GATE))
    assert found.status is Status.OPEN
    assert "not enough to call it rounding" in found.how
    assert "--truth_problems=2" in found.todo
    assert "--precision=fp32" in found.todo
    assert "rounding" not in found.means


def test_a_bug_of_the_cache():
    found = say(with_gate(make_run(add_truth(make_samples(flips=parted), 50.0, 1.0)), GATE))
    assert found.status is Status.FAULT
    assert "More than rounding is at work" in found.means
    assert "FAULT, not rounding: one arm is over 16 times as far" in found.how
    assert found.todo.startswith("Do not read these figures as rounding")


def test_aligned_arms_that_differ_are_a_fault():
    aligned = make_samples(count=COUNT)
    for sample in aligned:
        sample["shapes"]["tile"] = 8
    for runs in ([make_run(make_samples(), "plain"), make_run(aligned, "aligned")], [make_run(aligned, "aligned")]):
        found = say(*runs)
        assert found.status is Status.FAULT
        assert found.means.endswith("More than rounding is at work: these figures are not of the cache alone.")


@pytest.mark.parametrize(
    ("cached", "uncached", "where"),
    [(2, TOKENS, "in the cached arm alone"), (2, 2, "in both arms")],
)
def test_nan(cached, uncached, where):
    found = say(make_run(break_off(cached, uncached)))
    assert found.status is Status.INVALID
    assert found.tiles == ()
    assert f"in all 3 samples a number stopped being finite, {where}." in found.means
    assert ("one arm stays finite" in found.means) == (where != "in both arms")
    assert "3 at resid_pre, layer 8 (cached, inf, from position 5)" in found.how
    assert "--residual=fp32" in found.todo


def test_some_invalid_samples_are_told_and_count_nowhere():
    found = say(with_gate(make_run([*make_samples()[3:], *break_off(2, 2)]), FULL))
    assert found.status is Status.ROUNDING
    assert "3 of 12 samples of tiny fp16 greedy are invalid and count nowhere (in both arms)" in found.means
    assert "of 9 texts" in found.tiles[0].detail


def test_no_near_ties():
    found = say(with_gate(make_run(make_samples()), FULL))
    assert found.status is Status.ROUNDING
    assert "no best token changes, and none could" in found.means
    near = make_samples()
    near[1]["teacher_forced"]["margin"][3] = 1e-3
    assert "At 1 step two are so near that it could have" in say(with_gate(make_run(near), FULL)).means


def test_other_texts_with_the_same_answer():
    samples = make_samples(flips=parted)
    assert "In all of them both arms give the same answer." in say(make_run(samples)).means
    samples[3]["arms"]["cached"]["scores"]["numeric"]["answer"] = "19"
    assert "In 1 of them the answer is another one too." in say(make_run(samples)).means


def test_a_residual_stream_in_fp32_is_never_called_fp16():
    wide = {"name": "fp16", "residual": "float32", "cache": "float16", "accumulation": "float32"}
    run = make_run(make_samples(flips=parted))
    run.run["config"]["precision"] = wide
    found = say(run)
    for text in (found.ran, found.means):
        assert "fp16+residual=fp32" in text
        assert "fp16 " not in text
    assert name_precision({"name": "fp16+residual=fp32", "residual": "float32"}) == "fp16+residual=fp32"
    assert name_precision({"name": "fp32", "residual": "float32"}) == "fp32"


def test_of_several_runs_the_most_is_named():
    runs = [with_gate(make_run(make_samples(flips=parted)), FULL), make_run(make_equal(), "same", "bf16")]
    found = say(*runs)
    assert found.status is Status.ROUNDING
    assert found.share == "1 of 2 models and precisions; 1 equal bit for bit"
    assert found.tiles[0].value == "0 – 33 %"
    assert found.tiles[0].detail.startswith("most in tiny fp16 greedy: 4 of 12 texts")
    assert "In 1 of 2 runs the cache makes some texts go on in other words" in found.means


def test_nothing_is_said_of_a_run_without_samples():
    found = say(make_run([]))
    assert found.status is Status.NOTHING
    assert found.tiles == ()


def test_unfinished_runs_are_told():
    assert "UNFINISHED: tiny fp16 greedy has 12 of 20 samples." in say(make_run(make_samples(), num_problems=20)).means


def test_advice_names_what_is_missing():
    """A sampler without float64 in fp32 leaves it open: more problems of what is there would not settle it."""
    greedy = make_run(add_truth(make_samples("fp32"), 1.0, 1.0), "fp32", "fp32")
    drawn = make_samples("fp32")
    for sample in drawn:
        sample["sampling"] |= {"sampler": "temperature"}
    found = say(with_gate(greedy, GATE), with_gate(make_run(drawn, "drawn", "fp32"), GATE))
    assert found.status is Status.OPEN
    assert "(`--precision=fp32 --sampler=temperature --truth_problems=2`), reported together" in found.todo
    assert "more problems" not in found.todo


def test_too_few_problems_are_not_called_rounding():
    few = make_samples(count=2)
    found = say(with_gate(make_run(few), FULL | {"problems": 2}))
    assert found.status is Status.OPEN
    assert "more problems, through one program too" in found.todo


def test_several_equal_runs_have_their_bound():
    runs = [with_gate(make_run(make_equal(), name, name), GATE) for name in ("fp16", "bf16")]
    found = say(*runs)
    assert found.status is Status.EQUAL
    assert "Up to 22 % of the texts of a run may still differ" in found.how  # 1 - 0.05 ** (1 / 12)


def test_pytorch_that_differs_is_not_called_equal():
    runs = [with_gate(make_run(make_equal()), GATE), make_run(as_torch(make_samples(flips=parted)), "torch")]
    found = say(*runs)
    assert found.status is Status.OPEN
    assert "1 run of PyTorch, whose arms have no gate, is not judged." in found.how
