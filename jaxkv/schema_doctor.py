"""Schema of a record of experiment 'doctor': one examination of one device. Imports neither jax nor flax.

::

    {"experiment": "doctor", "key": ["doctor", device kind],
     "device": {"platform": str, "kind": str, "runtime": str, "preallocated": bool},
     "environment": provenance.environment(), "compiler_options": {...}, "spec": DoctorSpec.to_json(),
     "dtypes": {"fp16" | "bf16" | "fp32": {
         "held": {"param" | "operand" | "activation": str},
         "rows" | "rows_from_most" | "slots" | "batch" | "neighbours" | "following" | "rerun" | "place":
             {operation: {count: figure}},
         "process": {operation: {row count: bool}},
         "operand_bits": {precision: {row count: float | null}},                        fp32 only
         "sum_bits": {result dtype: {row count: {"exact" | "rounded": float | null}}},  16 bits only
         "casts_dropped": {"ours" | "default": {where: share}}}},                       16 bits only
     "process": {"status": "ok" | "cannot tell", "reason": str | null},
     "missing": {program: reason}, "compilations": int, "compile_seconds": {program: float}, "seconds": float}

    figure = {"elements": int, "nonfinite": int, "differ": int | null, "max_ulp": float | null}

What was not measured is absent or empty. `differ` and `max_ulp` are null where an element is not finite.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

QUESTIONS = ("rows", "rows_from_most", "slots", "batch", "neighbours", "following", "rerun", "place")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "key": list,
    "device": dict,
    "environment": dict,
    "compiler_options": dict,
    "spec": dict,
    "dtypes": dict,
    "process": dict,
    "missing": dict,
    "compilations": int,
    "compile_seconds": dict,
    "seconds": (int, float),
}


def _fail(field: str, message: str) -> None:
    raise ValueError(f"{field}: {message}")


def _leaves(values: Any, field: str, depth: int) -> Iterator[tuple[str, Any]]:
    """What lies `depth` mappings deep, with its dotted name."""
    if depth and not isinstance(values, Mapping):
        _fail(field, f"expected dict, got {values!r:.60}")
    if not depth:
        yield field, values
        return
    for name, value in values.items():
        yield from _leaves(value, f"{field}.{name}", depth - 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_figure(figure: Any, field: str) -> None:
    if not isinstance(figure, Mapping) or set(figure) != {"elements", "nonfinite", "differ", "max_ulp"}:
        _fail(field, f"not a figure: {figure!r:.60}")
    for name in ("elements", "nonfinite"):
        if not isinstance(figure[name], int) or isinstance(figure[name], bool) or figure[name] < 0:
            _fail(f"{field}.{name}", f"expected count, got {figure[name]!r:.60}")
    if figure["elements"] == 0:
        _fail(f"{field}.elements", "nothing was compared")
    if figure["nonfinite"]:
        if figure["differ"] is not None or figure["max_ulp"] is not None:
            _fail(f"{field}.differ", "numbers that are not finite do not agree; expected null")
        return
    if not isinstance(figure["differ"], int) or not 0 <= figure["differ"] <= figure["elements"]:
        _fail(f"{field}.differ", f"expected count of at most {figure['elements']}, got {figure['differ']!r:.60}")
    if not _is_number(figure["max_ulp"]) or figure["max_ulp"] < 0 or (figure["max_ulp"] and not figure["differ"]):
        _fail(f"{field}.max_ulp", f"{figure['max_ulp']!r:.60} beside {figure['differ']} that differ")


def validate_doctor(record: Mapping[str, Any]) -> None:
    """Checks a record against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    if record.get("experiment") != "doctor":
        _fail("experiment", f"expected 'doctor', got {record.get('experiment')!r:.60}")
    for name, kind in _FIELDS.items():
        if name not in record:
            _fail(name, "missing")
        if not isinstance(record[name], kind) or isinstance(record[name], bool):
            _fail(name, f"got {record[name]!r:.60}")
    if record["key"] != ["doctor", record["device"].get("kind")]:
        _fail("key", f"expected doctor and the device's kind, got {record['key']!r:.60}")
    if record["process"].get("status") not in ("ok", "cannot tell"):
        _fail("process.status", f"got {record['process'].get('status')!r:.60}")
    for dtype, values in record["dtypes"].items():
        where = f"dtypes.{dtype}"
        for name in ("held", "process", *QUESTIONS):
            if name not in values:
                _fail(f"{where}.{name}", "missing")
        for question in QUESTIONS:
            for field, figure in _leaves(values[question], f"{where}.{question}", 2):
                _check_figure(figure, field)
        for field, equal in _leaves(values["process"], f"{where}.process", 2):
            if not isinstance(equal, bool):
                _fail(field, f"expected bool, got {equal!r:.60}")
        for name, depth in (("operand_bits", 2), ("sum_bits", 3), ("casts_dropped", 2)):
            for field, number in _leaves(values.get(name, {}), f"{where}.{name}", depth):
                if not _is_number(number) and (number is not None or name == "casts_dropped"):
                    _fail(field, f"expected a finite number, got {number!r:.60}")
