"""The first screen says what records say and no more: eight planted situations, from records alone."""

import pytest
from plain_records import summarize_study, to_typed
from sample_records import make_invalid, make_sample
from study_records import as_torch, make_run, make_samples

from jaxkv.overview.first_screen import Status, describe
from jaxkv.overview.gather import name_precision

COUNT, TOKENS = 12, 20
GATE = {"passed": True, "problems": COUNT, "steps": COUNT * TOKENS, "tile": 8}
FULL = GATE | {"plain": {"passed": True, "steps": 96, "tolerance": 0}}


def gated(samples, gate=GATE, *named):
    """A run of samples whose gate found this."""
    run = make_run(samples, *named)
    run.run["sessions"][0]["gate"] = gate
    return run


def say(*runs):
    study = summarize_study(runs)
    return describe(study["conditions"], study["causes"], to_typed(runs))


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


def change(samples, **parts):
    """The samples with other fields in these parts of each."""
    for sample in samples:
        for part, fields in parts.items():
            sample[part] |= fields
    return samples


def come_near():
    samples = make_samples()
    samples[1]["teacher_forced"]["margin"][3] = 1e-3
    return samples


def answer_otherwise():
    samples = make_samples(flips=parted)
    samples[3]["arms"]["cached"]["scores"]["numeric"]["answer"] = "19"
    return samples


FAULT = "More than rounding is at work: these figures are not of the cache alone."
SITUATIONS = {
    "equal": (
        [gated(make_equal())], Status.EQUAL,
        "the cache changes nothing that was seen: at all 240 steps of 12 texts",
        "Up to 22 % of such texts may still differ",  # 1 - 0.05 ** (1 / 12)
        "same bits in both controls", "flips per token: 0 %", "mean KL, nats: 0,",
        "sequences that part: 0 %, 0 of 12 texts; 95 % upper bound 22 % of texts",
    ),
    "rounding": (
        [gated(make_samples(flips=parted), FULL)], Status.ROUNDING,
        "differ at 240 of 240 steps, and 4 of 12 texts go on in other words",
        "In all of them both arms give the same answer.", "through one program, cache on, none of 12 texts differs",
        "Nothing is broken", "sequences that part: 33 %", ", 8 of 240 tokens in 12 texts, 95 % [",
    ),
    "no evidence on the plain programs": (
        [gated(make_samples(flips=parted))], Status.OPEN,
        "not enough to call it rounding", "--truth_problems=2", "--precision=fp32",
    ),
    "a bug of the cache": (
        [gated(add_truth(make_samples(flips=parted), 50.0, 1.0))], Status.FAULT, FAULT,
        "FAULT, not rounding: one arm is over 16 times as far", "Do not read these figures as rounding",
    ),
    "aligned arms that differ": (
        [make_run(make_samples(), "plain"), make_run(change(make_samples(), shapes={"tile": 8}), "aligned")],
        Status.FAULT, FAULT,
    ),
    "aligned arms alone that differ": ([make_run(change(make_samples(), shapes={"tile": 8}))], Status.FAULT, FAULT),
    "some invalid": (
        [gated([*make_samples()[3:], *break_off(2, 2)], FULL)], Status.ROUNDING,
        "3 of 12 samples of tiny fp16 greedy are invalid and count nowhere (in both arms)", "of 9 texts",
    ),
    "far from a tie": ([gated(make_samples(), FULL)], Status.ROUNDING, "no best token changes, and none could"),
    "near a tie": ([gated(come_near(), FULL)], Status.ROUNDING, "At 1 step two are so near that it could have"),
    "another answer": ([make_run(answer_otherwise())], Status.OPEN, "In 1 of them the answer is another one too."),
    "several": (
        [gated(make_samples(flips=parted), FULL), make_run(make_equal(), "same", "bf16")], Status.ROUNDING,
        "1 of 2 models and precisions; 1 equal bit for bit", "In 1 of 2 runs the cache makes some texts go on in other",
        "sequences that part: 0 – 33 %, most in tiny fp16 greedy: 4 of 12 texts",
    ),
    "several equal": (
        [gated(make_equal(), GATE, name, name) for name in ("fp16", "bf16")], Status.EQUAL,
        "Up to 22 % of the texts of a run may still differ",
    ),
    "no samples": ([make_run([])], Status.NOTHING, "No run here has compared"),
    "unfinished": (
        [make_run(make_samples(), num_problems=20)], Status.OPEN, "UNFINISHED: tiny fp16 greedy has 12 of 20 samples.",
    ),
    "too few problems": (
        [gated(make_samples(count=2), FULL | {"problems": 2})], Status.OPEN, "more problems, through one program too",
    ),
    "PyTorch that differs": (
        [gated(make_equal()), make_run(as_torch(make_samples(flips=parted)), "torch")], Status.OPEN,
        "1 run of PyTorch, whose arms have no gate, is not judged.",
    ),
    "a sampler without float64": (
        [
            gated(add_truth(make_samples("fp32"), 1.0, 1.0), GATE, "fp32", "fp32"),
            gated(change(make_samples("fp32"), sampling={"sampler": "temperature"}), GATE, "drawn", "fp32"),
        ],
        Status.OPEN, "(`--precision=fp32 --sampler=temperature --truth_problems=2`), reported together",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_is_told_as_it_is(name):
    runs, status, *phrases = SITUATIONS[name]
    found = say(*runs)
    tiles = [f"{tile.name}: {tile.value}, {tile.detail}" for tile in found.tiles]
    text = "\n".join([found.ran, found.share, found.means, found.how, found.todo, *tiles])
    assert found.status is status
    assert [phrase for phrase in phrases if phrase not in text] == []
    assert status in (Status.ROUNDING, Status.FAULT) or "rounding" not in found.means
    assert bool(tiles) == (status is not Status.NOTHING)
    # More problems of what is there would not settle it where a sampler has no float64 in fp32.
    assert "more problems" not in found.todo or name != "a sampler without float64"


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
