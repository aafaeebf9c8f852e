"""What the records of experiment 'patching' say: a summary, its blocks, a verdict. Reads records alone.

The share of the gap that a patch closes is 1 - (KL left) / (KL before), both summed over problems; its interval, over
problems, is Student's t on the log of what is left. It is negative where a patch moves the recipient further from the
donor. Patches are compared problem by problem, each of the same weight.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.figures import draw_patching
from jaxkv.experiments.patching.record import (
    CONTROLS,
    DIRECTIONS,
    EVERYTHING,
    INTO_CACHED,
    ITSELF,
    KEYS_VALUES,
    PATCHES,
    RESIDUAL,
    RESIDUAL_NOW,
    ByLayer,
    Grid,
    PatchingRecord,
    Trajectory,
)
from jaxkv.experiments.record_parts import ARMS, known
from jaxkv.experiments.report_parts import Report, Summary, begin_summary, describe_problems, say_few, say_nothing
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Bullets, Fold, Only, Paragraph, Table, make_table
from jaxkv.reporting.format import format_count, format_counted_share, format_number, format_part, format_percent
from jaxkv.reporting.rules import CANNOT_TELL, FAMILY, HALF, OPEN, Evidence
from jaxkv.reporting.shares import clustered_share, ratio_of_sums, share

COMPARED = ((RESIDUAL, RESIDUAL_NOW), (KEYS_VALUES, RESIDUAL_NOW), (RESIDUAL, KEYS_VALUES))
REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
NOTE = (
    "Patched in all layers. closed: share of the KL between donor and recipient that the patch takes away, in % with a "
    "95 % interval over problems. flips back: argmax flips undone. ways back: free runs that keep to the donor's "
    "tokens to the end, of those that part, that 'everything' brings back and that need a patch (its own row: of all "
    "that part). residual now: the stream at the newest position of each step alone; residual: at all positions."
)


def summarize_patching(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'patching' records of a run, as `begin_summary` says.

    Returns:
      Plain values. `directions` holds direction -> patch -> figures over its valid samples (None without any),
      `differences` how much more of the gap one patch closes than another, and `claim` the verdict on C5.
    """
    summary, samples, valid = begin_summary(records, run, PatchingRecord)
    asked = len({s.problem for s in samples}) * len(DIRECTIONS) * len(PATCHES)
    summary["samples_missing"] = asked - len(samples)
    if not valid:
        return summary
    once = {s.problem: s for s in valid}.values()
    summary |= {"num_layers": valid[0].num_layers, "directions": {}, "differences": {}}
    summary["instrumented_bit_equal"] = {
        **{arm: sum(getattr(s.instrumented_bit_equal, arm) for s in once) for arm in ARMS},
        "steps": sum(s.steps for s in once),
    }
    for direction in DIRECTIONS:
        patches = {p: [s for s in valid if (s.direction, s.patch) == (direction, p)] for p in PATCHES}
        back = _come_back(patches[EVERYTHING])
        summary["directions"][direction] = {
            patch: _summarize_patch(found, None if patch == EVERYTHING else back) for patch, found in patches.items()
        }
        summary["differences"][direction] = [_compare(patches[a], patches[b], a, b) for a, b in COMPARED]
    return summary | {"claim": judge_claim(summary)}


def _closed(left: Sequence[float], before: Sequence[float]) -> dict[str, Any] | None:
    """The share of the gap closed; None where there was none."""
    if (found := ratio_of_sums(left, before)) is None:
        return None
    ends = found["interval"]
    return {"share": 1 - found["share"], "interval": ends and [1 - ends[1], 1 - ends[0]]}


def _come_back(controls: Sequence[PatchingRecord]) -> frozenset[int]:
    """Problems whose free run keeps to the donor's tokens with every value of the donor, and might not without.

    A program that can be patched may have other bits than the arm, and part from it by itself at a close call. What no
    patch could bring back says nothing about the patch. Nor does what needs none: where no token flips between the two
    programs unpatched, the recipient takes the donor's token at the fork by itself.
    """
    return frozenset(s.problem for s in controls if s.trajectory and s.trajectory.until is None and known(s.gap).flips)


def _summarize_patch(samples: Sequence[PatchingRecord], judged: frozenset[int] | None) -> dict[str, Any] | None:
    """Figures of a patch; those of free runs over the problems `judged`, None for all that part."""
    kept = [s for s in samples if s.steps]
    if not kept:
        return None
    steps, before, patched = [s.steps for s in kept], [known(s.gap) for s in kept], [known(s.all) for s in kept]
    flips = [gap.flips for gap in before]
    return {
        "problems": len(kept),
        "steps": sum(steps),
        "gap": {name: sum(getattr(gap, name) for gap in before) for name in ("kl", "flips", "bit_equal")},
        "closed": _closed([p.kl for p in patched], [gap.kl for gap in before]),
        "recovered": clustered_share([p.recovered for p in patched], flips),
        "broken": clustered_share([p.broken for p in patched], np.subtract(steps, flips).tolist()),
        "bit_equal": sum(p.bit_equal for p in patched),
        "unchanged": sum(known(s.unchanged) for s in kept),
        "trajectory": _summarize_trajectories(
            [s.trajectory for s in kept if s.trajectory and (judged is None or s.problem in judged)]
        ),
        "by_layer": _summarize_layers([(known(s.gap).kl, s.by_layer) for s in kept if s.by_layer is not None]),
        "grid": _summarize_grid([(known(s.gap).kl, s.grid) for s in kept if s.grid is not None]),
    }


def _summarize_trajectories(found: Sequence[Trajectory]) -> dict[str, Any] | None:
    """Free runs, of those where recipient and donor part."""
    if not found:
        return None
    rest = [max(t.steps - t.parted, 0) for t in found]
    counted = [t.agreeing for t in found if t.agreeing is not None]
    return {
        "recovered": share(sum(t.until is None for t in found), len(found)),
        "agreeing": clustered_share(counted, rest) if len(counted) == len(found) else None,
    }


def _summarize_layers(samples: Sequence[tuple[float, ByLayer]]) -> dict[str, Any] | None:
    """Share of the gap, given for each sample, closed by one layer at a time."""
    gaps = [gap for gap, _ in samples]
    if not samples or not sum(gaps):
        return None
    columns = list(zip(*(found.kl for _, found in samples), strict=True))
    closed = [_closed(column, gaps) for column in columns]
    return {"layer": samples[0][1].layer, "closed": closed}


def _summarize_grid(samples: Sequence[tuple[float, Grid]]) -> dict[str, Any] | None:
    """Share of the gap closed by one layer in one bin of positions; a bin is a part of each problem's own text."""
    bins = min((len(grid.bins) for _, grid in samples), default=0)
    kept = [grid for _, grid in samples if len(grid.bins) == bins]
    gap = sum(gap for gap, grid in samples if len(grid.bins) == bins)
    if not kept or not gap:
        return None
    left = np.sum([grid.kl for grid in kept], axis=0)
    return {"layer": kept[0].layer, "bins": bins, "closed": (1 - left / gap).tolist()}


def _compare(
    first: Sequence[PatchingRecord], second: Sequence[PatchingRecord], name: str, other: str
) -> dict[str, Any]:
    """How much more of its gap a problem closes under the first patch than under the second, mean over problems.

    Each problem counts alike: one close call can hold most of the KL of a run.
    """
    left, right = (
        {s.problem: 1 - known(s.all).kl / gap for s in samples if (gap := known(s.gap).kl)}
        for samples in (first, second)
    )
    shared = [problem for problem in left if problem in right]
    entry: dict[str, Any] = {"patch": name, "other": other, "problems": len(shared), "share": None, "interval": None}
    if shared:
        ours, theirs = ([side[problem] for problem in shared] for side in (left, right))
        entry["share"] = float(np.mean(ours) - np.mean(theirs))
        entry["interval"] = statistics.paired_interval(ours, theirs)
    return entry


def find_broken_controls(summary: Summary) -> list[str]:
    """Controls that did not come out, one sentence each."""
    lines = []
    for direction, patches in summary["directions"].items():
        whole, own = patches[EVERYTHING], patches[ITSELF]
        if whole is not None and whole["bit_equal"] < whole["steps"]:
            lines.append(f"Control failed: with every value of the donor ({direction}) the logits are the donor's at "
                         f"{whole['bit_equal']} of {whole['steps']} steps.")  # fmt: skip
        if own is not None and own["unchanged"] < own["steps"]:
            lines.append(f"Control failed: patched with itself ({direction}) the recipient changes at "
                         f"{own['steps'] - own['unchanged']} of {own['steps']} steps.")  # fmt: skip
    return lines


def judge_claim(summary: Summary) -> dict[str, Any]:
    """C5a: the K/V state carries the divergence along (jaxkv.reporting.rules).

    Trajectories are those that every value of the donor brings back, where the unpatched programs flip a token.
    Supported if the residual stream patched at each current position brings back fewer than half of them, and K and V
    more than half; refuted if the stream brings back more than half, or K and V fewer. By exact tests, and only where
    free runs part. What the stream at all positions closes of the gap decides nothing: it sets what K and V are
    computed from.

    Returns:
      verdict: of this run alone, 'reproduced', 'not reproduced' or 'cannot tell'.
      why: one sentence.
      supports, refutes: p-values, as in `rules.Evidence`.
    """

    def say(verdict: str, why: str, found: Evidence = OPEN) -> dict[str, Any]:
        return {"verdict": verdict, "why": why, "supports": found.supports, "refutes": found.refutes}

    if broken := find_broken_controls(summary):
        return say(CANNOT_TELL, broken[0])
    patches = summary["directions"][INTO_CACHED]
    now, state = patches[RESIDUAL_NOW], patches[KEYS_VALUES]
    if now is None or state is None or patches[RESIDUAL] is None:
        return say(CANNOT_TELL, "Not every patch has a sample.")
    if not now["gap"]["kl"]:
        return say(CANNOT_TELL, f"The arms have equal logits at {now['steps']} steps: there is no gap to close.")
    back, back_state = (p["trajectory"] and p["trajectory"]["recovered"] for p in (now, state))
    gap = summary["differences"][INTO_CACHED][COMPARED.index((RESIDUAL, KEYS_VALUES))]
    control = patches[EVERYTHING] and patches[EVERYTHING]["trajectory"]
    if not control:
        return say(CANNOT_TELL, "No free run parted, so that there is no trajectory to bring back.")
    if back is None or back_state is None:
        return say(CANNOT_TELL, f"None of {control['recovered']['total']} free runs that parted can show it: every "
                                "value of the donor does not bring them back, or no token needs it.")  # fmt: skip
    brings = f"The residual stream patched at each current position brings back {format_counted_share(back)}, K and V "
    brings += f"{format_counted_share(back_state)} of the trajectories that every value of the donor does "
    brings += f"({format_count(control['recovered'])} that part; left out where the unpatched programs flip no token)"
    if gap["interval"] is not None:
        brings += f"; at all positions the stream closes {_portion(gap)} more of the gap than K and V, in the mean of "
        brings += f"{gap['problems']} problems"
    stream, carried = (Evidence(*_against_half(entry)) for entry in (back, back_state))
    found = Evidence(max(stream.refutes, carried.supports), min(1.0, 2 * min(stream.supports, carried.refutes)))
    if found.p > FAMILY:
        return say(CANNOT_TELL, f"{brings}: the counts leave the claim open.", found)
    return say(REPRODUCED if found.holds else NOT_REPRODUCED, f"{brings}.", found)


def _against_half(entry: Mapping[str, Any]) -> tuple[float, float]:
    """p-values that a share is not above and not below a half."""
    test = statistics.share_p_above, statistics.share_p_below
    return test[0](entry["count"], entry["total"], HALF), test[1](entry["count"], entry["total"], HALF)


def _portion(entry: Summary | None) -> str:
    return "-" if entry is None or entry["share"] is None else format_part(entry["share"], entry["interval"])


def conclude(summary: Summary) -> list[str]:
    """What the figures allow to say, one sentence each; never more than their intervals do."""
    if nothing := say_nothing(summary, "nothing was patched"):
        return nothing
    lines, watched = [], summary["instrumented_bit_equal"]
    if watched["cached"] == watched["uncached"] == watched["steps"]:
        lines.append(f"The programs that can be patched, unpatched, have the bits of the arms at {watched['steps']} "
                     "steps.")  # fmt: skip
    else:
        lines.append(f"The programs that can be patched, unpatched, have the bits of the arms at {watched['cached']} "
                     f"(cached) and {watched['uncached']} (uncached) of {watched['steps']} steps: what is patched is "
                     "this pair of programs, whose gap is of the same kind.")  # fmt: skip
    broken = find_broken_controls(summary)
    if broken:
        lines += broken
    else:
        lines.append("Controls: with every value of the donor the recipient has the donor's logits, with its own it "
                     "does not change, bit for bit at every step, in both directions.")  # fmt: skip
    for direction in DIRECTIONS:
        for entry in summary["differences"][direction]:
            lines += _conclude_difference(direction, entry)
    lines.append("A patch of the residual stream at the current position leaves the K and V of earlier positions as "
                 "they are, so that what it does not close is no proof of anything by itself.")  # fmt: skip
    lines.append(f"By this run alone: {summary['claim']['why']}")
    return lines + say_few(summary["problems"]["ok"])


def _conclude_difference(direction: str, entry: Mapping[str, Any]) -> list[str]:
    if entry["share"] is None or entry["interval"] is None:
        return []
    low, high = entry["interval"]
    if low <= 0 <= high:
        return [f"{direction}: which of {entry['patch']} and {entry['other']} closes more of the gap the interval "
                f"leaves open ({_portion(entry)})."]  # fmt: skip
    word = "more" if low > 0 else "less"
    return [f"{direction}: {entry['patch']} closes {word} of the gap than {entry['other']}, by {_portion(entry)} of "
            f"it in the mean of {entry['problems']} problems."]  # fmt: skip


Row = tuple[str, Mapping[str, Any]]  # a patch and its figures


def _of_free_runs(row: Row, figure: str) -> Any:
    return row[1]["trajectory"] and row[1]["trajectory"][figure]


def _rate(entry: Summary | None) -> str:
    return "-" if entry is None else f"{format_percent(entry['rate'])} %"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "patched": lambda row: row[0] + (" (control)" if row[0] in CONTROLS else ""),
    "gap closed": lambda row: _portion(row[1]["closed"]),
    "flips back": lambda row: format_count(row[1]["recovered"]),
    "new flips": lambda row: format_count(row[1]["broken"]),
    "equal bits": lambda row: f"{row[1]['bit_equal']} of {row[1]['steps']}",
    "ways back": lambda row: format_count(_of_free_runs(row, "recovered")),
    "tokens met": lambda row: _rate(_of_free_runs(row, "agreeing")),
}


def _write_layers(summary: Summary, rows: Sequence[Row]) -> list[Block]:
    """Share of the gap closed by one layer at a time: a row a layer, a column a patch."""
    found = {
        patch: dict(zip(figures["by_layer"]["layer"], figures["by_layer"]["closed"], strict=True))
        for patch, figures in rows
        if figures["by_layer"] is not None
    }
    layers = sorted({layer for column in found.values() for layer in column})
    cells = [
        [
            str(layer) if layer < summary["num_layers"] else "out",
            *(_percent(column.get(layer)) for column in found.values()),
        ]
        for layer in layers
    ]
    return [Only("page", [Table(["layer", *found], cells, "Share closed, one layer at a time")])] if cells else []


def _percent(entry: Summary | None) -> str:
    return "-" if entry is None else f"{format_number(100 * entry['share'], 3)} %"


def write_patching(summary: Summary) -> list[Block]:
    """What is said of the patches, and their tables by direction."""
    blocks: list[Block] = [Paragraph(f"{describe_problems(summary)}."), Bullets(conclude(summary))]
    for direction, patches in summary.get("directions", {}).items():
        rows = [row for row in patches.items() if row[1] is not None]
        table = make_table(COLUMNS, rows, terminal=(0, 1, 2, 5))
        blocks.append(Fold(direction, [table, Paragraph(NOTE, "note"), *_write_layers(summary, rows)]))
    return blocks


REPORT = Report(
    "Activation patching", lambda run: summarize_patching(run.records, run.run), write_patching, draw_patching
)
