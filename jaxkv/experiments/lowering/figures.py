"""Pictures of summation trees from what records keep of them. Imports neither jax nor flax."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxkv.experiments.lowering.shapes import Part, TreeShape
from jaxkv.reporting.charts import DIAGRAM, Box, Diagram, Word
from jaxkv.reporting.document import Figure

Point = tuple[float, float]
Node = tuple[float, int]  # where a partial sum stands, and below how many joins
MOST = 8  # partial sums that are drawn with all their joins, and colours
TALL, GAP, LINE = 20.0, 6.0, 15.0  # of boxes, between them, and of a line of words, in pixels
JOINS = 96.0  # pixels that a tree of joins has
REST, READ = 24.0, 20.0  # what stands for all that is not drawn, and what a number needs, in pixels
CAPTION = (
    "Order in which the summands of one element are added up. Above: which partial sum a summand goes into, by colour. "
    "Below: the partial sums, with their lengths, and how they are joined, from top to bottom."
)


def draw_trees(shapes: Sequence[tuple[str, TreeShape]]) -> Figure:
    """Trees with their titles, side by side over one caption."""
    return Figure([draw_tree(title, shape) for title, shape in shapes], CAPTION)


def draw_tree(title: str, shape: TreeShape) -> Diagram:
    """Which summands each partial sum has, and how partial sums are joined."""
    words, top = [Word(0, LINE / 2, _say_stretches(shape))], LINE + 2
    boxes = list(_draw_stretches(shape, top))
    top += TALL + LINE
    runs = list(_list_runs(shape.part))
    words.append(Word(0, top - LINE / 4, _say_runs(shape, runs)))
    top += LINE
    sketch = _Sketch(top + TALL, len(runs))
    if len(runs) <= MOST:
        boxes += _draw_runs(runs, shape.order, top, sketch.centres)
        sketch.draw_joins(shape.part)
    else:
        boxes += [*_draw_runs(runs[: MOST - 1], shape.order, top, sketch.centres), _box(MOST - 1, MOST, top, "...")]
        sketch.draw_bars(shape.part, MOST)
    boxes += sketch.boxes
    return Diagram(title, sketch.bottom, boxes, sketch.lines, words)


def _list_runs(part: Part) -> Iterator[Part]:
    """In the order in which they are joined."""
    if not part.joined:
        yield part
        return
    for one in _expand(part):
        yield from _list_runs(one)


def _expand(part: Part) -> Sequence[Part]:
    """All parts of a join."""
    return part.parts * part.times if len(part.parts) == 1 else part.parts


def _find_colour(number: int) -> int | None:
    """A colour for each partial sum, grey for the last of MOST, and for all but the first ones of more."""
    return number if number < MOST - 1 else None


def _say_stretches(shape: TreeShape) -> str:
    shown = sum(length for _, length in shape.stretches)
    return f"summands 0 to {shown - 1}" + f", of {shape.summands}" * (shown < shape.summands)


def _draw_stretches(shape: TreeShape, top: float) -> Iterator[Box]:
    """Summands from left to right; where there are more than are kept, the last place says so."""
    lengths = [length for _, length in shape.stretches]
    whole = sum(lengths) == shape.summands
    scale = (DIAGRAM - (0 if whole else REST)) / sum(lengths)
    begin = 0
    for number, length in shape.stretches:
        said = f"summands {begin} to {begin + length - 1}: partial sum {number + 1} of {shape.partial_sums}"
        text = str(length) if length > 1 and length * scale > READ else ""
        yield Box(begin * scale, top, length * scale, TALL, text, _find_colour(number), said)
        begin += length
    if not whole:
        yield Box(DIAGRAM - REST, top, REST, TALL, "...", None, f"{shape.summands - begin} summands more")


def _say_runs(shape: TreeShape, runs: Sequence[Part]) -> str:
    count = f"{shape.partial_sums} partial sum{'s' * (shape.partial_sums > 1)}"
    if shape.at_once == (1,):
        return f"{count}, summands one by one"
    steps = {(run.summands // run.steps[0], run.steps[0]) for run in runs if len(run.steps) == 1}
    if len(steps) == 1 and len(shape.lengths) == 1:
        ((times, step),) = steps
        return f"{count}, {step} summands at once, in {times} step{'s' * (times > 1)}"
    return f"{count}, up to {shape.at_once[-1]} summands at once"


def _box(place: int, places: int, top: float, text: str, colour: int | None = None, said: str = "") -> Box:
    wide = DIAGRAM / places
    return Box(place * wide + GAP / 2, top, wide - GAP, TALL, text, colour, said)


def _draw_runs(runs: Sequence[Part], order: Sequence[int], top: float, centres: Sequence[float]) -> Iterator[Box]:
    """Summands that are added to a partial sum later have no partial sum of their own, and no colour."""
    numbers = iter(order)
    for place, run in enumerate(runs):
        own = run.apart and run.summands > 1
        number = next(numbers) if own or place == 0 else None
        colour = None if number is None else _find_colour(number)
        text = str(run.summands) if own else f"+ {run.summands}"
        yield _box(place, len(centres), top, text, colour, f"{run.summands} summands")


@dataclasses.dataclass
class _Sketch:
    """The joins below a row of boxes whose lower edge is at `top`."""

    top: float
    count: int
    lines: list[list[Point]] = dataclasses.field(default_factory=list)
    boxes: list[Box] = dataclasses.field(default_factory=list)
    bottom: float = 0.0

    @property
    def centres(self) -> list[float]:
        places = min(self.count, MOST)
        return [(place + 0.5) * DIAGRAM / places for place in range(places)]

    def draw_joins(self, part: Part) -> None:
        """Each join of each partial sum."""
        joins: list[tuple[list[Node], Node]] = []
        x, levels = _join(part, iter([(x, 0) for x in self.centres]), joins)
        tall = JOINS / max(levels, 3)
        for inputs, (at, level) in joins:
            end = self.top + level * tall
            for begin, depth in inputs:
                self.lines.append([(begin, self.top + depth * tall), (begin, end - tall / 2), (at, end - tall / 2)])
            self.lines.append([(at, end - tall / 2), (at, end)])
        self.bottom = self.top + levels * tall
        if levels:
            self._end(x, part)

    def draw_bars(self, part: Part, places: int) -> None:
        """One bar for all joins of a kind."""
        levels = []
        while part.joined:
            levels.append(part)
            if len(part.parts) > 1:
                break
            part = part.parts[0]
        y = self.top
        for level in reversed(levels):
            text = _say_join(level)
            for x in self.centres:
                self.lines.append([(x, y), (x, y + 12)])
            self.boxes.append(Box(0, y + 12, DIAGRAM, TALL, text))
            y += 12 + TALL
        self.bottom = y
        self._end(DIAGRAM / 2, levels[0])

    def _end(self, x: float, part: Part) -> None:
        width = 60.0
        left = min(max(0.0, x - width / 2), DIAGRAM - width)
        self.lines.append([(x, self.bottom), (x, self.bottom + 8)])
        self.boxes.append(
            Box(left, self.bottom + 8, width, TALL, str(part.summands), None, f"{part.summands} summands")
        )
        self.bottom += 8 + TALL


def _join(part: Part, ends: Iterator[Node], joins: list[tuple[list[Node], Node]]) -> Node:
    """Where a part stands, of runs that stand at `ends`; its joins are added to the list: what is joined, and where."""
    if not part.joined:
        return next(ends)
    nodes = [_join(one, ends, joins) for one in _expand(part)]
    while len(nodes) > 1:
        groups = [nodes[:2], *([node] for node in nodes[2:])]
        if part.joined == "at once":
            groups = [nodes]
        elif part.joined == "pairwise":
            groups = [nodes[at : at + 2] for at in range(0, len(nodes), 2)]
        nodes = [group[0] if len(group) == 1 else _place_join(part, group, joins) for group in groups]
    return nodes[0]


def _place_join(part: Part, group: list[Node], joins: list[tuple[list[Node], Node]]) -> Node:
    """In the middle; below the last one where one is added to the others."""
    x = sum(x for x, _ in group) / len(group) if part.joined in ("pairwise", "at once") else group[-1][0]
    node = x, max(level for _, level in group) + 1
    joins.append((group, node))
    return node


def _say_join(part: Part) -> str:
    if part.joined == "in turn":
        return f"{part.times} parts, one after the other"
    return f"{part.times} joined {part.joined}"
