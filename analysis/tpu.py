"""Compiles the programs of presets for TPUs and prints, for each, what XLA says of it: analysis/tpu.md was made so.

python analysis/tpu.py --presets gemma2-2b:26,qwen3-8b:4 --precisions bf16 --targets tpu:v5e:2x2 --hlo /tmp/hlo
"""

import argparse
import dataclasses
import pathlib
import time

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments.lowering.targets import abstract_programs, choose_placing, describe_program, parse_target
from jaxkv.models.families import get_preset
from jaxkv.rollout import Layout

LAYOUT = Layout(batch=1, prompt=250, prefill=256, slots=320, new_tokens=64)
COLUMNS = ("model", "layers", "precision", "target", "chips", "program", "s", "GiB needed", "of", "GFLOP", "GB moved")
PROGRAMS = ("prefill", "decode", "recompute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--presets", required=True, help="names, each with :LAYERS if not all of them")
    parser.add_argument("--precisions", default="bf16", help="names, each with +PART=NAME for parts")
    parser.add_argument("--targets", default="tpu:v5e:2x2,tpu:v5p:2x2x1,tpu:v6e:2x2")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--chips", type=int, help="rather than the fewest that hold weights and cache")
    parser.add_argument("--hlo", type=pathlib.Path, help="folder for the compiled programs' text")
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for preset in args.presets.split(","):
        for precision in args.precisions.split(","):
            for target in args.targets.split(","):
                show(args, preset, precision, target)


def show(args: argparse.Namespace, preset: str, precision: str, text: str) -> None:
    """Prints a line for each program of a model."""
    name, _, layers = preset.partition(":")
    config = get_preset(name)
    config = dataclasses.replace(config, num_layers=int(layers or config.num_layers))
    base, *parts = precision.split("+")
    target = parse_target(text)
    arms = Arms(config, make_precision(base, **dict(part.split("=") for part in parts)), backend=target.platform)
    row = f"| {name} | {config.num_layers} | {precision} | {text.removeprefix('tpu:')}"
    try:
        programs = abstract_programs(arms, LAYOUT, placing := choose_placing(arms, LAYOUT, target, args.chips))
    except UserError as error:
        print(f"{row} | {error} |", flush=True)
        return
    for which in args.programs.split(","):
        begin = time.monotonic()
        cells = f"{row} | {placing.chips} | {which}"
        try:
            compiled = programs[which].compile()
        except UserError as error:
            print(f"{cells} | {time.monotonic() - begin:.0f} | {error} |", flush=True)
            continue
        hlo = compiled.as_text()
        facts = describe_program(compiled, hlo, target, time.monotonic() - begin)
        figures = (
            facts.needed / 2**30,
            (target.memory or 0) / 2**30,
            (facts.flops or 0) / 1e9,
            (facts.accessed or 0) / 1e9,
        )
        told = " | ".join(f"{figure:.2f}" for figure in figures)
        print(f"{cells} | {facts.seconds:.0f} | {told} |", flush=True)
        if args.hlo:
            args.hlo.mkdir(parents=True, exist_ok=True)
            file = f"{name}.{config.num_layers}.{precision}.{text.replace(':', '-')}.{placing.chips}.{which}.hlo"
            (args.hlo / file).write_text(hlo)


if __name__ == "__main__":
    main()
