"""Schema of a record of experiment 'mitigations': one problem under one variant. Imports neither jax nor flax.

::

    {"experiment": "mitigations", "problem": int, "variant": str, "key": [experiment, problem, variant],
     "precision": Precision.to_json(), "held": {"param": str, "operand": str},
     "prompt_tokens": int, "prompt_sha256": str, "shapes": {...}, "sampling": {...}, "headroom": {...},
     "status": "ok" | "invalid", "invalid": null | {...},
     "tokens": {"cached" | "uncached" | "fp64": [int]},
     "teacher_forced": null | comparison, "free_running": null | {...},
     "distance": null | {"cached" | "uncached": {"given" | "rounded": distance}, "weights": distance}}

    distance = {"flip": [bool], "kl": [float], "rms": [float], "max_abs": [float]}

What has the name of a field in a sample of 'divergence' is as there (jaxkv.schemas). Distances are measured along the
fp64 tokens, one entry a token: from the logits of a float64 run of the weights as `given`, or as `rounded` to the
variant's param dtype; `weights` is the distance between these two runs. `kl` is KL(fp64 || arm) in nats, `rms` and
`max_abs` are of the logit difference. `held` is how weights and operands lie on the device.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.schemas import (
    DISTANCE_NUMBERS,
    choose,
    fail,
    get_field,
    require_null,
    validate_comparison,
    validate_distance,
    validate_free_running,
    validate_setting,
    validate_tokens,
)

REFERENCES = ("given", "rounded")
ARMS = ("cached", "uncached")
NUMBERS = DISTANCE_NUMBERS


def validate_mitigation(record: Mapping[str, Any]) -> None:
    """Checks a record against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    choose(record, "experiment", ("mitigations",))
    key = ["mitigations", get_field(record, "problem", "count"), get_field(record, "variant", "str")]
    if list(get_field(record, "key", "list")) != key:
        fail("key", f"expected {key}, got {record['key']!r:.60}")
    get_field(record, "precision.name", "str")
    for part in ("param", "operand"):
        get_field(record, f"held.{part}", "str")
    status = validate_setting(record)
    steps = {arm: validate_tokens(record, f"tokens.{arm}") for arm in (*ARMS, "fp64")}
    if status == "invalid":
        require_null(record, ["teacher_forced", "free_running", "distance"])
        return
    if validate_comparison(record, "teacher_forced") != steps["cached"]:
        fail("teacher_forced", f"not one entry for each of the {steps['cached']} cached tokens")
    get_field(record, "free_running", "dict")
    validate_free_running(record, record["tokens"])
    for arm in ARMS:
        for reference in REFERENCES:
            validate_distance(record, f"distance.{arm}.{reference}", steps["fp64"])
    validate_distance(record, "distance.weights", steps["fp64"])
