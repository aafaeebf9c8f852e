"""Schema of a record of experiment 'patching': one problem, one direction, one patch. Imports neither jax nor flax.

::

    {"experiment": "patching", "problem": int, "key": ["patching", problem, direction, patch],
     "direction": one of DIRECTIONS, "patch": one of PATCHES,
     "prompt_tokens", "prompt_sha256", "shapes", "sampling", "headroom", "status", "invalid": as in 'divergence',
     "tokens_sha256": str, "steps": int, "heads": {"query": int, "kv": int}, "num_layers": int,
     "instrumented_bit_equal": null | {"cached" | "uncached": int},
     "gap": null | {"kl": float, "flips": int, "bit_equal": int},
     "all": null | figures, "unchanged": null | int, "by_layer": null | by_layer, "grid": null | grid,
     "trajectory": null | {"steps": int, "parted": int, "until": int | null, "agreeing": int | null}}

    figures = {"kl": float, "recovered": int, "broken": int, "bit_equal": int}
    by_layer = {"layer": [int], "kl": [float], "recovered": [int], "broken": [int], "bit_equal": [int]}
    grid = {"layer": [int], "bins": [[begin, end]], "kl": [[float]]}

"A into B": values of arm A replace those of B. Both run along the cached arm's tokens. `gap` sets the unpatched B
beside A and `figures` the patched B: the sum over `steps` of KL(A || B) in nats, steps with equal logits, and of the
argmax flips in `gap` how many are `recovered`; `broken` are flips that the patch makes. `all` patches layers 0 to
L - 1 at once, `by_layer` one at a time; for the residual stream layer l is the stream entering it, and L what leaves
the last. `unchanged` counts the steps at which the patched B has the bits of the unpatched. `grid` patches one layer
at the positions [begin, end) of one bin, a row a layer. `trajectory` is null where A and B generate the same tokens.
Else B, free and patched in all layers with the values of A's own free run, first departs from A's tokens at `until`
(null: never), the unpatched one at `parted`; of A's `steps` - `parted` tokens from there on `agreeing` are met. Into
uncached, `until` comes from following A's tokens, which is the same up to there, and `agreeing` is null.
`instrumented_bit_equal` counts the steps at which an arm's program that can be patched, unpatched, has the logits of
the arm's own. Invalid samples have no figures.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv.schemas import choose, fail, get_field, require_null, validate_setting

DIRECTIONS = INTO_CACHED, INTO_UNCACHED = "uncached into cached", "cached into uncached"


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a patch replaces.

    Attributes:
      residual: 'now' at the newest position of each step, leaving no trace in the cache; 'everywhere' at all positions,
        prompt included; None not at all.
      state: of 'k' and 'v', at all positions.
      through: whether the stream after the last layer and after the final norm is replaced as well.
      itself: whether the values are the recipient's own.
    """

    residual: str | None
    state: tuple[str, ...] = ()
    through: bool = False
    itself: bool = False


RESIDUAL_NOW, RESIDUAL, KEYS, VALUES, KEYS_VALUES = "residual now", "residual", "K", "V", "K and V"
EVERYTHING, ITSELF = "everything", "itself"
PATCHES = {
    RESIDUAL_NOW: Kind("now"),
    RESIDUAL: Kind("everywhere"),
    KEYS: Kind(None, ("k",)),
    VALUES: Kind(None, ("v",)),
    KEYS_VALUES: Kind(None, ("k", "v")),
    "residual now, K and V": Kind("now", ("k", "v")),
    "residual, K and V": Kind("everywhere", ("k", "v")),
    EVERYTHING: Kind("everywhere", ("k", "v"), through=True),
    ITSELF: Kind("everywhere", ("k", "v"), through=True, itself=True),
}
CONTROLS = (EVERYTHING, ITSELF)
COUNTS = ("recovered", "broken", "bit_equal")
FIGURES = ("instrumented_bit_equal", "gap", "all", "unchanged", "by_layer", "grid", "trajectory")


def _check_kl(record: Any, field: str) -> None:
    if get_field(record, field, "float") < 0:
        fail(field, "negative")


def _check_counts(record: Any, field: str, steps: int, flips: int) -> None:
    for name, most in zip(COUNTS, (flips, steps - flips, steps), strict=True):
        if get_field(record, f"{field}.{name}", "count") > most:
            fail(f"{field}.{name}", f"more than {most}")


def _validate_by_layer(record: Any, steps: int, flips: int) -> None:
    names = ("layer", "kl", *COUNTS)
    columns = {name: get_field(record, f"by_layer.{name}", "list") for name in names}
    if len({len(column) for column in columns.values()}) != 1:
        fail("by_layer", "lists of unequal length")
    for index, layer in enumerate(columns["layer"]):
        here = {"by_layer": {name: column[index] for name, column in columns.items()}}
        get_field(here, "by_layer.layer", "count")
        if layer > record["num_layers"]:
            fail(f"by_layer.layer[{index}]", f"more than {record['num_layers']}")
        _check_kl(here, "by_layer.kl")
        _check_counts(here, "by_layer", steps, flips)


def _validate_grid(record: Any) -> None:
    layers, bins = get_field(record, "grid.layer", "list"), get_field(record, "grid.bins", "list")
    rows = get_field(record, "grid.kl", "list")
    if [len(row) for row in rows] != [len(bins)] * len(layers):
        fail("grid.kl", f"not {len(layers)} rows of {len(bins)}")
    for row in rows:
        for value in row:
            _check_kl({"grid": {"kl": value}}, "grid.kl")


def _validate_trajectory(record: Any) -> None:
    if get_field(record, "trajectory", "dict", optional=True) is None:
        return
    steps, parted = (get_field(record, f"trajectory.{name}", "count") for name in ("steps", "parted"))
    agreeing = get_field(record, "trajectory.agreeing", "count", optional=True)
    if agreeing is not None and agreeing > max(steps - parted, 0):
        fail("trajectory.agreeing", f"more than the {steps - parted} tokens there are")
    if agreeing is None and record["direction"] == INTO_CACHED:
        fail("trajectory.agreeing", "expected count, got None")
    get_field(record, "trajectory.until", "count", optional=True)


def validate_patching(record: Mapping[str, Any]) -> None:
    """Checks a record against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    choose(record, "experiment", ("patching",))
    problem = get_field(record, "problem", "count")
    key = ["patching", problem, choose(record, "direction", DIRECTIONS), choose(record, "patch", tuple(PATCHES))]
    if list(get_field(record, "key", "list")) != key:
        fail("key", f"expected {key}, got {record['key']!r:.60}")
    status = validate_setting(record)
    get_field(record, "tokens_sha256", "str")
    steps = get_field(record, "steps", "count")
    for name in ("num_layers", "heads.query", "heads.kv"):
        get_field(record, name, "count")
    if status == "invalid":
        require_null(record, FIGURES)
        return
    for arm in ("cached", "uncached"):
        if get_field(record, f"instrumented_bit_equal.{arm}", "count") > steps:
            fail(f"instrumented_bit_equal.{arm}", f"more than {steps} steps")
    _check_kl(record, "gap.kl")
    flips = get_field(record, "gap.flips", "count")
    if flips > steps or get_field(record, "gap.bit_equal", "count") > steps - flips:
        fail("gap", f"more flips and equal steps than {steps} steps")
    _check_kl(record, "all.kl")
    _check_counts(record, "all", steps, flips)
    if get_field(record, "unchanged", "count") > steps:
        fail("unchanged", f"more than {steps} steps")
    if get_field(record, "by_layer", "dict", optional=True) is not None:
        _validate_by_layer(record, steps, flips)
    if get_field(record, "grid", "dict", optional=True) is not None:
        _validate_grid(record)
    _validate_trajectory(record)
