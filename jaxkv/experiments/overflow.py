"""Which part of the policy mends a run whose numbers overflow: found by running a problem again, not by a guess."""

import dataclasses
from collections.abc import Callable, Mapping

from flax import nnx

from jaxkv.audit import part_of
from jaxkv.config import Precision
from jaxkv.decode import Arms
from jaxkv.experiments.batches import Batch, Item, RunSpec
from jaxkv.experiments.divergence.run import find_fault, run_batch

WIDENED = ("residual", "scores")  # parts that fp32 can hold while all products stay in 16 bits
NEW_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Search:
    """What was tried on a problem.

    Attributes:
      problem: on which.
      tokens: most new tokens of each try.
      broke: whether its numbers broke again without a change.
      flags: what kept them finite, e.g. '--residual=fp32'; None if nothing did.
    """

    problem: int
    tokens: int
    broke: bool
    flags: str | None


def find_remedy(
    make: Callable[[Mapping[str, str]], tuple[Arms, nnx.State]], item: Item, spec: RunSpec, step: int | None = None
) -> Search:
    """Widens the part in which a problem's numbers break, until they do not.

    Args:
      make: from overridden parts of the policy to arms and the weights as they take them.
      item: a problem whose run was invalid.
      spec: of the run.
      step: at which its numbers broke, None if it is not known; each try goes some steps beyond it.

    Returns:
      The search; its flags are the fewest parts found.
    """
    tokens = min(spec.new_tokens, NEW_TOKENS + (step or 0))
    short = dataclasses.replace(spec, new_tokens=tokens, batch_size=1, truth_problems=0)
    parts: dict[str, str] = {}
    while True:
        arms, state = make(parts)
        ran = run_batch(arms, state, Batch((item,), controls=False, stepwise=False), short)
        if (broken := find_fault(ran, 0)) is None:
            flags = " ".join(f"--{name}={dtype}" for name, dtype in parts.items())
            return Search(item.problem, tokens, bool(parts), flags or None)
        part = part_of(broken["op"])
        if part not in WIDENED or part in parts:
            return Search(item.problem, tokens, True, None)
        parts[part] = "fp32"


def describe_remedy(precision: Precision, found: Search) -> str:
    """What to do, for the message of an invalid run."""
    tried = f"tried on problem {found.problem}, {found.tokens} tokens"
    if found.flags is not None:
        return f"{found.flags} keeps it finite ({tried})"
    if not found.broke:
        return f"its numbers did not break again ({tried})"
    if not precision.name.startswith("fp16"):
        return f"no part of the policy alone mends it ({tried}): the weights may be damaged"
    return f"no part of the policy alone mends it ({tried}); use --precision=bf16"
