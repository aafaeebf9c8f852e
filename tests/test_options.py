"""Options: each declared once, and commands keep the names and fingerprints that their runs had."""

import io
import pathlib

import pytest
from absl import flags
from commands import DATA, LAUNCH, SMALL, parse
from rich.console import Console

from jaxkv import launch
from jaxkv.condition import make_run_config, run_path
from jaxkv.experiments.experiment import EXPERIMENTS
from jaxkv.loading import load_condition
from jaxkv.options import OPTIONS, Options, to_flagfile
from jaxkv.records import fingerprint
from jaxkv.sweep import sweep_path

# Command -> where it runs, or the name of its sweep, whose hash is of all its runs in order. Made at revision d48a306,
# but for the first, which is newer.
NAMES = {
    "": "sweep-059d63ef",
    "--model=tiny-gemma2 --precision=fp16,fp32": "sweep-a9de5849",
    "--model=gemma2-2b --precision=fp16": "gemma2-2b-fp16-greedy-beaf9b07",
    "--experiments=doctor --doctor_seconds=5 --model=tiny-llama2,tiny-mistral": "doctor",
    "--experiments=perplexity --cache_quant=int8 --cache_quant=kvarn:k2v2,first=16 --cache_error=normal:0,0.25 "
    "--error_seeds=4,5": "sweep-4e58289e",
    "--experiments=injection,accumulation --blocks=1,128": "sweep-ec18886c",
    "--model=tiny-llama2,tiny-mistral --sampler=greedy,top_p --experiments=divergence,mitigations": "sweep-c441bf97",
    "--framework=torch,jax --precision=fp32,bf16 --sampler=temperature,greedy": "sweep-c088d19c",
    "--experiments=parity --precision=fp32": "tiny-gemma2-fp32-greedy-a9dd0c66",
    "--problems=3,1,7 --task=gsm8k --seed=-3 --sampler=top_k --top_k=7 --temperature=0.55": "sweep-b100e4b7",
    "--checkpoint=some/dir.gguf --precision=bf16 --residual=fp32 --cache=fp32 --shots=3 --shots_seed=2 "
    "--prompt=few_shot": "dir.gguf-bf16+cache=fp32+residual=fp32-greedy-e86892f0",
    "--sampler=top_p --top_p=0.85 --regime=aligned --gate=full --gate_problems=1 --padding=left --batch_size=4": (
        "sweep-e0006ba0"
    ),
    "--task=humaneval --allow_code_execution": "sweep-2cd77a35",
    "--task=ifeval --subset=no_length_128 --uncached_length=bucket:64": "sweep-f97e46a5",
    "--experiments=drift,patching --patch_layers=3 --patch_bins=0 --truth_problems=0 --compilation_cache=none": (
        "sweep-5954a55d"
    ),
    "--scores=fp32 --accumulation=fp16 --precision=fp16 --revision=abc": (
        "tiny-gemma2-fp16+accumulation=fp16+scores=fp32-greedy-c2097df5"
    ),
    "--model=tiny-llama2,gemma2-2b --precision=fp16": "sweep-df4526af",
    f"--flagfile={LAUNCH / 'paper.flags'}": "sweep-24145e42",
    f"--flagfile={LAUNCH / 'quantizers.flags'}": "tiny-gemma2-fp16-greedy-4dfe0f7b",
    f"--flagfile={LAUNCH / 'changed-text.flags'}": "tiny-gemma2-fp16-greedy-449b12c8",
}


@pytest.mark.parametrize("command", NAMES)
def test_a_command_finds_the_runs_that_it_began(command):
    conditions = launch.spread(parse(*command.split()))
    path = run_path(conditions[0]) if len(conditions) == 1 else sweep_path(conditions, None)
    assert path == pathlib.Path("runs") / NAMES[command]


# What is added to a small command -> hash of its config, less what the machine decides. Made at revision d48a306.
CONFIGS = {
    "--experiments=divergence": "a712c5c5",
    "--sampler=top_p --top_p=0.8 --seed=3": "6d70733f",
    f"--problems=3,1 --num_problems=2 --shots=1 --prompt=few_shot --fewshot_data={DATA / 'train.jsonl'} "
    "--shots_seed=2": "ea2c8f61",
    "--experiments=patching,drift,attribution --patch_layers=3 --batch_size=2 --padding=left": "d4f90464",
    "--regime=aligned --residual=fp32 --cache=bf16 --gate=off": "e87a510e",
    "--experiments=injection,accumulation --cache_quant=int8 --blocks=2,4 --error_seeds=1": "7af75b8f",
    "--uncached_length=bucket:32 --uncached=stepwise --truth_problems=0 --stepwise_problems=3 --bucket=32": "a54403bf",
}
OF_THE_MACHINE = ("versions", "device", "compiler_options", "variables", "torch", "held")


@pytest.mark.parametrize("command", CONFIGS)
def test_a_run_directory_stays_that_of_its_command(command):
    (one,) = launch.spread(parse(*SMALL, "--tile=8", *command.split()))
    condition = load_condition(one, Console(file=io.StringIO()))
    config = make_run_config(condition, [EXPERIMENTS[name].make_runner(condition) for name in one.run.experiments])
    assert fingerprint({k: v for k, v in config.items() if k not in OF_THE_MACHINE})[:8] == CONFIGS[command]


@pytest.mark.parametrize("file", sorted(LAUNCH.glob("*.flags")), ids=lambda path: path.stem)
def test_a_flagfile_gives_the_options_that_it_was_made_of(file, tmp_path):
    for number, one in enumerate(launch.spread(parse(f"--flagfile={file}", f"--out={tmp_path}"))):
        (tmp_path / f"{number}.flags").write_text(to_flagfile(one))
        assert launch.spread(parse(f"--flagfile={tmp_path / f'{number}.flags'}")) == [one]


def test_every_flag_reaches_its_option_and_run_flags(tmp_path):
    """No two options share a value here, so one in the other's place is seen."""
    given = {
        "model": "tiny-llama2", "checkpoint": "random:7", "revision": "abc", "precision": "bf16", "residual": "fp32",
        "accumulation": "fp16", "cache": "fp32", "scores": "fp32", "framework": "jax", "attention": "sdpa",
        "experiments": "parity,injection", "target": "tpu:v6e:2x2", "cache_error": "normal:0,1",
        "cache_quant": "k=int4;v=fp8:e4m3",
        "error_seeds": "4,-5", "blocks": "3,5", "task": "humaneval", "subset": "no_length_128",
        "allow_code_execution": "True", "context": "11", "data": str(tmp_path), "fewshot_data": "b.jsonl",
        "prompt": "boxed", "shots": "12", "shots_seed": "13", "num_problems": "2", "problems": "14,1",
        "max_new_tokens": "15", "sampler": "top_k", "temperature": "0.75", "top_k": "16", "top_p": "0.25", "seed": "17",
        "batch_size": "18", "padding": "left", "bucket": "19", "uncached_length": "bucket:20", "regime": "aligned",
        "tile": "21", "gate": "full", "gate_problems": "22", "uncached": "stepwise", "stepwise_problems": "23",
        "control_problems": "24", "truth_problems": "25", "patch_layers": "26", "patch_bins": "27",
        "doctor_seconds": "28.5", "tree_seconds": "29.5", "out": "o", "compilation_cache": "none",
        "conditions": "c.flags", "verbose": "True",
    }  # fmt: skip
    assert list(given) == [one.flag for one in OPTIONS]
    (one,) = parse(*(f"--{flag}={text}" for flag, text in given.items()))
    assert to_flagfile(one) == "".join(f"--{flag}={text}\n" for flag, text in given.items())


def test_declarations_hold_together():
    parse()
    for one in OPTIONS:
        known = one.known()
        for value in [*(one.axis or ()), *one.items(Options())]:
            assert not known or value in known
            assert one.kind not in (int, float) or one.low <= value <= one.high
        assert flags.FLAGS[one.flag].help.startswith(one.explain())
