"""The mitigations table says what the records say, and no verdict is stronger than its interval."""

import copy
import json

import numpy as np
import pytest
from plain_records import summarize_mitigations
from sample_records import SETTING, make_invalid, make_sample
from shown import show_by

from jaxkv.experiments.mitigations.report import write_mitigations

NAMES = ("fp16+accumulation=fp16", "fp32+param=fp16", "fp16 aligned")
PROBLEMS = (10, 11, 12)
TOKENS = 5
COST = {
    "prefill_ms": [30.0, 20.0],
    "ms_a_token": [6.0, 5.0],
    "bytes": {"weights": 2_000_000, "weights_as_stored": 1_000_000, "cache": 500_000, "program_peak": None},
}


def make_mitigation(problem=10, variant="fp32", sample=None):
    """A record of the schema; the aligned variant has equal arms."""
    sample = sample or make_sample(problem, TOKENS)
    aligned, ok = variant.endswith("aligned"), sample["status"] == "ok"

    def distance(size):
        column = [size * (1 + problem % 5)] * TOKENS
        return {"flip": [False] * TOKENS, "kl": column, "rms": column, "max_abs": column}

    record = {name: sample[name] for name in (*SETTING, "teacher_forced", "free_running")} | {
        "experiment": "mitigations",
        "problem": problem,
        "variant": variant,
        "key": ["mitigations", problem, variant],
        "precision": {"name": variant},
        "held": {"param": "float32", "operand": "float32"},
        "tokens": {arm: list(range(TOKENS)) for arm in ("cached", "uncached", "fp64")},
        "distance": None,
    }
    if ok:
        record["distance"] = {
            "cached": {"given": distance(0.5), "rounded": distance(0.25)},
            "uncached": {"given": distance(0.5 if aligned else 0.75), "rounded": distance(0.25)},
            "weights": distance(0.125),
        }
    if aligned and ok:
        same = {"bit_equal": [True] * TOKENS, "max_abs": [0.0] * TOKENS, "kl": [0.0] * TOKENS}
        record["teacher_forced"] |= same
    return json.loads(json.dumps(record))  # no two fields share a list


def make_records():
    return [make_mitigation(problem, name) for problem in PROBLEMS for name in NAMES]


def summary_of(records):
    return summarize_mitigations(
        records, [{"experiment": "mitigations", "variant": name, "cost": COST} for name in NAMES] + [{"variant": "x"}]
    )


shown, to_markdown, _ = show_by(write_mitigations, width=100)


def test_the_table_renders_in_100_columns():
    summary = summary_of(make_records())
    json.dumps(summary, allow_nan=False)
    text, markdown = shown(summary), to_markdown(summary)
    for name in NAMES:
        assert name in text
        assert markdown.count(f"| {name} |") == 4
    assert (
        "15 of 15 in 3 sequences (95 % lower bound 37 % of sequences)" in markdown
    )  # bit-equal steps of the aligned regime
    assert "0 of 15 ≤ 63 % of sequences" in text
    assert "no difference: 0 of 3 problems (95 % upper bound 63 %) differ" in markdown


def test_each_figure_stands_in_its_place():
    """Mean distances of problems 10, 11 and 12 are twice those of problem 10."""
    given, _, rounded, weights = [
        next(line.split() for line in part.splitlines() if line.startswith("fp32+param=fp16"))
        for part in shown(summary_of(make_records()), 160).split("\n\n")[1:5]
    ]
    assert given == ["fp32+param=fp16", "1", "1.5", "cannot", "tell", "1", "1.5", "cannot", "tell"]
    assert rounded == ["fp32+param=fp16", "0.5", "0.5", "no", "difference"]
    assert weights == ["fp32+param=fp16", "0.25"]


def planted(differences, metric="rms"):
    """Records of one variant whose cached arm is farther by so much, problem by problem."""
    records = []
    for problem, difference in enumerate(differences):
        record = make_mitigation(problem)
        for arm, value in (("cached", 1.0 + difference), ("uncached", 1.0)):
            column = record["distance"][arm]["given"][metric]
            column[:] = [value] * len(column)
        records.append(record)
    return records


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, 0.2, 0.3, 0.2, 0.1, 0.2], "uncached"),
        ([-0.1, -0.2, -0.3, -0.2, -0.1, -0.2], "cached"),
        ([0.1, 0.2, 0.7, 0.1], "cannot tell"),  # all lean one way, but four do so by chance one time in eight
        ([0.3, -0.2, 0.1, -0.1, 0.2, -0.3], "cannot tell"),
        ([0.5], "cannot tell"),
        ([0.0, 0.0, 0.0], "no difference"),
    ],
)
def test_no_verdict_is_stronger_than_its_interval(differences, verdict):
    summary = summarize_mitigations(planted(differences), [])
    judged = summary["variants"][0]["distance"]["given"]["nearer"]["rms"]
    np.testing.assert_allclose(judged["mean"], np.mean(differences), atol=1e-12)
    assert judged["differ"]["count"] == sum(d != 0 for d in differences)
    low, high = judged["interval"] or (-np.inf, np.inf)
    assert (judged["interval"] is None) == (len(differences) == 1)
    assert low <= judged["mean"] <= high
    assert f"| {verdict}" in to_markdown(summary)
    row = next(line for line in shown(summary).split("Distance to fp64")[1].splitlines()[1:] if line.startswith("fp32"))
    assert verdict in row


def test_what_is_missing_is_said():
    records = [r for r in make_records() if (r["problem"], r["variant"]) != (11, "fp32+param=fp16")]
    summary = summarize_mitigations(records, [])
    assert "fp32+param=fp16: UNFINISHED, 2 of 3 problems" in shown(summary)
    assert "UNFINISHED, 2 of 3" in to_markdown(summary)
    assert all(variant["cost"] is None for variant in summary["variants"])


def test_invalid_samples_are_named_and_counted_nowhere():
    records = [make_mitigation(p, "fp16", make_invalid(p)) for p in PROBLEMS] + [make_mitigation(10, "fp32")]
    mixed = [*copy.deepcopy(records), make_mitigation(13, "fp16")]
    for found, valid in ((records, 0), (mixed, 1)):
        summary = summarize_mitigations(found, [])
        assert summary["variants"][0]["problems"] == {"total": 3 + valid, "ok": valid, "invalid": 3}
        for text in (shown(summary, 200), to_markdown(summary)):
            assert "fp16: 3 samples invalid at resid_pre, layer 8 (cached, inf); counted nowhere." in text
            assert ("none valid" in text) == (not valid)
    assert summary["variants"][0]["teacher_forced"]["tokens"] == TOKENS


def test_costs_are_the_last_measured_and_the_fastest():
    timings = [{"experiment": "mitigations", "variant": "fp32", "cost": cost} for cost in ({"old": 1}, COST, None)]
    summary = summarize_mitigations([make_mitigation()], timings)
    table = to_markdown(summary).partition("and cost of the cached arm")[2]
    row = next(line for line in table.splitlines() if line.startswith("| fp32 |"))
    cells = row.split("|")[-6:-1]
    assert [cell.strip() for cell in cells] == ["5", "20", "2.5", "1.5", "-"]
