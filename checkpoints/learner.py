"""The training step of the shipped checkpoints: the package's own decoder, a loss on packed rows, an optax optimizer.

Every operation adds in an order of its own choice only where the order is fixed: no scatter-adds, so that on a GPU too
the same program on the same numbers gives the same bits.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxkv.cache import empty_cache
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.config import ModelConfig, Precision, make_precision
from jaxkv.models.decoder import Decoder, abstract_decoder

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the weights are changed."""

    steps: int
    lr: float  # the peak; it rises linearly over `warmup` steps and falls to a tenth along a cosine
    warmup: int
    weight_decay: float  # decoupled, on matrices only (with muon, on those of the layers only)
    clip: float  # largest norm of the gradient
    b2: float  # decay of Adam's second moment
    optimizer: str  # 'adamw', or 'muon', which orthogonalizes the updates of the layers' matrices

    def rate(self) -> optax.Schedule:
        """Learning rate by step."""
        return optax.warmup_cosine_decay_schedule(0.0, self.lr, self.warmup, self.steps, self.lr / 10)


def training_precision(name: str) -> Precision:
    """The policy of training: fp32 master weights and residual stream, products in `name`.

    With bf16, products come back in bf16, which keeps the backward pass's products in bf16 too; kernels add in fp32.
    """
    if name == "fp32":
        return make_precision("fp32")
    precision = make_precision(name, param="fp32", residual="fp32", accumulation=name)
    return dataclasses.replace(precision, dot=jax.lax.Precision.DEFAULT)


@jax.custom_vjp
def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of a table [V, D] at tokens [B, T], with a gradient that is a product instead of a scatter-add."""
    return table[tokens]


def _look_up_forward(table, tokens):
    return table[tokens], (table, tokens)


def _look_up_backward(kept, gradient):
    table, tokens = kept
    chosen = jax.nn.one_hot(tokens, table.shape[0], dtype=gradient.dtype)
    rows = jnp.einsum("btv,btd->vd", chosen, gradient, precision=jax.lax.Precision.HIGHEST)
    return rows.astype(table.dtype), np.zeros(tokens.shape, jax.dtypes.float0)


look_up.defvjp(_look_up_forward, _look_up_backward)


def locate(tokens: jax.Array, bos: int) -> tuple[jax.Array, jax.Array]:
    """Document number and position within the document of each token of packed rows, both [B, T] int32."""
    starts = tokens == bos
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return jnp.cumsum(starts, axis=1), slots - jax.lax.cummax(jnp.where(starts, slots, 0), axis=1)


class Learner:
    """Compiled training of one model. Weights are a dict from the decoder's paths to fp32 arrays.

    A question's tokens have `question_weight` in the loss, an answer's 1; `bos` starts a document. With `remat` the
    backward pass computes each layer's inner values again rather than keep them.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        schedule: Schedule,
        *,
        question_weight: float,
        bos: int,
        remat: bool = False,
    ):
        self.config, self.precision, self.bos = config, precision, bos
        self.question_weight = question_weight
        self.graphdef, self.abstract_state = abstract_decoder(config, precision)
        # Logits come straight from the fp32 accumulator.
        wide = dataclasses.replace(precision, accumulation=precision.softmax, logits=precision.softmax)
        self.head_graphdef = abstract_decoder(config, wide)[0]
        self.rate = schedule.rate()
        self.optimizer = make_optimizer(schedule)
        self._nll = self._forward
        if remat:
            names = [f"{name}.{layer}" for name in ("resid_pre", "resid_mid") for layer in range(config.num_layers + 1)]
            policy = jax.checkpoint_policies.save_only_these_names(*names)
            self._nll = jax.checkpoint(self._forward, policy=policy)
        self.train = jax.jit(self._train, donate_argnums=(0, 1))
        self.measure = jax.jit(self._measure)

    def initialize(self, seed: int) -> tuple[Params, Any]:
        """Random weights and the optimizer's first state."""
        state = nnx.split(Decoder(self.config, self.precision, nnx.Rngs(seed)))[1]
        params = {path: jnp.asarray(leaf[...]) for path, leaf in flat_paths(state).items()}
        return params, self.optimizer.init(params)

    def to_state(self, params: Mapping[str, jax.Array]) -> nnx.State:
        """The decoder's state from the weights by path."""
        return with_leaves(self.abstract_state, params)

    def _forward(self, params: Params, rows: jax.Array) -> jax.Array:
        """Negative log probability [B, T] of each next token of rows [B, T + 1]."""
        tokens, targets = rows[:, :-1], rows[:, 1:]
        documents, positions = locate(tokens, self.bos)
        same = (documents[:, :, None] == documents[:, None, :])[:, None, None]
        embed_scale = jnp.asarray(self.config.embed_scale, self.precision.activation).astype(self.precision.residual)

        def hook(name: str, value: jax.Array) -> jax.Array:
            if name == "resid_pre.0":
                value = look_up(params["embed"], tokens).astype(self.precision.residual) * embed_scale
            if name.startswith("scores."):  # a document sees nothing of those before it in its row
                value = jnp.where(same, value, jnp.finfo(value.dtype).min)
            return checkpoint_name(value, name)

        state = self.to_state(params)
        cache = empty_cache(self.config, self.precision, *tokens.shape)
        hidden, _ = nnx.merge(self.graphdef, state)(tokens, positions, cache, 0, hook)
        logits = nnx.merge(self.head_graphdef, state).logits(hidden)
        chosen = jnp.arange(logits.shape[-1])[None, None] == targets[..., None]
        return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(chosen, logits, 0), axis=-1)

    def _weights(self, rows: jax.Array, answers: jax.Array) -> jax.Array:
        """Weight [B, T] of each next token; a BOS is never to be foretold."""
        weights = jnp.where(answers[:, 1:], 1.0, self.question_weight)
        return jnp.where(rows[:, 1:] == self.bos, 0.0, weights)

    def _loss(self, params: Params, rows: jax.Array, answers: jax.Array) -> jax.Array:
        weights = self._weights(rows, answers)
        return jnp.sum(self._nll(params, rows) * weights) / jnp.sum(weights)

    def _step(self, carry, batch):
        params, opt_state = carry
        rows, answers = batch
        loss, gradient = jax.value_and_grad(self._loss)(params, rows.astype(jnp.int32), answers)
        updates, opt_state = self.optimizer.update(gradient, opt_state, params)
        metrics = {"loss": loss, "gradient_norm": optax.global_norm(gradient)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    def _train(self, params: Params, opt_state: Any, tokens: jax.Array, answers: jax.Array):
        """Steps on tokens [n, B, T + 1] uint16 and answers [n, B, T + 1] bool, a batch a step.

        Returns new weights and optimizer state, the old ones being donated, and `loss` and `gradient_norm`, each [n].
        """
        (params, opt_state), metrics = jax.lax.scan(self._step, (params, opt_state), (tokens, answers))
        return params, opt_state, metrics

    def _measure(self, params: Params, tokens: jax.Array, answers: jax.Array) -> dict[str, jax.Array]:
        """Mean negative log probability over the answers' and over the questions' tokens of rows [B, T + 1]."""
        rows = tokens.astype(jnp.int32)
        nll, told = self._nll(params, rows), rows[:, 1:] != self.bos
        masks = {"answer": answers[:, 1:] & told, "question": ~answers[:, 1:] & told}
        return {name: jnp.sum(nll * mask) / jnp.maximum(jnp.sum(mask), 1) for name, mask in masks.items()}


def make_optimizer(schedule: Schedule) -> optax.GradientTransformation:
    """The optimizer of a schedule."""
    decays = functools.partial(jax.tree.map, lambda value: value.ndim > 1)
    rate, decay = schedule.rate(), schedule.weight_decay
    if schedule.optimizer == "adamw":
        rule = optax.adamw(rate, b1=0.9, b2=schedule.b2, weight_decay=decay, mask=decays)
    else:
        rule = optax.contrib.muon(
            rate,
            weight_decay=decay,
            weight_decay_mask=decays,
            adam_b2=schedule.b2,
            consistent_rms=0.2,  # updates as large as Adam's, so that both share a learning rate (arXiv 2502.16982)
            muon_weight_dimension_numbers=_matrices,
        )
    return optax.chain(optax.clip_by_global_norm(schedule.clip), rule)


def _matrices(params: Params) -> dict[str, Any]:
    """Which weights are matrices of the layers, and which of their axes are summed over (ours: the last ones)."""
    dimensions = optax.contrib.MuonDimensionNumbers

    def choose(path: str, value: Any) -> Any:
        ndim = getattr(value, "ndim", 0)  # optax hands over placeholders for the weights that are not matrices
        if ndim < 2 or path == "embed":
            return None
        if path.endswith("attn/o"):
            return dimensions(reduction_axis=(1, 2), output_axis=0)
        return dimensions(reduction_axis=ndim - 1, output_axis=tuple(range(ndim - 1)))

    return {path: choose(path, value) for path, value in params.items()}
