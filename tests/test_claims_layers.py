"""C4 and C5 from records of drift, patching and the aligned regime, and the figures drawn of them."""

import copy

import pytest
from layer_records import make_drift, make_patching
from plain_records import average_grids, judge, summarize_study, write_blocks
from study_records import align, drift_run, make_run, make_samples

from jaxkv.experiments.drift.record import TENSORS
from jaxkv.overview.claims import NOT_REPRODUCED, REPRODUCED
from jaxkv.reporting.document import to_markdown
from jaxkv.reporting.html import to_html
from jaxkv.reporting.rules import CANNOT_TELL


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ({"mistral": 0.8, "gemma2": 0.8}, NOT_REPRODUCED),
        ({"mistral": 0.5, "gemma2": 0.2}, CANNOT_TELL),
        ({"gemma2": 0.2}, CANNOT_TELL),
    ],
)
def test_c4(shares, verdict):
    claim = judge(*(drift_run(family, first) for family, first in shares.items()), name="C4")
    assert claim["verdict"] == verdict
    for family in shares:
        assert f"{family} fp16 with K/V heads repeated into MHA: 49.9 % [" in "\n".join(claim["control"])


def test_c4b_sets_the_model_beside_itself():
    claim = judge(drift_run("mistral", 0.0919, 0.0786, count=12), name="C4b")
    assert claim["verdict"] == NOT_REPRODUCED  # more, but by far not twice
    assert "9.19 % [" in claim["figure"][0]
    assert "1.33 [" in claim["figure"][0]
    assert "points more, 1.17 [" in claim["figure"][0]
    run = drift_run("mistral", 0.0919, 0.0786, count=12)
    for problem, record in enumerate(run.records):  # moves both alike, so that only a paired interval is narrow
        for part in (record, record["repeated"]):
            relative = part["layers"]["resid_pre"]["decoded"]["relative"]
            part["layers"]["resid_pre"]["decoded"]["relative"] = [0.0, relative[1] * (1 + problem), *relative[2:]]
    found = summarize_study([run])["conditions"][0]["drift"]["repeated"]["first_layer_against"]["ratio"]
    assert found["interval"] == pytest.approx([0.0919 / 0.0786] * 2, rel=1e-3)


def test_c4_takes_mha_for_no_gqa_and_one_problem_for_no_interval():
    mha = drift_run("llama", 0.2, heads=(4, 4))
    assert judge(mha, drift_run("gemma2", 0.2), name="C4")["verdict"] == CANNOT_TELL
    one = drift_run("mistral", 0.2, count=1)
    assert judge(one, drift_run("gemma2", 0.2), name="C4")["verdict"] == CANNOT_TELL


def test_c4_speaks_of_16_bits():
    wide = drift_run("mistral", 0.2)
    wide.run["config"]["precision"] = {"name": "fp32"}
    assert "no valid 16-bit" in judge(wide, name="C4")["figure"][0]


def patching_run(name="patching", **changes):
    return make_run(make_patching(**changes), name=name, experiments=["patching"])


def test_c5a_one_of_two_runs_refutes():
    most = range(11)
    both = patching_run(back_state=most), patching_run("other", back=most, back_state=most)
    assert judge(*both, name="C5a")["verdict"] == NOT_REPRODUCED


def test_c5a_needs_its_controls():
    run = patching_run(back_state=range(11))
    broken = copy.deepcopy(run.records)
    for record in broken:
        if record["patch"] == "everything":
            record["all"]["bit_equal"] -= 1
    claim = judge(make_run(broken, name="broken", experiments=["patching"]), name="C5a")
    assert claim["verdict"] == CANNOT_TELL
    assert "Control failed" in claim["figure"][0]


def test_c5b_a_cache_without_a_difference():
    plain, aligned = make_run(make_samples()), make_run(align(make_samples()), name="aligned")
    claim = judge(plain, aligned, name="C5b")
    assert "12 of 12 (95 % lower bound 78 %); through one program with the cache on 0 of 12" in claim["figure"][0]
    assert "in these programs a cache alone does not make most of it" in claim["figure"][-1]
    assert judge(plain, name="C5b")["verdict"] == CANNOT_TELL
    assert judge(aligned, name="C5b")["verdict"] == CANNOT_TELL
    still = make_samples()
    for sample in still:
        sample["shapes"]["tile"] = 8
    claim = judge(plain, make_run(still, name="aligned"), name="C5b")
    assert "a cache alone makes the arms part: a fault" in claim["figure"][-1]


def test_c5b_the_steps_of_two_problems_are_two_trials():
    """A gate of two problems says nothing alone, however many its steps."""
    plain = make_run(make_samples(count=40))
    plain.run["sessions"][0]["gate"] = {"passed": True, "problems": 2, "steps": 200, "tile": 8}
    claim = judge(plain, name="C5b")
    assert claim["verdict"] == CANNOT_TELL
    assert "through one program with the cache on 0 of 2 (95 % upper bound 78 %)" in claim["figure"][0]


def test_c5b_runs_that_share_problems_do_not_add_up():
    runs = [make_run(make_samples(count=3), name=name) for name in "abc"]
    runs += [make_run(align(make_samples(count=3)), name=f"aligned {name}") for name in "abc"]
    (line,) = judge(*runs, name="C5b")["figure"]
    aligned = "through one program with the cache on 0 of 3 (95 % upper bound 63 %)"
    assert line.endswith(f"3 of 3 (95 % lower bound 37 %); {aligned}")


def test_c5b_a_few_steps_of_every_problem_are_not_most():
    """One aligned step of 20 differs in each: a difference in all problems, and little of the divergence."""
    samples = align(make_samples())
    for sample in samples:
        sample["teacher_forced"]["bit_equal"][3] = False
    runs = make_run(make_samples()), make_run(samples, name="aligned")
    assert judge(*runs, name="C5b")["verdict"] == CANNOT_TELL
    assert {cause["verdict"] for cause in summarize_study(runs)["causes"]} == {"fault"}


def test_c5a_a_run_that_asks_some_problems_again_adds_nothing():
    whole = patching_run(back_state=range(11))
    again = make_run(make_patching(back_state=range(11), count=4), name="layers", experiments=["patching"])
    assert judge(whole, again, name="C5a")["verdict"] == REPRODUCED
    assert judge(whole, again, name="C5a")["p"] == judge(whole, name="C5a")["p"]


# Grids and pages.


def test_grids_are_averaged_by_position():
    short, long = make_drift(count=2)
    short["grid"]["bins"], short["places"]["decoded"] = [[0, 4], [4, 9]], 0
    for tensor in TENSORS:
        short["layers"][tensor]["decoded"] = short["repeated"]["layers"][tensor]["decoded"] = None
    found = average_grids([short, long], bins=9)
    assert found["bins"] == [[begin, begin + 2] for begin in range(0, 18, 2)]
    rows = [[row[0] for row in record["grid"]["k"]["relative"]] for record in (short, long)]
    means = [sum(pair) / 2 for pair in zip(*rows, strict=True)]
    assert [row[0] for row in found["k"]] == pytest.approx(means, rel=1e-3)
    assert found["k"][0][-1] == pytest.approx(long["grid"]["k"]["relative"][0][1], rel=1e-3)
    assert average_grids([]) is None


def render(*runs):
    blocks = write_blocks(runs)
    return to_html("t", blocks), to_markdown("t", blocks)


def test_drift_and_patching_have_sections_and_figures():
    page, text = render(drift_run("mistral", 0.4), patching_run(back_state=range(11)))
    assert "## Drift by layer" in text
    assert "## Activation patching" in text
    for title in ("mistral fp16: decoded positions", "mistral fp16: V", "tiny fp16: uncached into cached"):
        assert f">{title}</text>" in page
    assert "residual, K and V" in page


def test_a_changed_record_changes_the_figures():
    before = render(drift_run("mistral", 0.4), patching_run())
    assert render(drift_run("mistral", 0.41), patching_run())[0] != before[0]
    assert render(drift_run("mistral", 0.4), patching_run(residual=0.3))[0] != before[0]


def test_what_does_not_differ_is_not_drawn_but_said():
    quiet = make_drift()
    for record in quiet:
        for part in (record, record["repeated"]):
            for tensor in part["layers"].values():
                for column in tensor.values():
                    column["relative"] = [0.0] * len(column["relative"])
    page, text = render(make_run(quiet, name="quiet", experiments=["drift"]))
    assert "Not drawn, since nothing differs: tiny fp16." in text
    assert "decoded positions</text>" not in page
