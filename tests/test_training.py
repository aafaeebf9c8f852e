"""Training of the shipped checkpoints: text, tokenizer, the step, and a killed run that ends as an undisturbed one."""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from cases import daily
from flax import nnx

pytest.importorskip("optax")
HERE = pathlib.Path(__file__).parent.parent / "checkpoints"
sys.path.insert(0, str(HERE))

import corpus  # noqa: E402
import learner  # noqa: E402
import trainer  # noqa: E402
import vocabulary  # noqa: E402

from jaxkv.cache import empty_cache  # noqa: E402
from jaxkv.checkpoints.fill import flat_paths  # noqa: E402
from jaxkv.checkpoints.tokenizer import Tokenizer  # noqa: E402
from jaxkv.config import make_precision  # noqa: E402
from jaxkv.models.families import get_preset  # noqa: E402
from jaxkv.tasks import arith, load_task  # noqa: E402
from jaxkv.tasks.gsm8k import PromptSpec, k_shot, show_solution  # noqa: E402

SPEC = corpus.CorpusSpec(problems=600, single=0.5, length=257, seed=3)
PAD, BOS, EOS = 0, 1, 2
TINY = ("tiny-llama2", "tiny-mistral", "tiny-gemma2")
SCHEDULE = learner.Schedule(30, 3e-3, 5, 0.1, 1.0, 0.95, "adamw")


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    return vocabulary.train_tokenizer(2000)


@pytest.fixture(scope="module")
def wrapped(trained, tmp_path_factory) -> Tokenizer:
    """The tokenizer as transformers reads it back from a directory with a model's config.json."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    vocabulary.wrap_tokenizer(trained, 1024).save_pretrained(str(path))
    (path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    return Tokenizer(AutoTokenizer.from_pretrained(str(path)))


@pytest.fixture(scope="module")
def rows(trained) -> corpus.Rows:
    return corpus.make_chunk(SPEC, trained.to_str(), 0)


def train_problems():
    return arith.generate("train", SPEC.problems, seed=corpus.chunk_seed(SPEC, 0))


# The tokenizer.


def test_tokenizer_is_the_same_each_time_and_has_single_digits_only(trained):
    assert vocabulary.train_tokenizer(2000).to_str() == trained.to_str()
    assert trained.get_vocab_size() == 1024
    for token in trained.get_vocab():
        assert sum(c.isdecimal() for c in token) == 0 or len(token) == 1, token
    assert trained.encode("1234", add_special_tokens=False).tokens == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    "text", ["", "  two  spaces\n\n\ttab ", "Größe 12½ ≠ 𝟛 — 日本語 👩‍🔬", "A<b>c 007", "\x00\x7f", "it's 3*4=12."]
)
def test_tokenizer_gives_any_text_back(wrapped, text):
    assert wrapped.decode(wrapped.encode(text)) == text


def test_tokenizer_as_transformers_reads_it(wrapped, trained):
    assert (wrapped.hf.pad_token_id, wrapped.bos_id, wrapped.eos_ids) == (PAD, BOS, (EOS,))
    assert wrapped.add_bos
    assert wrapped.hf("ab 12")["input_ids"] == [BOS, *trained.encode("ab 12", add_special_tokens=False).ids]
    assert wrapped.vocab_size <= 1024


def test_documents_are_tokenized_as_prompts_and_their_continuations_are(trained, wrapped):
    problems = train_problems()[:9]
    ids, answers = next(corpus.encode_documents(trained, [problems]))
    prompt = wrapped.encode(k_shot(problems[-1], problems[:-1]))
    assert ids[: len(prompt)] == prompt
    assert not answers[len(prompt) - 1]
    assert all(answers[len(prompt) :])
    assert wrapped.decode(ids[len(prompt) :]) == f" {show_solution(problems[-1])}"
    whole = f"{k_shot(problems[-1], problems[:-1])} {show_solution(problems[-1])}"
    assert ids == [*wrapped.encode(whole), EOS]


# Packing.


def test_rows_hold_the_documents_in_order(rows, wrapped):
    assert rows.tokens.shape[1] == SPEC.length
    assert rows.tokens.shape == rows.answers.shape
    assert len(rows.tokens) > 50
    assert (rows.tokens[:, 0] == BOS).all()
    written = iter(corpus.group(train_problems(), SPEC.single, np.random.default_rng([SPEC.seed, 0])))
    sizes = []
    for row in rows.tokens:
        documents = np.split(row, np.flatnonzero(row == BOS)[1:])
        for number, document in enumerate(documents, start=1):
            problems = next(written)
            sizes.append(len(problems))
            text, whole = wrapped.decode(document), corpus.write_document(problems)
            if number < len(documents):
                assert document[-1] == EOS
                assert text == whole
            else:
                assert whole.startswith(text)
    assert set(sizes) == set(range(1, corpus.MOST_PROBLEMS + 1))
    assert 0.35 < np.mean(np.array(sizes) == 1) < 0.65


def test_answers_are_marked_with_what_follows_them(rows, wrapped):
    for row, marks in zip(rows.tokens[:20], rows.answers[:20], strict=True):
        edges = np.flatnonzero(np.diff(marks.astype(int))) + 1
        for part in np.split(np.arange(len(row)), edges):
            text, complete = wrapped.decode(row[part]), part[-1] < len(row) - 1
            if part[0] and not complete and len(part) < 3:
                continue  # cut before it says anything
            if marks[part[0]]:
                assert text.startswith(" ")
                assert "Question" not in text
                assert not complete or "####" in text
                assert not complete or text.endswith("\n\n") or row[part[-1]] == EOS
            else:
                assert text.startswith("Question: ")
                assert not complete or text.endswith("Answer:")


def test_corpus_is_its_chunks(trained, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 300)
    whole = corpus.make_corpus(SPEC, trained.to_str(), 1)
    parts = [corpus.make_chunk(SPEC, trained.to_str(), chunk) for chunk in range(2)]
    assert np.array_equal(whole.tokens, np.concatenate([part.tokens for part in parts]))
    assert np.array_equal(whole.answers, np.concatenate([part.answers for part in parts]))
    assert not np.array_equal(parts[0].tokens[0], parts[1].tokens[0])


def test_two_workers_make_the_rows_of_one(trained):
    spec = dataclasses.replace(SPEC, problems=corpus.CHUNK + 100)
    digests = {corpus.make_corpus(spec, trained.to_str(), workers).digest() for workers in (1, 2)}
    assert len(digests) == 1


def test_no_held_out_problem_and_no_worked_example_is_trained_on(rows, wrapped):
    task = load_task("arith", spec=PromptSpec("few_shot", shots=8))
    asked = {problem.question for problem in (*task.problems, *arith.generate("train", 8))}
    seeds = {corpus.chunk_seed(dataclasses.replace(SPEC, seed=seed), c) for seed in range(3) for c in range(1000)}
    assert len(seeds) == 3000
    assert not seeds & {0, vocabulary.SEED}
    seen = re.findall(r"Question: (.*)\nAnswer:", "\n".join(map(wrapped.decode, rows.tokens)))
    assert len(seen) > 200
    assert not asked & set(seen)
    assert set(seen) <= {problem.question for problem in train_problems()}


def test_batches_go_through_all_rows_each_epoch():
    drawn = np.concatenate([corpus.draw_batch(step, 4, 10, seed=5) for step in range(5)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert list(drawn[:10]) != list(drawn[10:])
    assert list(corpus.draw_batch(3, 4, 10, seed=5)) == list(drawn[12:16])
    assert list(corpus.draw_batch(3, 4, 10, seed=6)) != list(drawn[12:16])


def test_each_call_gets_the_batches_of_its_steps(rows):
    fields = {field.name: None for field in dataclasses.fields(trainer.Trainer)}
    recipe = {"steps_per_dispatch": 2, "batch": 3, "seed": 7}
    ours = trainer.Trainer(**fields | {"recipe": recipe, "data": rows})
    for step in (0, 2, 4):
        tokens, answers = ours.batches(step)
        places = [corpus.draw_batch(s, 3, len(rows.tokens), seed=7) for s in (step, step + 1)]
        assert np.array_equal(tokens, rows.tokens[np.stack(places)])
        assert np.array_equal(answers, rows.answers[np.stack(places)])


# The step.


def test_positions_start_anew_with_each_document():
    documents, positions = learner.locate(jnp.asarray([[BOS, 5, BOS, 6, 7, BOS]]), BOS)
    assert documents.tolist() == [[1, 1, 2, 2, 2, 3]]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0]]


def small_learner(model="tiny-mistral", layers=1, schedule=SCHEDULE, **options):
    preset = get_preset(model)
    config = dataclasses.replace(preset, num_layers=layers, model_dim=32, mlp_dim=48, window=preset.window and 24)
    return learner.Learner(config, make_precision("fp32"), schedule, question_weight=0.25, bos=BOS, **options)


def random_weights(ours):
    """As `initialize` makes them, by numpy: to compile an initialiser for every shape takes longer."""
    rng, norm = np.random.default_rng(0), np.float32(1.0 - ours.config.norm_offset)
    return {
        path: jnp.asarray(np.full(leaf.shape, norm) if len(leaf.shape) == 1 else rng.normal(size=leaf.shape) * 32**-0.5,
                          jnp.float32)
        for path, leaf in flat_paths(ours.abstract_state).items()
    }  # fmt: skip


@pytest.mark.parametrize("model", daily(["tiny-gemma2"], TINY))
def test_loss_is_that_of_each_document_alone(rows, model):
    """Packed rows against the plain decoder on one document at a time, as in decoding."""
    ours = small_learner(model, layers=2)
    params = random_weights(ours)
    state = ours.to_state(params)
    row = next(row for row in rows.tokens if 3 <= (row == BOS).sum() <= 6)
    packed = np.asarray(jax.jit(ours._forward)(params, jnp.asarray(row[None], jnp.int32)))[0]

    @jax.jit
    def log_probabilities(tokens, positions):
        decoder = nnx.merge(ours.graphdef, state)
        hidden, _ = decoder(tokens, positions, empty_cache(ours.config, ours.precision, *tokens.shape), 0)
        return jax.nn.log_softmax(decoder.logits(hidden)[0])

    starts = [*np.flatnonzero(row == BOS), len(row)]
    for start, end in itertools.pairwise(starts):
        length = end - start
        tokens, positions = np.zeros((1, len(row)), np.int32), np.full((1, len(row)), -1, np.int32)
        tokens[0, :length], positions[0, :length] = row[start:end], np.arange(length)
        logs = np.asarray(log_probabilities(tokens, positions))
        nll = -logs[np.arange(length - 1), row[start + 1 : end]]
        # Two orders of adding fp32 numbers of a few units.
        np.testing.assert_allclose(packed[start : end - 1], nll, rtol=0, atol=2e-5)


def test_weights_of_the_loss(rows):
    ours = small_learner()
    tokens, answers = jnp.asarray(rows.tokens[:4], jnp.int32), jnp.asarray(rows.answers[:4])
    weights = np.asarray(ours._weights(tokens, answers))
    targets, told = rows.tokens[:4, 1:], rows.answers[:4, 1:]
    assert set(weights[told]) == {1.0}
    assert set(weights[~told & (targets != BOS)]) == {0.25}
    assert set(weights[targets == BOS]) == {0.0}
    assert (targets == BOS).any()


@pytest.mark.parametrize("options", daily([{"remat": True}], [{}, {"remat": True}]))
def test_gradient_of_the_lookup_and_remat_change_nothing(rows, options, monkeypatch):
    batch = jnp.asarray(rows.tokens[:2], jnp.int32), jnp.asarray(rows.answers[:2])
    ours = small_learner(**options)
    params = random_weights(ours)
    gradient = jax.jit(jax.grad(ours._loss))(params, *batch)
    monkeypatch.setattr(learner, "look_up", lambda table, tokens: table[tokens])
    plain = small_learner()
    for path, value in jax.jit(jax.grad(plain._loss))(params, *batch).items():
        np.testing.assert_allclose(gradient[path], value, rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("optimizer", daily(["muon"], ["adamw", "muon"]))
def test_loss_falls(rows, optimizer):
    ours = small_learner(schedule=dataclasses.replace(SCHEDULE, optimizer=optimizer))
    params, opt_state = ours.initialize(0)
    places = np.stack([corpus.draw_batch(step, 2, len(rows.tokens), 0) for step in range(SCHEDULE.steps)])
    before = ours.measure(params, rows.tokens[:8], rows.answers[:8])
    params, opt_state, metrics = ours.train(params, opt_state, rows.tokens[places], rows.answers[places])
    after = ours.measure(params, rows.tokens[:8], rows.answers[:8])
    losses = np.asarray(metrics["loss"])
    assert losses.shape == (SCHEDULE.steps,)
    assert losses[-5:].mean() < losses[:5].mean() - 1
    assert all(after[part] < before[part] - 0.5 for part in before)


def test_norms_do_not_decay():
    ours = small_learner(schedule=dataclasses.replace(SCHEDULE, weight_decay=1.0))
    params = {path: np.ones(leaf.shape, np.float32) for path, leaf in flat_paths(ours.abstract_state).items()}
    opt_state, update = jax.jit(ours.optimizer.init)(params), jax.jit(ours.optimizer.update)
    for _ in range(3):  # the first step of a warmup has a rate of 0
        updates, opt_state = update(jax.tree.map(np.zeros_like, params), opt_state, params)
    assert {path for path, value in updates.items() if np.any(np.asarray(value))} == {
        p for p, v in params.items() if v.ndim > 1
    }


# The command.

COMMAND = """
    --model=tiny-mistral --steps=12 --batch=2 --length=128 --layers=1 --width=16 --problems=400 --warmup=2
    --tokenizer_problems=300 --precision=fp32 --steps_per_dispatch=2 --checkpoint_every=4 --eval_every=12
    --eval_problems=2 --test_problems=3 --few_shot_problems=0 --new_tokens=8 --workers=1
"""


def start(out):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(out.parent / "compiled")}
    command = [sys.executable, str(HERE / "train.py"), *COMMAND.split(), f"--out={out}"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


def read_metrics(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


@pytest.mark.nightly
def test_killed_run_ends_as_an_undisturbed_one(tmp_path):
    from jaxkv.checkpoints import load

    finish(start(tmp_path / "whole"))
    process = start(tmp_path / "killed")
    metrics, deadline = tmp_path / "killed" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):  # past the checkpoint of step 4
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed" / "training.json").exists()
    with metrics.open("a") as file:
        file.write('{"step": 8, "lo')  # a torn line
    assert "going on from step" in finish(start(tmp_path / "killed"))

    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")
    assert [line["step"] for line in read_metrics(tmp_path / "whole")] == [2, 4, 6, 8, 10, 12, 12]
    summaries = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("killed", "whole")]
    for part in ("files", "loss", "margins", "accuracy", "data", "recipe"):
        assert summaries[0][part] == summaries[1][part], part
    read = load(str(tmp_path / "whole" / "final"), precision=make_precision("fp16"))
    assert read.config.num_layers == 1
    assert read.tokenizer.add_bos
