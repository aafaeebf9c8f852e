"""The map of a condition's programs beside what was measured of them: where the order of sums is what differs."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxkv.experiments.attribution.record import ALONE
from jaxkv.experiments.lowering.record import LoweringRecord
from jaxkv.experiments.lowering.report import (
    PREDICTED,
    find_changes,
    find_evidence,
    join_orders,
    judge,
    list_orders,
    read_order,
    restore,
)
from jaxkv.overview.gather import Condition, Study
from jaxkv.reporting.document import Block, Paragraph, Table

ALIKE = ("model", "precision", "device")  # what a map and a run share, beside versions and flags of XLA
ARMS = {"cached": ("prompt", "step"), "uncached": ("uncached",)}  # of which programs an arm is made
HOLDS = {None: "-", True: "yes", False: "no"}
SHOWN = 110  # letters of a program's line


class Prediction(msgspec.Struct, frozen=True):
    """What the map says of aligning a class alone, for one arm, and at how many steps bits changed."""

    operation: str
    arm: str
    order: str
    moved: int
    steps: int

    @property
    def holds(self) -> bool | None:
        """Whether it came so; None if nothing was predicted."""
        return None if self.order == "not told" else (self.order == "different") == bool(self.moved)


def find_map(study: Study, like: Condition) -> LoweringRecord | None:
    """The map of the programs of a condition's model, precision and device, if one of the runs has it."""
    for condition in study["conditions"]:
        if (
            condition.get("lowering")
            and all(condition[name] == like[name] for name in ALIKE)
            and _built(condition, like)
        ):
            record = restore(condition["lowering"])
            if record.regime == "plain":
                return record
    return None


def _built(one: Condition, other: Condition) -> bool:
    """Whether both were compiled by the same versions with the same flags."""

    def read(condition: Condition) -> tuple[Any, ...]:
        origin = condition["origin"]
        return (*(origin["versions"].get(name) for name in ("jax", "jaxlib")), origin["variables"].get("XLA_FLAGS"))

    return read(one) == read(other)


def explain_orders(study: Study, conditions: Sequence[Condition]) -> list[str]:
    """Of each model and precision with a map, what one row adds in another order than all rows, and two lines of it."""
    found = []
    for like in {tuple(c[name] for name in ALIKE): c for c in conditions}.values():
        if (record := find_map(study, like)) is None:
            continue
        by = list_orders(record, "step")
        if not by.get("different"):
            continue
        shapes = f"a batch of {record.shapes.batch}, {record.shapes.slots} slots"
        said = f"order of sums, {like['model']} {like['precision']} ({shapes}): the program of one row adds in another "
        said += f"order than that of all rows in {', '.join(by['different'])}{_say_layers(record, by['different'])}"
        if not_told := by.get("not told"):
            said += f"; not told of {', '.join(not_told)}"
        operation = next((one for one in by["different"] if one != "norms"), by["different"][0])
        kernels = find_evidence(record, operation)
        if kernels is not None:
            lines = " beside ".join(f"`{one.program}: {one.line[:SHOWN]}`" for one in kernels)
            said += f". In {operation}, {kernels[0].by} beside {kernels[1].by}: {lines}"
        found.append(said)
    return found


def _say_layers(record: LoweringRecord, operations: Sequence[str]) -> str:
    """Whether that is so in all layers."""
    layers = set(range(int(record.model["num_layers"])))
    for operation in operations:
        rows = [row for row in record.rows if row.operation == operation and row.layers]
        if layers - {layer for row in rows if read_order(row, "step") != "same" for layer in row.layers}:
            return ""
    return f", in all {len(layers)} layers"


def predict(record: LoweringRecord, attribution: Mapping[str, Any]) -> list[Prediction]:
    """What the fenced programs' forms say of each class, beside what the attribution experiment measured."""
    found = []
    for operation, variant in ALONE.items():
        figures = attribution["variants"].get(variant)
        if figures is None or not any(row.operation == operation for row in record.forms):
            continue
        for arm, forms in ARMS.items():
            order = join_orders(o for form in forms if (o := judge(record, record.forms, operation, form)) is not None)
            found.append(Prediction(operation, arm, order, figures["moved"][arm], figures["tokens"]))
    return found


def write_predictions(study: Study) -> list[Block]:
    """Prediction against measurement, for each run of the attribution experiment with a map of its programs."""
    found = [(c["name"], made) for c in study["conditions"] if (made := _predict_run(study, c))]
    if not found:
        return []
    by_name = {c["name"]: c for c in study["conditions"]}
    rows = [[name, *_count(made)] for name, made in found]
    blocks: list[Block] = [
        Table(["run", "predictions that hold", "nothing predicted"], rows, "predictions and measurement")
    ]
    for name, made in found:
        cells = [[p.operation, p.arm, PREDICTED[p.order], f"{p.moved} of {p.steps}", HOLDS[p.holds]] for p in made]
        head = ["operation", "arm", "predicted", "steps with other bits", "holds"]
        blocks.append(Table(head, cells, f"{name}: bits that change when a class alone is aligned"))
        blocks += [Paragraph(f"{said}.") for said in explain_orders(study, [by_name[name]])]
        if wrong := [p for p in made if p.holds is False]:
            told = (
                f"{p.operation}, {p.arm} arm: {PREDICTED[p.order]}, but {p.moved} of {p.steps} steps" for p in wrong
            )
            blocks.append(Paragraph(f"The map or its reading is wrong in {'; '.join(told)}."))
    return blocks


def _predict_run(study: Study, condition: Condition) -> list[Prediction]:
    attribution = condition.get("attribution")
    if not attribution or not attribution["variants"] or (record := find_map(study, condition)) is None:
        return []
    shapes = record.shapes
    if shapes.prefill not in attribution["prefill"] or shapes.slots not in attribution["slots"]:
        return []  # it is of other programs
    return predict(record, attribution)


def _count(made: Sequence[Prediction]) -> tuple[str, str]:
    told = [one for one in made if one.holds is not None]
    return f"{sum(bool(one.holds) for one in told)} of {len(told)}", str(len(made) - len(told))


def write_maps(study: Study) -> list[Block]:
    """All maps at a glance, and which classes have other kernels in maps that differ in an option or a flag alone."""
    maps = [(c, restore(c["lowering"])) for c in study["conditions"] if "lowering" in c]
    if len(maps) < 2:
        return []
    rows = []
    for condition, record in maps:
        told = [list_orders(record, "step"), list_orders(record, "prompt")]
        cells = [", ".join(by.get(order, [])) or "-" for by in told for order in ("different", "not told", "same")]
        rows.append([condition["name"], str(record.device.get("kind")), *cells[:3], cells[5]])
    head = ["map", "device", "another order", "not told", "the same order", "the same, the prompt's rows"]
    title = "one row of a step beside all rows of the uncached arm"
    return [Table(head, rows, title, "wrap"), *_write_changes(maps)]


def _write_changes(maps: Sequence[tuple[Condition, LoweringRecord]]) -> list[Block]:
    rows = []
    for (one, first), (other, second) in itertools.combinations(maps, 2):
        alike = ("regime", "shapes", "target")
        same = all(one[name] == other[name] for name in ("model", "device"))
        same = same and first.precision["activation"] == second.precision["activation"]
        if same and all(getattr(first, name) == getattr(second, name) for name in alike):
            rows.append([one["name"], other["name"], ", ".join(find_changes(first, second)) or "none"])
    head, title = ["map", "beside", "classes with other kernels"], "what an option or a flag changed"
    return [Table(head, rows, title)] if rows else []
