"""The summary and its reports: counts, intervals, wording, invalid samples, and life without jax."""

import json
import random
import re

import pytest
from plain_records import summarize
from sample_records import grade, make_invalid, make_sample
from shown import as_markdown, show_by

from jaxkv.experiments.divergence.record import CONTROLS
from jaxkv.experiments.divergence.report import describe_setting, write_divergence
from jaxkv.experiments.reports import REPORTS
from jaxkv.reporting.format import format_number, format_percent, format_share
from jaxkv.reporting.metrics import free_running
from jaxkv.reporting.shares import clustered_share, share

CONFIG = {
    "model": {"name": "tiny-llama2", "layers": 2},
    "precision": {"name": "fp16", "param": "float16", "residual": "float16", "softmax": "float32"},
    "data": "gsm8k test, sha256 12ab",
    "prompt": "8-shot",
}
SESSION = {"started": "2026-01-01T00:00:00+00:00", "done_before": 0, "device": "cpu", "packages": {"jax": "0.10.2"}}
RUN = {"format": 1, "config": CONFIG, "fingerprint": "f00d", "sessions": [SESSION]}


def build(problem, flips=(), tokens=100, correct=(True, True), diverged=None):
    """A sample with flips at the given steps, whose free run diverges at `diverged`, by default the first flip."""
    sample = make_sample(problem, tokens)
    comparison = sample["teacher_forced"]
    for step in flips:
        comparison["flip"][step] = True
        comparison["margin"][step] = 0.25
    comparison["bit_equal"][0], comparison["max_abs"][0] = 0 not in flips, 0.5 * (0 in flips)
    first = min(flips, default=None) if diverged is None else diverged
    if first is not None:
        after = tokens - first - 1
        own = sample["arms"]["uncached"]["tokens"]
        for step in range(first, first + 1 + after // 2):
            own[step] += 1000
        sample["free_running"] = free_running(own, sample["arms"]["cached"]["tokens"])
    grade(sample, correct, strict="extraction_only")
    return sample


def sample_run():
    samples = [build(i) for i in range(9)]
    samples += [build(9, flips=(20,)), build(10, flips=(3, 50), correct=(True, False))]
    samples += [build(11, flips=(60,), correct=(False, True)), build(12, correct=(False, False))]
    return samples


as_text, *_ = show_by(lambda summary: write_divergence(summary | {"setting": describe_setting(RUN)}))


def render_markdown(summary, run):
    return as_markdown(REPORTS["divergence"].write(summary | {"setting": describe_setting(run)}))


def test_rates_are_kept_apart():
    summary = summarize(sample_run(), RUN)
    forced, free = summary["teacher_forced"], summary["free_running"]
    assert (forced["flips"]["count"], forced["flips"]["total"]) == (4, 1300)
    low, high = forced["flips"]["interval"]
    assert low < 4 / 1300 < high
    assert (forced["sequences_with_flip"]["count"], forced["sequences_with_flip"]["total"]) == (3, 13)
    assert (free["diverged"]["count"], free["diverged"]["total"]) == (3, 13)
    assert free["expected"]["rate"] == pytest.approx(1 - (1 - 4 / 1300) ** 100)
    assert free["first_flip_agrees"] == {"count": 13, "total": 13}
    assert free["first_diverged"]["quartiles"][1] == 20
    assert free["differing_after"]["rate"] == pytest.approx((39 + 48 + 19) / (79 + 96 + 39))
    assert forced["kl"]["mean"] == 0.5
    assert forced["bit_equal"]["count"] == 13
    assert forced["law"] is None  # records of before have no shifts


def test_the_law_and_the_distance_to_float64_are_of_the_records():
    samples = [make_sample(problem, 4) for problem in range(3)]
    for sample in samples:
        sample["teacher_forced"] |= {
            "flip": [True, False, False, False],
            "margin": [0.0, 0.1, 1.0, 2.0],
            "margin_other": [0.25, 0.0, 1.0, 2.0],
            "shift": [-0.25, -0.1, 0.0, 0.0],
            "unit": [0.125] * 4,
            "choice_flip": [True, True, False, False],
        }
        distance = {"flip": [False] * 4, "kl": [0.1] * 4, "max_abs": [1.0] * 4}
        sample["truth"] = {
            "cached": distance | {"rms": [1.0, 2.0, 3.0, 64.0]},
            "uncached": distance | {"rms": [2.0, 2.0, 2.0, 2.0]},
        }
    summary = summarize(samples, RUN)
    law = summary["teacher_forced"]["law"]
    assert law["flips"] == 3
    assert law["kinds"] == {"tie_in_one": 3, "tie_in_both": 0, "swap_by_one_unit": 0, "more": 0}
    assert law["ties"] == {"reference": 3, "other": 3, "both": 0}
    assert law["choice_flips"] == 6
    assert law["prediction"]["linear"] == pytest.approx(0.5 / 0.5 * (0.35 / 4) / 2)  # half of the margins below 0.5
    truth = summary["truth"]
    assert (truth["steps"], truth["nearer"], truth["beyond"]) == (12, 3, 3)
    assert truth["ratio"] == pytest.approx(1.25)
    text = render_markdown(summary, RUN)
    assert "FAULT, not rounding: one arm is over 16 times as far at 3 of 12 steps, 32 at most" in text
    assert "| other tokens chosen under the same noise | 6 |" in text


def test_accuracy_is_paired_and_labels_are_split():
    summary = summarize(sample_run(), RUN)
    numeric = summary["accuracy"]["numeric"]
    assert (numeric["cached"]["count"], numeric["uncached"]["count"], numeric["mcnemar_p"]) == (11, 11, 1.0)
    assert (numeric["only_cached"], numeric["only_uncached"]) == (1, 1)
    assert numeric["difference"]["interval"][0] < 0 < numeric["difference"]["interval"][1]
    assert numeric["label_changes"] == {"same": 11, "answer_changed": 2, "extraction_only": 0}
    assert summary["accuracy"]["strict"]["label_changes"]["extraction_only"] == 2
    alike = summarize([build(i) for i in range(20)], RUN)["accuracy"]["numeric"]["difference"]
    assert alike["interval"] == pytest.approx([-0.1345, 0.1345], abs=1e-4)  # Twenty equal pairs do not prove equality.


def test_few_alike_sequences_have_no_false_certainty():
    entry = clustered_share([1, 1], [10, 10])
    assert entry["interval"][1] - entry["interval"][0] > 0.2
    assert share(0, 0) is None


def test_a_zero_has_its_bound_everywhere():
    summary = summarize([build(i) for i in range(9)], RUN)
    bound = pytest.approx(1 - 0.05 ** (1 / 9))  # of the share of sequences
    assert summary["teacher_forced"]["flips"]["upper_bound"] == bound
    assert summary["free_running"]["expected"]["upper_bound"] == bound
    said = "0 of 900 in 9 sequences (95 % upper bound 28 % of sequences)"
    text = render_markdown(summary, RUN)
    assert said in text
    assert "0 of 9 (95 % upper bound 28 %)" in text
    assert "at most 28 % (95 % upper bound)" in text
    assert "exactly 0" not in text
    assert re.search(r"cached vs uncached +0 of 900 +0 of 9, ≤ 28 %", as_text(summary))


def test_ties_are_listed():
    sample = build(7, tokens=5)
    sample["teacher_forced"]["margin"][2] = 0
    sample["teacher_forced"]["flip"][2] = True
    summary = summarize([sample], RUN)
    assert summary["teacher_forced"]["ties"] == {
        "count": 1, "flips": 1, "listed": [{"problem": 7, "step": 2, "flip": True}],
    }  # fmt: skip
    assert "| flips at exact ties | 1 of 1 |" in render_markdown(summary, RUN)


def test_invalid_samples_enter_no_agreement():
    samples = sample_run()
    with_invalid = summarize([*samples, make_invalid(20), make_invalid(21)], RUN)
    clean = summarize(samples, RUN)
    for part in ("teacher_forced", "controls", "free_running", "accuracy"):
        assert with_invalid[part] == clean[part]
    assert with_invalid["problems"] == {"asked": 15, "total": 15, "ok": 13, "invalid": 2}
    assert with_invalid["invalid"][0]["reason"] == "resid_pre, layer 8"
    text = render_markdown(with_invalid, RUN)
    assert "| problems | 13 valid, 2 invalid |" in text
    assert "| resid_pre, layer 8 | cached | inf | 2 | 5 | [20, 21] |" in text
    assert "INVALID" in as_text(with_invalid)


def test_an_all_invalid_run_says_nothing_of_agreement():
    summary = summarize([make_invalid(1), make_invalid(2)], RUN)
    assert summary["status"] == "invalid"
    assert not {"teacher_forced", "controls", "free_running", "accuracy"} & set(summary)
    text = render_markdown(summary, RUN)
    assert "resid_pre, layer 8" in text
    for word in ("flips", "bit-equal", "0 of"):
        assert word not in text.split("## Caveats")[0]
    assert "nothing is said about agreement" in as_text(summary)


def test_an_unfinished_run_says_so():
    samples = sample_run()
    run = RUN | {"config": CONFIG | {"num_problems": 20}}
    summary = summarize(samples, run)
    missing = f"UNFINISHED: {20 - len(samples)} of 20 problems have no sample yet"
    assert missing in as_text(summary)
    whole = RUN | {"config": CONFIG | {"num_problems": len(samples)}}
    assert "UNFINISHED" not in as_text(summarize(samples, whole))


def test_an_empty_run_renders():
    summary = summarize([], RUN)
    assert summary["status"] == "empty"
    assert "| problems | 0 valid, 0 invalid |" in render_markdown(summary, RUN)
    assert "0 of 0" in as_text(summary)


def test_missing_parts_render_as_missing():
    sample = build(1)
    sample |= {"teacher_forced": None, "free_running": None, "controls": dict.fromkeys(sample["controls"])}
    text = render_markdown(summarize([sample], RUN), RUN)
    assert "No steps were compared" in text
    sample = build(1)
    sample["controls"]["cached_rerun"] = None
    assert text != (text := render_markdown(summarize([sample], RUN), RUN))
    assert text.count("Not run here, so not ruled out.") == len(CONTROLS)


def test_effective_sampling_is_shown_and_no_divergence_is_derived_from_it():
    sample = build(1, flips=(2,))
    sample["sampling"] = {"sampler": "top_k", "temperature": 0.7, "top_k": 50, "top_p": None, "seed": 3}
    summary = summarize([sample], RUN)
    assert summary["free_running"]["expected"] is None
    assert "top_k, temperature 0.7, top_k 50, seed 3 (1 samples)" in render_markdown(summary, RUN)
    assert "top_k 50, seed 3" in as_text(summary)
    assert "different sampling" in render_markdown(summarize([sample, build(2)], RUN), RUN)


def test_a_first_flip_elsewhere_than_the_divergence_is_seen():
    summary = summarize([build(1, flips=(2,), diverged=5), build(2)], RUN)
    assert summary["free_running"]["first_flip_agrees"] == {"count": 1, "total": 2}


def test_the_order_of_records_makes_no_difference():
    samples = sample_run()
    shuffled = samples.copy()
    random.Random(0).shuffle(shuffled)
    one, other = summarize(samples, RUN), summarize([{"experiment": "drift"}, *shuffled], RUN)
    assert json.dumps(one, allow_nan=False) == json.dumps(other, allow_nan=False)
    assert render_markdown(one, RUN) == render_markdown(other, RUN)


def test_sessions_that_differ_are_a_caveat():
    later = {"started": "later", "done_before": 3, "device": "gpu", "packages": {"jax": "0.11"}}
    text = render_markdown(summarize(sample_run(), RUN), RUN | {"sessions": [SESSION, later]})
    assert "device is cpu there, gpu here, packages.jax is 0.10.2 there, 0.11 here" in text


def test_the_table_fits_80_columns():
    sampled = sample_run()
    for sample in sampled:
        sample["controls"] = dict.fromkeys(sample["controls"], sample["teacher_forced"])
    text = as_text(summarize([*sampled, make_invalid(20)], RUN))
    for part in ("bit-equal", "1 %", "with flip", "labels", "2", "+0.0 [-29.1, +29.1]", "85 [55, 98]"):
        assert part in text
    assert "0.31 % [" in text


def test_numbers():
    numbers = (0, 0.264, 25.0, 100, 1234, 2e-5, 0.0999, float("nan"), 3.4e38, -0.5)
    texts = ["0", "0.26", "25", "100", "1234", "2.0e-05", "0.1", "nan", "3.40e+38", "-0.5"]
    assert list(map(format_number, numbers)) == texts


def test_nearly_all_is_not_all():
    assert format_percent(0.9999) == "99.99"
    assert format_percent(0.9999999) == ">99.99"
    assert format_share(share(10, 10)) == "10 of 10 (95 % lower bound 74 %)"
