"""Perplexity of a text: its windows, and what is made of their negative log likelihoods. Needs no jax.

A window is `context` tokens that are given and up to `stride` tokens after them that are scored, each from all before
it in the window. Windows start every `stride` tokens of the text, so that all but its first `context` tokens are
scored, each once, with at least `context` tokens before it. If the tokenizer puts BOS first, every window starts with
it, as one of its `context` tokens.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxkv.errors import UserError


@dataclasses.dataclass(frozen=True)
class Window:
    """One window: its place from 0, token ids that are given, BOS included, and token ids that are scored.

    `bytes` are the UTF-8 bytes of the text that the scored tokens stand for, and `words` start in it; a word is a run
    of characters that are not white space.
    """

    index: int
    context: tuple[int, ...]
    scored: tuple[int, ...]
    bytes: int
    words: int


def plan_windows(
    text: str, ids: Sequence[int], ends: Sequence[int], context: int, stride: int, bos_id: int | None = None
) -> list[Window]:
    """Cuts a text into windows of `context` tokens that are given, BOS included, and up to `stride` that are scored.

    `ids` are the text's tokens without BOS, and `ends` says of each how many characters of the text it and all before
    it stand for. `bos_id` is put first in every window; None for none. Raises UserError on a context of no token of the
    text, a stride below 1, or a text that is no longer than the context.
    """
    given = context - (bos_id is not None)
    if given < 1 or stride < 1:
        raise UserError(
            f"windows of {context} tokens of context and {stride} scored ones cannot be cut; give a context of 2 or "
            "more and a stride of 1 or more"
        )
    if len(ids) <= given:
        raise UserError(
            f"the text has {len(ids)} tokens and a window starts with {given}; give a longer text or a shorter context"
        )
    first = () if bos_id is None else (bos_id,)
    starts = _count_word_starts(text)
    windows = []
    for index, begin in enumerate(range(0, len(ids) - given, stride)):
        start, end = begin + given, min(begin + given + stride, len(ids))
        left, right = ends[start - 1], ends[end - 1]
        given_ids, size = (*first, *ids[begin:start]), len(text[left:right].encode())
        windows.append(Window(index, given_ids, tuple(ids[start:end]), size, starts[right] - starts[left]))
    return windows


def _count_word_starts(text: str) -> list[int]:
    """For each offset, how many words start before it."""
    starts = {match.start() for match in re.finditer(r"\S+", text)}
    return list(itertools.accumulate((at in starts for at in range(len(text))), initial=0))


def aggregate(windows: Iterable[Mapping[str, Any]], arm: str) -> dict[str, float] | None:
    """Perplexities over windows: records with `tokens`, `bytes`, `words` and the `nats` of each arm, -log likelihoods.

    The figures are `tokens`, `bytes` and `words` scored, `nats` in all, `perplexity` a token, `word_perplexity` and
    `byte_perplexity`, which compare across tokenizers, and `bits_per_byte`. A figure of nothing is left out. None
    without a token.
    """
    kept = list(windows)
    tokens, size, words = (sum(window[name] for window in kept) for name in ("tokens", "bytes", "words"))
    if not tokens:
        return None
    nats = math.fsum(window["nats"][arm] for window in kept)
    found = {"tokens": tokens, "bytes": size, "words": words, "nats": nats, "perplexity": _exp(nats / tokens)}
    if words:
        found["word_perplexity"] = _exp(nats / words)
    if size:
        found |= {"byte_perplexity": _exp(nats / size), "bits_per_byte": nats / size / math.log(2)}
    return found


def _exp(value: float) -> float:
    """exp, infinite where it would overflow."""
    return math.exp(value) if value < 709 else math.inf
