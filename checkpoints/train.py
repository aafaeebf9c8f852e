"""Trains a shipped checkpoint: python checkpoints/train.py --model=tiny-gemma2 --out=DIR

The defaults are the recipe of the shipped files; the tokenizer and the data are made on the way. The same command goes
on after a kill and ends at the same numbers. On a GPU that takes the same kernels, which the compilation cache in DIR
keeps. DIR/final is a Hugging Face directory, DIR/training.json what the card is made from.
"""

import dataclasses
import os
import pathlib
import time
from typing import Any

import jax
import tokenizers
from absl import flags
from corpus import CorpusSpec, Rows, make_corpus, make_test_rows
from evaluation import Evaluator
from learner import Learner, Schedule, training_precision
from rich.console import Console
from trainer import CHECKPOINT, METRICS, SUMMARY, Metrics, Run, Trainer, restore_run
from vocabulary import train_tokenizer, wrap_tokenizer

from jaxkv.checkpoints.tokenizer import Tokenizer
from jaxkv.cli import run_command
from jaxkv.config import ModelConfig
from jaxkv.errors import UserError
from jaxkv.models.families import get_preset
from jaxkv.tasks import load_task
from jaxkv.tasks.gsm8k import PromptSpec

FLAGS = flags.FLAGS

# What decides about the weights; a run goes on only with the same values.
RECIPE = [
    flags.DEFINE_string("model", "tiny-gemma2", "preset"),
    flags.DEFINE_integer("steps", 800, "optimizer steps", lower_bound=1),
    flags.DEFINE_integer("batch", 64, "rows a step", lower_bound=1),
    flags.DEFINE_integer("length", 1024, "tokens a row", lower_bound=1),
    flags.DEFINE_enum("optimizer", "adamw", ["adamw", "muon"], "optimizer"),
    flags.DEFINE_float("lr", 3e-3, "peak learning rate; falls to a tenth along a cosine"),
    flags.DEFINE_integer("warmup", 100, "steps of linear warmup"),
    flags.DEFINE_float("weight_decay", 0.1, "decoupled, on matrices only"),
    flags.DEFINE_float("clip", 1.0, "largest norm of the gradient"),
    flags.DEFINE_float("b2", 0.95, "decay of Adam's second moment"),
    flags.DEFINE_float("question_weight", 0.1, "of a question's tokens in the loss; an answer's have 1"),
    flags.DEFINE_integer("seed", 0, "of weights, data and their order"),
    flags.DEFINE_integer("problems", 800_000, "generated problems"),
    flags.DEFINE_float("single", 0.8, "share of documents with one problem; the others have 2 to 12"),
    flags.DEFINE_integer("tokenizer_problems", 20_000, "problems that the tokenizer is trained on"),
    flags.DEFINE_enum("precision", "bf16", ["bf16", "fp32"], "of the products; master weights are fp32"),
    flags.DEFINE_integer("steps_per_dispatch", 10, "steps of one compiled call", lower_bound=1),
    flags.DEFINE_boolean("remat", False, "compute inner values again in the backward pass, to save memory"),
    flags.DEFINE_integer("layers", None, "other number of layers, for trials"),
    flags.DEFINE_integer("width", None, "other width, for trials"),
]
flags.DEFINE_string("out", None, "run directory", required=True)
flags.DEFINE_integer("workers", os.cpu_count(), "processes that make data")
flags.DEFINE_integer("checkpoint_every", 200, "steps between checkpoints", lower_bound=1)
flags.DEFINE_integer("eval_every", 200, "steps between evaluations; the last step is always evaluated", lower_bound=1)
flags.DEFINE_integer("eval_problems", 100, "held-out problems of an evaluation on the way")
flags.DEFINE_integer("test_problems", 500, "held-out problems of the last one, zero-shot")
flags.DEFINE_integer("few_shot_problems", 100, "held-out problems of the last one, 8-shot; 0 for none")
flags.DEFINE_integer("new_tokens", 128, "most tokens of an answer")


def read_recipe() -> dict[str, Any]:
    """The flags that decide about the weights."""
    for name in ("steps", "checkpoint_every", "eval_every"):
        if FLAGS[name].value % FLAGS.steps_per_dispatch:
            raise UserError(f"--{name}={FLAGS[name].value} must be a multiple of --steps_per_dispatch")
    return {holder.name: holder.value for holder in RECIPE}


def show_command(recipe: dict[str, Any]) -> str:
    """The command that repeats the run, with the flags whose values are not their defaults."""
    changed = [f"--{h.name}={recipe[h.name]}" for h in RECIPE if h.name != "model" and recipe[h.name] != h.default]
    return " ".join(["python checkpoints/train.py", f"--model={recipe['model']}", *changed, "--out=DIR"])


def make_config(recipe: dict[str, Any]) -> ModelConfig:
    """The preset, with the changes asked for."""
    preset = get_preset(recipe["model"])
    layers, width = recipe["layers"] or preset.num_layers, recipe["width"] or preset.model_dim
    embed_scale = width**0.5 if preset.embed_scale != 1 else 1.0
    return dataclasses.replace(preset, num_layers=layers, model_dim=width, embed_scale=embed_scale)


def make_data(recipe: dict[str, Any], tokenizer: tokenizers.Tokenizer, console: Console) -> tuple[Rows, Rows]:
    """Training rows and held-out rows."""
    spec = CorpusSpec(recipe["problems"], recipe["single"], recipe["length"] + 1, recipe["seed"])
    begin = time.perf_counter()
    with console.status("making data") as status:
        rows = make_corpus(
            spec,
            tokenizer.to_str(),
            FLAGS.workers,
            lambda done, of: status.update(f"making data: chunk {done} of {of}"),
        )
    console.print(f"{len(rows.tokens)} rows from {spec.problems} problems in {time.perf_counter() - begin:.1f} s")
    if not len(rows.tokens):
        raise UserError(f"--problems={spec.problems} fill no row; use more")
    return rows, make_test_rows(tokenizer, spec.single, spec.length)


def main(argv: list[str]) -> None:
    """Reads the command line. Raises UserError on anything the user can mend."""
    del argv
    recipe, console = read_recipe(), Console()
    config, out = make_config(recipe), pathlib.Path(FLAGS.out)
    if (out / SUMMARY).exists():
        console.print(f"{out / SUMMARY} is there already: nothing to do")
        return
    out.mkdir(parents=True, exist_ok=True)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(out.resolve() / "compiled"))
    raw = train_tokenizer(recipe["tokenizer_problems"], config.vocab_size)
    tokenizer = Tokenizer(wrap_tokenizer(raw, config.context_length))
    data, held_out = make_data(recipe, raw, console)
    digest = data.digest()
    schedule = Schedule(**{field.name: recipe[field.name] for field in dataclasses.fields(Schedule)})
    precision, weight = training_precision(recipe["precision"]), recipe["question_weight"]
    learner = Learner(config, precision, schedule, question_weight=weight, bos=tokenizer.bos_id, remat=recipe["remat"])
    run = Run(*learner.initialize(recipe["seed"]))
    if (out / CHECKPOINT).exists():
        run = restore_run(run, out / CHECKPOINT, recipe, digest)
        console.print(f"going on from step {run.step}")
    zero_shot = load_task("arith", spec=PromptSpec("zero_shot"))
    few_shot = load_task("arith", spec=PromptSpec("few_shot", shots=8))
    evaluator = Evaluator(config, tokenizer, FLAGS.new_tokens, min(100, FLAGS.test_problems))
    metrics = Metrics(out / METRICS, run.step)
    trainer = Trainer(
        out, recipe, show_command(recipe), config, tokenizer, data, digest, held_out, learner, run, metrics, console,
        FLAGS.checkpoint_every, FLAGS.eval_every, FLAGS.eval_problems,
    )  # fmt: skip
    trainer.train(evaluator, zero_shot)
    trainer.finish(
        evaluator, {"zero_shot": (zero_shot, FLAGS.test_problems), "few_shot_8": (few_shot, FLAGS.few_shot_problems)}
    )


if __name__ == "__main__":
    run_command(main)
