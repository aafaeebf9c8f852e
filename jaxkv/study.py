"""One condition, from options to a finished run directory. The command's flags are in `launch`."""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich import progress
from rich.console import Console

from jaxkv.condition import is_of, make_provenance, make_run_config, read_precision, run_path
from jaxkv.errors import UserError
from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.experiment import EXPERIMENTS
from jaxkv.experiments.record_parts import ARMS, Sample, known
from jaxkv.experiments.report_parts import group_invalid
from jaxkv.loading import load_condition
from jaxkv.options import Options, to_flagfile
from jaxkv.pieces import write_pieces
from jaxkv.programs import release_programs
from jaxkv.provenance import environment, git_revision, hash_tokens
from jaxkv.records import RunDirectory, check_place, read_run
from jaxkv.writing import check_writable

if TYPE_CHECKING:
    from jaxkv.experiments.driver import Condition, Line

KEPT_FROM = 0.5  # seconds of compiling: a program that takes less is not worth a file


def run_study(options: Options, alone: bool = True) -> pathlib.Path:
    """Runs one condition, or what is missing of it, and writes its report. Returns its directory.

    What it says is printed without --verbose too if it is `alone`. Raises UserError for anything the user can mend.
    """
    console = Console(stderr=True)
    path = run_path(options)
    check_place(path)
    check_writable(path)
    _set_up_jax(options)
    replayed = dataclasses.replace(options, output=dataclasses.replace(options.output, out=str(path.resolve())))
    run = _examine if is_of(options, "device", "programs") else _run_experiments
    run(options, path, to_flagfile(replayed), console)
    _show(path, alone, options.output.verbose)
    check_valid(path)
    return path


def check_valid(path: pathlib.Path) -> None:
    """Whether a finished run has a figure to show. Raises UserError if the numbers of all its samples broke off."""
    run, records = read_run(path)
    samples = [record for record in records if isinstance(record, Sample)]
    if not samples or any(sample.invalid is None for sample in samples):
        return
    most = max(group_invalid(samples), key=lambda group: group["samples"])
    times = "all" if most["samples"] == len(samples) else most["samples"]
    remedies = ["use a wider --precision or --residual=fp32"]
    remedies += [session["remedy"] for session in run["sessions"] if "remedy" in session]
    raise UserError(
        f"{path}: none of its {len(samples)} samples is valid, {times} at {most['reason']} ({most['value']}, "
        f"{most['arm']} arm); {remedies[-1]}"
    )


def _set_up_jax(options: Options) -> None:
    import jax

    cache = options.output.compilation_cache
    jax.config.update("jax_enable_x64", "float64" in read_precision(options.precision).to_json().values())
    if cache != "none":
        # Also pins the kernels that autotuning chose: a resumed run finds the executables it was begun with.
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_FROM)


def _run_experiments(options: Options, path: pathlib.Path, flags: str, console: Console) -> None:
    begin = time.monotonic()
    condition = load_condition(options, console)
    from jaxkv.experiments.driver import run_missing

    runners = [EXPERIMENTS[name].make_runner(condition) for name in options.run.experiments]
    with RunDirectory.open(path, make_run_config(condition, runners), flags, make_provenance(condition)) as run:
        _check_prompts(condition, run)
        if grown := {runner.name: list(runner.variants) for runner in runners if runner.grows}:
            run.record_provenance({"asked": grown})
        for number, runner in enumerate(runners):
            asked = {(runner.name, item.problem, *key) for item in condition.items for key in runner.variants}
            done = frozenset(key[1:] for key in asked & run.done_keys())  # it may have records of other variants too
            if not number and len(done) < len(asked):
                _run_gate(condition, run, console)
            if done:
                console.print(f"{len(done)} of {len(asked)} records of {runner.name} are done already", highlight=False)
            _record(run, runner.name, run_missing(runner, condition.items, done), len(asked), len(done), console)
        tokens = {token for sample in _read_samples(run) for arm in ARMS for token in getattr(sample.arms, arm).tokens}
        if tokens:
            write_pieces(path, tokens, condition.checkpoint.tokenizer)
        if options.run.framework == "jax":
            _explain_overflow(condition, run, console)
        _record_totals(condition, run, console)
        run.record_provenance({"seconds": round(time.monotonic() - begin, 1)})


def _read_samples(run: RunDirectory) -> list[DivergenceRecord]:
    return [record for record in run.read() if isinstance(record, DivergenceRecord)]


def _record_totals(condition: "Condition", run: RunDirectory, console: Console) -> None:
    """What the package that a task is of makes of all texts of an arm together."""
    task = condition.task
    total = getattr(task, "total", None)
    samples = [sample for sample in _read_samples(run) if sample.invalid is None]
    if total is None or not samples:
        return
    golds = {problem.index: problem.answer for problem in task.problems}
    totals = {
        arm: total({golds[sample.problem]: getattr(sample.arms, arm).text for sample in samples})
        for arm in ("uncached", "cached")
    }
    run.record_provenance({"totals": totals})
    for name, value in totals["cached"].items():
        line = f"{task.name} {name}: cached {value:.4g}, uncached {totals['uncached'][name]:.4g}"
        console.print(line, highlight=False, soft_wrap=True)


def _check_prompts(condition: "Condition", run: RunDirectory) -> None:
    """A chat template or a tokenizer's settings may have changed since the run began: hashes of weights do not tell.

    Raises UserError for a problem that is done and was put to the model in other tokens.
    """
    items = {item.problem: item for item in condition.items}
    for sample in _read_samples(run):
        item = items.get(sample.problem)
        if item is not None and sample.prompt_sha256 != hash_tokens(item.prompt):
            raise UserError(
                f"{run.path}: problem {item.problem} was asked in other tokens; the tokenizer or its chat template has "
                "changed since, so choose another --out"
            )


def _show(path: pathlib.Path, alone: bool, verbose: bool) -> None:
    from jaxkv.overview.page import report_run
    from jaxkv.terminal import show_briefly

    whole, shown = report_run(path), Console(file=sys.stdout)
    if alone or verbose:
        shown.print(path.name, style="bold", highlight=False)
        shown.print(whole if verbose or (brief := show_briefly([path])) is None else brief)
    shown.print(f"report: {path / 'report.md'} and report.html", highlight=False, soft_wrap=True)


def _run_gate(condition: "Condition", run: RunDirectory, console: Console) -> None:
    controls = condition.options.controls
    if condition.options.run.framework == "torch":
        run.record_provenance({"gate": {"passed": None, "why": "not applicable: PyTorch has no aligned regime here"}})
    elif controls.gate != "off":
        from jaxkv.experiments.gate import run_gate

        aligned, plain = condition.aligned, condition.plain if controls.gate == "full" else None
        given = (condition.state, condition.items, condition.spec, controls.gate_problems)
        with console.status("gate: aligned arms, bit for bit"):
            run.record_provenance({"gate": run_gate(aligned, aligned, *given, plain=plain)})


def _explain_overflow(condition: "Condition", run: RunDirectory, console: Console) -> None:
    """Where no sample is valid, finds the part of the policy that mends it, for the report."""
    records = _read_samples(run)
    if not records or any(record.invalid is None for record in records):
        return
    from jaxkv.experiments.overflow import find_remedy

    def make(parts: Mapping[str, str]) -> tuple[Any, Any]:
        precision = read_precision(dataclasses.replace(condition.options.precision, **parts))
        tried = dataclasses.replace(condition, precision=precision)
        return tried.arms, tried.arms.prepare(condition.state)

    item = next(item for item in condition.items if item.problem == records[0].problem)
    with console.status("every sample is invalid: looking for a policy that runs"):
        remedy = find_remedy(make, item, condition.spec, condition.precision, known(records[0].invalid).step)
    run.record_provenance({"remedy": remedy})


def _record(
    run: RunDirectory, name: str, batches: "Iterable[tuple[list[Line], Line]]", total: int, done: int, console: Console
) -> None:
    """Records what is missing, with a progress bar that tells rates and the time left."""
    columns = (
        "{task.description}", progress.BarColumn(), progress.MofNCompleteColumn(), "{task.fields[rate]}",
        progress.TimeElapsedColumn(), "left", progress.TimeRemainingColumn(),
    )  # fmt: skip
    with progress.Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(name, total=total, completed=done, rate="compiling")
        for records, timing in batches:
            for record in records:
                run.append(record)
            run.append_timing(timing)
            release_programs()
            seconds, tokens = timing["seconds"], timing["tokens"]
            rates = [f"{arm.split('_')[0]} {tokens[arm] / seconds[arm]:.0f}" for arm in tokens if arm in seconds]
            bars.update(bar, advance=len(records), rate=f"{', '.join(rates)} tokens/s" if rates else "")


def _examine(options: Options, path: pathlib.Path, flags: str, console: Console) -> None:
    """Runs an experiment that gives one record."""
    (name,) = options.run.experiments
    found = EXPERIMENTS[name].examine(options, read_precision(options.precision))
    with RunDirectory.open(path, found.config, flags, environment() | {"git": git_revision()}) as run:
        if not run.done_keys():
            with console.status(found.doing):
                run.append(found.run())
