"""Schema of a record of experiment 'foreign': one problem decoded elsewhere. Imports neither jax nor flax.

::

    {"experiment": "foreign", "problem": int, "key": ["foreign", problem],
     "framework": str, "versions": {package: str}, "device": str | null, "precision": str | null,
     "attention": str | null, "prompt_tokens": int | null, "prompt_sha256": str,
     "sampling": null | as in 'divergence',
     "arms": {"cached" and/or "uncached": {
         "tokens": [int], "text": str | null, "stop": null | "eos" | "length" | "stop_string",
         "scores": null | as in 'divergence',
         "top": null | {"kind": "logprobs" | "logits", "steps": [[[token id, value]]]}}},
     "free_running": null | as in 'divergence', "label_change": null | as in 'divergence',
     "shared_prefix": null | {"flip": [bool], "margin": [float | null], "max_abs": [float | null]}}

`free_running` is there if both arms are. `shared_prefix` compares the arms' `top` at the steps at which both had the
same tokens before them, the first differing one included: whether their first ids differ, the uncached arm's first
value minus its second, and the largest difference among ids that both list (null where there is no second, or no common
id). `top` is what the engine listed, so none of this is a divergence over the whole vocabulary.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxkv.schemas import (
    LABEL_CHANGES,
    SAMPLERS,
    SCORERS,
    choose,
    fail,
    get_field,
    validate_free_running,
    validate_tokens,
)

ARMS = ("cached", "uncached")
STOPS = ("eos", "length", "stop_string")
KINDS = ("logprobs", "logits")


def validate_sampling(record: Any) -> None:
    """Checks the sampling of a record, where it is known."""
    if get_field(record, "sampling", "dict", optional=True) is not None:
        choose(record, "sampling.sampler", SAMPLERS)
        get_field(record, "sampling.temperature", "float")
        get_field(record, "sampling.top_k", "count", optional=True)
        get_field(record, "sampling.top_p", "float", optional=True)
        get_field(record, "sampling.seed", "int", optional=True)


def validate_versions(record: Any) -> None:
    """Checks versions: at least one, each a string."""
    versions = get_field(record, "versions", "dict")
    if not versions:
        fail("versions", "empty")
    for package, version in versions.items():
        if not isinstance(version, str) or not version:
            fail(f"versions.{package}", f"expected str, got {version!r:.60}")


def validate_hash(record: Any) -> None:
    """Checks prompt_sha256."""
    digest = get_field(record, "prompt_sha256", "str")
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        fail("prompt_sha256", f"expected 64 lower-case hex digits, got {digest!r:.70}")


def validate_top(steps: Any, field: str, count: int) -> None:
    """Checks what an engine listed: for each of `count` tokens, [id, value] pairs, the largest value first."""
    if not isinstance(steps, list) or len(steps) != count:
        fail(field, f"expected a list with one entry for each of {count} tokens")
    for index, pairs in enumerate(steps):
        here = f"{field}[{index}]"
        if not isinstance(pairs, list) or not pairs:
            fail(here, f"expected a list of [token id, value] pairs, got {pairs!r:.60}")
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not _is_id(pair[0]) or not _is_finite(pair[1]):
                fail(here, f"expected [token id, finite number], got {pair!r:.60}")
        ids, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if len(set(ids)) < len(ids):
            fail(here, "a token id twice")
        if values != sorted(values, reverse=True):
            fail(here, "not in falling order")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _validate_arm(record: Any, arm: str) -> None:
    count = validate_tokens(record, f"arms.{arm}.tokens")
    get_field(record, f"arms.{arm}.text", "str", optional=True)
    if get_field(record, f"arms.{arm}.stop", "str", optional=True) is not None:
        choose(record, f"arms.{arm}.stop", STOPS)
    if get_field(record, f"arms.{arm}.scores", "dict", optional=True) is not None:
        for scorer in SCORERS:
            get_field(record, f"arms.{arm}.scores.{scorer}.answer", "str", optional=True)
            get_field(record, f"arms.{arm}.scores.{scorer}.correct", "bool")
    if get_field(record, f"arms.{arm}.top", "dict", optional=True) is not None:
        choose(record, f"arms.{arm}.top.kind", KINDS)
        validate_top(record["arms"][arm]["top"].get("steps"), f"arms.{arm}.top.steps", count)


def validate_foreign(record: Mapping[str, Any]) -> None:
    """Checks a record against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    choose(record, "experiment", ("foreign",))
    problem = get_field(record, "problem", "count")
    if list(get_field(record, "key", "list")) != ["foreign", problem]:
        fail("key", f"expected ['foreign', {problem}], got {record['key']!r:.60}")
    get_field(record, "framework", "str")
    validate_versions(record)
    for name in ("device", "precision", "attention"):
        get_field(record, name, "str", optional=True)
    get_field(record, "prompt_tokens", "count", optional=True)
    validate_hash(record)
    validate_sampling(record)
    arms = get_field(record, "arms", "dict")
    if not arms or not set(arms) <= set(ARMS):
        fail("arms", f"expected {' and/or '.join(ARMS)}, got {', '.join(map(str, arms)) or 'none'}")
    for arm in arms:
        _validate_arm(record, arm)
    if (get_field(record, "free_running", "dict", optional=True) is None) == (len(arms) == 2):
        fail("free_running", "belongs to records of two arms, and to all of them")
    validate_free_running(record, {arm: arms[arm]["tokens"] for arm in ARMS} if len(arms) == 2 else None)
    if get_field(record, "label_change", "dict", optional=True) is not None:
        for scorer in SCORERS:
            choose(record, f"label_change.{scorer}", LABEL_CHANGES)
    if get_field(record, "shared_prefix", "dict", optional=True) is not None:
        lengths = {len(get_field(record, f"shared_prefix.{n}", "list")) for n in ("flip", "margin", "max_abs")}
        if len(lengths) != 1:
            fail("shared_prefix", f"lists of unequal length: {sorted(lengths)}")
        most = min(len(arms[arm]["tokens"]) for arm in arms)
        if len(arms) != 2 or lengths.pop() > most:
            fail("shared_prefix", f"more entries than the {most} tokens that both arms have")
        for name in ("margin", "max_abs"):
            for index, value in enumerate(record["shared_prefix"][name]):
                if value is not None and (not _is_finite(value) or value < 0):
                    fail(f"shared_prefix.{name}[{index}]", f"expected a number of at least 0, got {value!r:.60}")
