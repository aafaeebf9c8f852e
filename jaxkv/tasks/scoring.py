"""Scores a GSM8K answer three ways.

The scores differ in what they read, and a sample keeps all three: `strict` is comparable with published figures,
`flexible` forgives the format, `numeric` forgives the spelling of the number as well (`answers.extract_numeric`).
"""

import re
from collections.abc import Sequence
from typing import Any

from jaxkv.errors import UserError
from jaxkv.tasks.answers import extract_numeric
from jaxkv.tasks.numerals import canonical, find_numbers, normalize, parse_number

TURN_ENDS = ("</s>", "<eos>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>")
STOPS = ("Question:", "\nQ:", *TURN_ENDS)
SCORERS = ("strict", "flexible", "numeric")
Scores = dict[str, dict[str, Any]]


def cut_at_stop(text: str, stops: Sequence[str] = STOPS) -> str:
    """Returns the text before the first occurrence of any stop string."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]


def extract_strict(text: str) -> str | None:
    """Reads the first `#### number`, with the meaning of lm-evaluation-harness's gsm8k `strict-match`.

    One space after the marker, then an optional hyphen-minus and the longest run of digits, full stops and commas;
    commas and one final full stop are dropped. The first match counts, even where it holds no digit and so gives None.
    """
    match = re.search(r"#### (-?[0-9.,]+)", text)
    answer = match[1].replace(",", "").removesuffix(".") if match else ""
    return answer if re.search("[0-9]", answer) else None


def extract_flexible(text: str) -> str | None:
    """Reads the last number, written without separators, currency and plus.

    The idea of lm-evaluation-harness's `flexible-extract`, with `find_numbers` in place of its pattern, which takes
    '10-5' for -5, '...' for a number and the 2 of '7 (see step 2)' for the answer.
    """
    numbers = find_numbers(normalize(text))
    return numbers[-1].text if numbers else None


def score(text: str, gold: str, stops: Sequence[str] = STOPS) -> Scores:
    """Scores a text, cut at the first stop string, against a gold number by each of SCORERS.

    `answer` is the extracted number as a string, or None. Strict and flexible compare strings, as
    lm-evaluation-harness does ('18.00' is not '18'); numeric compares decimal values.

    Raises UserError if the gold answer is not one number; it may have commas, currency and a sign.
    """
    wanted = parse_number(gold)
    if wanted is None:
        raise UserError(f"the gold answer {gold!r} is not a number; fix this row of the data")
    text = cut_at_stop(text, stops)
    strict, flexible, value = extract_strict(text), extract_flexible(text), extract_numeric(text)
    return {
        "strict": {"answer": strict, "correct": strict == canonical(wanted)},
        "flexible": {"answer": flexible, "correct": flexible == canonical(wanted)},
        "numeric": {"answer": None if value is None else canonical(value), "correct": value == wanted},
    }


def label_change(a: Scores, b: Scores) -> dict[str, str]:
    """For each scorer, why its label differs between two arms.

    'same' if the labels agree, whatever the answers are; 'extraction_only' if they differ although both texts settle on
    one answer by the last scorer; 'answer_changed' otherwise.
    """
    settled = a[list(a)[-1]]["answer"] == b[list(b)[-1]]["answer"] is not None
    changed = "extraction_only" if settled else "answer_changed"
    return {scorer: "same" if a[scorer]["correct"] == b[scorer]["correct"] else changed for scorer in a}
