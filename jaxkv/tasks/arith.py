"""Our own grade-school word problems in the shape of GSM8K: a seeded generator that needs no data.

A problem is decided by the version, the split, the seed and its index alone, through SHA-256: the same on every machine
and Python version. Two splits are disjoint whatever the seeds, because a problem's key, its template with the numbers
in its question, decides by its hash which split may hold it: one key in `TEST_SHARE` belongs to the test split.

The templates are data, `arith_templates.json`, all wording our own. In `draws`, `a=2..9` draws a number, `p=10|25`
picks one, and `s=a+b` derives one; results are constructed so that each is a whole number, and at least 2 where a
singular would not fit. In texts, `{a}` is a number, `{a thing}` a number and its noun in the right form, `{P}` and
`{Q}` are people, `{he}`, `{He}` and `{his}` belong to `{P}`, another `{slot}` is a word of `slots`, with an `s` its
plural, and `<x|y>` picks a wording. Words are separated by spaces.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jaxkv.errors import UserError
from jaxkv.tasks.gsm8k import Loaded, make_word_problems
from jaxkv.tasks.sources import hash_problems
from jaxkv.tasks.task import Problem, Request, Task

VERSION = 1  # raise it with any change that alters a problem
SPLITS = ("train", "test")
TEST_COUNT = 500
TEST_SHARE = 10
SHOT_POOL = 500

_FIELD = re.compile(r"\{(\w+)(?: (\w+))?\}")


@dataclasses.dataclass(frozen=True)
class Template:
    """One kind of problem, in the notation that the module tells.

    `skill` is what it exercises, `draws` are its quantities in the order they are drawn or derived, and `steps` are the
    texts of the solution, one equation each.
    """

    name: str
    skill: str
    draws: str
    question: str
    steps: tuple[str, ...]


_DATA = json.loads(resources.files("jaxkv.tasks").joinpath("arith_templates.json").read_text())
ALL = tuple(Template(**row | {"steps": tuple(row["steps"])}) for row in _DATA["templates"])
_SLOTS = {slot: words.split() for slot, words in _DATA["slots"].items()}
_WOMEN, _MEN = _DATA["women"].split(), _DATA["men"].split()


# What makes two problems the same apart from names and wording: the template's name, and the question's numbers.
Key = tuple[str, tuple[int, ...]]


def find_split(key: Key) -> str:
    """The one split that may hold problems with this key."""
    text = json.dumps([VERSION, *key])
    return "test" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % TEST_SHARE == 0 else "train"


class Draw:
    """A stream of choices from SHA-256 of a label and a counter."""

    def __init__(self, label: str):
        self._label = label
        self._count = 0

    def below(self, bound: int) -> int:
        """Draws from 0 to `bound` - 1."""
        self._count += 1
        digest = hashlib.sha256(f"{self._label}:{self._count}".encode()).digest()
        return int.from_bytes(digest[:8]) % bound

    def pick(self, options: Sequence[Any]) -> Any:
        """Draws one of the options."""
        return options[self.below(len(options))]

    def number(self, low: int, high: int) -> int:
        """Draws from `low` to `high`, every count of digits as likely as another."""
        digits = len(str(low)) + self.below(len(str(high)) - len(str(low)) + 1)
        low, high = max(low, 10 ** (digits - 1) if digits > 1 else 0), min(high, 10**digits - 1)
        return low + self.below(high - low + 1)


def load(request: Request) -> Task:
    """The task with 500 problems. Raises UserError on data."""
    for flag, file in (("--data", request.data), ("--fewshot_data", request.fewshot_data)):
        if file is not None:
            raise UserError(f"{flag}={file}: the arith task generates its problems and needs no data; drop {flag}")
    train = functools.partial(_load_split, "train", SHOT_POOL)
    return make_word_problems("arith", request.spec, _load_split("test", TEST_COUNT), train)


def _load_split(split: str, count: int) -> Loaded:
    problems = _generate_once(split, count)
    return problems, {"source": "generated", "generator": VERSION, "split": split, "seed": 0, "rows": len(problems),
                      "sha256": hash_problems(problems)}  # fmt: skip


def generate(split: str, count: int, seed: int = 0) -> tuple[Problem, ...]:
    """Generates so many problems of 'train' or 'test'; fewer are a prefix of more.

    No problem of one split has the question or the key of a problem of the other, whatever the seeds. Within 'test'
    every key is there once; 'train' may repeat itself. Raises UserError on an unknown split.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split '{split}'; known: {', '.join(SPLITS)}")
    seen: set[Key] = set()
    problems = []
    for index in range(count):
        problem, key = _make(split, seed, index, seen)
        problems.append(problem)
        if split == "test":
            seen.add(key)
    return tuple(problems)


_generate_once = functools.cache(generate)  # a command asks twice: before it loads the model, and when it has


def plural(noun: str) -> str:
    """Returns the plural of an English noun."""
    if noun in _DATA["irregular"]:
        return str(_DATA["irregular"][noun])
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def _make(split: str, seed: int, index: int, seen: set[Key]) -> tuple[Problem, Key]:
    """The first problem of an index's stream that belongs to the split and is new."""
    draw = Draw(f"arith {VERSION}:{split}:{seed}:{index}")
    while True:
        template = draw.pick(ALL)
        values, words = _draw_values(template.draws, draw), _draw_words(draw)
        worded = re.sub(r"<([^<>]*)>", lambda match: draw.pick(match[1].split("|")), template.question)
        question = _fill(worded, values, words)
        key = (template.name, tuple(map(int, re.findall(r"\d+", question))))
        if find_split(key) == split and key not in seen:
            break
    steps = [_fill(step, values, words) for step in template.steps]
    (answer,) = re.findall(r"^\d+", steps[-1].rpartition("=")[2])
    return Problem(index, question, answer, "\n".join([*steps, f"#### {answer}"])), key


def _draw_values(draws: str, draw: Draw) -> dict[str, int]:
    values: dict[str, int] = {}
    for name, low, high, options in _parse_draws(draws):
        if options:
            values[name] = int(draw.pick(options))
            continue
        # The expressions are constants of this package, never a user's text.
        value = eval(low, {"__builtins__": {}}, values)
        if high is not None:
            value = draw.number(value, eval(high, {"__builtins__": {}}, values))
        values[name] = value
    return values


@functools.cache
def _parse_draws(draws: str) -> tuple[tuple[str, Any, Any, tuple[str, ...]], ...]:
    """Name, compiled lower bound or value, compiled upper bound or None, and options of each quantity."""
    parsed = []
    for part in draws.split():
        name, _, text = part.partition("=")
        low, _, high = text.replace("/", "//").partition("..")
        options = tuple(text.split("|")) if "|" in text else ()
        parsed.append((name, compile(low, draws, "eval"), compile(high, draws, "eval") if high else None, options))
    return tuple(parsed)


def _draw_words(draw: Draw) -> dict[str, str]:
    words = {slot: draw.pick(options) for slot, options in _SLOTS.items()}
    woman = draw.below(2) == 0
    first = draw.pick(_WOMEN if woman else _MEN)
    second = draw.pick([name for name in (*_WOMEN, *_MEN) if name != first])
    he, his = ("she", "her") if woman else ("he", "his")
    return words | {"P": first, "Q": second, "he": he, "his": his, "He": he.title(), "His": his.title()}


def _fill(text: str, values: dict[str, int], words: dict[str, str]) -> str:
    def show(match: re.Match[str]) -> str:
        name, noun = match.groups()
        if name in values:
            if noun is None:
                return str(values[name])
            noun = words.get(noun, noun)
            return f"{values[name]} {noun if values[name] == 1 else plural(noun)}"
        return words[name] if name in words else plural(words[name.removesuffix("s")])

    return _FIELD.sub(show, text)
