"""A checkpoint of ours as transformers' PyTorch model: the same weights, token ids, padding and positions.

torch and transformers are imported only when a model is built.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from jaxkv.checkpoints.checkpoint import Checkpoint
from jaxkv.checkpoints.fill import cast, flat_paths, tensor_names
from jaxkv.checkpoints.hf_config import transformers_config
from jaxkv.config import ModelConfig, Precision, make_precision
from jaxkv.errors import UserError, nearest
from jaxkv.models.families import key_table
from jaxkv.models.tables import source_shape

ATTENTIONS = ("eager", "sdpa")
PRECISIONS = ("fp16", "bf16", "fp32")


def import_torch() -> Any:
    """Returns torch. Raises UserError, with the command that installs it, where it is missing."""
    try:
        import torch
    except ImportError:
        raise UserError("the PyTorch path needs torch; run pip install 'jaxkv[torch]'") from None
    return torch


def check_torch(config: ModelConfig | None, precision: Precision, attention: str) -> None:
    """Finds out, before weights are loaded, whether transformers can compute what is asked.

    `config` is None if only the checkpoint will tell. Raises UserError on a policy that its models do not have, or an
    attention that is unknown or drops a softcap.
    """
    base = precision.name.split("+")[0]
    if base not in PRECISIONS:
        raise UserError(f"transformers' models do not compute in {base} throughout; use {', '.join(PRECISIONS)}")
    usual = make_precision(base)
    if precision != usual:
        ours, theirs = precision.to_json(), usual.to_json()
        odd = ", ".join(f"{part}={ours[part]}" for part in ours if part != "name" and ours[part] != theirs[part])
        raise UserError(f"transformers' models have one dtype throughout and cannot run {base} with {odd}; drop it")
    if attention not in ATTENTIONS:
        raise UserError(
            f"unknown attention '{attention}'{nearest(attention, list(ATTENTIONS))}; known: {', '.join(ATTENTIONS)}"
        )
    if attention == "sdpa" and config is not None and config.attn_softcap is not None:
        raise UserError(f"{config.name} caps attention scores and torch's sdpa cannot; use --attention=eager")


@contextlib.contextmanager
def true_fp32() -> Iterator[None]:
    """fp32 products in fp32, not TF32 or bf16; what was set before is set again.

    The one switch also turns `torch.backends.cuda.matmul.allow_tf32` off; to set both is an error in newer torch.
    """
    torch = import_torch()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def describe_torch() -> dict[str, Any]:
    """Versions, device and the switches of torch that decide numbers, as they are while the arms run."""
    torch = import_torch()
    import transformers

    with true_fp32():
        cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
        found: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        }
        if not torch.cuda.is_available():
            return found | {
                "capability": torch.backends.cpu.get_cpu_capability(),
                "threads": torch.get_num_threads(),
                "mkldnn": torch.backends.mkldnn.enabled,
            }
        found["versions"] |= {"cuda": torch.version.cuda, "cudnn": str(cudnn.version())}
        switches = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
        kernels = ("flash", "mem_efficient", "math", "cudnn")
        return found | {
            **{name: getattr(cuda.matmul, name) for name in switches},
            "cudnn": {name: getattr(cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")},
            "sdp": {name: getattr(cuda, f"{name}_sdp_enabled")() for name in kernels},
        }


class TorchModel:
    """transformers' model of a checkpoint, fed slots of a token buffer.

    `net` is the model, on a GPU where there is one. Weights are rounded once if they are not in `precision` yet. Raises
    UserError on what transformers cannot compute, or an overflow of a weight.
    """

    def __init__(self, checkpoint: Checkpoint, precision: Precision, attention: str):
        check_torch(checkpoint.config, precision, attention)
        self.torch = import_torch()
        self.config, self.precision, self.attention = checkpoint.config, precision, attention
        self.device = "cuda" if self.torch.cuda.is_available() else "cpu"
        self.net = self._build()
        self._fill(checkpoint)
        # transformers 5 renames `past_key_values` to `cache`.
        names = inspect.signature(type(self.net).forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    def _build(self) -> Any:
        import transformers

        settings, dtype = transformers_config(self.config), getattr(self.torch, np.dtype(self.precision.param).name)
        make = transformers.AutoModelForCausalLM.from_config
        try:
            with self.torch.device(self.device):
                net = make(settings, dtype=dtype, attn_implementation=self.attention)
        except ValueError as error:
            raise UserError(f"{self.config.name}: transformers refuses attention {self.attention} ({error})") from error
        return net.eval()

    def _fill(self, checkpoint: Checkpoint) -> None:
        """Copies every weight by the table that exports them."""
        leaves = flat_paths(checkpoint.state)
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
        names = tensor_names(self.config, shapes, key_table(self.config.family))
        parameters = dict(self.net.named_parameters())
        if odd := sorted(set(parameters) ^ set(names)):
            raise UserError(f"{self.config.name}: transformers' model has other weights than ours: {', '.join(odd)}")
        with self.torch.no_grad():
            for name, path in names.items():
                shape = source_shape(path, shapes[path])
                array = cast(np.asarray(leaves[path][...]), shape, np.dtype(self.precision.param), name, read=False)
                parameters[name].copy_(self._to_torch(array))

    def _to_torch(self, array: np.ndarray) -> Any:
        array = np.require(array, requirements=["C", "W"])  # JAX hands out read-only views
        if array.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def _to_numpy(self, tensor: Any) -> np.ndarray:
        if tensor.dtype == self.torch.bfloat16:
            return tensor.contiguous().view(self.torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return tensor.cpu().numpy()

    def new_cache(self) -> Any:
        """An empty DynamicCache; layers with a window keep what the window needs, as in `generate`."""
        import transformers

        return transformers.DynamicCache(config=self.net.config)

    def positions(self, begin: int, end: int, first: np.ndarray) -> np.ndarray:
        """[B, end - begin] absolute positions of slots, 0 in left padding."""
        return np.maximum(np.arange(begin, end)[None] - first[:, None], 0)

    def run(self, tokens: np.ndarray, first: np.ndarray, begin: int, end: int, keep: Any, cache: Any = None) -> Any:
        """One forward over slots [begin, end) of tokens [B, at least end]; the attention mask hides left padding alone.

        The mask is always given: without one, transformers looks for several texts in a row's positions. `first` [B] is
        the slot of each row's first token, `keep` is `logits_to_keep`: the last so many rows or a list of rows. `cache`
        is of the slots before `begin`; None runs from slot 0 with use_cache=False.
        """
        torch = self.torch
        mask = np.arange(end)[None] >= first[:, None]
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor(tokens[:, begin:end], dtype=torch.long, device=self.device),
            "attention_mask": torch.tensor(mask, dtype=torch.long, device=self.device),
            "position_ids": torch.tensor(self.positions(begin, end, first), dtype=torch.long, device=self.device),
            "use_cache": cache is not None,
            "logits_to_keep": keep if isinstance(keep, int) else torch.tensor(keep, device=self.device),
        }
        if cache is not None:
            arguments[self._cache_argument] = cache
        with torch.inference_mode():
            return self.net(**arguments)

    def logits(
        self, tokens: np.ndarray, first: np.ndarray, begin: int, end: int, keep: Any, cache: Any = None
    ) -> np.ndarray:
        """`run`'s logits [B, rows kept, V] in the precision's dtype."""
        logits = self._to_numpy(self.run(tokens, first, begin, end, keep, cache).logits)
        if logits.dtype != np.dtype(self.precision.logits):
            raise TypeError(f"transformers gives {logits.dtype} logits where {self.precision.name} was expected")
        return logits

    @contextlib.contextmanager
    def one_row_head(self) -> Iterator[None]:
        """The head multiplies one row of each text at a time, as in a step; on all rows it runs another kernel."""
        head, whole = self.net.lm_head, self.net.lm_head.forward

        def by_rows(hidden: Any) -> Any:
            return self.torch.cat([whole(hidden[:, row : row + 1]) for row in range(hidden.shape[1])], dim=1)

        with mock.patch.object(head, "forward", by_rows):
            yield

    def audit(self, tokens: np.ndarray, first: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
        """Largest magnitude of what each module gives out, in one uncached forward over tokens [B, P].

        name -> [B, P] float32 in order of execution, 0 outside slots [first, ends), [B] each. Residual streams have our
        names (`resid_pre.l`, `resid_mid.l`), as have `head`, `logits` and, in eager attention, `qk.l`, the products
        before scaling with keys that a row sees; the rest have transformers' names. sdpa shows no products.
        """
        length = max(int(ends.max()), 1)
        slots = np.arange(tokens.shape[1])[None]
        inside = (slots >= first[:, None]) & (slots < ends[:, None])
        peaks: dict[str, np.ndarray] = {}

        def record(name: str, magnitude: Any) -> None:
            wide = np.zeros(inside.shape, np.float32)
            wide[:, :length] = magnitude.float().cpu().numpy()
            peaks[name] = np.where(inside, wide, 0)

        def record_rows(name: str, value: Any) -> None:
            # Gemma-3 norms q and k as [B, N, T, H], a view of [B, T, N, H], which Qwen3 norms.
            heads_first = value.ndim == 4 and value.shape[2] == length and value.stride(1) <= value.stride(2)
            record(name, value.abs().amax((1, 3)) if heads_first else value.abs().flatten(2).amax(-1))

        with contextlib.ExitStack() as stack:
            for handle in self._hooks(record_rows):
                stack.callback(handle.remove)
            if self.attention == "eager":
                stack.enter_context(self._watch_scores(record))
            record_rows("logits", self.run(tokens, first, 0, length, 0).logits)
        return peaks

    def _hooks(self, record: Any) -> Iterator[Any]:
        """Hooks on what enters each layer and its MLP, and on what each module without parts gives out."""
        # The norm before the MLP has another name where the attention's output has a norm of its own.
        mlp_norm = "pre_feedforward_layernorm" if self.config.post_norms else "post_attention_layernorm"
        inside, outside = {"": "resid_pre", mlp_norm: "resid_mid"}, {"norm": f"resid_pre.{self.config.num_layers}"}

        def entering(name: str) -> Any:
            return lambda module, inputs, kwargs: record(name, inputs[0] if inputs else kwargs["hidden_states"])

        def leaving(name: str) -> Any:
            return lambda module, inputs, output: record(name, output)

        for path, module in self.net.named_modules():
            found = re.fullmatch(r"model\.layers\.(\d+)\.?(.*)", path)
            layer, short = (f".{found[1]}", found[2]) if found else ("", path.removeprefix("model."))
            if enters := (inside if found else outside).get(short):
                yield module.register_forward_pre_hook(entering(enters + layer), with_kwargs=True)
            if not list(module.children()) and "rotary" not in path:
                name = {"lm_head": "head", "norm": "final_norm"}.get(short, short.replace(".", "/"))
                yield module.register_forward_hook(leaving(name + layer))

    @contextlib.contextmanager
    def _watch_scores(self, record: Any) -> Iterator[None]:
        """Shows `record` the products of queries and keys, by a function around eager attention."""
        torch, file = self.torch, sys.modules[type(self.net).__module__]
        original = file.eager_attention_forward

        def watched(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any):
            groups = query.shape[1] // key.shape[1]
            products = torch.matmul(query, key.repeat_interleave(groups, dim=1).transpose(2, 3))
            if attention_mask is not None:
                unseen = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask < 0
                products = products.masked_fill(unseen, 0)
            record(f"qk.{module.layer_idx}", products.abs().amax((1, 3)))
            return original(module, query, key, value, attention_mask, *args, **kwargs)

        with mock.patch.object(file, "eager_attention_forward", watched):
            yield
