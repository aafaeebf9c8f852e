"""Tasks by name: problems, prompts and scores."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxkv.errors import UserError, nearest
from jaxkv.tasks import arith, continuation, gsm8k, humaneval, ifeval, math_tasks, scoring
from jaxkv.tasks.task import SUBSETS, Problem, PromptSpec, Request
from jaxkv.tasks.task import Task as Task


def load_task(
    name: str,
    *,
    data: str | None = None,
    fewshot_data: str | None = None,
    spec: PromptSpec | None = None,
    limit: int | None = None,
    subset: str = "all",
    allow_code_execution: bool = False,
) -> Task:
    """Loads a task.

    Args:
      name: one of TASKS; 'arith' generates its problems and takes no data.
      data: file with the problems to ask; None fetches the test split from the hub.
      fewshot_data: file with the worked examples; None fetches the train split. Not read without shots.
      spec: prompt style; by default 8-shot for gsm8k and arith, zero_shot for the others.
      limit: ask only the first so many problems.
      subset: 'all', or for ifeval 'no_length_128'.
      allow_code_execution: lets humaneval run code that the model wrote.

    Raises:
      UserError: unknown task or subset, a limit below 1, data for arith, humaneval without leave to run code, a missing
        package, or what the task's own loader raises.
    """
    if name not in TASKS:
        raise UserError(f"unknown task '{name}'{nearest(name, list(TASKS))}; known: {', '.join(TASKS)}")
    if limit is not None and limit < 1:
        raise UserError(f"a limit of {limit} problems leaves nothing to ask; use 1 or more, or none")
    if subset not in SUBSETS:
        raise UserError(f"unknown subset '{subset}'{nearest(subset, list(SUBSETS))}; known: {', '.join(SUBSETS)}")
    if subset != "all" and name != "ifeval":
        raise UserError(f"the subset '{subset}' is of ifeval; leave --subset at all for {name}")
    task = TASKS[name](Request(data, fewshot_data, spec, subset, allow_code_execution))
    return dataclasses.replace(task, problems=task.problems[:limit])


def usual_style(name: str, has_chat_template: bool) -> tuple[str, int]:
    """The style and number of shots that a task is usually asked in, of a model with or without a chat template."""
    if name == "next_string":
        return "zero_shot", 0
    if has_chat_template:
        return "chat", 0
    return ("few_shot", 8) if name == "gsm8k" else ("zero_shot", 0)


def _make_word_problems(
    name: str, problems: tuple[Problem, ...], spec: PromptSpec, shots: tuple[Problem, ...], provenance: dict[str, Any]
) -> Task:
    """A task whose golds are numbers."""

    def ask(problem: Problem) -> str | list[dict[str, str]]:
        return gsm8k.build_prompt(spec, problem, shots)

    stops = gsm8k.stop_strings(spec)
    return Task(name, problems, spec, shots, provenance, stops, ask, functools.partial(scoring.score, stops=stops))


def _load_gsm8k(request: Request) -> Task:
    spec = request.spec or gsm8k.DEFAULT_PROMPT
    problems, origin = gsm8k.load_problems(request.data, "test")
    provenance: dict[str, Any] = {"prompt": dataclasses.asdict(spec), "problems": origin, "shots": None}
    shots: tuple[Problem, ...] = ()
    if spec.shots:
        train, origin = gsm8k.load_problems(request.fewshot_data, "train", flag="--fewshot_data")
        shots = gsm8k.choose_shots(spec, train, problems)
        provenance["shots"] = origin | {"indices": [shot.index for shot in shots]}
    return _make_word_problems("gsm8k", problems, spec, shots, provenance)


def _load_arith(request: Request) -> Task:
    spec = request.spec or gsm8k.DEFAULT_PROMPT
    for flag, file in (("--data", request.data), ("--fewshot_data", request.fewshot_data)):
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
    return _make_word_problems("arith", problems, spec, shots, provenance)


TASKS: dict[str, Callable[[Request], Task]] = {
    "gsm8k": _load_gsm8k,
    "arith": _load_arith,
    "ifeval": ifeval.load,
    "next_string": continuation.load,
    "math500": math_tasks.load_math500,
    "aime24": math_tasks.load_aime24,
    "humaneval": humaneval.load,
}
