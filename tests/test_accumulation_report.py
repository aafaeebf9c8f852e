"""The report on quantized caches along a text: every figure comes from records, no verdict outdoes its interval."""

import itertools
import json

import accumulation_records
import numpy as np
import pytest
from accumulation_records import KIVI, KVARN, N, both, make_quantizer, make_record, of, summary_of, verdicts
from scipy import stats
from shown import show_by

from jaxkv.experiments.accumulation.claims import average
from jaxkv.experiments.accumulation.report import write_accumulation
from jaxkv.experiments.figures_changes import draw_accumulation
from jaxkv.records import to_record

PROMPT, STEPS = accumulation_records.PROMPT, accumulation_records.STEPS
LONG = "k=kvarn:2,tile=32,floor=none,target=min;v=kivi:2,group=32,window=32,first=16"
shown, to_markdown, to_html = show_by(write_accumulation)


def test_the_report_renders():
    summary = summary_of(both() + make_quantizer(LONG))
    json.dumps(summary, allow_nan=False)
    text, markdown, html = shown(summary), to_markdown(summary), to_html(summary)
    width = next(line for line in text.splitlines() if line.startswith("quantizer")).index("bits")
    whole = "".join(line[:width].rstrip() for line in text.splitlines())
    for name in (KVARN, KIVI, LONG):
        row = next(line for line in markdown.splitlines() if line.startswith(f"| `{name}` | 3 |"))
        assert row.endswith("| 91 [91, 91] | 91 [91, 91] | 19 |")
        assert name in whole
    # A panel a quantizer of errors in the prompt and after it, of what accumulates and of repairs; KL, agreement, K, V.
    assert html.count("<svg") == 3 * 4 + 4
    assert "8 of 8 problems valid" in text
    assert "in `static` the logits are the clean run's, bit for bit, at 312 of 312 steps." in markdown
    assert "the decoding run's logits as they were, bit for bit, at 312 of 312 steps." in markdown


def test_a_regime_has_one_colour_in_all_panels():
    found = draw_accumulation(summary_of(make_quantizer()))[:3]
    error, extra, prompt = (
        {one.name.removesuffix(" - static"): one.colour for one in figure.charts[0].series} for figure in found
    )
    assert list(error) == ["static", "accumulated:4", "decode"]
    assert len(set(error.values())) == 3
    assert error == prompt == extra | {"static": error["static"]}


# Figures are those of the records.


def test_an_error_is_a_mean_over_positions_and_layers_then_problems():
    """Bins of two and of four positions, texts of different lengths: against means over positions by numpy."""
    records, expected = [], {"static": [], "decode": []}
    for problem, steps in enumerate((13, 8, 30)):
        for regime, error, growth in (("static", 0.2 + problem / 50, 0.1), ("decode", 0.5, 0.3 + problem / 10)):
            record = make_record(problem, KVARN, regime, error, growth, steps=steps)
            to_record(record)
            records.append(record)
            widths = [end - begin for begin, end in record["bins"]]
            along = np.repeat(np.mean(record["attention_error"]["error"], axis=0), widths)
            expected[regime].append((along[:PROMPT].mean(), along[PROMPT:].mean()))
    entry = of(summary_of(records))["regimes"]
    for regime, values in expected.items():
        prompt, decoded = np.transpose(values)
        assert entry[regime]["error"]["prompt"]["mean"] == pytest.approx(prompt.mean())
        assert entry[regime]["error"]["decoded"]["mean"] == pytest.approx(decoded.mean())
    gaps = np.subtract(expected["decode"], expected["static"])[:, 1]
    extra = entry["decode"]["extra"]["decoded"]
    assert (extra["mean"], extra["problems"]) == (pytest.approx(gaps.mean()), 3)
    assert entry["static"]["extra"] is None


@pytest.mark.parametrize("count", [2, 5, 40])
def test_an_interval_is_that_of_t(count):
    column = np.random.default_rng(count).gamma(2.0, size=count)
    expected = stats.t.interval(0.95, count - 1, column.mean(), stats.sem(column))
    assert average(dict(enumerate(column)))["interval"] == pytest.approx(expected)


def test_equal_regimes_accumulate_exactly_nothing_with_its_bound():
    summary = summary_of(make_quantizer(extra=0.0, wobble=0.0))
    extra = of(summary)["regimes"]["decode"]["extra"]["decoded"]
    bound = 1 - 0.05 ** (1 / N)
    assert (extra["mean"], extra["interval"], extra["bound"]) == (0.0, [0.0, 0.0], pytest.approx(bound))
    assert f"0 (bound {100 * bound:.0f} %)" in to_markdown(summary)
    assert f"(bound {100 * bound:.0f} %)" in shown(summary, 300)
    assert (verdicts(summary)["K1a"], verdicts(summary)["K1b"]) == ("cannot tell", "cannot tell")


def test_one_problem_has_no_interval():
    summary = summary_of(make_quantizer(problems=1, growth=0.1, missed=2), num_problems=1)
    found = of(summary)["regimes"]["decode"]
    averages = [found["error"]["decoded"], found["extra"]["decoded"], found["growth"], found["logits"]["kl"]]
    averages += [place[name] for place in found["curve"] for name in ("error", "extra")]
    averages += [place[name] for place in found["logits"]["curve"] for name in ("kl", "agreement")]
    averages += [*of(summary)["repair"]["taken"].values(), found["stored"]["k"]["norm_share"]]
    averages += [found["logits"]["agreement"]]
    assert len(averages) > 20
    assert all(entry["interval"] is None for entry in averages)
    assert set(verdicts(summary).values()) == {"cannot tell"}
    assert "With one problem there are no intervals." in shown(summary)
    assert "11 of 13" in to_markdown(summary)


def test_growth_is_the_later_half_beyond_the_earlier():
    records = make_quantizer(growth=0.12)
    decode = next(r for r in records if r["regime"] == "decode" and r["problem"] == 1)
    static = next(r for r in records if r["regime"] == "static" and r["problem"] == 1)
    widths = [end - begin for begin, end in decode["bins"]]
    gap = np.subtract(*(np.repeat(np.mean(r["attention_error"]["error"], axis=0), widths) for r in (decode, static)))
    after = gap[PROMPT:]  # bins of 2, 4, 2 and 4 positions: six in each half
    found = of(summary_of([decode, static]))["regimes"]["decode"]["growth"]
    assert found["mean"] == pytest.approx(after[6:].mean() - after[:6].mean())
    assert found["mean"] > 0


def test_positions_count_from_the_end_of_the_prompt():
    curve = of(summary_of(make_quantizer(growth=0.3)))["regimes"]["decode"]["curve"]
    places = [(p["begin"], p["end"]) for p in curve]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
    assert places[0][0] >= -PROMPT
    assert places[-1][1] == STEPS - 1
    after = [p["error"]["mean"] for p in curve if p["begin"] >= 0]
    assert after == sorted(after)
    assert all(p["error"]["problems"] == N for p in curve)


def test_kl_and_agreement_by_position_count_every_step_once():
    records = make_quantizer(missed=3)
    logits = of(summary_of(records))["regimes"]["decode"]["logits"]
    assert logits["kl"]["mean"] == pytest.approx(0.01)
    assert (logits["agreement"]["count"], logits["agreement"]["total"]) == (N * (STEPS - 3), N * STEPS)
    assert (logits["curve"][0]["begin"], logits["curve"][0]["end"]) == (-1, 0)
    assert sum(place["agreement"]["total"] for place in logits["curve"]) == N * STEPS
    assert sum(place["agreement"]["count"] for place in logits["curve"]) == N * (STEPS - 3)
    assert of(summary_of(records))["regimes"]["static"]["logits"]["kl"]["mean"] == 0


def test_whole_cache_bits_are_counted_over_all_caches():
    records = make_quantizer(problems=2)
    records[0]["storage"] = {"bytes": 9000, "clean_bytes": 32000, "slots": 128, "bits": 4.5}
    elements = 8 * 9000 / 4.5 + 5 * 8 * 3000 / 3.0
    storage = of(summary_of(records))["storage"]
    assert storage["bits"] == pytest.approx(8 * (9000 + 5 * 3000) / elements)
    assert storage["of_clean"] == pytest.approx(24000 / (32000 + 5 * 16000))
    assert storage["slots"] == [64, 128]


def test_repair_takes_shares_of_each_problems_error():
    records = make_quantizer(left=(1.0, 0.7, 0.8, 0.25))
    repair = of(summary_of(records))["repair"]
    shares = {"worst": 0.3, "others": 0.2, "everything": 0.75}
    for n, (name, share) in enumerate(shares.items(), start=1):
        left = share - np.mean([0.01 * ((problem + 1) * n % 4) for problem in range(N)])
        assert repair["taken"][name]["mean"] == pytest.approx(left)
        assert repair["error"][name]["mean"] == pytest.approx(repair["error"]["nothing"]["mean"] * (1 - left))


def test_what_a_format_cannot_hold_is_counted_once_a_problem():
    records = both()
    assert of(summary_of(records))["saturated"] is None
    for record in records:
        record["saturated"] = {"k": 0, "v": 0, "elements": 100}
        if record["quantizer"] == KIVI:
            record["saturated"] = {"k": record["problem"], "v": 2, "elements": 100}
    summary = summary_of(records)
    count = sum(range(N)) + 2 * N
    assert of(summary, KIVI)["saturated"] == {"k": sum(range(N)), "v": 2 * N, "elements": 100 * N}
    for text in (to_markdown(summary), shown(summary, 200)):
        assert f"`{KIVI}`: {count} of {100 * N} elements lie outside its format." in text
        assert text.count("lie outside") == 1


# What is missing or broken.


def test_invalid_samples_enter_no_figure_and_decide_nothing():
    records = both()
    at = next(n for n, r in enumerate(records) if r["key"][1:] == [3, KIVI, "decode"])
    records[at] = accumulation_records.make_broken(records[at])
    to_record(records[at])
    summary = summary_of(records)
    assert of(summary, KIVI)["regimes"]["decode"]["problems"] == N - 1
    assert of(summary, KIVI)["regimes"]["decode"]["extra"]["decoded"]["problems"] == N - 1
    assert {verdicts(summary)[name] for name in ("K1a", "K2")} == {"cannot tell"}
    assert f"`{KIVI}`: 1 samples invalid at logits, layer 1 (decode, nan); counted nowhere." in to_markdown(summary)
    every = summary_of([accumulation_records.make_broken(record) for record in records if record["status"] == "ok"])
    assert set(verdicts(every).values()) == {"cannot tell"}
    assert "0 of 8 problems valid" in shown(every)
    assert not draw_accumulation(every)
    to_html(every)


def test_samples_that_are_missing_are_said():
    records = [r for r in both() if r["key"][1:] != [2, KVARN, "static"]]
    text = to_markdown(summary_of(records))
    assert f"UNFINISHED: `{KVARN}` has 7 of 8 samples of static." in text
    assert "UNFINISHED: 2 of 10 problems have no record yet" in to_markdown(summary_of(both(), num_problems=10))
    assert of(summary_of(records))["regimes"]["decode"]["extra"]["decoded"]["problems"] == N - 1


def test_regimes_along_other_tokens_are_not_compared():
    records = both()
    next(r for r in records if r["key"][1:] == [4, KIVI, "decode"])["tokens_sha256"] = "ff"
    summary = summary_of(records)
    assert summary["parted"] == [4]
    assert all(found["problems"] == N - 1 for e in summary["quantizers"] for found in e["regimes"].values())
    assert "LEFT OUT, since their records follow different tokens: problems 4." in shown(summary, 200)


def test_nothing_run_decides_nothing():
    summary = summary_of([])
    assert set(verdicts(summary).values()) == {"cannot tell"}
    assert not draw_accumulation(summary)
    to_html(summary)
    to_markdown(summary)
    shown(summary)


def test_a_text_without_decoded_positions():
    records = make_quantizer(steps=1)
    for record in records:
        to_record(record)
    summary = summary_of(records)
    found = of(summary)["regimes"]["decode"]
    assert found["error"]["decoded"] is None
    assert found["error"]["prompt"]["mean"] > 0
    assert found["logits"]["agreement"]["total"] == N
    assert set(verdicts(summary).values()) == {"cannot tell"}
    to_html(summary)
    shown(summary)
