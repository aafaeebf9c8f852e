"""One prompt run in two ways: with the cache and without it, or beside another precision, cache or framework.

The arms are those of the experiments, and so is what compares them. The second side follows the first side's tokens,
for figures free of compounding, and also runs on its own, for its text.
"""

import dataclasses
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxkv.arm_checks import Difference, explain
from jaxkv.audit import audit_rows
from jaxkv.comparison import Candidate, Checks, Comparison, Parting, Side
from jaxkv.drafts import Forced, free_by_drafts
from jaxkv.errors import UserError, nearest
from jaxkv.experiments.changes import make_changes
from jaxkv.experiments.record_parts import Comparison as StepColumns
from jaxkv.logits import compare_logits
from jaxkv.prompt_model import PRECISIONS, PromptRun, load_model
from jaxkv.reporting.metrics import free_running
from jaxkv.rollout import Layout, Rollout, Rows, force

KINDS = ("precision", "cache_quant", "cache_error", "framework")


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Both sides of one row: the first, free; the second along its tokens, and free; where numbers broke off."""

    names: tuple[str, str]
    first: Rollout
    forced: Rollout
    free: Rollout
    invalid: str | None = None


def compare_prompt(run: PromptRun, beside: str | None) -> Comparison:
    """Runs a prompt in two ways; `beside` is that of `jaxkv.compare`. Raises UserError on what the user can mend."""
    if beside is None:
        return _compare_with_none(run)
    kind, value = read_beside(beside)
    if kind == "precision":
        return _describe(run, _pair_precision(run, value), "changed")
    if kind == "framework":
        return _describe(run, _pair_framework(run), "changed")
    return _describe(run, _pair_change(run, kind, value), "changed")


def read_beside(beside: str) -> tuple[str, str]:
    """What to compare with, and which. Raises UserError on what is not understood, a SPEC of a cache left aside."""
    kind, _, value = beside.partition(":")
    if kind not in KINDS or not value:
        known = ", ".join(f"{one}:..." for one in KINDS)
        raise UserError(f"--with={beside} is not understood{nearest(kind, list(KINDS))}; write one of {known}")
    if kind == "precision" and value not in PRECISIONS:
        raise UserError(f"--with={beside} is not known{nearest(value, list(PRECISIONS))}: {', '.join(PRECISIONS)}")
    if kind == "framework" and value != "torch":
        raise UserError(f"--with={beside} is not known; known: torch")
    return kind, value


def _compare_with_none(run: PromptRun) -> Comparison:
    """The cached arm beside the uncached one, with what tells rounding from a fault."""
    model, arms, length = run.model, run.model.arms(run.sampler), run.spec.uncached_length
    layout, tokens, rows = run.lay_out()
    with run.phase("with the cache", first=True):
        cached = jax.block_until_ready(arms.run_cached(model.state, tokens, rows, layout))
    with run.phase("without it", first=True):
        forced = arms.run_forced(model.state, cached, rows, layout, length)
        ((free, _),) = jax.block_until_ready(free_by_drafts(arms, model.state, [Forced(forced, rows, layout)], length))
    pair = _Pair(("with its cache", "without it"), cached, forced, free, _audit(run, (cached, forced, free), rows))
    if pair.invalid is not None:
        return _describe(run, pair, "invalid")
    columns = _compare_steps(forced, cached, int(cached.lengths[0]))
    first = free_running(run.take(cached), run.take(free))["first_diverged"]
    step = int(np.argmin(columns.margin)) if first is None else first
    status, checks = explain(run, Difference(cached, forced, rows, layout, columns, step))
    return _describe(run, pair, status, columns, checks)


def _audit(run: PromptRun, rollouts: tuple[Rollout, ...], rows: Rows) -> str | None:
    """Where a number was not finite; values that a softcap hides are looked for in fp16 alone, whose range is small."""
    broke = [one for one in rollouts if int(one.nonfinite_step[0]) >= 0]
    if not broke and run.model.precision.activation != jnp.float16:
        return None
    with run.phase("looking for numbers that are not finite"):
        found = audit_rows(run.model.arms(run.sampler), run.model.state, (broke or rollouts)[0], rows)[0].invalid
    if found is not None:
        return _describe_fault(**found)
    return f"the logits of token {int(broke[0].nonfinite_step[0]) + 1}" if broke else None


def _describe_fault(op: str, position: int, layer: int | None, value: str, **rest: object) -> str:
    where = "" if layer is None else f" of layer {layer}"
    return f"{value} in {op}{where} at position {position}"


def _pair_precision(run: PromptRun, value: str) -> _Pair:
    """The cached arm in another precision, its weights rounded from the file's to it."""
    with run.phase(f"loading in {value}"):
        other = load_model(precision=value, **run.model.source)
    usual, arms = f"in {run.model.precision.name}", other.arms(run.sampler)
    return _pair(run, usual, f"in {value}", lambda *given: arms.run_cached(other.state, *given))


def _pair_framework(run: PromptRun) -> _Pair:
    """The cached arm through transformers' model."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jaxkv.torch_model import check_torch, import_torch
    from jaxkv.torch_path import TorchArms

    import_torch()
    model = run.model
    check_torch(model.checkpoint.config, model.precision, "eager")
    with run.phase("loading into PyTorch"):
        arms = TorchArms(model.checkpoint, model.precision, run.sampler)

    def follow(tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
        with arms.settings():
            return arms.run_cached(None, tokens, rows, arms.fit(layout))

    return _pair(run, "in JAX", "in PyTorch", follow)


def _pair(run: PromptRun, usual: str, name: str, other: Callable[[np.ndarray, Rows, Layout], Rollout]) -> _Pair:
    """The cached arm, and another that follows its tokens and then runs freely."""
    layout, tokens, rows = run.lay_out()
    arms = run.model.arms(run.sampler)
    with run.phase(usual, first=True):
        first = jax.block_until_ready(arms.run_cached(run.model.state, tokens, rows, layout))
    with run.phase(name, first=True):
        forced = jax.block_until_ready(other(np.asarray(first.tokens), force(rows, first), layout))
        free = jax.block_until_ready(other(tokens, rows, layout))
    return _Pair((usual, name), first, forced, free, _audit(run, (first,), rows))


def _pair_change(run: PromptRun, kind: str, value: str) -> _Pair:
    """The cached arm with a clean cache, and with one that is changed."""
    model = run.model
    given: dict[str, tuple[str, ...]] = {"cache_error": (), "cache_quant": ()} | {kind: (value,)}
    _, change = make_changes(given["cache_error"], given["cache_quant"], model.checkpoint.config, model.precision)
    arms, intervention = model.arms(run.sampler), change.intervention(run.spec.seed)

    def follow(tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
        empty = arms.make_cache(rows, layout, intervention)
        return arms.run_cached_keeping(model.state, tokens, rows, layout, empty)[0]

    return _pair(run, "with a clean cache", f"with {change.name}", follow)


def _describe(
    run: PromptRun, pair: _Pair, status: str, columns: StepColumns | None = None, checks: Checks | None = None
) -> Comparison:
    """The comparison of a pair; its columns are made here unless they are given."""
    tokens = [run.take(one) for one in (pair.first, pair.free)]
    sides = [Side(n, t, run.model.decode(run.item.prompt, t)) for n, t in zip(pair.names, tokens, strict=True)]
    runs = zip((pair.first, pair.free, pair.forced), (*pair.names, pair.names[1]), strict=True)
    broke = [
        f"the logits of token {step + 1} {name}" for one, name in runs if (step := int(one.nonfinite_step[0])) >= 0
    ]
    invalid = pair.invalid or next(iter(broke), None)
    parting = None
    if invalid is not None:
        status, columns = "invalid", None
    else:
        if columns is None:
            columns = _compare_steps(pair.first, pair.forced, len(tokens[0]))
            status = "equal" if all(columns.bit_equal) else status
        if (first := free_running(*tokens)["first_diverged"]) is not None:
            parting = _describe_parting(run, pair, sides, first, columns)
    sampler = "" if run.sampler.kind == "greedy" else f" ({run.sampler.kind}, seed {run.spec.seed})"
    return msgspec.convert(
        {
            "model": run.model.name, "setting": f"{run.model.precision.name}{sampler}", "prompt": run.prompt,
            "sides": sides, "status": status, "invalid": invalid, "columns": columns, "first_divergence": parting,
            "checks": checks, "seconds": run.seconds,
        },
        Comparison,
    )  # fmt: skip


def _compare_steps(reference: Rollout, other: Rollout, steps: int) -> StepColumns:
    """The other against the reference along the same tokens, in the wider of their dtypes."""
    logits = [jnp.asarray(one.logits[0]) for one in (reference, other)]
    wide = jnp.promote_types(logits[0].dtype, logits[1].dtype)
    found = compare_logits(logits[0].astype(wide), logits[1].astype(wide), steps)
    chosen = [np.asarray(one.choices[0, :steps]) for one in (reference, other)]
    return msgspec.convert(found | {"choice_flip": np.not_equal(*chosen).tolist()}, StepColumns)


def _describe_parting(run: PromptRun, pair: _Pair, sides: list[Side], step: int, columns: StepColumns) -> Parting:
    """Where the texts part: both sides have the same tokens up to there, so the forced run has the second's logits."""
    logits = [np.asarray(one.logits[0, step], np.float64) for one in (pair.first, pair.forced)]
    shares = [np.exp(one - one.max()) / np.exp(one - one.max()).sum() for one in logits]
    shared = sides[0].tokens[:step]
    tokens = [side.tokens[step] for side in sides]
    before = [*run.item.prompt, *shared]
    first, second = (
        Candidate(
            token, run.model.name_token(before, token), (float(logits[0][token]), float(logits[1][token])),
            (float(shares[0][token]), float(shares[1][token])),
        )
        for token in tokens
    )  # fmt: skip
    gap, other = (run.measure_gap(one, step, (tokens[0], tokens[1])) for one in (pair.first, pair.forced))
    cut = (gap.size < 0 and not gap.may[1]) or (other.size > 0 and not other.may[0])
    same = pair.first.logits.dtype == pair.forced.logits.dtype
    unit = columns.unit[step] if same and isinstance(columns.unit, list) else None
    begin = len(run.model.decode(run.item.prompt, shared))
    texts = [side.text for side in sides]
    while texts[0][:begin] != texts[1][:begin]:  # a character of several tokens is cut
        begin -= 1
    return Parting(
        step, (first, second), gap.size, other.size - gap.size, unit, not cut and 0.0 in (gap.size, other.size),
        min(begin, *map(len, texts)), gap.noise, cut,
    )  # fmt: skip
