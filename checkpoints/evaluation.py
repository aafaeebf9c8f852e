"""Greedy accuracy on held-out problems through the package's own tools: cached decoding, the task's cut and score."""

import dataclasses
from typing import Any

import numpy as np
from flax import nnx
from scipy import stats

from jaxkv.checkpoints.tokenizer import Tokenizer
from jaxkv.config import ModelConfig, make_precision
from jaxkv.decode import Arms
from jaxkv.rollout import make_layout, make_rows
from jaxkv.tasks import Task

SCORER = "numeric"
BUCKET = 128  # coarse, so that all batches of a prompt style share one compiled program


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Answers to some problems."""

    correct: np.ndarray  # one boolean a problem
    margins: np.ndarray  # top-1 minus top-2 logit of every generated step, all problems one after the other
    texts: tuple[str, ...]  # what was generated, up to the stop
    unfinished: int  # how many met neither EOS nor a stop string

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.correct.mean())

    def to_json(self) -> dict[str, Any]:
        """Counts with 95 % intervals."""
        right, total = int(self.correct.sum()), len(self.correct)
        found = stats.binomtest(right, total)
        return {
            "correct": right,
            "problems": total,
            "accuracy": self.accuracy,
            "wilson_95": tuple(map(float, found.proportion_ci(0.95, method="wilson"))),
            "clopper_pearson_95": tuple(map(float, found.proportion_ci(0.95, method="exact"))),
            "scorer": SCORER,
            "unfinished": self.unfinished,
        }


class Evaluator:
    """Answers problems in fp32. `tokenizer` must add BOS by itself."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, new_tokens: int, batch: int):
        self.tokenizer, self.new_tokens, self.batch = tokenizer, new_tokens, batch
        self.arms = Arms(config, make_precision("fp32"), stop_ids=tokenizer.eos_ids, keep_logits=True)

    def answer(self, state: nnx.State, task: Task, count: int) -> Outcome:
        """Answers the first `count` problems of a task with prompts in plain text, with weights in fp32.

        The last batch is filled up with its last problem.
        """
        state = self.arms.prepare(state)
        correct, margins, texts, unfinished = [], [], [], 0
        for start in range(0, count, self.batch):
            problems = task.problems[start : min(start + self.batch, count)]
            prompts = [self.tokenizer.encode(str(task.prompt(problem))) for problem in problems]
            prompts += prompts[-1:] * (self.batch - len(problems))
            layout = make_layout(prompts, self.new_tokens, BUCKET, self.arms.config)
            tokens, rows = make_rows(prompts, list(range(self.batch)), 0, layout)
            run = self.arms.run_cached(state, tokens, rows, layout)
            lengths, taken, logits = np.asarray(run.lengths), np.asarray(run.tokens), np.asarray(run.logits)
            for row, problem in enumerate(problems):
                own = taken[row, layout.prompt : layout.prompt + lengths[row]]
                text, cut = task.cut(self.tokenizer.decode(own))
                correct.append(bool(task.score(text, problem.answer)[SCORER]["correct"]))
                best = np.partition(logits[row, : lengths[row]], -2, axis=-1)[:, -2:]
                margins.append(best[:, 1] - best[:, 0])
                texts.append(text)
                unfinished += not cut and (not len(own) or own[-1] not in self.tokenizer.eos_ids)
        return Outcome(np.array(correct), np.concatenate(margins), tuple(texts), unfinished)


def describe_margins(margins: np.ndarray, bins: int = 40) -> dict[str, Any]:
    """Mean, percentiles and histogram of margins, which are in units of the logits."""
    counts, edges = np.histogram(margins, bins=bins)
    percentiles = (1, 5, 10, 25, 50, 75, 90)
    return {
        "steps": len(margins),
        "mean": float(margins.mean()),
        "percentiles": {str(p): float(np.percentile(margins, p)) for p in percentiles},
        "below": {str(limit): float((margins < limit).mean()) for limit in (0.001, 0.01, 0.1, 1.0)},
        "histogram": {"edges": [round(float(edge), 4) for edge in edges], "counts": counts.tolist()},
    }
