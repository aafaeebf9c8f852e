"""The map: what each class of operation was compiled to in every arm, in which layers, and in which order it adds."""

from collections.abc import Iterable, Mapping, Sequence

from jaxkv.experiments.lowering.kernels import OUTSIDE, Found
from jaxkv.experiments.lowering.record import Kernel, Order, Row
from jaxkv.models.alignment import CLASSES

Sums = Mapping[str, Sequence[Found]]  # by program


def make_rows(sums: Sums, pairs: Mapping[str, tuple[str, str]]) -> list[Row]:
    """A row for each class and for each group of layers in which all programs have the same kernels.

    `pairs` are the programs whose orders are compared, by what the comparison is called. In fenced programs the two
    forms of a class are programs of their own, called ``decode:in_tiles``.
    """
    found: dict[tuple[str, int], dict[str, dict[tuple[object, ...], Kernel]]] = {}
    for name, of_program in sums.items():
        for one in of_program:
            if one.place is None or one.kernel.summed < 2:
                continue
            form = f":{one.place.form}" if one.place.form else ""
            at = found.setdefault((one.place.op_class, one.place.layer), {}).setdefault(name + form, {})
            at.setdefault(identify(one.kernel), one.kernel)
    rows = []
    for op_class in CLASSES:
        groups: dict[object, list[int]] = {}
        for (of, layer), programs in sorted(found.items(), key=lambda item: item[0][1]):
            if of == op_class:
                alike = layer == OUTSIDE, *((name, frozenset(kernels)) for name, kernels in sorted(programs.items()))
                groups.setdefault(alike, []).append(layer)
        for layers in groups.values():
            kernels = {name: list(by.values()) for name, by in found[op_class, layers[0]].items()}
            orders = {
                name: compare_orders(kernels[one], kernels[other])
                for name, (one, other) in pairs.items()
                if one in kernels and other in kernels
            }
            rows.append(Row(op_class, [layer for layer in layers if layer != OUTSIDE], kernels, orders))
    return rows


def identify(kernel: Kernel) -> tuple[object, ...]:
    """All that a program says of a kernel but for its names."""
    blocks = tuple(sorted(kernel.blocks.items()))
    return *_coarse(kernel), kernel.writes, tuple(kernel.shape), blocks


def _coarse(kernel: Kernel) -> tuple[object, ...]:
    """What another order shows in for sure, however many rows there are."""
    return kernel.kind, kernel.by, kernel.operands, kernel.sums_in, kernel.summed, kernel.blocks.get("k", "")


def compare_orders(one: Iterable[Kernel], other: Iterable[Kernel]) -> Order:
    """Whether two arms add in the same order, as far as their programs say.

    The same kernels of the same shapes add in the same order. Kernels of another kind, depth of blocks, number of terms
    or dtype of the sum do not. Of kernels that differ in their shape alone it is not told.
    """
    one, other = list(one), list(other)
    if set(map(identify, one)) == set(map(identify, other)):
        return "same"
    return "different" if set(map(_coarse, one)) != set(map(_coarse, other)) else "not told"
