"""Patching everything gives the donor's logits, with itself nothing; a planted cause is undone by its own patch."""

import functools
import itertools
import json
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from cases import daily
from layer_records import STEPS, make_patched
from plain_records import summarize_patching
from sample_records import damage
from shown import show_by
from small_models import (
    changed_state,
    make_prompts,
    run_all,
    run_broken,
    same_bits,
    small_arms,
    small_config,
    small_state,
    unaudited,
)

from jaxkv.checkpoints.fill import flat_paths
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.experiments.patching import run as patching
from jaxkv.experiments.patching.record import (
    DIRECTIONS,
    EVERYTHING,
    INTO_CACHED,
    INTO_UNCACHED,
    ITSELF,
    KEYS,
    KEYS_VALUES,
    PATCHES,
    RESIDUAL,
    RESIDUAL_NOW,
    VALUES,
    Kind,
)
from jaxkv.experiments.patching.report import conclude, write_patching
from jaxkv.experiments.patching.run import Patcher, Patching, select, spread
from jaxkv.models import decoder, layers
from jaxkv.records import to_line, to_record
from jaxkv.rollout import force, make_layout, make_rows
from jaxkv.tracing import make_patch

NEW_TOKENS = 6
RUN = {"fingerprint": "ab"}
SPEC = RunSpec(new_tokens=NEW_TOKENS, batch_size=2, padding="left", bucket=8)
PROMPTS = make_prompts((9, 12))
ITEMS = [Item(4 + i, tuple(prompt), "") for i, prompt in enumerate(PROMPTS)]


def make_arms(family="llama", precision="fp16", layers=1):
    arms = small_arms(family, precision, layers=layers)
    return arms, arms.prepare(small_state(family, precision, layers=layers))


class Bench:
    """A left-padded batch of a small model, and bare runs of both arms along the cached arm's tokens."""

    def __init__(self, family, precision, num_layers=1):
        arms, self.state = make_arms(family, precision, num_layers)
        self.layout = make_layout(PROMPTS, NEW_TOKENS, 8, arms.config)
        tokens, rows = make_rows(PROMPTS, [0, 1], 0, self.layout)
        self.arms, self.L = arms, num_layers
        self.patcher = Patcher(arms, self.state, self.layout)
        free = self.patcher.run("cached", tokens, rows)
        self.text, self.rows, self.forced = np.asarray(free.run.tokens), rows, force(rows, free.run)
        self.bare = {arm: self.run(arm) for arm in ("cached", "uncached")}

    def run(self, arm, values=None, where=None, newest=False, state=None):
        patcher = self.patcher if state is None else Patcher(self.arms, state, self.layout)
        return patcher.run(arm, self.text, self.forced, values, where, newest)

    def masks(self, kind, among=None, slots=None):
        every = np.ones(self.layout.slots, bool) if slots is None else slots
        return select(kind, range(self.L) if among is None else among, self.L, every)


make_bench = functools.cache(Bench)


def same_logits(a, b):
    return same_bits(a.run.logits, b.run.logits)


# The controls.


FAMILIES = ("llama", "mistral", "gemma2")


@pytest.mark.parametrize(
    ("family", "precision", "num_layers"),
    daily(  # whose programs other tests here need too
        [("llama", "fp16", 1), ("mistral", "fp32", 2)],
        [("mistral", "fp32", 2), *itertools.product(FAMILIES, ("fp16", "bf16", "fp32"), (1,))],
    ),
)
def test_everything_gives_the_other_arm_and_itself_changes_nothing(family, precision, num_layers):
    """Also in arms that differ on any CPU; those of one model may round alike."""
    bench = make_bench(family, precision, num_layers)
    assert bench.rows.first.tolist() == [3, 0]
    assert bench.text[:, bench.layout.prompt :].any()
    everything, state_alone = (bench.masks(PATCHES[name]) for name in (EVERYTHING, KEYS_VALUES))
    leaf = flat_paths(bench.state)["layers/0/mlp/up"][...]
    other = changed_state(bench.state, "layers/0/mlp/up", slice(None), -leaf)
    for recipient, donor in itertools.permutations(("cached", "uncached")):
        base, given = bench.bare[recipient], bench.bare[donor]
        assert same_logits(bench.run(recipient, base.values, everything), base)
        assert same_logits(bench.run(recipient, given.values, everything), given)
        assert not same_logits(bench.run(recipient, state=other), given)
        assert same_logits(bench.run(recipient, given.values, everything, state=other), given)
        assert not same_logits(bench.run(recipient, given.values, state_alone, state=other), given)


# Where a patch acts. One model serves all tests here.


def shifted(values, name):
    return values | {name: values[name] + 1}


bench_of_two = functools.partial(make_bench, "mistral", "fp32", 2)


def at(bench, *slots):
    return np.isin(np.arange(bench.layout.slots), slots)


def equal_steps(a, b, row=0):
    return [same_bits(x, y) for x, y in zip(a.run.logits[row], b.run.logits[row], strict=True)]


@pytest.mark.parametrize("arm", ["cached", "uncached"])
@pytest.mark.parametrize("name", ["k.1", "v.1", "resid_pre.1"])
def test_a_patch_acts_from_its_slot_on_in_its_layer_alone(arm, name):
    bench = bench_of_two()
    base, slot = bench.bare[arm], bench.layout.prompt + 2  # the token of step 2, whose row has the logits of step 3
    found = bench.run(arm, shifted(base.values, name), {name: at(bench, slot)})
    assert equal_steps(found, base)[:4] == [True, True, True, False]
    expected = np.array(base.values[name])
    expected[:, slot] += 1
    np.testing.assert_array_equal(found.values[name][:, : slot + 1], expected[:, : slot + 1])
    for other in ("resid_pre.0", "resid_pre.1", "k.0", "v.0"):
        if other != name:
            assert same_bits(found.values[other][:, : slot + 1], base.values[other][:, : slot + 1])


def test_keys_are_patched_on_kv_heads():
    bench = bench_of_two()
    config, base = bench.arms.config, bench.bare["cached"]
    assert config.num_kv_heads < config.num_query_heads
    assert base.values["k.0"].shape[2:] == (config.num_kv_heads, config.head_dim)
    one_head = base.values | {"k.0": base.values["k.0"].at[:, :, 0].add(1)}
    both = bench.run("cached", shifted(base.values, "k.0"), {"k.0": at(bench, 5)})
    one = bench.run("cached", one_head, {"k.0": at(bench, 5)})
    assert same_bits(one.values["k.0"][:, 5, 1], base.values["k.0"][:, 5, 1])
    assert not same_logits(one, base)
    assert not same_logits(one, both)


@pytest.mark.parametrize("arm", ["cached", "uncached"])
def test_a_patch_of_the_newest_row_is_one_of_that_slot_alone_at_each_step(arm):
    bench = bench_of_two()
    values, every = shifted(bench.bare[arm].values, "resid_pre.1"), np.ones(bench.layout.slots, bool)
    newest = bench.run(arm, values, {"resid_pre.1": every}, newest=True)
    for step in range(NEW_TOKENS):
        single = bench.run(arm, values, {"resid_pre.1": at(bench, bench.layout.prompt - 1 + step)})
        assert same_bits(single.run.logits[:, step], newest.run.logits[:, step])
        assert not same_bits(single.run.logits[:, step], bench.bare[arm].run.logits[:, step])
    if arm == "cached":  # what the patch did left no trace
        for name in ("k.1", "v.1"):
            assert same_bits(newest.values[name], bench.bare[arm].values[name])


def test_a_grid_of_patches_compiles_nothing():
    bench = bench_of_two()
    programs = (bench.arms.prefill, bench.arms.cached_loop, bench.arms.tile_loop)
    values = bench.bare["cached"].values
    kinds = [PATCHES[name] for name in (KEYS, RESIDUAL, "residual now, K and V")]
    for layer, slot, kind, arm in itertools.product(range(bench.L), (2, 9, 15), kinds, ("cached", "uncached")):
        where = bench.masks(kind, [layer], at(bench, slot))
        bench.run(arm, values, where, newest=kind.residual == "now")
    assert [program._cache_size() for program in programs] == [1, 1, 1]


def test_names_of_a_patch():
    slots = np.ones(3, bool)
    assert set(select(Kind("now"), range(2), 2, slots)) == {"resid_pre.0", "resid_pre.1"}
    assert set(select(Kind("everywhere", ("v",)), [2], 2, slots)) == {"resid_pre.2"}
    assert set(select(PATCHES[EVERYTHING], range(1), 1, slots)) == {"resid_pre.0", "k.0", "v.0", "resid_pre.1",
                                                                   "final_norm"}  # fmt: skip
    assert [spread(n, 4) for n in (3, 5, 31)] == [[0, 1, 2], [0, 1, 3, 4], [0, 10, 20, 30]]
    with pytest.raises(ValueError, match=r"no values to patch k\.7"):
        make_patch({"k.0": jnp.zeros((1, 3, 1, 2))}, {"k.7": jnp.ones(3, bool)})


# A planted cause, and records of it.


def plant(name, factor):
    """A value is scaled in calls of one row, which the cached arm alone makes."""
    original = decoder.Decoder.__call__

    def call(self, tokens, positions, cache, slot, hook=layers.no_hook, alignment=None):
        def watch(here, value):
            return hook(here, value * factor if here == name and positions.shape[1] == 1 else value)

        return original(self, tokens, positions, cache, slot, watch, alignment)

    return mock.patch.object(decoder.Decoder, "__call__", call)


@functools.cache
def planted_run(name):
    """In fp16 this model's arms are bit-equal on a CPU, so that every difference is the plant's."""
    arms = unaudited(Arms(small_config("llama", layers=1), make_precision("fp16")))  # traced under the plant
    with plant(name, 3):
        return run_all(Patching(arms, make_arms()[1], SPEC, position_bins=2), ITEMS)


def figures_of(name):
    return {(r["direction"], r["patch"], r["problem"]): r for r in planted_run(name)}


def test_a_planted_cause_in_the_cached_keys_is_undone_by_patching_keys():
    found = figures_of("k.0")
    undone = {patch for patch, kind in PATCHES.items() if "k" in kind.state and not kind.itself}
    for (direction, patch, _), record in found.items():
        steps, gap = record["steps"], record["gap"]
        assert gap["kl"] > 0
        if patch in undone:
            assert (record["all"]["kl"], record["all"]["bit_equal"]) == (0.0, steps)
            assert record["all"]["recovered"] == gap["flips"]
        else:
            assert record["unchanged"] == steps
            assert (record["all"]["kl"], record["all"]["bit_equal"]) == (gap["kl"], gap["bit_equal"])
        trajectory = record["trajectory"]
        if trajectory is not None and patch in undone:
            assert trajectory["until"] is None
            assert direction == INTO_UNCACHED or trajectory["agreeing"] == trajectory["steps"] - trajectory["parted"]
        elif trajectory is not None:
            assert trajectory["until"] == trajectory["parted"]
    assert any(r["gap"]["flips"] for r in found.values())
    assert {patch for (_, patch, _), r in found.items() if r["trajectory"]} == set(PATCHES) - {ITSELF}
    one = found[INTO_CACHED, KEYS_VALUES, 4]
    assert one["by_layer"]["kl"] == [0.0]
    assert one["grid"]["bins"] == [[0, 6], [6, 15]]
    assert one["grid"]["kl"][0] == [one["gap"]["kl"], 0.0]  # the prompt's keys are those of the prefill


def test_a_planted_cause_in_the_stream_is_undone_by_patching_the_stream_after_it():
    for (direction, patch, _), record in figures_of("mlp_out.0").items():
        steps, gap, kind = record["steps"], record["gap"], PATCHES[patch]
        assert gap["kl"] > 0
        if patch == EVERYTHING:
            assert record["all"]["bit_equal"] == steps
        else:  # the only layer is entered by the embedding
            assert record["unchanged"] == steps
        if kind.residual and not kind.state and (direction, patch) != (INTO_UNCACHED, RESIDUAL_NOW):
            assert record["by_layer"]["layer"] == [0, 1]
            assert record["by_layer"]["kl"] == [gap["kl"], 0.0]


def test_records_are_valid_and_complete():
    records = planted_run("k.0")
    for record in records:
        to_record(json.loads(to_line(record)))
        assert record["instrumented_bit_equal"] == {"cached": record["steps"], "uncached": record["steps"]}
        assert len(to_line(record)) < 4000
    expected = [("patching", item.problem, d, p) for d in DIRECTIONS for p in PATCHES for item in ITEMS]
    assert [tuple(r["key"]) for r in records] == expected


def test_a_problem_that_overflows_has_no_figures():
    (arms, state), spared = make_arms(), make_bench("llama", "fp16").text[1]  # what is generated too
    with mock.patch.object(patching, "PATCHES", {KEYS: PATCHES[KEYS]}):
        records, alone, _ = run_broken(lambda broken: Patching(arms, broken, SPEC), state, ITEMS, spared)
    for record in records + alone:
        to_record(json.loads(to_line(record)))
    assert [r["status"] for r in records] == ["invalid", "ok"] * 2
    assert [r["status"] for r in alone] == ["invalid"] * 4
    assert records[0]["invalid"]["op"] == "resid_pre"
    assert say(alone) == "There is no sample with finite numbers, so nothing was patched."
    assert summarize_patching(records, RUN)["problems"] == {"asked": 2, "total": 2, "ok": 1, "invalid": 1}


# What is said of them.


def samples(problems=8, trajectories=True, control=True, **left):
    """Samples of a gap of 1 nat or so, `left` of it under each patch; what leaves nothing brings tokens back."""
    named = {EVERYTHING: 0.0} | {name.replace("_", " "): share for name, share in left.items()}
    made = []
    for problem, direction, (patch, kind) in itertools.product(range(problems), DIRECTIONS, PATCHES.items()):
        share, gap = named.get(patch, 1.0), 1 + problem / 10
        equal, unchanged = STEPS if share == 0 and control else 1, STEPS if kind.itself else 0
        record = make_patched(problem, direction, patch, gap, share * gap, unchanged, share == 0, flips=2, equal=equal)
        made.append(record if trajectories else record | {"trajectory": None})
    return made


def with_patch(records, patch, path, value):
    """The records with a field of one patch changed."""
    return [damage(record, path, value) if record["patch"] == patch else record for record in records]


shown, to_markdown, _ = show_by(write_patching)


def say(records):
    return "\n".join(conclude(summarize_patching(records, RUN)))


def test_summary_figures():
    summary = summarize_patching(samples(K=0.25), RUN)
    assert json.loads(json.dumps(summary)) == summary
    keys = summary["directions"][INTO_CACHED][KEYS]
    assert keys["closed"]["share"] == pytest.approx(0.75)
    assert keys["closed"]["interval"] == pytest.approx([0.75, 0.75])
    assert (keys["problems"], keys["steps"], keys["gap"]["flips"]) == (8, 8 * STEPS, 16)
    assert keys["recovered"]["count"] == 0
    assert keys["trajectory"]["agreeing"]["rate"] == pytest.approx(1 / 6)
    assert summary["directions"][INTO_CACHED][EVERYTHING]["trajectory"]["recovered"]["count"] == 8
    assert summary["samples_missing"] == 0
    real = summarize_patching(planted_run("k.0"), RUN)["directions"][INTO_CACHED]
    assert real[KEYS_VALUES]["grid"]["closed"][0] == pytest.approx([0, 1])
    assert [entry["share"] for entry in real[RESIDUAL]["by_layer"]["closed"]] == pytest.approx([0, 1])
    assert real[VALUES]["closed"]["share"] == 0


@pytest.mark.parametrize(
    ("left", "verdict", "why"),
    [
        ({"K_and_V": 0.0}, "reproduced", "K and V 8 of 8"),
        ({"residual_now": 0.0, "residual": 0.0}, "not reproduced", "brings back 8 of 8"),
        ({"residual": 0.1, "K_and_V": 0.4}, "not reproduced", "more of the gap than K and V"),
        ({}, "not reproduced", "0 of 8"),  # neither the stream nor K and V bring anything back
    ],
)
def test_the_verdict_follows_from_the_figures(left, verdict, why):
    summary = summarize_patching(samples(**left), RUN)
    assert summary["claim"]["verdict"] == verdict
    assert why in summary["claim"]["why"]
    assert f"By this run alone: {summary['claim']['why']}" in conclude(summary)


THREE = 3 * len(DIRECTIONS) * len(PATCHES)  # samples of three problems


def count_back(records):
    """Patch -> how many free runs it brings back, and of how many."""
    patches = summarize_patching(records, RUN)["directions"][INTO_CACHED]
    shares = {patch: found["trajectory"]["recovered"] for patch, found in patches.items() if found["trajectory"]}
    return {patch: (share["count"], share["total"]) for patch, share in shares.items()}


def test_only_trajectories_that_the_control_brings_back_are_judged():
    records = samples(K_and_V=0.0)
    records[:THREE] = with_patch(records[:THREE], EVERYTHING, "trajectory.until", 2)
    back = count_back(records)
    assert (back[EVERYTHING], back[KEYS_VALUES], back[RESIDUAL]) == ((5, 8), (5, 5), (0, 5))
    assert "that every value of the donor does (5 of 8 that part; left out where" in say(records)


def test_trajectories_that_need_no_patch_are_not_judged():
    records = samples(residual_now=0.0)
    records[:THREE] = [damage(record, "gap.flips", 0) for record in records[:THREE]]
    back = count_back(records)
    assert (back[EVERYTHING], back[RESIDUAL_NOW]) == ((8, 8), (5, 5))


def test_no_verdict_without_a_gap_controls_or_enough_problems():
    def claim(records):
        return summarize_patching(records, RUN)["claim"]

    assert claim(samples(2, K_and_V=0.0))["verdict"] == "cannot tell"
    together = claim(samples(trajectories=False, K_and_V=0.0))
    assert together["why"] == "No free run parted, so that there is no trajectory to bring back."
    lost = with_patch(samples(K_and_V=0.0), EVERYTHING, "trajectory.until", 2)
    assert claim(lost)["why"].startswith("None of 8 free runs that parted can show it")
    failed = claim(samples(control=False, K_and_V=0.0))
    assert failed["verdict"] == "cannot tell"
    assert "Control failed: with every value of the donor" in failed["why"]
    changed = with_patch(samples(K_and_V=0.0), ITSELF, "unchanged", 5)
    assert "patched with itself" in claim(changed)["why"]
    equal = {"kl": 0.0, "bit_equal": STEPS}
    equal = [r | {"gap": equal | {"flips": 0}, "all": equal | {"recovered": 0, "broken": 0}} for r in samples()]
    assert "there is no gap to close" in claim(equal)["why"]
    assert "With one problem there are no intervals." in say(samples(1))


def test_sentences_and_an_unfinished_run():
    summary = summarize_patching(samples(residual=0.1, K_and_V=0.4)[:-3], {"config": {"num_problems": 9}})
    text = to_markdown(summary)
    assert "UNFINISHED: 1 of 9 problems have no record yet, 3 samples are missing" in text
    assert f"{INTO_CACHED}: residual closes more of the gap than K and V, by 30 % [30, 30] of it" in text
    assert "no proof of anything by itself" in text
    moved = [damage(record, "instrumented_bit_equal.cached", 2) for record in samples()]
    assert "have the bits of the arms at 16 (cached) and 80 (uncached) of 80 steps" in say(moved)
    assert say([]) == "There is no sample yet, so nothing was patched."


def test_tables_show_every_patch_in_80_columns():
    summary = summarize_patching(planted_run("k.0"), RUN)
    text, markdown = shown(summary), to_markdown(summary)
    cells = [line.split("|")[1].strip() for line in markdown.splitlines() if line.startswith("|")]
    for patch, kind in PATCHES.items():
        name = f"{patch} (control)" if kind.through else patch
        assert cells.count(name) == 2
        assert sum(line.startswith(f"{name} ") for line in text.splitlines()) >= 2
