"""One condition of a study: from options to a finished run directory. The command's flags are in `launch`."""

import dataclasses
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jaxkv.catalog import EXPERIMENTS, Batches
from jaxkv.condition import read_precision, run_path
from jaxkv.config import Precision
from jaxkv.errors import UserError
from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.record_parts import Invalid, Sample, known
from jaxkv.loading import Study, load_study
from jaxkv.options import DOCTOR, Options, to_flagfile
from jaxkv.programs import release_programs
from jaxkv.provenance import environment, git_revision, hash_tokens
from jaxkv.records import RunDirectory, check_place, read_run
from jaxkv.run_config import describe_device, make_provenance, make_run_config
from jaxkv.writing import check_writable


def run_study(options: Options) -> pathlib.Path:
    """Runs one condition, or what is missing of it, and prints its table. Returns its directory.

    Raises:
      UserError: anything the user can mend.
    """
    from rich.console import Console

    console = Console(stderr=True)
    path = run_path(options)
    check_place(path)
    check_writable(path)
    _set_up_jax(read_precision(options.precision), options.output.compilation_cache)
    if options.run.experiments == (DOCTOR,):
        _run_doctor(options, path, console)
    else:
        _run_experiments(options, path, console)
    _show(path)
    check_valid(path)
    return path


def check_valid(path: pathlib.Path) -> None:
    """Whether a finished run has a figure to show. Raises UserError if the numbers of all its samples broke off."""
    run, records = read_run(path)
    samples = [record for record in records if isinstance(record, Sample)]
    if not samples or any(sample.invalid is None for sample in samples):
        return
    found = Counter(_describe_fault(sample.invalid) for sample in samples if sample.invalid)
    (fault, times), *_ = found.most_common(1)
    first = f"all at {fault}" if times == len(samples) else f"{times} at {fault}"
    found_out = [session["remedy"] for session in run["sessions"] if "remedy" in session]
    remedy = found_out[-1] if found_out else "use a wider --precision or --residual=fp32"
    raise UserError(f"{path}: none of its {len(samples)} samples is valid, {first}; {remedy}")


def _describe_fault(invalid: Invalid) -> str:
    layer = "" if invalid.layer is None else f", layer {invalid.layer}"
    return f"{invalid.op}{layer} ({invalid.value}, {invalid.arm} arm)"


def _flagfile(options: Options, out: pathlib.Path) -> str:
    """A flagfile that replays this run into the same directory."""
    return to_flagfile(dataclasses.replace(options, output=dataclasses.replace(options.output, out=str(out.resolve()))))


def _set_up_jax(precision: Precision, cache: str) -> None:
    import jax

    jax.config.update("jax_enable_x64", "float64" in precision.to_json().values())
    if cache != "none":
        # Also pins the kernels that autotuning chose: a resumed run finds the executables it was begun with.
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _run_experiments(options: Options, path: pathlib.Path, console: Any) -> None:
    begin = time.monotonic()
    study = load_study(options, console)
    with RunDirectory.open(path, make_run_config(study), _flagfile(options, path), make_provenance(study)) as run:
        _check_prompts(study, run)
        asked = {name: ask(study) for name in options.run.experiments if (ask := EXPERIMENTS[name].asked)}
        if asked:
            run.record_provenance({"asked": asked})
        for name in options.run.experiments:
            experiment = EXPERIMENTS[name]
            total = len(study.items) * experiment.count(study)
            done = frozenset(key[1:] for key in run.done_keys() if key[0] == name)
            if name == options.run.experiments[0] and len(done) < total:
                _run_gate(study, run)
            if done:
                console.print(f"{len(done)} of {total} records of {name} are done already", highlight=False)
            _record(run, name, experiment.run(study, done), total, len(done), console)
        if study.framework == "jax" and "divergence" in options.run.experiments:
            _explain_overflow(study, run)
        run.record_provenance({"seconds": round(time.monotonic() - begin, 1)})


def _check_prompts(study: Study, run: RunDirectory) -> None:
    """A chat template or a tokenizer's settings may have changed since the run began: hashes of weights do not tell.

    Raises:
      UserError: a problem that is done was put to the model in other tokens.
    """
    items = {item.problem: item for item in study.items}
    for record in run.read():
        if not isinstance(record, DivergenceRecord) or (item := items.get(record.problem)) is None:
            continue
        if record.prompt_sha256 != hash_tokens(item.prompt):
            raise UserError(
                f"{run.path}: problem {item.problem} was asked in other tokens; the tokenizer or its chat template has "
                "changed since, so choose another --out"
            )


def _show(path: pathlib.Path) -> None:
    """Prints the report of a run directory, and writes it."""
    from rich.console import Console

    from jaxkv.overview.reports import report_run

    shown = Console(file=sys.stdout)
    shown.print(path.name, style="bold", highlight=False)
    shown.print(report_run(path))
    shown.print(f"report: {path / 'report.md'} and report.html", highlight=False, soft_wrap=True)


def _run_gate(study: Study, run: RunDirectory) -> None:
    if study.framework == "torch":
        run.record_provenance({"gate": {"passed": None, "why": "not applicable: PyTorch has no aligned regime here"}})
        return
    if study.options.controls.gate == "off":
        return
    from jaxkv.experiments.gate import run_gate

    aligned, problems = study.aligned, study.options.controls.gate_problems
    with study.console.status("gate: aligned arms, bit for bit"):
        plain = study.plain if study.options.controls.gate == "full" else None
        found = run_gate(aligned, aligned, study.state, study.items, study.spec, problems, plain=plain)
    run.record_provenance({"gate": found})


def _explain_overflow(study: Study, run: RunDirectory) -> None:
    """Where no sample is valid, finds the part of the policy that mends it, for the report."""
    records = [record for record in run.read() if isinstance(record, DivergenceRecord)]
    if not records or any(record.invalid is None for record in records):
        return
    from jaxkv.experiments.overflow import describe_remedy, find_remedy

    def make(parts: Mapping[str, str]) -> tuple[Any, Any]:
        tried = dataclasses.replace(
            study, precision=read_precision(dataclasses.replace(study.options.precision, **parts))
        )
        return tried.arms, tried.arms.prepare(study.state)

    item = next(item for item in study.items if item.problem == records[0].problem)
    with study.console.status("every sample is invalid: looking for a policy that runs"):
        found = find_remedy(make, item, study.spec, known(records[0].invalid).step)
    run.record_provenance({"remedy": describe_remedy(study.precision, found)})


def _record(run: RunDirectory, name: str, batches: Batches, total: int, done: int, console: Any) -> None:
    """Records what is missing, with a progress bar that tells rates and the time left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(name, total=total, completed=done, rate="compiling")
        for records, timing in batches:
            for record in records:
                run.append(record)
            run.append_timing(timing)
            release_programs()
            seconds, tokens = timing["seconds"], timing.get("tokens", {})
            rates = [f"{arm.split('_')[0]} {tokens[arm] / seconds[arm]:.0f}" for arm in tokens if arm in seconds]
            bars.update(bar, advance=len(records), rate=f"{', '.join(rates)} tokens/s" if rates else "")


def _run_doctor(options: Options, path: pathlib.Path, console: Any) -> None:
    """Examines the device, once a directory."""
    from jaxkv.decode import COMPILER_OPTIONS
    from jaxkv.experiments.doctor.run import DoctorSpec, run_doctor

    spec, seconds = DoctorSpec(), options.controls.doctor_seconds
    if seconds is not None:
        spec = dataclasses.replace(spec, seconds=seconds, child_seconds=max(spec.child_seconds, seconds))
    here = environment()
    config = {
        "experiments": ["doctor"],
        "device": describe_device(),
        "versions": {package: here["packages"][package] for package in ("jax", "jaxlib")},
        "compiler_options": COMPILER_OPTIONS,
        "spec": spec.to_json(),
    }
    provenance = here | {"git": git_revision()}
    with RunDirectory.open(path, config, _flagfile(options, path), provenance) as run:
        if not run.done_keys():
            with console.status("examining the device, a minute or two"):
                run.append(run_doctor(spec))
