"""Schema of a record of experiment 'accumulation': one problem, one quantizer, one regime. No jax, no flax.

::

    {"experiment": "accumulation", "problem": int, "key": ["accumulation", problem, quantizer, regime],
     "prompt_tokens", "prompt_sha256", "shapes", "sampling", "headroom", "status", "invalid": as in 'divergence',
     "tokens_sha256": str, "steps": int, "num_layers": int,
     "quantizer": str, "regime": "static" | "accumulated:B" | "decode",
     "storage": {"bytes": int, "clean_bytes": int, "slots": int, "bits": float},
     "saturated": null | {"k": int, "v": int, "elements": int},
     "bins": null | [[begin, end]],
     "attention_error": null | {"error": [[float | null]]},
     "logits": null | {"kl": [float | null], "agree": [int | null], "places": [int], "kl_sum": float,
                       "agree_sum": int, "bit_equal": int},
     "stored": null | {"k" | "v": {"packed": [int], "relative": [float | null], "norm_share": [float | null]}},
     "repair": null | {"nothing" | "worst" | "others" | "everything": [[float | null]]},
     "instrumented_bit_equal": null | {"clean": int, "changed": int | null}}

The quantized run follows the clean cached run's tokens. In `static` every layer is handed the clean run's queries,
keys, values and attention output, so errors do not feed back. In `accumulated:B` the tokens after the prompt are run B
at a time, and everything later sees them as they were packed. `decode` runs them one by one.

`bins` are positions [begin, end) of the text, up to the last token fed; none crosses the end of the prompt.
`attention_error.error` has a row a layer and a column a bin: the mean over positions of |a' - a| / |a|, a the heads'
output of the clean run and a' that of the quantized one, before the output projection. `logits` compare next-token
distributions along the clean run's tokens, by the bin of the token they follow: `kl` is the mean KL(clean || quantized)
in nats, `agree` the steps with the same top token, `places` the steps; sums are over all steps. A bin without steps has
null. `stored` says, a layer an entry, how what the cache holds at the end reads beside the clean run's keys and values,
over packed tokens: their number, the L2 error over all of them relative to the clean ones' norm, and the share of the
squared error that is of norms (E_M) rather than of directions (E_D). `repair`, in `static` alone, is the attention
error when an oracle corrects the norms of no token, the worst 5 %, the other 95 %, or all (jaxkv.interventions.
repaired_cache). `storage` counts the cache's arrays for the batch at its slots, windows included, and bits per element.
`saturated` counts elements of the clean run's packed keys and values that the quantizer's format cannot hold, as in
jaxkv.schema_injection.
`instrumented_bit_equal` counts steps at which a run that was watched has the logits of the arm unwatched, bit for bit;
`changed` is of `decode` alone, whose `logits` are those of the arm. Invalid samples have no figures.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.schema_injection import validate_saturated
from jaxkv.schemas import choose, fail, get_field, require_null, validate_setting

REGIMES = re.compile(r"static|decode|accumulated:[1-9][0-9]*")
REPAIRS = ("nothing", "worst", "others", "everything")
SIDES = ("k", "v")
FIGURES = ("attention_error", "logits", "stored", "repair", "instrumented_bit_equal")


def _check_column(record: Any, field: str, length: int, most: float | None = None) -> list[Any]:
    column = get_field(record, field, "list")
    if len(column) != length:
        fail(field, f"expected {length} entries, got {len(column)}")
    for index, value in enumerate(column):
        if value is None:
            continue
        if get_field({"x": value}, "x", "float") < 0 or (most is not None and value > most):
            fail(f"{field}[{index}]", f"out of range: {value!r:.60}")
    return column


def _check_grid(record: Any, field: str, layers: int, bins: int) -> None:
    grid = get_field(record, field, "list")
    if len(grid) != layers:
        fail(field, f"{len(grid)} layers of {layers}")
    for layer, row in enumerate(grid):
        _check_column({f"{layer}": row}, f"{layer}", bins)


def _check_bins(record: Any) -> int:
    bins = get_field(record, "bins", "list")
    end: Any = 0
    for index, pair in enumerate(bins):
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] != end or not pair[0] < pair[1]:
            fail(f"bins[{index}]", f"expected [{end}, end], got {pair!r:.60}")
        end = pair[1]
    fed = record["prompt_tokens"] + max(0, record["steps"] - 1)
    if end != fed:
        fail("bins", f"they end at {end} of {fed} tokens fed")
    return len(bins)


def _validate_logits(record: Any, bins: int) -> None:
    steps = record["steps"]
    places = _check_column(record, "logits.places", bins)
    if sum(places) != steps:
        fail("logits.places", f"{sum(places)} places of {steps} steps")
    for figure in ("kl", "agree"):
        for index, value in enumerate(_check_column(record, f"logits.{figure}", bins)):
            if figure == "agree" and value is not None and value > places[index]:
                fail(f"logits.agree[{index}]", f"{value!r:.60} of {places[index]} steps")
            if (value is None) == bool(places[index]):
                fail(f"logits.{figure}[{index}]", f"{value!r:.60} beside {places[index]} steps")
    if get_field(record, "logits.kl_sum", "float") < 0:
        fail("logits.kl_sum", "negative")
    for figure in ("agree_sum", "bit_equal"):
        if get_field(record, f"logits.{figure}", "count") > steps:
            fail(f"logits.{figure}", f"more than {steps} steps")


def validate_accumulation(record: Mapping[str, Any]) -> None:
    """Checks a record against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    choose(record, "experiment", ("accumulation",))
    problem, quantizer = get_field(record, "problem", "count"), get_field(record, "quantizer", "str")
    regime = get_field(record, "regime", "str")
    if not REGIMES.fullmatch(regime):
        fail("regime", f"'{regime}' is none of static, accumulated:B, decode")
    key: Sequence[Any] = ["accumulation", problem, quantizer, regime]
    if list(get_field(record, "key", "list")) != key:
        fail("key", f"expected {key}, got {record['key']!r:.60}")
    status = validate_setting(record)
    get_field(record, "tokens_sha256", "str")
    layers, steps = get_field(record, "num_layers", "count"), get_field(record, "steps", "count")
    for figure in ("bytes", "clean_bytes", "slots"):
        get_field(record, f"storage.{figure}", "count")
    get_field(record, "storage.bits", "float")
    validate_saturated(record)
    if status == "invalid":
        require_null(record, FIGURES)
        if record.get("bins") is not None:
            fail("bins", "an invalid sample has no figures; expected null")
        return
    bins = _check_bins(record)
    _check_grid(record, "attention_error.error", layers, bins)
    _validate_logits(record, bins)
    for side in SIDES:
        packed = _check_column(record, f"stored.{side}.packed", layers)
        for figure, most in (("relative", None), ("norm_share", 1)):
            for index, value in enumerate(_check_column(record, f"stored.{side}.{figure}", layers, most)):
                if (value is None) != (not packed[index]):
                    fail(f"stored.{side}.{figure}[{index}]", f"{value!r:.60} beside {packed[index]} packed tokens")
    repair = get_field(record, "repair", "dict", optional=True)
    if repair is not None:
        if regime != "static":
            fail("repair", f"present in regime {regime}")
        for choice in REPAIRS:
            _check_grid(record, f"repair.{choice}", layers, bins)
    for run in ("clean", "changed"):
        field = f"instrumented_bit_equal.{run}"
        equal = get_field(record, field, "count", optional=run == "changed")
        if run == "changed" and (equal is None) != (regime != "decode"):
            fail(field, f"{equal!r:.60} in regime {regime}")
        if equal is not None and equal > steps:
            fail(field, f"more than {steps} steps")
