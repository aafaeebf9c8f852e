"""The experiments of the command by name: what each runs on a condition."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxkv.loading import Study
from jaxkv.options import DOCTOR, OWN_PRECISIONS, TEXT_EXPERIMENT

ACCUMULATED = ("kvarn:k2v2", "kivi:k2v2", "quarot:2")  # the 2-bit methods of the seed study, if none is asked for

Done = frozenset[tuple[Any, ...]]  # keys of the records on disk, without the experiment's name
Batches = Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]  # records, timing


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
      run: yields the records not yet done, batch by batch.
      count: how many records a problem has, by what the condition asks for.
      asked: of which changes and seeds these are, if more may be asked of a run later; kept with the session.
    """

    run: Callable[[Study, Done], Batches]
    count: Callable[[Study], int]
    asked: Callable[[Study], list[tuple[str, int]]] | None = None


def _run_divergence(study: Study, done: Done) -> Batches:
    problems = frozenset(problem for (problem,) in done)
    if study.framework == "torch":
        from jaxkv.torch_path import run_torch_divergence

        return run_torch_divergence(
            study.checkpoint, study.precision, study.sampler, study.items, study.spec, study.task,
            study.options.run.attention, problems,
        )  # fmt: skip
    from jaxkv.experiments.divergence.run import run_divergence

    tokenizer = study.checkpoint.tokenizer
    return run_divergence(study.arms, study.state, study.items, study.spec, tokenizer, study.task, problems)


def _run_attribution(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.attribution.run import run_attribution

    return run_attribution(study.plain, study.state, study.items, study.spec, study.tile, done)


def _count_attribution(study: Study) -> int:
    del study
    from jaxkv.experiments.attribution.record import VARIANTS

    return len(VARIANTS)


def _run_mitigations(study: Study, done: Done) -> Batches:
    """Its variants have precisions of their own, rounded from the weights in fp32."""
    from jaxkv.experiments.mitigations.run import make_variants, run_mitigations

    checkpoint, variants = study.checkpoint, make_variants(study.tile)
    return run_mitigations(
        checkpoint.config, checkpoint.state, study.items, study.spec, variants, done, study.sampler,
        checkpoint.tokenizer.eos_ids,
    )  # fmt: skip


def _count_mitigations(study: Study) -> int:
    from jaxkv.experiments.mitigations.run import make_variants

    return len(make_variants(study.tile))


def _run_drift(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.drift.run import run_drift

    problems = frozenset(problem for (problem,) in done)
    return run_drift(study.arms, study.state, study.items, study.spec, problems)


def _run_patching(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.patching.run import run_patching

    layers, bins = study.options.controls.patch_layers, study.options.controls.patch_bins
    return run_patching(study.plain, study.state, study.items, study.spec, done, layers, bins)


def _count_patches(study: Study) -> int:
    del study
    from jaxkv.experiments.patching.record import DIRECTIONS, PATCHES

    return len(DIRECTIONS) * len(PATCHES)


def _run_parity(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.parity.run import run_parity

    problems = frozenset(problem for (problem,) in done)
    return run_parity(
        study.plain, study.state, study.checkpoint, study.items, study.spec, study.options.run.attention, problems
    )


def _list_injections(study: Study) -> tuple[list[Any], list[int]]:
    """The changes asked for, or the seed study's where none is, and the seeds of their errors."""
    from jaxkv.experiments.changes import SEED_ERRORS, SEED_QUANTS

    return _list_changes(study, SEED_ERRORS, SEED_QUANTS)


def _list_changes(study: Study, errors: Sequence[str] = (), quants: Sequence[str] = ()) -> tuple[list[Any], list[int]]:
    """The clean cache and the changes asked for, `errors` and `quants` where none is, and the seeds of the errors."""
    from jaxkv.experiments.changes import ERROR_SEEDS, make_changes

    cache = study.options.cache
    if cache.cache_error or cache.cache_quant:
        errors, quants = cache.cache_error, cache.cache_quant
    return make_changes(errors, quants, study.checkpoint.config), list(cache.error_seeds or ERROR_SEEDS)


def _run_injection(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.injection.run import run_injection

    changes, seeds = _list_injections(study)
    tokenizer = study.checkpoint.tokenizer
    return run_injection(study.arms, study.state, study.items, study.spec, changes, seeds, tokenizer, study.task, done)


def _run_perplexity(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.perplexity.run import run_perplexity

    return run_perplexity(study.arms, study.state, study.task.windows, study.spec, *_list_changes(study), done)


def _of_changes(
    run: Callable[[Study, Done], Batches], list_changes: Callable[[Study], tuple[list[Any], list[int]]]
) -> Experiment:
    """An experiment with a record for each change and seed that `list_changes` gives."""

    def ask(study: Study) -> list[tuple[str, int]]:
        from jaxkv.experiments.changes import list_runs

        return [(change.name, seed) for change, seed in list_runs(*list_changes(study))]

    return Experiment(run, lambda study: len(ask(study)), ask)


def _list_quantizers(study: Study) -> list[Any]:
    changes, _ = _list_changes(study, quants=ACCUMULATED)
    return [change.what for change in changes if change.what is not None]


def _run_accumulation(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.accumulation.run import run_accumulation

    blocks, quantizers = study.options.cache.blocks, _list_quantizers(study)
    return run_accumulation(study.plain, study.state, study.items, study.spec, quantizers, blocks, done=done)


def _count_accumulations(study: Study) -> int:
    from jaxkv.experiments.accumulation.run import list_regimes

    return len(_list_quantizers(study)) * len(list_regimes(study.options.cache.blocks))


EXPERIMENTS: dict[str, Experiment] = {
    "divergence": Experiment(_run_divergence, lambda study: 1),
    "drift": Experiment(_run_drift, lambda study: 1),
    "patching": Experiment(_run_patching, _count_patches),
    "parity": Experiment(_run_parity, lambda study: 1),
    "attribution": Experiment(_run_attribution, _count_attribution),
    OWN_PRECISIONS: Experiment(_run_mitigations, _count_mitigations),
    "injection": _of_changes(_run_injection, _list_injections),
    TEXT_EXPERIMENT: _of_changes(_run_perplexity, _list_changes),
    "accumulation": Experiment(_run_accumulation, _count_accumulations),
}
NAMES = (*EXPERIMENTS, DOCTOR)
