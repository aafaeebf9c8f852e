"""Symptoms that people reported elsewhere, in their smallest form, from the programs to the verdict."""

import copy
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from plain_records import summarize_study
from small_models import same_bits, unaudited
from test_divergence import Scoring

from jaxkv.cache import EMPTY, empty_cache
from jaxkv.checkpoints import load
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.experiments.divergence.run import Divergence
from jaxkv.experiments.driver import run_missing
from jaxkv.experiments.report_parts import Run
from jaxkv.logits import compare_logits
from jaxkv.records import to_plain
from jaxkv.rollout import make_layout, make_rows, start_rollout

TILE = 8
PROMPT = tuple(np.random.default_rng(0).integers(12, 800, 23).tolist())
SPEC = RunSpec(16, bucket=8, control_problems=0, stepwise_problems=0, truth_problems=1)


@functools.cache
def make_arms(precision, tile, whole=False):
    """Programs, prepared weights and tokenizer of a shipped model, or of its first layer.

    Of less width, arms in fp16 round alike; those in bf16 do of one layer.
    """
    checkpoint = load("tiny-llama2", precision=make_precision(precision))
    config = checkpoint.config if whole else dataclasses.replace(checkpoint.config, num_layers=1)
    arms = Arms(config, make_precision(precision), tile=tile)
    leaves = {path: leaf[...] for path, leaf in flat_paths(checkpoint.state).items()}
    return arms, arms.prepare(with_leaves(arms.abstract_state, leaves)), checkpoint.tokenizer


@functools.cache
def run_prompt(precision, tile, whole=False):
    """The study's run of one prompt."""
    arms, state, tokenizer = make_arms(precision, tile, whole)
    batches = run_missing(Divergence(unaudited(arms), state, SPEC, tokenizer, Scoring()), [Item(0, PROMPT, "a")])
    (record,) = to_plain([record for records, _ in batches for record in records])
    config = {"model": {"name": "tiny"}, "precision": arms.precision.to_json(), "decoding": {"tile": tile}}
    name = f"{precision}-{tile}"
    return Run(name, {"config": config, "sessions": [], "fingerprint": name}, [record])


@pytest.mark.parametrize(
    ("aligned", "precisions"),
    daily(
        [("fp16", ("fp16", "fp32"))],
        [("fp16", ("fp16", "fp32")), *((one, ("fp16", "bf16", "fp32")) for one in ("fp16", "bf16"))],
    ),
)
def test_case_1_one_prompt_in_several_dtypes(aligned, precisions):
    """huggingface/transformers 25420: logits differ with and without cache in 16 bits, hardly in fp32. Aligned, with
    the cache on, no bit differs; whether it is rounding one prompt alone does not tell."""
    runs = [*((precision, None) for precision in precisions), (aligned, TILE)]
    study, kl = summarize_study([run_prompt(*one, "bf16" in precisions) for one in runs]), {}
    for condition in study["conditions"]:
        found = condition["divergence"]["teacher_forced"]
        if condition["regime"] == "aligned":
            assert found["kl"]["max"] == found["max_abs"]["max"] == 0
            assert found["bit_equal"]["count"] == found["tokens"] == 16
        else:
            kl[condition["precision"]] = found["kl"]["mean"]
    assert min(kl[precision] for precision in precisions[:-1]) > 1e4 * kl["fp32"] > 0
    verdicts = {cause["name"]: cause["verdict"] for cause in study["causes"]}
    assert verdicts == {f"tiny {precision}": "cannot tell" for precision in precisions}


def test_case_1_a_fault_is_no_rounding():
    """An aligned step that differs is not called rounding, and without an aligned one nothing is said."""
    plain, aligned = (copy.deepcopy(run_prompt("fp16", tile)) for tile in (None, TILE))
    (cause,) = summarize_study([plain])["causes"]
    assert cause["verdict"] == "cannot tell"
    aligned.records[0]["teacher_forced"]["bit_equal"][4] = False
    (cause,) = summarize_study([plain, aligned])["causes"]
    assert cause["verdict"] == "fault"


@pytest.mark.parametrize(("precision", "tile"), [("fp16", None), ("fp32", None), ("fp16", TILE)])
def test_case_12_a_prompt_served_from_its_own_cache(precision, tile):
    """ml-explore/mlx-lm 259: a prompt in the cache, cut by one token and that token decoded again, gives other logits.

    The prefill had the last row among many, the cut cache has it alone: another shape, other roundings. The cache is
    the same, and with both through one program so is every bit.
    """
    arms, state, _ = make_arms(precision, tile)
    layout = make_layout([list(PROMPT)], SPEC.new_tokens, SPEC.bucket, arms.config, tile)
    tokens, rows = make_rows([list(PROMPT)], [0], 0, layout)
    end, step = len(PROMPT), len(PROMPT) + 1

    def serve(layout, rows, cache, prefilled):
        """Logits of every step up to that after the prompt, from what `cache` lacks of it, and the cache then."""
        run = start_rollout(arms, tokens, rows, layout)
        if tile is None:
            run, cache = arms.cached_loop(state, prefilled, run, rows, step, cache)
        else:
            run, cache = arms.tile_loop(state, run, rows, step, cache, False, False, tile=tile)
        return run.logits[0], cache

    cache, prefilled = empty_cache(arms.config, arms.precision, 1, layout.slots), None
    if tile is None:
        prefilled, cache = arms.prefill(state, jnp.asarray(tokens[:, : layout.prefill]), rows, cache)
        whole = prefilled
    else:
        logits, cache = serve(layout, rows, cache, None)
        whole = logits[:1]
    kept = [np.asarray(buffer)[:, : end - 1] for buffer in (*cache.k, *cache.v)]
    cut = dataclasses.replace(cache, positions=cache.positions.at[:, end - 1 :].set(EMPTY))
    shorter = dataclasses.replace(layout, prompt=end - 1)
    forced = dataclasses.replace(rows, prompt=rows.prompt - 1, forced_until=rows.forced_until + end)
    logits, cache = serve(shorter, forced, cut, prefilled)

    filled = (np.resize(row, (SPEC.new_tokens, row.size)) for row in (np.asarray(whole), np.asarray(logits)[1]))
    found = compare_logits(*filled, 1)  # of the shape that a record compares, which is compiled
    assert same_bits(kept, [np.asarray(buffer)[:, : end - 1] for buffer in (*cache.k, *cache.v)])
    if tile is not None:
        assert found["bit_equal"] == [True]
        assert found["kl"] == found["max_abs"] == [0]
        return
    assert found["bit_equal"] == [False]
    size = {"fp16": 2.0**-10, "fp32": 2.0**-23}[precision] * float(np.abs(whole).max())
    assert 0 < found["max_abs"][0] < 16 * size  # a few roundings, no more
