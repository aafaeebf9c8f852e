"""What the records of several experiments have in common. A record's type is its schema; imports neither jax nor flax.

Types and bounds of single fields are in the annotations, and what fields say about each other is in `__post_init__`,
whose messages begin with the field at fault. Every float is finite. A field that may be UNSET is one that records of
older versions lack; it is not written again either.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from jaxkv.reporting.metrics import free_running

LARGEST = sys.float_info.max
Count = Annotated[int, Meta(ge=0)]
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Tokens = list[Count]
Range = tuple[int, int]  # positions [begin, end)
Sampler = Literal["greedy", "temperature", "top_k", "top_p"]
LabelChange = Literal["same", "answer_changed", "extraction_only"]
T = TypeVar("T")

LABEL_CHANGES = get_args(LabelChange)
CLEAN = "none"  # the change that is none
HEADLINES = ("numeric", "verified", "pass", "exact", "strict")
NO_AGREEMENT = "an invalid sample has no agreement to state; expected null"


def require(field: str, fits: bool, message: str) -> None:
    """Raises the ValueError of a field at fault unless it fits."""
    if not fits:
        raise ValueError(f"{field}: {message}")


def require_length(field: str, column: Sequence[Any], length: int) -> None:
    """Raises ValueError if a column has not as many entries as there are tokens, layers or bins."""
    require(field, len(column) == length, f"{len(column)} entries, expected {length}")


def require_most(field: str, count: int, most: int) -> None:
    """Raises ValueError if more is counted than there is."""
    require(field, count <= most, f"{count} is more than {most}")


def require_bins(field: str, bins: Sequence[Range], end: int) -> None:
    """Raises ValueError unless bins follow each other from 0 to `end`."""
    last = 0
    for index, (begin, stop) in enumerate(bins):
        require(f"{field}[{index}]", begin == last < stop, f"expected [{last}, end], got {[begin, stop]}")
        last = stop
    require(field, last == end, f"they end at {last}, the text at {end}")


def known(figure: T | None) -> T:
    """A figure that every valid sample has. Raises ValueError where there is none."""
    if figure is None:
        raise ValueError("a figure is asked of a sample that has none")
    return figure


def find_headline(scorers: Iterable[str]) -> str:
    """The scorer whose figure stands for a task: the first of HEADLINES that it has, else its first one."""
    names = list(scorers)
    return next((name for name in HEADLINES if name in names), names[0])


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a record."""


class Table(Part, frozen=True):
    """Columns of equal length."""

    def __post_init__(self) -> None:
        first, *others = self.__struct_fields__
        for name in others:
            if (column := getattr(self, name)) is not UNSET:
                require_length(name, column, len(getattr(self, first)))


class Arms(Part, Generic[T], frozen=True):
    """Of each arm."""

    cached: T
    uncached: T


ARMS = Arms.__struct_fields__


def require_steps(field: str, counts: Arms[int], steps: int) -> None:
    """Raises ValueError if more steps of an arm are counted than there are."""
    for arm in ARMS:
        require_most(f"{field}.{arm}", getattr(counts, arm), steps)


class Sides(Part, Generic[T], frozen=True):
    """Of keys and of values."""

    k: T
    v: T


class Rows(Part, frozen=True):
    """Shape of a batch: rows, slots of the prompt and of the cache, slots before this row's first token."""

    batch: Count
    prefill: Count
    slots: Count
    left_pad: Count


class Shapes(Rows, frozen=True):
    """Shape of a batch under both arms: how long the uncached programs are, and the tile of the aligned regime."""

    uncached: str
    tile: Count | None


class Sampling(Part, frozen=True):
    """How tokens were chosen, by noise of `seed` that both arms share."""

    sampler: Sampler
    temperature: Positive
    top_k: Count | None
    top_p: Finite | None
    seed: int


class Headroom(Part, frozen=True):
    """The largest finite activation of a sample, where it arose, and the maximum of its dtype."""

    max_abs: Amount
    layer: Count | None
    op: str
    limit: Positive


class Invalid(Part, frozen=True):
    """Where a number that is not finite arose first: in which run, value, place of the text and step of decoding."""

    arm: str
    layer: Count | None
    op: str
    position: int
    step: int | None
    value: Literal["inf", "nan"]


class Comparison(Table, frozen=True, kw_only=True):
    """Two arms' logits token by token, along the same tokens: those of the reference and of the other.

    Attributes:
      flip: whether the top tokens differ; `choice_flip` whether those chosen under the shared noise do.
      kl: KL(reference || other) in nats; `kl_reverse` the other way round, `js` the Jensen-Shannon divergence.
      max_abs: largest difference of a logit; `mean_abs` the mean one.
      margin: the reference's top logit minus its second; `margin_other` the other arm's own.
      shift: by how much the gap between the reference's top two is another in the other arm.
      unit: spacing of the dtype's numbers at the reference's top logit.
    """

    flip: list[bool]
    kl: list[Amount]
    kl_reverse: list[Amount]
    js: list[Amount]
    max_abs: list[Amount]
    mean_abs: list[Amount]
    margin: list[Amount]
    margin_other: list[Amount] | UnsetType = UNSET
    shift: list[Finite] | UnsetType = UNSET
    unit: list[Amount] | UnsetType = UNSET
    bit_equal: list[bool]
    choice_flip: list[bool] | UnsetType = UNSET

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, (flip, equal, most) in enumerate(zip(self.flip, self.bit_equal, self.max_abs, strict=True)):
            if most and equal:
                require(f"bit_equal[{index}]", False, "true beside a difference")
            if flip and not most:
                require(f"flip[{index}]", False, "true beside no difference")


class Distance(Table, frozen=True):
    """An arm's distance to a float64 run along the same tokens, token by token: whether the top tokens differ,
    KL(float64 || arm) in nats, and the root mean square and the largest of the logits' differences."""

    flip: list[bool]
    kl: list[Amount]
    rms: list[Amount]
    max_abs: list[Amount]


class FreeRunning(Part, frozen=True):
    """Two generations of one prompt, each fed its own tokens; fields as in jaxkv.reporting.metrics.free_running."""

    diverged: bool
    first_diverged: Count | None
    differing_after: Count
    compared_after: Count

    def __post_init__(self) -> None:
        first = self.first_diverged
        require("first_diverged", self.diverged != (first is None), f"{first} beside diverged {self.diverged}")
        require_most("differing_after", self.differing_after, self.compared_after)

    def check(self, uncached: Sequence[int], cached: Sequence[int]) -> None:
        """Raises ValueError where the arms' tokens say something else."""
        for name, value in free_running(uncached, cached).items():
            told = f"{getattr(self, name)} beside tokens that say {value}"
            require(f"free_running.{name}", getattr(self, name) == value, told)


class Score(Part, frozen=True):
    """An answer as a scorer read it; `value` only of a score in parts, of which `correct` means all."""

    answer: str | None
    correct: bool
    value: Finite | UnsetType = UNSET


class Generation(Part, frozen=True):
    """An arm's own run: all its ids, the text of the first turn, what ended it, and the text's scores by scorer."""

    tokens: Tokens
    text: str
    stop: Literal["eos", "length", "stop_string", "invalid"]
    scores: dict[str, Score]

    def __post_init__(self) -> None:
        require("scores", bool(self.scores), "none")


class LogitSums(Part, frozen=True):
    """A run's logits beside a reference's: sums over steps, KL in nats, and the largest difference."""

    kl: Amount
    flips: Count
    max_abs: Amount
    bit_equal: Count

    def check(self, field: str, steps: int) -> None:
        """Raises ValueError where more steps are counted than there are."""
        require_most(f"{field}.flips", self.flips, steps)
        require_most(f"{field}.bit_equal", self.bit_equal, steps)


class Heads(Part, frozen=True):
    """Query and K/V heads of the model."""

    query: Count
    kv: Count


class ErrorSpec(Part, frozen=True, tag_field="family", tag="error"):
    """An error put into the cache (jaxkv.interventions.cache_errors)."""

    law: str
    numbers: list[Finite]
    bits: Count | None
    mean: Finite
    std: Finite
    flip_share: Finite
    kind: str
    sign: str
    correlate: str
    draw: str
    side: str
    layers: list[tuple[int, int | None]] | None
    heads: list[tuple[int, int | None]] | None
    positions: list[tuple[int, int | None]] | None


class QuantSide(Part, frozen=True):
    """How the keys or the values are quantized; `bits` are those of an element outside windows."""

    method: str
    bits: Finite
    first: Count
    recent: Count
    block: Count
    own: str


class QuantSpec(Sides[QuantSide | None], frozen=True, tag_field="family", tag="quant"):
    """A quantizer of the cache; a side that it leaves alone is None."""


class CacheSize(Part, frozen=True):
    """What a cache takes: bytes of the arrays of keys and values for this row, empty slots included.

    `bits` are per element of a cache of the tokens `written`, windows and pending tokens counted; `exact_bits` are of
    one that is not packed. `packed` is the share of the elements that are.
    """

    bytes: Count
    written: Count
    bits: Positive
    exact_bits: Positive
    packed: Share


class Saturated(Part, frozen=True):
    """Elements of the clean arm's cache that a quantizer's format cannot hold, of all `elements`."""

    k: Count
    v: Count
    elements: Count

    def __post_init__(self) -> None:
        require_most("k", self.k + self.v, self.elements)


class Record(Part, frozen=True, tag_field="experiment", tag=lambda kind: kind.removesuffix("Record").lower()):
    """A line of samples.jsonl. `key` is the experiment and the fields named in KEY: no two records have the same."""

    KEY: ClassVar[tuple[str, ...]] = ("problem",)

    key: tuple[str | int, ...]

    @property
    def experiment(self) -> str:
        """Name of the experiment, which is the tag that says which type a line is."""
        return str(self.__struct_config__.tag)

    def __post_init__(self) -> None:
        key = [self.experiment, *(getattr(self, name) for name in self.KEY)]
        require("key", list(self.key) == key, f"expected {key}, got {list(self.key)!r:.60}")


class Sample(Record, frozen=True):
    """The record of a problem, `problem` being its index in the data.

    An invalid one, in which a number is not finite, has none of its FIGURES: NaN is not agreement. A valid one has all,
    but for those that it may be LACKING.
    """

    FIGURES: ClassVar[tuple[str, ...]] = ()
    LACKING: ClassVar[tuple[str, ...]] = ()

    problem: Count
    prompt_tokens: Count
    prompt_sha256: str  # of the ids as little-endian int32
    sampling: Sampling
    status: Literal["ok", "invalid"]
    invalid: Invalid | None

    def __post_init__(self) -> None:
        super().__post_init__()
        broke = self.status == "invalid"
        require("invalid", (self.invalid is not None) == broke, f"{self.invalid} beside status {self.status}")
        for name in self.FIGURES:
            there = getattr(self, name) is not None
            require(name, not (there and broke), NO_AGREEMENT)
            require(name, there or broke or name in self.LACKING, "missing in a sample with status ok")


class Setting(Sample, frozen=True):
    """The record of a problem that ran through both arms' programs."""

    shapes: Shapes
    headroom: Headroom


class Traced(Setting, frozen=True):
    """The record of a problem along `steps` given tokens."""

    tokens_sha256: str  # as of the prompt
    steps: Count


def require_spec(change: str, spec: ErrorSpec | QuantSpec | None) -> None:
    """Raises ValueError unless a spec says what was done where something was."""
    told = "expected null" if change == CLEAN else "missing"
    require("spec", (spec is None) == (change == CLEAN), f"{told} for the change '{change}'")


def require_names(field: str, found: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError unless there is an entry for each of the names, and no other."""
    told = f"expected {', '.join(names)}, got {', '.join(found) or 'nothing'}"
    require(field, set(found) == set(names), told)
