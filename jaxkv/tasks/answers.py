"""Finds the value that a worked answer settles on, however it says so."""

import bisect
import dataclasses
import re
from collections.abc import Callable, Iterable
from decimal import Decimal

from jaxkv.tasks.numerals import find_numbers, match_braces, normalize

_FILLER = (
    r"[\s*_`=:~≈$\"'“”({\[]*(?:(?:(?:the|final|answer|is|are|be|would|should|therefore|thus|so|just|only|exactly|about"
    r"|approximately|a|total|of|equals?|to)\b|[A-Za-z] ?=)[\s*_`=:~≈,\"'“”({\[]*){0,8}"
)
_MARKER = re.compile(rf"####{_FILLER}", re.IGNORECASE)
_CUT_BOX = re.compile(r"\\(?:boxed|fbox) *\{[^{}\n]*\Z")
_BOXED = re.compile(r"\\(?:boxed|fbox) *\{")
_STATED = re.compile(
    rf"\banswer\b[^.\n:=]{{0,60}}?\b(?:is|are|equals|would be|should be|will be|comes to)\b{_FILLER}"
    rf"|\bfinal answer\W{{0,4}}[:=]{_FILLER}",
    re.IGNORECASE,
)
_HEADED = re.compile(rf"\banswer\W{{0,4}}[:=]{_FILLER}", re.IGNORECASE)
_CLAUSE_END = re.compile(
    r"[\n;(\[\]}]|[.!?](?:\s|$)|,\s|\b(?:because|since|which|so|but|not|after|from|if|where|with)\b", re.IGNORECASE
)
_UNIT_ALONE = re.compile(r"[%*_`)]*(?: [A-Za-z]++){0,4}[.!*_` ]*(?:\n|$)")
_ASIDE = re.compile(r"(?<=[0-9A-Za-z%*.]) *\(([^()\n]*)\)")
_LETTER = re.compile("[A-Za-z]")
_SCALE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}
_WORD = re.compile(r" *([A-Za-z]{1,9})\b")
_SLASH = re.compile(r" ?/ ?")
_TIMES = re.compile(r" *([*/x×÷]) *")
_PLUS = re.compile(r" *([-+]) *")
_POWER = re.compile(r" ?\^ ?(-?[0-9]{1,2})(?![0-9])")
_JOINT = re.compile(r"[) ]{0,3}[-+*/x×÷:^][( ]{0,3}")
_SEVERAL = re.compile(r" to |,|,? (?:dollars?|pounds?|hours?|minutes?|days?|weeks?|years?|feet) and ", re.IGNORECASE)
_UNFINISHED = re.compile(r"[ )]*=")
_LIST = re.compile(r"[\s$]*(?:[,;&]|and\b|or\b|to\b)[\s$]*", re.IGNORECASE)
_EQUATIONS = re.compile(r"(?:[,;&]|\band\b) *[A-Za-z]+ *=", re.IGNORECASE)
_NO_NUMBER = re.compile(
    r"\\sqrt|\\pi\b|[0-9]!|√|π|\b[A-Za-z] *[-+*] *[0-9]|[0-9] *[-+*] *[A-Za-z]\b"  # roots, and sums with unknowns
)
_MOST = 64  # numbers and parentheses of one expression


class _NotOneNumber(Exception):
    """What is settled on is a range, a list, a time of day, a measure in two units or beyond all use."""


@dataclasses.dataclass(frozen=True)
class _Settled:
    """What a text says where it gives its answer: a value, None if it is not one number, and where that ends."""

    at: int
    value: Decimal | None
    end: int


def extract_numeric(text: str) -> Decimal | None:
    """Reads the value the text settles on.

    In this order: the first `####` followed by a number, in whatever spelling, or the last `\\boxed{}`, whichever is
    later; the last 'the answer is N' or 'final answer: N'; the last line 'Answer: N' with nothing but a unit after the
    number; the last number outside an aside in parentheses.

    Of 'a op b = c' it takes c. Fractions ('3/4', '2 1/2'), '2 million' and arithmetic that is left to do ('9 * 2') are
    evaluated; numbers written as words are not read. A text that settles on a range ('20-30'), on a time of day that
    is no full hour ('3:30'), on '3 hours and 30 minutes', on a division by zero, on arithmetic cut before its result
    or, in a box, on several numbers has no value, so None. Digits at the end of a text in a box that never closes are
    not read: more of them may have been to come.
    """
    answer = _Answer(normalize(text))
    marked = _first(answer.read_leading, _MARKER.finditer(answer.text))
    boxed = _first(answer.read_box, _backwards(_BOXED, answer.text))
    found = (
        max((one for one in (marked, boxed) if one), key=lambda one: one.at, default=None)
        or _first(answer.read_leading, _backwards(_STATED, answer.text))
        or _first(answer.read_line, _backwards(_HEADED, answer.text))
        or answer.read_last()
    )
    return found.value if found else None


def _first(read: Callable[[int], _Settled | None], matches: Iterable[re.Match]) -> _Settled | None:
    return next((found for match in matches if (found := read(match.end()))), None)


def _backwards(pattern: re.Pattern, text: str) -> Iterable[re.Match]:
    return reversed(list(pattern.finditer(text)))


class _Answer:
    """A normalized text with its numbers, each known by its place among them."""

    def __init__(self, text: str):
        self.text = text
        self.numbers = find_numbers(text)
        if self.numbers and self.numbers[-1].end == len(text) and _CUT_BOX.search(text):
            del self.numbers[-1]  # it may be the first digits of a longer one
        self.places = {number.start: place for place, number in enumerate(self.numbers)}
        self._closers = match_braces(text)

    def read_leading(self, at: int) -> _Settled | None:
        """The expression that starts at an offset, in its clause; None if none does."""
        place = self._find_near(at)
        if place is None:
            return None
        cut = _CLAUSE_END.search(self.text, self.numbers[place].end)
        place = self._skip_equations(place, cut.start() if cut else len(self.text))
        return self._evaluate(place, at, self._end_line(at), _SEVERAL)

    def read_box(self, at: int) -> _Settled | None:
        """What a box holds that opens before an offset; None without a number."""
        end = self._closers.get(at - 1, self._end_line(at))
        place = bisect.bisect_left(self.numbers, at, key=lambda number: number.start)
        if place == len(self.numbers) or self.numbers[place].end > end:
            return None
        if _EQUATIONS.search(self.text, self.numbers[place].end, end) or _NO_NUMBER.search(self.text, at, end):
            return _Settled(at, None, end)
        return self._evaluate(self._skip_equations(place, end), at, end, _LIST)

    def read_line(self, at: int) -> _Settled | None:
        """As `read_leading`, only where the rest of the line is an expression and at most four words."""
        place = self._find_near(at)
        found = None if place is None else self._evaluate(place, at, self._end_line(at), _SEVERAL)
        alone = found and found.value is not None and _UNIT_ALONE.match(self.text, found.end)
        return found if alone else None

    def read_last(self) -> _Settled | None:
        """The expression that ends with the last number outside asides; None without a number."""
        if not self.numbers:
            return None
        asides = self._find_asides()
        last = next((p for p in reversed(range(len(self.numbers))) if p not in asides), len(self.numbers) - 1)
        place, start, end = last, self.numbers[last].start, self.numbers[last].end
        if last and _SEVERAL.fullmatch(self.text, *self._gap(last)):
            return _Settled(start, None, end)
        while place > max(0, last - _MOST) and _JOINT.fullmatch(self.text, *self._gap(place)):
            place -= 1
        if place and self.is_mixed(place - 1):
            place -= 1
        found = self._evaluate(place, self.numbers[place].start, self._end_line(end), _SEVERAL)
        if found.end < end:
            return self._evaluate(last, start, self._end_line(end), _SEVERAL)
        unfinished = place < last and _UNFINISHED.match(self.text, found.end)
        return _Settled(found.at, None, found.end) if unfinished else found

    def is_mixed(self, place: int) -> bool:
        """Whether a number is the whole of a mixed fraction, 'n a/b' with a below b."""
        if place + 2 >= len(self.numbers):
            return False
        whole, above, below = self.numbers[place : place + 3]
        spelled = self.text[whole.end : above.start] == " " and _SLASH.fullmatch(self.text, *self._gap(place + 2))
        return bool(spelled) and "." not in whole.text and 0 < above.value < below.value

    def _evaluate(self, place: int, at: int, end: int, joints: re.Pattern) -> _Settled:
        """Evaluates what starts with a number, or parentheses that touch it and begin at most two before `at`.

        `at` is where the text gives its answer, `end` that of what may belong to it, and several numbers have `joints`
        between them.
        """
        start = opening = self.numbers[place].start
        while opening > max(0, at - 2) and self.text[opening - 1] == "(":
            opening -= 1
        expression = _Expression(self, end)
        try:
            value, after = expression.add(opening) or expression.add(start) or (None, start)
        except (_NotOneNumber, ArithmeticError):
            return _Settled(at, None, end)
        joint = joints.match(self.text, after, end)
        several = joint is not None and joint.end() in self.places
        return _Settled(at, None if several else value, after)

    def _find_near(self, at: int) -> int | None:
        """The number that starts at an offset, or up to two before it: currency and the like."""
        return next((self.places[s] for s in range(at, max(at - 3, -1), -1) if s in self.places), None)

    def _skip_equations(self, place: int, end: int) -> int:
        """The number behind the last equals sign before `end`, if there is one."""
        equals = self.text.rfind("=", self.numbers[place].end, end)
        if equals < 0:
            return place
        behind = bisect.bisect_left(self.numbers, equals, key=lambda number: number.start)
        return behind if behind < len(self.numbers) and self.numbers[behind].end <= end else place

    def _gap(self, place: int) -> tuple[int, int]:
        """Where the text between a number and the one before it begins and ends."""
        return self.numbers[place - 1].end, self.numbers[place].start

    def _end_line(self, at: int) -> int:
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end

    def _find_asides(self) -> set[int]:
        """Numbers in parentheses with words, behind another number of the same line."""
        found: set[int] = set()
        for aside in _ASIDE.finditer(self.text):
            line = self.text.rfind("\n", 0, aside.start()) + 1
            bounds = (line, aside.start(), aside.end())
            first, inner, after = (bisect.bisect_left(self.numbers, b, key=lambda number: number.start) for b in bounds)
            if first < inner and _LETTER.search(aside[1]):
                found.update(range(inner, after))
        return found


class _Expression:
    """Arithmetic with numbers, parentheses and the usual precedence, up to an offset of the text.

    Methods take where to begin and return a value and where it ends, or None if no number is there.
    """

    def __init__(self, answer: _Answer, end: int):
        self._answer, self._text, self._end = answer, answer.text, end
        self._left = _MOST

    def add(self, at: int) -> tuple[Decimal, int] | None:
        """Terms with plus and minus between them. Raises _NotOneNumber for 'a - b' with a below b: a range."""
        found = self._multiply(at)
        terms = 1
        while found and (sign := _PLUS.match(self._text, found[1], self._end)):
            term = self._multiply(sign.end())
            if term is None:
                break
            terms += 1
            if sign[1] == "-" and terms == 2 and 0 <= found[0] < term[0]:
                raise _NotOneNumber
            found = (found[0] + term[0] if sign[1] == "+" else found[0] - term[0]), term[1]
        return found

    def _multiply(self, at: int) -> tuple[Decimal, int] | None:
        found = self._raise(at)
        while found and (sign := _TIMES.match(self._text, found[1], self._end)):
            factor = self._raise(sign.end())
            if factor is None:
                break
            found = (found[0] / factor[0] if sign[1] in "/÷" else found[0] * factor[0]), factor[1]
        return found

    def _raise(self, at: int) -> tuple[Decimal, int] | None:
        found = self._read(at)
        power = _POWER.match(self._text, found[1], self._end) if found else None
        if found is None or power is None:
            return found
        if abs(found[0].adjusted() * int(power[1])) >= 100:
            raise _NotOneNumber  # no answer, and as plain digits it might fill the disk
        return found[0] ** int(power[1]), power.end()

    def _read(self, at: int) -> tuple[Decimal, int] | None:
        """A number with what belongs to it, or an expression in parentheses."""
        self._left -= 1
        if self._left < 0:
            raise _NotOneNumber
        if self._text.startswith("(", at):
            inner = self.add(at + 1)
            return (inner[0], inner[1] + 1) if inner and self._text.startswith(")", inner[1]) else None
        place = self._answer.places.get(at)
        if place is None or self._answer.numbers[place].end > self._end:
            return None
        number = self._answer.numbers[place]
        value, at = number.value, number.end
        if self._answer.is_mixed(place):
            above, below = self._answer.numbers[place + 1 : place + 3]
            part = above.value / below.value
            value, at = (value - part if number.text.startswith("-") else value + part), below.end
        if self._text.startswith(":", at) and at + 1 in self._answer.places:
            minutes = self._answer.numbers[self._answer.places[at + 1]]
            if minutes.text != "00":
                raise _NotOneNumber
            at = minutes.end
        word = _WORD.match(self._text, at, self._end)
        if word and word[1].lower() in _SCALE and len(number.text) < 25:
            value, at = value.scaleb(_SCALE[word[1].lower()]), word.end()
        return value, at
