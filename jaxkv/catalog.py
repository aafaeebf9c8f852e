"""The experiments of the command by name: what each runs on a condition, and what it shows of the records."""

import dataclasses
import pathlib
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
      show: writes the report of a run directory from its records alone; returns the table and the report's file name.
      unit: what a record is called in progress messages.
    """

    run: Callable[[Study, Done], Batches]
    count: Callable[[], int]
    show: Callable[[pathlib.Path], tuple[Any, str]]
    unit: str


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


def _show_divergence(path: pathlib.Path) -> tuple[Any, str]:
    from jaxkv.analysis.report import render_table, write_report

    return render_table(write_report(path)), "report.md"


def _run_attribution(study: Study, done: Done) -> Batches:
    from jaxkv.experiments.attribution import run_attribution

    return run_attribution(study.plain, study.state, study.items, study.spec, study.tile, done)


def _count_attribution() -> int:
    from jaxkv.experiments.attribution import VARIANTS

    return len(VARIANTS)


def _show_attribution(path: pathlib.Path) -> tuple[Any, str]:
    from jaxkv.analysis.attribution import render_attribution, summarize_attribution, to_markdown
    from jaxkv.records import read_run, write_atomically

    run, records = read_run(path)
    summary = summarize_attribution(records, run)
    write_atomically(path / "attribution.md", to_markdown(summary))
    return render_attribution(summary), "attribution.md"


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


def _show_mitigations(path: pathlib.Path) -> tuple[Any, str]:
    from jaxkv.analysis.mitigations import render, summarize_mitigations, to_markdown
    from jaxkv.records import read_lines, read_run, write_atomically

    run, records = read_run(path)
    summary = summarize_mitigations(records, read_lines(path / "timing.jsonl")[0], run)
    write_atomically(path / "mitigations.md", to_markdown(summary))
    return render(summary), "mitigations.md"


EXPERIMENTS: dict[str, Experiment] = {
    "divergence": Experiment(_run_divergence, lambda: 1, _show_divergence, "problems"),
    "attribution": Experiment(_run_attribution, _count_attribution, _show_attribution, "records of attribution"),
    OWN_PRECISIONS: Experiment(_run_mitigations, _count_mitigations, _show_mitigations, "records of mitigations"),
}
