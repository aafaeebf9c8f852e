"""The text of `--cache_error`: a law with its numbers, then options, `uniform:-1,1;side=k;layers=0-3`."""

import re
from typing import Any

from jaxkv.errors import UserError, nearest
from jaxkv.interventions.cache_errors import CHOICES, CUT, SCOPES, CacheError, Ranges

NUMBERS = {"uniform": "LOW,HIGH", "normal": "MEAN,STD", "points": "MEAN,STD", "truncate": "BITS", "round": "BITS"}
GRAMMAR = (
    "write LAW:NUMBERS[;option=value]...; laws: "
    + " ".join(f"{law}:{numbers}" for law, numbers in NUMBERS.items())
    + "; options: "
    + " ".join(f"{name}={'|'.join(values)}" for name, values in CHOICES.items())
    + " "
    + " ".join(f"{name}=RANGES" for name in SCOPES)
    + ", ranges such as 0-3,7 or 128-; quote the text for a shell, e.g. 'normal:0,0.25;side=k'"
)


def parse_cache_error(text: str) -> CacheError:
    """Reads a spec; `str` of the result reads back to an equal one.

    Raises UserError with the nearest name and the grammar, in one line.
    """
    try:
        error = _read(text)
        error.check()
    except UserError as fault:
        raise UserError(f"--cache_error={text}: {fault}. {GRAMMAR}") from None
    return error


def _read(text: str) -> CacheError:
    head, *rest = (word.strip() for word in text.split(";"))
    law, colon, numbers = (word.strip() for word in head.partition(":"))
    if law not in NUMBERS:
        raise UserError(f"unknown law '{law}'{nearest(law, list(NUMBERS))}")
    if not colon or not numbers:
        raise UserError(f"{law} needs {NUMBERS[law]} after a colon")
    fields: dict[str, Any] = _read_numbers(law, numbers)
    known = [*CHOICES, *SCOPES]
    for word in rest:
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in known or not equals:
            raise UserError(f"no option '{word}'{nearest(name, known)}; there are {', '.join(known)}")
        if name in fields:
            raise UserError(f"{name} is given twice")
        if name in SCOPES:
            fields[name] = _read_ranges(name, value)
        elif value in CHOICES[name]:
            fields[name] = value
        else:
            raise UserError(f"{name}={value} should be {' or '.join(CHOICES[name])}{nearest(value, [*CHOICES[name]])}")
    return CacheError(law, **fields)


def _read_numbers(law: str, text: str) -> dict[str, Any]:
    words = [word.strip() for word in text.split(",")]
    if law in CUT:
        if not re.fullmatch(r"\d{1,3}", text, re.ASCII):
            raise UserError(f"'{text}' in {law}:{text} should be a number of bits")
        return {"bits": int(text)}
    if len(words) != 2:
        raise UserError(f"{law}:{text} should have two numbers, {NUMBERS[law]}")
    try:
        return {"numbers": tuple(float(word) + 0.0 for word in words)}
    except ValueError:
        raise UserError(f"{law}:{text} should have two numbers, {NUMBERS[law]}") from None


def _read_ranges(name: str, text: str) -> Ranges | None:
    """Inclusive ranges in order, those that touch joined; None where they are everything."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(-)?\s*(\d{1,9})?\s*", word, re.ASCII)
        if not match or (match[3] and not match[2]):
            raise UserError(f"{name}={text} should be ranges such as 0-3,7 or 128-")
        low = int(match[1])
        high = low if not match[2] else None if match[3] is None else int(match[3])
        if high is not None and high < low:
            raise UserError(f"{name}={text} has a range that ends before it begins")
        found.append((low, high))
    joined: list[tuple[int, int | None]] = []
    for low, high in sorted(found, key=lambda pair: pair[0]):
        before = joined[-1][1] if joined else -2
        if before is None:
            break
        if low <= before + 1:
            joined[-1] = (joined[-1][0], None if high is None else max(before, high))
        else:
            joined.append((low, high))
    return None if joined == [(0, None)] else tuple(joined)
