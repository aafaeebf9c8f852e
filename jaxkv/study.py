"""One condition of a study: from settings to a finished run directory. The command's flags are in `launch`.

`settings` is a plain dict of the command's flags with one model, precision and sampler. What takes long to import comes
after what a typo can break.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxkv.config import Precision, make_precision
from jaxkv.errors import UserError
from jaxkv.records import RunDirectory, environment, fingerprint, git_revision

Settings = dict[str, Any]
Batches = Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]  # records, timing

INCIDENTAL = ("out", "compilation_cache")  # decide no number: they stay out of the run's default name


def read_precision(settings: Settings) -> Precision:
    """The policy asked for. Raises UserError on an unknown name."""
    parts = {part: settings[part] for part in ("residual", "accumulation", "cache")}
    return make_precision(settings["precision"], **parts)


def run_study(settings: Settings) -> pathlib.Path:
    """Runs one condition, or what is missing of it, and prints its table. Returns its directory.

    Raises:
      UserError: anything the user can mend.
    """
    from rich.console import Console

    console = Console(stderr=True)
    path = run_path(settings, read_precision(settings))
    _check_writable(path)
    _set_up_jax(read_precision(settings), settings["compilation_cache"])
    if settings["experiments"] == ["doctor"]:
        _run_doctor(settings, path, console)
    else:
        _run_experiments(settings, path, console)
    return path


def run_path(settings: Settings, precision: Precision) -> pathlib.Path:
    """The run directory: --out, or a name of what is run with a hash of all that decides numbers."""
    if settings["out"]:
        return pathlib.Path(settings["out"]).expanduser()
    numbers = {name: value for name, value in settings.items() if name not in INCIDENTAL}
    tag = fingerprint(numbers)[:8]
    if settings["experiments"] == ["doctor"]:
        return pathlib.Path("runs") / "doctor"
    name = settings["model"] or pathlib.PurePath(settings["checkpoint"]).name
    return pathlib.Path("runs") / f"{name}-{precision.name}-{settings['sampler']}-{tag}"


def _check_writable(path: pathlib.Path) -> None:
    """Finds out before the work, not after it, that a run directory cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        probe.write_bytes(b"jaxkv")
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write the run directory {path} ({error.strerror}); choose another --out") from error


def _flagfile(settings: Settings, out: pathlib.Path) -> str:
    """A flagfile that replays this run into the same directory."""
    values = settings | {"out": str(out.resolve())}
    for name in ("checkpoint", "data", "fewshot_data"):
        if values[name] and pathlib.Path(values[name]).expanduser().exists():
            values[name] = str(pathlib.Path(values[name]).expanduser().resolve())  # replays from any directory
    lines = [f"--{n}={','.join(v) if isinstance(v, list) else v}" for n, v in values.items() if v is not None]
    return "\n".join(lines) + "\n"


def _set_up_jax(precision: Precision, cache: str) -> None:
    import jax

    jax.config.update("jax_enable_x64", "float64" in precision.to_json().values())
    if cache != "none":
        # Also pins the kernels that autotuning chose: a resumed run finds the executables it was begun with.
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@dataclasses.dataclass(frozen=True)
class Study:
    """What the experiments of a condition share.

    Attributes:
      settings: flags.
      precision: policy.
      checkpoint: model.
      task: problems with prompts and scores.
      items: the problems as token ids.
      spec: DivergenceSpec.
      plain: Arms of the plain regime.
      aligned: Arms of the aligned one.
      console: for progress.
    """

    settings: Settings
    precision: Precision
    checkpoint: Any
    task: Any
    items: list[Any]
    spec: Any
    plain: Any
    aligned: Any
    console: Any

    @property
    def arms(self) -> Any:
        """Arms of the regime asked for."""
        return self.aligned if self.settings["regime"] == "aligned" else self.plain


def _run_experiments(settings: Settings, path: pathlib.Path, console: Any) -> None:
    begin = time.monotonic()
    study = _load(settings, console)
    with RunDirectory.open(path, _run_config(study), _flagfile(settings, path), _provenance(study)) as run:
        state = study.arms.prepare(study.checkpoint.state)
        for name in settings["experiments"]:
            make_batches, each = EXPERIMENTS[name]
            total = len(study.items) * each()
            done = {tuple(key[1:]) for key in run.done_keys() if key[0] == name}
            if settings["gate"] == "on" and name == settings["experiments"][0] and len(done) < total:
                _run_gate(study, state, run)
            _record(run, name, make_batches(study, state, done), total, len(done), console)
        run.record_provenance({"seconds": round(time.monotonic() - begin, 1)})
    for name in settings["experiments"]:
        _show(path, name)


def _divergence(study: Study, state: Any, done: set[tuple]) -> Batches:
    from jaxkv.experiments.divergence import run_divergence

    problems = frozenset(problem for (problem,) in done)
    return run_divergence(study.arms, state, study.items, study.spec, study.checkpoint.tokenizer, study.task, problems)


def _attribution(study: Study, state: Any, done: set[tuple]) -> Batches:
    from jaxkv.experiments.attribution import run_attribution

    return run_attribution(study.arms, state, study.items, study.spec, study.aligned.tile, frozenset(done))


def _mitigations(study: Study, state: Any, done: set[tuple]) -> Batches:
    """Its variants have precisions of their own, rounded from the checkpoint in fp32."""
    del state
    from jaxkv.checkpoints import load
    from jaxkv.experiments.mitigations import make_variants, run_mitigations

    settings = study.settings
    wide = load(
        settings["checkpoint"] or settings["model"],
        precision=make_precision("fp32"),
        config=study.checkpoint.config,
        revision=settings["revision"],
    )
    return run_mitigations(
        wide.config, wide.state, study.items, study.spec, make_variants(study.aligned.tile), frozenset(done),
        study.arms.sampler, study.arms.stop_ids,
    )  # fmt: skip


def _count_variants() -> int:
    from jaxkv.experiments.attribution import VARIANTS

    return len(VARIANTS)


def _count_mitigations() -> int:
    from jaxkv.experiments.mitigations import make_variants

    return len(make_variants(1))


# Experiment -> its batches of records, and how many records a problem has.
EXPERIMENTS: dict[str, tuple[Callable[[Study, Any, set[tuple]], Batches], Callable[[], int]]] = {
    "divergence": (_divergence, lambda: 1),
    "attribution": (_attribution, _count_variants),
    "mitigations": (_mitigations, _count_mitigations),
}


def _show(path: pathlib.Path, experiment: str) -> None:
    """Prints an experiment's table and writes its report, from the records alone."""
    from rich.console import Console

    from jaxkv.analysis import attribution, mitigations, report
    from jaxkv.records import read_lines, read_run, write_atomically

    shown = Console(file=sys.stdout)
    shown.print(path.name, style="bold", highlight=False)
    name = "report.md" if experiment == "divergence" else f"{experiment}.md"
    if experiment == "divergence":
        shown.print(report.render_table(report.write_report(path)))
    else:
        run, records = read_run(path)
        if experiment == "attribution":
            summary = attribution.summarize_attribution(records, run)
            shown.print(attribution.render_attribution(summary))
            text = attribution.to_markdown(summary)
        else:
            summary = mitigations.summarize_mitigations(records, read_lines(path / "timing.jsonl")[0], run)
            shown.print(mitigations.render(summary))
            text = mitigations.to_markdown(summary)
        write_atomically(path / name, text)
    shown.print(f"report: {path / name}", highlight=False, soft_wrap=True)


def _load(settings: Settings, console: Any) -> Study:
    """Loads model and problems, and finds out whether they fit together."""
    import jax

    from jaxkv.checkpoints import load
    from jaxkv.decode import Arms, make_layout
    from jaxkv.experiments.divergence import DivergenceSpec
    from jaxkv.generate import uncached_lengths
    from jaxkv.models.families import get_preset
    from jaxkv.sampling import make_sampler
    from jaxkv.tasks import load_task

    precision = read_precision(settings)
    sampler = make_sampler(settings["sampler"], settings["temperature"], settings["top_k"], settings["top_p"])
    preset = get_preset(settings["model"]) if settings["model"] else None
    source = settings["checkpoint"] or settings["model"]
    with console.status(f"loading {source}"):
        checkpoint = load(source, precision=precision, config=preset, revision=settings["revision"])
    spec = _prompt_spec(settings, checkpoint.tokenizer.has_chat_template)
    with console.status("loading the problems"):
        task = load_task(settings["task"], data=settings["data"], fewshot_data=settings["fewshot_data"], spec=spec)
    items = _items(task, checkpoint.tokenizer, settings["num_problems"])
    divergence = DivergenceSpec(
        new_tokens=settings["max_new_tokens"],
        **{field.name: settings[field.name] for field in dataclasses.fields(DivergenceSpec) if field.name in settings},
    )
    longest = max(items, key=lambda item: len(item.prompt))
    layout = make_layout([list(longest.prompt)], divergence.new_tokens, divergence.bucket, checkpoint.config)
    uncached_lengths(divergence.uncached_length, layout)
    tile = settings["tile"] or (8 if jax.default_backend() == "cpu" else 16)
    plain = Arms(checkpoint.config, precision, sampler, checkpoint.tokenizer.eos_ids)
    aligned = Arms(checkpoint.config, precision, sampler, checkpoint.tokenizer.eos_ids, tile=tile)
    return Study(settings, precision, checkpoint, task, items, divergence, plain, aligned, console)


def _prompt_spec(settings: Settings, has_template: bool) -> Any:
    from jaxkv.tasks.gsm8k import PromptSpec

    usual = "zero_shot" if settings["task"] == "arith" else "few_shot"
    style: Any = settings["prompt"] if settings["prompt"] != "auto" else "chat" if has_template else usual
    default = {"few_shot": 8, "chat": 0, "zero_shot": 0}[style]
    shots = default if settings["shots"] is None else settings["shots"]
    return PromptSpec(style, shots, settings["shots_seed"])


def _items(task: Any, tokenizer: Any, count: int) -> list[Any]:
    from jaxkv.experiments.divergence import Item

    if count > len(task.problems):
        raise UserError(f"--num_problems={count} but the data has {len(task.problems)}; ask for at most that many")
    items = []
    for problem in task.problems[:count]:
        prompt = task.prompt(problem)
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt)
        items.append(Item(problem.index, tuple(ids), problem.answer))
    return items


def _run_gate(study: Study, state: Any, run: RunDirectory) -> None:
    from jaxkv.experiments.gate import run_gate

    with study.console.status("gate: aligned arms, bit for bit"):
        found = run_gate(study.aligned, study.aligned, state, study.items, study.spec, study.settings["gate_problems"])
    run.record_provenance({"gate": found})


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
    if done:
        unit = "problems" if name == "divergence" else f"records of {name}"
        console.print(f"{done} of {total} {unit} are done already", highlight=False)
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(name, total=total, completed=done, rate="compiling")
        for records, timing in batches:
            for record in records:
                run.append(record)
            run.append_timing(timing)
            seconds, tokens = timing["seconds"], timing.get("tokens", {})
            rates = [f"{arm.split('_')[0]} {tokens[arm] / seconds[arm]:.0f}" for arm in tokens if arm in seconds]
            bars.update(bar, advance=len(records), rate=f"{', '.join(rates)} tokens/s" if rates else "")


def _run_doctor(settings: Settings, path: pathlib.Path, console: Any) -> None:
    """Examines the device, once a directory."""
    import jax
    from rich.console import Console

    from jaxkv.analysis.doctor import render, to_markdown
    from jaxkv.decode import COMPILER_OPTIONS
    from jaxkv.experiments.doctor import run_doctor
    from jaxkv.records import write_atomically

    device, here = jax.devices()[0], environment()
    config = {
        "experiments": ["doctor"],
        "device": _describe(device),
        "versions": {package: here["packages"][package] for package in ("jax", "jaxlib")},
        "compiler_options": COMPILER_OPTIONS,
    }
    provenance = here | {"git": git_revision()}
    with RunDirectory.open(path, config, _flagfile(settings, path), provenance) as run:
        if not run.done_keys():
            with console.status("examining the device, about a minute"):
                run.append(run_doctor())
        record = run.read()[0]
    write_atomically(path / "report.md", to_markdown(record))
    shown = Console(file=sys.stdout)
    shown.print(render(record))
    shown.print(f"report: {path / 'report.md'}", highlight=False, soft_wrap=True)


def _describe(device: Any) -> dict[str, str]:
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "runtime": " ".join(device.client.platform_version.split()),
    }


def _provenance(study: Study) -> dict[str, Any]:
    import jax

    return environment() | {
        "git": git_revision(),
        "checkpoint": study.checkpoint.provenance,
        "data": study.task.provenance,
        "generation_config_not_applied": study.checkpoint.generation,
        "device_count": jax.device_count(),
        "compilation_cache": study.settings["compilation_cache"],
    }


def _run_config(study: Study) -> dict[str, Any]:
    """All that decides the numbers: contents and versions, not where files lie."""
    import jax

    from jaxkv.decode import COMPILER_OPTIONS

    here, arms, settings = environment(), study.arms, study.settings
    origin, task = study.checkpoint.provenance, study.task
    name = settings["model"] or pathlib.PurePath(settings["checkpoint"]).name
    seed = {"source": origin["source"]} if origin["kind"] == "random" else {}  # such weights are their seed
    data = {
        part: {k: v for k, v in found.items() if k not in ("source", "fingerprint")}
        for part in ("problems", "shots")
        if (found := task.provenance[part])
    }
    return {
        "experiments": settings["experiments"],
        "model": study.checkpoint.config.to_json() | {"name": name},
        "precision": arms.precision.to_json(),
        "held": {part: arms.held.to_json()[part] for part in ("param", "operand")},
        "checkpoint": {k: v for k, v in origin.items() if k != "source"} | seed,
        "task": settings["task"],
        "data": data,
        "prompt": task.provenance["prompt"],
        "num_problems": len(study.items),
        "sampling": arms.sampler.to_json() | {"seed": study.spec.seed},
        "decoding": dataclasses.asdict(study.spec) | {"stop_ids": list(arms.stop_ids), "tile": arms.tile},
        "device": _describe(jax.devices()[0]),
        "versions": {package: here["packages"][package] for package in ("jax", "jaxlib")},
        "variables": {k: v for k, v in here["variables"].items() if k != "JAX_PLATFORMS"},
        "compiler_options": COMPILER_OPTIONS,
    }
