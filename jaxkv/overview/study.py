"""The summary of several runs as one study. A pure function of their records: same records, same summary."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from jaxkv.errors import UserError
from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.doctor.record import DoctorRecord
from jaxkv.experiments.doctor.report import compare_processes, operand_kind
from jaxkv.experiments.drift.record import DriftRecord
from jaxkv.experiments.foreign.record import ForeignRecord
from jaxkv.experiments.report_parts import Run, base_precision
from jaxkv.experiments.reports import REPORTS
from jaxkv.overview import claims, claims_layers, contrasts, curves, parity
from jaxkv.overview.gather import SAMPLING, describe_condition, describe_origin

Summary = dict[str, Any]
OTHERS = ("foreign",)  # experiments with no summary of their own


def summarize_study(runs: Sequence[Run]) -> Summary:
    """Summarizes runs, in the order of the report, and judges the claims by them.

    Plain values for summary.json: `conditions`, one a run with what it is, where it came from, and the summary of each
    experiment it has; figures over several runs; `causes` and `claims`. Raises UserError for one run with nothing but
    results made elsewhere.
    """
    conditions = [_summarize_run(run, _find_experiments(run, len(runs) == 1)) for run in runs]
    samples = [
        (c, contrasts.find_valid(run)) for c, run in zip(conditions, runs, strict=True) if run.of(DivergenceRecord)
    ]
    ours = [(c, s) for c, s in samples if c["framework"] == "jax"]
    plain = [(c, s) for c, s in ours if c["regime"] == "plain" and s]
    by_precision = {
        name: _choose_conditions([(c, s) for c, s in plain if base_precision(c) == name])
        for name in ("fp16", "bf16", "fp32")
    }
    study: Summary = {
        "experiment": "study",
        "conditions": conditions,
        "accuracy": {name: contrasts.pool_scorers(found) for name, found in by_precision.items() if found},
        "precisions": contrasts.pair_precisions(contrasts.drop_replicates([(c, s) for c, s in samples if s])),
        "flips": {
            "fp16": contrasts.count_flips(contrasts.choose_shared(by_precision["fp16"], by_precision["fp32"])),
            "fp32": contrasts.count_flips(by_precision["fp32"]),
        },
        "reruns": contrasts.count_reruns(ours),
        "replicates": contrasts.find_replicates(runs),
        "processes": [_describe_device(to_builtins(record)) for run in runs for record in run.of(DoctorRecord)],
        "truth": [truth for condition in conditions for truth in _find_truth(condition)],
        "parity": [found for group in parity.find_cells(runs) if (found := parity.summarize_free(group))],
    }
    study["causes"] = claims_layers.diagnose(study)
    study["claims"] = claims.judge(study)
    return study


def _find_experiments(run: Run, alone: bool) -> Collection[str]:
    """The experiments that a run has records of; of a run alone also those that it was asked for."""
    if not alone:
        return run.experiments
    if run.experiments and run.experiments <= set(OTHERS):
        raise UserError(
            f"{run.name} has results made elsewhere alone, which are told of beside a run of the same problems here; "
            "name that run too"
        )
    return (run.experiments | set(run.run["config"].get("experiments", ()))) & set(REPORTS) or {"divergence"}


def _choose_conditions(found: Sequence[tuple[Summary, Any]]) -> list[tuple[Summary, Any]]:
    """Those to be counted as conditions: a run and a problem once, and the precision as it is before its variants.

    Variants ('fp16+residual=fp32') stand in where a model has no valid run of the precision itself. Runs that ask the
    same problems again, in batches of another size, add none: the one with most problems counts.
    """
    groups = defaultdict(list)
    for condition, samples in contrasts.drop_replicates(found):
        groups[tuple(condition[name] for name in ("model", *SAMPLING, "device"))].append((condition, samples))
    chosen = []
    for members in groups.values():
        itself = [member for member in members if "+" not in (member[0]["precision"] or "")]
        asked: set[Any] = set()
        for condition, samples in sorted(itself or members, key=lambda member: -len(member[1])):
            if not asked & set(samples) and (itself or not asked):
                chosen.append((condition, samples))
                asked |= set(samples)
    return chosen


def _summarize_run(run: Run, experiments: Collection[str]) -> Summary:
    """What a run is, where it came from, and the summary of each of the experiments."""
    held = run.run["config"].get("held")
    condition = describe_condition(run) | {"origin": describe_origin(run)}
    condition["held"] = held.get("operand") if isinstance(held, Mapping) else None
    condition |= {name: dict(one.summarize(run)) for name, one in REPORTS.items() if name in experiments}
    if totals := next((session["totals"] for session in reversed(run.run["sessions"]) if "totals" in session), None):
        condition["totals"] = totals
    if odd := sorted(run.experiments - {*REPORTS, *OTHERS}):
        condition["not_reported"] = odd
    if run.of(DivergenceRecord):
        condition["curves"] = curves.draw_condition(list(contrasts.find_valid(run).values()))
    if drift := run.of(DriftRecord):
        condition["drift_grid"] = curves.average_grids([r for r in drift if r.status == "ok"])
        condition["drift_tokens"] = curves.find_token_grid(run)
    if foreign := run.of(ForeignRecord):
        condition["foreign"] = {"problems": len(foreign)}
    return condition


def _describe_device(record: Mapping[str, Any]) -> Summary:
    bits = record["dtypes"].get("fp32", {}).get("operand_bits", {}).get("highest", {})
    kinds = sorted({operand_kind(found) for found in bits.values()})
    kind = record["device"]["kind"]
    return {
        "device": kind,
        "process": {dtype: compare_processes(record, dtype)[0] for dtype in record["dtypes"]},
        "fp32": [f"FP32 products on {kind} have the errors of {' and '.join(kinds)}"] if kinds else [],
    }


def _find_truth(condition: Mapping[str, Any]) -> list[Summary]:
    return [
        {
            "condition": condition["name"],
            "model": condition["model"],
            "variant": entry["variant"],
            "tile": entry["tile"],
            "problems": entry["problems"]["ok"],
            "nearer": entry["distance"]["given"]["nearer"],
        }
        for entry in (condition.get("mitigations") or {}).get("variants", [])
        if entry["distance"] is not None
    ]
