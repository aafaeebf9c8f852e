"""The experiments of a run directory by name: the summary of each, and the blocks that a report shows of it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv.analysis.accumulation import summarize_accumulation
from jaxkv.analysis.accumulation_page import write_accumulation
from jaxkv.analysis.attribution import summarize_attribution, write_attribution
from jaxkv.analysis.divergence import describe_setting, write_divergence
from jaxkv.analysis.doctor import summarize_doctor, write_doctor
from jaxkv.analysis.document import Block
from jaxkv.analysis.drift import summarize_drift, write_drift
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
    """

    title: str
    summarize: Callable[[Run], Summary]
    write: Callable[[Summary], list[Block]]


EXPERIMENTS = {
    "divergence": Experiment(
        "Cached against uncached decoding",
        lambda run: summarize(run.records, run.run) | {"setting": describe_setting(run.run)},
        write_divergence,
    ),
    "attribution": Experiment(
        "Attribution", lambda run: summarize_attribution(run.records, run.run), write_attribution
    ),
    "mitigations": Experiment(
        "Which arm is nearer to fp64",
        lambda run: summarize_mitigations(run.records, run.timings, run.run),
        write_mitigations,
    ),
    "drift": Experiment("Drift by layer", lambda run: summarize_drift(run.records, run.run), write_drift),
    "patching": Experiment("Activation patching", lambda run: summarize_patching(run.records, run.run), write_patching),
    "parity": Experiment("JAX beside PyTorch", lambda run: summarize_parity(run.records, run.run), write_parity),
    "perplexity": Experiment("Perplexity", lambda run: summarize_perplexity(run.records, run.run), write_perplexity),
    "injection": Experiment("Changed caches", lambda run: summarize_injection(run.records, run.run), write_injection),
    "accumulation": Experiment(
        "Quantized caches along a text",
        lambda run: summarize_accumulation(run.records, run.run),
        write_accumulation,
    ),
    "doctor": Experiment("The device", summarize_doctor, write_doctor),
}
