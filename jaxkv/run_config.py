"""What run.json says of a condition: all that decides its numbers, and what else is known of a process."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxkv.condition import is_of, name_model
from jaxkv.provenance import describe_device, environment, git_revision

if TYPE_CHECKING:
    from jaxkv.experiments.driver import Condition, Runner


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
