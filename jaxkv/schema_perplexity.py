"""Schema of a record of experiment 'perplexity': one window of a text. Imports neither jax nor flax.

::

    {"experiment": "perplexity", "problem": int, "change": str, "seed": int, "key": [experiment, problem, change, seed],
     "spec": null | error | quant,
     "prompt_tokens", "prompt_sha256", "shapes", "sampling", "headroom", "status", "invalid": as in 'divergence',
     "tokens_sha256": str, "steps": int, "tokens": int, "bytes": int, "words": int,
     "nats": null | {"cached": float, "uncached": float},
     "logits": null | {"kl": float, "flips": int, "max_abs": float, "bit_equal": int},
     "cache": {"bytes": int, "written": int, "bits": float, "exact_bits": float, "packed": float},
     "saturated": null | {"k": int, "v": int, "elements": int}}

`change`, `seed` and `spec` say what was done to the cached arm's cache, "none", 0 and null if nothing. They, `cache`
and `saturated` are as in jaxkv.schema_injection; `written` are the window's tokens but the last, fed to nobody.
`problem` is the window's place, `prompt_tokens` the tokens given to it, `tokens` those scored after them, and `bytes`
and `words` what these stand for in the text (jaxkv.tasks.perplexity). `nats` is the sum of -ln p over the scored
tokens, of an arm that is fed the text's own tokens: cached one by one through the cache, uncached by recomputing each
prefix. `logits` sets the cached arm beside the uncached one: sums over `tokens` (KL(uncached || cached) in nats) and
the largest difference. `sampling` decides nothing here. Invalid samples have no figures.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.schema_injection import validate_cache, validate_spec
from jaxkv.schemas import choose, fail, get_field, require_null, validate_setting

ARMS = ("cached", "uncached")
FIGURES = ("nats", "logits")


def validate_perplexity(record: Mapping[str, Any]) -> None:
    """Checks a record against the schema above.

    Raises:
      ValueError: starts with the dotted name of the first field at fault.
    """
    choose(record, "experiment", ("perplexity",))
    problem = get_field(record, "problem", "count")
    key = ["perplexity", problem, get_field(record, "change", "str"), get_field(record, "seed", "int")]
    if list(get_field(record, "key", "list")) != key:
        fail("key", f"expected {key}, got {record['key']!r:.60}")
    validate_spec(record)
    validate_cache(record)
    status = validate_setting(record)
    get_field(record, "tokens_sha256", "str")
    tokens, steps = get_field(record, "tokens", "count"), get_field(record, "steps", "count")
    if not tokens:
        fail("tokens", "nothing was scored")
    for name in ("bytes", "words"):
        get_field(record, name, "count")
    if status == "invalid":
        require_null(record, FIGURES)
        return
    if steps != tokens:
        fail("steps", f"{steps} beside {tokens} tokens to score")
    for arm in ARMS:
        if get_field(record, f"nats.{arm}", "float") < 0:
            fail(f"nats.{arm}", "negative")
    for figure in ("kl", "max_abs"):
        if get_field(record, f"logits.{figure}", "float") < 0:
            fail(f"logits.{figure}", "negative")
    for figure in ("flips", "bit_equal"):
        if get_field(record, f"logits.{figure}", "count") > tokens:
            fail(f"logits.{figure}", f"more than {tokens} tokens")
    if record["logits"]["bit_equal"] == tokens and record["nats"]["cached"] != record["nats"]["uncached"]:
        fail("nats", "the arms differ although all their logits are equal")
