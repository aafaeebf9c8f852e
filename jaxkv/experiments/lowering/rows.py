"""The map: what each class of operation was compiled to in every arm, in which layers, and in which order it adds."""

from collections.abc import Iterable, Mapping, Sequence

from jaxkv.experiments.lowering.kernels import OUTSIDE, Found
from jaxkv.experiments.lowering.record import Kernel, Order, Row
from jaxkv.experiments.lowering.report import compare_kinds, join_orders
from jaxkv.models.alignment import CLASSES

Sums = Mapping[str, Sequence[Found]]  # by program
Outline = tuple[object, ...]
Programs = dict[str, dict[Outline, Kernel]]  # by name, the kernels of a class in a layer


def make_rows(sums: Sums, pairs: Mapping[str, tuple[str, str]]) -> list[Row]:
    """A row for each class and for each group of layers in which all programs have kernels of the same kind.

    `pairs` are the programs whose orders are compared, by what the comparison is called. In fenced programs the two
    forms of a class are programs of their own, called ``fenced decode:in_tiles``.
    """
    found = _sort(sums)
    rows = []
    for op_class in CLASSES:
        groups: dict[object, list[int]] = {}
        for layer in sorted(layer for of, layer in found if of == op_class):
            programs = found[op_class, layer]
            alike = frozenset((name, _coarse(one)) for name, by in programs.items() for one in by.values())
            groups.setdefault((layer == OUTSIDE, alike), []).append(layer)
        for layers in groups.values():
            members = [found[op_class, layer] for layer in layers]
            rows.append(_make_row(op_class, [layer for layer in layers if layer != OUTSIDE], members, pairs))
    return rows


def _sort(sums: Sums) -> dict[tuple[str, int], Programs]:
    """The kernels by class and layer. What has one term is no sum."""
    found: dict[tuple[str, int], Programs] = {}
    for name, of_program in sums.items():
        for one in of_program:
            if one.place is None or one.kernel.summed < 2:
                continue
            form = f":{one.place.form}" if one.place.form else ""
            at = found.setdefault((one.place.op_class, one.place.layer), {}).setdefault(name + form, {})
            at.setdefault(identify(one.kernel), one.kernel)
    return found


def _make_row(
    op_class: str, layers: list[int], members: Sequence[Programs], pairs: Mapping[str, tuple[str, str]]
) -> Row:
    """A row of layers that are alike: each kernel once, and an order that is the same if it is in every layer."""
    kernels: dict[str, dict[Outline, Kernel]] = {}
    for programs in members:
        for name, by in programs.items():
            kernels[name] = by | kernels.get(name, {})
    orders = {
        name: join_orders(compare_orders(programs[one].values(), programs[other].values()) for programs in members)
        for name, (one, other) in pairs.items()
        if one in kernels and other in kernels
    }
    return Row(op_class, layers, {name: list(by.values()) for name, by in kernels.items()}, orders)


def identify(kernel: Kernel) -> Outline:
    """All that a program says of a kernel but for its names."""
    return *_coarse(kernel), tuple(kernel.shape), tuple(sorted(kernel.blocks.items()))


def _coarse(kernel: Kernel) -> Outline:
    """Its kind, with roundings."""
    return kernel.kind, kernel.by, kernel.operands, kernel.sums_in, kernel.writes, kernel.summed


def compare_orders(one: Iterable[Kernel], other: Iterable[Kernel]) -> Order:
    """Whether two arms add in the same order, as far as their programs say.

    The same kernels of the same shapes add in the same order; for others see `compare_kinds`.
    """
    one, other = list(one), list(other)
    return "same" if set(map(identify, one)) == set(map(identify, other)) else compare_kinds(one, other)
