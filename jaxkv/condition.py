"""One condition: what its options ask for, whether lengths fit, what it is called, and what run.json says of it."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxkv.config import ModelConfig, Precision, make_precision
from jaxkv.errors import UserError
from jaxkv.experiments.experiment import EXPERIMENTS, Experiment
from jaxkv.options import DataOptions, Options, PrecisionOptions, name_values
from jaxkv.provenance import describe_device, environment, git_revision
from jaxkv.records import fingerprint
from jaxkv.sampling import Sampler, make_sampler

if TYPE_CHECKING:
    from jaxkv.experiments.driver import Condition, Runner
    from jaxkv.tasks.task import PromptSpec, Task


def read_precision(asked: PrecisionOptions) -> Precision:
    """The policy asked for; fp32, in which weights are loaded, where an experiment has policies of its own."""
    parts = dataclasses.asdict(asked)
    return make_precision(parts.pop("name") or "fp32", **parts)


def read_sampler(options: Options) -> Sampler:
    """How tokens are chosen. Raises UserError on an option that the sampler does not use."""
    asked = options.decoding
    return make_sampler(asked.sampler, asked.temperature, asked.top_k, asked.top_p)


def asked(options: Options) -> list[Experiment]:
    """The experiments that are run."""
    return [EXPERIMENTS[name] for name in options.run.experiments]


def is_of(options: Options, *what: str) -> bool:
    """Whether what is run is of a text, programs or a device rather than of problems; it is then the only one."""
    return any(one.of in what for one in asked(options))


def needs_torch(options: Options) -> bool:
    """Whether PyTorch runs too."""
    return options.run.framework == "torch" or any(one.torch == "beside" for one in asked(options))


def name_model(options: Options) -> str:
    """The preset, or the file name of the checkpoint."""
    return options.model.name or pathlib.PurePath(options.model.checkpoint or "model").name


def name_condition(options: Options) -> str:
    """What tells a condition from the others of a grid, e.g. ``gemma2-2b-fp16-greedy``."""
    precision = read_precision(options.precision).name if options.precision.name else "-".join(options.run.experiments)
    torch = [options.run.framework, options.run.attention or ""] if options.run.framework == "torch" else []
    return "-".join([name_model(options), precision, options.decoding.sampler, *torch])


def run_path(options: Options) -> pathlib.Path:
    """The run directory: --out, or a name of what is run with a hash of all that decides numbers."""
    if options.output.out:
        return pathlib.Path(options.output.out).expanduser()
    if is_of(options, "device"):
        return pathlib.Path("runs", *options.run.experiments)
    if is_of(options, "programs"):
        target = options.run.target.replace(":", "-")
        return pathlib.Path("runs") / "-".join(
            [*options.run.experiments, name_model(options), read_precision(options.precision).name, target,
             fingerprint(name_values(options))[:8]]
        )  # fmt: skip
    return pathlib.Path("runs") / f"{name_condition(options)}-{fingerprint(name_values(options))[:8]}"


def check_lengths(options: Options, config: ModelConfig) -> None:
    """Whether lengths that flags ask for fit a model, prompts left aside. Raises UserError."""
    most, model = config.context_length, config.name
    decoding, context = options.decoding, options.data.context
    new = decoding.max_new_tokens
    if is_of(options, "text") and context + new > most:
        raise UserError(
            f"--context={context} and --max_new_tokens={new} exceed the context of {most} of {model}; use smaller ones"
        )
    kind, _, size = decoding.uncached_length.partition(":")
    lengths = {
        "max_new_tokens": new,
        "bucket": decoding.bucket,
        "uncached_length": int(size) if kind == "bucket" else 0,
    }
    for flag, length in lengths.items():
        if length > most:
            told = f"--{flag}={getattr(decoding, flag)} exceeds the context of {most} of {model}"
            raise UserError(f"{told}; use a smaller one")


def load_problems(data: DataOptions, spec: "PromptSpec") -> "Task":
    """The task that is asked for, with the problems that are asked for among its own. Raises UserError."""
    from jaxkv.tasks import load_task

    task = load_task(
        data.task, data=data.data, fewshot_data=data.fewshot_data, subset=data.subset, spec=spec,
        allow_code_execution=data.allow_code_execution,
    )  # fmt: skip
    chosen, asked, count = data.problems, data.num_problems, len(task.problems)
    if chosen and max(chosen) >= count:
        raise UserError(f"--problems has {max(chosen)} but the data has {count}; ask for 0 to {count - 1}")
    if not chosen and asked > count:
        raise UserError(f"--num_problems={asked} but the data has {count}; ask for at most {count}")
    return task


def prompt_spec(data: DataOptions, has_template: bool) -> "PromptSpec":
    """How problems are put to a model, with what depends on its tokenizer filled in. Raises UserError."""
    from jaxkv.tasks import usual_shots, usual_style
    from jaxkv.tasks.task import PromptSpec

    style: Any = data.prompt if data.prompt != "auto" else usual_style(data.task, has_template)
    shots = usual_shots(data.task, style) if data.shots is None else data.shots
    return PromptSpec(style, shots, data.shots_seed)


def make_provenance(condition: "Condition") -> dict[str, Any]:
    """What is known of this process and decides no number, or is in the config by its hash."""
    import jax

    return environment() | {
        "git": git_revision(),
        "checkpoint": condition.checkpoint.provenance.to_json(),
        "data": condition.task.provenance,
        "generation_config_not_applied": condition.checkpoint.generation,
        "device_count": jax.device_count(),
        "compilation_cache": condition.options.output.compilation_cache,
    }


def make_run_config(condition: "Condition", runners: "Sequence[Runner[Any, Any, Any]]") -> dict[str, Any]:
    """All that decides the numbers: contents and versions, not where files lie."""
    here, options, task = environment(), condition.options, condition.task
    tokenizer, spec = condition.checkpoint.tokenizer, dataclasses.asdict(condition.spec)
    del spec["truth_problems"]  # decides no number of the arms
    data = {
        part: {k: v for k, v in found.items() if k not in ("source", "fingerprint")}
        for part in ("problems", "shots")
        if (found := task.provenance[part])
    }
    config = {
        "experiments": options.run.experiments,
        "framework": options.run.framework,
        "model": condition.checkpoint.config.to_json() | {"name": name_model(options)},
        "checkpoint": condition.checkpoint.provenance.identity(),
        "task": "text" if is_of(options, "text") else options.data.task,
        "data": data,
        "prompt": task.provenance["prompt"],
        "num_problems": len(condition.items),
        "sampling": condition.sampler.to_json() | {"seed": condition.spec.seed},
        "decoding": spec | {"stop_ids": list(tokenizer.eos_ids)},
        "versions": {package: here["packages"][package] for package in ("jax", "jaxlib")},
        "variables": {k: v for k, v in here["variables"].items() if k != "JAX_PLATFORMS"},
    }
    if options.precision.name:
        config["precision"] = condition.precision.to_json()
    if options.data.problems:
        config["problems"] = options.data.problems
    if "scoring" in task.provenance:
        config["scoring"] = task.provenance["scoring"]
    for runner in runners:
        config |= runner.describe()
    add = _add_torch if options.run.framework == "torch" else _add_jax
    add(condition, config)
    return config


def _add_torch(condition: "Condition", config: dict[str, Any]) -> None:
    from jaxkv.torch_model import describe_torch
    from jaxkv.torch_path import find_chooser

    kind, chooser = describe_torch()["device"], find_chooser(condition.sampler)
    config["device"] = {"platform": "cpu" if kind == "cpu" else "gpu", "kind": kind}
    if chooser.platform != "cpu":
        config["tokens_chosen_on"] = chooser.device_kind


def _add_jax(condition: "Condition", config: dict[str, Any]) -> None:
    from jaxkv.decode import COMPILER_OPTIONS
    from jaxkv.models.attention import OTHERS

    options = condition.options
    if options.precision.name:
        config["held"] = condition.arms.describe_held()
    # The tile is also that of the gate, of attribution and of mitigations, whatever the regime.
    config["decoding"] |= {"regime": options.controls.regime, "tile": condition.tile}
    config |= {"device": describe_device(), "compiler_options": COMPILER_OPTIONS}
    if options.run.attention in OTHERS:
        config["attention"] = options.run.attention
