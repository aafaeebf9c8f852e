"""HumanEval (Chen et al., 2021, arXiv 2107.03374): complete a Python function; pass@1 by running its tests.

The code that a model writes is run, in a child process under limits (`sandbox`), and only if that was allowed.
"""

import dataclasses
import functools
import json
import re
from typing import Annotated

import msgspec

from jaxkv.errors import UserError
from jaxkv.tasks.code_blocks import defines, find_code
from jaxkv.tasks.sandbox import Limits, run_program
from jaxkv.tasks.sources import Source, Text, load_rows
from jaxkv.tasks.task import TURN_ENDS, Problem, Prompt, Request, Scores, Task, choose_spec, make_simple


class Row(msgspec.Struct, frozen=True):
    """A row of the file."""

    task_id: Text
    prompt: Text
    entry_point: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_]\w*$")]
    test: Text
    canonical_solution: str | None = None


SHAPE = "rows with 'task_id', 'prompt', 'entry_point' and 'test'"
SOURCE = Source("HumanEval", SHAPE, "openai/openai_humaneval", None, "test", Row)
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", *TURN_ENDS)  # Chen et al., section 3
CHAT_REQUEST = "Complete this Python function. Answer with the whole function in one ```python block.\n\n```python\n"
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)


def load(request: Request) -> Task:
    """Loads HumanEval. Raises UserError: code may not be run, the data cannot be had or misfits, a style it lacks."""
    if not request.allow_code_execution:
        raise UserError(
            "the humaneval task runs code that the model wrote, in a child process under limits; "
            "give --allow_code_execution to let it, or choose another --task"
        )
    spec = choose_spec(request, "zero_shot", "chat")
    rows, origin = load_rows(SOURCE, request.data)
    problems = tuple(_make_problem(index, row) for index, (_, row) in enumerate(rows))
    limits = Limits()
    probe = run_program("", limits)
    if probe.ended != "passed":
        raise UserError(
            f"an empty program does not run in the child process that humaneval needs ({probe.ended}); run on Linux "
            "with Python's own executable, or choose another --task"
        )
    chat = spec.style == "chat"
    return make_simple(
        "humaneval", problems, spec, origin, functools.partial(grade, style=spec.style, limits=limits),
        stops=TURN_ENDS if chat else STOPS, prompt=ask_in_chat if chat else None,
        scoring={"limits": dataclasses.asdict(limits), "isolation": probe.isolation},
    )  # fmt: skip


def _make_problem(index: int, row: Row) -> Problem:
    gold = {"prompt": row.prompt, "entry_point": row.entry_point, "test": row.test}
    return Problem(index, row.prompt, json.dumps(gold), row.canonical_solution or "")


def ask_in_chat(problem: Problem) -> Prompt:
    """A request to complete the function of which the problem is the head."""
    return [{"role": "user", "content": f"{CHAT_REQUEST}{problem.question.rstrip()}\n```"}]


def make_program(text: str, gold: dict[str, str], style: str) -> str:
    """The program that a completion makes, tests included.

    Of a chat answer the code is taken (`code_blocks.find_code`); if it defines the function, it is put behind what
    stands before the function in the prompt: imports and helpers.
    """
    prompt, name, future = gold["prompt"], gold["entry_point"], ""
    if style == "chat":
        text = find_code(text, name)
        if defines(text, name):
            prompt = prompt[: re.search(rf"^def {re.escape(name)}\b|\Z", prompt, re.MULTILINE).start()]  # type: ignore[union-attr]
            future, text = "".join(_FUTURE.findall(text)), _FUTURE.sub("", text)  # must come first in a program
    return f"{future}{prompt}{text}\n{gold['test']}\ncheck({name})\n"


@functools.lru_cache(maxsize=4096)
def _run(program: str, limits: Limits) -> str:
    """How a program ended; a text that is scored twice, for its label and for a change of labels, runs once."""
    return run_program(program, limits).ended


def grade(text: str, gold: str, *, style: str = "zero_shot", limits: Limits | None = None) -> Scores:
    """Runs a completion. `pass`: how it ended ('passed', 'timed out', 'killed' or an exception), right if it passed."""
    ended = _run(make_program(text, json.loads(gold), style), limits or Limits())
    return {"pass": {"answer": ended, "correct": ended == "passed"}}
