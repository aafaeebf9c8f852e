"""Reads the text of a compiled XLA program: its instructions, what they call, and which line of ours they are of.

The text is that of `Compiled.as_text()`. Instructions are told apart by name, which is unique in a program.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

_NAME = re.compile(r"%?([\w.\-]+)")
_SHAPE = re.compile(r"(\w+)\[([\d,<=]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_METADATA = re.compile(r",? metadata=\{[^}]*\}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
      name: unique in the program.
      computation: name of the computation it stands in.
      dtype: of its result, of a tuple's first one; "" if it has none.
      dims: shape of that.
      opcode: e.g. dot, fusion, custom-call.
      operands: names of instructions.
      rest: what follows the operands, attributes and backend configuration.
      literal: what a parameter, constant or get-tuple-element has in its parentheses.
      text: the line.
    """

    name: str
    computation: str
    dtype: str
    dims: tuple[int, ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str
    literal: str
    text: str

    @property
    def op_name(self) -> str:
        """Scopes and operation of the line of ours that it is of, ``jit(f)/while/body/layer.3/mlp/dot_general``."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        return tuple(_CALLED.findall(self.rest))

    def attribute(self, name: str) -> str | None:
        """An attribute as it stands, ``{0,1}`` or ``%region_1``; None without it."""
        found = re.search(rf"\b{re.escape(name)}=(\{{[^}}]*\}}|[\w.%\-]+)", self.rest)
        return found[1] if found else None

    def config(self, name: str) -> str | None:
        """A value of its backend configuration: the text of a string or number, or of a list; None without it."""
        found = re.search(rf'"{re.escape(name)}":("([^"]*)"|\[[^\]]*\]|[\w.\-]+)', self.rest)
        return None if found is None else found[2] if found[2] is not None else found[1]

    def listed(self, name: str) -> tuple[int, ...]:
        """Whole numbers of a list in its attributes or its backend configuration; empty without it."""
        found = self.attribute(name) or self.config(name) or ""
        return tuple(map(int, re.findall(r"\d+", found)))

    @property
    def line(self) -> str:
        """The line without where it came from and how it is laid out, as it is shown beside others."""
        return _METADATA.sub("", self.text.removeprefix("ROOT ")).partition(", backend_config=")[0]


class Program:
    """A compiled program: its instructions by name."""

    def __init__(self, text: str):
        self.instructions: dict[str, Instruction] = {one.name: one for one in _read(text)}
        self.by_computation: dict[str, list[Instruction]] = {}
        for one in self.instructions.values():
            self.by_computation.setdefault(one.computation, []).append(one)

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    @functools.cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """Instructions that take each one's result, in their order."""
        found: dict[str, list[Instruction]] = {}
        for one in self.instructions.values():
            for name in one.operands:
                found.setdefault(name, []).append(one)
        return found

    @functools.cached_property
    def callers(self) -> Mapping[str, list[Instruction]]:
        """Instructions that call each computation."""
        found: dict[str, list[Instruction]] = {}
        for one in self.instructions.values():
            for name in one.called:
                found.setdefault(name, []).append(one)
        return found

    def root(self, computation: str) -> Instruction:
        """What a computation gives."""
        members = self.by_computation[computation]
        return next((one for one in members if one.text.startswith("ROOT ")), members[-1])

    def caller(self, one: Instruction) -> Instruction | None:
        """The fusion that an instruction is part of; None for one that stands by itself."""
        for by in self.callers.get(one.computation, ()):
            if by.opcode in ("fusion", "call"):
                return by
        return None

    def source(self, name: str) -> Instruction:
        """Where a value comes from, through fusions, loops' tuples and what only moves it: a parameter at the end."""
        one = self[name]
        for _ in range(100):
            step = self._step(one)
            if step is None:
                return one
            one = step
        return one

    def _step(self, one: Instruction) -> Instruction | None:
        if one.opcode in MOVES and one.operands:
            return self[one.operands[0]]
        if one.opcode == "get-tuple-element":
            return self._element(self[one.operands[0]], int(one.attribute("index") or 0))
        if one.opcode == "parameter":
            callers = self.callers.get(one.computation, [])
            if callers and callers[0].opcode in ("fusion", "call"):
                return self[callers[0].operands[int(one.literal)]]
        return None

    def _element(self, of: Instruction, index: int) -> Instruction | None:
        """An element of a tuple; of a loop's tuple that with which it begins, since weights do not change in it."""
        if of.opcode == "tuple":
            return self[of.operands[index]]
        if of.opcode == "while":
            return self._element(self[of.operands[0]], index)
        if of.opcode == "parameter":
            callers = self.callers.get(of.computation, [])
            if callers and callers[0].opcode == "while":
                return self._element(self[callers[0].operands[0]], index)
        if of.opcode in MOVES and of.operands:
            return self._element(self[of.operands[0]], index)
        return of if of.opcode == "custom-call" else None


# What gives the value it is given, in another shape, place or dtype.
MOVES = ("bitcast", "copy", "reshape", "transpose", "convert", "copy-start", "copy-done", "broadcast", "slice",
         "optimization-barrier", "all-gather", "bitcast-convert")  # fmt: skip


def _read(text: str) -> Iterator[Instruction]:
    computation = ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.endswith("{") and ") -> " in line and " = " not in line.partition(" (")[0]:
            computation = line.removeprefix("ENTRY ").lstrip("%").partition(" ")[0]
        elif computation and " = " in line:
            if (one := _read_line(line, computation)) is not None:
                yield one
        elif line == "}":
            computation = ""


def _read_line(line: str, computation: str) -> Instruction | None:
    head, _, value = line.partition(" = ")
    name = head.removeprefix("ROOT ").lstrip("%")
    shape, rest = _cut(value) if value.startswith("(") else value.split(" ", 1)
    opcode, _, inner = rest.strip().partition("(")
    found = _SHAPE.search(shape)
    literal, rest = _cut("(" + inner)
    literal = literal[1:-1]
    operands = tuple(re.findall(r"%([\w.\-]+)", literal))
    dims = tuple(int(re.sub(r"\D", "", d)) for d in found[2].split(",") if d) if found else ()
    return Instruction(name, computation, found[1] if found else "", dims, opcode, operands, rest, literal, line)


def _cut(text: str) -> tuple[str, str]:
    """The parentheses that a text begins with, and the rest."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: place + 1], text[place + 1 :]
    return text, ""
