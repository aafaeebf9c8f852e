"""The experiments of the command by name: what each runs on a condition."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jaxkv.condition import OWN_PRECISIONS, Study

Done = frozenset[tuple]  # keys of the records on disk, without the experiment's name
Batches = Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]  # records, timing


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
      run: yields the records not yet done, batch by batch.
      count: how many records a problem has.
    """

    run: Callable[[Study, Done], Batches]
    count: Callable[[], int]


def _run_divergence(study: Study, done: Done) -> Batches:
    problems = frozenset(problem for (problem,) in done)
    if study.framework == "torch":
        from jaxkv.torch_path import run_torch_divergence

        return run_torch_divergence(
            study.checkpoint, study.precision, study.sampler, study.items, study.spec, study.task,
            study.settings["attention"], problems,
        )  # fmt: skip
    from jaxkv.experiments.divergence import run_divergence

    tokenizer = study.checkpoint.tokenizer
    return run_divergence(study.arms, study.state, study.items, study.spec, tokenizer, study.task, problems)


def _run_attribution(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.attribution import run_attribution

    return run_attribution(study.plain, study.state, study.items, study.spec, study.tile, done)


def _count_attribution() -> int:
    from jaxkv.experiments.attribution import VARIANTS

    return len(VARIANTS)


def _run_mitigations(study: Study, done: Done) -> Batches:
    """Its variants have precisions of their own, rounded from the weights in fp32."""
    from jaxkv.experiments.mitigations import make_variants, run_mitigations

    checkpoint, variants = study.checkpoint, make_variants(study.tile)
    return run_mitigations(
        checkpoint.config, checkpoint.state, study.items, study.spec, variants, done, study.sampler,
        checkpoint.tokenizer.eos_ids,
    )  # fmt: skip


def _count_mitigations() -> int:
    from jaxkv.experiments.mitigations import make_variants

    return len(make_variants(1))


def _run_drift(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.drift import run_drift

    problems = frozenset(problem for (problem,) in done)
    return run_drift(study.arms, study.state, study.items, study.spec, problems)


def _run_patching(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.patching import run_patching

    layers, bins = study.settings["patch_layers"], study.settings["patch_bins"]
    return run_patching(study.plain, study.state, study.items, study.spec, done, layers, bins)


def _count_patches() -> int:
    from jaxkv.schema_patching import DIRECTIONS, PATCHES

    return len(DIRECTIONS) * len(PATCHES)


def _run_parity(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.parity import run_parity

    problems = frozenset(problem for (problem,) in done)
    return run_parity(
        study.plain, study.state, study.checkpoint, study.items, study.spec, study.settings["attention"], problems
    )


EXPERIMENTS: dict[str, Experiment] = {
    "divergence": Experiment(_run_divergence, lambda: 1),
    "drift": Experiment(_run_drift, lambda: 1),
    "patching": Experiment(_run_patching, _count_patches),
    "parity": Experiment(_run_parity, lambda: 1),
    "attribution": Experiment(_run_attribution, _count_attribution),
    OWN_PRECISIONS: Experiment(_run_mitigations, _count_mitigations),
}
