"""The text of `--cache_quant`: `kvarn:k2v2,tile=128,floor=none`, or a method for each side,
`k=int8;v=kivi:2,group=32`."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxkv.errors import UserError, nearest
from jaxkv.interventions.quantizers import floats, integers, kivi, kvarn, llama_cpp, masking, quarot, requantize
from jaxkv.interventions.quantizers import turboquant as turbo
from jaxkv.interventions.quantizers.base import Quantizer, Side, Window, register_tree

MOST = 2**31 - 1  # of a whole number: positions are 32-bit integers


def _read_whole(text: str) -> int:
    """A whole number from 0 to MOST. Raises ValueError, whose message says so."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= MOST:
        raise ValueError(f"a whole number from 0 to {MOST}")
    return value


@dataclasses.dataclass(frozen=True)
class Option:
    """How a field is written.

    Attributes:
      field: of the quantizer.
      kind: int, float, or a tuple of (text, value) pairs.
      none: what stands for None, if anything does.
      written: False for a second way to ask for what another option says.
    """

    field: str
    kind: Any = int
    none: str | None = None
    written: bool = True

    def read(self, text: str) -> Any:
        """The value. Raises ValueError, whose message says what would do."""
        if text == self.none:
            return None
        if self.kind is int:
            return _read_whole(text)
        if isinstance(self.kind, tuple):
            values = dict(self.kind)
            if text not in values:
                raise ValueError(" or ".join(values))
            return values[text]
        try:
            return self.kind(text)
        except ValueError:
            raise ValueError("a number" if self.none is None else f"a number or {self.none}") from None

    def write(self, value: Any) -> str:
        if value is None:
            return str(self.none)
        if isinstance(self.kind, tuple):
            return next(text for text, known in self.kind if known == value)
        return f"{value:g}" if self.kind is float and float(f"{value:g}") == value else str(value)


@dataclasses.dataclass(frozen=True)
class Method:
    """How a quantizer is written.

    Attributes:
      make: the quantizer's class.
      variant: the field that follows the colon, None if nothing does.
      options: by name.
      fixed: fields that the method's name decides.
      pair: whether the usual form names both sides' bits, k2v2.
    """

    make: Callable[..., Quantizer]
    variant: str | None
    options: dict[str, Option] = dataclasses.field(default_factory=dict)
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    pair: bool = False


def _words(*words: str) -> tuple[tuple[str, str], ...]:
    return tuple((word, word) for word in words)


SWITCH = (("on", True), ("off", False))
ROTATE = {"rotate": Option("hadamard", SWITCH)}
BOUND = {"bound": Option("bound", _words("whole", "half"))}
METHODS = {
    "kvarn": Method(
        kvarn.KVarN,
        "bits",
        {
            "tile": Option("tile"),
            "passes": Option("passes"),
            "normalize": Option("passes", (("on", kvarn.KVarN.passes), ("off", 0)), written=False),
            "floor": Option("floor", float, "none"),
            "target": Option("target", _words("one", "min")),
            "criterion": Option("criterion", _words("std", "variance")),
            "keep": Option("keep", _words("best", "last")),
            "aux": Option("aux", _words("e5m3", "e4m3", "fp16")),
            **ROTATE,
        },
        pair=True,
    ),
    "kivi": Method(kivi.Kivi, "bits", {"group": Option("group"), "window": Option("residual"), **ROTATE}, pair=True),
    "quarot": Method(quarot.QuaRot, "bits", ROTATE),
    "turboquant": Method(
        turbo.TurboQuant,
        "bits",
        {
            "unit": Option("unit", SWITCH),
            "edges": Option("edges"),
            "values": Option("values", _words("uniform", "codebook")),
            **ROTATE,
        },
    ),
    "llama": Method(llama_cpp.LlamaCpp, "format"),
    "fp8": Method(floats.Float8, "format", {"scale": Option("scale", float, "token")}),
    "int8": Method(integers.Integer, None, BOUND, {"bits": 8}),
    "int4": Method(integers.Integer, None, BOUND, {"bits": 4}),
    "int2": Method(integers.Integer, None, BOUND, {"bits": 2}),
    "mask": Method(masking.Mask, "bits", {"of": Option("of", _words(*masking.STORED))}),
    "hf": Method(
        requantize.Requantize,
        "bits",
        {
            "group": Option("group"),
            "every": Option("every"),
            "axis": Option("axis", _words("token", "channel")),
            "anchor": Option("anchor", _words("start", "end")),
        },
    ),
}
WINDOWS = {
    "first": Option("first"),
    "recent": Option("recent"),
    "layers": Option("layers", _words("global", "windowed"), "all"),
}
GRAMMAR = (
    "write METHOD[,option=value]... for keys and values alike, or k=METHOD...;v=METHOD...; methods: kvarn:k2v2 "
    "kivi:k2v2 quarot:4 turboquant:4 hf:4 (bits for both, or k4v2) llama:q8_0 fp8:e4m3 int8 int4 int2 mask:8 none; "
    "options of all: first=N recent=N (recent not of hf) layers=all|global|windowed (which are packed), of kvarn: "
    + " ".join(METHODS["kvarn"].options)
    + " (aux=fp16 unless said from 8 bits on, e5m3 below; normalize=off is passes=0), of kivi: group window, of "
    "turboquant: unit edges values=uniform|codebook, of these and quarot: rotate=on|off, of hf: group every axis "
    "anchor, of fp8: scale=token|NUMBER, of int8: bound=whole|half, of mask: of"
)


@dataclasses.dataclass(frozen=True)
class SideQuant:
    """What is done to one side of the cache.

    Attributes:
      quantizer: None leaves it in the cache's own dtype.
      first: tokens kept at the beginning; None for the method's own.
      recent: newest tokens kept at least; None for the method's own.
      layers: which are packed: 'global' or 'windowed' ones, by what a query sees in them; None for all.

    Raises:
      UserError: recent tokens are to be kept by a method that packs its whole history, the newest included.
    """

    quantizer: Quantizer | None
    first: int | None = None
    recent: int | None = None
    layers: Literal["global", "windowed"] | None = None

    def __post_init__(self):
        if self.quantizer and self.quantizer.whole_history and self.recent:
            raise UserError(
                f"{self.quantizer.name} packs the whole prompt at once, its newest tokens too, so recent={self.recent} "
                "would keep none of them; drop recent"
            )

    @property
    def window(self) -> Window:
        """The method's windows with what was asked for."""
        own = self.quantizer.window if self.quantizer else Window()
        return dataclasses.replace(
            own,
            first=own.first if self.first is None else self.first,
            recent=own.recent if self.recent is None else self.recent,
        )

    def packs(self, layer: int, windowed: Sequence[bool]) -> bool:
        """Whether a layer is packed, in a model whose layers are windowed as said."""
        if self.quantizer is None or layer in self.quantizer.exact_layers(len(windowed)):
            return False
        return self.layers is None or (self.layers == "windowed") == windowed[layer]

    def stored_as(self, dtype: Any) -> "SideQuant":
        """As in CacheQuant."""
        return dataclasses.replace(self, quantizer=self.quantizer and self.quantizer.stored_as(dtype))

    def check(self, head_dim: int, tokens: int | None = None) -> None:
        """Raises UserError if heads of this size do not suit, or if a context of so many tokens is over too early."""
        if self.quantizer is None:
            return
        self.quantizer.check(head_dim, tokens)
        window = self.window
        if tokens is not None and window.first + window.recent + window.block > tokens:
            never = "pack nothing after the prompt" if window.from_prompt else "pack nothing"
            raise UserError(
                f"{self.quantizer.name} would {never}: {window.first} first and {window.recent} recent tokens that "
                f"stay exact and the {window.block} that are packed at a time exceed the context of {tokens}; make "
                "first, recent, tile, window or every smaller"
            )


@dataclasses.dataclass(frozen=True)
class CacheQuant:
    """What is done to keys and to values; as text, the shortest spec that gives it."""

    k: SideQuant
    v: SideQuant

    def __str__(self) -> str:
        k, v = _write(self.k), _write(self.v)
        if k[0] != v[0] or k[2] != v[2]:
            return f"k={_join(*k)};v={_join(*v)}"
        name, options = k[0], k[2]
        if k[1] == v[1] and not (name in METHODS and METHODS[name].pair):
            return _join(*k)
        if METHODS[name].variant != "bits":
            return f"k={_join(*k)};v={_join(*v)}"
        return _join(name, f"k{k[1]}v{v[1]}", options)

    def check(self, head_dim: int, tokens: int | None = None, windowed: Sequence[bool] | None = None) -> None:
        """Raises UserError if heads of this size, a context of so many tokens, or a model with such layers do not suit.

        Args:
          head_dim: of the model.
          tokens: of its context; None leaves that open.
          windowed: which of its layers are; None leaves that open.
        """
        for side in (self.k, self.v):
            side.check(head_dim, tokens)
            if windowed is not None and side.layers and (side.layers == "windowed") not in windowed:
                raise UserError(
                    f"layers={side.layers} packs nothing: this model has no {side.layers} layer; drop layers"
                )

    def stored_as(self, dtype: Any) -> "CacheQuant":
        """The same for a cache of this dtype, known to the methods. Raises UserError if it does not suit one."""
        return CacheQuant(self.k.stored_as(dtype), self.v.stored_as(dtype))


register_tree(SideQuant, ("quantizer",))
register_tree(CacheQuant, ("k", "v"))


def parse_cache_quant(text: str) -> CacheQuant:
    """Reads a spec; `str` of the result reads back to an equal one.

    Raises:
      UserError: with the nearest name and the grammar, in one line.
    """
    try:
        if re.match(r"\s*[kv]\s*=", text):
            sides = {}
            for part in text.split(";"):
                side, equals, rest = (word.strip() for word in part.partition("="))
                if side not in ("k", "v") or not equals or side in sides:
                    raise UserError(f"'{part.strip()}' should be k=METHOD or v=METHOD, each once")
                sides[side] = _read(rest, side)  # type: ignore[arg-type]
            for side in ("k", "v"):
                sides.setdefault(side, SideQuant(None))
            return CacheQuant(**sides)
        return CacheQuant(k=_read(text, "k", both=True), v=_read(text, "v", both=True))
    except UserError as error:
        raise UserError(f"--cache_quant={text}: {error}. {GRAMMAR}") from None


def _read(text: str, side: Side, both: bool = False) -> SideQuant:
    head, *rest = (word.strip() for word in text.split(","))
    name, colon, variant = (word.strip() for word in head.partition(":"))
    if name == "none":
        if colon or rest:
            raise UserError("nothing follows none")
        return SideQuant(None)
    if name not in METHODS:
        raise UserError(f"unknown method '{name}'{nearest(name, [*METHODS, 'none'])}")
    method = METHODS[name]
    fields = dict(method.fixed)
    if method.variant is None:
        if colon:
            raise UserError(f"nothing follows {name}, and here '{variant}' does")
    elif not variant:
        raise UserError(f"{name} needs {'its bits' if method.variant == 'bits' else 'a format'} after a colon")
    elif method.variant == "bits":
        fields["bits"] = _read_bits(variant, name, side, both)
    else:
        fields[method.variant] = variant
    windows: dict[str, Any] = {}
    seen = set()
    for word in rest:
        key, equals, value = (part.strip() for part in word.partition("="))
        known = method.options | WINDOWS
        if key not in known or not equals:
            raise UserError(f"{name} has no option '{word}'{nearest(key, list(known))}; it has {', '.join(known)}")
        if known[key].field in seen:
            again = " or ".join(other for other, option in known.items() if option.field == known[key].field)
            raise UserError(f"{name} is given {again} twice")
        seen.add(known[key].field)
        try:
            read = known[key].read(value)
        except ValueError as wanted:
            raise UserError(f"{key}={value} should be {wanted}") from None
        (windows if key in WINDOWS else fields)[known[key].field] = read
    return SideQuant(method.make(side=side, **fields), **windows)


def _read_bits(text: str, name: str, side: Side, both: bool) -> int:
    pair = re.fullmatch(r"k(\d{1,3})v(\d{1,3})", text)
    if pair and both:
        return int(pair[1 if side == "k" else 2])
    if not re.fullmatch(r"\d{1,3}", text):
        raise UserError(f"'{text}' in {name}:{text} should be bits, such as 4{' or k4v2' if both else ''}")
    return int(text)


def _write(side: SideQuant) -> tuple[str, str, tuple[str, ...]]:
    """Name, variant and options, without what is the default."""
    quantizer = side.quantizer
    if quantizer is None:
        return "none", "", ()
    name, method = next(
        (name, method)
        for name, method in METHODS.items()
        if type(quantizer) is method.make and all(getattr(quantizer, f) == v for f, v in method.fixed.items())
    )
    variant = "" if method.variant is None else str(getattr(quantizer, method.variant))
    chosen = {} if method.variant is None else {method.variant: getattr(quantizer, method.variant)}
    plain = method.make(side=quantizer.side, **method.fixed, **chosen)
    options = [
        f"{key}={option.write(getattr(quantizer, option.field))}"
        for key, option in method.options.items()
        if option.written and getattr(quantizer, option.field) != getattr(plain, option.field)
    ]
    options += [f"{key}={getattr(side, key)}" for key in WINDOWS if getattr(side, key) is not None]
    return name, variant, tuple(options)


def _join(name: str, variant: str, options: tuple[str, ...]) -> str:
    return ",".join([f"{name}:{variant}" if variant else name, *options])
