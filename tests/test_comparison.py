"""`jaxkv compare` and the Python API: what one prompt says of the cache, and that a fault is called one."""

import dataclasses
import io
import json
import sys

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from absl import flags
from cases import daily
from rich.cells import cell_len

from jaxkv import api
from jaxkv.cli import parse_flags
from jaxkv.compare_prompts import compare_command, read_prompts
from jaxkv.comparison import Candidate, Checks, Comparison, Parting, Side, read_condition
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments import driver
from jaxkv.experiments.record_parts import Comparison as StepColumns

pytestmark = pytest.mark.usefixtures("file_of_one_layer")
MODEL = ["--model=test-llama2", "--checkpoint=random:0", "--max-new-tokens=12", "--bucket=16"]
SHAPES = {"max_new_tokens": 12, "bucket": 16}


@pytest.fixture(scope="module")
def model(file_of_one_layer):
    return api.load("test-llama2", "random:0", precision="bf16", compilation_cache=None)


@pytest.fixture(scope="module")
def spoilt(model):
    """Three prompts with a cache that is far from clean."""
    return api.compare(model, [f"{n} birds" for n in range(3)], "cache_error:normal:0,1", **SHAPES)


def test_rounding_is_told_from_a_fault_on_a_trained_model():
    model = api.load("tiny-llama2", precision="bf16", compilation_cache=None)
    prompt = "Question: Ann has 3 apples and buys 4 more. How many apples does she have?\nAnswer:"
    one = api.compare(model, prompt, max_new_tokens=16, bucket=16)
    assert one.status == "rounding"
    assert one.checks.aligned >= 16
    assert one.checks.falls
    assert one.checks.distance.startswith("to float64: " if "float64" in one.seconds else "to fp32: ")
    assert not all(one.columns.bit_equal)
    cached, uncached = (side.text for side in one.sides)
    assert api.generate(model, prompt, max_new_tokens=16, bucket=16) == cached == one.text
    assert api.generate(model, prompt, cache=False, max_new_tokens=16, bucket=16) == uncached


def test_steps_are_a_frame_along_the_first_text(spoilt):
    frame = spoilt[0].steps
    assert frame["token"].tolist() == spoilt[0].sides[0].tokens
    assert {"flip", "kl", "margin", "shift", "unit", "bit_equal"} <= set(frame)
    assert len(frame) == 12
    assert "<mark>" in spoilt[0]._repr_html_()


def test_the_parting_is_where_the_tokens_first_differ(spoilt):
    assert all(one.first_divergence is not None for one in spoilt)
    for one in spoilt:
        parting, (first, second) = one.first_divergence, (side.tokens for side in one.sides)
        assert first[: parting.step] == second[: parting.step]
        ours, theirs = parting.candidates
        assert (ours.token, theirs.token) == (first[parting.step], second[parting.step])
        assert parting.margin == ours.logits[0] - theirs.logits[0] >= 0
        assert parting.margin + parting.perturbation == ours.logits[1] - theirs.logits[1] <= 0
        assert ours.probabilities[0] == pytest.approx(theirs.probabilities[0] * np.exp(parting.margin))
        assert one.sides[0].text[: parting.begin] == one.sides[1].text[: parting.begin]
        assert max(map(len, list(one.lines())[1:])) <= 80


def test_other_ways_of_running_a_prompt(model):
    same = api.compare(model, "7 birds", "precision:bf16", **SHAPES)
    assert same.status == "equal"
    assert "every logit has the same bits" in same.sentence
    wide = api.compare(model, "7 birds", "precision:fp32", **SHAPES)
    assert (wide.status, wide.checks) == ("changed", None)
    assert [side.name for side in wide.sides] == ["in bf16", "in fp32"]
    assert not any(wide.columns.bit_equal)
    torch = api.compare(model, "7 birds", "framework:torch", **SHAPES)
    assert [side.name for side in torch.sides] == ["in JAX", "in PyTorch"]
    assert max(torch.columns.kl) < 0.01


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ("precison:fp32", "did you mean 'precision'"), ("precision:fp23", "did you mean 'fp32'"),
        ("precision", "write one of"), ("framework:tf", "known: torch"), ("cache_quant:kvran:k2v2", "kvarn"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_told_in_a_line(model, beside, told):
    with pytest.raises(UserError, match=r"--(with|cache_quant)=") as caught:
        api.compare(model, "7 birds", beside, **SHAPES)
    assert told in str(caught.value)


@pytest.mark.parametrize(("where", "precision"), [("the one-row step", "bf16"), ("every program", "fp32")])
def test_a_planted_bug_of_the_cache_is_a_fault(monkeypatch, where, precision):
    """A cache whose values are off by a hundredth: in the plain step alone, or where the aligned arms see it too."""

    def spoil(cache, keep=False):
        def off(x):
            wrong = (x * 1.01).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
            return jnp.where(keep, x, wrong)

        return jax.tree.map(off, cache)

    class Faulty(Arms):
        def _cached_loop(self, state, logits, run, rows, end, cache, alignment=None):
            return super()._cached_loop(state, logits, run, rows, end, spoil(cache), alignment)

        def _tile_loop(self, state, run, rows, end, cache, recompute, whole, *, tile, alignment=None):
            keep = jnp.asarray(recompute) | jnp.asarray(whole) | (where != "every program")
            given = (recompute, whole)
            run, cache = super()._tile_loop(
                state, run, rows, end, spoil(cache, keep), *given, tile=tile, alignment=alignment
            )
            return run, spoil(cache, keep)

    monkeypatch.setattr(driver, "Arms", Faulty)
    driver.share_arms.cache_clear()
    try:
        model = api.load("test-llama2", "random:0", precision=precision, compilation_cache=None)
        one = api.compare(model, "7 birds", **SHAPES)
    finally:
        driver.share_arms.cache_clear()
    assert one.status == "fault"
    assert "FAULT" in one.sentence
    assert (one.checks.aligned_fault is not None) == (where == "every program")


@pytest.mark.parametrize(("precision", "factor"), daily([("bf16", 1e18)], [("bf16", 1e18), ("fp16", 3000)]))
def test_numbers_that_are_not_finite_are_invalid(precision, factor):
    """Weights so large that the precision overflows; fp16 alone is audited without that, on the same path."""
    big = api.load("test-llama2", "random:0", precision=precision, compilation_cache=None)
    state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float32) * factor, x.dtype), big.checkpoint.state)
    big = dataclasses.replace(big, checkpoint=dataclasses.replace(big.checkpoint, state=state))
    one = api.compare(big, "Seven birds", **SHAPES)
    assert one.status == "invalid"
    assert one.sentence.startswith("INVALID")
    assert one.columns is None
    with pytest.raises(UserError, match="invalid"):
        _ = one.steps


@pytest.fixture
def run(capsys, cache):
    """Runs the command: its exit code and what it prints."""
    return lambda *arguments: (compare_command([*MODEL, cache, *arguments]), capsys.readouterr().out)


def test_json_is_the_record_and_can_be_read_back(run, model, monkeypatch):
    """Of stdin too, whose prompt is the same as one that is given."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("0 birds\n"))
    code, out = run("--with=cache_error:normal:0,1", "--json", "-")
    found = json.loads(out)
    assert code == 0
    (one,) = api.compare(model, ["0 birds"], "cache_error:normal:0,1", **SHAPES)
    assert found.pop("sentence") == one.sentence
    found["seconds"] = one.seconds
    assert msgspec.convert(found, Comparison) == one


def test_the_exit_code_says_whether_the_condition_holds(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "0 birds"}\n{"prompt": "1 birds"}\n')
    spoilt = ("--with=cache_error:normal:0,1", f"--file={prompts}")
    assert run(*spoilt, "--fail-if=diverged>50%")[0] == 1
    code, out = run("--with=precision:bf16", "--fail_if=bits>0", "0 birds")
    assert code == 0
    assert out.startswith("test-llama2 writes the same 12 tokens in bf16 and in bf16, and every logit")


def test_conditions():
    columns = {name: [0.0] * 4 for name in ("kl_reverse", "js", "mean_abs", "margin")}
    columns |= {"flip": [False] * 3 + [True], "kl": [0.0, 0.1, 0.1, 0.2], "bit_equal": [True, True, False, False]}
    columns["max_abs"] = [0.0, 0.0, 1.0, 1.0]
    one = msgspec.structs.replace(two_sides(texts=("", "")), columns=msgspec.convert(columns, StepColumns))
    for text, failed in (
        ("flips>0.25", None), ("flips>=25%", 0.25), ("flips > 24 %", 0.25), ("kl>1e-1", None), ("kl>=0.1", 0.1),
        ("bits>49%", 0.5), ("diverged>0", None), ("diverged>=0", 0.0), ("kl>1E-2", 0.1),
    ):  # fmt: skip
        value = read_condition(text).failed([one])
        assert value == (failed if failed is None else pytest.approx(failed)), text
    seven = msgspec.convert({n: [c[i] for i in [3] * 7 + [0] * 993] for n, c in columns.items()}, StepColumns)
    assert read_condition("flips>0.7%").failed([msgspec.structs.replace(one, columns=seven)]) is None  # 7 of 1000
    assert read_condition("flips>=0").failed([msgspec.structs.replace(one, status="invalid", columns=None)]) is None
    for text, told in (
        ("flip>0", "did you mean 'flips'"), ("flips<1", "not understood"), ("kl>1%", "nats"), ("flips>5", "at most 1"),
        ("bits>1..2", "not understood"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"--fail-if=") as caught:
            read_condition(text)
        assert told in str(caught.value)


def two_sides(status="rounding", texts=("a b", "a c"), equal=False, margin=0.5, perturbation=-0.5, **more):
    columns = {name: [float(not equal)] for name in ("kl", "kl_reverse", "js", "max_abs", "mean_abs", "margin")}
    columns |= {"flip": [False], "bit_equal": [equal]}
    parting = None
    if texts[0] != texts[1]:
        ours, theirs = (Candidate(n, text[1:], (1.0, 1.0), (0.5, 0.5)) for n, text in enumerate(texts))
        parting = Parting(0, (ours, theirs), margin, perturbation, None, 0.0 in (margin, margin + perturbation), 1)
    names = ("with its cache", "without it")
    sides = tuple(Side(name, [1], text) for name, text in zip(names, texts, strict=True))
    return Comparison(
        model="m", setting="bf16", prompt="p", status=status, sides=sides, first_divergence=parting,
        columns=msgspec.convert(columns, StepColumns), **more,
    )  # fmt: skip


def test_sentences_say_which_side_and_no_more_than_is_known():
    assert "exactly tied without it, and it is rounding." in two_sides().sentence
    assert "exactly tied with its cache" in two_sides(margin=0.0).sentence
    fault = Checks(aligned=None, aligned_fault="cached and uncached differ", wider=None, falls=None, distance=None)
    told = two_sides("fault", ("a", "a"), equal=True, checks=fault).sentence
    assert "with the same logits: arms that round alike differ too, and this is a FAULT" in told
    assert "not the same logits: this is a FAULT" in two_sides("fault", ("a", "a")).sentence


def test_a_terminal_is_sent_no_control_characters_and_no_line_too_long():
    """Chinese letters take two columns."""
    one = two_sides(texts=("\x1b[31m" + "\u732b" * 60 + "\nb", "\x1b[31m" + "\u732b" * 60 + "\tc"))
    lines = "\n".join(one.lines(verbose=True)).split("\n")
    assert all(line.isprintable() for line in lines)
    shown = list(one.lines())
    assert max(map(cell_len, shown[2:])) <= 80
    assert cell_len(shown[2]) > 70


@pytest.mark.parametrize("sampler", daily(["temperature"], ["temperature", "top_p"]))
def test_a_drawn_token_is_explained_by_its_noise(model, sampler):
    """The noise and the gap from their definition: the largest of logit / T + noise is drawn."""
    asked = {"sampler": sampler, "temperature": 0.7, "seed": 3, **SHAPES}
    asked |= {"top_p": 0.9} if sampler == "top_p" else {}
    prompts = [f"{n} birds" for n in range(4)]
    found = api.compare(model, prompts, "cache_error:normal:0,1", **asked)
    parted = [one for one in found if one.first_divergence is not None]
    assert parted
    for one in parted:
        parting, vocab = one.first_divergence, model.checkpoint.config.vocab_size
        position = len(model.encode(one.prompt)) + parting.step
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3, impl="threefry2x32"), 0), position)
        noise = np.asarray(jax.random.gumbel(key, (vocab,)), np.float64)
        a, b = parting.candidates
        gaps = [a.logits[n] - b.logits[n] + 0.7 * (noise[a.token] - noise[b.token]) for n in range(2)]
        assert parting.margin == pytest.approx(gaps[0], abs=1e-5)
        assert parting.margin + parting.perturbation == pytest.approx(gaps[1], abs=1e-5)
        assert parting.cut or gaps[0] > 0 > gaps[1]
        assert sampler == "top_p" or not parting.cut
        assert not parting.tie
        assert "noise counted" in one.sentence or parting.cut


def test_what_is_asked_is_checked_before_anything_runs(model):
    for asked, told in (
        ({"temprature": 1.0}, "known: "), ({"max_new_tokens": 0}, "max_new_tokens=0"), ({"seed": 2**40}, "seed="),
    ):  # fmt: skip
        with pytest.raises(UserError, match=told):
            api.compare(model, "7 birds", **asked)


def test_programs_are_kept_where_the_last_load_said(tmp_path):
    kept = jax.config.jax_compilation_cache_dir
    try:
        api.load("test-llama2", "random:0", compilation_cache=str(tmp_path))
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        api.load("test-llama2", "random:0", compilation_cache="none")
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        api.load("test-llama2", "random:0", compilation_cache=kept or "none")


def test_a_prompt_may_begin_with_dashes_and_must_be_utf8(monkeypatch):
    assert parse_flags(["jaxkv compare", "--", "--a-b = ?"], flags.FlagValues()) == ["jaxkv compare", "--a-b = ?"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    for given in (["-"], ["\udcff"]):
        with pytest.raises(UserError, match="UTF-8"):
            read_prompts(given, None)


def test_prompts_come_from_files_and_an_empty_one_is_refused(tmp_path):
    whole = tmp_path / "prompt.txt"
    whole.write_text("two\nlines\n")
    assert read_prompts(["one"], str(whole)) == ["one", "two\nlines"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    for given, file, told in (
        ([], None, "missing or empty"), (["  "], None, "missing or empty"),
        ([], str(tmp_path / "p.jsonl"), "line 2"), ([], str(tmp_path / "none.txt"), "none.txt"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=told):
            read_prompts(given, file)
