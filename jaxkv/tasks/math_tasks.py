"""MATH-500 and AIME 2024: answers in \\boxed{}, compared as mathematics by the package math-verify.

MATH-500 is the 500 test problems of Hendrycks et al., 2021 (arXiv 2103.03874), that Lightman et al., 2023
(arXiv 2305.20050), held out.
"""

import functools
import re

import msgspec

from jaxkv.errors import UserError
from jaxkv.tasks.numerals import match_braces
from jaxkv.tasks.sources import Source, Text, load_rows
from jaxkv.tasks.task import BOXED_REQUEST, Problem, Request, Scores, Task, choose_spec, make_simple, require, versions


class Row(msgspec.Struct, frozen=True):
    """A row of the file."""

    answer: Text | int
    prompt: Text | None = None
    problem: Text | None = None
    solution: str | None = None


SHAPE = "rows with 'prompt' (or 'problem') and 'answer'"
SOURCES = {
    "math500": Source("MATH-500", SHAPE, "HuggingFaceH4/MATH-500", None, "test", Row),
    "aime24": Source("AIME 2024", SHAPE, "HuggingFaceH4/aime_2024", None, "train", Row),
}
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


def load(request: Request) -> Task:
    """Loads MATH-500 or AIME 2024, I and II, as the request's name says.

    Raises UserError: math-verify is missing, the data cannot be had, a row without prompt and answer, a style it lacks.
    """
    name = request.name
    spec = choose_spec(request, "zero_shot", "chat")
    require(name, "math_verify")
    rows, origin = load_rows(SOURCES[name], request.data)
    problems = tuple(_make_problem(where, index, row) for index, (where, row) in enumerate(rows))
    scoring = {"packages": versions("math-verify", "sympy")}
    return make_simple(name, problems, spec, origin, grade, scoring=scoring)


def _make_problem(where: str, index: int, row: Row) -> Problem:
    question = row.prompt or row.problem
    if question is None:
        raise UserError(f"{where}: has neither 'prompt' nor 'problem'; the file needs {SHAPE}")
    text = question if "\\boxed" in question else f"{question.rstrip()}\n{BOXED_REQUEST}"
    return Problem(index, text, str(row.answer).strip(), row.solution or "")


def find_boxed(text: str) -> str | None:
    """Content of the last \\boxed{} whose braces close, without outer spaces; None if there is none."""
    closers = match_braces(text)
    boxes = [match.end() for match in _BOXED.finditer(text) if match.end() - 1 in closers]
    return text[boxes[-1] : closers[boxes[-1] - 1]].strip() if boxes else None


@functools.lru_cache(maxsize=4096)  # a change of labels asks for the scores of the same texts again
def _verify(text: str, boxed: str | None, gold: str) -> tuple[str | None, bool]:
    """What math-verify reads in a box, or in a text without one, as it writes it, and whether that equals the gold."""
    package = require("math", "math_verify")
    found = package.parse(text if boxed is None else f"\\boxed{{{boxed}}}")
    wanted = package.parse(f"\\boxed{{{gold}}}")
    return (str(found[0]) if found else None), bool(package.verify(wanted, found))


def grade(text: str, gold: str) -> Scores:
    """Scores a text.

    'boxed' compares the content of the last \\boxed{} with the gold as strings, spaces aside. 'verified' compares
    values: of that content, or without one of what math-verify finds in the text, LaTeX before plain numbers. Its limit
    of 5 seconds an expression counts as wrong. It works in the main thread alone.
    """
    boxed = find_boxed(text)
    same = boxed is not None and "".join(boxed.split()) == "".join(gold.split())
    answer, correct = _verify(text, boxed, gold)
    return {"boxed": {"answer": boxed, "correct": same}, "verified": {"answer": answer, "correct": correct}}
