"""Texts and what follows in them: next-string exact match.

After Shebel, "Effect of KV Cache Error on Inference Accuracy" (2025). That study takes 1000 articles of ten strings
each and has the tenth guessed exactly; it calls the share of right guesses perplexity. Neither the articles nor what a
string is are public. Here

* a passage is one line of the text (in WikiText a paragraph) with at least ten strings; headings, which WikiText
  writes between equals signs, are none. The WikiText-2 test split has 60 articles, so articles would be too few;
* a string is a maximal run of characters that are not white space, so WikiText's separated punctuation counts;
* passages whose first ten strings hold `<unk>` are left out, since no model would write it;
* the prompt is the text from the first to the ninth string as it stands, the gold is the tenth.

True perplexity is in `perplexity`.
"""

import hashlib
import re
from typing import Any

from jaxkv import files
from jaxkv.errors import UserError
from jaxkv.tasks.sources import Source, fetch, hash_rows
from jaxkv.tasks.task import TURN_ENDS, Problem, Request, Scores, Task, choose_spec, make_simple

STRINGS = 10
UNKNOWN = "<unk>"
RULE = f"lines of {STRINGS} strings or more that are no heading, without {UNKNOWN} among the first {STRINGS}"
WIKITEXT = Source("WikiText-2", "UTF-8 text", "Salesforce/wikitext", "wikitext-2-raw-v1", "test", files="a text file")
STOPS = ("\n", *TURN_ENDS)
_HEADING = re.compile(r"\s*=.*=\s*")


def load_text(data: str | None) -> tuple[str, dict[str, Any]]:
    """Loads a UTF-8 text file, or without one the WikiText-2 test split.

    The provenance is `source`, `sha256` of the file (None from the hub), `content`, the SHA-256 of the text as UTF-8,
    `characters`, `split` and `revision`.

    Raises UserError: no network or no `datasets` package for the hub; a file that cannot be read, is not UTF-8 (with
    the line) or has no text.
    """
    remedy = "--data takes a UTF-8 text file"
    if data is None:
        text, name, sha256 = "".join(row["text"] for row in fetch(WIKITEXT, "--data")), WIKITEXT.hub, None
    else:
        content = files.read_bytes(data, remedy)
        text = files.to_text(content, data)
        name, sha256 = data, hashlib.sha256(content).hexdigest()
    if not text.strip():
        raise UserError(f"{name}: holds no text; {remedy}")
    return text, {
        "source": name,
        "sha256": sha256,
        "content": hashlib.sha256(text.encode()).hexdigest(),
        "characters": len(text),
        "split": WIKITEXT.split if data is None else None,
        "revision": None,
    }


def find_passages(text: str) -> list[tuple[str, str]]:
    """Prompts and the strings that follow them, in order of the text; the module tells the rule."""
    passages = []
    for line in text.split("\n"):
        strings = list(re.finditer(r"\S+", line))[:STRINGS]
        if len(strings) < STRINGS or _HEADING.fullmatch(line) or any(UNKNOWN in s[0] for s in strings):
            continue
        passages.append((line[strings[0].start() : strings[-2].end()], strings[-1][0]))
    return passages


def load(request: Request) -> Task:
    """Loads the task 'next_string'. Raises UserError as `load_text`, on a text without passages, or another style."""
    spec = choose_spec(request, "zero_shot")
    text, origin = load_text(request.data)
    problems = tuple(Problem(index, prompt, gold) for index, (prompt, gold) in enumerate(find_passages(text)))
    if not problems:
        raise UserError(f"{origin['source']}: has no line of {STRINGS} strings or more; give --data a longer text")
    rows = hash_rows([[p.question, p.answer] for p in problems])
    origin |= {"rows": len(problems), "rule": RULE, "rows_sha256": rows}
    return make_simple("next_string", problems, spec, origin, grade, stops=STOPS)


def grade(text: str, gold: str) -> Scores:
    """Scores the first string of a continuation.

    'exact' wants the string itself; 'loose' forgives case, and what is neither letter nor digit at either end unless
    nothing else is there.
    """
    guess = next(iter(text.split()), None)
    loose = None if guess is None else _bare(guess)
    return {
        "exact": {"answer": guess, "correct": guess == gold},
        "loose": {"answer": loose, "correct": loose == _bare(gold)},
    }


def _bare(string: str) -> str:
    return re.sub(r"^[\W_]+|[\W_]+$", "", string).casefold() or string
