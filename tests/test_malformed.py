"""Malformed inputs of every kind, made by a seeded generator: each ends in one line, and in nothing else."""

import pathlib
import time
from unittest import mock

import pytest
from absl import flags
from cases import daily
from checkpoint_files import FP32, make_random
from commands import parse, refuse, run_process
from malformed import Generator
from sample_records import make_sample
from test_checkpoints_gguf import write_gguf

from jaxkv import launch
from jaxkv.checkpoints import load, orbax
from jaxkv.checkpoints.export import export
from jaxkv.errors import UserError
from jaxkv.experiments.changes import make_changes
from jaxkv.models.families import get_preset
from jaxkv.overview.page import report_run
from jaxkv.records import RunDirectory
from jaxkv.tasks.gsm8k import load_problems

SECONDS = 10  # that one of them may take on a machine with other work
FLAGS = [("config", "--checkpoint"), ("data", "--data"), ("flagfiles", "--flagfile")]
CONFIG = {"experiments": ["divergence"], "model": {"name": "tiny"}, "precision": {"name": "fp16"}}


def read_flagfile(path):
    """What the command does before it runs a condition."""
    with mock.patch.object(launch, "run_study"), mock.patch.object(launch, "run_sweep", return_value=0):
        try:
            parse(f"--flagfile={path}")
        except flags.Error as error:  # jaxkv.cli prints it in one line
            raise UserError(f"{error}; see --help") from error
        launch.launch(["launch"])


READERS = dict.fromkeys(("config", "safetensors", "gguf", "orbax"), lambda path: load(path, precision=FP32)) | {
    "data": load_problems,
    "runs": lambda path: report_run(pathlib.Path(path)),
    "flagfiles": read_flagfile,
    "cache_quant": lambda text: make_changes([], [text], get_preset("test-gemma2"), FP32),
    "cache_error": lambda text: make_changes([text], [], get_preset("test-gemma2"), FP32),
}


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """The generator, with valid inputs that every reader takes."""
    folder = tmp_path_factory.mktemp("malformed")
    bases = {name: folder / name for name in ("safetensors", "orbax", "run")} | {"gguf": folder / "base.gguf"}
    checkpoint = make_random(precision=FP32)
    export(checkpoint, str(bases["safetensors"]), dtype="fp32")
    orbax.save(checkpoint, bases["orbax"])
    write_gguf(bases["gguf"])
    with RunDirectory.open(bases["run"], CONFIG, "--shots=0\n", {"versions": {}}) as run:
        run.append(make_sample(3))
    for kind, reader in {"safetensors": "config", "orbax": "orbax", "gguf": "gguf", "run": "runs"}.items():
        READERS[reader](str(bases[kind]))
    for report in ("report.md", "report.html", "summary.json"):
        (bases["run"] / report).unlink(missing_ok=True)
    return Generator(folder, bases)


@pytest.mark.parametrize("kind", READERS)
def test_one_line(generator, kind):
    wrong = []
    for case in generator.cases(kind):
        case.make()
        start = time.monotonic()
        try:
            READERS[kind](case.path)
            wrong.append(f"{case.name}: taken")
        except UserError as error:
            message = str(error)
            if not message.strip() or "\n" in message or len(message) > 2000:
                wrong.append(f"{case.name}: {message!r}")
        except Exception as error:
            wrong.append(f"{case.name}: {type(error).__name__}: {str(error)[:200]}")
        if (seconds := time.monotonic() - start) > SECONDS:
            wrong.append(f"{case.name}: {seconds:.0f} s")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("kind", "flag"), FLAGS)
def test_the_command_refuses(generator, tmp_path, monkeypatch, kind, flag):
    """Before it makes anything."""
    case = generator.cases(kind)[0]
    case.make()
    monkeypatch.chdir(tmp_path)
    small = ["--model=test-llama2", "--checkpoint=random:0"] if kind == "data" else []
    assert refuse(f"{flag}={case.path}", "--precision=fp16", *small)
    assert not list(tmp_path.iterdir())


def test_there_are_enough(generator):
    counts = {kind: len(generator.cases(kind)) for kind in READERS}
    assert sum(counts.values()) >= 200
    assert min(counts.values()) >= 15


@pytest.mark.parametrize(("kind", "flag"), daily(FLAGS[2:], FLAGS))
def test_the_command(generator, tmp_path, kind, flag):
    """One of a kind through the command: exit code 2 and one line."""
    case = generator.cases(kind)[0]
    case.make()
    small = ["--model=test-llama2", "--checkpoint=random:0"] if kind == "data" else []
    done = run_process(f"{flag}={case.path}", "--precision=fp16", *small, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())
