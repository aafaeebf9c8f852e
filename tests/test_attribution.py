"""Records of attribution, what the end points are in them, and what is said of them."""

import dataclasses
import itertools
import json

import pytest
from attribution_runs import ITEMS, SPEC, TILE, small_run
from layer_records import make_attribution
from plain_records import summarize_attribution
from shown import as_markdown, on_terminal
from small_models import run_all, run_broken
from test_divergence import Scoring

from jaxkv.checkpoints import ByteTokenizer
from jaxkv.experiments.attribution.record import ALL, ALL_BUT, ALONE, OP_CLASSES, PLAIN, VARIANTS
from jaxkv.experiments.attribution.report import conclude, write_attribution
from jaxkv.experiments.attribution.run import Attribution
from jaxkv.experiments.divergence.run import Divergence
from jaxkv.experiments.driver import run_missing
from jaxkv.models.alignment import CLASSES
from jaxkv.records import RunDirectory, to_line, to_record

RUN = {"fingerprint": "ab"}


def test_none_is_the_plain_experiment():
    arms, state, records = small_run()
    bare = dataclasses.replace(SPEC, control_problems=0, stepwise_problems=0)
    divergence = run_all(Divergence(arms, state, bare, ByteTokenizer(), Scoring()), ITEMS)
    plain = {r["problem"]: r["teacher_forced"] for r in divergence}
    for comparison in plain.values():
        del comparison["choice_flip"]  # attribution follows given tokens and chooses none
    ours = {r["problem"]: r["teacher_forced"] for r in records if r["variant"] == PLAIN}
    assert ours == plain
    assert max(max(comparison["kl"]) for comparison in plain.values()) > 0


# Records.


def test_records_are_valid_and_complete():
    _, _, records = small_run()
    for record in records:
        to_record(record)
    assert [tuple(r["key"]) for r in records] == [("attribution", i.problem, v) for v in VARIANTS for i in ITEMS]
    found = {(r["problem"], r["variant"]): r for r in records}
    for item in ITEMS:
        assert all(found[item.problem, ALL]["teacher_forced"]["bit_equal"])
        assert not all(found[item.problem, PLAIN]["teacher_forced"]["bit_equal"])
        assert found[item.problem, ALL]["moved"]["cached"] > 0
        assert len({r["tokens_sha256"] for r in records if r["problem"] == item.problem}) == 1
    assert OP_CLASSES == CLASSES


def test_a_stopped_run_resumes_with_the_same_bytes(tmp_path):
    arms, state, records = small_run()
    lines = [to_line(r) for r in records]
    cut = 2 * len(ITEMS) + 1  # in the midst of a batch
    with RunDirectory.open(tmp_path, {"a": 1}) as run:
        for record in records[:cut]:
            run.append(record)
    with RunDirectory.open(tmp_path, {"a": 1}) as run:
        done = frozenset(key[1:] for key in run.done_keys())
        for batch, timing in run_missing(Attribution(arms, state, SPEC, TILE), ITEMS, done):
            for record in batch:
                run.append(record)
            run.append_timing(timing)
            assert timing["tokens"]["cached"] > 0
    assert b"".join(lines) == (tmp_path / "samples.jsonl").read_bytes()
    every = frozenset((r["problem"], r["variant"]) for r in records)
    assert list(run_missing(Attribution(arms, state, SPEC, TILE), ITEMS, every)) == []


def test_a_problem_that_overflows_has_no_figures():
    arms, state, _ = small_run()
    records, alone, place = run_broken(lambda broken: Attribution(arms, broken, SPEC, TILE, [PLAIN, ALL]), state, ITEMS)
    for record in records + alone:
        to_record(record)
    assert [record["status"] for record in records] == ["invalid", "ok"] * 2
    assert [record["status"] for record in alone] == ["invalid"] * 4
    assert records[0]["invalid"] == {
        "arm": "cached", "step": 0, "layer": 0, "op": "resid_pre", "position": place, "value": "inf"
    }  # fmt: skip
    summary = summarize_attribution(alone, RUN)
    assert summary["status"] == "invalid"
    assert conclude(summary) == ["There is no sample with finite numbers, so nothing can be attributed."]


# What is said of them.


def samples(problems=3, **kl):
    """Samples whose KL varies from problem to problem; variants not named keep the plain one's."""
    named = {ALL: 0.0, PLAIN: 1.0} | {name.replace("_", " "): value for name, value in kl.items()}
    made = []
    for problem, variant in itertools.product(range(problems), VARIANTS):
        value = named.get(variant, 1.0)
        value = value[problem] if isinstance(value, list) else value * (1 + problem)
        made.append(make_attribution(problem, variant, value, (0, 0) if variant == PLAIN else (8, 8)))
    return made


def say(records):
    return "\n".join(conclude(summarize_attribution(records, RUN)))


def test_summary_figures():
    summary = summarize_attribution(samples(all_but_mlp=0.25, mlp_alone=[0.1, 1.0, 5.0]), RUN)
    assert summary["problems"]["ok"] == 3
    assert summary["samples_missing"] == 0
    assert list(summary["variants"]) == list(VARIANTS)
    but = summary["variants"][ALL_BUT["mlp"]]
    assert but["kl_kept"]["share"] == pytest.approx(0.25)
    assert but["kl_kept"]["interval"] == pytest.approx([0.25, 0.25])
    assert but["kl"]["mean"] == pytest.approx(0.5)
    assert summary["variants"][ALONE["mlp"]]["kl_kept"]["share"] == pytest.approx(6.1 / 6)
    assert json.loads(json.dumps(summary)) == summary


def test_sentences_claim_no_more_than_the_intervals():
    figures = {"all_but_mlp": 0.25, "all_but_norms": 0.0, "mlp_alone": 0.5, "qkv_alone": [0.1, 1.0, 5.0]}
    figures |= {"decode_alone": 0.0}
    text = say(samples(**figures))
    none = "logits differ at 0 of 24 steps in 3 sequences (95 % upper bound 63 % of sequences)"
    assert f"With every class aligned, {none}" in text
    assert "bits at 0 (cached) and 0 (uncached) of 24 steps: the plain programs are attributed as they are" in text
    assert "left unaligned by itself: less than the plain KL is left: mlp (25 % [25, 25])." in text
    assert "left unaligned by itself: equal logits: norms." in text
    assert "aligned alone: less than the plain KL is left: mlp (50 % [50, 50])." in text
    assert "aligned alone: equal logits: decode." in text
    (left_open,) = (line for line in text.splitlines() if line.startswith("aligned alone: cannot be told"))
    assert "qkv (" in left_open
    assert "prefill (100 % [100, 100])" in left_open
    assert "over 3 problems is wide and rough" in text


def test_a_residual_difference_is_said():
    text = say(samples(all=0.01, all_but_mlp=0.0))
    assert "With every class aligned, logits differ at 24 of 24 steps" in text
    assert "of the plain KL is left: on this device equal operations on equal rows give other bits" in text
    assert "left unaligned" not in text  # no class can be told from what is left anyway


def test_what_cannot_be_isolated_is_said():
    moved = {ALONE["head"]: {"cached": 0, "uncached": 0}, ALONE["qkv"]: {"cached": 8, "uncached": 0}}
    idle = [s | {"moved": moved.get(s["variant"], s["moved"])} for s in samples()]
    moving = [s | {"moved": {"cached": 8, "uncached": 3}} if s["variant"] == PLAIN else s for s in idle]
    text = say(moving)
    assert "no bit of the uncached arm changes: it is the form for one row that differs: qkv (" in text
    assert "aligned alone: no bit of either arm changes: head." in text
    assert "changes bits at 24 (cached) and 9 (uncached) of 24 steps and leaves" in text
    assert "less than" not in text


def test_one_problem_has_no_interval():
    summary = summarize_attribution(samples(1, all_but_mlp=0.5), RUN)
    assert summary["variants"][ALL_BUT["mlp"]]["kl_kept"]["interval"] is None
    text = "\n".join(conclude(summary))
    assert "With one problem there are no intervals" in text
    assert "less than" not in text


def test_equal_plain_arms_leave_nothing_to_attribute():
    equal = [make_attribution(0, variant, 0.0, (0, 0)) for variant in VARIANTS]
    assert say(equal) == "The plain arms differ in no bit at 8 steps: there is nothing to attribute here."
    assert say([]) == "There is no sample yet, so nothing can be attributed."


def test_an_unfinished_run_says_so():
    summary = summarize_attribution(samples(2)[:-3], {"config": {"num_problems": 5}})
    assert "UNFINISHED: 3 of 5 problems have no record yet, 3 samples are missing" in as_markdown(
        write_attribution(summary)
    )


def test_tables_show_every_variant_in_80_columns():
    summary = summarize_attribution(small_run()[2], RUN)
    text, markdown = on_terminal(write_attribution(summary)), as_markdown(write_attribution(summary))
    for name in VARIANTS:
        assert f"\n{name} " in text
        assert f"| {name} |" in markdown
    assert max(map(len, text.splitlines())) <= 80
