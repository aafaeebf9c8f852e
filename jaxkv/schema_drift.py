"""Schema of a record of experiment 'drift': one problem. Imports neither jax nor flax.

::

    {"experiment": "drift", "problem": int, "key": ["drift", problem],
     "prompt_tokens", "prompt_sha256", "shapes", "sampling", "headroom", "status", "invalid": as in 'divergence',
     "tokens_sha256": str, "steps": int, "heads": {"query": int, "kv": int}, "num_layers": int,
     "instrumented_bit_equal": null | {"figures" | "walk": {"cached" | "uncached": int}},
     "places": null | {"prompt" | "decoded": int},
     "layers": null | layers, "logits": null | logits, "grid": null | grid,
     "first": null | {"prompt" | "decoded": null | difference}, "path": null | path,
     "repeated": null | {"layers": layers, "logits": logits}}

    layers = {tensor: {"prompt" | "decoded": {"relative" | "cosine" | "max_abs": [float], "bit_equal": [int]}}}
    logits = {"kl": float, "flips": int, "max_abs": float, "bit_equal": int}
    grid = {"bins": [[begin, end]], tensor: {"relative" | "cosine" | "bit_equal": [[float]]}}
    difference = {"op": str, "layer": int | null, "position": int, "dtypes": [str, str], "max_abs": float,
                  "relative": float, "places": int}
    path = {"name": [str], "relative": [float], "max_abs": [float], "bit_equal": [int]}

Both arms run along the cached arm's tokens; every figure sets the cached arm's value beside the uncached one's.
`tensor` is one of TENSORS, its columns have one entry a layer, `resid_pre` one more, after the last layer.
`relative` is the L2 norm of the difference over that of the uncached value, `cosine` 1 - cos of their angle, both
means over positions; `max_abs` the largest difference; `bit_equal` the positions at which all bits are equal.
`places` counts positions: of the prompt, and of generated tokens that were fed back. A segment without places has
columns of null. `grid` has the same by bins of positions [begin, end) of the text, a row a layer; its `bit_equal` is a
share. `first` is the first value, in order of execution, that differs in bits or dtype. `path` lists every value from
there to the logits over the decoded positions. `logits` are sums over `steps` (KL(uncached || cached) in nats) and the
largest difference. `repeated` is the equal model whose K/V heads are repeated until there is one for each query head;
null if that is the model itself. `first` and `path` come from a `walk` that watches every value, the other `figures`
from one that watches TENSORS alone: the less is read, the nearer a program stays to the arm's own.
`instrumented_bit_equal` counts the steps at which the arm so watched has the logits of the arm unwatched, bit for bit.
Invalid samples have no figures.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.schemas import choose, fail, get_field, require_null, validate_setting

TENSORS = ("resid_pre", "k", "v", "attn_out", "mlp_out")
SEGMENTS = ("prompt", "decoded")
WATCHED = ("figures", "walk")
FIGURES = ("instrumented_bit_equal", "places", "layers", "logits", "grid", "first", "path", "repeated")


def _check_column(record: Any, field: str, length: int, most: float | None = None) -> list[Any]:
    column = get_field(record, field, "list")
    if len(column) != length:
        fail(field, f"expected {length} entries, got {len(column)}")
    for index, value in enumerate(column):
        if get_field({"x": value}, "x", "float") < 0 or (most is not None and value > most):
            fail(f"{field}[{index}]", f"out of range: {value!r:.60}")
    return column


def _validate_layers(record: Any, field: str, places: Mapping[str, int], layers: int) -> None:
    for tensor in TENSORS:
        length = layers + (tensor == "resid_pre")
        for segment in SEGMENTS:
            name = f"{field}.{tensor}.{segment}"
            if not places[segment]:
                if get_field(record, name, "dict", optional=True) is not None:
                    fail(name, "figures of no place; expected null")
                continue
            for figure in ("relative", "cosine", "max_abs"):
                _check_column(record, f"{name}.{figure}", length)
            equal = _check_column(record, f"{name}.bit_equal", length, places[segment])
            for index, value in enumerate(get_field(record, f"{name}.relative", "list")):
                if (equal[index] == places[segment]) and value:
                    fail(f"{name}.bit_equal[{index}]", "everywhere, beside a difference")


def _validate_logits(record: Any, field: str) -> None:
    for figure in ("kl", "max_abs"):
        if get_field(record, f"{field}.{figure}", "float") < 0:
            fail(f"{field}.{figure}", "negative")
    for figure in ("flips", "bit_equal"):
        if get_field(record, f"{field}.{figure}", "count") > record["steps"]:
            fail(f"{field}.{figure}", f"more than {record['steps']} steps")


def _validate_grid(record: Any, layers: int) -> None:
    bins = get_field(record, "grid.bins", "list")
    ends: Sequence[Any] = [0]
    for index, pair in enumerate(bins):
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] != ends[-1] or not pair[0] < pair[1]:
            fail(f"grid.bins[{index}]", f"expected [{ends[-1]}, end], got {pair!r:.60}")
        ends = pair
    if ends[-1] != sum(record["places"].values()):
        fail("grid.bins", f"they end at {ends[-1]}, not with the text")
    for tensor in TENSORS:
        for figure in ("relative", "cosine", "bit_equal"):
            rows = get_field(record, f"grid.{tensor}.{figure}", "list")
            if len(rows) != layers + (tensor == "resid_pre"):
                fail(f"grid.{tensor}.{figure}", f"{len(rows)} layers")
            for row in rows:
                _check_column({"row": row}, "row", len(bins), 1 if figure == "bit_equal" else None)


def _validate_difference(record: Any, field: str) -> None:
    if get_field(record, field, "dict", optional=True) is None:
        return
    get_field(record, f"{field}.op", "str")
    get_field(record, f"{field}.layer", "count", optional=True)
    get_field(record, f"{field}.position", "count")
    for figure in ("max_abs", "relative"):
        if get_field(record, f"{field}.{figure}", "float") < 0:
            fail(f"{field}.{figure}", "negative")
    get_field(record, f"{field}.places", "count")
    if len(get_field(record, f"{field}.dtypes", "list")) != 2:
        fail(f"{field}.dtypes", "expected two")


def validate_drift(record: Mapping[str, Any]) -> None:
    """Checks a record against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    choose(record, "experiment", ("drift",))
    problem = get_field(record, "problem", "count")
    if list(get_field(record, "key", "list")) != ["drift", problem]:
        fail("key", f"expected ['drift', {problem}], got {record['key']!r:.60}")
    status = validate_setting(record)
    get_field(record, "tokens_sha256", "str")
    layers, steps = get_field(record, "num_layers", "count"), get_field(record, "steps", "count")
    query, kv = get_field(record, "heads.query", "count"), get_field(record, "heads.kv", "count")
    if status == "invalid":
        require_null(record, FIGURES)
        return
    for name in (f"{kind}.{arm}" for kind in WATCHED for arm in ("cached", "uncached")):
        if get_field(record, f"instrumented_bit_equal.{name}", "count") > steps:
            fail(f"instrumented_bit_equal.{name}", f"more than {steps} steps")
    places = {segment: get_field(record, f"places.{segment}", "count") for segment in SEGMENTS}
    _validate_layers(record, "layers", places, layers)
    _validate_logits(record, "logits")
    _validate_grid(record, layers)
    for segment in SEGMENTS:
        _validate_difference(record, f"first.{segment}")
    names = get_field(record, "path.name", "list")
    for figure in ("relative", "max_abs", "bit_equal"):
        _check_column(record, f"path.{figure}", len(names))
    repeated = get_field(record, "repeated", "dict", optional=True)
    if (repeated is None) != (query == kv):
        fail("repeated", f"{'missing' if repeated is None else 'present'} beside {kv} K/V heads of {query}")
    if repeated is not None:
        _validate_layers(record, "repeated.layers", places, layers)
        _validate_logits(record, "repeated.logits")
