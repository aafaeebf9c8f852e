"""Which operations make cached and uncached decoding part?

The plain cached arm computes one row a step, the uncached one all rows. A class of operations that is aligned is
computed in tiles of one number of rows (models/alignment.py), so that its results for a row no longer depend on how
many rows a call has. Both arms are run along the plain cached arm's tokens with no class aligned, each alone, all but
each, and all; and with all of them in the prefill, the decoding steps or the recomputation alone.

'none' is the plain programs themselves. In 'fenced' every class is cut off from its neighbours in the way that aligning
needs, and none is aligned: it tells what the cutting alone does to the numbers. All variants but 'none' are one
compiled program each for prefill, decoding and recomputation; what is aligned is an argument. A study therefore
compiles three plain programs, three of these, and the audit, for each distinct pair of prefill rows and slots.
"""

import copy
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.audit import Finding, audit_rows
from jaxkv.compare import compare_logits
from jaxkv.decode import Arms, Layout, Rollout, Rows, make_layout, make_rows
from jaxkv.errors import UserError
from jaxkv.experiments.attribution.record import FENCED, VARIANTS
from jaxkv.experiments.batches import Item, RunSpec, plan_batches
from jaxkv.experiments.gate import bits
from jaxkv.generate import force, run_cached, run_forced
from jaxkv.models.alignment import make_alignment


def align_arms(arms: Arms, tile: int, aligned: Mapping[str, Sequence[str]] | None) -> Arms:
    """The arms with what their programs align: 'prefill', 'decode', 'recompute' -> classes; None for the plain ones."""
    if aligned is None:
        return arms
    bound = copy.copy(arms)
    for name, program in (("prefill", "prefill"), ("decode", "cached_loop"), ("recompute", "tile_loop")):
        alignment = make_alignment(tile, frozenset(aligned[name]))
        setattr(bound, program, functools.partial(getattr(arms, program), alignment=alignment))
    return bound


@dataclasses.dataclass(frozen=True)
class Pair:
    """Both arms along one sequence of tokens, and the wall time of each."""

    cached: Rollout
    uncached: Rollout
    seconds: dict[str, float]


def _timed(function: Callable[..., Rollout], *arguments: Any) -> tuple[Rollout, float]:
    begin = time.perf_counter()
    return jax.block_until_ready(function(*arguments)), time.perf_counter() - begin


def run_pair(arms: Arms, state: nnx.State, reference: Rollout, rows: Rows, layout: Layout) -> Pair:
    """Both arms along the reference's tokens."""
    forced, tokens = force(rows, reference), np.asarray(reference.tokens)
    cached, cached_seconds = _timed(run_cached, arms, state, tokens, forced, layout)
    uncached, uncached_seconds = _timed(run_forced, arms, state, reference, rows, layout)
    return Pair(cached, uncached, {"cached": cached_seconds, "uncached_forced": uncached_seconds})


def _count_moved(run: Rollout, other: Rollout, row: int, steps: int) -> int:
    differs = jnp.any(bits(run.logits[row]) != bits(other.logits[row]), axis=-1)
    return int(jnp.sum(differs[:steps]))


def _find_fault(
    pair: Pair, reference: Rollout, finding: Finding, row: int, prompt: int, first: int
) -> dict[str, Any] | None:
    """Where a row's numbers stopped being finite in one of the runs, or in the audit of its tokens."""
    for arm, run in (("cached", reference), ("cached", pair.cached), ("uncached", pair.uncached)):
        step = int(run.nonfinite_step[row])
        if step >= 0:
            logits = {"layer": None, "op": "logits", "position": prompt - first + step - 1, "value": "nan"}
            return {"arm": arm, "step": step} | (finding.invalid or logits)
    return None if finding.invalid is None else {"arm": "uncached", "step": None} | finding.invalid


def make_record(  # noqa: PLR0913
    arms: Arms, item: Item, row: int, variant: str, pair: Pair, fenced: Pair, finding: Finding, reference: Rollout,
    rows: Rows, layout: Layout, spec: RunSpec, tile: int,
) -> dict[str, Any]:  # fmt: skip
    """The record of one row and variant (jaxkv.experiments.attribution.record)."""
    first, steps = int(rows.first[row]), int(reference.lengths[row])
    fault = _find_fault(pair, reference, finding, row, layout.prompt, first)
    tokens = np.asarray(reference.tokens[row, layout.prompt : layout.prompt + steps], "<i4")
    return {
        "experiment": "attribution",
        "problem": item.problem,
        "key": ["attribution", item.problem, variant],
        "variant": variant,
        "aligned": VARIANTS[variant],
        "tile": tile,
        "prompt_tokens": len(item.prompt),
        "prompt_sha256": hashlib.sha256(np.asarray(item.prompt, "<i4").tobytes()).hexdigest(),
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "steps": steps,
        "shapes": {"batch": layout.batch, "prefill": layout.prefill, "slots": layout.slots, "left_pad": first},
        "sampling": arms.sampler.to_json() | {"seed": spec.seed},
        "status": "invalid" if fault else "ok",
        "invalid": fault,
        "teacher_forced": None if fault else compare_logits(pair.uncached.logits[row], pair.cached.logits[row], steps),
        "moved": None
        if fault
        else {
            "cached": _count_moved(pair.cached, fenced.cached, row, steps),
            "uncached": _count_moved(pair.uncached, fenced.uncached, row, steps),
        },
    }


def run_attribution(
    arms: Arms,
    state: nnx.State,
    items: Sequence[Item],
    spec: RunSpec,
    tile: int,
    done: frozenset[tuple[int, str]] = frozenset(),
    variants: Sequence[str] = tuple(VARIANTS),
) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Yields, batch by batch and variant by variant, the records not yet done and their timing.

    Args:
      arms: the plain programs; they must keep logits.
      state: weights.
      items: the problems.
      spec: what to run; of it count new_tokens, seed, batch_size, padding and bucket.
      tile: rows of an aligned tile.
      done: (problem, variant) that have a record. A batch is run whole if any of its problems lacks one.
      variants: which; names of record.VARIANTS.

    Raises:
      UserError: a prompt that does not fit the context, or arms of the aligned regime.
    """
    if arms.tile is not None or spec.uncached_length != "padded":
        raise UserError("attribution explains the plain regime at one padded length; leave --regime and "
                        "--uncached_length at plain and padded")  # fmt: skip
    for batch in plan_batches(items, spec):
        missing = [v for v in variants if any((item.problem, v) not in done for item in batch.items)]
        if not missing:
            continue
        filled = [*batch.items, *[batch.items[-1]] * (spec.batch_size - len(batch.items))]
        prompts = [list(item.prompt) for item in filled]
        layout = make_layout(prompts, spec.new_tokens, spec.bucket, arms.config)
        tokens, rows = make_rows(prompts, [item.problem for item in filled], spec.seed, layout)
        reference = run_cached(arms, state, tokens, rows, layout)
        findings = audit_rows(arms, state, reference, rows)
        broken = all(finding.invalid for finding in findings)  # then no variant has anything to compare

        def run_variant(variant, reference=reference, rows=rows, layout=layout):
            return run_pair(align_arms(arms, tile, VARIANTS[variant]), state, reference, rows, layout)

        fenced = Pair(reference, reference, {}) if broken else run_variant(FENCED)
        for variant in missing:
            pair = fenced if broken or variant == FENCED else run_variant(variant)
            records = [
                make_record(arms, item, row, variant, pair, fenced, findings[row], reference, rows, layout, spec, tile)
                for row, item in enumerate(batch.items)
                if (item.problem, variant) not in done
            ]
            steps = int(jnp.sum(reference.lengths))
            yield (
                records,
                {
                    "problems": [item.problem for item in batch.items],
                    "variant": variant,
                    "seconds": pair.seconds,
                    "tokens": dict.fromkeys(pair.seconds, steps),
                },
            )
