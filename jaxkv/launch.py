"""The command: flags in, a run directory with records, a table and a report out.

    python -m jaxkv.launch --model=gemma2-2b --precision=fp16

The same command again does only what is missing; `--flagfile=RUN/run.flags` replays a run.
"""

import dataclasses
import pathlib
import sys
import time
from typing import Any

from absl import flags

from jaxkv.cli import run_command
from jaxkv.config import Precision, make_precision
from jaxkv.errors import UserError, nearest, offline_example
from jaxkv.records import RunDirectory, environment, fingerprint, git_revision

EXPERIMENTS = ("divergence",)
PROMPTS = ("auto", "chat", "few_shot", "zero_shot")
FLAGS = flags.FLAGS
# Flags that decide no number: they stay out of the run's default name.
_INCIDENTAL = ("out", "compilation_cache")

_DEFINED = [
    flags.DEFINE_string("model", None, "Preset, e.g. gemma2-2b; weights from the hub unless --checkpoint is set."),
    flags.DEFINE_string("checkpoint", None, "Directory, .gguf file, Orbax checkpoint, hub id, or random:SEED."),
    flags.DEFINE_string("revision", None, "Branch, tag or commit of a hub id; the commit is recorded."),
    flags.DEFINE_string("precision", "fp16", "fp16, bf16, fp32 (true fp32, not TF32) or fp64 (a reference)."),
    flags.DEFINE_string("residual", None, "Dtype of the residual stream, if not the precision's."),
    flags.DEFINE_string("accumulation", None, "Dtype products are returned in; the kernel may add in a wider one."),
    flags.DEFINE_string("cache", None, "Dtype of keys and values in both arms, if not the precision's."),
    flags.DEFINE_list("experiments", ["divergence"], f"Which experiments: {', '.join(EXPERIMENTS)}."),
    flags.DEFINE_string("task", "gsm8k", "Task to generate on."),
    flags.DEFINE_string("data", None, "JSONL or Parquet file with the problems; the hub's test split if not set."),
    flags.DEFINE_string("fewshot_data", None, "File with worked examples; the hub's train split if not set."),
    flags.DEFINE_string("prompt", "auto", "auto (chat if the tokenizer has a template), chat, few_shot or zero_shot."),
    flags.DEFINE_integer("shots", None, "Worked examples in the prompt: 8 for few_shot, 0 for chat if not set."),
    flags.DEFINE_integer("shots_seed", None, "Chooses the worked examples; the first ones if not set."),
    flags.DEFINE_integer("num_problems", 100, "How many problems, from the first."),
    flags.DEFINE_integer("max_new_tokens", 256, "Most tokens to generate for a problem."),
    flags.DEFINE_string("sampler", "greedy", "greedy, temperature, top_k or top_p."),
    flags.DEFINE_float("temperature", None, "0.7 if not set, 1.0 with top_p."),
    flags.DEFINE_integer("top_k", None, "50 if not set."),
    flags.DEFINE_float("top_p", None, "0.9 if not set."),
    flags.DEFINE_integer("seed", 0, "Seed of the sampling noise, which both arms share."),
    flags.DEFINE_integer("batch_size", 1, "Problems decoded together."),
    flags.DEFINE_string("padding", "equal", "equal: batches of one prompt length; left: pad on the left."),
    flags.DEFINE_integer("bucket", 64, "Prompts are padded to a multiple of this many rows; fewer shapes to compile."),
    flags.DEFINE_string("uncached_length", "padded", "Rows of an uncached step: padded (all slots) or bucket:M."),
    flags.DEFINE_integer("control_problems", 8, "The controls run on this many problems."),
    flags.DEFINE_string("out", None, "Run directory; runs/MODEL-PRECISION-SAMPLER-HASH if not set."),
    flags.DEFINE_string("compilation_cache", "~/.cache/jaxkv/xla", "Where to keep compiled programs, or none."),
]  # fmt: skip


def _settings() -> dict[str, Any]:
    return {holder.name: holder.default if holder.value == "" else holder.value for holder in _DEFINED}


def _flagfile(out: pathlib.Path) -> str:
    """A flagfile that replays this run into the same directory."""
    values = _settings() | {"out": str(out.resolve())}
    for name in ("checkpoint", "data", "fewshot_data"):
        if values[name] and pathlib.Path(values[name]).expanduser().exists():
            values[name] = str(pathlib.Path(values[name]).expanduser().resolve())  # replays from any directory
    lines = [f"--{n}={','.join(v) if isinstance(v, list) else v}" for n, v in values.items() if v is not None]
    return "\n".join(lines) + "\n"


def _choose(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UserError(f"--{name}={value} is not known{nearest(value, list(known))}; known: {', '.join(known)}")
    return value


def _precision() -> Precision:
    parts = {part: FLAGS[part].value for part in ("residual", "accumulation", "cache")}
    return make_precision(FLAGS.precision, **parts)


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
    for name in ("num_problems", "max_new_tokens", "batch_size", "bucket"):
        if settings[name] < 1:
            raise UserError(f"--{name}={settings[name]} must be at least 1")
    if settings["control_problems"] < 0:
        raise UserError(f"--control_problems={settings['control_problems']} must not be negative")
    if not -(2**31) <= settings["seed"] < 2**31:
        raise UserError(f"--seed={settings['seed']} must fit 32 bits; choose another")
    if settings["model"] is None and settings["checkpoint"] is None:
        raise UserError(f"--model is missing; for example --model=gemma2-2b, or offline {offline_example()}")


def _set_up_jax(precision: Precision, cache: str) -> None:
    import jax

    jax.config.update("jax_enable_x64", "float64" in precision.to_json().values())
    if cache != "none":
        # Also pins the kernels that autotuning chose: a resumed run finds the executables it was begun with.
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _prompt_spec(settings: dict[str, Any], has_template: bool) -> Any:
    from jaxkv.tasks.gsm8k import PromptSpec

    style: Any = settings["prompt"] if settings["prompt"] != "auto" else "chat" if has_template else "few_shot"
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
    precision = _precision()
    from rich.console import Console

    from jaxkv.sampling import make_sampler

    console = Console(stderr=True)
    sampler = make_sampler(settings["sampler"], settings["temperature"], settings["top_k"], settings["top_p"])
    from jaxkv.models.families import get_preset

    preset = get_preset(settings["model"]) if settings["model"] else None  # before anything slow: a typo ends here
    _set_up_jax(precision, settings["compilation_cache"])
    import jax

    from jaxkv.decode import Arms, make_layout, uncached_lengths
    from jaxkv.experiments.divergence import DivergenceSpec
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
        seed=settings["seed"],
        batch_size=settings["batch_size"],
        padding=settings["padding"],
        bucket=settings["bucket"],
        uncached_length=settings["uncached_length"],
        control_problems=settings["control_problems"],
    )
    longest = max(items, key=lambda item: len(item.prompt))
    uncached_lengths(
        spec.uncached_length, make_layout([list(longest.prompt)], spec.new_tokens, spec.bucket, checkpoint.config)
    )
    arms = Arms(checkpoint.config, precision, sampler, checkpoint.tokenizer.eos_ids)
    config = _run_config(settings, checkpoint, task, spec, arms, len(items))
    provenance = environment() | {
        "git": git_revision(),
        "checkpoint": checkpoint.provenance,
        "data": task.provenance,
        "generation_config_not_applied": checkpoint.generation,
        "device_count": jax.device_count(),
        "compilation_cache": settings["compilation_cache"],
    }
    with RunDirectory.open(path, config, _flagfile(path), provenance) as run:
        state = arms.prepare(checkpoint.state)
        _run_divergence(run, arms, state, items, spec, checkpoint.tokenizer, task, console)
        run.record_provenance({"seconds": round(time.monotonic() - begin, 1)})
    _finish(path)


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
        "decoding": dataclasses.asdict(spec) | {"stop_ids": list(arms.stop_ids)},
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
    console.print(render_table(write_report(path)))
    console.print(f"report: {path / 'report.md'}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(launch)
