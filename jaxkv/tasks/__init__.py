"""Tasks by name: problems, prompts and scores."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxkv.errors import UserError, nearest
from jaxkv.tasks import arith, gsm8k, scoring
from jaxkv.tasks.gsm8k import Problem, PromptSpec


@dataclasses.dataclass(frozen=True)
class Task:
    """Problems with the way they are asked and scored.

    Attributes:
      name: key in the registry.
      problems: what is asked, in source order.
      spec: how it is asked.
      shots: the worked examples in every prompt.
      provenance: JSON-ready origin of `problems` and `shots` (None without shots), rows of the shots, prompt spec.
    """

    name: str
    problems: tuple[Problem, ...]
    spec: PromptSpec
    shots: tuple[Problem, ...]
    provenance: dict[str, Any]

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings at which a continuation ends."""
        return gsm8k.stop_strings(self.spec)

    def prompt(self, problem: Problem) -> str | list[dict[str, str]]:
        """Returns the prompt: a string, or messages for the chat style."""
        return gsm8k.build_prompt(self.spec, problem, self.shots)

    def cut(self, text: str) -> tuple[str, bool]:
        """The continuation up to the first stop string, and whether there was one."""
        kept = scoring.cut_at_stop(text, self.stops)
        return kept, kept != text

    def score(self, text: str, gold: str) -> dict[str, dict[str, Any]]:
        """Scores a continuation; see `scoring.score`."""
        return scoring.score(text, gold, self.stops)

    def label_change(self, text_a: str, text_b: str, gold: str) -> dict[str, str]:
        """For each scorer, why its label differs between two arms; see `scoring.label_change_kind`."""
        return {
            scorer: scoring.label_change_kind(text_a, text_b, gold, scorer, self.stops) for scorer in scoring.SCORERS
        }


def load_task(
    name: str,
    *,
    data: str | None = None,
    fewshot_data: str | None = None,
    spec: PromptSpec | None = None,
    limit: int | None = None,
) -> Task:
    """Loads a task.

    Args:
      name: 'gsm8k', or 'arith', which generates its problems and takes no data.
      data: file with the problems to ask; None fetches the test split of gsm8k from the hub.
      fewshot_data: file with the worked examples; None fetches the train split. Not read without shots.
      spec: prompt style; 8-shot by default.
      limit: ask only the first so many problems.

    Raises:
      UserError: unknown task, a limit below 1, data for arith, or what `gsm8k.load_problems` and `gsm8k.choose_shots`
        raise.
    """
    if name not in TASKS:
        raise UserError(f"unknown task '{name}'{nearest(name, list(TASKS))}; known: {', '.join(TASKS)}")
    if limit is not None and limit < 1:
        raise UserError(f"a limit of {limit} problems leaves nothing to ask; use 1 or more, or none")
    return TASKS[name](data, fewshot_data, spec or gsm8k.DEFAULT_PROMPT, limit)


def _load_gsm8k(data: str | None, fewshot_data: str | None, spec: PromptSpec, limit: int | None) -> Task:
    problems, origin = gsm8k.load_problems(data, "test")
    provenance: dict[str, Any] = {"prompt": dataclasses.asdict(spec), "problems": origin, "shots": None}
    shots: tuple[Problem, ...] = ()
    if spec.shots:
        train, origin = gsm8k.load_problems(fewshot_data, "train", flag="--fewshot_data")
        shots = gsm8k.choose_shots(spec, train, problems)
        provenance["shots"] = origin | {"indices": [shot.index for shot in shots]}
    return Task("gsm8k", problems[:limit], spec, shots, provenance)


def _load_arith(data: str | None, fewshot_data: str | None, spec: PromptSpec, limit: int | None) -> Task:
    for flag, file in (("--data", data), ("--fewshot_data", fewshot_data)):
        if file is not None:
            raise UserError(f"{flag}={file}: the arith task generates its problems and needs no data; drop {flag}")
    problems = arith.generate("test", arith.TEST_COUNT)
    provenance: dict[str, Any] = {
        "prompt": dataclasses.asdict(spec),
        "problems": arith.describe("test", problems),
        "shots": None,
    }
    shots: tuple[Problem, ...] = ()
    if spec.shots:
        train = arith.generate("train", arith.SHOT_POOL)
        shots = gsm8k.choose_shots(spec, train, problems)
        provenance["shots"] = arith.describe("train", train) | {"indices": [shot.index for shot in shots]}
    return Task("arith", problems[:limit], spec, shots, provenance)


TASKS: dict[str, Callable[[str | None, str | None, PromptSpec, int | None], Task]] = {
    "gsm8k": _load_gsm8k,
    "arith": _load_arith,
}
