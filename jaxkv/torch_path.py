"""Both arms through transformers' PyTorch models, for the experiments that take JAX's.

cached    a prefill of the prompt, then one token a step with transformers' DynamicCache.
uncached  `use_cache=False`, the whole prefix at each step. Its rows are those of the prefix alone (`growing`, what
          transformers' `generate` does: another shape at every step), or the prefix padded on the right to a fixed
          number of rows (`padded`) or to the next multiple of M (`bucket:M`).

Weights, token ids, left padding and positions are those of the JAX arms. Tokens are chosen by the very function of
theirs (`rollout.emit`: sampler, noise, ties, stop tokens, limits), run by JAX on torch's logits: on the CPU, and on the
accelerator that JAX has where the sampler sorts them.

The uncached arm is stepped (`uncached='stepwise'`), or had by draft and check (`'draft'`), where one forward over given
tokens yields the logits of all steps that share its rows. Whether the two agree bit for bit is for torch's kernels to
say: some problems run both ways, and their records compare them (control `uncached_stepwise`). Under `growing` no two
steps share their rows; there the comparison is with one forward over `padded` rows, another shape.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.config import Precision
from jaxkv.decode import COMPILER_OPTIONS
from jaxkv.errors import UserError
from jaxkv.rollout import (
    GROWING,
    PAD_ID,
    Layout,
    Rollout,
    Rows,
    emit,
    force,
    start_forced,
    start_rollout,
    uncached_lengths,
)
from jaxkv.sampling import Sampler
from jaxkv.torch_model import TorchModel, describe_torch, true_fp32

Give = Callable[[np.ndarray, int], np.ndarray]  # tokens [B, S], slot -> logits [B, V] for the slot


def segments(uncached_length: str, layout: Layout) -> list[tuple[int, int]]:
    """`rollout.uncached_lengths`, and 'growing' for as many rows as the prefix has tokens."""
    return uncached_lengths("bucket:1" if uncached_length == GROWING else uncached_length, layout)


def find_host() -> jax.Device:
    """JAX's CPU, which holds the weights for torch and chooses tokens. Raises UserError if JAX may not use it."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        raise UserError("tokens are chosen by JAX on the CPU; add cpu to JAX_PLATFORMS, or unset it") from None


def find_chooser(sampler: Sampler) -> jax.Device:
    """Where JAX chooses tokens: `find_host`, or its accelerator if the sampler sorts logits.

    Sorting 8 rows of 262144 logits takes a CPU half a second, and a GPU less than the model's own step.
    """
    sorts = sampler.top_p is not None or sampler.top_k is not None
    return jax.devices()[0] if sorts else find_host()


class TorchArms:
    """Both arms through a transformers model (rollout.AnyArms).

    `precision` is fp16, bf16 or fp32 without overrides, and `attention` 'eager' or 'sdpa'. Raises UserError: what
    transformers cannot compute; torch is missing; JAX may not use the CPU.
    """

    tile: int | None = None
    keep_logits = exact_checks = False

    def __init__(self, checkpoint: Checkpoint, precision: Precision, sampler: Sampler, attention: str = "eager"):
        self.config, self.precision, self.sampler = checkpoint.config, precision, sampler
        self._given = (checkpoint, precision, attention)
        self.stop_ids = tuple(checkpoint.tokenizer.eos_ids)
        choose = functools.partial(emit, sampler=sampler, stop_ids=self.stop_ids)
        self.emit = jax.jit(choose, compiler_options=COMPILER_OPTIONS)
        self.host, self.chooser = find_host(), find_chooser(sampler)
        versions = describe_torch()["versions"]
        self.origin: dict[str, Any] = {"framework": "torch", "attention": attention, "versions": versions}

    @functools.cached_property
    def model(self) -> TorchModel:
        """The model, built when it is first run."""
        return TorchModel(*self._given)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """JAX's arrays on the CPU, and true fp32."""
        with jax.default_device(self.host), true_fp32():
            yield

    def describe(self) -> dict[str, Any]:
        """As in AnyArms."""
        found = {name: value for name, value in describe_torch().items() if name != "device"}
        return {"attention": self.origin["attention"], "torch": found}

    def fit(self, layout: Layout) -> Layout:
        """The layout as for JAX's arms but for the prefill, which has no padding."""
        return dataclasses.replace(layout, prefill=layout.prompt)

    def audit_pass(self, state: None, tokens: Any, first: Any, end: Any) -> dict[str, np.ndarray]:
        """As `Arms.audit_pass`: name -> [B, P], the names numbered in order of execution."""
        peaks = self.model.audit(np.asarray(tokens), np.asarray(first), np.asarray(end))
        return {f"{number:05d} {name}": peak for number, (name, peak) in enumerate(peaks.items())}

    def take(self, run: Rollout, rows: Rows, layout: Layout, give: Give) -> Rollout:
        """Goes on until every row has ended; logits of steps before `run.slot` stay zero. All arrays are NumPy's."""
        end, slot = layout.prompt + layout.new_tokens, int(run.slot)
        shape = (layout.batch, layout.new_tokens, self.config.vocab_size)
        logits = np.zeros(shape, np.dtype(self.precision.logits))
        while slot < end and not np.all(run.ended):
            step = give(np.asarray(run.tokens), slot)
            logits[:, slot - layout.prompt] = step
            with jax.default_device(self.chooser):
                run = self.emit(run, step, rows)
            slot += 1
        return dataclasses.replace(jax.tree.map(np.asarray, run), logits=logits)

    def cached(self, rows: Rows) -> Give:
        """A prefill of all slots before the first one asked for, then one row a call."""
        cache, first = None, np.asarray(rows.first)

        def give(tokens: np.ndarray, slot: int) -> np.ndarray:
            nonlocal cache
            begin = 0 if cache is None else slot - 1
            cache = self.model.new_cache() if cache is None else cache
            return self.model.logits(tokens, first, begin, slot, 1, cache)[:, 0]

        return give

    def stepped(self, rows: Rows, layout: Layout, uncached_length: str) -> Give:
        """The whole prefix at every call; slots after it hold padding tokens."""
        first, pieces = np.asarray(rows.first), segments(uncached_length, layout)

        def give(tokens: np.ndarray, slot: int) -> np.ndarray:
            length = next(length for length, end in pieces if slot < end)
            known = _fit(tokens, length)
            known[:, slot:] = PAD_ID
            return self.model.logits(known, first, 0, length, 1 if length == slot else [slot - 1])[:, 0]

        return give

    def checked(self, rows: Rows, layout: Layout, uncached_length: str) -> Give:
        """One forward over given tokens for all steps that share its rows. Every row must be forced."""
        first, pieces = np.asarray(rows.first), segments(uncached_length, layout)
        begin, until, ready = 0, 0, np.zeros((0, 0))

        def give(tokens: np.ndarray, slot: int) -> np.ndarray:
            nonlocal begin, until, ready
            if slot >= until:
                length, until = next((length, end) for length, end in pieces if slot < end)
                begin, wanted = slot, list(range(slot - 1, until - 1))
                with self.model.one_row_head():
                    ready = self.model.logits(_fit(tokens, length), first, 0, length, wanted)
            return ready[:, slot - begin]

        return give

    def run_cached(self, state: None, tokens: np.ndarray, rows: Rows, layout: Layout) -> Rollout:
        """As in AnyArms."""
        return self.take(start_rollout(self, tokens, rows, layout), rows, layout, self.cached(rows))

    def run_uncached(
        self, state: None, run: Rollout, rows: Rows, layout: Layout, uncached_length: str = GROWING
    ) -> Rollout:
        """As in AnyArms."""
        return self.take(run, rows, layout, self.stepped(rows, layout, uncached_length))

    def run_forced(
        self,
        state: None,
        reference: Rollout,
        rows: Rows,
        layout: Layout,
        uncached_length: str = GROWING,
        stepwise: bool = False,
        begin: int = 0,
    ) -> Rollout:
        """As in AnyArms."""
        forced = force(rows, reference)
        start = start_forced(self, reference, forced, layout, begin)
        for form in (self.stepped,) if stepwise else (self.checked, self.stepped):
            run = self.take(start, forced, layout, form(forced, layout, uncached_length))
            if not np.any(run.nonfinite_step >= 0):
                break
        return run


def _fit(tokens: np.ndarray, length: int) -> np.ndarray:
    """A copy of tokens [B, S] cut or padded to [B, length]."""
    fitted = np.full((tokens.shape[0], length), PAD_ID, np.int32)
    shared = min(length, tokens.shape[1])
    fitted[:, :shared] = tokens[:, :shared]
    return fitted
