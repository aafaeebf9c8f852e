"""What does this device do to numbers? In under a minute, for each dtype: on what a row's result depends, and more.

A cached step computes one row, an uncached one many, against other numbers of slots. Before a study it is worth
knowing which of that alone changes bits here. Programs are compiled as the study compiles its own. Products in fp16,
bf16 and fp32 are held as the arms hold them (on a CPU: in fp32, Precision.widened).
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxkv.config import ModelConfig, make_precision
from jaxkv.decode import COMPILER_OPTIONS
from jaxkv.experiments.doctor import arithmetic
from jaxkv.experiments.doctor.operations import Inputs, Operation, compile_program, make_operations
from jaxkv.experiments.doctor.process import compare_processes, start_process
from jaxkv.experiments.doctor.shapes import (
    Key,
    Pool,
    Results,
    Run,
    Shape,
    compare_company,
    compare_places,
    compare_results,
    compute_tested,
    hash_results,
    merge_figures,
)
from jaxkv.models.families import get_preset
from jaxkv.provenance import describe_device, environment

Nested = dict[str, dict[str, Any]]  # dtype -> operation -> figures
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


def compile_with(options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """(function, arguments) -> the function compiled for arguments of that kind, with these XLA options."""

    def compile(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
        return jax.jit(function, compiler_options=dict(options) if options else None).lower(*arguments).compile()

    return compile


@dataclasses.dataclass(frozen=True)
class Part:
    """What one program computes: the operations of a shape in one dtype."""

    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape}, {self.dtype}"


def join_parts(made: Mapping[Any, Any]) -> dict[Shape, Run]:
    """The programs of a shape as one, whatever dtypes there are; what is no `Part` is left out."""
    by_shape: dict[Shape, list[Run]] = {}
    for part, run in made.items():
        if isinstance(part, Part):
            by_shape.setdefault(part.shape, []).append(run)

    def join(runs: list[Run]) -> Run:
        return lambda tile: {key: value for run in runs for key, value in run(tile).items()}

    return {shape: join(runs) for shape, runs in by_shape.items()}


class Bench:
    """Operations with their contents and weights, from which programs of any shape are compiled."""

    def __init__(self, spec: DoctorSpec):
        self.spec = spec
        on_cpu = jax.default_backend() == "cpu"
        policies = {d: make_precision(d) for d in spec.dtypes}
        self.held = {d: p.widened() if on_cpu else p for d, p in policies.items()}  # as decode.Arms holds them
        self.operations: dict[str, list[Operation]] = {
            d: make_operations(Inputs(spec.config, p, spec.pool, spec.seed), spec.wide) for d, p in self.held.items()
        }
        self.weights: dict[Key, Any] = {
            (d, op.name): jax.device_put(op.weights) for d, ops in self.operations.items() for op in ops
        }

    def compile(self, part: Part) -> Run:
        """Compiles the program of a shape and dtype."""
        operations = {part.dtype: self.operations[part.dtype]}
        return compile_program(part.shape, self.spec.pool, operations, self.weights, compile_with(COMPILER_OPTIONS))

    def plan(self, shapes: Iterable[Shape]) -> dict[Any, Callable[[], Any]]:
        """The compilations of shapes in every dtype, in this order."""
        parts = [Part(shape, dtype) for shape in dict.fromkeys(shapes) for dtype in self.spec.dtypes]
        return {part: functools.partial(self.compile, part) for part in parts}


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


def _nest(figures: Mapping[Key, Any]) -> Nested:
    nested: Nested = {}
    for (dtype, name), figure in figures.items():
        nested.setdefault(dtype, {})[name] = figure
    return nested


def _compare_to_first(results: Mapping[Shape, Results], shapes: Mapping[int, Shape]) -> Nested:
    """Figures of every count against the first one, where both were computed."""
    there = {count: results[shape] for count, shape in shapes.items() if shape in results}
    first = next(iter(shapes))
    if first not in there:
        return {}
    return _nest(compare_results(there.pop(first), there))


def _company(runs: Mapping[Shape, Run], shapes: Mapping[int, Shape], pool: Pool) -> Nested:
    found: dict[Key, dict[str, Any]] = {}
    for count, shape in shapes.items():
        for key, figure in (compare_company(runs[shape], shape, pool) if shape in runs else {}).items():
            found.setdefault(key, {})[str(count)] = figure
    return _nest(found)


def measure_shapes(spec: DoctorSpec, runs: Mapping[Shape, Run]) -> tuple[dict[str, Nested], dict[str, Nested]]:
    """Every question about shape and company, and the hashes for a second process to match.

    Args:
      spec: what is measured.
      runs: programs under test by shape; questions whose programs are missing have no figures.

    Returns:
      question -> dtype -> operation -> figures; and row count -> dtype -> operation -> hash.
    """
    rows = {count: spec.row_shape(count) for count in spec.rows}
    slots = {count: spec.slot_shape(count) for count in spec.slots}
    batches = {count: spec.row_shape(1, batch=count) for count in spec.batches}
    results = {shape: compute_tested(run, shape, spec.pool) for shape, run in runs.items()}
    again = {shape: compute_tested(run, shape, spec.pool) for shape, run in runs.items()}
    rerun: dict[Key, list[dict[str, Any]]] = {}
    for shape, first in results.items():
        for key, figures in compare_results(first, {0: again[shape]}).items():
            rerun.setdefault(key, []).append(figures["0"])
    most = sorted((count for count in rows if count > 1), reverse=True)
    questions = {
        "rows": _compare_to_first(results, rows),
        "rows_from_most": _compare_to_first(results, {count: rows[count] for count in most}),
        "slots": _compare_to_first(results, slots),
        "batch": _compare_to_first(results, {1: rows[1]} | batches),
        "neighbours": _company(runs, batches, spec.pool),
        "following": _company(runs, {count: rows[count] for count in rows if count > 1}, spec.pool),
        "rerun": _nest({key: {"all": merge_figures(figures)} for key, figures in rerun.items()}),
        "place": {
            d: {"exp_tanh": {"1": compare_places(values)}}
            for (d, name), values in results.get(rows[1], {}).items()
            if name == "exp_tanh"
        },
    }
    hashes = {str(n): hash_results(results[rows[n]]) for n in spec.process_rows if rows[n] in results}
    return questions, hashes


def compute_hashes(spec: DoctorSpec) -> dict[str, Nested]:
    """What both processes are compared by: row count -> dtype -> operation -> hash of the tested rows' results."""
    bench = Bench(spec)
    shapes = {n: spec.row_shape(n) for n in spec.process_rows}
    programs = compile_all(bench.plan(shapes.values()), spec.workers, spec.seconds)
    runs = join_parts(programs.made)
    return {str(n): hash_results(compute_tested(runs[s], s, spec.pool)) for n, s in shapes.items() if s in runs}


def is_preallocated() -> bool:
    """Whether this process has taken most of the device's memory, of which a second process will find little."""
    asked = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    return jax.default_backend() == "gpu" and asked not in ("false", "0")


def plan(spec: DoctorSpec, bench: Bench) -> tuple[dict[Any, Callable[[], Any]], dict[Any, Callable[[], Any]]]:
    """Compilations by name or shape: those that answer every question by its ends, and those between, as `spare`."""
    rows = [spec.row_shape(n) for n in spec.rows]
    slots = [spec.slot_shape(n) for n in spec.slots]
    batches = [spec.row_shape(1, batch=n) for n in spec.batches]
    ends = [*map(spec.row_shape, spec.process_rows), rows[0], slots[0], slots[-1], batches[-1]]
    ours, default = compile_with(COMPILER_OPTIONS), compile_with(None)
    casts = arithmetic.make_given(spec.dtypes, dots=False)
    tasks: dict[Any, Callable[[], Any]] = {
        "arithmetic": lambda: ours(arithmetic.program, (arithmetic.make_given(spec.dtypes),)),
        "casts by default": lambda: default(arithmetic.program, (casts,)),
    }
    between = [shape for shape in [*rows[::-1], *slots, *batches] if shape not in ends]
    return tasks | bench.plan(ends), bench.plan(between)


def run_doctor(
    spec: DoctorSpec | None = None,
    start: Callable[[Mapping[str, Any], float], Mapping[str, Nested]] | None = start_process,
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


def _examine(
    spec: DoctorSpec, other: concurrent.futures.Future[Mapping[str, Nested]] | None, begin: float
) -> dict[str, Any]:
    """The record, with the hashes of the second process that runs beside this one, if any."""
    bench = Bench(spec)
    tasks, spare = plan(spec, bench)
    programs = compile_all(tasks, spec.workers, spec.seconds, spare)
    runs = join_parts(programs.made)
    questions, hashes = measure_shapes(spec, runs)
    figures: dict[str, dict[str, Any]] = {d: {} for d in spec.dtypes}
    if {"arithmetic", "casts by default"} <= programs.made.keys():
        ours, default = programs.made["arithmetic"], programs.made["casts by default"]
        figures = arithmetic.measure_arithmetic(spec.dtypes, ours, default)
    process: dict[str, Any] = {"status": "cannot tell", "reason": "not asked for", "equal": {}}
    if other is not None:
        process = compare_processes(hashes, other.result)
    held = {d: p.to_json() for d, p in bench.held.items()}
    device = describe_device() | {"preallocated": is_preallocated()}
    return {
        "experiment": "doctor",
        "key": ["doctor", device["kind"]],
        "device": device,
        "environment": environment(),
        "compiler_options": dict(COMPILER_OPTIONS),
        "spec": spec.to_json(),
        "dtypes": {
            d: {"held": {part: held[d][part] for part in ("param", "operand", "activation")}}
            | {question: found.get(d, {}) for question, found in questions.items()}
            | {"process": process["equal"].get(d, {})}
            | figures[d]
            for d in spec.dtypes
        },
        "process": {name: process[name] for name in ("status", "reason")},
        "missing": programs.missing,
        "compilations": len(programs.made),
        "compile_seconds": programs.seconds,
        "seconds": round(time.monotonic() - begin, 1),
    }
