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
from jaxkv.tasks.sources import Source, Text, hash_problems, load_rows
from jaxkv.tasks.task import BOXED_REQUEST, Problem, Prompt, PromptSpec, Request, Task


class Row(msgspec.Struct, frozen=True):
    """A row of the file."""

    question: Text
    answer: Text


HUB_REVISION = "740312add88f781978c0658806c59bc2815b9866"
SOURCE = Source(
    title="GSM8K",
    shape="rows with 'question' and 'answer', the answer ending in '#### N'",
    hub="openai/gsm8k",
    config="main",
    split="test",
    row=Row,
    revision=HUB_REVISION,
    columns=("question", "answer"),
)
CHAT_REQUEST = (
    "Work it out step by step. Finish with one line that holds only #### and the final number, like this: #### 7"
)
Loaded = tuple[tuple[Problem, ...], dict[str, Any]]  # problems and their provenance


def load(request: Request) -> Task:
    """Loads the task. Raises UserError as `load_problems` and `choose_shots`."""
    train = functools.partial(load_problems, request.fewshot_data, "train", "--fewshot_data")
    return make_word_problems("gsm8k", request.spec, load_problems(request.data), train)


def make_word_problems(name: str, spec: PromptSpec | None, test: Loaded, train: Callable[[], Loaded]) -> Task:
    """A task whose golds are numbers, 8-shot if nothing else is asked for; `train` is not called without shots."""
    spec = spec or PromptSpec("few_shot", shots=8)
    problems, origin = test
    provenance: dict[str, Any] = {"prompt": dataclasses.asdict(spec), "problems": origin, "shots": None}
    shots: tuple[Problem, ...] = ()
    if spec.shots:
        examples, origin = train()
        shots = choose_shots(spec, examples, problems)
        provenance["shots"] = origin | {"indices": [shot.index for shot in shots]}
    # A continuation ends at the next question of plain text, and with the turn of a chat.
    stops = TURN_ENDS if spec.is_chat else STOPS
    prompt = functools.partial(build_prompt, spec, shots=shots)
    return Task(name, problems, provenance, stops, prompt, functools.partial(score, stops=stops))


def load_problems(data: str | None, split: str = "test", flag: str = "--data") -> Loaded:
    """Loads problems in source order from a file, whose `split` is only recorded, or from the Hugging Face hub.

    Their provenance is that of `load_rows` with a `fingerprint`, the same whatever file they came in, for the hash of
    all columns. Raises UserError as `load_rows`, or on a row that has no `#### N`.
    """
    rows, origin = load_rows(dataclasses.replace(SOURCE, split=split), data, flag)
    problems = tuple(_make_problem(where, index, row) for index, (where, row) in enumerate(rows))
    del origin["content"]  # of all columns, which files may have more of
    return problems, origin | {"fingerprint": hash_problems(problems)}


def choose_shots(spec: PromptSpec, train: Sequence[Problem], test: Iterable[Problem] = ()) -> tuple[Problem, ...]:
    """Chooses the worked examples of a prompt.

    With a seed, train problems are ordered by a hash of seed and index, so that fewer shots are a prefix of more.
    Raises UserError on too few train problems, or a test problem, which will be asked, among them.
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


def build_prompt(spec: PromptSpec, problem: Problem, shots: Sequence[Problem] = ()) -> Prompt:
    """The prompt of a problem: text, or messages in which worked examples are earlier turns.

    Messages ask for the answer in \\boxed{}, in the words of Qwen2.5-Math, or for a last line `#### N`.
    """
    if not spec.is_chat:
        return k_shot(problem, shots)
    boxed = spec.style == "boxed"
    request = f"\n{BOXED_REQUEST}" if boxed else f"\n\n{CHAT_REQUEST}"
    show = show_boxed_solution if boxed else show_solution
    messages = []
    for shot in shots:
        messages.append({"role": "user", "content": shot.question.strip() + request})
        messages.append({"role": "assistant", "content": show(shot)})
    return [*messages, {"role": "user", "content": problem.question.strip() + request}]


def _plain(question: str) -> str:
    return " ".join(question.split()).casefold()


def _make_problem(where: str, index: int, row: Row) -> Problem:
    _, marker, gold = row.answer.rpartition("####")
    value = parse_number(gold) if marker else None
    if value is None:
        raise UserError(f"{where}: the answer does not end in '#### N' with a number N; add that line or drop the row")
    return Problem(index, row.question, canonical(value), row.answer)
