"""A model ready to be asked, in one precision, and one prompt on its way through its arms."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.checkpoints import Checkpoint, load
from jaxkv.checkpoints.shipped import DEFAULT
from jaxkv.checkpoints.tokenizer import check_ids, cut_turn
from jaxkv.config import Precision, make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError, nearest
from jaxkv.experiments.batches import Batch, Item, RunSpec, lay_out
from jaxkv.experiments.driver import share_arms
from jaxkv.models.families import get_preset
from jaxkv.rollout import Layout, Rollout, Rows
from jaxkv.sampling import Gap, Sampler, measure_gap

PRECISIONS = ("fp16", "bf16", "fp32")
Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model ready to be asked, in one precision; programs and prepared weights are made when first needed.

    Attributes:
      name: what it is called.
      checkpoint: as it was read.
      precision: policy of both arms.
      source: arguments of `load_model` that read it.
    """

    name: str
    checkpoint: Checkpoint
    precision: Precision
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def state(self) -> Any:
        """Weights as the arms take them, which the checkpoint then holds too."""
        return self.arms(Sampler()).prepare_in_place(self.checkpoint.state)

    def arms(self, sampler: Sampler, tile: int | None = None) -> Arms:
        """Compiled programs, one set for each sampler and regime."""
        return make_arms(self.checkpoint, self.precision, sampler, tile)

    def name_token(self, before: Sequence[int], token: int) -> str:
        """A token's text where it would stand after others."""
        tokenizer = self.checkpoint.tokenizer
        if token in {*tokenizer.turn_ends, *tokenizer.eos_ids}:
            return "<end of text>"
        text = tokenizer.decode_new(before, [token])
        return text if text.strip("\ufffd") else f"<id {token}>"  # part of a character

    def encode(self, prompt: str, chat: bool | None = None) -> tuple[int, ...]:
        """Ids of a prompt: as a message of the chat template where there is one, unless `chat` says otherwise."""
        tokenizer = self.checkpoint.tokenizer
        if chat is None:
            chat = tokenizer.has_chat_template
        ids = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
        check_ids(ids, self.checkpoint.config.vocab_size, tokenizer.vocab_size, "the prompt")
        return tuple(ids)

    def decode(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Text that new tokens add to a prompt, up to the end of the turn."""
        tokenizer = self.checkpoint.tokenizer
        ends = {*tokenizer.turn_ends, *tokenizer.eos_ids}
        return tokenizer.decode_new(prompt, cut_turn(list(tokens), ends))


def make_arms(checkpoint: Checkpoint, precision: Precision, sampler: Sampler, tile: int | None = None) -> Arms:
    """Arms that prompts and models of a process share if they would compile the same."""
    return share_arms(checkpoint.config, precision, sampler, tuple(checkpoint.tokenizer.eos_ids), tile)


def load_model(
    name: str | None = None,
    checkpoint: str | None = None,
    precision: str = "bf16",
    revision: str | None = None,
    tell: Tell | None = None,
    **parts: str | None,
) -> Model:
    """Reads a model.

    Args:
      name: of a preset; found out from the checkpoint if not given, one that ships with jaxkv if neither is.
      checkpoint: as --checkpoint; the preset's own if not given.
      precision: 'fp16', 'bf16' or 'fp32'.
      revision: of a hub id.
      tell: called with how far a download is.
      **parts: parts of the precision that have another dtype, e.g. residual='fp32'.

    Raises:
      UserError: anything the user can mend.
    """
    if precision not in PRECISIONS:
        more = (
            "; a reference in fp64 is of `jaxkv run`" if precision == "fp64" else nearest(precision, list(PRECISIONS))
        )
        raise UserError(f"precision '{precision}' is not known here{more}; known: {', '.join(PRECISIONS)}")
    if name is None and checkpoint is None:
        name = DEFAULT
    policy, preset = make_precision(precision, **parts), get_preset(name) if name else None
    read = load(checkpoint or name or "", precision=policy, config=preset, revision=revision, tell=tell)
    called = name or read.config.name
    return Model(called, read, policy, {"name": name, "checkpoint": checkpoint, "revision": revision})


@dataclasses.dataclass
class PromptRun:
    """One prompt on its way: what is asked, and the wall time of each phase."""

    model: Model
    prompt: str
    item: Item
    spec: RunSpec
    sampler: Sampler
    tell: Tell
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str, first: bool = False) -> Iterator[None]:
        """Tells what is done, and that it takes longer the first time, and takes the time."""
        self.tell(f"{name} (the first time their programs are compiled)" if first else name)
        begin = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begin, 2)

    def lay_out(self) -> tuple[Layout, np.ndarray, Rows]:
        """Layout, token buffer [1, S] and rows."""
        return lay_out(Batch((self.item,), False, False), self.spec, self.model.checkpoint.config)

    def measure_gap(self, rollout: Rollout, step: int, tokens: tuple[int, int]) -> Gap:
        """How a rollout prefers one token to another at a step."""
        position = len(self.item.prompt) + step
        logits = jnp.asarray(rollout.logits[0, step])
        return measure_gap(logits, self.sampler, self.spec.seed, self.item.problem, position, tokens)

    def take(self, rollout: Rollout) -> list[int]:
        """A rollout's new tokens."""
        begin = len(self.item.prompt)
        return np.asarray(rollout.tokens[0, begin : begin + int(rollout.lengths[0])]).tolist()
