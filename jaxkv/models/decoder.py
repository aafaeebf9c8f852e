"""One decoder for every family; what differs between them is data in ModelConfig."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.cache import Cache, Hook, LayerCache, WatchedCache
from jaxkv.config import ModelConfig, Precision
from jaxkv.models.alignment import Alignment, Rowwise, direct, make_rowwise
from jaxkv.models.attention import ATTENTIONS
from jaxkv.models.layers import MLP, Attend, Attention, RMSNorm, init_weight, no_hook, product, rope_table, softcap


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP on the residual stream, with post norms where the config has them."""

    def __init__(self, config: ModelConfig, precision: Precision, layer: int, rngs: nnx.Rngs | None, attend: Attend):
        self.precision, self.layer = precision, layer
        D = config.model_dim
        self.attn_norm = RMSNorm(D, config, precision)
        self.attn = Attention(config, precision, layer, rngs, attend)
        self.mlp_norm = RMSNorm(D, config, precision)
        self.mlp = MLP(config, precision, layer, rngs)
        self.attn_post_norm = RMSNorm(D, config, precision) if config.post_norms else None
        self.mlp_post_norm = RMSNorm(D, config, precision) if config.post_norms else None

    def _join(self, resid, branch, post_norm: RMSNorm | None, name: str, hook: Hook, rows: Rowwise):
        residual = self.precision.residual
        if post_norm is None:
            branch = branch.astype(residual)
        else:
            branch = rows("norms", lambda branch: post_norm(branch, residual), branch)
        return resid + hook(f"{name}.{self.layer}", branch)

    def __call__(
        self,
        resid,
        positions,
        cache: LayerCache,
        key_positions,
        slot,
        table,
        hook: Hook = no_hook,
        rows: Rowwise = direct,
    ):
        """One layer on resid [B,T,D]; the other arguments as in Attention. Returns resid and the layer's cache."""
        activation, layer = self.precision.activation, self.layer
        resid = hook(f"resid_pre.{layer}", resid)
        x = hook(f"attn_norm.{layer}", rows("norms", lambda resid: self.attn_norm(resid, activation), resid))
        out, cache = self.attn(x, positions, cache, key_positions, slot, table, hook, rows)
        resid = hook(f"resid_mid.{layer}", self._join(resid, out, self.attn_post_norm, "attn_out", hook, rows))
        x = hook(f"mlp_norm.{layer}", rows("norms", lambda resid: self.mlp_norm(resid, activation), resid))
        resid = self._join(resid, self.mlp(x, hook, rows), self.mlp_post_norm, "mlp_out", hook, rows)
        return resid, cache


class Decoder(nnx.Module):
    """Causal language model: token ids and a cache in, final hidden rows and the new cache out."""

    def __init__(self, config: ModelConfig, precision: Precision, rngs: nnx.Rngs | None, attention: str = "eager"):
        self.config, self.precision, attend = config, precision, ATTENTIONS[attention]
        V, D = config.vocab_size, config.model_dim
        self.embed = init_weight(rngs, (V, D), D, precision)
        self.layers = nnx.List(
            [DecoderLayer(config, precision, layer, rngs, attend) for layer in range(config.num_layers)]
        )
        self.final_norm = RMSNorm(D, config, precision)
        self.head = None if config.tie_embeddings else init_weight(rngs, (V, D), D, precision)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache | WatchedCache,
        slot: jax.Array | int,
        hook: Hook = no_hook,
        alignment: Alignment | None = None,
    ) -> tuple[jax.Array, Any]:
        """Hidden rows [B, T, D] after the final norm, and the new cache, of T rows run against a cache (maybe empty).

        Tokens and absolute positions are [B, T] int32; padding rows have position -1, write zeros and are seen by
        nobody. Rows are written at slots [slot, slot + T), which must lie inside. The hook sees and may replace each
        named value (see layers.py), before the tap of a watched cache does.
        """
        if not isinstance(cache, WatchedCache):
            return self._forward(tokens, positions, cache, slot, hook, alignment)

        def forward(cache: Cache, watch: Hook) -> tuple[jax.Array, Any]:
            both = lambda name, value: watch(name, hook(name, value))  # noqa: E731
            return self._forward(tokens, positions, cache, slot, both, alignment)

        hidden, after, tap = cache.tap.watch(forward, cache.cache, positions, slot)
        return hidden, WatchedCache(after, tap)

    def _forward(
        self, tokens, positions, cache: Cache, slot, hook: Hook, alignment: Alignment | None
    ) -> tuple[jax.Array, Any]:
        config, precision = self.config, self.precision
        rows = make_rowwise(alignment, slot)
        factor = jnp.asarray(config.embed_scale, precision.activation).astype(precision.residual)
        resid = self.embed[...][tokens].astype(precision.residual) * factor
        call = cache.begin(positions, slot)
        tables = {
            rope: rows("rope", lambda p, rope=rope: rope_table(p, rope, config.head_dim, precision), positions)
            for rope in dict.fromkeys(map(config.layer_rope, range(config.num_layers)))
        }
        written = []
        for index, layer in enumerate(self.layers):
            table = tables[config.layer_rope(index)]
            with jax.named_scope(f"layer.{index}"):
                resid, after = layer(resid, positions, call.layer(index), call.positions, slot, table, hook, rows)
            written.append(after)
        resid = hook(f"resid_pre.{config.num_layers}", resid)
        hidden = hook("final_norm", rows("norms", lambda resid: self.final_norm(resid, precision.activation), resid))
        return hidden, call.finish(written)

    def logits(
        self,
        hidden: jax.Array,
        hook: Hook = no_hook,
        alignment: Alignment | None = None,
        slot: jax.Array | int = 0,
    ) -> jax.Array:
        """Logits [B, T, V] of hidden rows [B, T, D]; `slot`, that of the first, matters to an alignment alone."""
        precision, rows = self.precision, make_rowwise(alignment, slot)
        table = self.embed if self.head is None else self.head

        def multiply(hidden):
            return product("btd,vd->btv", hidden, table[...], precision, precision.logits)

        def cap(logits):
            return softcap(logits, self.config.final_softcap, precision.softmax)

        return hook("logits", rows("head", cap, hook("head", rows("head", multiply, hidden))))


def abstract_decoder(
    config: ModelConfig, precision: Precision, attention: str = "eager"
) -> tuple[nnx.GraphDef, nnx.State]:
    """Shapes and dtypes of a decoder without allocating it: graphdef and a State of ShapeDtypeStructs."""
    model = nnx.eval_shape(lambda: Decoder(config, precision, None, attention))
    return nnx.split(model)
