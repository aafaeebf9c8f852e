"""What does this device do to numbers? In under a minute, for each dtype: on what a row's result depends, and more.

A cached step computes one row, an uncached one many, against other numbers of slots. Before a study it is worth
knowing which of that alone changes bits here. Programs are compiled as the study compiles its own. Products in fp16,
bf16 and fp32 are held as the arms hold them (on a CPU: in fp32, Precision.widened).
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxkv.config import Precision, make_precision
from jaxkv.decode import COMPILER_OPTIONS
from jaxkv.experiments.doctor import arithmetic
from jaxkv.experiments.doctor.operations import Inputs, Operation, compile_program, compile_with, make_operations
from jaxkv.experiments.doctor.process import Hashes, compare_processes, start_process
from jaxkv.experiments.doctor.shapes import (
    DoctorSpec,
    Results,
    Run,
    Shape,
    compare_bits,
    compare_company,
    compare_places,
    compute_tested,
    hash_array,
    merge_figures,
)
from jaxkv.experiments.driver import Examination
from jaxkv.options import Options
from jaxkv.provenance import describe_device, environment

Answers = dict[str, dict[str, Any]]  # operation -> count -> figure
Tasks = dict[Any, Callable[[], Any]]  # compilations by name, or by shape and dtype
SPARE_SECONDS = 12.0  # one program of a GPU's takes up to 15


def hold(dtype: str) -> Precision:
    """A policy as decode.Arms holds it."""
    return make_precision(dtype).held_on(jax.default_backend())


def open_bench(spec: DoctorSpec) -> dict[str, list[Operation]]:
    """The operations in each dtype, with their contents and weights, from which programs of any shape are compiled."""
    return {dtype: make_operations(Inputs(spec, hold(dtype))) for dtype in spec.dtypes}


def plan_shapes(spec: DoctorSpec, bench: Mapping[str, Sequence[Operation]], shapes: Iterable[Shape]) -> Tasks:
    """The compilations of shapes in every dtype, in this order."""
    pairs = itertools.product(dict.fromkeys(shapes), bench.items())
    return {(shape, d): functools.partial(compile_program, shape, spec, found) for shape, (d, found) in pairs}


@dataclasses.dataclass
class Programs:
    """What was compiled, why what is missing is, and how long each took."""

    made: dict[Any, Any]
    missing: dict[str, str]
    seconds: dict[str, float]

    def of(self, dtype: str) -> dict[Shape, Run]:
        """The programs of a dtype."""
        return {name[0]: run for name, run in self.made.items() if isinstance(name, tuple) and name[1] == dtype}


def compile_all(tasks: Tasks, workers: int, seconds: float, spare: Tasks | None = None) -> Programs:
    """Runs the compilations, some at a time; none begins after `seconds`, a spare one SPARE_SECONDS sooner.

    A fault in one (a dtype that a device lacks, memory) leaves the others alone.
    """
    begin, programs = time.monotonic(), Programs({}, {}, {})

    def work(name: Any, task: Callable[[], Any], until: float) -> None:
        start, said = time.monotonic(), name if isinstance(name, str) else ", ".join(map(str, name))
        if start - begin > until:
            programs.missing[said] = "out of time"
            return
        try:
            programs.made[name] = task()
        except Exception as error:  # whatever a backend raises is a finding here
            programs.missing[said] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        programs.seconds[said] = round(time.monotonic() - start, 2)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        begun = [pool.submit(work, name, task, seconds) for name, task in tasks.items()]
        begun += [pool.submit(work, name, task, seconds - SPARE_SECONDS) for name, task in (spare or {}).items()]
        concurrent.futures.wait(begun)
    return programs


def _gather(answers: Iterable[tuple[str, int, Any]]) -> Answers:
    found: Answers = {}
    for name, count, answer in answers:
        found.setdefault(name, {})[str(count)] = answer
    return found


def _compare_to_first(results: Mapping[Shape, Results], shapes: Mapping[int, Shape]) -> Answers:
    """Figures of every count against the first one, where both were computed."""
    there = {count: results[shape] for count, shape in shapes.items() if shape in results}
    first = there.pop(next(iter(shapes)), {})
    return {
        name: {str(count): compare_bits(values, other[name]) for count, other in there.items()}
        for name, values in first.items()
    }


def _company(runs: Mapping[Shape, Run], shapes: Mapping[int, Shape], spec: DoctorSpec) -> Answers:
    there = {count: shape for count, shape in shapes.items() if shape in runs}
    figures = {count: compare_company(runs[shape], shape, spec) for count, shape in there.items()}
    return _gather((name, count, figure) for count, found in figures.items() for name, figure in found.items())


def _run_again(runs: Mapping[Shape, Run], results: Mapping[Shape, Results], spec: DoctorSpec) -> Answers:
    found: dict[str, list[dict[str, Any]]] = {}
    for shape, run in runs.items():
        for name, values in compute_tested(run, shape, spec).items():
            found.setdefault(name, []).append(compare_bits(results[shape][name], values))
    return {name: {"all": merge_figures(figures)} for name, figures in found.items()}


def measure_shapes(spec: DoctorSpec, runs: Mapping[Shape, Run]) -> tuple[dict[str, Answers], Answers]:
    """Every question about shape and company in one dtype by its name, and the hashes for a second process to match.

    Questions whose programs are missing have no figures.
    """
    rows = {count: spec.row_shape(count) for count in spec.rows}
    slots = {count: spec.slot_shape(count) for count in spec.slots}
    batches = {count: spec.row_shape(1, batch=count) for count in spec.batches}
    results = {shape: compute_tested(run, shape, spec) for shape, run in runs.items()}
    most = sorted((count for count in rows if count > 1), reverse=True)
    single = results.get(rows[1], {})
    questions = {
        "rows": _compare_to_first(results, rows),
        "rows_from_most": _compare_to_first(results, {count: rows[count] for count in most}),
        "slots": _compare_to_first(results, slots),
        "batch": _compare_to_first(results, {1: rows[1]} | batches),
        "neighbours": _company(runs, batches, spec),
        "following": _company(runs, {count: rows[count] for count in rows if count > 1}, spec),
        "rerun": _run_again(runs, results, spec),
        "place": {name: {"1": compare_places(single[name])} for name in ("exp_tanh",) if name in single},
    }
    return questions, hash_rows(spec, results)


def hash_rows(spec: DoctorSpec, results: Mapping[Shape, Results]) -> Answers:
    """What both processes are compared by: operation -> row count -> hash of the tested rows' results."""
    found = {count: results.get(spec.row_shape(count), {}) for count in spec.process_rows}
    return _gather((name, count, hash_array(x)) for count, values in found.items() for name, x in values.items())


def compute_hashes(spec: DoctorSpec) -> dict[str, Answers]:
    """`hash_rows` by dtype, of programs that are compiled for them alone."""
    tasks = plan_shapes(spec, open_bench(spec), map(spec.row_shape, spec.process_rows))
    programs = compile_all(tasks, spec.workers, spec.seconds)

    def compute(dtype: str) -> Answers:
        runs = programs.of(dtype).items()
        return hash_rows(spec, {shape: compute_tested(run, shape, spec) for shape, run in runs})

    return {dtype: compute(dtype) for dtype in spec.dtypes}


def is_preallocated() -> bool:
    """Whether this process has taken most of the device's memory, of which a second process will find little."""
    asked = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    return jax.default_backend() == "gpu" and asked not in ("false", "0")


def plan(spec: DoctorSpec, bench: Mapping[str, Sequence[Operation]]) -> tuple[Tasks, Tasks]:
    """Compilations: those that answer every question by its ends, and those between, which are spare."""
    rows = [spec.row_shape(n) for n in spec.rows]
    slots = [spec.slot_shape(n) for n in spec.slots]
    batches = [spec.row_shape(1, batch=n) for n in spec.batches]
    ends = [*map(spec.row_shape, spec.process_rows), rows[0], slots[0], slots[-1], batches[-1]]
    between = [shape for shape in [*rows[::-1], *slots, *batches] if shape not in ends]
    given = arithmetic.make_given(spec.dtypes)
    tasks: Tasks = {
        "arithmetic": lambda: compile_with(COMPILER_OPTIONS, arithmetic.program, given),
        "casts by default": lambda: compile_with(None, arithmetic.program, given | {"dots": {}}),
    }
    return tasks | plan_shapes(spec, bench, ends), plan_shapes(spec, bench, between)


def run_doctor(
    spec: DoctorSpec | None = None, start: Callable[[Mapping[str, Any], float], Hashes] = start_process
) -> dict[str, Any]:
    """Examines this process's default device, and gives the record.

    `start` takes a spec and seconds, and gives the hashes of a second process, which runs beside this one.
    """
    begin = time.monotonic()
    spec = spec or DoctorSpec()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return _measure(spec, pool.submit(start, spec.to_json(), spec.child_seconds), begin)


def _measure(spec: DoctorSpec, other: concurrent.futures.Future[Hashes], begin: float) -> dict[str, Any]:
    tasks, spare = plan(spec, open_bench(spec))
    programs = compile_all(tasks, spec.workers, spec.seconds, spare)
    measured = {dtype: measure_shapes(spec, programs.of(dtype)) for dtype in spec.dtypes}
    figures: dict[str, dict[str, Any]] = {d: {} for d in spec.dtypes}
    if {"arithmetic", "casts by default"} <= programs.made.keys():
        ours, default = programs.made["arithmetic"], programs.made["casts by default"]
        figures = arithmetic.measure_arithmetic(spec.dtypes, ours, default)
    process = compare_processes({dtype: hashes for dtype, (_, hashes) in measured.items()}, other.result)
    device = describe_device() | {"preallocated": is_preallocated()}
    return {
        "experiment": "doctor",
        "key": ["doctor", device["kind"]],
        "device": device,
        "environment": environment(),
        "compiler_options": dict(COMPILER_OPTIONS),
        "spec": spec.to_json(),
        "dtypes": {
            d: {"held": {part: hold(d).to_json()[part] for part in ("param", "operand", "activation")}}
            | questions
            | {"process": process["equal"].get(d, {})}
            | figures[d]
            for d, (questions, _) in measured.items()
        },
        "process": {name: process[name] for name in ("status", "reason")},
        "missing": programs.missing,
        "compilations": len(programs.made),
        "compile_seconds": programs.seconds,
        "seconds": round(time.monotonic() - begin, 1),
    }


def examine(options: Options, precision: Precision) -> Examination:
    """The examination of this process's default device, in each dtype."""
    del precision
    spec, seconds = DoctorSpec(), options.controls.doctor_seconds
    if seconds is not None:
        spec = dataclasses.replace(spec, seconds=seconds, child_seconds=max(spec.child_seconds, seconds))
    here = environment()["packages"]
    config = {
        "experiments": options.run.experiments,
        "device": describe_device(),
        "versions": {package: here[package] for package in ("jax", "jaxlib")},
        "compiler_options": COMPILER_OPTIONS,
        "spec": spec.to_json(),
    }
    return Examination(config, lambda: run_doctor(spec), "examining the device, a minute or two")
