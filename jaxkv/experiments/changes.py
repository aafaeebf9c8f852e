"""Changes of a cache by name: what the flags `--cache_error` and `--cache_quant` ask for, with their seeds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv.cache import Intervention
from jaxkv.config import ModelConfig, Precision
from jaxkv.errors import UserError
from jaxkv.experiments.record_parts import CLEAN
from jaxkv.interventions.cache_error_spec import parse_cache_error
from jaxkv.interventions.cache_errors import CacheError
from jaxkv.interventions.perturbed_cache import Perturbation
from jaxkv.interventions.quantized_cache import Quantization
from jaxkv.interventions.quantizers import CacheQuant, parse_cache_quant
from jaxkv.options import CacheOptions

# The caches of Shebel's study (May 2025), and beside its errors what tells their parts from each other: other laws of
# the same variance, with and without sign flips; a mean and a spread of the same mean square; one side; each read anew.
SEED_QUANTS = ("llama:q8_0", "llama:q4_0")
SEED_ERRORS = (
    *("uniform:-1,1", "uniform:-1.5,1.5", "normal:0,0.25", "normal:0,0.5"),
    *("uniform:0,2", "points:0,0.8660254037844386", "normal:0,0.5;sign=keep", "normal:0.5,0", "points:0,0.5"),
    *("uniform:-1,1;side=k", "uniform:-1,1;side=v", "uniform:-1,1;draw=read", "uniform:-1,1;correlate=token"),
)
ERROR_SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Change:
    """What is done to the cache; nothing in the clean arm."""

    what: CacheError | CacheQuant | None

    @property
    def name(self) -> str:
        """Its key in the records: the spec that gives it."""
        return CLEAN if self.what is None else str(self.what)

    def intervention(self, seed: int) -> Intervention | None:
        """Makes its caches, whose noise has this seed whatever the sampler's is."""
        if isinstance(self.what, CacheQuant):
            return Quantization(self.what)
        return None if self.what is None else Perturbation(self.what, seed)

    def seeds(self, seeds: Sequence[int]) -> list[int]:
        """The seeds it is to be run with: 0 alone if it draws nothing."""
        return list(seeds) if isinstance(self.what, CacheError) and self.what.moments()[1] else [0]

    def describe(self, head_dim: int) -> dict[str, Any] | None:
        """The spec of a record."""
        if not isinstance(self.what, CacheQuant):
            return None if self.what is None else self.what.describe()
        sides: dict[str, Any] = {}
        for name, side in (("k", self.what.k), ("v", self.what.v)):
            method, window = side.quantizer, side.window
            sides[name] = method and {
                "method": type(method).__name__,
                "bits": method.bits_per_element(head_dim),
                **{part: getattr(window, part) for part in ("first", "recent", "block")},
                "own": method.own,
            }
        return {"family": "quant"} | sides


def make_changes(
    errors: Sequence[str], quants: Sequence[str], config: ModelConfig | None = None, precision: Precision | None = None
) -> list[Change]:
    """The clean arm and the changes that are asked for, in order: quantizers, then errors.

    Raises UserError on a text that is not understood, names the clean cache, is given twice, or does not suit the model
    or the dtype of the arms' cache where these are given.
    """
    changes = [Change(None)]
    asked = [*(("cache_quant", text) for text in quants), *(("cache_error", text) for text in errors)]
    for flag, text in asked:
        change = Change(parse_cache_quant(text) if flag == "cache_quant" else parse_cache_error(text))
        if change.name == CLEAN:
            raise UserError(f"--{flag}={text} leaves the cache as it is, and the clean arm always runs; drop it")
        if change in changes:
            raise UserError(f"--{flag}={text} asks for {change.name} a second time; drop it")
        try:
            if isinstance(change.what, CacheQuant):
                if config is not None:
                    change.what.check(config.head_dim, config.context_length, config.windowed_layers)
                if precision is not None:
                    change.what.stored_as(precision.cache)
            elif config is not None and change.what is not None:
                change.what.check(config.num_layers, config.num_kv_heads)
        except UserError as error:
            raise UserError(f"--{flag}={text}: {error}") from None
        changes.append(change)
    return changes


def read_changes(
    asked: CacheOptions, config: ModelConfig, errors: Sequence[str] = (), quants: Sequence[str] = ()
) -> tuple[list[Change], Sequence[int]]:
    """The clean cache and the changes asked for, `errors` and `quants` where none is, and the seeds of the errors."""
    if asked.cache_error or asked.cache_quant:
        errors, quants = asked.cache_error, asked.cache_quant
    return make_changes(errors, quants, config), asked.error_seeds or ERROR_SEEDS


def list_runs(changes: Sequence[Change], seeds: Sequence[int]) -> dict[tuple[str | int, ...], tuple[Change, int]]:
    """Each change with each of its seeds, by what keys their records: one record a problem."""
    return {(change.name, seed): (change, seed) for change in changes for seed in change.seeds(seeds)}
