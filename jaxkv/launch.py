"""The command: flags in, a run directory with records, a table and a report out.

    python -m jaxkv.launch --model=gemma2-2b --precision=fp16

Without flags it runs a small model that ships with the package on problems of its own, in fp16 and, as a control, fp32.
Lists make a grid with one run directory for each condition. The same command again does only what is missing;
`--flagfile=RUN/run.flags` replays a run.
"""

import dataclasses
import itertools
import pathlib
import sys
import time
from typing import Any

from absl import flags

from jaxkv.checkpoints.shipped import SHIPPED
from jaxkv.cli import run_command
from jaxkv.config import Precision, make_precision
from jaxkv.errors import UserError, nearest
from jaxkv.records import RunDirectory, environment, fingerprint, git_revision

EXPERIMENTS = ("divergence",)
PROMPTS = ("auto", "chat", "few_shot", "zero_shot")
GRID = ("model", "precision", "sampler")  # flags whose lists make conditions
FLAGS = flags.FLAGS
# Flags that decide no number: they stay out of the run's default name.
_INCIDENTAL = ("out", "compilation_cache")

_DEFINED = [
    flags.DEFINE_list("model", [], "Presets, e.g. gemma2-2b; weights from the hub unless --checkpoint is set. "
                      "tiny-gemma2, which ships with the package, if neither is set."),
    flags.DEFINE_string("checkpoint", None, "Directory, .gguf file, Orbax checkpoint, hub id, or random:SEED."),
    flags.DEFINE_string("revision", None, "Branch, tag or commit of a hub id; the commit is recorded."),
    flags.DEFINE_list("precision", ["fp16", "fp32"], "fp16, bf16, fp32 (true fp32, not TF32), fp64 (a reference)."),
    flags.DEFINE_string("residual", None, "Dtype of the residual stream, if not the precision's."),
    flags.DEFINE_string("accumulation", None, "Dtype products are returned in; the kernel may add in a wider one."),
    flags.DEFINE_string("cache", None, "Dtype of keys and values in both arms, if not the precision's."),
    flags.DEFINE_list("experiments", ["divergence"], f"Which experiments: {', '.join(EXPERIMENTS)}."),
    flags.DEFINE_string("task", None, "gsm8k or arith; arith if not set for the models that ship with the package."),
    flags.DEFINE_string("data", None, "JSONL or Parquet file with the problems; the hub's test split if not set."),
    flags.DEFINE_string("fewshot_data", None, "File with worked examples; the hub's train split if not set."),
    flags.DEFINE_string("prompt", "auto", "chat, few_shot, zero_shot, or auto: chat if the tokenizer has a template, "
                        "zero_shot for arith, else few_shot."),
    flags.DEFINE_integer("shots", None, "Worked examples in the prompt: 8 for few_shot, 0 for chat if not set."),
    flags.DEFINE_integer("shots_seed", None, "Chooses the worked examples; the first ones if not set."),
    flags.DEFINE_integer("num_problems", None, "How many problems, from the first: 100 if not set."),
    flags.DEFINE_integer("max_new_tokens", None, "Most new tokens for a problem: 256 if not set, 128 in arith."),
    flags.DEFINE_list("sampler", ["greedy"], "greedy, temperature, top_k, top_p."),
    flags.DEFINE_float("temperature", None, "0.7 if not set, 1.0 with top_p."),
    flags.DEFINE_integer("top_k", None, "50 if not set."),
    flags.DEFINE_float("top_p", None, "0.9 if not set."),
    flags.DEFINE_integer("seed", 0, "Seed of the sampling noise, which both arms share."),
    flags.DEFINE_integer("batch_size", 1, "Problems decoded together."),
    flags.DEFINE_string("padding", "equal", "equal: batches of one prompt length; left: pad on the left."),
    flags.DEFINE_integer("bucket", 64, "Prompts are padded to a multiple of this many rows; fewer shapes to compile."),
    flags.DEFINE_string("uncached_length", "padded", "Rows of an uncached step: padded (all slots) or bucket:M."),
    flags.DEFINE_string("regime", "plain", "plain, or aligned: both arms through one program of fixed shape."),
    flags.DEFINE_integer("tile", None, "Rows of a tile in the aligned regime and the gate: 16 if not set, 8 on a CPU."),
    flags.DEFINE_string("gate", "on", "on: stop if the aligned arms differ in a bit on a few problems; or off."),
    flags.DEFINE_integer("gate_problems", 2, "How many problems the gate tries."),
    flags.DEFINE_string("uncached", "draft", "draft (cached arm drafts, uncached arm checks; same bits) or stepwise."),
    flags.DEFINE_integer("stepwise_problems", 1, "With draft, brute force runs beside it on this many problems."),
    flags.DEFINE_integer("control_problems", 8, "The controls run on this many problems."),
    flags.DEFINE_string("out", None, "Run directory; runs/MODEL-PRECISION-SAMPLER-HASH if not set."),
    flags.DEFINE_string("compilation_cache", "~/.cache/jaxkv/xla", "Where to keep compiled programs, or none."),
]  # fmt: skip


def _settings() -> dict[str, Any]:
    """The flags, with what depends on other flags filled in."""
    values: dict[str, Any] = {
        holder.name: holder.default if holder.value in ("", []) else holder.value for holder in _DEFINED
    }
    if not values["model"] and values["checkpoint"] is None:
        values["model"] = ["tiny-gemma2"]
    if values["task"] is None:
        ours = values["checkpoint"] is None and all(name in SHIPPED for name in values["model"])
        values["task"] = "arith" if ours else "gsm8k"
    for name, arith, usual in (("num_problems", 100, 100), ("max_new_tokens", 128, 256)):
        if values[name] is None:
            values[name] = arith if values["task"] == "arith" else usual
    return values


def _conditions(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The grid: settings with one model, precision and sampler each, and each its directory if there are several."""
    lists = [settings[name] or [None] for name in GRID]
    for name, values in zip(GRID, lists, strict=True):
        if len(set(values)) != len(values):
            raise UserError(f"--{name}={','.join(values)} names a value twice; drop one")
    grid = [settings | dict(zip(GRID, values, strict=True)) for values in itertools.product(*lists)]
    if settings["out"] and len(grid) > 1:
        for one in grid:
            one["out"] = str(pathlib.Path(settings["out"]) / "-".join(one[name] or "model" for name in GRID))
    return grid


def _flagfile(settings: dict[str, Any], out: pathlib.Path) -> str:
    """A flagfile that replays this run into the same directory."""
    values = settings | {"out": str(out.resolve())}
    for name in ("checkpoint", "data", "fewshot_data"):
        if values[name] and pathlib.Path(values[name]).expanduser().exists():
            values[name] = str(pathlib.Path(values[name]).expanduser().resolve())  # replays from any directory
    lines = [f"--{n}={','.join(v) if isinstance(v, list) else v}" for n, v in values.items() if v is not None]
    return "\n".join(lines) + "\n"


def _choose(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UserError(f"--{name}={value} is not known{nearest(value, list(known))}; known: {', '.join(known)}")
    return value


def _precision(settings: dict[str, Any]) -> Precision:
    return make_precision(
        settings["precision"], **{part: settings[part] for part in ("residual", "accumulation", "cache")}
    )


def _run_path(settings: dict[str, Any], precision: Precision) -> pathlib.Path:
    if settings["out"]:
        return pathlib.Path(settings["out"]).expanduser()
    numbers = {name: value for name, value in settings.items() if name not in _INCIDENTAL}
    tag = fingerprint(numbers)[:8]
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


def _check_settings(settings: dict[str, Any]) -> None:
    """What absl's types do not check."""
    for name in settings["experiments"]:
        _choose("experiments", name, EXPERIMENTS)
    _choose("prompt", settings["prompt"], PROMPTS)
    _choose("padding", settings["padding"], ("equal", "left"))
    _choose("regime", settings["regime"], ("plain", "aligned"))
    _choose("gate", settings["gate"], ("on", "off"))
    _choose("uncached", settings["uncached"], ("draft", "stepwise"))
    for name in ("num_problems", "max_new_tokens", "batch_size", "bucket", "tile", "gate_problems"):
        if settings[name] is not None and settings[name] < 1:
            raise UserError(f"--{name}={settings[name]} must be at least 1")
    for name in ("control_problems", "stepwise_problems"):
        if settings[name] < 0:
            raise UserError(f"--{name}={settings[name]} must not be negative")
    if settings["regime"] == "aligned" and settings["uncached_length"] != "padded":
        raise UserError(
            f"--uncached_length={settings['uncached_length']} cannot be aligned: both arms need the same slots; "
            "use padded"
        )
    if not -(2**31) <= settings["seed"] < 2**31:
        raise UserError(f"--seed={settings['seed']} must fit 32 bits; choose another")


def _set_up_jax(precision: Precision, cache: str) -> None:
    import jax

    jax.config.update("jax_enable_x64", "float64" in precision.to_json().values())
    if cache != "none":
        # Also pins the kernels that autotuning chose: a resumed run finds the executables it was begun with.
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _prompt_spec(settings: dict[str, Any], has_template: bool) -> Any:
    from jaxkv.tasks.gsm8k import PromptSpec

    plain = "zero_shot" if settings["task"] == "arith" else "few_shot"
    style: Any = settings["prompt"] if settings["prompt"] != "auto" else "chat" if has_template else plain
    default = {"few_shot": 8, "chat": 0, "zero_shot": 0}[style]
    shots = default if settings["shots"] is None else settings["shots"]
    return PromptSpec(style, shots, settings["shots_seed"])


def _load_checkpoint(settings: dict[str, Any], preset: Any, precision: Precision, console: Any) -> Any:
    from jaxkv.checkpoints import load

    source = settings["checkpoint"] or settings["model"]
    with console.status(f"loading {source}"):
        return load(source, precision=precision, config=preset, revision=settings["revision"])


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


def _run_divergence(run: RunDirectory, arms: Any, state: Any, items: list[Any], spec: Any, tokenizer: Any, task: Any,
                    console: Any) -> None:  # fmt: skip
    """Runs what is missing, with a progress bar that tells rates and the time left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from jaxkv.experiments.divergence import run_divergence

    done = frozenset(int(key[1]) for key in run.done_keys() if key[0] == "divergence")
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
    )  # fmt: skip
    if done:
        console.print(f"{len(done)} of {len(items)} problems are done already", highlight=False)
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("problems", total=len(items), completed=len(done), rate="compiling")
        for records, timing in run_divergence(arms, state, items, spec, tokenizer, task, done):
            for record in records:
                run.append(record)
            run.append_timing(timing)
            seconds, tokens = timing["seconds"], timing["tokens"]
            rates = [f"{arm.split('_')[0]} {tokens[arm] / seconds[arm]:.0f}" for arm in ("cached", "uncached_forced")]
            bars.update(bar, advance=len(records), rate=f"{', '.join(rates)} tokens/s")


def launch(argv: list[str]) -> None:
    """Runs the command. Raises UserError on anything the user can mend."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument '{argv[1]}'; options are written --name=value")
    settings = _settings()
    _check_settings(settings)
    conditions = _conditions(settings)
    from jaxkv.models.families import get_preset
    from jaxkv.sampling import make_sampler

    for one in conditions:  # before anything slow: a typo ends here
        _precision(one)
        make_sampler(one["sampler"], one["temperature"], one["top_k"], one["top_p"])
        if one["model"]:
            get_preset(one["model"])
    for one in conditions:
        _finish(_run(one))


def _run(settings: dict[str, Any]) -> pathlib.Path:
    """Runs one condition, or what is missing of it. Returns its directory."""
    from rich.console import Console

    from jaxkv.models.families import get_preset
    from jaxkv.sampling import make_sampler

    console = Console(stderr=True)
    precision = _precision(settings)
    sampler = make_sampler(settings["sampler"], settings["temperature"], settings["top_k"], settings["top_p"])
    preset = get_preset(settings["model"]) if settings["model"] else None
    _set_up_jax(precision, settings["compilation_cache"])
    import jax

    from jaxkv.decode import Arms, make_layout
    from jaxkv.experiments.divergence import DivergenceSpec
    from jaxkv.experiments.gate import run_gate
    from jaxkv.generate import uncached_lengths
    from jaxkv.tasks import load_task

    path = _run_path(settings, precision)
    _check_writable(path)
    begin = time.monotonic()
    checkpoint = _load_checkpoint(settings, preset, precision, console)
    prompt_spec = _prompt_spec(settings, checkpoint.tokenizer.has_chat_template)
    with console.status("loading the problems"):
        task = load_task(
            settings["task"], data=settings["data"], fewshot_data=settings["fewshot_data"], spec=prompt_spec
        )
    items = _items(task, checkpoint.tokenizer, settings["num_problems"])
    spec = DivergenceSpec(
        new_tokens=settings["max_new_tokens"],
        **{field.name: settings[field.name] for field in dataclasses.fields(DivergenceSpec) if field.name in settings},
    )
    longest = max(items, key=lambda item: len(item.prompt))
    uncached_lengths(
        spec.uncached_length, make_layout([list(longest.prompt)], spec.new_tokens, spec.bucket, checkpoint.config)
    )
    tile = settings["tile"] or (8 if jax.default_backend() == "cpu" else 16)
    plain = Arms(checkpoint.config, precision, sampler, checkpoint.tokenizer.eos_ids)
    aligned = Arms(checkpoint.config, precision, sampler, checkpoint.tokenizer.eos_ids, tile=tile)
    arms = aligned if settings["regime"] == "aligned" else plain
    config = _run_config(settings, checkpoint, task, spec, arms, len(items))
    provenance = environment() | {
        "git": git_revision(),
        "checkpoint": checkpoint.provenance,
        "data": task.provenance,
        "generation_config_not_applied": checkpoint.generation,
        "device_count": jax.device_count(),
        "compilation_cache": settings["compilation_cache"],
    }
    with RunDirectory.open(path, config, _flagfile(settings, path), provenance) as run:
        state = arms.prepare(checkpoint.state)
        if settings["gate"] == "on" and len(run.done_keys()) < len(items):
            with console.status("gate: aligned arms, bit for bit"):
                gate = run_gate(aligned, aligned, state, items, spec, settings["gate_problems"])
            run.record_provenance({"gate": gate})
        _run_divergence(run, arms, state, items, spec, checkpoint.tokenizer, task, console)
        run.record_provenance({"seconds": round(time.monotonic() - begin, 1)})
    return path


def _run_config(
    settings: dict[str, Any], checkpoint: Any, task: Any, spec: Any, arms: Any, num_problems: int
) -> dict[str, Any]:
    """All that decides the numbers: contents and versions, not where files lie."""
    import jax

    from jaxkv.decode import COMPILER_OPTIONS

    device, here = jax.devices()[0], environment()
    origin = checkpoint.provenance
    name = settings["model"] or pathlib.PurePath(settings["checkpoint"]).name
    seed = {"source": origin["source"]} if origin["kind"] == "random" else {}  # such weights are their seed
    data = {
        part: {k: v for k, v in found.items() if k not in ("source", "fingerprint")}
        for part in ("problems", "shots")
        if (found := task.provenance[part])
    }
    return {
        "experiments": settings["experiments"],
        "model": checkpoint.config.to_json() | {"name": name},
        "precision": arms.precision.to_json(),
        "held": {part: arms.held.to_json()[part] for part in ("param", "operand")},
        "checkpoint": {k: v for k, v in origin.items() if k != "source"} | seed,
        "task": settings["task"],
        "data": data,
        "prompt": task.provenance["prompt"],
        "num_problems": num_problems,
        "sampling": arms.sampler.to_json() | {"seed": spec.seed},
        "decoding": dataclasses.asdict(spec) | {"stop_ids": list(arms.stop_ids), "tile": arms.tile},
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "runtime": " ".join(device.client.platform_version.split()),
        },
        "versions": {package: here["packages"][package] for package in ("jax", "jaxlib")},
        "variables": {k: v for k, v in here["variables"].items() if k != "JAX_PLATFORMS"},
        "compiler_options": COMPILER_OPTIONS,
    }


def _finish(path: pathlib.Path) -> None:
    from rich.console import Console

    from jaxkv.analysis.report import render_table, write_report

    console = Console(file=sys.stdout)
    console.print(path.name, style="bold", highlight=False)
    console.print(render_table(write_report(path)))
    console.print(f"report: {path / 'report.md'}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(launch)
