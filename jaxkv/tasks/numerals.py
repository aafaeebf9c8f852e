"""Reads numbers out of text as models write it: with currency, separators, LaTeX, and Unicode's many characters."""

import dataclasses
import re
import unicodedata
from decimal import Decimal

_CHARACTERS: dict[int, int | str | None] = {
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), None),
    **dict.fromkeys(map(ord, "\u2019\u02bc"), "'"),
    **{0xFF10 + digit: str(digit) for digit in range(10)},
    **str.maketrans("\uff0c\uff0e\uff04\ufe69\uff05\u2044", ",.$$%/"),
}
_NESTED = 4  # depth to which LaTeX commands in each other are read
_WRAPPED = re.compile(
    r"\\(?:text|mathrm|mathbf|mathit|mathsf|textbf|textit|textrm|boldsymbol|bm|mbox|underline)\{([^{}\n]*)\}"
)
_PART = r" *(?:\{([^{}\n]*)\}|([0-9]))"
_FRACTION = re.compile(rf"([0-9] *)?\\(?:[dtcs]|nice)?frac{_PART}{_PART}")
_VULGAR = re.compile("([0-9] ?)?([\u00bc-\u00be\u2150-\u215e])")
_PLAIN = re.compile(r" *[-+]?\$?[0-9][0-9,.]* *")
_BEFORE = (
    (r"\{,\}|\\!", lambda m: "," if m[0] == "{,}" else ""),
    (r"\\(?:left|right|displaystyle)\b", ""),
    (r"\\(?:[,;: ]|q?quad\b)", " "),
    (r"\\([$%])", r"\1"),
)
_AFTER = (
    (r"\\[()\[\]]", " "),
    (r"\\(?:times|cdot)\b", "*"),
    (r"\\div\b", "/"),
    (r"\^\{([^{}\n]*)\}", r"^\1"),
    (r"(?i:\bnegative |(?<=\bis )minus )(?=[$0-9])", "-"),
    (r"(?<=[=#{]) *- +(?=[$0-9.])", " -"),
)
_CURRENCY = r"(?:(?:US|CA|AU)?\$|USD|EUR|GBP|Rs\.?|[€£¥₹])"
# Thousands in groups of three with one kind of separator throughout, or lakhs and crores, or plain digits. Groups are
# counted, so that a list of digits takes linear time.
_DIGITS = (
    r"(?:[1-9][0-9]{0,2}(?P<sep>[, '_])[0-9]{3}(?:(?P=sep)[0-9]{3}){0,11}(?![0-9]|,[0-9])"
    r"|[1-9][0-9]?(?:,[0-9]{2}){1,11},[0-9]{3}(?![0-9]|,[0-9])"
    r"|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
)
_NUMBER = re.compile(
    rf"(?:(?P<outer>[-+])?{_CURRENCY} ?(?P<inner>[-+])?"
    r"|(?P<bare>[-+])?(?<![0-9A-Z])(?<!\b[a-z])(?<![A-Za-z]\^)(?<![0-9]\.))"
    rf"(?P<digits>{_DIGITS})(?P<exponent>[eE][-+]?[0-9]{{1,2}}(?![0-9A-Za-z]))?"
)
_REFERENCE = re.compile(r"\b(?:step|equation|eq\.|footnote|figure)[ \-(#]{0,2}$", re.IGNORECASE)
_LIST_LABEL = re.compile(r"^[ #*]*([0-9]{1,2})[.)](?=\**(?:\s|$))", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Number:
    """A number in a text from `start`, sign and currency included, to before `end`.

    `text` is ASCII digits with an optional minus and decimal point; separators, currency and plus are removed.
    """

    start: int
    end: int
    text: str

    @property
    def value(self) -> Decimal:
        """Exact decimal value."""
        return Decimal(self.text)


def normalize(text: str) -> str:
    """Returns the text with one spelling of minus, space, apostrophe and digits, and without LaTeX markup.

    Fractions become 'a/b', mixed ones 'n a/b' (`3\\frac{1}{2}`, `3\\tfrac12`, and the characters for them).
    """
    text = _VULGAR.sub(_spell_vulgar, text).translate(_CHARACTERS)
    for pattern, replacement in _BEFORE:
        text = re.sub(pattern, replacement, text)  # type: ignore[call-overload]
    for _ in range(_NESTED):
        before, text = text, _FRACTION.sub(_spell_fraction, _WRAPPED.sub(r"\1", text))
        if text == before:
            break
    for pattern, replacement in _AFTER:
        text = re.sub(pattern, replacement, text)
    return text


def _spell_vulgar(match: re.Match) -> str:
    whole = f"{match[1].rstrip()} " if match[1] else ""
    return whole + unicodedata.normalize("NFKC", match[2])


def _spell_fraction(match: re.Match) -> str:
    whole = f"{match[1].rstrip()} " if match[1] else ""
    parts = [match[2] or match[3] or "", match[4] or match[5] or ""]
    return whole + "/".join(part.strip() if _PLAIN.fullmatch(part) else f"({part})" for part in parts)


def canonical(value: Decimal) -> str:
    """Returns plain digits: no exponent, no trailing zeros, no negative zero."""
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def find_numbers(text: str) -> list[Number]:
    """Finds the numbers of a text that went through `normalize`, in order.

    A minus is a sign only where no operand stands before it: '10-5' holds 10 and 5. Thousands may be separated by
    commas, spaces, apostrophes or underscores in groups of three: '1 234' is one number, '7 8' two. A final full stop
    or comma is not part of a number. Numbers that name something are left out: 'step 2', 'Equation (3)', the labels of
    a numbered list, and digits inside a name such as 'H2O'.
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


def match_braces(text: str) -> dict[int, int]:
    """Where each brace closes, by where it opens; one that stays open is left out, and so are `\\{` and `\\}`."""
    closers, opened = {}, []
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closers[opened.pop()] = brace.start()
    return closers


def parse_number(text: str) -> Decimal | None:
    """Returns the value of a text that is one number and nothing else, or None.

    Currency, thousands separators, a plus, a final full stop and surrounding space are allowed.
    """
    text = normalize(text).strip()
    numbers = find_numbers(text)
    if len(numbers) != 1 or text[: numbers[0].start] or text[numbers[0].end :] not in ("", "."):
        return None
    return numbers[0].value


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
    end = at
    while end and text[end - 1] == " ":
        end -= 1
    last = text[end - 1] if end else "\n"
    return last in ")]}%" or (last.isalnum() if end == at else last.isdigit())
