"""Where texts part: both arms' tokens side by side, coloured by how near they were to a flip."""

import itertools
import re
from collections.abc import Mapping, Sequence

from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.record_parts import Comparison, known
from jaxkv.experiments.report_parts import Run
from jaxkv.reporting.document import Example, Examples, Side, Token
from jaxkv.reporting.format import format_number

MOST = 10
BEFORE, AFTER = 28, 16  # tokens shown around the place where texts part
CHARACTERS = 90  # the same of a text whose tokens' pieces are not known
LONGEST = 120  # characters of one token
# Controls, and marks that turn the direction of what follows: they would change the page, or show nothing.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]")
ROOMY = 10.0  # times the largest difference of a logit; a flip is possible below twice
KEY = (
    Token("far", "far"),
    Token(f"margin below {ROOMY:g} times the largest logit difference", "near"),
    Token("below twice: a flip is possible", "flip"),
    Token("exact tie", "flip tie"),
    Token("here they part", "parts"),
)


def show_examples(runs: Sequence[Run], names: Mapping[str, str]) -> Examples | None:
    """At most ten texts that part, of all runs (by directory in `names`) in turn; None if none does."""
    once = {run.run["fingerprint"]: run for run in runs}.values()
    found = [[(run, sample) for sample in _find_parted(run)] for run in once]
    turns = (one for turn in itertools.zip_longest(*found) for one in turn if one is not None)
    chosen = list(itertools.islice(turns, MOST))
    items = [_show(names[run.name], sample, run.pieces) for run, sample in chosen]
    known_pieces = any(run.pieces for run, _ in chosen)
    return Examples(("with the cache", "without the cache"), items, KEY if known_pieces else ()) if items else None


def _find_parted(run: Run) -> list[DivergenceRecord]:
    return [sample for sample in run.of(DivergenceRecord) if sample.free_running and sample.free_running.diverged]


def count_parted(runs: Sequence[Run]) -> int:
    """Texts that part, in all runs."""
    return sum(len(_find_parted(run)) for run in runs)


def _show(name: str, sample: DivergenceRecord, pieces: Mapping[int, str]) -> Example:
    at = known(known(sample.free_running).first_diverged)
    title, note = f"{name}, problem {sample.problem}, token {at + 1}", _describe_step(sample, at)
    if not pieces:
        cached, uncached = sample.arms.cached.text, sample.arms.uncached.text
        return Example(title, note, (_show_text(cached, uncached), _show_text(uncached, cached)))
    along, other = sample.arms.cached.tokens, sample.arms.uncached.tokens
    compared = sample.teacher_forced, pieces
    return Example(
        title, note, (_show_tokens(along, at, len(along), *compared), _show_tokens(other, at, at, *compared))
    )


def _describe_step(sample: DivergenceRecord, at: int) -> str:
    """The margin beside the perturbation where texts part."""
    compared = sample.teacher_forced
    if compared is None or at >= len(compared.margin):
        return "One text ends there."
    margin, moved, sampler = compared.margin[at], compared.max_abs[at], sample.sampling.sampler
    if margin == 0 and sampler == "greedy":
        return "An exact tie of the two best tokens without the cache; the lowest id wins it."
    times = f": {format_number(margin / moved, 3)} times" if moved else ""
    said = f"Margin of the two best tokens {format_number(margin, 3)}, largest logit difference "
    said += f"{format_number(moved, 3)}{times}."
    if sampler == "greedy":
        return said
    return f"{said} Drawn by {sampler}: the noise, alike in both arms, decides beside the margin."


def _judge(margin: float, moved: float) -> str:
    if margin == 0:
        return "flip tie"
    return "flip" if moved and margin <= 2 * moved else "near" if moved and margin < ROOMY * moved else "far"


def _show_tokens(
    tokens: Sequence[int], at: int, last: int, compared: Comparison | None, pieces: Mapping[int, str]
) -> Side:
    """Tokens around a place; what was compared is of those up to `last`."""
    begin = max(0, at - BEFORE)
    shown = [Token("… ")] if begin else []
    for step, token in enumerate(tokens[begin : at + AFTER], start=begin):
        text = pieces.get(token) or f"⟨{token}⟩"
        kind, said = "after", f"token {step + 1}, id {token}"
        if compared is not None and step < len(compared.margin) and step <= last:
            margin, moved = compared.margin[step], compared.max_abs[step]
            kind = _judge(margin, moved)
            said += f": margin {format_number(margin, 3)}, largest logit difference {format_number(moved, 3)}"
            said += f", KL {format_number(compared.kl[step])} nats"
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
        shown.append(Token(_make_seen(text), f"{kind} parts" if step == at else kind, said))
    if at + AFTER < len(tokens):
        shown.append(Token(" …"))
    elif at >= len(tokens):
        shown.append(Token("⟨end⟩", "parts", "this text ends here"))
    return shown


def _make_seen(text: str) -> str:
    """A text with a sign for each end of a line and each character that is not seen."""
    return UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text).replace("\n", "↵\n")


def _show_text(text: str, other: str) -> Side:
    """A decoded text around the first character that the other has not."""
    pairs = enumerate(itertools.zip_longest(text, other))
    at = next((place for place, (a, b) in pairs if a != b), len(text))
    begin = max(0, at - CHARACTERS)
    before, here, after = map(_make_seen, (text[begin:at], text[at : at + 1], text[at + 1 : at + CHARACTERS]))
    parts = [Token(("… " if begin else "") + before), Token(here or "⟨end⟩", "parts"), Token(after)]
    if len(text) == len(other) == at:
        return [Token(parts[0].text), Token("⟨the same text: tokens part later or in special ones⟩", "after")]
    return parts
