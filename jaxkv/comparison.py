"""What came of one prompt run in two ways: the sentence, the place where the texts part, and how to show it.

Imports neither jax nor flax: records of `jaxkv compare --json` are read back by `msgspec.convert(line, Comparison)`.
"""

import dataclasses
import fractions
import html
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from rich.cells import cell_len, set_cell_size

from jaxkv.errors import UserError, nearest
from jaxkv.experiments.divergence.cause import CANNOT_TELL, EQUAL, FAULT, ROUNDING
from jaxkv.experiments.record_parts import Comparison as StepColumns

if TYPE_CHECKING:
    import pandas

WIDTH, BEFORE = 80, 28  # columns of a terminal, and those for what the texts share before they part

Status = Literal["equal", "rounding", "fault", "cannot tell", "changed", "invalid"]


class Side(msgspec.Struct, frozen=True):
    """One way of running the prompt: what it is called, the ids that it chose, and their text."""

    name: str
    tokens: list[int]
    text: str


class Candidate(msgspec.Struct, frozen=True):
    """One of the two tokens that are chosen; its logit and probability (at temperature 1) on each side."""

    token: int
    text: str
    logits: tuple[float, float]
    probabilities: tuple[float, float]


class Parting(msgspec.Struct, frozen=True):
    """The first step at which the two sides choose another token, after the same tokens."""

    step: int  # from 0, of the new tokens
    candidates: tuple[Candidate, Candidate]  # what the first side chose, and what the second
    margin: float  # by how much the first side prefers its choice, in logits, the sampler's noise counted
    perturbation: float  # by how much this gap is another on the second side
    unit: float | None  # spacing of the dtype's numbers at the top logit; None where the sides have other dtypes
    tie: bool  # whether the two are exactly equal on a side: then the lowest id wins
    begin: int  # characters of both texts before it
    noise: float = 0.0  # how much of the gap is the sampler's noise, which both sides share; 0 if greedy
    cut: bool = False  # whether top_k or top_p decides: it leaves a token out on one side that would have won there


class Wider(msgspec.Struct, frozen=True):
    """Both arms in fp32 with the same weights along the same tokens, where the texts part or margins are narrowest.

    The margin is, in logits, that of the two tokens of the parting (negative where fp32 prefers the second side's), or
    of the top two.
    """

    choices: tuple[str, str]  # what the arm with the cache chooses, and the other
    margin: float
    perturbation: float  # by how much this gap is another in the other arm


class Checks(msgspec.Struct, frozen=True):
    """What rules out other explanations of a difference between the arms."""

    aligned: int | None  # steps of which every bit is the same in the aligned arms; None if they differ or did not run
    aligned_fault: str | None  # where they differ
    wider: Wider | None  # what fp32 says; None in fp32 itself
    falls: bool | None  # whether the difference falls from 16 bits to fp32 as the dtypes' units do
    distance: str | None  # of both arms to an fp32 or a float64 run, in words; None if neither ran or fits into memory


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt run in two ways.

    Attributes:
      model: name of the model.
      setting: precision and sampler in words.
      prompt: as it was given.
      sides: the way asked for, and what it is compared with.
      status: 'equal' bit for bit, 'rounding', 'fault' or 'cannot tell' between cache and no cache; 'changed' where the
        sides are not meant to be equal; 'invalid' where a number was not finite.
      invalid: where.
      columns: per step along the first side's tokens; None if invalid.
      first_divergence: where the texts part; None if they do not.
      checks: None where the sides are not meant to be equal.
      seconds: wall time by phase.
    """

    model: str
    setting: str
    prompt: str
    sides: tuple[Side, Side]
    status: Status
    invalid: str | None = None
    columns: StepColumns | None = None
    first_divergence: Parting | None = None
    checks: Checks | None = None
    seconds: dict[str, float] = {}

    @property
    def text(self) -> str:
        """The first side's text."""
        return self.sides[0].text

    @property
    def steps(self) -> "pandas.DataFrame":
        """A row for each step along the first side's tokens: token id, and the columns of a record's comparison."""
        import pandas

        if self.columns is None:
            raise UserError(f"{self.invalid}: an invalid sample has no steps to compare; use a wider precision")
        columns = {name: value for name, value in msgspec.to_builtins(self.columns).items() if value}
        return pandas.DataFrame({"token": self.sides[0].tokens, **columns}).rename_axis("step")

    @property
    def sentence(self) -> str:
        """What a person can repeat."""
        first, second = (side.name for side in self.sides)
        model, (precision, _, sampler) = _flat(self.model), self.setting.partition(" ")
        what = f"{model} {sampler}".rstrip() if first == f"in {precision}" else f"{model} in {self.setting}"
        count = len(self.sides[0].tokens)
        if self.status == "invalid":
            return f"INVALID: {what} meets a number that is not finite ({self.invalid}); the texts say nothing."
        if (parting := self.first_divergence) is not None:
            a, b = (show(one.text) for one in parting.candidates)
            said = f"{what} writes {a} {first} and {b} {second} at token {parting.step + 1} of {count}"
        elif self.status == EQUAL:
            return f"{what} writes the same {count} tokens {first} and {second}, and every logit has the same bits."
        else:
            equal = self.columns is not None and all(self.columns.bit_equal)
            logits = "with the same logits" if equal else "though not the same logits"
            said = f"{what} writes the same {count} tokens {first} and {second}, {logits}"
        return f"{said}: {self._explain()}."

    def _explain(self) -> str:
        parting = self.first_divergence
        if self.status == FAULT:
            aligned = self.checks is not None and self.checks.aligned_fault is not None
            return f"{'arms that round alike differ too, and ' * aligned}this is a FAULT, no rounding"
        endings = {ROUNDING: ", and it is rounding", CANNOT_TELL: "; whether it is rounding cannot be told"}
        sizes = "no difference is large enough to change a token"
        if parting is not None:
            noise = ", noise counted" if parting.noise else ""
            moved, apart = _size(parting.perturbation), _size(parting.margin)
            sizes = f"a difference of {moved} decides between two tokens {apart} apart{noise}"
            if parting.cut:
                sizes = "the sampler leaves one of the two tokens out on one side"
            elif parting.tie:
                sizes = f"the two tokens are exactly tied {self.sides[int(parting.margin != 0)].name}"
        return sizes + endings.get(self.status, "")

    def lines(self, verbose: bool = False) -> Iterator[str]:
        """The comparison in lines of at most 80 columns after the sentence; with `verbose` whole texts and more."""
        yield from (self.sentence, "")
        names, parting = [side.name for side in self.sides], self.first_divergence
        wide, begin = max(map(len, names)), parting.begin if parting else 0
        for side in self.sides if parting else self.sides[:1]:
            shared = _flat(side.text[:begin])
            before = shared if cell_len(shared) <= BEFORE else f"...{_crop(shared[::-1], BEFORE)[::-1]}"
            yield _fit(f"{side.name:{wide}}  {before}{'|' * bool(before)}{_flat(side.text[begin:])}")
        if parting is not None:
            if len({side.text for side in self.sides}) == 1:
                yield "the texts are the same: the tokens differ in how they are cut, or after its end"
            yield ""
            yield from _describe_parting(parting, names)
        if self.checks is not None:
            yield from _describe_checks(self.checks, parting)
        if verbose:
            yield from self._more()

    def _more(self) -> Iterator[str]:
        for side in self.sides:
            yield from ("", f"{side.name}:", "\n".join(map(_flat, side.text.split("\n"))))
        yield ""
        if (columns := self.columns) is not None:
            count = len(columns.flip)
            yield (
                f"along the first text: {sum(columns.flip)} of {count} top tokens differ, {sum(columns.bit_equal)} "
                f"steps are equal in every bit, mean KL {sum(columns.kl) / max(count, 1):.2g} nats"
            )
            step = min(range(count), key=columns.margin.__getitem__, default=0)
            yield f"the smallest margin is {columns.margin[step]:.3g}, at token {step + 1}"
        yield "; ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())

    def _repr_html_(self) -> str:
        """For a notebook: the sentence, and both texts with what differs marked."""
        rows = []
        for side in self.sides:
            begin = len(side.text) if self.first_divergence is None else self.first_divergence.begin
            same, other = html.escape(side.text[:begin]), html.escape(side.text[begin:])
            text = f"{same}<mark>{other}</mark>" if other else same
            left = "text-align:left;vertical-align:top"
            rows.append(
                f'<tr><th style="{left}">{html.escape(side.name)}</th>'
                f'<td style="{left};white-space:pre-wrap">{text}</td></tr>'
            )
        return f"<p><b>{html.escape(self.sentence)}</b></p><table>{''.join(rows)}</table>"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> str:
        """One line of strict JSON, with the sentence."""
        return msgspec.json.encode(msgspec.to_builtins(self) | {"sentence": self.sentence}).decode()


def show(text: str) -> str:
    """A token's text in quotes, control characters escaped; of a long one, as of many spaces, the beginning."""
    return f"'{_fit(_flat(text), 24)}'"


def _flat(text: str) -> str:
    """On one line: line breaks and what a terminal would act on, escaped."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _crop(line: str, width: int) -> str:
    """As much of a line as fits into columns of a terminal; letters of Chinese take two."""
    return set_cell_size(line, min(width, cell_len(line))).rstrip(" ") if cell_len(line) > width else line


def _fit(line: str, width: int = WIDTH) -> str:
    return line if cell_len(line) <= width else f"{_crop(line, width - 3)}..."


def _size(value: float) -> str:
    return f"{abs(value):.2g}"


def _describe_parting(parting: Parting, names: list[str]) -> Iterator[str]:
    tokens = [show(one.text) for one in parting.candidates]
    wide, cell = max(map(len, names)), max(20, *map(cell_len, tokens))
    heads = (" " * (cell - cell_len(token)) + token for token in tokens)
    yield f"{'logit (probability)':{max(wide, 19)}}  {'  '.join(heads)}"
    for side, name in enumerate(names):
        cells = [f"{one.logits[side]:.5g} ({one.probabilities[side]:.3g})" for one in parting.candidates]
        yield f"{name:{max(wide, 19)}}  " + "  ".join(f"{text:>{cell}}" for text in cells)
    a, b = parting.margin, 0.0 - (parting.margin + parting.perturbation)  # never -0
    unit = "" if parting.unit is None else f"; a unit of the dtype is {_size(parting.unit)}"
    yield f"margins {a:.3g} and {b:.3g}, perturbation {_size(parting.perturbation)}{unit}"
    if parting.tie:
        yield f"an exact tie {names[int(parting.margin != 0)]}, in which the lower id wins"
    if parting.noise:
        yield f"of the margins {parting.noise:.3g} is the sampler's noise, which both sides share"
    if parting.cut:
        yield "top_k or top_p leaves one of the two out on one side, where it would have won"


def _describe_checks(checks: Checks, parting: Parting | None) -> Iterator[str]:
    if checks.aligned_fault is not None:
        yield f"FAULT, in arms that round alike: {checks.aligned_fault}"
    elif checks.aligned is not None:
        yield f"aligned arms: every bit equal at {checks.aligned} of {checks.aligned} steps, the cache on"
    if (wider := checks.wider) is not None:
        verb, choices = "prefer" if parting is None else "choose", list(map(show, wider.choices))
        same = f"both arms {verb} {choices[0]}"
        if len(set(wider.choices)) > 1:
            same = f"the arms {verb} {' and '.join(choices)}"
        where = "there" if parting is not None else "at the narrowest margin"
        falls = " (does NOT fall as rounding does)" if checks.falls is False else ""
        yield f"fp32 {where}: {same}, margin {_size(wider.margin)}, perturbation {_size(wider.perturbation)}{falls}"
    if checks.distance is not None:
        yield f"distance {checks.distance}"


MEASURES = ("flips", "kl", "diverged", "bits")


@dataclasses.dataclass(frozen=True)
class Condition:
    """What --fail-if asks: a measure over all prompts, and the bound that it must not pass.

    `flips` and `bits` are shares of steps (other top token; any other bit), `diverged` of texts, `kl` the mean in nats.
    """

    measure: str
    least: bool  # >= instead of >
    bound: fractions.Fraction  # as it was written: 7 of 1000 tokens are not more than 0.7 %
    text: str

    def failed(self, found: list[Comparison]) -> float | None:
        """The measure where it passes the bound, else None. Prompts whose numbers broke off do not count."""
        counted: list[float] = []
        for one in found:
            if (columns := one.columns) is not None:
                values: dict[str, list[Any]] = {
                    "flips": columns.flip, "kl": columns.kl, "diverged": [one.first_divergence is not None],
                    "bits": [not equal for equal in columns.bit_equal],
                }  # fmt: skip
                counted += values[self.measure]
        if not counted:
            return None
        value = sum(counted) / len(counted)
        exact: float | fractions.Fraction = value
        bound: float | fractions.Fraction = float(self.bound)
        if self.measure != "kl":  # a fraction of whole numbers, and the bound nearest to it may be of other bits
            exact, bound = fractions.Fraction(int(sum(counted)), len(counted)), self.bound
        return value if exact > bound or (self.least and exact == bound) else None


def read_condition(text: str) -> Condition:
    """Reads --fail-if. Raises UserError on what is not understood."""
    match = re.fullmatch(r"\s*([a-z_]+)\s*(>=?)\s*([0-9.]+(?:[eE][+-]?[0-9]{1,2})?)\s*(%?)\s*", text)
    try:
        bound = fractions.Fraction(match[3]) / (100 if match[4] else 1) if match else None
    except ValueError:
        bound = None
    if match is None or bound is None:
        raise UserError(f"--fail-if={text} is not understood; write MEASURE>BOUND, e.g. 'flips>0.1%' or 'kl>1e-3'")
    if match[1] not in MEASURES:
        raise UserError(
            f"--fail-if={text}: unknown measure{nearest(match[1], list(MEASURES))}; known: {', '.join(MEASURES)}"
        )
    if match[4] and match[1] == "kl":
        raise UserError(f"--fail-if={text}: KL is in nats and has no %; drop it")
    least = match[2] == ">="
    if match[1] != "kl" and (bound > 1 or (bound == 1 and not least)):
        raise UserError(f"--fail-if={text}: {match[1]} is a share, at most 1, so that this never holds; write e.g. 5%")
    return Condition(match[1], least, bound, text.strip())
