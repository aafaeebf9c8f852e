"""Trains a shipped checkpoint: python checkpoints/train.py --model=tiny-gemma2 --out=DIR

The defaults are the recipe of the shipped files; the tokenizer and the data are made on the way. The same command goes
on after a kill and ends at the same numbers. On a GPU that takes the same kernels, which the compilation cache in DIR
keeps. DIR/final is a Hugging Face directory, DIR/training.json what the card is made from.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from absl import flags
from corpus import CorpusSpec, Rows, draw_batch, make_corpus, make_test_rows
from evaluation import Evaluator, Outcome, describe_margins
from learner import Learner, Params, Schedule, training_precision
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.numpy import save_file
from vocabulary import train_tokenizer, wrap_tokenizer

from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.checkpoints.tokenizer import Tokenizer
from jaxkv.cli import run_command
from jaxkv.config import ModelConfig
from jaxkv.errors import UserError
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.families import get_preset
from jaxkv.records import git_revision, sha256_file
from jaxkv.tasks import Task, load_task
from jaxkv.tasks.gsm8k import PromptSpec

FLAGS = flags.FLAGS
CHECKPOINT, METRICS, SUMMARY, FINAL = "checkpoint.safetensors", "metrics.jsonl", "training.json", "final"

# What decides about the weights; a run goes on only with the same values.
RECIPE = [
    flags.DEFINE_string("model", "tiny-gemma2", "preset"),
    flags.DEFINE_integer("steps", 3000, "optimizer steps", lower_bound=1),
    flags.DEFINE_integer("batch", 64, "rows a step", lower_bound=1),
    flags.DEFINE_integer("length", 1024, "tokens a row", lower_bound=1),
    flags.DEFINE_enum("optimizer", "adamw", ["adamw", "muon"], "optimizer"),
    flags.DEFINE_float("lr", 3e-3, "peak learning rate; falls to a tenth along a cosine"),
    flags.DEFINE_integer("warmup", 200, "steps of linear warmup"),
    flags.DEFINE_float("weight_decay", 0.1, "decoupled, on matrices only"),
    flags.DEFINE_float("clip", 1.0, "largest norm of the gradient"),
    flags.DEFINE_float("b2", 0.95, "decay of Adam's second moment"),
    flags.DEFINE_float("question_weight", 0.1, "of a question's tokens in the loss; an answer's have 1"),
    flags.DEFINE_integer("seed", 0, "of weights, data and their order"),
    flags.DEFINE_integer("problems", 2_000_000, "generated problems"),
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
flags.DEFINE_integer("checkpoint_every", 500, "steps between checkpoints", lower_bound=1)
flags.DEFINE_integer("eval_every", 500, "steps between evaluations; the last step is always evaluated", lower_bound=1)
flags.DEFINE_integer("eval_problems", 100, "held-out problems of an evaluation on the way")
flags.DEFINE_integer("test_problems", 500, "held-out problems of the last one, zero-shot")
flags.DEFINE_integer("few_shot_problems", 100, "held-out problems of the last one, 8-shot; 0 for none")
flags.DEFINE_integer("new_tokens", 128, "most tokens of an answer")


@dataclasses.dataclass
class Run:
    """Where a run stands.

    Attributes:
      params: weights.
      opt_state: of the optimizer.
      step: steps done.
      seconds: wall time of training and evaluation so far, over all restarts.
    """

    params: Params
    opt_state: Any
    step: int = 0
    seconds: float = 0.0


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


def leaves_by_name(run: Run) -> dict[str, jax.Array]:
    """Every array of a run by its place in the tree."""
    flat = jax.tree_util.tree_flatten_with_path((run.params, run.opt_state))[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def save_run(run: Run, path: pathlib.Path, recipe: dict[str, Any], data: str) -> None:
    """Writes a checkpoint in one piece: a kill leaves the one before."""
    arrays = {name: np.asarray(leaf) for name, leaf in leaves_by_name(run).items()}
    facts = {"step": run.step, "seconds": run.seconds, "recipe": recipe, "data": data}
    partial = path.with_suffix(".partial")
    save_file(arrays, partial, metadata={"facts": json.dumps(facts)})
    os.replace(partial, path)


def restore_run(run: Run, path: pathlib.Path, recipe: dict[str, Any], data: str) -> Run:
    """The run of a checkpoint, in the shape of a fresh one. Raises UserError if it is another recipe's."""
    with safe_open(path, "numpy") as file:
        facts = json.loads(file.metadata()["facts"])
        odd = [name for name in recipe if facts["recipe"].get(name) != recipe[name]]
        if odd or facts["data"] != data:
            what = f"--{odd[0]}={facts['recipe'].get(odd[0])}" if odd else "other training data"
            raise UserError(f"{path.parent} holds a run with {what}; give the same flags or another --out")
        arrays = [jnp.asarray(file.get_tensor(name)) for name in leaves_by_name(run)]
    params, opt_state = jax.tree.unflatten(jax.tree.structure((run.params, run.opt_state)), arrays)
    return Run(params, opt_state, facts["step"], facts["seconds"])


class Metrics:
    """Appends to metrics.jsonl; lines after the step that a run goes on from are dropped first."""

    def __init__(self, path: pathlib.Path, step: int):
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        path.write_text("".join(kept))
        self.path = path

    def write(self, **values: Any) -> None:
        """Writes one line."""
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All lines."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@dataclasses.dataclass
class Trainer:
    """All that a run is made of, put together by `main`."""

    out: pathlib.Path
    recipe: dict[str, Any]
    config: ModelConfig
    tokenizer: Tokenizer
    data: Rows
    digest: str
    held_out: Rows
    learner: Learner
    run: Run
    metrics: Metrics
    console: Console

    def batches(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and answers [n, B, T + 1] of the next call's steps."""
        r, n = self.recipe, self.recipe["steps_per_dispatch"]
        places = np.stack([draw_batch(s, r["batch"], len(self.data.tokens), r["seed"]) for s in range(step, step + n)])
        return self.data.tokens[places], self.data.answers[places]

    def train(self, evaluator: Evaluator, task: Task) -> None:
        """Takes the run to its last step."""
        run, steps, n = self.run, self.recipe["steps"], self.recipe["steps_per_dispatch"]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[state]}"), console=self.console) as progress:
            bar = progress.add_task(self.config.name, total=steps, completed=run.step, state="compiling")
            begin = time.perf_counter()
            while run.step < steps:
                run.params, run.opt_state, values = self.learner.train(
                    run.params, run.opt_state, *self.batches(run.step)
                )
                run.step += n
                loss = np.asarray(values["loss"])  # waits for the steps
                now = time.perf_counter()
                rate = n * self.recipe["batch"] * self.recipe["length"] / (now - begin)
                run.seconds, begin = run.seconds + now - begin, now
                self.metrics.write(
                    step=run.step,
                    loss=float(loss.mean()),
                    gradient_norm=float(np.mean(values["gradient_norm"])),
                    lr=float(self.learner.rate(run.step - 1)),
                    tokens_per_s=round(rate),
                )
                if not np.isfinite(loss).all():
                    raise UserError(f"the loss at step {run.step} is not finite; use a lower --lr")
                state = f"loss {loss.mean():.4f}, {rate / self.recipe['batch'] / self.recipe['length']:.2f} steps/s"
                progress.update(bar, completed=run.step, state=state)
                if run.step % FLAGS.eval_every == 0 or run.step == steps:
                    self.evaluate(evaluator, task)
                run.seconds += time.perf_counter() - begin
                if run.step % FLAGS.checkpoint_every == 0 or run.step == steps:
                    save_run(run, self.out / CHECKPOINT, self.recipe, self.digest)
                begin = time.perf_counter()

    def evaluate(self, evaluator: Evaluator, task: Task) -> None:
        """Loss on held-out rows and greedy accuracy on a few held-out problems."""
        batch = min(self.recipe["batch"], len(self.held_out.tokens))
        parts = self.learner.measure(self.run.params, self.held_out.tokens[:batch], self.held_out.answers[:batch])
        losses = {f"held_out_{name}_loss": float(value) for name, value in parts.items()}
        outcome = evaluator.answer(self.learner.to_state(self.rounded()), task, FLAGS.eval_problems)
        self.metrics.write(step=self.run.step, **losses, accuracy=outcome.accuracy, problems=len(outcome.correct))
        self.console.print(
            f"step {self.run.step}: held-out loss {losses['held_out_answer_loss']:.4f} in answers, "
            f"{losses['held_out_question_loss']:.4f} in questions; {outcome.accuracy:.1%} of {len(outcome.correct)} "
            f"problems right, {outcome.unfinished} unfinished; {self.run.seconds:.0f} s",
            soft_wrap=True,
        )

    def rounded(self) -> Params:
        """The weights as they are shipped: rounded to fp16, held in fp32."""
        return {path: value.astype(jnp.float16).astype(jnp.float32) for path, value in self.run.params.items()}

    def finish(self, evaluator: Evaluator, tasks: dict[str, tuple[Task, int]]) -> None:
        """Last evaluation, DIR/final and DIR/training.json."""
        from jaxkv.checkpoints.export import export

        begin = time.perf_counter()
        state = self.learner.to_state(self.rounded())
        outcomes: dict[str, Outcome] = {}
        for name, (task, count) in tasks.items():
            if count:
                outcomes[name] = evaluator.answer(state, task, count)
                self.console.print(f"{name}: {outcomes[name].accuracy:.1%} of {count} held-out problems right")
        final = self.out / FINAL
        graphdef = abstract_decoder(self.config, evaluator.arms.precision)[0]
        generation = {
            name: getattr(self.tokenizer.hf, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        provenance = {"source": "checkpoints/train.py", "kind": "trained", "revision": git_revision(), "files": {}}
        checkpoint = Checkpoint(self.config, graphdef, state, self.tokenizer, generation, provenance)
        if not final.exists():
            export(checkpoint, str(final), dtype="fp16")
        lines = self.metrics.read()
        curve = [(line["step"], round(line["loss"], 5)) for line in lines if "loss" in line]
        packages = ("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers", "transformers")
        summary = {
            "model": self.config.name,
            "parameters": sum(value.size for value in self.run.params.values()),
            "recipe": self.recipe,
            "command": show_command(self.recipe),
            "revision": git_revision(),
            "packages": {name: importlib.metadata.version(name) for name in packages},
            "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "data": {
                "rows": len(self.data.tokens),
                "sha256": self.digest,
                "epochs": self.recipe["steps"] * self.recipe["batch"] / len(self.data.tokens),
            },
            "seconds": {
                "training": round(self.run.seconds, 1),
                "last_evaluation": round(time.perf_counter() - begin, 1),
            },
            "accuracy": {name: outcome.to_json() for name, outcome in outcomes.items()},
            "margins": describe_margins(outcomes["zero_shot"].margins),
            "loss": curve[:: max(1, len(curve) // 200)],
            "held_out": [line for line in lines if "accuracy" in line],
            "files": {path.name: sha256_file(path) for path in sorted(final.iterdir())},
        }
        samples = [{"problem": i, "text": text} for i, text in enumerate(outcomes["zero_shot"].texts)]
        (self.out / "answers.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        partial = self.out / f"{SUMMARY}.partial"
        partial.write_text(json.dumps(summary, indent=1) + "\n")
        os.replace(partial, self.out / SUMMARY)


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
    learner = Learner(
        config,
        training_precision(recipe["precision"]),
        schedule,
        question_weight=recipe["question_weight"],
        bos=tokenizer.bos_id,
        remat=recipe["remat"],
    )
    run = Run(*learner.initialize(recipe["seed"]))
    if (out / CHECKPOINT).exists():
        run = restore_run(run, out / CHECKPOINT, recipe, digest)
        console.print(f"going on from step {run.step}")
    zero_shot = load_task("arith", spec=PromptSpec("zero_shot"))
    few_shot = load_task("arith", spec=PromptSpec("few_shot", shots=8))
    evaluator = Evaluator(config, tokenizer, FLAGS.new_tokens, min(100, FLAGS.test_problems))
    metrics = Metrics(out / METRICS, run.step)
    trainer = Trainer(out, recipe, config, tokenizer, data, digest, held_out, learner, run, metrics, console)
    trainer.train(evaluator, zero_shot)
    trainer.finish(
        evaluator, {"zero_shot": (zero_shot, FLAGS.test_problems), "few_shot_8": (few_shot, FLAGS.few_shot_problems)}
    )


if __name__ == "__main__":
    run_command(main)
