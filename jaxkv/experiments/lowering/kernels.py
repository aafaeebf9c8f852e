"""What each sum of the decoder was compiled to, read off the text of a compiled program (hlo.py).

A sum is a product of matrices, a sum along an axis, or the adding up of partial products. Which class of operation it
is of (models/alignment.py) stands in its scopes; where a pass of XLA's has dropped them, the weights that it reads
tell, or else the operations around it.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

from jaxkv.experiments.lowering.hlo import Instruction, Program
from jaxkv.experiments.lowering.record import Kernel, Kind
from jaxkv.models.alignment import AT_ONCE, CLASSES, IN_TILES

_LAYER = re.compile(r"layer\.(\d+)(?:/|$)")
_WEIGHT = re.compile(r"layers___(\d+)___(attn|mlp)____(\w+?)___value")
_OF_WEIGHT = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "output", "gate": "mlp", "up": "mlp", "down": "mlp"}
_HEAD = re.compile(r"state__(?:embed|head)___value")
_LIBRARIES = {
    "__cublas$gemm": "cuBLAS",
    "__cublas$lt$matmul": "cuBLASLt",
    "__onednn$matmul": "oneDNN",
    "__cudnn$": "cuDNN",
}
_TRITON = ("__triton", "__triton_gemm", "__triton_nested_gemm_fusion")
_WINDOWS = ("kernel_window_bounds", "output_window_bounds", "input_window_bounds")
OUTSIDE = -1  # the layer of what is in none


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the decoder a sum stands; `form` is that of an aligned program's class, empty in a plain one."""

    layer: int
    op_class: str
    form: str = ""


@dataclasses.dataclass(frozen=True)
class Found:
    """A sum, what it was compiled to, and where it stands; None if that cannot be told."""

    place: Place | None
    kernel: Kernel


def find_kernels(text: str, name: str, slots: int) -> list[Found]:
    """The sums of a program, `name`, of whose cache there are `slots`, in the order of its text."""
    program = Program(text)
    finder = _Finder(program, slots)
    return [
        Found(finder.place(one), _describe(program, one, name))
        for one in program.instructions.values()
        if _is_sum(program, one)
    ]


def _is_sum(program: Program, one: Instruction) -> bool:
    if one.opcode in ("dot", "convolution"):
        return True
    if one.opcode == "custom-call":
        return _library(one) is not None
    if one.opcode in ("reduce", "reduce-window"):
        return bool(one.called) and program.root(one.called[0]).opcode == "add" and one.dtype[0] in "fb"
    return False


def _library(one: Instruction) -> str | None:
    found = re.search(r'custom_call_target="([^"]*)"', one.rest)
    return next((name for begin, name in _LIBRARIES.items() if found and found[1].startswith(begin)), None)


class _Finder:
    """Finds where sums of a program stand."""

    def __init__(self, program: Program, slots: int):
        self.program, self.slots = program, slots

    def place(self, one: Instruction) -> Place | None:
        scoped = _read_scopes(one.op_name)
        if scoped is not None:
            return scoped
        if (formed := self._of_loop(one)) is not None:
            return formed
        if (weight := self._of_weight(one)) is not None:
            return weight
        near = list(self._near(one))
        if one.opcode == "dot" and near and len(one.dims) > 2:
            # Scores sum over a head's width, the weighted sum over the slots of the cache.
            return dataclasses.replace(
                near[0], op_class="attention" if _summed(self.program, one) == self.slots else "scores"
            )
        return near[0] if near else None

    def _of_loop(self, one: Instruction) -> Place | None:
        """In a fenced program each class has loops of its own: what stands beside it there tells."""
        outer = self.program.caller(one) or one
        scopes = (_read_scopes(beside.op_name) for beside in self.program.by_computation[outer.computation])
        return next((found for found in scopes if found is not None and found.form), None)

    def _of_weight(self, one: Instruction) -> Place | None:
        for name in one.operands:
            source = self.program.source(name).name
            if (found := _WEIGHT.search(source)) and found[3] in _OF_WEIGHT:
                return Place(int(found[1]), _OF_WEIGHT[found[3]])
            if one.opcode != "reduce" and _HEAD.search(source):
                return Place(OUTSIDE, "head")
        return None

    def _near(self, one: Instruction) -> Iterator[Place]:
        """Places of what it is made of, nearest first, and then of what is made of it."""
        program = self.program
        for step in (
            lambda i: [program.source(name) for name in i.operands] + [program[name] for name in i.operands],
            lambda i: program.users.get(i.name, []),
        ):
            front, seen = [program.caller(one) or one], set()
            for _ in range(6):
                front = [near for far in front for near in step(far) if near.name not in seen]
                seen |= {near.name for near in front}
                for near in front:
                    if (found := _read_scopes(near.op_name)) is not None:
                        yield found


def _read_scopes(op_name: str) -> Place | None:
    scopes = op_name.split("/")
    found = [i for i, scope in enumerate(scopes) if scope in CLASSES]
    if not found:
        return None
    layer = _LAYER.search(op_name)
    form = next((scope for scope in scopes[found[-1] + 1 :] if scope in (IN_TILES, AT_ONCE)), "")
    return Place(int(layer[1]) if layer else OUTSIDE, scopes[found[-1]], form)


def _summed(program: Program, one: Instruction) -> int:
    """How many terms an element has."""
    of = program[one.operands[0]].dims
    if one.opcode == "dot":
        return _product(of[d] for d in one.listed("lhs_contracting_dims"))
    if one.opcode == "reduce":
        return _product(of[d] for d in one.listed("dimensions"))
    if one.opcode == "reduce-window":
        return _product(map(int, re.findall(r"\d+", (re.search(r"size=([\dx]+)", one.rest) or ["", "1"])[1])))
    if one.opcode == "convolution":
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest)
        if labels:
            kernel = program[one.operands[1]].dims
            spatial = [kernel[i] for i, letter in enumerate(labels[2]) if letter == "i"]
            return _product(spatial)
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', one.rest)
    return _product(of[int(d)] for d in re.findall(r"\d+", found[1])) if found else 0


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _describe(program: Program, one: Instruction, name: str) -> Kernel:
    by, blocks = _explain(program, one)
    operands = [program[operand].dtype for operand in one.operands if program[operand].dims]
    # A sum whose rounding XLA has made part of it may be rounded at each term (analysis/tpu.md).
    regions = [program.root(name).dtype for name in one.called] if one.opcode in ("reduce", "reduce-window") else []
    sums_in = min([one.dtype, *regions], key=_bits)
    return Kernel(
        kind=_kind(program, one),
        by=by,
        operands=_narrowest(program, one) or operands[0],
        sums_in=sums_in,
        writes=_written(program, one),
        summed=_summed(program, one),
        shape=list(one.dims),
        blocks=blocks,
        program=name,
        instruction=one.name,
        line=one.line,
    )


def _kind(program: Program, one: Instruction) -> Kind:
    if one.opcode in ("dot", "convolution", "custom-call"):
        return "product"
    if "dot_general" not in one.op_name:
        return "sum"
    return "multiply and add" if _follow(program, one.operands[0]).opcode == "multiply" else "sum of parts"


def _follow(program: Program, name: str) -> Instruction:
    """What a value is made of inside its kernel, through what only moves or widens it."""
    value = program[name]
    while value.opcode in ("convert", "bitcast", "broadcast", "transpose", "reshape", "copy") and value.operands:
        value = program[value.operands[0]]
    return value


def _narrowest(program: Program, one: Instruction) -> str:
    """The dtype in which what is multiplied was held before it was widened inside the kernel."""
    values = [_follow(program, name) for name in one.operands[:2]]
    if one.opcode in ("reduce", "reduce-window"):
        made = values[0]
        values = [_follow(program, name) for name in made.operands] if made.opcode == "multiply" else [made]
    found = [value.dtype for value in values if value.dims]
    return min(found, key=_bits, default="")


def _bits(dtype: str) -> int:
    return int(re.search(r"\d+", dtype)[0]) if re.search(r"\d+", dtype) else 99  # type: ignore[index]


def _written(program: Program, one: Instruction) -> str:
    """The dtype in which the result leaves the kernel, or is rounded next."""
    value = one
    for _ in range(6):
        users = program.users.get(value.name, [])
        if len(users) != 1 or users[0].opcode not in ("convert", "bitcast", "reshape", "transpose", "copy"):
            break
        value = users[0]
    return value.dtype


def _explain(program: Program, one: Instruction) -> tuple[str, dict[str, str]]:
    """Whose kernel it is, and what the program says of its blocks."""
    if (library := _library(one)) is not None:
        algorithm = one.config("selected_algorithm")
        return library, {} if algorithm is None else {"algorithm": algorithm}
    outer = program.caller(one)
    kind = "" if outer is None else outer.config("kind") or ""
    if outer is not None and kind in _TRITON:
        return "Triton", _triton_blocks(one, outer)
    if kind == "__ynn_fusion":
        return "YNNPACK", {}
    if kind == "__xnn_fusion":
        return "XNNPACK", {}
    if outer is not None:
        windows = {
            name.removesuffix("_window_bounds"): "x".join(map(str, found))
            for name in _WINDOWS
            if (found := outer.listed(name))
        }
        if one.opcode == "convolution":
            return "matrix unit", windows
        return "XLA", windows
    if one.opcode == "convolution":
        return "matrix unit", {}
    if one.opcode == "dot":
        return ("XLA's row loop" if 1 in one.dims[-2:] else "Eigen"), {}
    return "XLA", {}


def _triton_blocks(one: Instruction, outer: Instruction) -> dict[str, str]:
    tiles = re.search(r'"output_tiles":\[\{"sizes":\[([^\]]*)\]', outer.rest)
    blocks = {} if tiles is None else {"tile": "x".join(re.findall(r"\d+", tiles[1]))}
    if one.opcode == "dot" and (depth := one.listed("sizes")):
        blocks["k"] = str(depth[0])
    if (warps := outer.config("num_warps")) is not None:
        blocks["warps"] = warps
    found = {name: outer.config(f"block_{name}") for name in ("m", "n", "k")} | {"split": outer.config("split_k")}
    return blocks | {name: value for name, value in found.items() if value}
