"""From named source tensors to the decoder's state: matched as a whole first, then streamed one tensor at a time."""

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jaxkv.checkpoints.checkpoint import Progress, Sharding
from jaxkv.config import DType, ModelConfig
from jaxkv.errors import UserError
from jaxkv.models.families import key_table
from jaxkv.models.tables import source_shape

_BLOCK = 1 << 22  # elements converted at a time, so that no second copy of a tensor lives beside the first


@dataclasses.dataclass(frozen=True)
class SourceTensor:
    """A tensor in a file: its Hugging Face name, its shape there, the name of its dtype, and how to read it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def flat_paths(state: nnx.State) -> dict[str, nnx.Variable]:
    """Parameters by path, 'layers/0/attn/q'."""
    flat = nnx.to_flat_state(state)
    return {"/".join(map(str, path)): leaf for path, leaf in zip(flat.paths, flat.leaves, strict=True)}


def with_leaves(state: nnx.State, arrays: Mapping[str, jax.Array]) -> nnx.State:
    """The state with each parameter's value replaced by the array of its path."""
    return nnx.map_state(lambda path, leaf: leaf.replace(arrays["/".join(map(str, path))]), state)


def shorten(items: Sequence[str], most: int = 4) -> str:
    """'a, b, c, d and 5 more'."""
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def tensor_names(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Hugging Face name -> path of each parameter in `shapes`, in the order of the family's key table."""
    return {
        pattern.format(i=layer): path.format(i=layer)
        for pattern, path in key_table(config.family).items()
        for layer in range(config.num_layers if "{i}" in pattern else 1)
        if path.format(i=layer) in shapes
    }


def match_tensors(
    config: ModelConfig, abstract: nnx.State, tensors: Iterable[SourceTensor], where: str
) -> dict[str, SourceTensor]:
    """Pairs each path of a state with its source tensor: every source used once, every parameter filled once.

    A head stored beside a tied embedding is accepted if it has the same bits. Raises UserError with everything that is
    missing, left over or mis-shaped; `where` is the source.
    """
    found = {tensor.name: tensor for tensor in tensors}
    shapes = {path: leaf.shape for path, leaf in flat_paths(abstract).items()}
    wanted = tensor_names(config, shapes)
    head_name, embed_name = "lm_head.weight", "model.embed_tokens.weight"
    if config.tie_embeddings and head_name in found and embed_name in found:
        if not _same_bits(found[head_name], found[embed_name]):
            raise UserError(
                f"{where}: the config says tied embeddings but {head_name} differs from {embed_name}; "
                "set tie_word_embeddings to false or use the original weights"
            )
        del found[head_name]
    missing = [name for name in wanted if name not in found]
    if missing == [head_name]:
        raise UserError(
            f"{where}: the config says untied embeddings but {head_name} is missing; "
            "set tie_word_embeddings to true or use the original weights"
        )
    extra = [name for name in found if name not in wanted]
    bad = [
        f"{name} (is {list(found[name].shape)}, should be {list(shape)})"
        for name, path in wanted.items()
        if name in found and found[name].shape != (shape := source_shape(path, shapes[path]))
    ]
    faults = [
        f"{len(names)} {what}: {shorten(names)}"
        for what, names in (("missing", missing), ("unknown", extra), ("mis-shaped", bad))
        if names
    ]
    if faults:
        raise UserError(f"{where}: tensors do not fit the config; {'; '.join(faults)}; check that both belong together")
    return {path: found[name] for name, path in wanted.items()}


def _same_bits(a: SourceTensor, b: SourceTensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.read().tobytes() == b.read().tobytes()


def cast(source: np.ndarray, shape: tuple[int, ...], dtype: DType, name: str, *, read: bool = True) -> np.ndarray:
    """Our array of `shape` and `dtype` from a source tensor of as many elements, rounded once (to nearest even).

    Raises UserError if a weight has no finite value in `dtype`, or if one that was just `read` is NaN or infinite.
    """
    target = np.dtype(dtype)
    if read:
        _require_finite(source, name)
    if source.dtype == target:
        return source.reshape(shape)
    rows = source.reshape(source.shape[0], -1)
    out = np.empty(rows.shape, target)
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    may_overflow = float(ml_dtypes.finfo(target).max) < float(ml_dtypes.finfo(source.dtype).max)
    for start in range(0, rows.shape[0], step):
        block = rows[start : start + step]
        with np.errstate(over="ignore"):
            rounded = block.astype(target)
        if may_overflow and (lost := np.isinf(rounded) & np.isfinite(block)).any():
            largest = np.abs(block[lost].astype(np.float64)).max()
            raise UserError(
                f"{name}: the weight {largest:.6g} is past the range of {target.name} and would become infinite; "
                "use bf16 or fp32"
            )
        out[start : start + step] = rounded
    return out.reshape(shape)


def _require_finite(source: np.ndarray, name: str) -> None:
    """Raises UserError on NaN or infinity: all bits of the exponent are set. numpy's isfinite is ten times slower."""
    infinity = np.array(np.inf, source.dtype).view(f"u{source.itemsize}")
    bits = source.reshape(-1).view(infinity.dtype)
    for start in range(0, bits.size, _BLOCK):
        if ((bits[start : start + _BLOCK] & infinity) == infinity).any():
            raise not_finite(name)


def not_finite(name: str) -> UserError:
    """The error for a weight that is NaN or infinite."""
    return UserError(f"{name}: a weight is NaN or infinite, so every number would be; download or train it again")


def place(array: np.ndarray, path: str, sharding: Sharding) -> jax.Array:
    """The array on its device or devices. Raises UserError where JAX would narrow 64 bits to 32."""
    where = sharding(path, array.shape) if callable(sharding) else sharding
    placed = jax.device_put(array, where)
    if placed.dtype != array.dtype:
        raise UserError(f"JAX cannot hold {array.dtype.name} here; set JAX_ENABLE_X64=1 or use another precision")
    return placed.block_until_ready()  # else host buffers of many tensors queue up


def fill_state(
    abstract: nnx.State,
    plan: Mapping[str, SourceTensor],
    config: ModelConfig,
    where: str,
    sharding: Sharding,
    progress: Progress | None,
) -> nnx.State:
    """Reads, casts and places one tensor after another; peak memory is the model and one tensor.

    Raises UserError on a weight that overflows, or q and k rows in the wrong RoPE layout.
    """
    arrays: dict[str, jax.Array] = {}
    layout = RopeLayout(config.head_dim)
    leaves = flat_paths(abstract)
    for path, leaf in leaves.items():
        tensor = plan[path]
        source = tensor.read()
        if path.endswith(("attn/q", "attn/k")):
            layout.see(source)
        arrays[path] = place(cast(source, leaf.shape, leaf.dtype, tensor.name), path, sharding)
        if progress is not None:
            progress(len(arrays), len(leaves), tensor.name)
    layout.check(where)
    return with_leaves(abstract, arrays)


class RopeLayout:
    """Tells from trained q and k whether their rows are ordered as RoPE halves.

    RoPE turns rows i and i + H/2 of a head by the same frequency, so training leaves them about the same norm, while
    rows a quarter of a head apart, which turn at very different speeds, differ. The measure of an order is the mean
    square log ratio of norms at distance H/2 over that at distance H/4: small only in the right order, near 1 for
    random weights. Over all layers, right order and two wrong ones: SmolLM2-135M 0.17, 0.97, 2.6; Gemma-3 270M 0.49,
    1.0, 1.4. The thresholds below were set on these two models alone, far from both of their right orders.
    """

    _orders = (0, 1, 2, -1, -2)  # times that pairs are taken apart into halves; negative: halves interleaved

    def __init__(self, head_dim: int):
        self.head_dim = head_dim
        self.sums: list[np.ndarray] = []  # one [orders, 2] an array seen
        self.pairs = 0

    def see(self, rows: np.ndarray) -> None:
        """Takes in one q or k matrix [heads * H, D]."""
        if self.head_dim % 4 or len(self.sums) >= 32:
            return
        norms = np.concatenate(
            [np.linalg.norm(rows[i : i + 256].astype(np.float32), axis=1) for i in range(0, rows.shape[0], 256)]
        )
        logs = np.log(norms + 1e-30).reshape(-1, self.head_dim)
        self.sums.append(np.array([self._distances(reorder(logs, order)) for order in self._orders]))
        self.pairs += logs.size // 2

    @staticmethod
    def _distances(logs: np.ndarray) -> tuple[float, float]:
        quarters = logs.reshape(len(logs), 2, 2, -1)
        half = np.square(quarters[:, 0] - quarters[:, 1]).sum()
        return half, np.square(quarters[:, :, 0] - quarters[:, :, 1]).sum()

    def check(self, where: str) -> None:
        """Raises UserError if another order fits far better; says nothing on few or random weights."""
        if self.pairs < 512 or len(self.sums) < 8 or os.environ.get("JAXKV_TRUST_ROPE_LAYOUT") == "1":
            return
        sums = np.stack(self.sums)
        ratios = sums.sum(0)[:, 0] / np.maximum(sums.sum(0)[:, 1], 1e-30)
        best = int(ratios.argmin())
        wins = np.mean(sums[:, best, 0] * sums[:, 0, 1] < sums[:, 0, 0] * sums[:, best, 1])
        if best and ratios[best] < 0.55 * ratios[0] and wins > 0.75:
            order = self._orders[best]
            what = "RoPE pairs where halves are expected" if order > 0 else "RoPE rows permuted once too often"
            raise UserError(
                f"{where}: the query and key rows look like {what} (layout measure {ratios[0]:.2f}, and "
                f"{ratios[best]:.2f} after {'un' if order > 0 else ''}permuting {abs(order)}x); "
                "convert the weights again from the original, or set JAXKV_TRUST_ROPE_LAYOUT=1 if you are sure of them"
            )


def reorder(x: np.ndarray, times: int) -> np.ndarray:
    """Takes adjacent pairs of the last axis apart into halves `times` times; a negative count interleaves halves."""
    for _ in range(abs(times)):
        pairs = x.reshape(*x.shape[:-1], *((-1, 2) if times > 0 else (2, -1)))
        x = pairs.swapaxes(-1, -2).reshape(x.shape)
    return x


def count_dtypes(tensors: Iterable[SourceTensor]) -> dict[str, int]:
    """Number of tensors by original dtype."""
    return dict(sorted(collections.Counter(tensor.dtype for tensor in tensors).items()))
