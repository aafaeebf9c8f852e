"""How far is PyTorch from JAX, beside how far the cache moves either? Four cells along the same tokens.

JAX cached, JAX uncached, PyTorch cached and PyTorch uncached follow the tokens of JAX's cached arm, and every pair is
compared: logits, and the residual stream as it enters each layer. JAX's uncached arm runs the whole buffer (`padded`);
PyTorch's runs what is asked, by default the prefix alone as transformers' `generate` does. Logits are those of the
arms' own programs. The residual stream comes from programs that also give it out, which a compiler may fuse otherwise:
how many of their logits have the same bits is recorded beside it.
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
from jaxkv.experiments.parity.record import CELLS, PAIRS
from jaxkv.logits import bits, compare_logits
from jaxkv.rollout import GROWING, Layout, Rollout, Rows, force, start_rollout
from jaxkv.torch_path import Give, TorchArms
from jaxkv.tracing import Trace, trace_cached, trace_uncached

RESID = "resid_pre."
UNCACHED = ("jax uncached", "torch uncached")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one cell gives for a batch.

    Attributes:
      logits: [B, n, V] of its own program.
      resid: [L + 1, B, n, D] float64, the residual stream in the rows that give the logits.
      bit_equal: [B, n] whether the program that gave `resid` gave the same logits.
      broke: [B] the step whose logits were not finite, -1 if none.
    """

    logits: np.ndarray
    resid: np.ndarray
    bit_equal: np.ndarray
    broke: np.ndarray


def _make_cell(run: Rollout, trace: Trace, layout: Layout) -> Cell:
    equal = np.asarray(jnp.all(bits(run.logits) == bits(trace.run.logits), axis=-1))
    given = slice(layout.prompt - 1, layout.prompt - 1 + layout.new_tokens)  # slots of the rows that give the logits
    resid = np.stack([np.asarray(value[:, given], np.float64) for value in trace.values.values()])
    return Cell(np.asarray(run.logits), resid, equal, np.asarray(run.nonfinite_step))


def run_jax(
    arms: Arms, state: Any, batch: Batch, spec: RunSpec
) -> tuple[dict[str, Cell], Rollout, list[Finding], Layout, Rows]:
    """Both JAX cells of a batch, the cached arm's rollout (as NumPy), its audit, and the batch's layout and rows."""
    layout, tokens, rows = lay_out(batch, spec, arms.config)
    cached = arms.run_cached(state, tokens, rows, layout)
    uncached = arms.run_forced(state, cached, rows, layout)
    findings = audit_rows(arms, state, cached, rows)
    reference = jax.tree.map(np.asarray, cached)
    names = [f"resid_pre.{layer}" for layer in range(arms.config.num_layers + 1)]
    given = arms, state, reference.tokens, force(rows, cached), layout, names
    cells = {
        "jax cached": _make_cell(reference, trace_cached(*given), layout),
        "jax uncached": _make_cell(uncached, trace_uncached(*given), layout),
    }
    return cells, reference, findings, layout, jax.tree.map(np.asarray, rows)


class _TorchStream:
    """Keeps what enters each layer and the final norm of a transformers model, in the newest row of every forward."""

    def __init__(self, arms: TorchArms, layout: Layout):
        body = arms.model.net.model
        self.modules = [*body.layers, body.norm]
        shape = (len(self.modules), layout.batch, layout.new_tokens, arms.config.model_dim)
        self.resid, self.prompt, self.slot = np.zeros(shape), layout.prompt, 0

    def _keep(self, layer: int, module: Any, inputs: Any, kwargs: Any) -> None:
        value = inputs[0] if inputs else kwargs["hidden_states"]
        newest = min(value.shape[1], self.slot) - 1  # rows after it are padding
        self.resid[layer, :, self.slot - self.prompt] = value[:, newest].double().cpu().numpy()

    def watch(self, give: Give) -> Give:
        """`give`, telling which slot its forward is for."""

        def watched(tokens: np.ndarray, slot: int) -> np.ndarray:
            self.slot = slot
            return give(tokens, slot)

        return watched

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for layer, module in enumerate(self.modules):
                hook = functools.partial(self._keep, layer)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield


def run_torch(
    arms: TorchArms, reference: Rollout, batch: Batch, spec: RunSpec, uncached_length: str
) -> tuple[dict[str, Cell], list[Finding]]:
    """Both PyTorch cells of a batch along a rollout's tokens, and their audit."""
    with arms.settings():
        layout, _, rows = lay_out(batch, spec, arms.config)
        forced, tokens = force(rows, reference), np.asarray(reference.tokens)[:, : layout.slots]
        cells = {}
        for cell, give in (
            ("torch cached", arms.cached(forced)),
            ("torch uncached", arms.stepped(forced, layout, uncached_length)),
        ):
            stream = _TorchStream(arms, layout)
            with stream.hooks():
                run = arms.take(start_rollout(arms, tokens, forced, layout), forced, layout, stream.watch(give))
            equal = np.ones(run.logits.shape[:2], bool)  # a forward hook of torch changes no kernel
            cells[cell] = Cell(np.asarray(run.logits), stream.resid, equal, np.asarray(run.nonfinite_step))
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
    """All pairs of cells at the first `steps` steps of one row.

    Args:
      logits: cell -> [n, V], all of one dtype.
      resid: cell -> [L + 1, n, D].
      steps: at least 1.

    Returns:
      `choices`, `pairs`, `cosine` and `distance` of a record.

    Raises:
      ValueError: a compared logit is not finite.
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
    """The four cells of a batch, each framework's audit of every row, and the wall time of each."""

    cells: dict[str, Cell]
    reference: Rollout
    findings: list[tuple[Finding, Finding]]
    layout: Layout
    rows: Rows
    seconds: dict[str, float]


class Parity(ArmsRunner[Batch, None, Ran]):
    """Both arms of every problem in both frameworks.

    Args:
      arms: JAX's, of the plain regime.
      state: as for every runner.
      checkpoint: the same model for PyTorch.
      spec: of JAX's arms; both frameworks pad a batch alike.
      attention: 'eager' or 'sdpa'.
      torch_uncached: rows of PyTorch's uncached arm: 'growing', 'padded' or 'bucket:M'.

    Raises:
      UserError: what transformers cannot compute.
      ValueError: arms of the aligned regime.
    """

    name = "parity"

    def __init__(
        self,
        arms: Arms,
        state: nnx.State,
        checkpoint: Checkpoint,
        spec: RunSpec,
        attention: str = "eager",
        torch_uncached: str = GROWING,
    ):
        super().__init__(arms, state, spec, {(): None})
        if arms.tile is not None:
            raise ValueError("parity compares the plain regime: PyTorch has no aligned one")
        self.theirs = TorchArms(checkpoint, arms.precision, arms.sampler, attention)
        self.origin = {
            "attention": attention,
            "versions": self.theirs.origin["versions"],
            "torch_uncached": torch_uncached,
        }

    def describe(self) -> dict[str, Any]:
        return self.theirs.describe()

    def begin(self, batch: Batch, missing: Sequence[None]) -> Batch:
        return batch

    def run(self, batch: Batch, variant: None) -> Ran:
        begin = time.perf_counter()
        cells, reference, ours, layout, rows = run_jax(self.arms, self.state, batch, self.spec)
        middle = time.perf_counter()
        more, theirs = run_torch(self.theirs, reference, batch, self.spec, self.origin["torch_uncached"])
        seconds = {"jax": middle - begin, "torch": time.perf_counter() - middle}
        return Ran(cells | more, reference, list(zip(ours, theirs, strict=True)), layout, rows, seconds)

    def tell_time(self, batch: Batch, ran: Ran, seconds: float) -> Took:
        return Took(ran.seconds, {"jax": int(ran.reference.lengths.sum())})

    def record(self, item: Item, row: int, batch: Batch, variant: None, ran: Ran) -> Line:
        cells, reference, layout, rows, findings = ran.cells, ran.reference, ran.layout, ran.rows, ran.findings[row]
        first, steps = int(rows.first[row]), int(reference.lengths[row])
        audits = dict(zip(CELLS, (findings[0], findings[0], findings[1], findings[1]), strict=True))
        steps_of = [(cell, cells[cell].broke, audits[cell]) for cell in CELLS]
        fault = find_fault(row, layout.prompt - first - 1, steps_of, [(cell, audits[cell]) for cell in UNCACHED])
        found: dict[str, Any] = dict.fromkeys(("choices", "pairs", "cosine", "layers"))
        if fault is None:
            found = compare_cells(
                {cell: values.logits[row] for cell, values in cells.items()},
                {cell: values.resid[:, row] for cell, values in cells.items()},
                steps,
            )
            equal = {cell: int(values.bit_equal[row, :steps].sum()) for cell, values in cells.items()}
            found["layers"] = {"bit_equal": equal, "distance": found.pop("distance")}
        padded = dataclasses.replace(self.spec, uncached_length="padded")  # whatever length PyTorch's uncached arm has
        return {
            "experiment": "parity",
            "problem": item.problem,
            "key": ["parity", item.problem],
            **describe_setting(self.arms, item, layout, first, findings[0], padded, fault),
            "tokens": reference.tokens[row, layout.prompt : layout.prompt + steps].tolist(),
            **found,
            **self.origin,
        }


def make_runner(condition: Condition) -> Parity:
    """Runs a condition."""
    attention = condition.options.run.attention
    return Parity(condition.plain, condition.state, condition.checkpoint, condition.spec, attention)
