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


def find_remedy(
    make: Callable[[Mapping[str, str]], tuple[Arms, nnx.State]],
    item: Item,
    spec: RunSpec,
    precision: Precision,
    step: int | None = None,
) -> str:
    """What keeps a problem's numbers finite, for the message of an invalid run: the fewest parts to widen, if any do.

    `make` turns overridden parts of the policy into arms and the weights as they take them. The run broke at `step`,
    None if that is not known; each try goes some steps beyond it.
    """
    tokens = min(spec.new_tokens, NEW_TOKENS + (step or 0))
    short = dataclasses.replace(spec, new_tokens=tokens, batch_size=1, truth_problems=0)
    tried = f"(tried on problem {item.problem}, {tokens} tokens)"
    parts: dict[str, str] = {}
    while True:
        arms, state = make(parts)
        ran = run_batch(arms, state, Batch((item,), controls=False, stepwise=False), short)
        if (broken := find_fault(ran, 0)) is None:
            flags = " ".join(f"--{name}={dtype}" for name, dtype in parts.items())
            return f"{flags} keeps it finite {tried}" if flags else f"its numbers did not break again {tried}"
        part = part_of(broken["op"])
        if part not in WIDENED or part in parts:
            so = "; use --precision=bf16" if precision.name.startswith("fp16") else ": the weights may be damaged"
            return f"no part of the policy alone mends it {tried}{so}"
        parts[part] = "fp32"
