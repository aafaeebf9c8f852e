"""A training run: its loop, its checkpoints and metrics, and what it leaves at its end."""

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
from corpus import Rows, draw_batch
from evaluation import Evaluator, Outcome, describe_margins
from learner import Learner, Params
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxkv.checkpoints.checkpoint import Checkpoint, Provenance
from jaxkv.checkpoints.tokenizer import Tokenizer
from jaxkv.config import ModelConfig
from jaxkv.errors import UserError
from jaxkv.models.decoder import abstract_decoder
from jaxkv.provenance import git_revision, sha256_file
from jaxkv.tasks import Task

CHECKPOINT, METRICS, SUMMARY, FINAL = "checkpoint.safetensors", "metrics.jsonl", "training.json", "final"


@dataclasses.dataclass
class Run:
    """Where a run stands."""

    params: Params
    opt_state: Any
    step: int = 0  # steps done
    seconds: float = 0.0  # wall time of training and evaluation so far, over all restarts


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
    """All that a run is made of, put together by train.py. `recipe` holds the flags that decide about the weights."""

    out: pathlib.Path
    recipe: dict[str, Any]
    command: str
    config: ModelConfig
    tokenizer: Tokenizer
    data: Rows
    digest: str
    held_out: Rows
    learner: Learner
    run: Run
    metrics: Metrics
    console: Console
    checkpoint_every: int  # steps between checkpoints
    eval_every: int  # steps between evaluations
    eval_problems: int  # held-out problems of each

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
                if run.step % self.eval_every == 0 or run.step == steps:
                    self.evaluate(evaluator, task)
                run.seconds += time.perf_counter() - begin
                if run.step % self.checkpoint_every == 0 or run.step == steps:
                    save_run(run, self.out / CHECKPOINT, self.recipe, self.digest)
                begin = time.perf_counter()

    def evaluate(self, evaluator: Evaluator, task: Task) -> None:
        """Loss on held-out rows and greedy accuracy on a few held-out problems."""
        batch = min(self.recipe["batch"], len(self.held_out.tokens))
        parts = self.learner.measure(self.run.params, self.held_out.tokens[:batch], self.held_out.answers[:batch])
        losses = {f"held_out_{name}_loss": float(value) for name, value in parts.items()}
        outcome = evaluator.answer(self.learner.to_state(self.rounded()), task, self.eval_problems)
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
        provenance = Provenance("checkpoints/train.py", "trained", git_revision())
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
            "command": self.command,
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
