"""Tasks by name: problems, prompts and scores."""

import importlib
from typing import Any

from jaxkv.errors import UserError, nearest
from jaxkv.tasks.task import PromptSpec, Request, Task

FAMILY = ":NAME"  # ends the key of tasks that are many; one of them is asked for by a name in its place
LM_EVAL = "lm_eval:"
# Task -> the module here whose `load` makes it of a Request. That of a family has `find_config` too, which looks a name
# up without its data.
TASKS = {
    "gsm8k": "gsm8k",
    "arith": "arith",
    "ifeval": "ifeval",
    "next_string": "continuation",
    "math500": "math_tasks",
    "aime24": "math_tasks",
    "humaneval": "humaneval",
    "lm_eval:NAME": "lm_eval_tasks",
}


def find_module(name: str) -> Any:
    """The module of a task. Raises UserError if there is no such task, as far as no data is needed to tell."""
    key = name if name in TASKS else name.partition(":")[0] + FAMILY
    if key not in TASKS:
        raise UserError(f"unknown task '{name}'{nearest(name, list(TASKS))}; known: {', '.join(TASKS)}")
    module = importlib.import_module(f"jaxkv.tasks.{TASKS[key]}")
    if key.endswith(FAMILY):
        module.find_config(name)
    return module


def load_task(
    name: str,
    *,
    data: str | None = None,
    fewshot_data: str | None = None,
    spec: PromptSpec | None = None,
    subset: str = "all",
    allow_code_execution: bool = False,
) -> Task:
    """Loads one of TASKS, with a name for NAME; the arguments are those of `Request`.

    Raises:
      UserError: unknown task, a subset of another one, data for arith, humaneval without leave to run code, a missing
        package, or what the task's own loader raises.
    """
    module = find_module(name)
    if subset != "all" and name != "ifeval":
        raise UserError(f"the subset '{subset}' is of ifeval; leave --subset at all for {name}")
    return module.load(Request(name, data, fewshot_data, spec, subset, allow_code_execution))


def usual_style(name: str, has_chat_template: bool) -> str:
    """The style that a task is usually asked in, of a model with or without a chat template."""
    if name.startswith(LM_EVAL):
        return "few_shot"
    if name == "next_string":
        return "zero_shot"
    return "chat" if has_chat_template else "few_shot" if name == "gsm8k" else "zero_shot"


def usual_shots(name: str, style: str) -> int | None:
    """The number of shots that a task usually has in a style; None where the task itself says."""
    if name.startswith(LM_EVAL) and style != "zero_shot":
        return None
    return 8 if style == "few_shot" else 0
