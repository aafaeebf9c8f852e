"""One condition of a study: its model, problems and programs, and all that decides its numbers.

`Settings` is a plain dict of the command's flags with one framework, model, precision and sampler. What takes long to
import comes after what a typo can break.
"""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxkv.config import ModelConfig, Precision, make_precision
from jaxkv.errors import UserError
from jaxkv.provenance import environment, git_revision
from jaxkv.records import fingerprint

Settings = dict[str, Any]

# Decide no number of a model: not in the default name.
INCIDENTAL = ("out", "compilation_cache", "conditions", "doctor_seconds")
TEXT_EXPERIMENT = "perplexity"  # the experiment that reads a text instead of problems
PARTS = ("residual", "accumulation", "cache", "scores")  # flags that override a part of the precision
LOG_SECONDS = 30.0  # between lines about a download in a log
OWN_PRECISIONS = "mitigations"  # the experiment that compares policies; its conditions have no precision


def read_precision(settings: Settings) -> Precision:
    """The policy asked for; fp32, in which weights are loaded, where an experiment has policies of its own.

    Raises:
      UserError: an unknown name.
    """
    parts = {part: settings[part] for part in PARTS}
    return make_precision(settings["precision"] or "fp32", **parts)


def name_condition(settings: Settings) -> str:
    """What tells a condition from the others of a grid, e.g. ``gemma2-2b-fp16-greedy``."""
    model = settings["model"] or pathlib.PurePath(settings["checkpoint"] or "model").name
    precision = read_precision(settings).name if settings["precision"] else OWN_PRECISIONS
    torch = ["torch", settings["attention"]] if settings["framework"] == "torch" else []
    return "-".join([model, precision, settings["sampler"], *torch])


def run_path(settings: Settings) -> pathlib.Path:
    """The run directory: --out, or a name of what is run with a hash of all that decides numbers."""
    if settings["out"]:
        return pathlib.Path(settings["out"]).expanduser()
    if settings["experiments"] == ["doctor"]:
        return pathlib.Path("runs") / "doctor"
    numbers = {name: value for name, value in settings.items() if name not in INCIDENTAL}
    return pathlib.Path("runs") / f"{name_condition(settings)}-{fingerprint(numbers)[:8]}"


@dataclasses.dataclass(frozen=True)
class Study:
    """What the experiments of a condition share. Programs and prepared weights are made when first asked for.

    Attributes:
      settings: flags.
      precision: policy.
      checkpoint: model.
      task: problems with prompts and scores.
      items: the problems as token ids.
      spec: RunSpec.
      sampler: how tokens are chosen.
      tile: rows of a tile in the aligned regime.
      console: for progress.
    """

    settings: Settings
    precision: Precision
    checkpoint: Any
    task: Any
    items: list[Any]
    spec: Any
    sampler: Any
    tile: int
    console: Any

    @property
    def framework(self) -> str:
        """'jax' or 'torch'."""
        return self.settings["framework"]

    @functools.cached_property
    def plain(self) -> Any:
        """Arms of the plain regime."""
        return self._make_arms(None)

    @functools.cached_property
    def aligned(self) -> Any:
        """Arms of the aligned one."""
        return self._make_arms(self.tile)

    def _make_arms(self, tile: int | None) -> Any:
        checkpoint = self.checkpoint
        return _share_arms(checkpoint.config, self.precision, self.sampler, tuple(checkpoint.tokenizer.eos_ids), tile)

    @property
    def arms(self) -> Any:
        """Arms of the regime asked for."""
        return self.aligned if self.settings["regime"] == "aligned" else self.plain

    @functools.cached_property
    def state(self) -> Any:
        """Weights as the arms take them, which the checkpoint then holds too: two copies may not fit."""
        return self.arms.prepare_in_place(self.checkpoint.state)


@functools.lru_cache(maxsize=2)  # the two regimes
def _share_arms(config: Any, precision: Precision, sampler: Any, stop_ids: tuple[int, ...], tile: int | None) -> Any:
    """Arms that conditions of one process share if they would compile the same: a program is compiled once for all."""
    from jaxkv.decode import Arms

    return Arms(config, precision, sampler, stop_ids, tile=tile)


def load_study(settings: Settings, console: Any) -> Study:
    """Loads model and problems, and finds out whether they fit together.

    Raises:
      UserError: anything the user can mend.
    """
    import jax

    from jaxkv.checkpoints import load
    from jaxkv.decode import make_layout
    from jaxkv.experiments.batches import RunSpec
    from jaxkv.models.families import get_preset
    from jaxkv.sampling import make_sampler
    from jaxkv.tasks import load_task

    precision = read_precision(settings)
    sampler = make_sampler(settings["sampler"], settings["temperature"], settings["top_k"], settings["top_p"])
    preset = get_preset(settings["model"]) if settings["model"] else None
    source = settings["checkpoint"] or settings["model"]
    with console.status(f"loading {source}") as status, _weights_device(settings):
        checkpoint = load(
            source, precision=precision, config=preset, revision=settings["revision"], tell=_teller(console, status)
        )
    task: Any
    with console.status("loading the problems"):
        if settings["experiments"] == [TEXT_EXPERIMENT]:
            task, items = _load_windows(settings, checkpoint)
        else:
            task = load_task(
                settings["task"],
                data=settings["data"],
                fewshot_data=settings["fewshot_data"],
                spec=prompt_spec(settings, checkpoint.tokenizer.has_chat_template),
                subset=settings["subset"],
                allow_code_execution=settings["allow_code_execution"],
            )
            chosen = settings["problems"] or range(settings["num_problems"])
            check_count(settings, len(task.problems))
            items = _items(task, checkpoint, chosen)
    spec = RunSpec(
        new_tokens=settings["max_new_tokens"],
        **{field.name: settings[field.name] for field in dataclasses.fields(RunSpec) if field.name in settings},
    )
    check_lengths(settings, checkpoint.config)
    longest = max(items, key=lambda item: len(item.prompt))
    layout = make_layout([list(longest.prompt)], spec.new_tokens, spec.bucket, checkpoint.config)
    _check_uncached(settings, layout)
    tile = settings["tile"] or (8 if jax.default_backend() == "cpu" else 16)
    return Study(settings, precision, checkpoint, task, items, spec, sampler, tile, console)


def _teller(console: Any, status: Any) -> Callable[[str], None]:
    """Shows how far a download is: beside the spinner, or in a log as a line now and then."""
    if console.is_terminal:
        return status.update
    last = -LOG_SECONDS

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            console.print(text, highlight=False, soft_wrap=True)

    return tell


def _weights_device(settings: Settings) -> contextlib.AbstractContextManager:
    """Where JAX holds the weights: beside torch, which has a copy of its own, out of its way."""
    if settings["framework"] != "torch":
        return contextlib.nullcontext()
    import jax

    from jaxkv.torch_path import find_host

    return jax.default_device(find_host())


def _check_uncached(settings: Settings, layout: Any) -> None:
    """Raises UserError on an uncached length that is none of the framework's."""
    if settings["framework"] == "torch":
        from jaxkv.torch_path import segments

        segments(settings["uncached_length"], layout)
    else:
        from jaxkv.generate import uncached_lengths

        uncached_lengths(settings["uncached_length"], layout)


def check_lengths(settings: Settings, config: ModelConfig) -> None:
    """Whether lengths that flags ask for fit a model, prompts left aside. Raises UserError."""
    most, model = config.context_length, config.name
    new = settings["max_new_tokens"]
    if settings["experiments"] == [TEXT_EXPERIMENT] and (context := settings["context"]) + new > most:
        raise UserError(
            f"--context={context} and --max_new_tokens={new} exceed the context of {most} of {model}; use smaller ones"
        )
    kind, _, size = (settings["uncached_length"] or "").partition(":")
    lengths = {"max_new_tokens": new, "bucket": settings["bucket"]}
    lengths |= {"uncached_length": int(size)} if kind == "bucket" else {}
    for flag, length in lengths.items():
        if length > most:
            raise UserError(f"--{flag}={settings[flag]} exceeds the context of {most} of {model}; use a smaller one")


def check_count(settings: Settings, count: int) -> None:
    """Whether the data has the problems that are asked for. Raises UserError."""
    chosen, asked = settings["problems"], settings["num_problems"]
    if chosen and max(chosen) >= count:
        raise UserError(f"--problems has {max(chosen)} but the data has {count}; ask for 0 to {count - 1}")
    if not chosen and asked > count:
        raise UserError(f"--num_problems={asked} but the data has {count}; ask for at most {count}")


def prompt_spec(settings: Settings, has_template: bool) -> Any:
    """How problems are put to a model (PromptSpec), with what depends on its tokenizer filled in. Raises UserError."""
    from jaxkv.tasks import usual_style
    from jaxkv.tasks.task import PromptSpec

    style: Any = settings["prompt"] if settings["prompt"] != "auto" else usual_style(settings["task"], has_template)[0]
    default = 8 if style == "few_shot" else 0
    shots = default if settings["shots"] is None else settings["shots"]
    return PromptSpec(style, shots, settings["shots_seed"])


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in windows, in the place of a task.

    Attributes:
      windows: of jaxkv.tasks.perplexity.
      provenance: as a task's.
    """

    windows: list[Any]
    provenance: dict[str, Any]


def _load_windows(settings: Settings, checkpoint: Any) -> tuple[Text, list[Any]]:
    """The text's windows, and each as an item whose prompt is what it is given."""
    from jaxkv.checkpoints.tokenizer import check_ids
    from jaxkv.experiments.batches import Item
    from jaxkv.experiments.perplexity import tokenize
    from jaxkv.tasks.continuation import load_text
    from jaxkv.tasks.perplexity import plan_windows

    tokenizer = checkpoint.tokenizer
    text, origin = load_text(settings["data"])
    ids, ends = tokenize(tokenizer, text)
    check_ids(ids, checkpoint.config.vocab_size, tokenizer.vocab_size, "the text")
    context, stride = settings["context"], settings["max_new_tokens"]
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    windows = plan_windows(text, ids, ends, context, stride, bos)[: settings["num_problems"]]
    cut = {"context": context, "stride": stride, "bos": bos is not None}
    items = [Item(window.index, window.context, "") for window in windows]
    return Text(windows, {"problems": origin, "shots": None, "prompt": cut}), items


def _items(task: Any, checkpoint: Any, chosen: Sequence[int]) -> list[Any]:
    """The chosen problems as token ids."""
    from jaxkv.checkpoints.tokenizer import check_ids
    from jaxkv.experiments.batches import Item

    tokenizer = checkpoint.tokenizer
    items = []
    for problem in (task.problems[index] for index in chosen):
        prompt = task.prompt(problem)
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt)
        check_ids(ids, checkpoint.config.vocab_size, tokenizer.vocab_size, f"the prompt of problem {problem.index}")
        items.append(Item(problem.index, tuple(ids), problem.answer))
    return items


def describe_device() -> dict[str, str]:
    """JAX's default device."""
    import jax

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "runtime": " ".join(device.client.platform_version.split()),
    }


def make_provenance(study: Study) -> dict[str, Any]:
    """What is known of this process and decides no number, or is in the config by its hash."""
    import jax

    return environment() | {
        "git": git_revision(),
        "checkpoint": study.checkpoint.provenance.to_json(),
        "data": study.task.provenance,
        "generation_config_not_applied": study.checkpoint.generation,
        "device_count": jax.device_count(),
        "compilation_cache": study.settings["compilation_cache"],
    }


def make_run_config(study: Study) -> dict[str, Any]:
    """All that decides the numbers: contents and versions, not where files lie."""
    here, settings, task = environment(), study.settings, study.task
    name = settings["model"] or pathlib.PurePath(settings["checkpoint"]).name
    data = {
        part: {k: v for k, v in found.items() if k not in ("source", "fingerprint")}
        for part in ("problems", "shots")
        if (found := task.provenance[part])
    }
    config = {
        "experiments": settings["experiments"],
        "framework": study.framework,
        "model": study.checkpoint.config.to_json() | {"name": name},
        "checkpoint": study.checkpoint.provenance.identity(),
        "task": "text" if settings["experiments"] == [TEXT_EXPERIMENT] else settings["task"],
        "data": data,
        "prompt": task.provenance["prompt"],
        "num_problems": len(study.items),
        "sampling": study.sampler.to_json() | {"seed": study.spec.seed},
        "decoding": _describe_decoding(study.spec) | {"stop_ids": list(study.checkpoint.tokenizer.eos_ids)},
        "versions": {package: here["packages"][package] for package in ("jax", "jaxlib")},
        "variables": {k: v for k, v in here["variables"].items() if k != "JAX_PLATFORMS"},
    }
    if settings["problems"]:
        config["problems"] = settings["problems"]
    if "scoring" in task.provenance:
        config["scoring"] = task.provenance["scoring"]
    if "patching" in settings["experiments"]:
        config["patching"] = {name: settings[f"patch_{name}"] for name in ("layers", "bins")}
    return config | (_torch_config(study) if study.framework == "torch" else _jax_config(study, config["decoding"]))


def _describe_decoding(spec: Any) -> dict[str, Any]:
    """What was run, less what decides no number of the arms."""
    return {name: value for name, value in dataclasses.asdict(spec).items() if name != "truth_problems"}


def _torch_config(study: Study) -> dict[str, Any]:
    from jaxkv.torch_model import describe_torch
    from jaxkv.torch_path import find_chooser

    kind, chooser = describe_torch()["device"], find_chooser(study.sampler)
    found = _describe_torch(study) | {
        "precision": study.precision.to_json(),
        "device": {"platform": "cpu" if kind == "cpu" else "gpu", "kind": kind},
    }
    return found if chooser.platform == "cpu" else found | {"tokens_chosen_on": chooser.device_kind}


def _describe_torch(study: Study) -> dict[str, Any]:
    from jaxkv.torch_model import describe_torch

    found = {name: value for name, value in describe_torch().items() if name != "device"}
    return {"attention": study.settings["attention"], "torch": found}


def _jax_config(study: Study, decoding: dict[str, Any]) -> dict[str, Any]:
    from jaxkv.decode import COMPILER_OPTIONS

    if study.settings["precision"]:
        policies = {"precision": study.precision.to_json(), "held": _describe_held(study.arms)}
    else:
        policies = {"variants": _describe_variants(study)}
    if "parity" in study.settings["experiments"]:
        policies |= _describe_torch(study)
    return policies | {
        # The tile is also that of the gate, of attribution and of mitigations, whatever the regime.
        "decoding": decoding | {"regime": study.settings["regime"], "tile": study.tile},
        "device": describe_device(),
        "compiler_options": COMPILER_OPTIONS,
    }


def _describe_held(arms: Any) -> dict[str, str]:
    return {part: arms.held.to_json()[part] for part in ("param", "operand")}


def _describe_variants(study: Study) -> dict[str, Any]:
    """The policies that mitigations compare, by name."""
    from jaxkv.decode import Arms
    from jaxkv.experiments.mitigations import make_variants

    return {
        variant.name: {
            "precision": variant.precision.to_json(),
            "held": _describe_held(Arms(study.checkpoint.config, variant.precision)),
            "tile": variant.tile,
        }
        for variant in make_variants(study.tile)
    }
