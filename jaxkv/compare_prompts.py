"""The verb `compare`: prompts in, for each a sentence, the place where the texts part, and what explains it."""

import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from absl import flags

from jaxkv.cli import define, parse_flags, run_command
from jaxkv.comparison import Comparison, read_condition
from jaxkv.errors import UserError
from jaxkv.files import decode_json, read_text
from jaxkv.usage import COMPARE_OPTIONS, show


class _Line(msgspec.Struct):
    prompt: str


def read_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """The prompts of a command line: as they stand, `-` for stdin, and of --file. Raises UserError if there is none."""
    prompts = [_read_stdin() if text == "-" else text for text in given]
    if file is not None and pathlib.PurePath(file).suffix == ".jsonl":
        lines = [line for line in read_text(file).splitlines() if line.strip()]
        prompts += [decode_json(line, _Line, f"{file} line {n}").prompt for n, line in enumerate(lines, start=1)]
    elif file is not None:
        prompts.append(read_text(file).rstrip("\n"))
    if not all(prompt.strip() for prompt in prompts or [""]):
        raise UserError('a prompt is missing or empty; write jaxkv compare "PROMPT", --file=FILE, or - for stdin')
    if any("\ud800" <= letter <= "\udfff" for prompt in prompts for letter in prompt):
        raise UserError("a prompt is not UTF-8; save it as UTF-8")
    return prompts


def _read_stdin() -> str:
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError:
        raise UserError("the prompt on stdin is not UTF-8; save it as UTF-8") from None


def compare_command(arguments: Sequence[str]) -> int:
    """Runs the verb. Returns the exit code. Raises UserError on anything the user can mend."""
    found = flags.FlagValues()
    for option in COMPARE_OPTIONS:
        define(option, found)
    prompts = read_prompts(parse_flags(["jaxkv compare", *arguments], found)[1:], found["file"].value)
    given: dict[str, Any] = {option.flag: found[option.flag].value for option in COMPARE_OPTIONS}
    condition = None if given["fail_if"] is None else read_condition(given["fail_if"])
    told = []
    for one in _compare(prompts, given):
        told.append(one)
        show(one.to_json() if given["json"] else "\n".join([*([""] if told[1:] else []), *one.lines(given["verbose"])]))
    value = None if condition is None else condition.failed(told)
    if condition is not None and value is not None:
        print(f"--fail-if: {condition.measure} is {value:.3g}, asked was {condition.text}", file=sys.stderr)
    return 2 if any(one.status in ("fault", "invalid") for one in told) else int(value is not None)


def _compare(prompts: Sequence[str], given: dict[str, Any]) -> Iterator[Comparison]:
    """Comparisons as they are made; each phase is named on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:

        def tell(phase: str) -> None:
            status.update(phase)
            if not console.is_terminal:
                console.print(phase, highlight=False, soft_wrap=True)

        tell(f"loading {given['checkpoint'] or given['model'] or 'a model that ships with jaxkv'}")
        from jaxkv import api
        from jaxkv.sampling import make_sampler
        from jaxkv.side_by_side import read_beside

        make_sampler(given["sampler"], given["temperature"], given["top_k"], given["top_p"])
        if given["with"] is not None:
            read_beside(given["with"])
        loaded = {one.flag: given[one.flag] for one in COMPARE_OPTIONS if one.group in ("model", "precision")}
        model = api.load(**loaded, compilation_cache=given["compilation_cache"], tell=tell)
        asked: Any = {name: given[name] for name in api.Asked.__annotations__ if name in given}
        asked |= {"chat": False if given["raw"] else None, "tell": tell}
        for prompt in prompts:
            yield api.compare(model, prompt, given["with"], **asked)


def start(arguments: list[str]) -> None:
    """The verb `compare`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_command(lambda _: sys.exit(compare_command(arguments)), ["jaxkv compare"])
