"""The command: flags in, a run directory with records, a table and a report out.

Lists make a sweep with one run directory for each condition, and an overview of them; so does a list of flagfiles, for
conditions that differ in more. The same command again does only what is missing.
"""

from jaxkv import stopping

if __name__ == "__main__":
    from jaxkv.usage import help_and_exit

    stopping.watch()  # before the imports below, which take seconds
    help_and_exit("run")

import copy
import itertools
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from absl import flags

from jaxkv.checkpoints.shipped import DEFAULT, SHIPPED
from jaxkv.checks import check_choices, check_condition, check_data, check_options
from jaxkv.cli import define, parse_flags, read_flagfile, run_command
from jaxkv.condition import is_of, name_condition, needs_torch
from jaxkv.errors import UserError
from jaxkv.experiments.experiment import EXPERIMENTS
from jaxkv.models.attention import OTHERS
from jaxkv.options import OPTIONS, Options, make_options
from jaxkv.study import run_study
from jaxkv.sweep import run_sweep

NEW_TOKENS = 256
# Of the command without flags: within a minute on two cores it shows a text that parts, problem 15 in bf16.
BARE = {"model": (DEFAULT,), "precision": ("bf16", "fp16", "fp32"), "num_problems": 16}
NEW_TOKENS_OF = {
    "arith": 128, "ifeval": 100, "next_string": 8, "math500": 1024, "aime24": 1024, "humaneval": 512,
}  # fmt: skip
FLAGS = flags.FLAGS


for _option in OPTIONS:
    define(_option)


def read_options(found: flags.FlagValues = FLAGS) -> list[Options]:
    """The conditions that flags ask for: one for each framework, model, precision and sampler that they list.

    Raises UserError on an empty or unknown value, and on --problems and --num_problems that differ.
    """
    values: list[list[Any]] = []
    bare = not any(found[option.flag].present for option in OPTIONS if not option.incidental)
    for option in OPTIONS:
        value: Any = found[option.flag].value
        if found[option.flag].present and value == "":
            raise UserError(f"--{option.flag}= is empty; give a value or drop the flag")
        if bare and option.flag in BARE:
            value = BARE[option.flag]
        if option.axis is not None:
            values.append(value or [None])
        else:
            values.append([tuple(value) if option.several else value])
    grid = [make_options(chosen) for chosen in itertools.product(*values)]
    check_choices(grid)
    frameworks = list(dict.fromkeys(one.run.framework for one in grid))
    grid.sort(key=lambda one: frameworks.index(one.run.framework))  # which stays outermost
    return _fill_usual(grid)


def _fill_usual(grid: Sequence[Options]) -> list[Options]:
    """Conditions with model and task, and what a task usually has, filled in alike for all of them."""
    first = grid[0]
    if first.model.name is None and first.model.checkpoint is None:
        grid = [replace(one, model=replace(one.model, name="tiny-gemma2")) for one in grid]
    ours = first.model.checkpoint is None and all(one.model.name in SHIPPED for one in grid)
    task = first.data.task or ("arith" if ours else "gsm8k")
    usual = NEW_TOKENS if is_of(first, "text") else NEW_TOKENS_OF.get(task, NEW_TOKENS)
    numbers, count = first.data.problems, first.data.num_problems
    if numbers and count not in (None, len(numbers)):
        raise UserError(f"--num_problems={count} and --problems of {len(numbers)} say different things; drop one")
    data = replace(first.data, task=task, num_problems=len(numbers) or count or 100)
    tokens = first.decoding.max_new_tokens or usual
    return [replace(one, data=data, decoding=replace(one.decoding, max_new_tokens=tokens)) for one in grid]


def read_flagfiles(files: Sequence[str]) -> list[list[Options]]:
    """The conditions of each flagfile with the command's own flags after it, and a directory of its own in --out.

    Raises UserError on a file that cannot be read, holds what is no flag or --conditions, or is called as another is.
    """
    names = [pathlib.PurePath(file).stem for file in files]
    if len(set(names)) != len(names):
        raise UserError(f"--conditions={','.join(files)}: two are called alike, and so would their runs; rename one")
    shared = [FLAGS[option.flag] for option in OPTIONS if option.flag != "conditions"]
    given = [line for flag in shared if flag.present for line in flag.serialize().split("\n")]
    read = []
    for file, name in zip(files, names, strict=True):
        found = copy.deepcopy(FLAGS)
        found.unparse_flags()
        try:
            odd = parse_flags(["launch", *read_flagfile(file), *given], found)[1:]
        except UserError as error:
            raise UserError(f"--conditions={file}: {error}") from error
        if odd:
            raise UserError(f"--conditions={file}: '{odd[0]}' is no flag; write one flag a line as --name=value")
        if found.conditions:
            raise UserError(f"--conditions={file}: names --conditions itself; list all flagfiles in the command")
        read.append([_put(one, name) for one in read_options(found)])
    return read


def _put(one: Options, name: str) -> Options:
    """A condition with a directory `name` in its --out, if it has one."""
    out = one.output.out
    return replace(one, output=replace(one.output, out=str(pathlib.Path(out) / name))) if out else one


def spread(grid: Sequence[Options]) -> list[Options]:
    """Conditions as they are run: with what their framework decides, and each with its directory if several.

    Mitigations have precisions of their own: they are a condition for each model and sampler. Raises UserError on
    options that say different things.
    """
    check_options(grid)
    asked = grid[0].run.experiments
    if is_of(grid[0], "device"):
        return [_fill(grid[0])]  # one device, whatever the models
    own = tuple(name for name in asked if EXPERIMENTS[name].policies)
    rest = tuple(name for name in asked if not EXPERIMENTS[name].policies)
    found = [replace(one, run=replace(one.run, experiments=rest)) for one in grid if rest]
    found += dict.fromkeys(
        replace(one, run=replace(one.run, experiments=own), precision=replace(one.precision, name=None))
        for one in grid
        if own
    )
    filled = [_fill(one) for one in found]
    return [_put(one, name_condition(one)) for one in filled] if len(filled) > 1 else filled


def _fill(one: Options) -> Options:
    """A condition with what its framework decides filled in."""
    torch = one.run.framework == "torch"
    attention: Any = one.run.attention
    attention = attention or "eager" if needs_torch(one) else attention if attention in OTHERS else None
    uncached = one.controls.uncached or ("stepwise" if torch else "draft")
    length = one.decoding.uncached_length or ("growing" if torch and uncached == "stepwise" else "padded")
    return replace(
        one,
        run=replace(one.run, attention=attention),
        controls=replace(one.controls, uncached=uncached),
        decoding=replace(one.decoding, uncached_length=length),
    )


def launch(argv: list[str]) -> None:
    """Runs the command. Raises UserError on anything the user can mend, SystemExit if conditions of a sweep failed."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument '{argv[1]}'; options are written --name=value")
    files = FLAGS.conditions
    conditions = [one for grid in (read_flagfiles(files) if files else [read_options()]) for one in spread(grid)]
    for one in conditions:
        check_condition(one)
    check_data(conditions)
    if len(conditions) == 1:
        run_study(conditions[0])
    elif code := run_sweep(conditions, FLAGS.out):
        raise SystemExit(code)


def start(arguments: list[str]) -> None:
    """The verb `run`."""
    run_command(launch, ["jaxkv run", *arguments])


if __name__ == "__main__":
    start(sys.argv[1:])
