"""Schema of a record of experiment 'parity': one problem in four cells. Imports neither jax nor flax.

::

    {"experiment": "parity", "problem": int, "key": ["parity", problem],
     "prompt_tokens": int, "prompt_sha256": str, "shapes": {...}, "sampling": {...}, "headroom": {...},
     "attention": str, "versions": {package: str}, "torch_uncached": str,
     "status": "ok" | "invalid", "invalid": null | {...}, "tokens": [int],
     "choices": null | {cell: [int]}, "pairs": null | {pair: comparison}, "cosine": null | [float | null],
     "layers": null | {"bit_equal": {cell: int}, "distance": {pair: {"mean" | "max": [float]}}}}

What has the name of a field in a sample of 'divergence' is as there (jaxkv.schemas). All cells follow `tokens`, those
of JAX's cached arm, and every list has one entry a token. `choices` is each cell's argmax. A pair's first cell is the
reference of its comparison. `cosine` is between what the cache does to the logits in the two frameworks: JAX's cached
minus uncached logits and PyTorch's, each less its mean; null where either is zero.

`distance` is of the residual stream as it enters each of L layers and the final norm, in the rows that give the
logits: ||a - b|| over the root mean square of ||a|| and ||b||, mean and largest over the tokens. It is measured by
programs that also give out the stream; `bit_equal` counts the tokens at which their logits have the bits of the cell's
own program.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from jaxkv.schemas import choose, fail, get_field, require_null, validate_comparison, validate_setting, validate_tokens

CELLS = ("jax uncached", "jax cached", "torch uncached", "torch cached")


def name_pair(first: str, second: str) -> str:
    """The name of a pair of cells."""
    return f"{first} | {second}"


PAIRS = {name_pair(a, b): (a, b) for a, b in itertools.combinations(CELLS, 2)}
CACHE_PAIRS = {"jax": "jax uncached | jax cached", "torch": "torch uncached | torch cached"}
FRAMEWORK_PAIRS = {"uncached": "jax uncached | torch uncached", "cached": "jax cached | torch cached"}


def _check_names(record: Any, field: str, names: Any) -> None:
    found = get_field(record, field, "dict")
    if set(found) != set(names):
        fail(field, f"expected {', '.join(names)}, got {', '.join(map(str, found)) or 'nothing'}")


def _check_numbers(record: Any, field: str, *, least: float, null: bool = False) -> int:
    column = get_field(record, field, "list")
    for index, value in enumerate(column):
        if value is None and null:
            continue
        here = f"{field}[{index}]"
        if get_field({here.replace(".", "/"): value}, here.replace(".", "/"), "float") < least:
            fail(here, f"{value} is below {least}")
    return len(column)


def validate_parity(record: Mapping[str, Any]) -> None:
    """Checks a record against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    choose(record, "experiment", ("parity",))
    problem = get_field(record, "problem", "count")
    if list(get_field(record, "key", "list")) != ["parity", problem]:
        fail("key", f"expected ['parity', {problem}], got {record['key']!r:.60}")
    get_field(record, "attention", "str")
    get_field(record, "torch_uncached", "str")
    for package in get_field(record, "versions", "dict"):
        get_field(record["versions"], package, "str")
    status = validate_setting(record)
    steps = validate_tokens(record, "tokens")
    if status == "invalid":
        require_null(record, ["choices", "pairs", "layers"])
        if record.get("cosine") is not None:
            fail("cosine", "an invalid sample has no agreement to state; expected null")
        return
    _check_names(record, "choices", CELLS)
    lengths = {f"choices.{cell}": validate_tokens(record, f"choices.{cell}") for cell in CELLS}
    _check_names(record, "pairs", PAIRS)
    lengths |= {f"pairs.{pair}": validate_comparison(record, f"pairs.{pair}") for pair in PAIRS}
    lengths["cosine"] = _check_numbers(record, "cosine", least=-1.000001, null=True)
    for field, length in lengths.items():
        if length != steps:
            fail(field, f"{length} entries beside {steps} tokens")
    _check_names(record, "layers.bit_equal", CELLS)
    for cell in CELLS:
        if get_field(record, f"layers.bit_equal.{cell}", "count") > steps:
            fail(f"layers.bit_equal.{cell}", f"more than {steps} tokens")
    _check_names(record, "layers.distance", PAIRS)
    depths = {
        _check_numbers(record, f"layers.distance.{pair}.{part}", least=0) for pair in PAIRS for part in ("mean", "max")
    }
    if len(depths) != 1:
        fail("layers.distance", f"lists of unequal length: {sorted(depths)}")
