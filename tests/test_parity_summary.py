"""JAX beside PyTorch, from records: pairs of cells, the gap's verdict, direction, and whether the same places part."""

import numpy as np
import pytest
from plain_records import find_cells, summarize_parity, summarize_study
from scipy import stats
from study_records import as_torch, make_parity, make_run, make_samples

from jaxkv.experiments.parity.record import CACHE_PAIRS, CELLS, FRAMEWORK_PAIRS, PAIRS
from jaxkv.experiments.parity.report import judge_gap
from jaxkv.overview.parity import summarize_free
from jaxkv.records import to_record


def both(ours=(), theirs=(), count=12, shift=0):
    """A JAX and a PyTorch run; problems in `ours` and `theirs` part from token 5 on. `shift` moves PyTorch's tokens."""

    def make(parted):
        return make_samples(count=count, flips=lambda p: (5,) if p in parted else ())

    torch = as_torch(make(theirs))
    for sample in torch:
        for arm in sample["arms"].values():
            arm["tokens"] = [*arm["tokens"][:8], *(token + shift for token in arm["tokens"][8:])]
    return [make_run(make(ours), name="jax"), make_run(torch, name="torch")]


def free(runs):
    (group,) = find_cells(runs)
    return summarize_free(group)


def test_four_cells_and_six_pairs():
    found = free(both(ours=(1, 2)))
    assert list(found["cells"]) == ["jax uncached", "jax cached", "torch uncached", "torch cached"]
    parted = {pair: values["diverged"]["count"] for pair, values in found["pairs"].items()}
    assert parted == {
        "jax uncached | jax cached": 2, "jax uncached | torch uncached": 2, "jax uncached | torch cached": 2,
        "jax cached | torch uncached": 0, "jax cached | torch cached": 0, "torch uncached | torch cached": 0,
    }  # fmt: skip
    pair = found["pairs"]["jax uncached | jax cached"]
    assert pair["first_diverged"] == 5
    assert pair["agreement"]["count"] == 12 * 20 - 2 * 15
    assert found["pairs"]["jax cached | torch cached"]["diverged"]["upper_bound"] == pytest.approx(0.22, abs=0.01)


def test_the_gap_is_judged_by_problems():
    (contrast,) = free(both(ours=range(10), theirs=range(10)))["contrasts"]
    assert contrast["gap"]["larger"] == "cache"
    (contrast,) = free(both(shift=100))["contrasts"]
    assert contrast["gap"]["larger"] == "framework"
    assert contrast["parted"]["framework"]["count"] == 12
    assert contrast["parted"]["cache"]["count"] == 0
    (contrast,) = free(both(ours=(1,)))["contrasts"]
    assert contrast["gap"]["larger"] is None


def test_gap_is_a_paired_comparison():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 40))
    found = judge_gap((a + 0.2).tolist(), a.tolist(), shares=False)
    assert found["larger"] == "framework"
    found = judge_gap(a.tolist(), b.tolist(), shares=False)
    low, high = stats.ttest_rel(a, b).confidence_interval()
    assert found["interval"][0] <= low < high <= found["interval"][1]
    for shares in (False, True):
        assert judge_gap([1.0], [2.0], shares=shares)["larger"] is None
        # Five of five lean one way once in sixteen by chance.
        assert judge_gap([1.0] * 5, [0.0] * 5, shares=shares)["larger"] is None
        assert judge_gap([1.0] * 6, [0.0] * 6, shares=shares)["larger"] == "framework"
        assert judge_gap([0.0] * 6, [0.0] * 6, shares=shares)["larger"] is None


def test_whether_the_same_sequences_and_steps_part():
    same = free(both(ours=(1, 2, 3), theirs=(1, 2, 3)))["contrasts"][0]
    assert same["same_sequences"] == {
        "places": 12, "first": 3, "second": 3, "both": 3, "expected": 0.75,
        "fisher_p": pytest.approx(stats.fisher_exact([[9, 0], [0, 3]]).pvalue),
    }  # fmt: skip
    assert same["same_flips"]["both"] == 3
    assert same["same_flips"]["fisher_p"] is None  # steps of a sequence are not independent
    apart = free(both(ours=(1, 2, 3), theirs=(4, 5, 6)))["contrasts"][0]
    assert apart["same_sequences"]["both"] == apart["same_flips"]["both"] == 0


def test_steps_after_the_cached_arms_part_are_not_compared():
    """From there on the two frameworks answer different questions."""
    assert free(both())["contrasts"][0]["same_flips"]["places"] == 12 * 20
    assert free(both(shift=100))["contrasts"][0]["same_flips"]["places"] == 12 * 9


def test_runs_are_matched_by_condition_and_prompt():
    runs = both()
    for sample in runs[1].records:
        sample["sampling"]["seed"] = 1
    assert find_cells(runs) == []
    runs = both()
    for sample in runs[1].records[3:]:
        sample["prompt_sha256"] = "f" * 64
    assert free(runs)["problems"] == 3
    for sample in runs[1].records:
        sample["prompt_sha256"] = "e" * 64
    assert free(runs) is None
    assert find_cells(both()[:1]) == []


def make_foreign(count=12):
    """What an engine elsewhere made, one arm alone, another token from 15 on."""
    return [
        {
            "experiment": "foreign", "problem": p, "key": ["foreign", p], "framework": "vllm",
            "versions": {"vllm": "0.11"}, "device": None, "precision": "fp16", "attention": None, "prompt_tokens": 3,
            "prompt_sha256": f"{p:064x}", "sampling": None, "free_running": None, "label_change": None,
            "shared_prefix": None,
            "arms": {"cached": {
                "tokens": [*range(15), 0, 0, 0, 0, 0], "text": None, "stop": None, "scores": None, "top": None,
            }},
        }
        for p in range(count)
    ]  # fmt: skip


def test_an_engine_elsewhere_is_one_more_cell():
    runs = [both()[0], make_run(make_foreign(), name="vllm", experiments=["foreign"])]
    found = free(runs)
    assert found["pairs"]["jax cached | vllm cached"]["diverged"]["count"] == 12
    assert found["pairs"]["jax cached | vllm cached"]["accuracy"] is None
    assert found["cells"]["vllm cached"] is None
    assert found["contrasts"] == []
    assert summarize_study(runs)["parity"]


# Along the same tokens.


def summarize(**changes):
    return summarize_parity(make_parity(**changes), {"fingerprint": "f"})


def test_forced_gap():
    found = summarize(framework=1e-2, cache=1e-4)
    assert found["gap"]["larger"] == "framework"
    assert found["gap"]["ratio"] == pytest.approx(100)
    assert found["gap"]["ratio_interval"] == pytest.approx([100, 100])
    assert summarize(framework=1e-4, cache=1e-2)["gap"]["larger"] == "cache"
    assert summarize(framework=1e-3, cache=1e-3)["gap"]["larger"] is None
    assert summarize(cache=0.0)["gap"]["ratio"] is None


def test_forced_pairs_and_layers():
    found = summarize()
    assert set(found["pairs"]) == set(PAIRS)
    assert found["pairs"][FRAMEWORK_PAIRS["cached"]]["kl"]["mean"] == pytest.approx(1e-2 * 1.25)
    assert found["pairs"][CACHE_PAIRS["torch"]]["kl"]["mean"] == pytest.approx(1e-4 * 1.25)
    assert found["layers"]["mean"][FRAMEWORK_PAIRS["cached"]] == pytest.approx([0, 1e-3, 1e-3])
    assert found["layers"]["bit_equal"] == dict.fromkeys(CELLS, 30)
    assert found["cosine"] == {"steps": 30, "mean": 0.5, "interval": [0.5, 0.5]}


def test_flips_between_the_same_tokens():
    records = make_parity()
    for framework, problems in (("jax", (0, 1)), ("torch", (1, 2))):
        for p in problems:
            records[p]["pairs"][CACHE_PAIRS[framework]]["flip"][2] = True
            records[p]["choices"][f"{framework} cached"][2] = 9
    found = summarize_parity(records, {})
    assert {k: found["same_flips"][k] for k in ("first", "second", "both")} == {"first": 2, "second": 2, "both": 1}
    assert found["same_choice"] == {"count": 1, "total": 1}
    records[1]["choices"]["torch cached"][2] = 8
    assert summarize_parity(records, {})["same_choice"] == {"count": 0, "total": 1}


def test_faults():
    records = make_parity(count=2)
    records[1] |= {"status": "invalid", "pairs": None, "choices": None, "cosine": None, "layers": None}
    records[1]["invalid"] = {
        "arm": "torch cached", "layer": 1, "op": "resid_pre", "position": 3, "step": 2, "value": "inf",
    }  # fmt: skip
    found = summarize_parity(records, {})
    assert found["problems"] == {"asked": 2, "total": 2, "ok": 1, "invalid": 1}
    assert found["invalid"][0]["arm"] == "torch cached"
    assert summarize_parity(records[1:], {})["status"] == "invalid"
    assert summarize_parity([], {})["status"] == "empty"
    records[0]["tokens"] = [1]
    with pytest.raises(ValueError, match=r"^layers\.bit_equal\.jax uncached: 5 is more than 1"):
        to_record(records[0])
