"""Which part of the policy mends a run whose numbers overflow: found by running a problem again, not by a guess."""

import dataclasses
from collections.abc import Callable, Mapping

from flax import nnx

from jaxkv.audit import part_of
from jaxkv.config import Precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Batch, Item, RunSpec
from jaxkv.experiments.divergence import run_batch

WIDENED = ("residual", "scores")  # parts that fp32 can hold while all products stay in 16 bits
NEW_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A policy that was tried on one problem and kept its numbers finite.

    Attributes:
      flags: what to add to the command, e.g. '--residual=fp32'.
      problem: what it was tried on.
    """

    flags: str
    problem: int


def find_remedy(
    make: Callable[[Mapping[str, str]], tuple[Arms, nnx.State]], item: Item, spec: RunSpec
) -> Remedy | None:
    """Widens the part in which a problem's numbers break, until they do not.

    Args:
      make: from overridden parts of the policy to arms and the weights as they take them.
      item: a problem whose run was invalid.
      spec: of the run; a few new tokens are enough to be tried.

    Returns:
      The fewest parts found; None if what breaks is no part that fp32 can hold alone, and bf16 is left.
    """
    short = dataclasses.replace(spec, new_tokens=min(spec.new_tokens, NEW_TOKENS), batch_size=1)
    parts: dict[str, str] = {}
    while True:
        arms, state = make(parts)
        found = run_batch(arms, state, Batch((item,), controls=False, stepwise=False), short)
        broken = next((f.invalid for f in (*found.findings, *found.free_findings) if f.invalid), None)
        if broken is None:
            flags = " ".join(f"--{name}={dtype}" for name, dtype in parts.items())
            return Remedy(flags, item.problem) if parts else None
        part = part_of(broken["op"])
        if part not in WIDENED or part in parts:
            return None
        parts[part] = "fp32"


def describe_remedy(precision: Precision, remedy: Remedy | None) -> str:
    """What to do, for the message of an invalid run."""
    if remedy is not None:
        return f"{remedy.flags} keeps it finite (tried on problem {remedy.problem})"
    other = "bf16" if precision.name.startswith("fp16") else "fp32"
    return f"no part of the policy alone mends it; use --precision={other}"
