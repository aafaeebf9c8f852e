"""The experiments of a run directory by name: the summary of each, and how a terminal and a file show it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv.analysis import (
    accumulation,
    accumulation_page,
    attribution,
    drift,
    injection,
    injection_page,
    mitigations,
    page_parity,
    parity,
    patching,
    perplexity,
    report,
    summary,
    terminal,
)
from jaxkv.analysis.gather import Run

Summary = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment, from its records alone.

    Attributes:
      summarize: run -> its summary.
      render: summary -> what a terminal shows.
      write: (summary, content of run.json) -> Markdown.
      file: name of the Markdown file in a run directory.
      page: summary -> the same as HTML with its figures, written beside the Markdown; None for those without figures.
    """

    summarize: Callable[[Run], Summary]
    render: Callable[[Summary], Any]
    write: Callable[[Summary, Summary], str]
    file: str
    page: Callable[[Summary], str] | None = None


EXPERIMENTS = {
    "divergence": Experiment(
        lambda run: summary.summarize(run.records, run.run), terminal.render_table, report.render_markdown, "report.md"
    ),
    "attribution": Experiment(
        lambda run: attribution.summarize_attribution(run.records, run.run),
        attribution.render_attribution,
        lambda found, run: attribution.to_markdown(found),
        "attribution.md",
    ),
    "mitigations": Experiment(
        lambda run: mitigations.summarize_mitigations(run.records, run.timings, run.run),
        mitigations.render,
        lambda found, run: mitigations.to_markdown(found),
        "mitigations.md",
    ),
    "drift": Experiment(
        lambda run: drift.summarize_drift(run.records, run.run),
        drift.render_drift,
        lambda found, run: drift.to_markdown(found),
        "drift.md",
    ),
    "patching": Experiment(
        lambda run: patching.summarize_patching(run.records, run.run),
        patching.render_patching,
        lambda found, run: patching.to_markdown(found),
        "patching.md",
    ),
    "parity": Experiment(
        lambda run: parity.summarize_parity(run.records, run.run),
        page_parity.render_parity,
        lambda found, run: page_parity.to_markdown(found),
        "parity.md",
    ),
    "perplexity": Experiment(
        lambda run: perplexity.summarize_perplexity(run.records, run.run),
        perplexity.render_perplexity,
        lambda found, run: perplexity.to_markdown(found),
        "perplexity.md",
    ),
    "injection": Experiment(
        lambda run: injection.summarize_injection(run.records, run.run),
        injection_page.render_injection,
        lambda found, run: injection_page.to_markdown(found),
        "injection.md",
        injection_page.to_html,
    ),
    "accumulation": Experiment(
        lambda run: accumulation.summarize_accumulation(run.records, run.run),
        accumulation_page.render_accumulation,
        lambda found, run: accumulation_page.to_markdown(found),
        "accumulation.md",
        accumulation_page.to_html,
    ),
}
