"""The report on changed caches says what the records say, and no verdict is stronger than its interval."""

import json
import re

import injection_records
import pytest
from injection_records import ERROR, SEED_SPECS, error, make_change, make_control, make_record, quant, some
from plain_records import summarize_injection
from shown import show_by

from jaxkv.experiments.figures_changes import draw_injection
from jaxkv.experiments.injection.claims import compare_specs
from jaxkv.experiments.injection.report import OWN, SEED_TABLE, show_of_control, write_injection
from jaxkv.interventions.quantizers.spec import METHODS
from jaxkv.reporting.statistics import clopper_pearson

N, TOKENS = 40, injection_records.TOKENS
CONTROL = some(30, N)
UNIFORM3 = error("uniform", (-1.5, 1.5), std=0.75**0.5, flips=1 / 6)
POINTS = error("points", (0, 0.8660254), std=0.8660254)
WIDE_1 = error("uniform", (0.5, 1.5), mean=1.0, std=0.30, flips=0.02)
shown, to_markdown, to_html = show_by(write_injection, width=100)


def summary_of(records, **config):
    return summarize_injection(records, {"config": {"num_problems": N, "task": "arith", **config}, "fingerprint": "f"})


def study_records():
    """The seed's changes with three seeds, scores falling with the error."""
    records = make_control(CONTROL)
    for index, (change, spec) in enumerate(SEED_SPECS.items()):
        seeds = (0, 1, 2) if spec["family"] == "error" else (0,)
        records += make_change(change, spec, some(28 - 2 * index, N), 0.01 * (index + 1), seeds, flips=index % 3)
    return records


def verdict_of(summary, name):
    return next(claim["verdict"] for claim in summary["claims"] if claim["id"] == name)


def of(summary, change):
    return next(entry for entry in summary["changes"] if entry["change"] == change)


def test_the_report_renders():
    summary = summary_of(study_records())
    json.dumps(summary, allow_nan=False)
    text, markdown, html = shown(summary), to_markdown(summary), to_html(summary)
    shown(summary, 70)
    for change in SEED_SPECS:
        assert change in text
        assert f"| `{change}` |" in markdown
    for label, *_ in SEED_TABLE.values():
        assert f"| {label} |" in markdown
    assert html.count("<svg") == 4
    assert "40 of 40 problems valid" in text


def test_the_seeds_share_of_control_is_computed_not_copied():
    rows = [
        line.split("|") for line in to_markdown(summary_of(study_records())).splitlines() if line.startswith("| U(")
    ]
    assert [[cell.strip() for cell in row[2:6]] for row in rows] == [
        ["38", "83", "27.4", "53"],
        ["39", "85", "31.4", "61"],
    ]


def test_each_figure_is_that_of_the_records():
    records = make_control([True, True, False, True]) + make_change("x", ERROR, [True, False, False, True], 1.0, (5, 6))
    records += [make_record(4, right=True)]  # a problem that the change has not
    for record in records:
        if record["change"] == "x" and record["problem"] == 0 and record["seed"] == 6:
            record["run"]["scores"]["numeric"]["correct"] = False
            record["teacher_forced"]["flip"] = [True] * TOKENS
            record["free_running"] |= {"diverged": True, "first_diverged": 2}
    entry = of(summary_of(records), "x")
    assert entry["seeds"] == [5, 6]
    score = entry["score"]["numeric"]
    assert score["mean"] == (0.5 + 0 + 0 + 1) / 4  # means over the seeds of each problem
    assert score["of_control"] == pytest.approx(score["mean"] / 0.75)  # over the problems of the change
    factors = [1 + 0.05 * ((problem + seed) % 3) for problem in range(4) for seed in (5, 6)]
    assert entry["kl"]["mean"] == pytest.approx(sum(factors) / 8)
    assert entry["agreement"]["count"] == 7 * TOKENS
    assert entry["diverged"]["count"] == 1
    assert entry["tokens_shared"]["mean"] == (7 * TOKENS + 2) / 8


def test_intervals_hold_what_few_problems_cannot_rule_out():
    records = make_control([True] * 8) + make_change("x", ERROR, [False] * 8) + make_change("y", ERROR, [True] * 8)
    none, every = (of(summary_of(records), name)["score"]["numeric"] for name in "xy")
    bound = 1 - 0.05 ** (1 / 8)
    assert none["interval"] == pytest.approx(clopper_pearson(0, 8))
    assert none["of_control_interval"] == pytest.approx([0, bound])
    assert every["interval"] == pytest.approx(clopper_pearson(8, 8))
    assert every["of_control_interval"] == pytest.approx([1 - bound, 1 + bound])


@pytest.mark.parametrize(("flips", "parted", "rate"), [(TOKENS, "lower_bound", 1), (0, "upper_bound", 0)])
def test_seeds_are_no_independent_trials(flips, parted, rate):
    """48 of 48 runs of 16 problems bound as 16 of 16 do, and so do all of their tokens."""
    control = [True] * 16
    records = make_control(control) + make_change("x", ERROR, control, seeds=(0, 1, 2), flips=flips)
    entry = of(summary_of(records), "x")
    diverged, agreement = entry["diverged"], entry["agreement"]
    assert (diverged["count"], diverged["total"]) == (48 * rate, 48)
    assert (agreement["count"], agreement["total"]) == (48 * TOKENS * (1 - rate), 48 * TOKENS)
    upper = {"lower_bound": "upper_bound", "upper_bound": "lower_bound"}[parted]
    bound = 1 - 0.05 ** (1 / 16)
    for found, name in ((diverged, parted), (agreement, upper)):
        assert found[name] == pytest.approx(bound if name == "upper_bound" else 1 - bound)
        assert found["interval"] == pytest.approx(clopper_pearson(0 if name == "upper_bound" else 16, 16))


def test_one_run_that_does_not_part_leaves_no_narrower_interval_than_none():
    control = [True] * 16
    records = make_control(control) + make_change("x", ERROR, control, seeds=(0, 1, 2), flips=1)
    records[-1] = make_record(15, "x", ERROR, 2)
    found = of(summary_of(records), "x")["diverged"]
    assert found["count"] == 47
    assert found["interval"][0] < clopper_pearson(16, 16)[0]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (UNIFORM3, POINTS, "flips"),
        (UNIFORM3, error("normal", (0, 0.866), std=0.866, sign="keep"), "flips"),
        (UNIFORM3, error("points", (0, 0.8), std=0.8), None),
        (UNIFORM3, POINTS | {"side": "k"}, None),
        (error(numbers=(0.5, 0), mean=0.5, std=0.0), error("points", (0, 0.5)), "mean"),
        (error(numbers=(0.5, 0), mean=0.5, std=0.0), error("points", (0, 0.4), std=0.4), None),
        (error("uniform", (0, 2), 1, 3**-0.5), error("uniform", (-1, 1), std=3**-0.5), "shift"),
        (error("uniform", (-1, 1), std=3**-0.5, sign="keep"), error("uniform", (-1, 1), std=3**-0.5), "shape"),
        (ERROR | {"draw": "read"}, ERROR, "draw"),
        (ERROR | {"side": "k"}, ERROR | {"side": "v"}, "side"),
        (ERROR | {"side": "k", "draw": "read"}, ERROR | {"side": "v"}, None),
        (ERROR | {"correlate": "token"}, ERROR, "correlate"),
        (error("truncate", (), std=0.0, bits=4, side="k"), error("truncate", (), std=0.0, bits=4, side="v"), "side"),
        (error("truncate", (), std=0.0, bits=4), error("round", (), std=0.0, bits=4), None),
        (ERROR, ERROR, None),
        (WIDE_1, error("points", (1, 0.30), mean=1.0, std=0.30), "flips"),
        (WIDE_1, error("points", (1, 0.29), mean=1.0, std=0.29), None),  # one mean square, and no equal variance
    ],
)
def test_pairs_differ_in_one_thing(first, second, kind):
    assert compare_specs(first, second) == kind
    if kind:
        assert compare_specs(second, first) is None


def test_thirds_of_three_seeds_that_cancel_leave_nothing():
    right = {"normal:0,0.5": (3, 1), "points:0,0.5": (2, 2)}  # of three seeds: 1 - 2/3 and 1/3 - 2/3
    specs = {"normal:0,0.5": error(flips=0.023), "points:0,0.5": error("points", (0, 0.5))}
    records = make_control([True, True])
    for change, counts in right.items():
        for problem, count in enumerate(counts):
            records += [make_record(problem, change, specs[change], seed, seed < count) for seed in range(3)]
    assert (1 - 2 / 3) + (1 / 3 - 2 / 3) != 0
    assert summary_of(records)["pairs"][0]["score"]["mean"] == 0


def test_a_pairs_difference_is_that_of_its_problems():
    records = (
        make_control(CONTROL) + make_change("f", UNIFORM3, some(10, N), 2.0) + make_change("g", POINTS, CONTROL, 1.0)
    )
    (pair,) = summary_of(records)["pairs"]
    assert (pair["kind"], pair["first"], pair["second"]) == ("flips", "f", "g")
    assert pair["score"]["mean"] == -0.5
    assert pair["kl"]["mean"] == pytest.approx(sum(1 + 0.05 * (p % 3) for p in range(N)) / N)


def test_partners_of_other_shapes_must_agree():
    """Of two partners without flips one has a lower KL and one a higher: their laws differ in shape as well."""
    flipping, normal = error("normal", (0, 0.5)), error("normal", (0, 0.5), sign="keep", flip_share=0.0)
    records = make_control(CONTROL) + make_change("f", flipping | {"flip_share": 0.02}, CONTROL, 1.0)
    records += make_change("points", error("points", (0, 0.5)), CONTROL, 1.0)
    records += make_change("keep", normal, CONTROL, 2.0)
    assert verdict_of(summary_of(records), "E1c") == "cannot tell"


def flips_and_none(flipping, partner, count=N, kl=(2.0, 1.0)):
    records = make_control([bool(i % 4) for i in range(count)])
    records += make_change("uniform:-1.5,1.5", UNIFORM3, some(flipping, count), kl[0])
    return records + make_change("points:0,0.8660254", POINTS, some(partner, count), kl[1])


OURS = "kvarn:k2v2,tile=32,first=16"


def rivals(kl, more=0.0, ours=OURS):
    """KVarN and int2, each packed whole; int2's cache has so many bits more."""
    records = make_control(CONTROL) + make_change(ours, quant("KVarN", 2.9, first=16, block=32), CONTROL, 1.0)
    records += make_change("int2", quant("Integer", 2.25, first=16), some(10, N), kl)
    for record in records:
        if record["change"] == "int2":
            record["cache"] |= {"packed": 1.0, "bits": 2.9 + more}
    return summary_of(records)


def test_kvarn_against_other_methods_of_2_bits():
    assert [verdict_of(rivals(0.5), name) for name in ("E6a", "E6b")] == ["holds", "does not hold"]
    (pair,) = rivals(2.0)["pairs"]
    assert (pair["kind"], pair["first"], pair["second"]) == ("method", "int2", OURS)
    assert pair["score"]["mean"] == -0.5


def test_bits_count_for_kvarn_and_against_it():
    fewer, more = rivals(2.0, more=-0.5), rivals(0.5, more=0.5)
    assert verdict_of(fewer, "E6b") == verdict_of(more, "E6b") == "cannot tell"
    assert "is worse with fewer bits, so it does not count" in to_markdown(fewer)
    assert "has more bits, so it decides nothing" in to_markdown(more)
    assert verdict_of(rivals(0.5, more=-0.5), "E6b") == "does not hold"
    assert verdict_of(rivals(2.0, more=0.5), "E6b") == "holds"


def test_one_method_refutes_what_is_said_of_every_other():
    records = make_control(CONTROL) + make_change(OURS, quant("KVarN", 2.9, first=16, block=32), CONTROL, 1.0)
    for name, kl in (("int2", 2.0), ("quarot:2", 0.5)):
        records += make_change(name, quant("Integer", 2.25, first=16), CONTROL, kl)
    assert verdict_of(summary_of(records), "E6b") == "does not hold"


def test_a_variant_of_kvarn_does_not_speak_for_it():
    summary = rivals(2.0, ours="kvarn:k2v2,passes=0,rotate=off,first=16")
    assert not summary["pairs"]
    assert verdict_of(summary, "E6b") == "not run"


def test_methods_that_are_not_compared_are_named_with_the_reason():
    """Beside KVarN a method that qualifies and one for each reason: every other one is in the figure, and no pair."""
    alike = {"bits": 2.25, "first": 16, "own": "prompt"}
    rival, otherwise = quant("Integer", **alike), quant("Integer", **alike | {"own": "step"})
    others = {
        "a": (rival, None),
        "b": (quant("Integer", **alike | {"bits": 4.25}), "it takes more than 3 bits an element"),
        "c": (quant("Integer", **alike | {"first": 0}), "it keeps other first tokens exactly"),
        "d": (quant("KVarN", **alike), "it is a form of KVarN"),
        "e": (rival | {"v": None}, "it leaves a side as it is"),
        "f": (rival, "its packed share is 10 points away"),
        "g": (rival | {"k": otherwise["k"]}, "it reads rows being written otherwise"),
        "h": (rival | {"v": otherwise["v"]}, "it reads rows being written otherwise"),
    }
    ours = quant("KVarN", 2.9, first=16, block=32, own="prompt")
    records = make_control(CONTROL) + make_change(OURS, ours, CONTROL, 1.0)
    for name, (spec, _) in others.items():
        records += make_change(name, spec, CONTROL, 2.0)
    for record in records:
        record["cache"]["packed"] -= 0.1 * (record["change"] == "f")
    summary = summary_of(records)
    assert [(pair["first"], pair["second"]) for pair in summary["pairs"]] == [("a", OURS)]
    figure = next(claim for claim in summary["claims"] if claim["id"] == "E6b")["figure"]
    for name, (_, why) in others.items():
        (line,) = [line for line in figure if line.startswith(f"`{name}`")]
        assert line == f"`{name}` is not compared with `{OURS}`: {why}" if why else "over 40 problems" in line


def test_the_page_names_how_every_method_reads_rows_being_written():
    named = {"KVarN": "kvarn", "QuaRot": "quarot", "TurboQuant": "turboquant", "KIVI": "kivi", "hf": "hf"}
    named |= {"llama.cpp's blocks": "llama", "int": "int2", "fp8": "fp8", "mask": "mask"}
    exact, later, packed = re.fullmatch(
        r".*: (.*) read them exactly, (.*) those of every later step as well; (.*) read them packed\.", OWN
    ).groups()
    found = [{named[name] for name in re.split(", | and ", part)} for part in (exact, later, packed)]
    known = {name: method.own for name, method in METHODS.items() if name not in ("int4", "int8")}
    assert found[0] == {name for name, own in known.items() if own != "none"}
    assert found[1] == {name for name, own in known.items() if own == "step"}
    assert found[2] == {name for name, own in known.items() if own == "none"}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_problems_decide_nothing(count):
    records = flips_and_none(0, count, count)
    summary = summary_of(records)
    judged = {claim["id"]: claim["verdict"] for claim in summary["claims"] if claim["id"] != "E1c"}
    assert {judged.pop(name) for name in ("E1a", "E1b", "E3")} == {"cannot tell"}
    assert set(judged.values()) == {"not run"}


def test_changes_that_were_asked_for_and_not_begun_are_said():
    records = study_records()
    changes = [[name, seed] for name in ("none", "normal:0,0.5") for seed in ((0,) if name == "none" else (0, 1, 2, 3))]
    sessions = [{"asked": {"injection": changes}}, {"asked": {"injection": [["int4", 0]]}}, {}]
    summary = summarize_injection(records, {"config": {"task": "gsm8k"}, "sessions": sessions})
    text = to_markdown(summary)
    assert f"UNFINISHED: `normal:0,0.5` has {3 * N} of {4 * N} samples." in text
    assert f"UNFINISHED: `int4` has 0 of {N} samples." in text
    assert text.count("UNFINISHED") == 2


def test_nothing_run_decides_nothing():
    for records in ([], make_control(CONTROL)):
        summary = summary_of(records)
        assert {claim["verdict"] for claim in summary["claims"]} == {"not run"}
        assert not draw_injection(summary)
        to_html(summary)
        assert "statement  " not in shown(summary)
        assert "Not run here: E1a, " in (text := to_markdown(summary))
        assert "| statement" not in text
        assert "The seed study's table" not in text


def test_invalid_samples_enter_no_figure_and_decide_nothing():
    records = flips_and_none(2, 28)
    whole = summary_of(records)
    at = next(i for i, r in enumerate(records) if r["change"] == "uniform:-1.5,1.5" and r["problem"] == 3)
    records[at] = injection_records.make_broken(records[at])
    summary = summary_of(records)
    entry = of(summary, "uniform:-1.5,1.5")
    assert entry["samples"] == {"total": N, "ok": N - 1, "without_control": 0}
    assert entry["score"]["numeric"]["problems"] == N - 1
    assert verdict_of(whole, "E1a") == "holds"
    assert {verdict_of(summary, name) for name in ("E1a", "E1b", "E1c", "E3")} == {"cannot tell"}
    assert "1 samples invalid at logits, layer 3 (changed, nan)" in to_markdown(summary)
    records[2] = injection_records.make_broken(records[2])  # a clean run
    entry = of(summary_of(records), "points:0,0.8660254")
    assert entry["samples"] == {"total": N, "ok": N - 1, "without_control": 1}


def test_methods_are_compared_at_equal_windows():
    specs = {
        "int4,first=32": quant(first=32), "llama:q4_0,first=32": quant("llama", 4.5, first=32),
        "kvarn:k4v4": quant("kvarn", 4.3, first=128, block=128), "int4": quant(),
    }  # fmt: skip
    records = make_control(CONTROL)
    for name, spec in specs.items():
        records += make_change(name, spec, CONTROL)
    summary = summary_of(records)
    window = {"first": 32, "recent": 0}
    assert summary["windows"] == [{"k": window, "v": window, "changes": ["int4,first=32", "llama:q4_0,first=32"]}]
    assert "**first + recent tokens kept, K: 32 + 0, V: 32 + 0**" in (text := to_markdown(summary))
    assert text.count(OWN) == 2


def test_ifeval_has_prompts_and_instructions():
    records = make_control([True, False]) + make_change("x", ERROR, [True, False])
    for record, answer in zip(records, ("11", "10", "11", "1000"), strict=True):
        both = {"answer": answer, "correct": "0" not in answer}
        record["run"]["scores"] = {"strict": both, "loose": both}
    summary = summary_of(records, task="ifeval")
    assert summary["primary"] == "strict"
    assert of(summary, "x")["score"]["strict, instructions"]["mean"] == 3 / 6
    assert of(summary, "none")["score"]["strict, instructions"]["mean"] == 3 / 4
    assert of(summary, "x")["score"]["strict"]["mean"] == 1 / 2


def test_a_ratio_that_is_one_but_for_rounding_reads_100():
    score = {"of_control": 1 - 1e-16, "of_control_interval": [0.9, 1 + 2e-16]}
    assert show_of_control(score) == "100 [90, 100]"
    assert show_of_control(score | {"of_control_interval": None}) == "100"
