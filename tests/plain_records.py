"""Code that takes typed records, for tests that build records as dicts: they are made of their type on the way in."""

import dataclasses
import functools
import pathlib

from jaxkv import records
from jaxkv.experiments.accumulation import summary as accumulation
from jaxkv.experiments.attribution import report as attribution
from jaxkv.experiments.divergence.summary import summarize as _summarize_divergence
from jaxkv.experiments.drift import report as drift
from jaxkv.experiments.injection import summary as injection
from jaxkv.experiments.mitigations import report as mitigations
from jaxkv.experiments.parity import report as parity
from jaxkv.experiments.patching import report as patching
from jaxkv.experiments.perplexity import report as perplexity
from jaxkv.experiments.report_parts import Run
from jaxkv.overview import contrasts, curves, gather, page, study
from jaxkv.overview import parity as free_parity
from jaxkv.records import to_plain, to_record


def to_typed(value):
    """A value with the dicts in it that are records made of their type, as when they are read."""
    if isinstance(value, dict) and "key" in value:
        return to_record(to_plain(value))
    if isinstance(value, dict) and all(isinstance(key, tuple) for key in value):  # samples by prompt
        return {key: to_typed(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [to_typed(inside) for inside in value]
    if isinstance(value, Run):
        return dataclasses.replace(value, records=to_typed(value.records), parts=to_typed(value.parts))
    return value


def _of_plain(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*map(to_typed, args), **kwargs)

    return call


summarize = _of_plain(_summarize_divergence)
summarize_accumulation = _of_plain(accumulation.summarize_accumulation)
summarize_attribution = _of_plain(attribution.summarize_attribution)
summarize_drift = _of_plain(drift.summarize_drift)
summarize_injection = _of_plain(injection.summarize_injection)
summarize_mitigations = _of_plain(mitigations.summarize_mitigations)
summarize_parity = _of_plain(parity.summarize_parity)
summarize_patching = _of_plain(patching.summarize_patching)
summarize_perplexity = _of_plain(perplexity.summarize_perplexity)
summarize_study = _of_plain(study.summarize_study)
join_parts = _of_plain(gather.join_parts)
join_runs = _of_plain(gather.join_runs)
write_blocks = _of_plain(lambda runs, asked=(): page.write_blocks(study.summarize_study(runs), runs, asked))
find_cells = _of_plain(free_parity.find_cells)
find_valid = _of_plain(contrasts.find_valid)
compare_precisions = _of_plain(contrasts.compare_precisions)
average_grids = _of_plain(curves.average_grids)
divergence_over_tokens = _of_plain(curves.divergence_over_tokens)
margin_points = _of_plain(curves.margin_points)


def judge(*runs, name):
    """A claim of arXiv 2604.15409 on the runs."""
    (claim,) = [claim for claim in summarize_study(runs)["claims"] if claim["id"] == name]
    return claim


def read_run(path):
    """`records.read_run` with the records as their lines have them."""
    run, _ = records.read_run(path)
    return run, records.read_lines(pathlib.Path(path) / "samples.jsonl")
