"""GSM8K (Cobbe et al., 2021, arXiv 2110.14168): problems, prompts and stop strings. Scores are in `scoring`."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from jaxkv.errors import UserError
from jaxkv.tasks.numerals import canonical, parse_number
from jaxkv.tasks.scoring import STOPS, TURN_ENDS, score
from jaxkv.tasks.sources import Source, Text, hash_rows, load_rows, to_row
from jaxkv.tasks.task import BOXED_REQUEST, Request, Task
from jaxkv.tasks.task import Problem as Problem
from jaxkv.tasks.task import PromptSpec as PromptSpec

HUB_REVISION = "740312add88f781978c0658806c59bc2815b9866"
SOURCE = Source(
    title="GSM8K",
    shape="rows with 'question' and 'answer', the answer ending in '#### N'",
    hub="openai/gsm8k",
    config="main",
    split="test",
    revision=HUB_REVISION,
    columns=("question", "answer"),
)
CHAT_REQUEST = (
    "Work it out step by step. Finish with one line that holds only #### and the final number, like this: #### 7"
)
DEFAULT_PROMPT = PromptSpec("few_shot", shots=8)
Loaded = tuple[tuple[Problem, ...], dict[str, Any]]  # problems and their provenance


class Row(msgspec.Struct, frozen=True):
    """A row of the file."""

    question: Text
    answer: Text


def load(request: Request) -> Task:
    """Loads the task, 8-shot if nothing else is asked for. Raises UserError as `load_problems` and `choose_shots`."""

    def read(split: str) -> Loaded:
        if split == "train":
            return load_problems(request.fewshot_data, "train", "--fewshot_data")
        return load_problems(request.data)

    return make_word_problems("gsm8k", request.spec or DEFAULT_PROMPT, read)


def make_word_problems(name: str, spec: PromptSpec, read: Callable[[str], Loaded]) -> Task:
    """A task whose golds are numbers; `read` gives the problems of 'test', and with shots those of 'train'."""
    problems, origin = read("test")
    provenance: dict[str, Any] = {"prompt": dataclasses.asdict(spec), "problems": origin, "shots": None}
    shots: tuple[Problem, ...] = ()
    if spec.shots:
        train, origin = read("train")
        shots = choose_shots(spec, train, problems)
        provenance["shots"] = origin | {"indices": [shot.index for shot in shots]}
    stops = stop_strings(spec)

    def ask(problem: Problem) -> str | list[dict[str, str]]:
        return build_prompt(spec, problem, shots)

    return Task(name, problems, spec, shots, provenance, stops, ask, functools.partial(score, stops=stops))


def load_problems(data: str | None, split: str = "test", flag: str = "--data") -> Loaded:
    """Loads problems from a file, or from the Hugging Face hub.

    Args:
      data: a .jsonl or .parquet file with the fields `question` and `answer`; None downloads openai/gsm8k.
      split: 'train' or 'test'; of a file it is only recorded.
      flag: the flag that names `data`, for error messages.

    Returns:
      The problems in source order and their provenance: `source`, `sha256` of the file (None from the hub), `rows`,
      `split`, `revision` (None for a file), `fingerprint`, which is the same whatever file the problems came in.

    Raises:
      UserError: as `load_rows`, or a row that lacks a field or has no `#### N`.
    """
    rows, origin = load_rows(dataclasses.replace(SOURCE, split=split), data, flag)
    problems = tuple(_make_problem(where, index, row) for index, (where, row) in enumerate(rows))
    del origin["content"]  # of all columns, which files may have more of
    return problems, origin | {"fingerprint": hash_rows([[p.question, p.solution] for p in problems])}


def choose_shots(spec: PromptSpec, train: Sequence[Problem], test: Iterable[Problem] = ()) -> tuple[Problem, ...]:
    """Chooses the worked examples of a prompt.

    With a seed, train problems are ordered by a hash of seed and index, so that fewer shots are a prefix of more.

    Args:
      spec: prompt style, number of shots and seed.
      train: problems to choose from.
      test: problems that will be asked; none of them may be in `train`.

    Raises:
      UserError: too few train problems, or a test problem among them.
    """
    asked = {_plain(problem.question) for problem in test}
    shared = [problem.index + 1 for problem in train if _plain(problem.question) in asked]
    if shared and spec.shots:
        raise UserError(
            f"{len(shared)} of the few-shot problems are also asked (first: row {shared[0]}); "
            "give --fewshot_data a train file that shares no question with --data"
        )
    if len(train) < (spec.shots or 0):
        raise UserError(f"{spec.shots} shots wanted and the train problems are {len(train)}; use fewer shots")
    if spec.seed is None:
        return tuple(train[: spec.shots])
    ranked = sorted(train, key=lambda p: hashlib.sha256(f"{spec.seed}:{p.index}".encode()).digest())
    return tuple(ranked[: spec.shots])


def show_solution(problem: Problem) -> str:
    """Returns the solution as a model should see it: without calculator annotations."""
    return re.sub(r"<<[^<>]*>>", "", problem.solution).strip()


def zero_shot(problem: Problem) -> str:
    """Returns `Question: ...` and an open `Answer:`."""
    return f"Question: {problem.question.strip()}\nAnswer:"


def k_shot(problem: Problem, shots: Sequence[Problem]) -> str:
    """Returns worked examples and the open question, separated by blank lines."""
    return "\n\n".join([*(f"{zero_shot(shot)} {show_solution(shot)}" for shot in shots), zero_shot(problem)])


def show_boxed_solution(problem: Problem) -> str:
    """Returns the solution as `show_solution`, its last line with the answer in \\boxed{} for `#### N`."""
    steps = show_solution(problem).rpartition("####")[0].rstrip()
    return f"{steps}\nThe final answer is \\boxed{{{problem.answer}}}.".lstrip()


def chat(problem: Problem, shots: Sequence[Problem] = (), boxed: bool = False) -> list[dict[str, str]]:
    """Returns messages for `tokenizer.apply_chat_template`; worked examples become earlier turns.

    Args:
      problem: the question.
      shots: worked examples.
      boxed: asks for the answer in \\boxed{}, in the words of Qwen2.5-Math; else for a last line `#### N`.
    """
    request = f"\n{BOXED_REQUEST}" if boxed else f"\n\n{CHAT_REQUEST}"
    show = show_boxed_solution if boxed else show_solution
    messages = []
    for shot in shots:
        messages.append({"role": "user", "content": shot.question.strip() + request})
        messages.append({"role": "assistant", "content": show(shot)})
    return [*messages, {"role": "user", "content": problem.question.strip() + request}]


def build_prompt(spec: PromptSpec, problem: Problem, shots: Sequence[Problem] = ()) -> str | list[dict[str, str]]:
    """Builds the prompt of a problem: a string, or messages for a chat template.

    Raises:
      UserError: the number of shots is not the spec's, or the problem is one of them.
    """
    if len(shots) != spec.shots:
        raise UserError(f"the prompt wants {spec.shots} shots and got {len(shots)}; choose them with choose_shots")
    if _plain(problem.question) in {_plain(shot.question) for shot in shots}:
        raise UserError(f"problem {problem.index} is one of its own worked examples; take shots from the train split")
    if spec.is_chat:
        return chat(problem, shots, boxed=spec.style == "boxed")
    return k_shot(problem, shots)


def stop_strings(spec: PromptSpec) -> tuple[str, ...]:
    """Returns where a continuation ends: the next question for plain text, the end of the turn for chat."""
    return TURN_ENDS if spec.is_chat else STOPS


def _plain(question: str) -> str:
    return " ".join(question.split()).casefold()


def _make_problem(where: str, index: int, row: Any) -> Problem:
    given = to_row(row, Row, where, SOURCE.shape)
    _, marker, gold = given.answer.rpartition("####")
    value = parse_number(gold) if marker else None
    if value is None:
        raise UserError(f"{where}: the answer does not end in '#### N' with a number N; add that line or drop the row")
    return Problem(index, given.question, canonical(value), given.answer)
