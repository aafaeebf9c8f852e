"""Puts a finished run of train.py in place with its card: python checkpoints/card.py --run=DIR

Copies the files of DIR/final and training.json to checkpoints/NAME, and writes README.md and training.png beside them.
"""

import json
import pathlib
import shutil
from typing import Any

from absl import flags

from jaxkv.cli import run_command
from jaxkv.errors import UserError
from jaxkv.provenance import sha256_file
from jaxkv.tasks import arith

FLAGS = flags.FLAGS
flags.DEFINE_string("run", None, "run directory of train.py", required=True)
flags.DEFINE_string("to", None, "directory of the checkpoint; by default its name, beside this file")
PICTURE = "training.png"
SHAPES = {
    "tiny-llama2": "LLaMA-2: full attention, as many key/value heads as query heads",
    "tiny-mistral": "Mistral: grouped queries, a window of 64 tokens in every layer",
    "tiny-gemma2": "Gemma-2: grouped queries, a window of 64 tokens in every other layer, softcaps, post norms",
}
STYLES = {"zero_shot": "zero-shot", "few_shot_8": "8-shot"}


def draw(summary: dict[str, Any], path: pathlib.Path) -> None:
    """Draws loss curve and margins side by side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    steps, losses = zip(*summary["loss"], strict=True)
    left.plot(steps, losses, color="C0", linewidth=1, label="training, weighted")
    held_out = summary["held_out"]
    points = [[point[name] for point in held_out] for name in ("step", "held_out_answer_loss")]
    left.plot(*points, "o-", color="C1", markersize=3, linewidth=1, label="held-out answers")
    left.set(xlabel="step", ylabel="loss, nats a token", yscale="log", title="Loss")
    left.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    left.legend(frameon=False)
    margins = summary["margins"]
    edges, counts = margins["histogram"]["edges"], margins["histogram"]["counts"]
    right.stairs(counts, edges, fill=True, color="C0")
    right.axvline(margins["percentiles"]["50"], color="C1", linewidth=1, label="median")
    right.set(
        xlabel="top-1 minus top-2 logit", ylabel="generated steps", yscale="log", title="Margins, zero-shot, fp32"
    )
    right.set_ylim(bottom=0.7)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def write_card(summary: dict[str, Any]) -> str:
    """The card's text."""
    recipe, data, margins = summary["recipe"], summary["data"], summary["margins"]
    name, tokens = summary["model"], recipe["steps"] * recipe["batch"] * recipe["length"]
    packages = ", ".join(f"{key} {summary['packages'][key]}" for key in ("jax", "flax", "optax"))
    accuracy = [
        f"| {STYLES[style]} | {found['correct']} of {found['problems']} | {_percent(found['accuracy'])} "
        f"| {' to '.join(_percent(end) for end in found['wilson_95'])} |"
        for style, found in summary["accuracy"].items()
    ]
    percentiles = margins["percentiles"]
    below = ", ".join(f"{100 * share:.2g} % below {limit}" for limit, share in margins["below"].items())
    lines = [
        "---",
        "license: apache-2.0",
        "language: en",
        "pipeline_tag: text-generation",
        "---",
        "",
        f"# {name}",
        "",
        f"{summary['parameters'] / 1e6:.2f} M parameters, stored in fp16, trained from scratch on generated "
        f"grade-school word problems. {SHAPES[name]}. It ships with jaxkv so that the study of KV caches runs offline "
        "on a model that solves its task; it knows nothing else and is of no other use.",
        "",
        "    python -m jaxkv.launch --model=" + name,
        "",
        "## Accuracy",
        "",
        "Greedy decoding in fp32 of the weights as stored, problems of the held-out split "
        "(`--task=arith`; no problem of one split has template and numbers of a problem of the other), numeric scorer.",
        "",
        "| prompt | right | accuracy | 95 % interval (Wilson) |",
        "|---|---|---|---|",
        *accuracy,
        "",
        "## How close the choices are",
        "",
        f"Top-1 minus top-2 logit at each of the {margins['steps']} steps of the zero-shot answers: mean "
        f"{margins['mean']:.2f}, "
        + ", ".join(f"{p} % {percentiles[p]:.2g}" for p in ("1", "5", "10", "25", "50", "75", "90"))
        + f" (percentiles); {below}.",
        "",
        f"![Loss and margins]({PICTURE})",
        "",
        "## Training",
        "",
        f"    {summary['command']}",
        "",
        f"* Data: {recipe['problems']} problems of generator version {arith.VERSION} ({len(arith.ALL)} templates), "
        f"{100 * recipe['single']:g} % of the documents with one problem, the others with 2 to 12, packed into "
        f"{data['rows']} rows of {recipe['length']} tokens without attention across documents; SHA-256 "
        f"`{data['sha256']}`. {data['epochs']:.2f} epochs.",
        f"* {recipe['steps']} steps of {recipe['batch']} rows ({tokens / 1e6:.0f} M tokens), {recipe['optimizer']}, "
        f"learning rate {recipe['lr']:g} after {recipe['warmup']} steps of warmup, cosine to a tenth, weight decay "
        f"{recipe['weight_decay']:g}, clipping at {recipe['clip']:g}; fp32 master weights, products in "
        f"{recipe['precision']}. A question's tokens weigh {recipe['question_weight']:g} in the loss, an answer's 1.",
        f"* Tokenizer: byte-level BPE with single digits, trained on {recipe['tokenizer_problems']} such problems.",
        f"* {summary['seconds']['training']:.0f} s on {summary['device']}; {packages}; "
        f"jaxkv at `{summary['revision']}`.",
        "",
        "`training.json` has the loss by step, the histogram of margins and all settings.",
        "",
        "## Files",
        "",
        "| file | SHA-256 |",
        "|---|---|",
        *(f"| `{file}` | `{digest}` |" for file, digest in summary["files"].items()),
        "",
        "Apache-2.0, weights and data alike: the problems are the generator's own.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Reads the command line. Raises UserError on anything the user can mend."""
    del argv
    run = pathlib.Path(FLAGS.run)
    if not (run / "training.json").exists():
        raise UserError(f"{run} holds no training.json; let checkpoints/train.py finish first")
    summary = json.loads((run / "training.json").read_text())
    to = pathlib.Path(FLAGS.to) if FLAGS.to else pathlib.Path(__file__).parent / summary["model"]
    for name, digest in summary["files"].items():
        if sha256_file(run / "final" / name) != digest:
            raise UserError(f"{run / 'final' / name} is not the file that training.json tells of; train again")
    to.mkdir(parents=True, exist_ok=True)
    for name in summary["files"]:
        shutil.copyfile(run / "final" / name, to / name)
    shutil.copyfile(run / "training.json", to / "training.json")
    draw(summary, to / PICTURE)
    (to / "README.md").write_text(write_card(summary))
    print(f"{to}: card, picture and {len(summary['files'])} files")


if __name__ == "__main__":
    run_command(main)
