"""What every task is made of: problems, the way they are put to a model, and the way its text is scored."""

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

from jaxkv.errors import UserError
from jaxkv.tasks.scoring import TURN_ENDS, Scores, cut_at_stop, label_change

BOXED_REQUEST = "Please reason step by step, and put your final answer within \\boxed{}."  # Qwen2.5-Math's own
SUBSETS = ("all", "no_length_128")
Prompt = str | list[dict[str, str]]  # text, or messages for a chat template


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      index: row in the source, from 0.
      question: its text.
      answer: the gold as the task's scorers read it: a number, a string, or JSON.
      solution: a worked solution as published; empty where there is none.
    """

    index: int
    question: str
    answer: str
    solution: str = ""


@dataclasses.dataclass(frozen=True)
class PromptSpec:
    """How a problem is put to the model.

    Attributes:
      style: 'zero_shot' and 'few_shot' are plain text for base models; 'chat' is messages for a chat template,
        and so is 'boxed', which asks for the answer in \\boxed{} where 'chat' asks for it as the task's data has it.
      shots: worked examples before the question; 0 for zero_shot, at least 1 for few_shot. None leaves it to a task
        that has a number of its own.
      seed: None takes the first train problems; a number takes a seeded choice, the same on every machine.
    """

    style: Literal["zero_shot", "few_shot", "chat", "boxed"]
    shots: int | None = 0
    seed: int | None = None

    def __post_init__(self):
        fits = {"zero_shot": self.shots == 0, "few_shot": self.shots is None or self.shots > 0}
        if not fits.get(self.style, (self.shots or 0) >= 0):
            raise UserError(
                f"a {self.style} prompt cannot have {self.shots} shots; use few_shot with shots, or zero_shot"
            )

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages for a chat template."""
        return self.style in ("chat", "boxed")


@dataclasses.dataclass(frozen=True)
class Request:
    """What a task is loaded with.

    Attributes:
      name: of the task.
      data: file with the problems to ask; None fetches the test split from the hub.
      fewshot_data: file with the worked examples; None fetches the train split. Not read without shots.
      spec: prompt style; None takes the task's usual one for plain text: 8-shot for gsm8k and arith, lm_eval's own for
        its tasks, zero_shot for the others.
      subset: 'all', or 'no_length_128' of IFEval.
      allow_code_execution: whether code that the model wrote may be run.
    """

    name: str
    data: str | None = None
    fewshot_data: str | None = None
    spec: PromptSpec | None = None
    subset: str = "all"
    allow_code_execution: bool = False


@dataclasses.dataclass(frozen=True)
class Task:
    """Problems with the way they are asked and scored.

    Attributes:
      name: key in the registry.
      problems: what is asked, in source order.
      provenance: JSON-ready origin of `problems` and of `shots` (None without), rows of the shots, prompt spec;
        `scoring` where scores depend on more than this package.
      stops: strings at which a continuation ends.
      prompt: builds the prompt of a problem: a string, or messages for a chat template.
      grade: scores a continuation that was cut, against a gold: scorer -> `answer` (string or None) and `correct`. The
        last scorer is the most forgiving one: its answer is what the text settles on. One in parts also has `value`. A
        pure function.
      total: from texts by gold to the figures of all of them together; None where those are shares of `correct`.
    """

    name: str
    problems: tuple[Problem, ...]
    provenance: dict[str, Any]
    stops: tuple[str, ...]
    prompt: Callable[[Problem], Prompt]
    grade: Callable[[str, str], Scores]
    total: Callable[[Mapping[str, str]], dict[str, float]] | None = None

    def cut(self, text: str) -> tuple[str, bool]:
        """The continuation up to the first stop string, and whether there was one."""
        kept = cut_at_stop(text, self.stops)
        return kept, kept != text

    def score(self, text: str, gold: str) -> Scores:
        """Scores a continuation, cut at the first stop string, by every scorer."""
        return self.grade(self.cut(text)[0], gold)

    def label_change(self, text_a: str, text_b: str, gold: str) -> dict[str, str]:
        """`scoring.label_change` of two arms' texts."""
        return label_change(self.score(text_a, gold), self.score(text_b, gold))


def choose_spec(request: Request, *styles: str) -> PromptSpec:
    """The prompt spec of a task without worked examples; zero_shot if none is asked for.

    Raises UserError on a style that the task does not have, shots, or a file of worked examples.
    """
    task, spec = request.name, request.spec or PromptSpec("zero_shot")
    if spec.style not in styles or spec.shots:
        shots = f" with {spec.shots} shots" if spec.shots else ""
        raise UserError(
            f"the {task} task has no {spec.style} prompt{shots}; use {' or '.join(f'--prompt={s}' for s in styles)}"
            " without --shots"
        )
    if request.fewshot_data is not None:
        raise UserError(
            f"--fewshot_data={request.fewshot_data}: the {task} task has no worked examples; drop --fewshot_data"
        )
    return spec


def make_simple(
    name: str,
    problems: tuple[Problem, ...],
    spec: PromptSpec,
    origin: dict[str, Any],
    grade: Callable[[str, str], Scores],
    *,
    stops: tuple[str, ...] = TURN_ENDS,
    prompt: Callable[[Problem], Prompt] | None = None,
    scoring: dict[str, Any] | None = None,
) -> Task:
    """A task without worked examples, by default with the question as it stands.

    `scoring` is what scores depend on beyond this package: versions, seeds, limits. The rest is as in `Task`.
    """
    provenance = {"prompt": dataclasses.asdict(spec), "problems": origin, "shots": None, "scoring": scoring}

    def ask_plainly(problem: Problem) -> Prompt:
        return [{"role": "user", "content": problem.question}] if spec.style == "chat" else problem.question

    return Task(name, problems, provenance, stops, prompt or ask_plainly, grade)


def require(task: str, module: str) -> ModuleType:
    """Imports a module of the `eval` extra. Raises UserError, with the command, where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise UserError(f"the {task} task needs the package of '{missing}': run `pip install 'jaxkv[eval]'`") from error


def versions(*names: str) -> dict[str, str]:
    """Versions of distributions that are installed."""
    return {name: importlib.metadata.version(name) for name in names}
