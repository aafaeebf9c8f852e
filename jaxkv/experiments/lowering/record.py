"""The record of experiment 'lowering': what a condition's programs were compiled to. Imports neither jax nor flax."""

from typing import Any, ClassVar, Literal

import msgspec

from jaxkv.experiments import record_parts as parts
from jaxkv.experiments.lowering.shapes import TreeShape
from jaxkv.experiments.record_parts import Amount, Count, require

Order = Literal["same", "different", "not told"]
Kind = Literal["product", "multiply and add", "sum of parts", "sum"]


class Kernel(parts.Part, frozen=True):
    """What a sum was compiled to, as far as the program says.

    Attributes:
      kind: a product of matrices in a kernel for them; one that is multiplied and added element by element; the adding
        up of the parts of a product that was split; or another sum.
      by: whose kernel: a library, Triton, the compiler's own loops, or a TPU's matrix unit.
      operands: dtype of what is multiplied or added.
      sums_in: dtype of the sum as the program states it; a kernel may be more exact inside.
      writes: dtype in which the result leaves the kernel.
      summed: terms of an element; of each part if it is split.
      shape: of the result.
      blocks: what the program says of them, by its own names.
      program: of which.
      instruction: its name there.
      line: what it says, without where it came from and how it is tuned.
    """

    kind: Kind
    by: str
    operands: str
    sums_in: str
    writes: str
    summed: Count
    shape: list[Count]
    blocks: dict[str, str]
    program: str
    instruction: str
    line: str


class Row(parts.Part, frozen=True):
    """A class of operation in layers whose programs have the same kernels; no layers for what stands outside of them.

    `kernels` are those of each program, and `orders` what is said of pairs of programs.
    """

    operation: str
    layers: list[Count]
    kernels: dict[str, list[Kernel]]
    orders: dict[str, Order]


class ProgramFacts(parts.Part, frozen=True):
    """What XLA says of a compiled program: bytes and operations of one device.

    Attributes:
      chips: devices over which it is laid out.
      arguments: bytes of weights, cache and batch as they lie, the device's own padding included.
      outputs: bytes of results.
      aliased: bytes of results that take the place of an argument.
      temporaries: bytes beside them.
      code: bytes of the program itself.
      flops: floating point operations. The body of a loop counts once, however often it runs: for decode and recompute
        this is about one step. None where XLA does not say.
      accessed: bytes read and written, counted alike.
      fits: whether a device lends a program as many bytes as are needed; None if that is not known.
      seconds: that it took to compile.
      sha256: of the text in which its lines stand.
    """

    chips: Count
    arguments: Count
    outputs: Count
    aliased: Count
    temporaries: Count
    code: Count
    flops: Amount | None
    accessed: Amount | None
    fits: bool | None
    seconds: Amount
    sha256: str

    @property
    def needed(self) -> int:
        """Bytes that it takes to run."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


class Shapes(parts.Part, frozen=True):
    """Rows of the batch, tokens of the prompt, rows of the prefill, slots of the cache."""

    batch: Count
    prompt: Count
    prefill: Count
    slots: Count


class Recovery(parts.Part, frozen=True):
    """The order in which a product of a class adds for so many rows, recovered from its outputs on this device.

    Attributes:
      operation: the class.
      weight: which product of it.
      rows: of the product.
      kernels: what it was compiled to by itself.
      shape: of the tree; None if there is none, or it was not looked for to the end.
      again: whether a second recovery, with tests in other columns, gave the same tree.
      rounding: the rule of rounding under which sums in this order have all bits of a product of numbers that cancel
        (jaxkv.experiments.lowering.replay), 'either' or 'neither'.
      reproduced: columns of that product, of `columns`, whose bits they have under each rule that was tried.
      fault: why there is no tree.
    """

    operation: str
    weight: str
    rows: Count
    kernels: list[Kernel]
    shape: TreeShape | None
    again: bool | None = None
    rounding: str | None = None
    columns: Count = 0
    fault: str | None = None
    reproduced: dict[str, Count] = msgspec.field(default_factory=dict)


class LoweringRecord(parts.Record, frozen=True):
    """What the programs of a condition were compiled to for one target.

    `forms` are rows of the fenced programs, of a layer of each kind, where they were compiled. `unplaced` are lines of
    sums whose class of operation could not be told; the map lacks them.
    """

    KEY: ClassVar = ("target", "regime")

    target: str
    regime: Literal["plain", "aligned"]
    device: dict[str, Any]
    environment: dict[str, Any]
    compiler_options: dict[str, Any]
    model: dict[str, Any]
    precision: dict[str, Any]
    held: dict[str, str]
    shapes: Shapes
    tile: Count
    programs: dict[str, ProgramFacts]
    rows: list[Row]
    forms: list[Row]
    recovered: list[Recovery]
    unplaced: list[str]
    seconds: Amount

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("rows", "forms"):
            for index, row in enumerate(getattr(self, field)):
                odd = {name.partition(":")[0] for name in row.kernels} - self.programs.keys()
                require(f"{field}[{index}].kernels", not odd, f"of no program: {', '.join(sorted(odd))}")
