"""The experiments of a run directory by name: the summary of each, and the blocks that a report shows of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.analysis.accumulation import summarize_accumulation
from jaxkv.analysis.accumulation_page import write_accumulation
from jaxkv.analysis.attribution import summarize_attribution, write_attribution
from jaxkv.analysis.divergence import describe_setting, write_divergence
from jaxkv.analysis.doctor import summarize_doctor, write_doctor
from jaxkv.analysis.document import Block, Figure
from jaxkv.analysis.drift import summarize_drift, write_drift
from jaxkv.analysis.figures import draw_divergence, draw_parity
from jaxkv.analysis.figures_layers import draw_drift, draw_patching
from jaxkv.analysis.gather import Run
from jaxkv.analysis.injection import summarize_injection
from jaxkv.analysis.injection_page import write_injection
from jaxkv.analysis.mitigations import summarize_mitigations, write_mitigations
from jaxkv.analysis.page_parity import write_parity
from jaxkv.analysis.parity import summarize_parity
from jaxkv.analysis.patching import summarize_patching, write_patching
from jaxkv.analysis.perplexity import summarize_perplexity, write_perplexity
from jaxkv.analysis.summary import summarize

Summary = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment, from its records alone.

    Attributes:
      title: of its section.
      summarize: run -> its summary.
      write: summary -> its section as blocks; headings from level 3 on.
      draw: runs, as in the summary of a study -> figures of them all.
    """

    title: str
    summarize: Callable[[Run], Summary]
    write: Callable[[Summary], list[Block]]
    draw: Callable[[Summary], Sequence[Figure]] = lambda study: ()


def _read(summarize: Callable[[Sequence[object], Mapping[str, Any]], Summary]) -> Callable[[Run], Summary]:
    return lambda run: summarize(run.records, run.run)


def _summarize_divergence(run: Run) -> Summary:
    return summarize(run.records, run.run) | {"setting": describe_setting(run.run)}


def _summarize_mitigations(run: Run) -> Summary:
    return summarize_mitigations(run.records, run.timings, run.run)


EXPERIMENTS = {
    "divergence": Experiment(
        "Cached against uncached decoding", _summarize_divergence, write_divergence, draw_divergence
    ),
    "attribution": Experiment("Attribution", _read(summarize_attribution), write_attribution),
    "mitigations": Experiment("Which arm is nearer to fp64", _summarize_mitigations, write_mitigations),
    "drift": Experiment("Drift by layer", _read(summarize_drift), write_drift, draw_drift),
    "patching": Experiment("Activation patching", _read(summarize_patching), write_patching, draw_patching),
    "parity": Experiment("JAX beside PyTorch", _read(summarize_parity), write_parity, draw_parity),
    "perplexity": Experiment("Perplexity", _read(summarize_perplexity), write_perplexity),
    "injection": Experiment("Changed caches", _read(summarize_injection), write_injection),
    "accumulation": Experiment("Quantized caches along a text", _read(summarize_accumulation), write_accumulation),
    "doctor": Experiment("The device", summarize_doctor, write_doctor),
}
