"""The part of a study's report that sets JAX beside PyTorch: the answer first, then matrices and every pair."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.analysis.document import Block, Bullets, Fold, Heading, Paragraph, Table
from jaxkv.analysis.figures import name_group
from jaxkv.analysis.format import format_count, format_counted_share, format_mean, format_number, format_share
from jaxkv.experiments.parity.record import CELLS

Study = Mapping[str, Any]


def _span(interval: Sequence[float] | None) -> str:
    """`` [0.1, 0.3]``, or nothing where there is no interval."""
    return "" if interval is None else f" [{format_number(interval[0])}, {format_number(interval[1])}]"


def _describe_gap(gap: Mapping[str, Any], unit: str) -> str:
    means = f"framework {format_number(gap['framework'])}, cache {format_number(gap['cache'])} {unit}".rstrip()
    if gap["interval"] is None:
        return f"{means}: cannot tell which is larger ({gap['problems']} problems, no interval)"
    low, high = map(format_number, gap["interval"])
    said = {"framework": "the framework gap is larger", "cache": "the cache gap is larger"}
    return f"{means}, difference {format_number(gap['difference'])} [{low}, {high}]: " + (
        said.get(gap["larger"]) or "cannot tell which is larger"
    )


def _describe_same(found: Mapping[str, Any] | None, what: str, names: Sequence[str]) -> str:
    if found is None:
        return f"{what}: nothing to compare."
    if not found["first"] and not found["second"]:
        return f"{what}: none of {found['places']} in {names[0]} and none in {names[1]}."
    test = "" if found["fisher_p"] is None else f"; Fisher p = {format_number(found['fisher_p'])}"
    return (
        f"{what}: {found['first']} in {names[0]}, {found['second']} in {names[1]}, {found['both']} in both of "
        f"{found['places']} (independent: {format_number(found['expected'])}{test})."
    )


def write_free_parity(study: Study) -> list[Block]:
    """JAX and PyTorch, cached and not, running free."""
    blocks: list[Block] = []
    for group in study["parity"]:
        rows = []
        for pair, found in group["pairs"].items():
            right = found["accuracy"]
            rows.append(
                [
                    pair.replace(" | ", " to "),
                    format_counted_share(found["diverged"]),
                    "-" if found["first_diverged"] is None else format_number(found["first_diverged"], 3),
                    format_share(found["agreement"]),
                    "-" if right is None else f"{right['only_first']}, {right['only_second']}",
                    "-" if right is None else format_number(right["mcnemar_p"]),
                ]
            )
        title = f"{name_group(group, study['parity'])}: {group['problems']} problems, running free"
        head = ["pair", "sequences that part", "first at (median)", "tokens that agree", "only first, second right"]
        blocks += [Heading(title, 3)]
        right = [f"{cell} {format_counted_share(entry)}" for cell, entry in group["cells"].items() if entry]
        lines = [f"Right by the main scorer: {'; '.join(right)}."] if right else []
        for contrast in group["contrasts"]:
            names = contrast["frameworks"]
            lines += [
                f"Problems that part between the frameworks, in either arm: "
                f"{format_counted_share(contrast['parted']['framework'])}; between the arms, in either framework: "
                f"{format_counted_share(contrast['parted']['cache'])}.",
                f"Share of sequences that part: {_describe_gap(contrast['gap'], '')}.",
                _describe_same(contrast["same_sequences"], "Sequences parted by the cache", names),
                _describe_same(contrast["same_flips"], "Steps flipped by the cache", names),
            ]
        blocks += [Bullets(lines), Fold("Every pair of cells", [Table([*head, "McNemar p"], rows)])]
    return blocks


def write_parity(found: Mapping[str, Any]) -> list[Block]:
    """Four cells along the same tokens, from what `summarize_parity` gives."""
    if found["status"] != "ok":
        why = "; ".join(f"{g['samples']} at {g['reason']} ({g['arm']}, {g['value']})" for g in found["invalid"])
        return [Paragraph(f"No valid sample: {why or 'none yet'}.")]
    rows = [
        [
            pair.replace(" | ", " to "),
            format_counted_share(values["flips"]),
            format_mean(values["kl"]),
            format_number(values["max_abs"]["max"]),
            format_share(values["bit_equal"]),
        ]
        for pair, values in found["pairs"].items()
    ]
    gap, cosine, choice = found["gap"], found["cosine"], found["same_choice"]
    lines = [f"KL a token, mean over problems: {_describe_gap(gap, 'nats')}."]
    if gap["ratio"] is not None:
        span = _span(gap["ratio_interval"])
        lines.append(f"The framework gap is {format_number(gap['ratio'])}{span} times the cache gap.")
    lines.append(
        f"PyTorch's uncached arm: {', '.join(found['torch_uncached'])} rows. Where JAX's has others, the framework gap "
        "holds what other shapes alone do; a divergence run's control at another length gives the size of that."
    )
    if cosine is None:
        lines.append("Direction: at no step does the cache move the logits of both frameworks.")
    else:
        lines.append(
            "Direction: the cosine between what the cache does to the logits of JAX and of PyTorch is "
            f"{format_number(cosine['mean'])}{_span(cosine['interval'])} over {cosine['steps']} steps; 0 is no common "
            "direction."
        )
    lines.append(
        _describe_same(found["same_flips"], "Steps, taken as independent, flipped by the cache", ("JAX", "PyTorch"))
    )
    if choice["total"]:
        lines.append(f"Of steps that flip in both, {format_count(choice)} flip between the same two tokens.")
    equal = ", ".join(f"{cell} {found['layers']['bit_equal'][cell]}" for cell in CELLS)
    lines.append(
        f"Steps whose residual stream comes with the cell's own logits bit for bit, of {found['tokens']}: {equal}."
    )
    head = ["pair", "argmax flips per token", "mean KL, nats", "max |diff|", "bit-equal steps"]
    about = Paragraph("Four cells along the tokens of JAX's cached arm.")
    return [about, Bullets(lines), Fold("Every pair of cells", [Table(head, rows)])]
