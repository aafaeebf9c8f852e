"""The text of `--cache_quant`: `kvarn:k2v2,tile=128,floor=none`, or a method for each side,
`k=int8;v=kivi:2,group=32`."""

import dataclasses
import re
import typing
from collections.abc import Sequence
from typing import Any, Literal

from jaxkv.errors import UserError, nearest
from jaxkv.interventions.quantizers import floats, integers, kivi, kvarn, llama_cpp, masking, quarot, requantize
from jaxkv.interventions.quantizers import turboquant as turbo
from jaxkv.interventions.quantizers.base import Quantizer, Side, Window, Words, register_tree

# A method is a file and a line here.
QUANTIZERS: tuple[type[Quantizer], ...] = (
    kvarn.KVarN,
    kivi.Kivi,
    quarot.QuaRot,
    turbo.TurboQuant,
    requantize.Requantize,
    llama_cpp.LlamaCpp,
    floats.Float8,
    integers.Integer,
    masking.Mask,
)
METHODS: dict[str, type[Quantizer]] = {name: method for method in QUANTIZERS for name in method.names}
MOST = 2**31 - 1  # of a whole number: positions are 32-bit integers


@dataclasses.dataclass(frozen=True)
class Option:
    """How a field is written."""

    field: str  # its name
    kind: type[int] | type[float] | Words  # int, float, or words and what each stands for
    none: str | None = None  # what stands for None, if anything does

    @property
    def forms(self) -> str:
        """What may be written, for people."""
        words = dict(self.kind) if isinstance(self.kind, tuple) else ["N" if self.kind is int else "NUMBER"]
        return "|".join([*([self.none] if self.none else []), *words])

    def read(self, text: str) -> Any:
        """The value. Raises ValueError, whose message says what would do."""
        if text == self.none:
            return None
        if isinstance(self.kind, tuple):
            words = dict(self.kind)
            if text not in words:
                raise ValueError(" or ".join(words))
            return words[text]
        wanted = f"a whole number from 0 to {MOST}" if self.kind is int else "a number"
        try:
            value = self.kind(text)
        except ValueError:
            raise ValueError(wanted if self.none is None else f"{wanted} or {self.none}") from None
        if self.kind is int and not 0 <= value <= MOST:
            raise ValueError(wanted)
        return value

    def write(self, value: Any) -> str:
        """The text that `read` makes the value of."""
        if value is None:
            return str(self.none)
        if isinstance(self.kind, tuple):
            return next(text for text, known in self.kind if known == value)
        return f"{value:g}" if self.kind is float and float(f"{value:g}") == value else str(value)


def _kind(annotation: Any) -> Any:
    """How a type is written: bool, int, float or words, or one of these and None."""
    known = [part for part in typing.get_args(annotation) or (annotation,) if part is not type(None)]
    if known == [bool]:
        return ("on", True), ("off", False)
    if known[0] in (int, float):
        return known[0]
    return tuple((word, word) for word in typing.get_args(known[0]) or known)


def list_options(method: type[Quantizer]) -> dict[str, Option]:
    """How the fields are written that neither name nor variant decides, in their order."""
    decided = {"side", method.variant, *method.named(method.names[0])}
    return {
        field.metadata.get("option", field.name): Option(field.name, _kind(field.type), field.metadata.get("none"))
        for field in dataclasses.fields(method)
        if field.name not in decided
    }


WINDOWS = {
    "first": Option("first", int),
    "recent": Option("recent", int),
    "layers": Option("layers", (("global", "global"), ("windowed", "windowed")), "all"),
}


def _describe(method: type[Quantizer]) -> str:
    """Name and options, for people."""
    words = [f"{name}={option.forms}" for name, option in list_options(method).items()]
    words += [f"{name}={Option(field, kind).forms}" for name, field, kind in method.aliases]
    return f", of {method.names[0]}: {' '.join(words)}" if words else ""


GRAMMAR = (
    "write METHOD[,option=value]... for keys and values alike, or k=METHOD...;v=METHOD...; methods: "
    + " ".join(name if m.variant is None else f"{name}:{m.usual}" for name, m in METHODS.items())
    + " none (bits are those of both, or k4v2); options of all: first=N recent=N (recent not of hf) "
    "layers=all|global|windowed (which are packed)" + "".join(map(_describe, QUANTIZERS))
)


@dataclasses.dataclass(frozen=True)
class SideQuant:
    """What is done to one side of the cache. A method that packs its whole history, the newest too, keeps no recent."""

    quantizer: Quantizer | None  # None leaves it in the cache's own dtype
    first: int | None = None  # tokens kept at the beginning; None for the method's own
    recent: int | None = None  # newest tokens kept at least; None for the method's own
    layers: Literal["global", "windowed"] | None = None  # which are packed, by what a query sees in them; None: all

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
        if k[1] == v[1] and not (name in METHODS and METHODS[name].usual.startswith("k")):
            return _join(*k)
        if METHODS[name].variant != "bits":
            return f"k={_join(*k)};v={_join(*v)}"
        return _join(name, f"k{k[1]}v{v[1]}", options)

    def check(self, head_dim: int, tokens: int | None = None, windowed: Sequence[bool] | None = None) -> None:
        """Raises UserError if heads of this size, a context of so many tokens, or a model with such layers do not suit.

        None leaves the context, or which layers are windowed, open.
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

    Raises UserError with the nearest name and the grammar, in one line.
    """
    try:
        if re.match(r"\s*[kv]\s*=", text):
            sides = {}
            for part in text.split(";"):
                side, equals, rest = (word.strip() for word in part.partition("="))
                if side not in ("k", "v") or not equals or side in sides:
                    raise UserError(f"'{part.strip()}' should be k=METHOD or v=METHOD, each once")
                sides[side] = _read(rest, side)  # type: ignore[arg-type]
            return CacheQuant(sides.get("k", SideQuant(None)), sides.get("v", SideQuant(None)))
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
    fields = method.named(name)
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
    aliases = {alias: Option(field, kind) for alias, field, kind in method.aliases}
    known = list_options(method) | aliases | WINDOWS
    for word in rest:
        key, equals, value = (part.strip() for part in word.partition("="))
        if key not in known or not equals:
            raise UserError(f"{name} has no option '{word}'{nearest(key, list(known))}; it has {', '.join(known)}")
        field = known[key].field
        if field in fields or field in windows:
            again = " or ".join(other for other, option in known.items() if option.field == field)
            raise UserError(f"{name} is given {again} twice")
        try:
            (windows if key in WINDOWS else fields)[field] = known[key].read(value)
        except ValueError as wanted:
            raise UserError(f"{key}={value} should be {wanted}") from None
    return SideQuant(method(side=side, **fields), **windows)


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
    method = type(quantizer)
    decides = lambda name: all(getattr(quantizer, field) == value for field, value in method.named(name).items())  # noqa: E731
    name = next(filter(decides, method.names))
    chosen = {} if method.variant is None else {method.variant: getattr(quantizer, method.variant)}
    plain = method(side=quantizer.side, **method.named(name), **chosen)
    options = [
        f"{key}={option.write(getattr(quantizer, option.field))}"
        for key, option in list_options(method).items()
        if getattr(quantizer, option.field) != getattr(plain, option.field)
    ]
    options += [f"{key}={getattr(side, key)}" for key in WINDOWS if getattr(side, key) is not None]
    return name, "".join(map(str, chosen.values())), tuple(options)


def _join(name: str, variant: str, options: tuple[str, ...]) -> str:
    return ",".join([f"{name}:{variant}" if variant else name, *options])
