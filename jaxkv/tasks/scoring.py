"""Reads numbers out of text and scores a GSM8K answer three ways.

The scores differ in what they read, and a sample keeps all three: `strict` is comparable with published figures,
`flexible` forgives the format, `numeric` forgives the spelling of the number as well.
"""

import dataclasses
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

from jaxkv.errors import UserError, nearest

TURN_ENDS = ("</s>", "<eos>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>")
STOPS = ("Question:", "\nQ:", *TURN_ENDS)
SCORERS = ("strict", "flexible", "numeric")

_CHARACTERS: dict[int, str | None] = {
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), None),
    **dict.fromkeys(map(ord, "\u2019\u02bc"), "'"),
    **{0xFF10 + digit: str(digit) for digit in range(10)},
    **{ord("\uff0c"): ",", ord("\uff0e"): ".", ord("\uff04"): "$", ord("\ufe69"): "$", ord("\uff05"): "%"},
}
_SPELLINGS = (
    (r"\{,\}|\\!", lambda m: "," if m[0] == "{,}" else ""),
    (r"\\[,;:]", " "),
    (r"\\([$%])", r"\1"),
    (r"\\[dt]?frac\{([^{}\n]*)\}\{([^{}\n]*)\}", r"\1/\2"),
    (r"\\(?:text|mathrm|mathbf|textbf)\{([^{}\n]*)\}", r"\1"),
    (r"\\[()\[\]]", " "),
    (r"\\(?:times|cdot)\b", "*"),
    (r"(?i:\bnegative )(?=[$0-9])", "-"),
    (r"(?<=[=#]) *- +(?=[$0-9.])", " -"),
)
_CURRENCY = r"(?:(?:US|CA|AU)?\$|USD|EUR|GBP|Rs\.?|[€£¥₹])"
# Thousands in groups of three with one kind of separator throughout, or lakhs and crores, or plain digits.
_DIGITS = (
    r"(?:[1-9][0-9]{0,2}(?P<sep>[, '_])[0-9]{3}(?:(?P=sep)[0-9]{3})*(?![0-9]|,[0-9])"
    r"|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?![0-9]|,[0-9])"
    r"|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
)
_NUMBER = re.compile(
    rf"(?:(?P<outer>[-+])?{_CURRENCY} ?(?P<inner>[-+])?|(?P<bare>[-+])?(?<![0-9A-Z])(?<!\b[a-z])(?<![0-9]\.))"
    rf"(?P<digits>{_DIGITS})(?P<exponent>[eE][-+]?[0-9]{{1,2}}(?![0-9A-Za-z]))?"
)
_REFERENCE = re.compile(r"\b(?:step|equation|eq\.|footnote|figure)[ \-(#]{0,2}$", re.IGNORECASE)
_LIST_LABEL = re.compile(r"^[ #*]*([0-9]{1,2})[.)](?=\**(?:\s|$))", re.MULTILINE)
_SCALE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}

_FILLER = (
    r"[\s*_`=:~≈$\"'“”({\[]*(?:(?:(?:the|final|answer|is|are|be|would|should|therefore|thus|so|just|only|exactly|about"
    r"|approximately|a|total|of|equals?|to)\b|[A-Za-z] ?=)[\s*_`=:~≈,\"'“”({\[]*){0,8}"
)
_MARKER = re.compile(rf"####{_FILLER}")
_BOXED = re.compile(r"\\boxed *\{")
_STATED = re.compile(
    rf"\banswer\b[^.\n:=]{{0,60}}?\b(?:is|are|equals|would be|should be|will be|comes to)\b{_FILLER}"
    rf"|\bfinal answer\W{{0,4}}[:=]{_FILLER}",
    re.IGNORECASE,
)
_HEADED = re.compile(rf"\banswer\W{{0,4}}[:=]{_FILLER}", re.IGNORECASE)
_CLAUSE_END = re.compile(
    r"[\n;(\[\]}]|[.!?](?:\s|$)|,\s|\b(?:because|since|which|so|but|not|after|from|if|where|with)\b", re.IGNORECASE
)
_OPERATOR = re.compile(r"\s*(?:[-+*/x×÷]|\*\*)\s*")
_ASIDE = re.compile(r"(?<=[0-9A-Za-z%*.])([ ]*)\([^()\n]*[A-Za-z][^()\n]*\)")


@dataclasses.dataclass(frozen=True)
class Number:
    """A number as it stands in a text.

    Attributes:
      start: offset of its first character, sign and currency included.
      end: offset after its last character.
      text: ASCII digits with an optional minus and decimal point; separators, currency and plus removed.
    """

    start: int
    end: int
    text: str

    @property
    def value(self) -> Decimal:
        """Exact decimal value."""
        return Decimal(self.text)


def normalize(text: str) -> str:
    """Returns the text with one spelling of minus, space, apostrophe and digits, and without LaTeX markup."""
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _SPELLINGS:
        text = re.sub(pattern, replacement, text)  # type: ignore[call-overload]
    return text


def canonical(value: Decimal) -> str:
    """Returns plain digits: no exponent, no trailing zeros, no negative zero."""
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def find_numbers(text: str) -> list[Number]:
    """Finds the numbers of a normalized text, in order.

    A minus is a sign only where no operand stands before it: '10-5' holds 10 and 5. Thousands may be separated by
    commas, spaces, apostrophes or underscores in groups of three: '1 234' is one number, '7 8' two. A final full stop
    or comma is not part of a number. Numbers that name something are left out: 'step 2', 'Equation (3)', the labels of
    a numbered list, and digits inside a name such as 'H2O'.

    Args:
      text: text that went through `normalize`.
    """
    labels = _list_labels(text)
    found = []
    for match in _NUMBER.finditer(text):
        if match.start("digits") in labels or _REFERENCE.search(text[max(0, match.start() - 16) : match.start()]):
            continue
        start = match.start()
        signs = [match[name] for name in ("outer", "inner", "bare") if match[name]]
        leading = match["outer"] or match["bare"]
        if leading and _follows_operand(text, start):
            signs.remove(leading)
            start += 1
        digits = re.sub(r"[, '_]", "", match["digits"])
        body = canonical(Decimal(digits + match["exponent"])) if match["exponent"] else digits
        if body.startswith("."):
            body = "0" + body
        found.append(Number(start, match.end(), ("-" if signs.count("-") == 1 else "") + body))
    return found


def parse_number(text: str) -> Decimal | None:
    """Returns the value of a text that is one number and nothing else, or None.

    Currency, thousands separators, a plus, a final full stop and surrounding space are allowed.
    """
    text = normalize(text).strip()
    numbers = find_numbers(text)
    if len(numbers) != 1 or text[: numbers[0].start] or text[numbers[0].end :] not in ("", "."):
        return None
    return numbers[0].value


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


def extract_numeric(text: str) -> Decimal | None:
    """Reads the value the text settles on.

    In this order: the first `####` followed by a number, in whatever spelling; the last `\\boxed{}`; the last 'the
    answer is N' or 'final answer: N'; the last line 'Answer: N' with nothing but a unit after the number; the last
    number outside an aside in parentheses. Of 'a op b = c' it takes c. Fractions ('3/4', '2 1/2') and '2 million' are
    evaluated; numbers written as words are not read.
    """
    text = normalize(text)
    numbers = find_numbers(text)
    marked = (_leading_value(text, match.end(), numbers) for match in _MARKER.finditer(text))
    boxed = (_boxed_value(text, match.end(), numbers) for match in reversed(list(_BOXED.finditer(text))))
    stated = (_leading_value(text, match.end(), numbers) for match in reversed(list(_STATED.finditer(text))))
    headed = (_headed_value(text, match.end(), numbers) for match in reversed(list(_HEADED.finditer(text))))
    for candidates in (marked, boxed, stated, headed):
        for value in candidates:
            if value is not None:
                return value
    outside = [number for number in numbers if not _in_aside(text, number, numbers)]
    return _value_of(text, (outside or numbers)[-1], numbers) if numbers else None


def score(text: str, gold: str, stops: Sequence[str] = STOPS) -> dict[str, dict[str, Any]]:
    """Scores a generated text against a gold answer.

    Args:
      text: what the model wrote after the prompt. It is cut at the first stop string.
      gold: the gold number; commas, currency and a sign are allowed.
      stops: where a run-on begins; pass `gsm8k.stop_strings(spec)` for the prompt style in use.

    Returns:
      For each of 'strict', 'flexible' and 'numeric' a dict with `answer`, the extracted number as a string or None,
      and `correct`. Strict and flexible compare strings, as lm-evaluation-harness does ('18.00' is not '18'); numeric
      compares decimal values.

    Raises:
      UserError: the gold answer is not one number.
    """
    wanted = parse_number(gold)
    if wanted is None:
        raise UserError(f"the gold answer {gold!r} is not a number; fix this row of the data")
    text = cut_at_stop(text, stops)
    value = extract_numeric(text)
    result: dict[str, dict[str, Any]] = {}
    for name, answer in (("strict", extract_strict(text)), ("flexible", extract_flexible(text))):
        result[name] = {"answer": answer, "correct": answer == canonical(wanted)}
    result["numeric"] = {"answer": None if value is None else canonical(value), "correct": value == wanted}
    return result


def label_change_kind(
    text_a: str, text_b: str, gold: str, scorer: str, stops: Sequence[str] = STOPS
) -> Literal["same", "answer_changed", "extraction_only"]:
    """Says why the correctness label of a problem differs between two arms.

    Args:
      text_a: what one arm wrote.
      text_b: what the other arm wrote.
      gold: the gold number.
      scorer: 'strict', 'flexible' or 'numeric': whose label is compared.
      stops: as in `score`.

    Returns:
      'same' if the labels agree, whatever the answers are; 'extraction_only' if they differ although both texts settle
      on the same value; 'answer_changed' otherwise.

    Raises:
      UserError: unknown scorer, or the gold answer is not a number.
    """
    if scorer not in SCORERS:
        raise UserError(f"unknown scorer '{scorer}'{nearest(scorer, list(SCORERS))}; known: {', '.join(SCORERS)}")
    a, b = score(text_a, gold, stops), score(text_b, gold, stops)
    if a[scorer]["correct"] == b[scorer]["correct"]:
        return "same"
    return "extraction_only" if a["numeric"]["answer"] == b["numeric"]["answer"] else "answer_changed"


def _list_labels(text: str) -> set[int]:
    """Offsets of the digits that count the items of a numbered list: 1, 2, ... at line starts, two at least."""
    labels: set[int] = set()
    run: list[int] = []
    for match in _LIST_LABEL.finditer(text):
        if int(match[1]) == len(run) + 1:
            run.append(match.start(1))
        elif int(match[1]) == 1:
            run = [match.start(1)]
        if len(run) > 1:
            labels.update(run)
    return labels


def _follows_operand(text: str, at: int) -> bool:
    """Whether a minus at this offset subtracts: an operand touches it, or a number stands before it."""
    before = text[:at].rpartition("\n")[2]
    if not before:
        return False
    if before[-1] != " ":
        return before[-1].isalnum() or before[-1] in ")]}%"
    before = before.rstrip()
    return bool(before) and (before[-1].isdigit() or before[-1] in ")]}%")


def _at(numbers: list[Number], start: int) -> Number | None:
    return next((number for number in numbers if number.start == start), None)


def _value_of(text: str, number: Number, numbers: list[Number]) -> Decimal | None:
    """Value of a number with the fraction it belongs to and the scale word after it."""
    value = number.value
    scale = re.match(r" *([a-z]+)\b", text[number.end : number.end + 12], re.IGNORECASE)
    if scale and scale[1].lower() in _SCALE:
        return value.scaleb(_SCALE[scale[1].lower()]) if len(number.text) < 25 else value
    place = numbers.index(number)
    above = numbers[place - 1] if place else None
    if above is None or not re.fullmatch(r" ?/ ?", text[above.end : number.start]):
        return value
    if re.search(r"[-+*/x×÷] ?$", text[: above.start]) or re.match(r" ?[-+*/×÷]", text[number.end :]) or not value:
        return value
    value = above.value / value
    whole = numbers[place - 2] if place > 1 else None
    if whole and text[whole.end : above.start] == " " and 0 < value < 1 and "." not in whole.text:
        value = whole.value - value if whole.text.startswith("-") else whole.value + value
    return value


def _leading_value(text: str, at: int, numbers: list[Number]) -> Decimal | None:
    """Value of the expression that starts at or just before an offset, in its clause; None if none starts there."""
    start = next((s for s in range(at, max(at - 3, -1), -1) if _at(numbers, s)), None)
    if start is None:
        return None
    number = _at(numbers, start)
    assert number is not None
    cut = _CLAUSE_END.search(text, number.end)
    end = cut.start() if cut else len(text)
    rest = [n for n in numbers if number.start < n.start and n.end <= end]
    equals = text.rfind("=", number.end, end)
    if equals >= 0:
        settled = next((n for n in rest if n.start > equals), None)
        if settled:
            rest, number = [n for n in rest if n.start > settled.start], settled
    for following in rest:
        between = text[number.end : following.start]
        mixed = between == " " and re.match(r" ?/ ?[0-9]", text[following.end :])
        if not (_OPERATOR.fullmatch(between) or mixed):
            break
        number = following
    return _value_of(text, number, numbers)


def _boxed_value(text: str, at: int, numbers: list[Number]) -> Decimal | None:
    end = text.find("}", at)
    first = next((n for n in numbers if n.start >= at and (end < 0 or n.end <= end)), None)
    return _leading_value(text, first.start, numbers) if first else None


def _headed_value(text: str, at: int, numbers: list[Number]) -> Decimal | None:
    """As `_leading_value`, only where the rest of the line is one number and at most four words."""
    number = next((n for n in numbers if at - 3 < n.start <= at), None)
    if number is None or not re.match(r"[%*_`)]*(?: [A-Za-z]+){0,4}[.!*_` ]*(?:\n|$)", text[number.end :]):
        return None
    return _value_of(text, number, numbers)


def _in_aside(text: str, number: Number, numbers: list[Number]) -> bool:
    """Whether a number stands in parentheses with words, behind another number of the same line."""
    line = text.rfind("\n", 0, number.start) + 1
    for aside in _ASIDE.finditer(text, line):
        if aside.start() > number.start:
            return False
        if number.end <= aside.end():
            return any(line <= n.start < aside.start() for n in numbers)
    return False
