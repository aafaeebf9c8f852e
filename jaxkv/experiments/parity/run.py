"""How far is PyTorch from JAX, beside how far the cache moves either? Four cells along the same tokens.

JAX cached, JAX uncached, PyTorch cached and PyTorch uncached follow the tokens of JAX's cached arm, and every pair is
compared: logits, and the residual stream as it enters each layer. JAX's uncached arm runs the whole buffer (`padded`);
PyTorch's runs the prefix alone, as transformers' `generate` does. Logits are those of the arms' own programs. The
residual stream comes from programs that also give it out, which a compiler may fuse otherwise: how many of their logits
have the same bits is recorded beside it.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.audit import Finding, audit_rows
from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Batch, Item, RunSpec, describe_setting, find_fault, lay_out
from jaxkv.experiments.driver import ArmsRunner, Condition, Line, Took
from jaxkv.experiments.parity.record import CELLS, PAIRS, ParityRecord
from jaxkv.experiments.traced_runs import Reference, run_reference
from jaxkv.logits import bits, compare_logits
from jaxkv.rollout import GROWING, Layout, Rollout, force, start_rollout
from jaxkv.torch_path import Give, TorchArms
from jaxkv.tracing import Trace, trace_cached, trace_uncached


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one cell gives for a batch."""

    logits: np.ndarray  # [B, n, V] of its own program
    resid: np.ndarray  # [L + 1, B, n, D] float64, the residual stream in the rows that give the logits
    bit_equal: np.ndarray  # [B, n] whether the program that gave `resid` gave the same logits
    broke: np.ndarray  # [B] the step whose logits were not finite, -1 if none


def _make_cell(run: Rollout, trace: Trace, layout: Layout) -> Cell:
    equal = np.asarray(jnp.all(bits(run.logits) == bits(trace.run.logits), axis=-1))
    given = slice(layout.prompt - 1, layout.prompt - 1 + layout.new_tokens)  # slots of the rows that give the logits
    resid = np.stack([np.asarray(value[:, given], np.float64) for value in trace.values.values()])
    return Cell(np.asarray(run.logits), resid, equal, np.asarray(run.nonfinite_step))


def run_jax(arms: Arms, state: nnx.State, reference: Reference) -> dict[str, Cell]:
    """Both JAX cells of a batch."""
    layout, names = reference.layout, [f"resid_pre.{layer}" for layer in range(arms.config.num_layers + 1)]
    given = arms, state, reference.text, reference.forced, layout, names
    return {
        "jax cached": _make_cell(reference.cached, trace_cached(*given), layout),
        "jax uncached": _make_cell(reference.uncached, trace_uncached(*given), layout),
    }


@contextlib.contextmanager
def _watch(arms: TorchArms, layout: Layout, give: Give) -> Iterator[tuple[Give, np.ndarray]]:
    """`give`, and where what it lets enter each layer and the final norm is kept: [L + 1, B, n, D], as in `Cell`."""
    body, slot = arms.model.net.model, layout.prompt
    modules = [*body.layers, body.norm]
    resid = np.zeros((len(modules), layout.batch, layout.new_tokens, arms.config.model_dim))

    def keep(layer: int, module: Any, inputs: Any, kwargs: Any) -> None:
        value = inputs[0] if inputs else kwargs["hidden_states"]
        newest = min(value.shape[1], slot) - 1  # rows after it are padding
        resid[layer, :, slot - layout.prompt] = value[:, newest].double().cpu().numpy()

    def watched(tokens: np.ndarray, at: int) -> np.ndarray:
        nonlocal slot
        slot = at
        return give(tokens, slot)

    with contextlib.ExitStack() as stack:
        for layer, module in enumerate(modules):
            hook = functools.partial(keep, layer)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield watched, resid


def run_torch(
    arms: TorchArms, reference: Rollout, batch: Batch, spec: RunSpec
) -> tuple[dict[str, Cell], list[Finding]]:
    """Both PyTorch cells of a batch along a rollout's tokens (NumPy's), and their audit."""
    with arms.settings():
        layout, _, rows = lay_out(batch, spec, arms.config)
        forced, tokens = force(rows, reference), np.asarray(reference.tokens)[:, : layout.slots]
        gives = {"torch cached": arms.cached(forced), "torch uncached": arms.stepped(forced, layout, GROWING)}
        cells = {}
        for cell, give in gives.items():
            with _watch(arms, layout, give) as (watched, resid):
                run = arms.take(start_rollout(arms, tokens, forced, layout), forced, layout, watched)
            equal = np.ones(run.logits.shape[:2], bool)  # a forward hook of torch changes no kernel
            cells[cell] = Cell(np.asarray(run.logits), resid, equal, np.asarray(run.nonfinite_step))
        return cells, audit_rows(arms, None, run, rows)


def _distance(a: np.ndarray, b: np.ndarray) -> dict[str, list[float]]:
    """Distance of two streams [L + 1, n, D], relative to the root mean square of their norms, over n."""
    apart = np.linalg.norm(a - b, axis=-1)
    size = np.sqrt((np.square(a).sum(-1) + np.square(b).sum(-1)) / 2)
    relative = np.where(apart > 0, apart / np.where(size > 0, size, 1), 0)
    return {"mean": relative.mean(1).tolist(), "max": relative.max(1).tolist()}


def _cosines(first: np.ndarray, second: np.ndarray) -> list[float | None]:
    """Cosine of two changes of logits [n, V] a step, shifts common to all logits left out; None where one is zero."""
    a, b = (x - x.mean(-1, keepdims=True) for x in (first, second))
    size = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return [float(dot / s) if s else None for dot, s in zip((a * b).sum(-1), size, strict=True)]


def compare_cells(logits: Mapping[str, np.ndarray], resid: Mapping[str, np.ndarray], steps: int) -> dict[str, Any]:
    """All pairs of cells at the first `steps` steps of one row: `choices`, `pairs`, `cosine` and `distance`.

    Takes each cell's logits [n, V], all of one dtype, and residual stream [L + 1, n, D]. Raises ValueError where a
    compared logit is not finite.
    """
    given = {cell: jnp.asarray(values) for cell, values in logits.items()}
    wide = {cell: values[:steps].astype(np.float64) for cell, values in logits.items()}
    moved = {name: wide[f"{name} cached"] - wide[f"{name} uncached"] for name in ("jax", "torch")}
    return {
        "choices": {cell: wide[cell].argmax(-1).tolist() for cell in CELLS},
        "pairs": {pair: compare_logits(given[a], given[b], steps) for pair, (a, b) in PAIRS.items()},
        "cosine": _cosines(moved["jax"], moved["torch"]),
        "distance": {pair: _distance(resid[a][:, :steps], resid[b][:, :steps]) for pair, (a, b) in PAIRS.items()},
    }


@dataclasses.dataclass(frozen=True)
class Ran:
    """The four cells of a batch, PyTorch's audit of every row, and the wall time of each framework."""

    reference: Reference
    cells: dict[str, Cell]
    findings: list[Finding]
    seconds: dict[str, float]


class Parity(ArmsRunner[Batch, None, Ran]):
    """Both arms of every problem in both frameworks, whose attention in PyTorch is 'eager' or 'sdpa'.

    Raises UserError on what transformers cannot compute, and ValueError on arms of the aligned regime.
    """

    name = "parity"

    def __init__(self, arms: Arms, state: nnx.State, checkpoint: Checkpoint, spec: RunSpec, attention: str = "eager"):
        super().__init__(arms, state, spec, {(): None})
        if arms.tile is not None:
            raise ValueError("parity compares the plain regime: PyTorch has no aligned one")
        self.theirs = TorchArms(checkpoint, arms.precision, arms.sampler, attention)

    def describe(self) -> dict[str, Any]:
        return self.theirs.describe()

    def begin(self, batch: Batch, missing: Sequence[None]) -> Batch:
        return batch

    def run(self, batch: Batch, variant: None) -> Ran:
        begin = time.perf_counter()
        reference = run_reference(self.arms, self.state, batch, self.spec)
        cells = run_jax(self.arms, self.state, reference)
        middle = time.perf_counter()
        more, findings = run_torch(self.theirs, jax.tree.map(np.asarray, reference.cached), batch, self.spec)
        seconds = {"jax": middle - begin, "torch": time.perf_counter() - middle}
        return Ran(reference, cells | more, findings, seconds)

    def tell_time(self, batch: Batch, ran: Ran, seconds: float) -> Took:
        return Took(ran.seconds, {"jax": int(ran.reference.cached.lengths.sum())})

    def record(self, item: Item, row: int, batch: Batch, variant: None, ran: Ran) -> Line:
        cells, reference, layout = ran.cells, ran.reference, ran.reference.layout
        steps, ours, theirs = int(reference.cached.lengths[row]), reference.findings[row], ran.findings[row]
        audits = dict(zip(CELLS, (ours, ours, theirs, theirs), strict=True))
        steps_of = [(cell, cells[cell].broke, audits[cell]) for cell in CELLS]
        uncached = [(cell, finding) for cell, finding in audits.items() if cell.endswith("uncached")]
        fault = find_fault(row, reference.newest(row), steps_of, uncached)
        found: dict[str, Any] = dict.fromkeys(ParityRecord.FIGURES)
        if fault is None:
            found = compare_cells(
                {cell: values.logits[row] for cell, values in cells.items()},
                {cell: values.resid[:, row] for cell, values in cells.items()},
                steps,
            )
            equal = {cell: int(values.bit_equal[row, :steps].sum()) for cell, values in cells.items()}
            found["layers"] = {"bit_equal": equal, "distance": found.pop("distance")}
        first, origin = int(reference.rows.first[row]), self.theirs.origin
        return {
            "experiment": "parity",
            "problem": item.problem,
            "key": ["parity", item.problem],
            **describe_setting(self.arms, item, layout, first, ours, self.spec, fault),
            "tokens": reference.text[row, layout.prompt : layout.prompt + steps].tolist(),
            **found,
            "attention": origin["attention"],
            "versions": origin["versions"],
            "torch_uncached": GROWING,
        }


def make_runner(condition: Condition) -> Parity:
    """Runs a condition."""
    attention = condition.options.run.attention
    return Parity(condition.plain, condition.state, condition.checkpoint, condition.spec, attention)
