"""What experiments on traced arms share: both arms untraced along one text, and the fields every record of them has."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.audit import Finding, audit_rows
from jaxkv.decode import Arms
from jaxkv.experiments import batches
from jaxkv.experiments.batches import Batch, Item, RunSpec, describe_setting, lay_out
from jaxkv.logits import bits
from jaxkv.provenance import hash_tokens
from jaxkv.rollout import Layout, Rollout, Rows, force


@dataclasses.dataclass(frozen=True)
class Reference:
    """Both arms of a batch as they are, along the cached arm's tokens, and each row's audit.

    `rows` are free-running, `forced` made to follow those tokens; `text` [B, S] has them behind the prompts. `uncached`
    is `cached` again where an experiment has no such arm.
    """

    layout: Layout
    rows: Rows
    forced: Rows
    text: np.ndarray
    cached: Rollout
    uncached: Rollout
    findings: list[Finding]

    def newest(self, row: int) -> int:
        """Position of a row's last prompt token."""
        return self.layout.prompt - int(self.rows.first[row]) - 1

    @property
    def broken(self) -> bool:
        """Whether no row has finite numbers all through."""
        return all(find_fault(self, row, {}) for row in range(self.layout.batch))


def run_reference(arms: Arms, state: nnx.State, batch: Batch, spec: RunSpec) -> Reference:
    """Runs and audits a batch."""
    layout, tokens, rows = lay_out(batch, spec, arms.config, arms.tile)
    cached = arms.run_cached(state, tokens, rows, layout)
    return make_reference(arms, state, layout, rows, cached, arms.run_forced(state, cached, rows, layout))


def make_reference(
    arms: Arms, state: nnx.State, layout: Layout, rows: Rows, cached: Rollout, uncached: Rollout | None = None
) -> Reference:
    """Audits a batch that has run."""
    findings = audit_rows(arms, state, cached, rows)
    text = np.asarray(cached.tokens)
    return Reference(layout, rows, force(rows, cached), text, cached, uncached or cached, findings)


def find_fault(reference: Reference, row: int, others: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where a row's numbers stopped being finite in an arm, their audit, or others with a `nonfinite_step`; or None."""
    finding = reference.findings[row]
    runs = [("cached", reference.cached), ("uncached", reference.uncached), *others.items()]
    steps = [(arm, run.nonfinite_step, finding) for arm, run in runs]
    return batches.find_fault(row, reference.newest(row), steps, [("uncached", finding)])


def count_equal(run: Any, other: Any, row: int, steps: int) -> int:
    """Steps at which two runs have the same logits [B, n, V], bit for bit."""
    same = jnp.all(bits(run.logits[row]) == bits(other.logits[row]), axis=-1)
    return int(jnp.sum(same[:steps]))


def describe_row(
    arms: Arms, item: Item, row: int, reference: Reference, spec: RunSpec, fault: dict[str, Any] | None
) -> dict[str, Any]:
    """Fields of a record that say what was run (jaxkv.experiments.record_parts.Traced)."""
    layout, steps = reference.layout, int(reference.cached.lengths[row])
    tokens, left_pad = reference.text[row, layout.prompt : layout.prompt + steps], int(reference.rows.first[row])
    described = describe_setting(arms, item, layout, left_pad, reference.findings[row], spec, fault)
    return described | {"tokens_sha256": hash_tokens(tokens), "steps": steps}


def sum_logits(found: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Columns of `compare_logits` over all steps (jaxkv.experiments.record_parts.LogitSums)."""
    return {
        "kl": float(np.sum(found["kl"])),
        "flips": int(np.sum(found["flip"])),
        "max_abs": float(max(found["max_abs"], default=0.0)),
        "bit_equal": int(np.sum(found["bit_equal"])),
    }


def shorten(value: float) -> float:
    """Three significant digits: what a record keeps of a figure."""
    return float(f"{float(value):.3g}")
