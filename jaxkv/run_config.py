"""What run.json says of a condition: all that decides its numbers, and what else is known of a process."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxkv.condition import is_of, name_model
from jaxkv.provenance import environment, git_revision

if TYPE_CHECKING:
    from jaxkv.decode import Arms
    from jaxkv.experiments.batches import RunSpec
    from jaxkv.experiments.driver import Condition


def describe_device() -> dict[str, str]:
    """JAX's default device."""
    import jax

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "runtime": " ".join(device.client.platform_version.split()),
    }


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


def make_run_config(condition: "Condition") -> dict[str, Any]:
    """All that decides the numbers: contents and versions, not where files lie."""
    here, options, task = environment(), condition.options, condition.task
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
        "decoding": _describe_decoding(condition.spec) | {"stop_ids": list(condition.checkpoint.tokenizer.eos_ids)},
        "versions": {package: here["packages"][package] for package in ("jax", "jaxlib")},
        "variables": {k: v for k, v in here["variables"].items() if k != "JAX_PLATFORMS"},
    }
    if options.data.problems:
        config["problems"] = options.data.problems
    if "scoring" in task.provenance:
        config["scoring"] = task.provenance["scoring"]
    if "patching" in options.run.experiments:
        config["patching"] = {"layers": options.controls.patch_layers, "bins": options.controls.patch_bins}
    return config | (
        _torch_config(condition) if options.run.framework == "torch" else _jax_config(condition, config["decoding"])
    )


def _describe_decoding(spec: "RunSpec") -> dict[str, Any]:
    """What was run, less what decides no number of the arms."""
    return {name: value for name, value in dataclasses.asdict(spec).items() if name != "truth_problems"}


def _torch_config(condition: "Condition") -> dict[str, Any]:
    from jaxkv.torch_model import describe_torch
    from jaxkv.torch_path import find_chooser

    kind, chooser = describe_torch()["device"], find_chooser(condition.sampler)
    found = _describe_torch(condition) | {
        "precision": condition.precision.to_json(),
        "device": {"platform": "cpu" if kind == "cpu" else "gpu", "kind": kind},
    }
    return found if chooser.platform == "cpu" else found | {"tokens_chosen_on": chooser.device_kind}


def _describe_torch(condition: "Condition") -> dict[str, Any]:
    from jaxkv.torch_model import describe_torch

    found = {name: value for name, value in describe_torch().items() if name != "device"}
    return {"attention": condition.options.run.attention, "torch": found}


def _jax_config(condition: "Condition", decoding: dict[str, Any]) -> dict[str, Any]:
    from jaxkv.decode import COMPILER_OPTIONS

    if condition.options.precision.name:
        policies = {"precision": condition.precision.to_json(), "held": _describe_held(condition.arms)}
    else:
        policies = {"variants": _describe_variants(condition)}
    if "parity" in condition.options.run.experiments:
        policies |= _describe_torch(condition)
    return policies | {
        # The tile is also that of the gate, of attribution and of mitigations, whatever the regime.
        "decoding": decoding | {"regime": condition.options.controls.regime, "tile": condition.tile},
        "device": describe_device(),
        "compiler_options": COMPILER_OPTIONS,
    }


def _describe_held(arms: "Arms") -> dict[str, str]:
    return {part: arms.held.to_json()[part] for part in ("param", "operand")}


def _describe_variants(condition: "Condition") -> dict[str, Any]:
    """The policies that mitigations compare, by name."""
    from jaxkv.decode import Arms
    from jaxkv.experiments.mitigations.run import make_variants

    return {
        variant.name: {
            "precision": variant.precision.to_json(),
            "held": _describe_held(Arms(condition.checkpoint.config, variant.precision)),
            "tile": variant.tile,
        }
        for variant in make_variants(condition.tile)
    }
