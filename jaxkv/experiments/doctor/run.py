"""What does this device do to numbers? In under a minute, for each dtype: on what a row's result depends, and more.

A cached step computes one row, an uncached one many, against other numbers of slots. Before a study it is worth
knowing which of that alone changes bits here. Programs are compiled as the study compiles its own. Products in fp16,
bf16 and fp32 are held as the arms hold them (on a CPU: in fp32, Precision.widened).
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxkv.config import ModelConfig, make_precision
from jaxkv.decode import COMPILER_OPTIONS
from jaxkv.experiments.doctor import arithmetic
from jaxkv.experiments.doctor.operations import Inputs, compile_program, compile_with, make_operations
from jaxkv.experiments.doctor.process import Hashes, compare_processes, start_process
from jaxkv.experiments.doctor.shapes import (
    Pool,
    Results,
    Run,
    Shape,
    compare_company,
    compare_places,
    compare_results,
    compute_tested,
    hash_array,
    merge_figures,
)
from jaxkv.models.families import get_preset
from jaxkv.provenance import describe_device, environment

Answers = dict[str, dict[str, Any]]  # operation -> count -> figure
SECONDS = 44.0  # how long compilations may begin so that all is done in about a minute
SPARE_SECONDS = 12.0  # one program of a GPU's takes up to 15


def _one_layer() -> ModelConfig:
    return dataclasses.replace(get_preset("smollm2-135m"), num_layers=1)


def default_workers() -> int:
    """Programs compiled at a time; on a GPU few, since they wait for each other and none may be late."""
    return min(3 if jax.default_backend() == "gpu" else 4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class DoctorSpec:
    """What is measured.

    Attributes:
      dtypes: of the policies.
      rows: row counts; the first is what the others are compared with.
      slots: slot counts at one row, likewise.
      batches: batch sizes of one row each, compared with a row alone.
      filled: slots that hold a history, whatever the number of slots.
      tested: rows that are compared, a multiple of every smaller row count and batch size.
      process_rows: row counts whose results a second process computes too.
      config: architecture of the one layer.
      wide: inputs and outputs of the long matmul.
      seed: of all contents.
      workers: programs compiled at a time; XLA itself times a GPU's kernels under a lock.
      seconds: no compilation begins later than this, and none that only fills a table up later than SPARE_SECONDS
        before; what is missing then is listed as such.
      child_seconds: a second process that takes longer is given up; it runs beside this one.
    """

    dtypes: tuple[str, ...] = ("fp16", "bf16", "fp32")
    rows: tuple[int, ...] = (1, 4, 8, 16, 64, 256)
    slots: tuple[int, ...] = (128, 256, 512, 1024)
    batches: tuple[int, ...] = (2, 8)
    filled: int = 100
    tested: int = 16
    process_rows: tuple[int, ...] = (1, 16)
    config: ModelConfig = dataclasses.field(default_factory=_one_layer)
    wide: tuple[int, int] = (4096, 1024)
    seed: int = 0
    workers: int = dataclasses.field(default_factory=default_workers)
    seconds: float = SECONDS
    child_seconds: float = 50.0

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` restores an equal spec."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DoctorSpec":
        """Restores what `to_json` gave."""
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**(plain | {"config": ModelConfig.from_json(values["config"])}))

    @property
    def pool(self) -> Pool:
        return Pool(self.tested, max(self.rows), self.filled)

    def row_shape(self, rows: int, batch: int = 1) -> Shape:
        """Shape of a program that computes `rows` rows; all have slots enough for the largest."""
        return Shape(batch, rows, -(-(self.filled + max(self.rows)) // 128) * 128)

    def slot_shape(self, slots: int) -> Shape:
        return Shape(1, 1, slots, "slots")


@dataclasses.dataclass(frozen=True)
class Part:
    """What one program computes: the operations of a shape in one dtype."""

    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape}, {self.dtype}"


class Bench:
    """The operations in one dtype, with their contents and weights, from which programs of any shape are compiled."""

    def __init__(self, spec: DoctorSpec, dtype: str):
        policy = make_precision(dtype)
        self.pool = spec.pool
        self.held = policy.widened() if jax.default_backend() == "cpu" else policy  # as decode.Arms holds it
        self.operations = make_operations(Inputs(spec.config, self.held, spec.pool, spec.seed), spec.wide)

    def compile(self, shape: Shape) -> Run:
        """Compiles the program of a shape."""
        return compile_program(shape, self.pool, self.operations)


def plan_parts(benches: Mapping[str, Bench], shapes: Iterable[Shape]) -> dict[Any, Callable[[], Any]]:
    """The compilations of shapes in every dtype, in this order."""
    pairs = itertools.product(dict.fromkeys(shapes), benches.items())
    return {Part(shape, dtype): functools.partial(bench.compile, shape) for shape, (dtype, bench) in pairs}


def runs_of(programs: "Programs", dtype: str) -> dict[Shape, Run]:
    """The programs of a dtype."""
    return {part.shape: run for part, run in programs.made.items() if isinstance(part, Part) and part.dtype == dtype}


@dataclasses.dataclass
class Programs:
    """What was compiled, in the order in which it matters if time runs out."""

    made: dict[Any, Any]
    missing: dict[str, str]  # name -> why
    seconds: dict[str, float]


def compile_all(
    tasks: Mapping[Any, Callable[[], Any]],
    workers: int,
    seconds: float,
    spare: Mapping[Any, Callable[[], Any]] | None = None,
) -> Programs:
    """Runs the compilations, some at a time; none begins after `seconds`, a spare one SPARE_SECONDS sooner.

    A fault in one (a dtype that a device lacks, memory) leaves the others alone.
    """
    begin, programs = time.monotonic(), Programs({}, {}, {})

    def work(name: Any, task: Callable[[], Any], until: float) -> None:
        start = time.monotonic()
        if start - begin > until:
            programs.missing[str(name)] = "out of time"
            return
        try:
            programs.made[name] = task()
        except Exception as error:  # whatever a backend raises is a finding here
            programs.missing[str(name)] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        programs.seconds[str(name)] = round(time.monotonic() - start, 2)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        begun = [pool.submit(work, name, task, seconds) for name, task in tasks.items()]
        begun += [pool.submit(work, name, task, seconds - SPARE_SECONDS) for name, task in (spare or {}).items()]
        concurrent.futures.wait(begun)
    return programs


def _compare_to_first(results: Mapping[Shape, Results], shapes: Mapping[int, Shape]) -> Answers:
    """Figures of every count against the first one, where both were computed."""
    there = {count: results[shape] for count, shape in shapes.items() if shape in results}
    first = next(iter(shapes))
    return compare_results(there.pop(first), there) if first in there else {}


def _company(runs: Mapping[Shape, Run], shapes: Mapping[int, Shape], pool: Pool) -> Answers:
    found: Answers = {}
    for count, shape in shapes.items():
        for name, figure in (compare_company(runs[shape], shape, pool) if shape in runs else {}).items():
            found.setdefault(name, {})[str(count)] = figure
    return found


def measure_shapes(spec: DoctorSpec, runs: Mapping[Shape, Run]) -> tuple[dict[str, Answers], Answers]:
    """Every question about shape and company in one dtype, and the hashes for a second process to match.

    Args:
      spec: what is measured.
      runs: programs under test by shape; questions whose programs are missing have no figures.

    Returns:
      question -> operation -> figures; and operation -> row count -> hash.
    """
    rows = {count: spec.row_shape(count) for count in spec.rows}
    slots = {count: spec.slot_shape(count) for count in spec.slots}
    batches = {count: spec.row_shape(1, batch=count) for count in spec.batches}
    results = {shape: compute_tested(run, shape, spec.pool) for shape, run in runs.items()}
    again = {shape: compute_tested(run, shape, spec.pool) for shape, run in runs.items()}
    rerun: dict[str, list[dict[str, Any]]] = {}
    for shape, first in results.items():
        for name, figures in compare_results(first, {0: again[shape]}).items():
            rerun.setdefault(name, []).append(figures["0"])
    most = sorted((count for count in rows if count > 1), reverse=True)
    single = results.get(rows[1], {})
    questions = {
        "rows": _compare_to_first(results, rows),
        "rows_from_most": _compare_to_first(results, {count: rows[count] for count in most}),
        "slots": _compare_to_first(results, slots),
        "batch": _compare_to_first(results, {1: rows[1]} | batches),
        "neighbours": _company(runs, batches, spec.pool),
        "following": _company(runs, {count: rows[count] for count in rows if count > 1}, spec.pool),
        "rerun": {name: {"all": merge_figures(figures)} for name, figures in rerun.items()},
        "place": {name: {"1": compare_places(single[name])} for name in ("exp_tanh",) if name in single},
    }
    return questions, hash_rows(spec, results)


def hash_rows(spec: DoctorSpec, results: Mapping[Shape, Results]) -> Answers:
    """What both processes are compared by: operation -> row count -> hash of the tested rows' results."""
    hashes: Answers = {}
    for count in spec.process_rows:
        for name, values in results.get(spec.row_shape(count), {}).items():
            hashes.setdefault(name, {})[str(count)] = hash_array(values)
    return hashes


def compute_hashes(spec: DoctorSpec) -> dict[str, Answers]:
    """`hash_rows` by dtype, of programs that are compiled for them alone."""
    benches = {dtype: Bench(spec, dtype) for dtype in spec.dtypes}
    shapes = [spec.row_shape(count) for count in spec.process_rows]
    programs = compile_all(plan_parts(benches, shapes), spec.workers, spec.seconds)

    def compute(dtype: str) -> Answers:
        runs = runs_of(programs, dtype).items()
        return hash_rows(spec, {shape: compute_tested(run, shape, spec.pool) for shape, run in runs})

    return {dtype: compute(dtype) for dtype in spec.dtypes}


def is_preallocated() -> bool:
    """Whether this process has taken most of the device's memory, of which a second process will find little."""
    asked = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    return jax.default_backend() == "gpu" and asked not in ("false", "0")


def plan(
    spec: DoctorSpec, benches: Mapping[str, Bench]
) -> tuple[dict[Any, Callable[[], Any]], dict[Any, Callable[[], Any]]]:
    """Compilations by name or shape: those that answer every question by its ends, and those between, as `spare`."""
    rows = [spec.row_shape(n) for n in spec.rows]
    slots = [spec.slot_shape(n) for n in spec.slots]
    batches = [spec.row_shape(1, batch=n) for n in spec.batches]
    ends = [*map(spec.row_shape, spec.process_rows), rows[0], slots[0], slots[-1], batches[-1]]
    given, casts = (arithmetic.make_given(spec.dtypes, dots=dots) for dots in (True, False))
    tasks: dict[Any, Callable[[], Any]] = {
        "arithmetic": lambda: compile_with(COMPILER_OPTIONS, arithmetic.program, given),
        "casts by default": lambda: compile_with(None, arithmetic.program, casts),
    }
    between = [shape for shape in [*rows[::-1], *slots, *batches] if shape not in ends]
    return tasks | plan_parts(benches, ends), plan_parts(benches, between)


def run_doctor(
    spec: DoctorSpec | None = None,
    start: Callable[[Mapping[str, Any], float], Hashes] | None = start_process,
) -> dict[str, Any]:
    """Examines this process's default device.

    Args:
      spec: what is measured.
      start: (spec, seconds) -> hashes of the second process; None leaves that question out.

    Returns:
      The record (jaxkv.experiments.doctor.record).
    """
    begin = time.monotonic()
    spec = spec or DoctorSpec()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = None if start is None else pool.submit(start, spec.to_json(), spec.child_seconds)
        return _examine(spec, other, begin)


def _examine(spec: DoctorSpec, other: concurrent.futures.Future[Hashes] | None, begin: float) -> dict[str, Any]:
    """The record, with the hashes of the second process that runs beside this one, if any."""
    benches = {dtype: Bench(spec, dtype) for dtype in spec.dtypes}
    tasks, spare = plan(spec, benches)
    programs = compile_all(tasks, spec.workers, spec.seconds, spare)
    measured = {dtype: measure_shapes(spec, runs_of(programs, dtype)) for dtype in spec.dtypes}
    figures: dict[str, dict[str, Any]] = {d: {} for d in spec.dtypes}
    if {"arithmetic", "casts by default"} <= programs.made.keys():
        ours, default = programs.made["arithmetic"], programs.made["casts by default"]
        figures = arithmetic.measure_arithmetic(spec.dtypes, ours, default)
    process: dict[str, Any] = {"status": "cannot tell", "reason": "not asked for", "equal": {}}
    if other is not None:
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
            d: {"held": {part: bench.held.to_json()[part] for part in ("param", "operand", "activation")}}
            | measured[d][0]
            | {"process": process["equal"].get(d, {})}
            | figures[d]
            for d, bench in benches.items()
        },
        "process": {name: process[name] for name in ("status", "reason")},
        "missing": programs.missing,
        "compilations": len(programs.made),
        "compile_seconds": programs.seconds,
        "seconds": round(time.monotonic() - begin, 1),
    }
