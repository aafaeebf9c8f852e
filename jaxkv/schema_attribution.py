"""Schema of a record of experiment 'attribution': one problem, one variant. Imports neither jax nor flax.

::

    {"experiment": "attribution", "problem": int, "key": ["attribution", problem, variant],
     "variant": one of VARIANTS, "aligned": null | {"prefill" | "decode" | "recompute": [operation class]},
     "tile": int, "prompt_tokens": int, "prompt_sha256": str, "tokens_sha256": str, "steps": int,
     "shapes": {"batch": int, "prefill": int, "slots": int, "left_pad": int},
     "sampling": as in 'divergence',
     "status": "ok" | "invalid",
     "invalid": null | {"arm": str, "layer": int | null, "op": str, "position": int | null, "step": int | null,
                        "value": "inf" | "nan"},
     "teacher_forced": null | comparison, "moved": null | {"cached": int, "uncached": int}}

`aligned` is null for the plain programs, else the classes that each program computes in tiles of `tile` rows.
`teacher_forced` compares, as in 'divergence', the variant's uncached with its cached logits along the tokens of the
plain cached arm (`tokens_sha256`, little-endian int32); it has one entry for each of `steps`. `moved` counts the steps
at which an arm's logits have other bits than in the variant 'fenced', whose operations are cut apart alike and none
aligned. Invalid samples have neither.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.schemas import validate_comparison

OP_CLASSES = ("norms", "qkv", "rope", "scores", "attention", "output", "mlp", "head")
PROGRAMS = ("prefill", "decode", "recompute")
PLAIN, FENCED, ALL = "none", "fenced", "all"
ALONE = {name: f"{name} alone" for name in (*OP_CLASSES, *PROGRAMS)}
ALL_BUT = {name: f"all but {name}" for name in OP_CLASSES}


def _list_variants() -> dict[str, dict[str, list[str]] | None]:
    def everywhere(classes: list[str]) -> dict[str, list[str]]:
        return {program: list(classes) for program in PROGRAMS}

    everything = list(OP_CLASSES)
    variants: dict[str, dict[str, list[str]] | None] = {PLAIN: None, FENCED: everywhere([])}
    variants |= {ALONE[name]: everywhere([name]) for name in OP_CLASSES}
    variants |= {ALL_BUT[name]: everywhere([c for c in OP_CLASSES if c != name]) for name in OP_CLASSES}
    variants |= {ALONE[name]: everywhere([]) | {name: everything} for name in PROGRAMS}
    return variants | {ALL: everywhere(everything)}


VARIANTS = _list_variants()  # name -> what each program aligns, in the order of the table
_FIELDS: dict[str, type] = {
    "problem": int,
    "tile": int,
    "prompt_tokens": int,
    "prompt_sha256": str,
    "tokens_sha256": str,
    "steps": int,
    "shapes": dict,
    "sampling": dict,
}


def _fail(field: str, message: str) -> None:
    raise ValueError(f"{field}: {message}")


def _check(values: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    if name not in values:
        _fail(where + name, "missing")
    value = values[name]
    count = not isinstance(value, int) or value >= 0
    if not isinstance(value, kind) or isinstance(value, bool) or not count:
        _fail(where + name, f"expected {'count' if kind is int else kind.__name__}, got {value!r:.60}")
    return value


def validate_attribution(record: Mapping[str, Any]) -> None:
    """Checks a record against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    if record.get("experiment") != "attribution":
        _fail("experiment", f"expected 'attribution', got {record.get('experiment')!r:.60}")
    for name, kind in _FIELDS.items():
        _check(record, name, kind)
    variant = _check(record, "variant", str)
    if variant not in VARIANTS:
        _fail("variant", f"'{variant}' is not one of {', '.join(VARIANTS)}")
    if list(_check(record, "key", list)) != ["attribution", record["problem"], variant]:
        _fail("key", f"expected attribution, problem and variant, got {record['key']!r:.60}")
    if record.get("aligned", ()) != VARIANTS[variant]:
        _fail("aligned", f"not what variant '{variant}' aligns: {record.get('aligned')!r:.60}")
    for name in ("batch", "prefill", "slots", "left_pad"):
        _check(record["shapes"], name, int, "shapes.")
    if record.get("status") not in ("ok", "invalid"):
        _fail("status", f"got {record.get('status')!r:.60}")
    if record["status"] == "invalid":
        for name in ("arm", "op", "value"):
            _check(_check(record, "invalid", dict), name, str, "invalid.")
        for name in ("teacher_forced", "moved"):
            if record.get(name) is not None:
                _fail(name, "an invalid sample has no agreement to state; expected null")
        return
    if record.get("invalid") is not None:
        _fail("invalid", "expected null in a sample with status ok")
    if validate_comparison(record, "teacher_forced") != record["steps"]:
        _fail("teacher_forced", f"expected {record['steps']} steps")
    for arm in ("cached", "uncached"):
        if _check(_check(record, "moved", dict), arm, int, "moved.") > record["steps"]:
            _fail(f"moved.{arm}", f"more than {record['steps']} steps")
    if variant == FENCED and any(record["moved"].values()):
        _fail("moved", "'fenced' has other bits than itself")
