"""The command for tests: in this process or one of its own."""

import copy
import os
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import pytest
from absl import flags
from jax.experimental.compilation_cache import compilation_cache

from jaxkv import launch
from jaxkv.cli import parse_flags
from jaxkv.errors import UserError
from jaxkv.options import OPTIONS

CACHING = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
DATA = pathlib.Path(__file__).parent / "data"
LAUNCH = DATA.parents[1] / "launch"
SMALL = [
    "--model=test-gemma2", "--checkpoint=random:0", f"--data={DATA / 'problems.jsonl'}", "--prompt=zero_shot",
    "--num_problems=5", "--max_new_tokens=6", "--control_problems=1", "--bucket=256", "--precision=fp16",
]  # fmt: skip
FEW = [
    "--num_problems=1", "--max_new_tokens=3", "--gate=off", "--control_problems=0", "--stepwise_problems=0",
    "--truth_problems=0",
]  # fmt: skip


def parse(*arguments):
    """The conditions that the command makes of arguments, after those of an earlier call are forgotten."""
    flags.FLAGS.unparse_flags()
    parse_flags(["launch", *arguments])
    return launch.read_options()


def run_in_process(*arguments):
    """The command; its compilation cache is not left to the tests that come after."""
    parse(*arguments)
    kept = {name: getattr(jax.config, name) for name in CACHING}
    try:
        launch.launch(["launch"])
    finally:
        for name, value in kept.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def refuse(*arguments):
    """The line that a command ends in."""
    with pytest.raises(UserError) as caught:
        run_in_process(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def start_in_process(module, *arguments):
    """An entry module whose flags stand in the place of those of the command. Mistakes are raised."""
    run_command = lambda command, argv=None: command(parse_flags(argv or sys.argv))  # noqa: E731
    without = copy.deepcopy(flags.FLAGS)
    for option in OPTIONS:
        delattr(without, option.flag)
    with (
        mock.patch.dict(vars(flags.FLAGS), vars(without), clear=True),
        mock.patch.object(module, "run_command", run_command),
        mock.patch.object(sys, "argv", sys.argv),
    ):
        module.start([*map(str, arguments)])


def run_process(*arguments, **options):
    command = [sys.executable, "-m", "jaxkv.launch", *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, **options)
