"""The mitigations table of a checkpoint on this machine: measures, keeps a small summary, prints the table.

python analysis/mitigations/measure.py RUN_DIR DEST.json CHECKPOINT GSM8K_TEST [PROBLEMS NEW_TOKENS BUCKET [CACHE_DIR]]

Problems are asked through the chat template. The run directory resumes.
"""

import json
import pathlib
import sys

import jax
from rich.console import Console

from jaxkv.analysis.mitigations import render, summarize_mitigations, to_markdown
from jaxkv.checkpoints import load
from jaxkv.config import make_precision
from jaxkv.decode import COMPILER_OPTIONS
from jaxkv.experiments.divergence import DivergenceSpec, Item
from jaxkv.experiments.mitigations import make_variants, run_mitigations
from jaxkv.records import RunDirectory, environment, git_revision, read_lines, sha256_file, to_plain
from jaxkv.tasks import load_task
from jaxkv.tasks.gsm8k import PromptSpec


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if len(arguments) not in (4, 7, 8):
        print(__doc__, file=sys.stderr)
        return 2
    path, destination, source, data = map(pathlib.Path, arguments[:4])
    problems, new_tokens, bucket = map(int, arguments[4:7] or (4, 32, 128))
    if arguments[7:]:
        jax.config.update("jax_compilation_cache_dir", arguments[7])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    checkpoint = load(str(source), precision=make_precision("fp32"))
    task = load_task("gsm8k", data=str(data), spec=PromptSpec("chat", 0, None))
    asked = task.problems[:problems]
    items = [Item(p.index, tuple(checkpoint.tokenizer.chat(task.prompt(p))), p.answer) for p in asked]
    spec = DivergenceSpec(new_tokens=new_tokens, bucket=bucket)
    variants = make_variants(8 if jax.default_backend() == "cpu" else 16)
    device = jax.devices()[0]
    config = {
        "experiments": ["mitigations"],
        "model": checkpoint.config.to_json(),
        "checkpoint": {name: value for name, value in checkpoint.provenance.items() if name != "source"},
        "data": {"sha256": sha256_file(data), "name": data.name},
        "prompt": task.provenance["prompt"],
        "problems": [item.problem for item in items],
        "decoding": {"new_tokens": new_tokens, "bucket": bucket, "seed": spec.seed},
        "variants": {v.name: v.precision.to_json() | {"tile": v.tile} for v in variants},
        "device": {"platform": device.platform, "kind": device.device_kind},
        "compiler_options": COMPILER_OPTIONS,
    }
    with RunDirectory.open(path, config, provenance=environment() | {"git": git_revision()}) as run:
        done = frozenset((int(key[1]), str(key[2])) for key in run.done_keys())
        stops = tuple(checkpoint.tokenizer.eos_ids)
        for records, timing in run_mitigations(
            checkpoint.config, checkpoint.state, items, spec, variants, done, stop_ids=stops
        ):
            for record in records:
                run.append(record)
            run.append_timing(timing)
        summary = summarize_mitigations(run.read(), read_lines(path / "timing.jsonl")[0], run.run)
        command = ["RUN_DIR", destination.name, source.name, data.name, problems, new_tokens, bucket]
        provenance = {
            "command": " ".join(["python analysis/mitigations/measure.py", *map(str, command)]),
            "sessions": run.run["sessions"],
            "config": config,
        }
    destination.write_text(json.dumps(to_plain({"provenance": provenance, "summary": summary}), indent=1) + "\n")
    destination.with_suffix(".md").write_text(to_markdown(summary))
    Console(width=100).print(render(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
