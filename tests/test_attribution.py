"""Aligning a class fixes its row counts and nothing else, the end points are exact, a planted cause is found."""

import dataclasses
import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import PRESETS, STOP_IDS, changed_state, make_prompts, same_bits, set_up, small_config, small_state

from jaxkv.analysis.attribution import conclude, render_attribution, summarize_attribution, to_markdown
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import make_precision
from jaxkv.decode import Arms, empty_cache, start_rollout
from jaxkv.errors import UserError
from jaxkv.experiments import attribution
from jaxkv.experiments.attribution import align_arms, run_attribution, run_pair
from jaxkv.experiments.divergence import DivergenceSpec, Item, run_divergence
from jaxkv.generate import run_cached
from jaxkv.models import alignment, layers
from jaxkv.models.alignment import CLASSES, Alignment, make_alignment, make_rowwise
from jaxkv.models.decoder import abstract_decoder
from jaxkv.records import RunDirectory, to_line
from jaxkv.schema_attribution import ALL, ALL_BUT, ALONE, FENCED, OP_CLASSES, PLAIN, VARIANTS, validate_attribution

TILE = 4
RUN = {"fingerprint": "ab"}
SPEC = DivergenceSpec(new_tokens=12, batch_size=2, padding="left", bucket=8)


def make_arms(family="mistral", precision="fp16", **changes):
    return Arms(dataclasses.replace(small_config(family), **changes), make_precision(precision), stop_ids=STOP_IDS)


def first_layers(family, precision, layers):
    leaves = {path: leaf[...] for path, leaf in flat_paths(small_state(family, precision)).items()}
    _, state = abstract_decoder(dataclasses.replace(small_config(family), num_layers=layers), make_precision(precision))
    return with_leaves(state, {path: leaves[path] for path in flat_paths(state)})


def differing(arms, state, variant, reference, rows, layout):
    """Steps at which a variant's arms differ in a bit."""
    pair = run_pair(align_arms(arms, TILE, VARIANTS[variant]), state, reference, rows, layout)
    counted = np.arange(layout.new_tokens) < np.asarray(reference.lengths)[:, None]
    assert counted.sum() > 8
    differs = attribution.bits(pair.cached.logits) != attribution.bits(pair.uncached.logits)
    return int((np.asarray(jnp.any(differs, axis=-1)) & counted).sum())


# The programs.


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "jaxpr"):
                    yield from equations(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from equations(inner)


def trace(arms, program, given):
    """Jaxpr of a program of the plain arms, with an alignment or without."""
    layout, tokens, rows = set_up(make_prompts((4, 7)))
    state = small_state(arms.config.family, "fp16")
    cache = empty_cache(arms.config, arms.precision, 2, layout.slots)
    run = start_rollout(arms, tokens, rows, layout)
    logits = jnp.zeros((2, arms.config.vocab_size), arms.precision.logits)
    calls = {
        "prefill": (arms._prefill, (state, jnp.asarray(tokens[:, : layout.prefill]), rows, cache)),
        "decode": (arms._cached_loop, (state, logits, run, rows, 20, cache)),
        "recompute": (
            functools.partial(arms._tile_loop, tile=layout.slots),
            (state, run, rows, 20, cache, True, False),
        ),
    }
    function, arguments = calls[program]
    if given is not None:
        function = functools.partial(function, alignment=given)
    return jax.make_jaxpr(function)(*arguments)


def products(jaxpr):
    """Shapes of the results of all products."""
    return [e.outvars[0].aval.shape for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]


@pytest.mark.parametrize("program", ["prefill", "decode", "recompute"])
@pytest.mark.parametrize("family", PRESETS)
def test_without_alignment_the_program_is_the_bare_one(family, program, monkeypatch):
    arms = make_arms(family)
    jaxpr = trace(arms, program, None)
    names = [e.primitive.name for e in equations(jaxpr.jaxpr)]
    assert "optimization_barrier" not in names
    assert names.count("while") == {"prefill": 0, "decode": 1, "recompute": 2}[program]
    assert names.count("dot_general") == 2 * (3 + 2 + 1 + 3) + 1
    bare = lambda given, slot: lambda op, fn, *arrays, **axes: fn(*arrays)  # noqa: E731
    monkeypatch.setattr("jaxkv.models.decoder.make_rowwise", bare)
    assert str(trace(arms, program, None)) == str(jaxpr)


@pytest.mark.parametrize("program", ["prefill", "decode", "recompute"])
def test_an_aligned_program_holds_each_product_in_both_row_counts(program):
    arms, tile = make_arms("llama"), 6  # no other size is 6
    plain, aligned = trace(arms, program, None), trace(arms, program, make_alignment(tile, frozenset()))
    assert not any(tile in shape for shape in products(plain))
    assert len(products(aligned)) == 2 * len(products(plain))
    assert sum(tile in shape for shape in products(aligned)) == len(products(plain))
    # One compilation serves every choice of classes.
    assert str(aligned) == str(trace(arms, program, make_alignment(tile, frozenset({"mlp"}))))


def count_rows(x):
    """The row's place in the call, and 100 times the call's number of rows."""
    return 3 * x, jnp.broadcast_to(jnp.arange(x.shape[1])[None, :], x.shape[:2]) + 100 * x.shape[1]


@pytest.mark.parametrize(("slot", "rows"), [(0, 8), (0, 7), (3, 5), (6, 1), (7, 6)])
def test_the_row_of_a_slot_has_its_place_in_a_tile(slot, rows):
    x, slots = jnp.arange(2.0 * rows * 3).reshape(2, rows, 3), np.arange(slot, slot + rows)
    run = jax.jit(lambda given, x, slot: make_rowwise(given, slot)("mlp", count_rows, x))
    for classes, expected in ((["mlp"], slots % TILE + 100 * TILE), (["qkv"], np.arange(rows) + 100 * rows)):
        values, places = run(make_alignment(TILE, frozenset(classes)), x, slot)
        np.testing.assert_array_equal(values, 3 * x)
        np.testing.assert_array_equal(places, [expected, expected])


def test_each_class_has_its_own_switch():
    x = jnp.zeros((2, 7, 3))
    run = jax.jit(lambda given, x: {c: make_rowwise(given, 0)(c, count_rows, x)[1][0, 0] for c in CLASSES})
    for on in CLASSES:
        found = run(make_alignment(TILE, frozenset({on})), x)
        assert {c for c, rows in found.items() if rows == 100 * TILE} == {on}
        assert {int(rows) for c, rows in found.items() if c != on} == {700}


def test_tiles_along_other_axes():
    x = jnp.arange(2.0 * 5 * 3).reshape(2, 1, 5, 3)
    rows = make_rowwise(make_alignment(TILE, frozenset({"scores"})), jnp.asarray(2))
    result = rows("scores", lambda x: jnp.swapaxes(x, 1, 2) * x.shape[2], x, rows_in=2, rows_out=1)
    np.testing.assert_array_equal(result, TILE * jnp.swapaxes(x, 1, 2))


def test_an_unknown_class_is_refused():
    with pytest.raises(ValueError, match="unknown operation classes: mpl"):
        make_alignment(TILE, frozenset({"mpl"}))


# The end points.


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("family", PRESETS)
def test_all_aligned_is_exact(family, precision):
    deep = (family, precision) == ("gemma3", "fp32")  # with two RoPE bases; one layer is quicker to compile
    arms = make_arms(family, precision, num_layers=1 + deep)
    state = arms.prepare(first_layers(family, precision, arms.config.num_layers))
    layout, tokens, rows = set_up(make_prompts((4, 9)))
    free = align_arms(arms, TILE, VARIANTS[ALL])
    reference = run_cached(free, state, tokens, rows, layout)
    assert differing(arms, state, ALL, reference, rows, layout) == 0
    if precision == "fp32":  # there the programs do differ
        assert differing(arms, state, FENCED, reference, rows, layout) > 8


ITEMS = [Item(4, tuple(make_prompts((9,))[0]), ""), Item(7, tuple(make_prompts((6,))[0]), "")]


@functools.cache
def small_run():
    """Records of every variant of a small model, with programs and weights."""
    arms = make_arms("mistral", "fp32")
    state = arms.prepare(small_state("mistral"))
    return arms, state, [r for records, _ in run_attribution(arms, state, ITEMS, SPEC, TILE) for r in records]


class NoScores:
    def cut(self, text):
        return text, False

    def score(self, text, gold):
        return {name: {"answer": None, "correct": False} for name in ("strict", "flexible", "numeric")}

    def label_change(self, text_a, text_b, gold):
        return dict.fromkeys(("strict", "flexible", "numeric"), "same")

    def decode(self, tokens):
        return ""


def test_none_is_the_plain_experiment():
    arms, state, records = small_run()
    batches = run_divergence(arms, state, ITEMS, SPEC, NoScores(), NoScores())
    plain = {r["problem"]: r["teacher_forced"] for batch, _ in batches for r in batch}
    ours = {r["problem"]: r["teacher_forced"] for r in records if r["variant"] == PLAIN}
    assert ours == plain
    assert max(max(comparison["kl"]) for comparison in plain.values()) > 0


# A planted cause.


PLANTS = {
    "qkv": lambda spec, w, config: spec == "btd,fd->btf" and w.shape[0] == config.num_query_heads * config.head_dim,
    "mlp": lambda spec, w, config: spec == "btf,df->btd" and w.shape[1] == config.mlp_dim,
    "output": lambda spec, w, config: spec == "btf,df->btd" and w.shape[1] != config.mlp_dim,
    "scores": lambda spec, w, config: spec == "btkgh,bskh->bkgts",
    "attention": lambda spec, w, config: spec == "bkgts,bskh->btkgh",
}


def plant(monkeypatch, op_class, config):
    """Makes one class's results depend on whether a call has one row."""
    real = layers.product
    if op_class in PLANTS:

        def product(spec, x, w, precision, out=None):
            one = x.shape[3 if spec.startswith("bkgts") else 1] == 1
            if not (one and PLANTS[op_class](spec, w, config)):
                return real(spec, x, w, precision, out)
            half = x.shape[-1] // 2
            axis = 1 if op_class == "attention" else -1
            first, second = jnp.split(w, [half], axis=axis)
            return real(spec, x[..., :half], first, precision, out) + real(spec, x[..., half:], second, precision, out)

        monkeypatch.setattr(layers, "product", product)
    elif op_class == "norms":
        call = layers.RMSNorm.__call__
        monkeypatch.setattr(
            layers.RMSNorm,
            "__call__",
            lambda self, x, out: call(self, x * 1.002 if x.shape[1] == 1 else x, out) * (1 + (x.shape[1] == 1) / 512),
        )
    else:
        rotate = layers.apply_rope
        monkeypatch.setattr(layers, "apply_rope", lambda x, table: rotate(x, table) * (1 + (x.shape[1] == 1) / 512))


@pytest.mark.parametrize("op_class", [c for c in CLASSES if c != "head"])
def test_a_planted_cause_is_attributed_to_its_class_and_no_other(op_class, monkeypatch):
    """In fp16 this model's plain arms are bit-equal on a CPU, so that every difference is the plant's."""
    arms = make_arms("llama", "fp16", num_layers=1)
    plant(monkeypatch, op_class, arms.config)
    state = arms.prepare(first_layers("llama", "fp16", 1))
    layout, tokens, rows = set_up(make_prompts((4, 9)))
    reference = run_cached(align_arms(arms, TILE, VARIANTS[FENCED]), state, tokens, rows, layout)
    variants = [v for v in VARIANTS if v != PLAIN or op_class == "mlp"]  # the plain programs are the slow half
    found = {v: differing(arms, state, v, reference, rows, layout) for v in variants}
    clean = {ALL, ALONE[op_class], ALONE["decode"]} | {ALL_BUT[c] for c in CLASSES if c != op_class}
    assert {v for v, steps in found.items() if steps == 0} == clean


# Records.


def test_records_are_valid_and_complete():
    _, _, records = small_run()
    for record in records:
        validate_attribution(record)
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
        done = frozenset((int(key[1]), str(key[2])) for key in run.done_keys())
        for batch, timing in run_attribution(arms, state, ITEMS, SPEC, TILE, done):
            for record in batch:
                run.append(record)
            run.append_timing(timing)
            assert timing["tokens"]["cached"] > 0
    assert b"".join(lines) == (tmp_path / "samples.jsonl").read_bytes()
    every = frozenset((r["problem"], r["variant"]) for r in records)
    assert list(run_attribution(arms, state, ITEMS, SPEC, TILE, every)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "norms"}, "variant: 'norms' is not one of"),
        ({"aligned": None}, "aligned: not what variant"),
        ({"key": ["attribution", 4, ALL]}, "key: expected"),
        ({"steps": 3}, "teacher_forced: expected 3 steps"),
        ({"moved": {"cached": 99, "uncached": 0}}, "moved.cached: more than"),
        ({"status": "invalid"}, "invalid: "),
        ({"tile": -1}, "tile: expected count"),
        ({"experiment": "divergence"}, "experiment: "),
    ],
)
def test_a_record_at_fault_is_named(change, message):
    record = next(r for r in small_run()[2] if r["variant"] == ALONE["mlp"])
    with pytest.raises(ValueError, match=message):
        validate_attribution(record | change)


def test_a_problem_that_overflows_has_no_figures():
    arms, state, _ = small_run()
    place, token = next((i, t) for i, t in enumerate(ITEMS[0].prompt) if t not in ITEMS[1].prompt)
    broken = changed_state(state, "embed", (token, 0), np.inf)

    def run(items):
        batches = run_attribution(arms, broken, items, SPEC, TILE, variants=[PLAIN, ALL])
        records = [record for batch, _ in batches for record in batch]
        for record in records:
            validate_attribution(record)
        return records, [record["status"] for record in records]

    records, status = run(ITEMS)
    assert status == ["invalid", "ok"] * 2
    assert records[0]["invalid"] == {
        "arm": "cached", "step": 0, "layer": 0, "op": "resid_pre", "position": place, "value": "inf"
    }  # fmt: skip
    records, status = run([dataclasses.replace(ITEMS[0], problem=p) for p in (1, 2)])
    assert status == ["invalid"] * 4
    summary = summarize_attribution(records, RUN)
    assert summary["status"] == "invalid"
    assert conclude(summary) == ["There is no sample with finite numbers, so nothing can be attributed."]


def test_the_aligned_regime_is_refused():
    arms = Arms(small_config(), make_precision("fp16"), tile=TILE)
    with pytest.raises(UserError, match="plain regime"):
        next(run_attribution(arms, small_state(), ITEMS, SPEC, TILE))


# What is said of them.


def sample(problem, variant, kl, moved=(8, 8), flips=0):
    n = 8
    comparison = {name: [kl] * n for name in ("kl", "kl_reverse", "js", "max_abs", "mean_abs", "margin")}
    comparison |= {"flip": [i < flips for i in range(n)], "bit_equal": [kl == 0] * n}
    return {
        "experiment": "attribution", "problem": problem, "key": ["attribution", problem, variant], "variant": variant,
        "aligned": VARIANTS[variant], "tile": 8, "prompt_tokens": 3, "prompt_sha256": "", "tokens_sha256": "",
        "steps": n, "shapes": {"batch": 1, "prefill": 8, "slots": 16, "left_pad": 0}, "sampling": {},
        "status": "ok", "invalid": None, "teacher_forced": comparison,
        "moved": dict(zip(("cached", "uncached"), (0, 0) if variant == FENCED else moved, strict=True)),
    }  # fmt: skip


def samples(problems=3, **kl):
    """Samples whose KL varies from problem to problem; variants not named keep the plain one's."""
    named = {ALL: 0.0, PLAIN: 1.0} | {name.replace("_", " "): value for name, value in kl.items()}
    made = []
    for problem in range(problems):
        for variant in VARIANTS:
            value = named.get(variant, 1.0)
            value = value[problem] if isinstance(value, list) else value * (1 + problem)
            made.append(sample(problem, variant, value, (0, 0) if variant == PLAIN else (8, 8)))
    return made


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
    text = "\n".join(conclude(summarize_attribution(samples(**figures), RUN)))
    assert "With every class aligned, logits differ at 0 of 24 steps (95 % bound on the share: 12 %)" in text
    assert "changes no bit of either arm: the plain programs are attributed as they are" in text
    assert "Left unaligned by itself, mlp makes logits differ at 24 of 24 steps" in text
    assert "keeps 25 % [25, 25] of the plain KL" in text
    assert "Left unaligned by themselves, norms make logits differ at 0 of 24 steps (95 % bound" in text
    assert (
        "stays below 100 % in its interval for mlp (50 % [50, 50] left); the others cannot be told from 100 %" in text
    )
    assert "aligned in decode alone: logits differ at 0 of 24 steps" in text
    assert "prefill alone: 100 % [100, 100] of the plain KL is left, not distinguishable from all of it" in text
    assert "from 3 problems is rough" in text


def test_a_residual_difference_is_said():
    text = "\n".join(conclude(summarize_attribution(samples(all=0.01, all_but_mlp=0.0), RUN)))
    assert "With every class aligned, logits still differ at 24 of 24 steps" in text
    assert "Left unaligned" not in text  # no class can be told from what is left anyway


def test_what_cannot_be_isolated_is_said():
    moved = {ALONE["head"]: {"cached": 0, "uncached": 0}, ALONE["qkv"]: {"cached": 8, "uncached": 0}}
    idle = [s | {"moved": moved.get(s["variant"], s["moved"])} for s in samples()]
    moving = [s | {"moved": {"cached": 8, "uncached": 3}} if s["variant"] == PLAIN else s for s in idle]
    text = "\n".join(conclude(summarize_attribution(moving, RUN)))
    assert "Aligning qkv alone moves the cached arm and no bit of the uncached one" in text
    assert "Aligning head alone changes no bit of either arm: here nothing can be isolated" in text
    assert "Cutting the operations apart changes bits by itself, at 24 (cached) and 9 (uncached) of 24 steps" in text
    assert "Whether any class, aligned alone, lowers the KL at all the intervals leave open" in text


def test_one_problem_has_no_interval():
    summary = summarize_attribution(samples(1, all_but_mlp=0.5), RUN)
    assert summary["variants"][ALL_BUT["mlp"]]["kl_kept"]["interval"] is None
    text = "\n".join(conclude(summary))
    assert "With one problem there are no intervals" in text
    assert "below 100 %" not in text


def test_equal_plain_arms_leave_nothing_to_attribute():
    equal = [sample(0, v, 0.0, (0, 0)) for v in VARIANTS]
    assert conclude(summarize_attribution(equal, RUN)) == [
        "The plain arms differ in no bit at 8 steps: there is nothing to attribute here."
    ]
    assert conclude(summarize_attribution([], RUN)) == ["There is no sample yet, so nothing can be attributed."]


def test_an_unfinished_run_says_so():
    summary = summarize_attribution(samples(2)[:-3], {"config": {"num_problems": 5}})
    assert "UNFINISHED: 3 of 5 problems and 3 samples of the others have no record yet" in to_markdown(summary)


def test_tables_show_every_variant_in_80_columns():
    from rich.console import Console

    summary = summarize_attribution(small_run()[2], RUN)
    console = Console(width=80, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(render_attribution(summary))
    text, markdown = console.export_text(), to_markdown(summary)
    for name in VARIANTS:
        assert f"\n{name} " in text
        assert f"| {name} |" in markdown
    assert max(map(len, text.splitlines())) <= 80


def test_the_analysis_needs_no_jax():
    code = "import sys; import jaxkv.analysis.attribution; sys.exit('jax' in sys.modules or 'flax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_alignment_is_a_pytree_with_a_static_tile():
    given = make_alignment(TILE, frozenset({"mlp"}))
    assert isinstance(given, Alignment)
    assert [x.shape for x in jax.tree.leaves(given)] == [(len(CLASSES),)]
    assert same_bits(given.on, jnp.asarray([c == "mlp" for c in alignment.CLASSES]))
