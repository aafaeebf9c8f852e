"""Verdicts follow the records: each test changes records until a verdict turns, and no figure outlives them."""

import msgspec
import pytest
from plain_records import compare_precisions, find_valid, judge, summarize_study
from study_records import align, as_torch, lead, make_run, make_samples

from jaxkv.experiments import figures
from jaxkv.overview.claims import NOT_REPRODUCED, REPRODUCED
from jaxkv.overview.gather import describe_condition
from jaxkv.reporting import statistics
from jaxkv.reporting.rules import CANNOT_TELL, ILLUSION

SAMPLERS = ("greedy", "temperature", "top_p")


def text_of(claim):
    return "\n".join([*claim["figure"], *claim["control"]])


def test_nothing_is_claimed_without_records():
    study = summarize_study([make_run([], name="empty")])
    assert [claim["id"] for claim in study["claims"]] == [rule.name for rule in ILLUSION]
    assert {claim["verdict"] for claim in study["claims"]} == {CANNOT_TELL}


# C1: all generations diverge.


def test_c1_all_of_a_few_do_not_tell():
    claim = judge(make_run(make_samples(count=12, flips=lambda p: (3,))), name="C1")
    assert claim["verdict"] == CANNOT_TELL
    assert "95 % lower bound 78 %" in text_of(claim)


def cut(samples, problems):
    """The samples, those of some problems cut by length."""
    for sample in samples:
        if sample["problem"] in problems:
            for arm in sample["arms"].values():
                arm["stop"] = "length"
    return samples


@pytest.mark.parametrize(
    ("together", "problems", "verdict"),
    [(1, range(80), CANNOT_TELL), (1, [0], CANNOT_TELL), (1, [1], NOT_REPRODUCED), (0, range(80), REPRODUCED)],
)
def test_c1_what_was_cut_by_length_might_part_yet(together, problems, verdict):
    """Of 80 sequences the first may not part: cut, it says nothing. If others were cut, they count as before."""
    samples = cut(make_samples(count=80, flips=lambda p: (3,) if p >= together else ()), problems)
    claim = judge(make_run(samples), name="C1")
    assert claim["verdict"] == verdict
    said = "cut by length, the arms together, so that they might part yet: 1" in text_of(claim)
    assert said == (together > 0 and 0 in problems)


def test_c1_the_other_precisions_and_regimes_do_not_count():
    agreeing = make_samples(count=120)
    whole = make_run(make_samples(count=120, flips=lambda p: (3,)))
    aligned = make_run(align(make_samples(count=120)), name="aligned")
    torch = make_run(as_torch(make_samples(count=120)), name="torch")
    claim = judge(whole, make_run(agreeing, name="bf16", precision="bf16"), aligned, torch, name="C1")
    assert claim["verdict"] == REPRODUCED
    assert "PyTorch, tiny fp16" in text_of(claim)
    said = "logits differ at 0 of 2400 steps in 120 sequences (95 % upper bound 2.5 % of sequences)"
    assert said in text_of(claim)
    assert judge(aligned, name="C1")["verdict"] == CANNOT_TELL


# C2: more accurate with the cache.


def sampled(sampler, samples):
    for sample in samples:
        sample["sampling"]["sampler"] = sampler
    return samples


def test_c2_conditions_of_a_problem_are_not_independent():
    """Three samplers that say the same are one test, not three, whatever the sign test makes of them."""
    once = [make_run(sampled(s, make_samples(count=40, right=lead(4))), name=s) for s in SAMPLERS]
    pooled = summarize_study(once)["accuracy"]["fp16"]["numeric"]
    alone = summarize_study(once[:1])["accuracy"]["fp16"]["numeric"]
    assert pooled["difference"]["interval"] == alone["difference"]["interval"]
    assert pooled["conditions"] == {"cached_ahead": 3, "uncached_ahead": 0, "equal": 0}
    assert pooled["p"] == alone["p"] == 2 / 16  # four problems that all lean one way, not twelve


def test_c2_counts_a_run_once_and_variants_only_where_they_stand_alone():
    plain = make_run(make_samples(count=40, right=lead(4)), name="fp16")
    variant = make_run(make_samples(count=40, right=lead(9)), name="v", precision="fp16+residual=fp32")
    twice = make_run(make_samples(count=40, right=lead(4)), name="again", fingerprint="fp16")
    pooled = summarize_study([plain, variant, twice])["accuracy"]["fp16"]["numeric"]
    assert [table["only_cached"] for table in pooled["tables"]] == [4]
    pooled = summarize_study([variant])["accuracy"]["fp16"]["numeric"]
    assert [table["only_cached"] for table in pooled["tables"]] == [9]


def test_devices_are_told_apart():
    gpu = {"platform": "gpu", "kind": "H100", "runtime": "cuda"}
    other = make_run(make_samples(count=9, flips=lambda p: (3,)), name="gpu", device=gpu)
    text = text_of(judge(make_run(make_samples()), other, name="C1"))
    assert "tiny fp16 on H100, sequences that part within 20 tokens: greedy 9 of 9" in text
    assert "tiny fp16 on cpu, sequences that part within 20 tokens: greedy 0 of 12" in text


# C3: fp32.


def precisions():
    return make_run(make_samples("fp16")), make_run(make_samples("fp32"), name="fp32", precision="fp32")


def test_c3a_conditions_must_match():
    other = make_run(sampled("top_p", make_samples("fp32")), name="fp32", precision="fp32")
    assert judge(make_run(make_samples()), other, name="C3a")["verdict"] == CANNOT_TELL


@pytest.mark.parametrize("name", ["C3b", "C3c"])
def test_c3_a_zero_is_worth_its_bound(name):
    few = judge(make_run(make_samples("fp32"), precision="fp32"), name=name)
    assert few["verdict"] == CANNOT_TELL
    assert "0 of 240 in 12 problems (95 % upper bound 22 % of problems)" in text_of(few)
    wide = make_run(make_samples("fp32", count=80, tokens=250), "wide", precision="fp32")
    calm = make_run(make_samples("fp16", count=80, tokens=250), "narrow", precision="fp16")
    for runs in ([wide], [wide, calm]):
        claim = judge(*runs, name=name)
        assert claim["verdict"] == CANNOT_TELL
        assert "this tests nothing" in text_of(claim)


def test_c3_one_flip_rounds_to_nothing_and_is_not_nothing():
    many = make_samples("fp32", count=80, tokens=250)
    many[3]["teacher_forced"]["flip"][7] = True
    flipping = make_run(make_samples("fp16", count=80, tokens=250, flips=lambda p: [4]), "narrow", precision="fp16")
    study = make_run(many, "wide", precision="fp32"), flipping
    assert judge(*study, name="C3b")["verdict"] == REPRODUCED
    assert judge(*study, name="C3c")["verdict"] == NOT_REPRODUCED


def spread(problem, place):
    """One problem of FP32 with flips at these steps."""
    return lambda p: place if p == problem else ()


def test_c3b_flips_of_one_problem_are_one_trial():
    """Eight flips in one of 80 problems may be one event; that a problem may have so many makes a zero worth less."""
    narrow = make_run(make_samples("fp16", 80, 250, flips=lambda p: [4]), "narrow", precision="fp16")
    many = make_run(make_samples("fp16", 80, 250, flips=lambda p: range(8) if p == 5 else [4]), "narrow")
    none, burst = (
        make_run(make_samples("fp32", 80, 250, flips=spread(3, steps)), "wide", precision="fp32")
        for steps in ((), range(8))
    )
    found = {
        name: judge(*runs, name="C3b")["p"]
        for name, runs in {"none": (none, narrow), "many": (none, many), "burst": (burst, narrow)}.items()
    }
    # 0.05 % of 250 tokens is an eighth of a flip: in 12.5 % of problems, or in 1.6 % where one may have eight.
    tests = {"none": 2 * 0.875**80, "many": 2 * (1 - 0.125 / 8) ** 80}
    holm = {name: min(1.0, p * (2 if p < 0.05 else 1)) for name, p in tests.items()}
    assert found["none"] < 0.05 < found["many"]
    assert found["many"] >= min(1.0, tests["many"])
    assert found["none"] >= holm["none"]
    assert found["burst"] == 1


def test_c3_the_control_is_of_the_same_problems():
    """FP16 on other problems, or of another sampler, says nothing of whether FP32 could have flipped."""
    wide = make_run(make_samples("fp32", 80, 250), "wide", precision="fp32")
    narrow = make_samples("fp16", 160, 250, flips=lambda p: [4] if p >= 80 else ())
    claim = judge(wide, make_run(narrow, "narrow"), name="C3c")
    assert "this tests nothing" in text_of(claim)
    assert "FP16, the same problems: tokens that flip: 0 of 20000" in text_of(claim)
    other = sampled("top_p", make_samples("fp16", 80, 250, flips=lambda p: [4]))
    assert "this tests nothing" in text_of(judge(wide, make_run(other, "narrow"), name="C3c"))


@pytest.mark.parametrize(("margin", "said"), [(0.0, (1, 0, 0)), (2e-6, (0, 1, 0)), (1.0, (0, 0, 1))])
def test_c3b_says_how_near_the_flipped_tokens_were(margin, said):
    samples = make_samples("fp32", flips=lambda problem: [4] if problem == 2 else ())
    samples[2]["teacher_forced"]["margin"][4] = margin
    for sample in samples:
        steps = len(sample["teacher_forced"]["flip"])
        sample["teacher_forced"] |= {name: [2e-6] * steps for name in ("margin_other", "shift", "unit")}
    text = text_of(judge(make_run(samples, precision="fp32"), name="C3b"))
    ties, swaps, more = said
    assert f"of the flips of all FP32 runs {ties} are at exact ties, {swaps} swaps by one unit, {more} more" in text
    assert "running free, 1 of 12" in text


def batched(size, precision, count=12, change=lambda samples: samples, name=None):
    decoding = {"new_tokens": 20, "tile": None, "batch_size": size, "padding": "left"}
    samples = change(make_samples(precision, count=count))
    return make_run(samples, name or f"b{size}-{precision}", precision, decoding=decoding)


def test_the_same_problems_in_other_batches_count_once_and_pair_with_their_own():
    runs = [batched(size, precision, count) for size, count in ((1, 4), (8, 12)) for precision in ("fp16", "fp32")]
    study = summarize_study(runs)
    assert study["flips"]["fp32"]["problems"] == study["flips"]["fp32"]["problems_with_flip"]["total"] == 12
    assert study["flips"]["fp32"]["flips"]["total"] == 12 * 20
    assert study["flips"]["fp32"]["conditions"] == 1
    assert [(p["narrow"], p["wide"]) for p in study["precisions"]] == [("b1-fp16", "b1-fp32"), ("b8-fp16", "b8-fp32")]
    titles = list(figures.group_panels(study))
    assert titles == ["tiny, greedy, batch 8", "tiny, greedy, batch 1"]
    text = text_of(next(claim for claim in study["claims"] if claim["id"] == "C1"))
    assert "in batches of 1, sequences that part" in text
    assert "in batches of 8, sequences that part" in text


def test_cells_of_two_frameworks_are_of_one_batch_size():
    def torch(size, count):
        return batched(size, "fp16", count, as_torch, f"b{size}-torch")

    study = summarize_study([batched(1, "fp16", 4), batched(8, "fp16"), torch(1, 3), torch(8, 6)])
    found = [(group["batch_size"], group["problems"], set(group["runs"].values())) for group in study["parity"]]
    assert found == [(8, 6, {"b8-fp16", "b8-torch"}), (1, 3, {"b1-fp16", "b1-torch"})]
    names = [figures.name_group(group, study["parity"]) for group in study["parity"]]
    assert names == ["tiny fp16, greedy, batch 8", "tiny fp16, greedy, batch 1"]


def drawn(run, **sampling):
    """The run with other parameters of its sampler."""
    for record in run.records:
        usual = {"sampler": "temperature", "seed": 0, "temperature": 0.7, "top_k": None, "top_p": None}
        record["sampling"] = usual | sampling
    return run


def test_runs_that_draw_otherwise_are_neither_paired_nor_dropped():
    narrow, wide = drawn(batched(8, "fp16")), drawn(batched(8, "fp32"), temperature=1.3)
    assert summarize_study([narrow, wide])["precisions"] == []
    assert len(summarize_study([narrow, drawn(batched(8, "fp32"))])["precisions"]) == 1
    torch = drawn(batched(8, "fp16", 6, as_torch, "torch"), top_p=0.9)
    assert summarize_study([narrow, torch])["parity"] == []
    assert len(summarize_study([narrow, drawn(torch)])["parity"]) == 1
    assert summarize_study([wide, drawn(batched(8, "fp32", name="cool"))])["flips"]["fp32"]["conditions"] == 2


def test_an_unfinished_copy_does_not_replace_a_run():
    whole, part = batched(8, "fp32"), batched(8, "fp32", 3, name="part")
    part.run["fingerprint"] = whole.run["fingerprint"]
    for runs in ([whole, part], [part, whole]):
        assert summarize_study(runs)["flips"]["fp32"]["problems"] == 12


def test_other_problems_in_other_batches_count_too():
    other = batched(1, "fp32", 4)
    for sample in other.records:
        sample["problem"] += 100
        sample["key"] = ["divergence", sample["problem"]]
    assert summarize_study([batched(8, "fp32"), other])["flips"]["fp32"]["problems"] == 16


# C6: deterministic.


def test_c6_needs_another_process_or_run():
    samples = make_samples(right=lead(6))
    once = make_run(samples, name="a", fingerprint="same")
    assert judge(once, name="C6b")["verdict"] == CANNOT_TELL
    again = make_run(samples, name="b", fingerprint="same")
    assert "1 pair of runs of one configuration, in 1 other process; other tokens in 0" in text_of(
        judge(once, again, name="C6b")
    )
    other = make_run(samples, name="b", fingerprint="another")
    assert judge(once, other, name="C6b")["p"] is None
    level = make_run(make_samples(), name="b", fingerprint="same")
    assert judge(once, level, name="C6b")["verdict"] == CANNOT_TELL


def test_c6_another_build_is_told_from_another_process():
    samples = make_samples(right=lead(6))
    once = make_run(samples, name="a", versions={"jax": "0.10"})
    other = make_run(samples, name="b", versions={"jax": "0.11"})
    study = summarize_study([once, other])
    assert [pair["kind"] for pair in study["replicates"]] == ["build"]
    assert judge(once, other, name="C6b")["p"] is None
    assert judge(once, other, name="C6c")["p"] is not None


def test_c6_a_run_is_one_trial():
    claim = judge(make_run(make_samples()), name="C6a")
    assert claim["verdict"] == CANNOT_TELL  # of one run, however many its steps
    assert "0 of 1 runs (95 % upper bound 95 %), of 12 sequences and 240 steps" in text_of(claim)


def test_c6_pairs_that_share_a_process_are_one_trial():
    """Three runs are three pairs, and two further processes."""
    runs = [make_run(make_samples(), name=name, fingerprint="same") for name in "abc"]
    claim = judge(*runs, name="C6b")
    assert claim["p"] == 1
    assert "3 pairs of runs of one configuration, in 2 other processes" in text_of(claim)


@pytest.mark.parametrize("name", ["C1", "C2", "C3a", "C3b", "C3c", "C6a"])
def test_no_zero_without_its_bound(name):
    study = (*precisions(), make_run(align(make_samples()), name="aligned"))
    for line in text_of(judge(*study, name=name)).splitlines():
        if " 0 of " in line and "conditions" not in line:
            assert "upper bound" in line, line


# The statistics.


def test_fisher_is_the_lady_tasting_tea():
    """Fisher 1935: three of four cups told right has a one-sided p of 17/70, two-sided 34/70."""
    assert statistics.fisher_exact([[3, 1], [1, 3]]) == pytest.approx(34 / 70)


def test_an_offset_of_the_logits_ratio_is_exact():
    narrow, wide = (find_valid(run) for run in precisions())
    found = compare_precisions(narrow, wide)
    assert found["metrics"]["kl"]["orders"] == pytest.approx(8)
    assert found["metrics"]["max_abs"]["orders"] == pytest.approx(4)
    same = compare_precisions(narrow, {key: align([msgspec.to_builtins(s)])[0] for key, s in narrow.items()})
    assert same["metrics"]["kl"]["orders"] is None
    assert describe_condition(precisions()[1])["precision"] == "fp32"


# Rounding or a fault.


def measured(precision, distances=(1.0, 1.0), scale=None):
    """Samples with distances to float64 of the cached and the uncached arm, and a size of the arms' difference."""
    samples = make_samples(precision, count=40)
    for sample in samples:
        steps = len(sample["arms"]["cached"]["tokens"])
        filled = {"flip": [False] * steps, "kl": [0.0] * steps, "max_abs": [1.0] * steps}
        sample["truth"] = {
            arm: filled | {"rms": [size] * steps} for arm, size in zip(("cached", "uncached"), distances, strict=True)
        }
        if scale is not None:
            sample["teacher_forced"]["mean_abs"] = [scale] * steps
    return samples


GATE = {"passed": True, "problems": 2, "steps": 200, "tile": 8}


def causes_of(**runs):
    made = [make_run(samples, name=precision, precision=precision) for precision, samples in runs.items()]
    for run in made:
        run.run["sessions"][0]["gate"] = GATE
    return {cause["precision"]: cause["verdict"] for cause in summarize_study(made)["causes"]}


def test_rounding_takes_fp32_beside_float64():
    assert causes_of(fp16=measured("fp16"), fp32=measured("fp32")) == {"fp16": "rounding", "fp32": "rounding"}
    assert causes_of(fp16=measured("fp16")) == {"fp16": "cannot tell"}
    assert causes_of(fp16=make_samples("fp16", count=40)) == {"fp16": "cannot tell"}


@pytest.mark.parametrize("distances", [(1000.0, 1.0), (1.0, 1000.0)])
def test_an_arm_far_from_float64_in_fp32_is_a_fault_of_all_precisions(distances):
    found = causes_of(fp16=measured("fp16"), fp32=measured("fp32", distances))
    assert found == {"fp16": "fault", "fp32": "fault"}


def test_a_fault_beyond_the_float64_problems_is_not_called_rounding():
    """A window that only the texts of later problems reach: the float64 problems say nothing of it, nor the fall."""
    samples = measured("fp32", distances=(1e-6, 1e-6))
    for sample in samples[2:]:
        sample["truth"] = None
    assert causes_of(fp16=measured("fp16", (1e-2, 1e-2)), fp32=samples)["fp32"] == "rounding"
    samples[-1]["teacher_forced"]["mean_abs"][-1] = 1e-3
    found = causes_of(fp16=measured("fp16", (1e-2, 1e-2)), fp32=samples)
    assert found == {"fp16": "cannot tell", "fp32": "cannot tell"}


def test_one_sampler_says_nothing_of_another():
    """Another sampler is another program: rounding there takes an fp32 run of its own beside float64."""

    def of(sampler, precision):
        samples = measured(precision)
        for sample in samples:
            sample["sampling"] = sample["sampling"] | {"sampler": sampler}
        run = make_run(samples, name=f"{precision}-{sampler}", precision=precision)
        run.run["sessions"][0]["gate"] = GATE
        return run

    greedy = [of("greedy", "fp16"), of("greedy", "fp32")]
    drawn = [of("temperature", "fp16"), of("temperature", "fp32")]
    for runs, verdict in ((greedy, "rounding"), ([*greedy, drawn[0]], "cannot tell"), (greedy + drawn, "rounding")):
        (found,) = (cause for cause in summarize_study(runs)["causes"] if cause["precision"] == "fp16")
        assert found["verdict"] == verdict


def test_a_difference_that_does_not_fall_is_not_called_rounding():
    found = causes_of(fp16=measured("fp16", scale=0.01), fp32=measured("fp32", scale=0.01))
    assert found == {"fp16": "cannot tell", "fp32": "cannot tell"}
