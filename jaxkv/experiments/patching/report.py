"""What the records of experiment 'patching' say: a summary, its blocks, a verdict. Reads records alone.

The share of the gap that a patch closes is 1 - (KL left) / (KL before), both summed over problems; its interval, over
problems, is Student's t on the log of what is left. It is negative where a patch moves the recipient further from the
donor. Patches are compared problem by problem, each of the same weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.experiments.figures_layers import draw_patching
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
from jaxkv.experiments.record_parts import known
from jaxkv.experiments.report_parts import Report, collect, count_problems, describe_problems, list_invalid, say_few
from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Bullets, Fold, Only, Paragraph, Table
from jaxkv.reporting.format import format_counted_share, format_number, format_percent
from jaxkv.reporting.rules import CANNOT_TELL, FAMILY, HALF, OPEN, RULES, Evidence
from jaxkv.reporting.shares import clustered_share, share

Summary = Mapping[str, Any]
COMPARED = ((RESIDUAL, RESIDUAL_NOW), (KEYS_VALUES, RESIDUAL_NOW), (RESIDUAL, KEYS_VALUES))
REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
NOTE = (
    "Patched in all layers. closed: share of the KL between donor and recipient that the patch takes away, in % with a "
    "95 % interval over problems. flips back: argmax flips undone. ways back: free runs that keep to the donor's "
    "tokens to the end, of those that part, that 'everything' brings back and that need a patch (its own row: of all "
    "that part). residual now: the stream at the newest position of each step alone; residual: at all positions."
)


def summarize_patching(records: Sequence[object], run: Mapping[str, Any]) -> dict[str, Any]:
    """Summarizes the 'patching' records of a run.

    Args:
      records: in any order; those of other experiments are left out.
      run: content of run.json.

    Returns:
      Plain values. `status` is 'ok', 'invalid' (no valid sample) or 'empty'; `directions` holds direction -> patch ->
      figures over its valid samples (None without any), `differences` how much more of the gap one patch closes than
      another, and `claim` the verdict on C5.
    """
    samples = collect(records, PatchingRecord)
    valid = [s for s in samples if s.status == "ok"]
    problems = {s.problem for s in samples}
    summary: dict[str, Any] = {
        "experiment": "patching",
        "fingerprint": run.get("fingerprint"),
        "status": "ok" if valid else "invalid" if samples else "empty",
        "problems": count_problems(samples, run),
        "samples_missing": len(problems) * len(DIRECTIONS) * len(PATCHES) - len(samples),
        "invalid": list_invalid(samples),
    }
    if not valid:
        return summary
    by_patch = {
        direction: {patch: [s for s in valid if (s.direction, s.patch) == (direction, patch)] for patch in PATCHES}
        for direction in DIRECTIONS
    }
    summary |= {
        "num_layers": valid[0].num_layers,
        "directions": {
            direction: {
                patch: _summarize_patch(found, None if patch == EVERYTHING else _come_back(patches[EVERYTHING]))
                for patch, found in patches.items()
            }
            for direction, patches in by_patch.items()
        },
        "differences": {
            direction: [_compare(patches[a], patches[b], a, b) for a, b in COMPARED]
            for direction, patches in by_patch.items()
        },
        "instrumented_bit_equal": _count_instrumented(valid),
    }
    return summary | {"claim": judge_claim(summary)}


def _count_instrumented(samples: Sequence[PatchingRecord]) -> dict[str, int]:
    once = {s.problem: s for s in samples}.values()
    counts = {arm: sum(getattr(s.instrumented_bit_equal, arm) for s in once) for arm in ("cached", "uncached")}
    return counts | {"steps": sum(s.steps for s in once)}


def _closed(left: Sequence[float], before: Sequence[float]) -> dict[str, Any] | None:
    """The share of the gap closed; None where there was none."""
    if not sum(before):
        return None
    ones = np.ones(len(before))
    found = statistics.estimate_ratio((left, ones), (before, ones))
    interval = None
    if found is not None:
        low, high = found.interval()
        interval = [1 - high, 1 - low]
    return {"share": 1 - sum(left) / sum(before), "interval": interval}


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
        interval = statistics.paired_interval(ours, theirs)
        entry["share"] = float(np.mean(ours) - np.mean(theirs))
        entry["interval"] = None if interval is None else list(interval)
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


def _difference(summary: Summary, name: str, other: str) -> Mapping[str, Any]:
    entries = summary["differences"][INTO_CACHED]
    return next(entry for entry in entries if (entry["patch"], entry["other"]) == (name, other))


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
    gap = _difference(summary, RESIDUAL, KEYS_VALUES)
    control = patches[EVERYTHING] and patches[EVERYTHING]["trajectory"]
    if not control:
        return say(CANNOT_TELL, "No free run parted, so that there is no trajectory to bring back.")
    if back is None or back_state is None:
        return say(CANNOT_TELL, f"None of {control['recovered']['total']} free runs that parted can show it: every "
                                "value of the donor does not bring them back, or no token needs it.")  # fmt: skip
    brings = f"The residual stream patched at each current position brings back {format_counted_share(back)}, K and V "
    brings += f"{format_counted_share(back_state)} of the trajectories that every value of the donor does "
    brings += f"({_count(control['recovered'])} that part; left out where the unpatched programs flip no token)"
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


def _portion(entry: Mapping[str, Any] | None) -> str:
    """A share of the gap with its interval; no share of a whole, since it may be negative."""
    if entry is None or entry["share"] is None:
        return "-"
    text = f"{format_number(100 * entry['share'], 3)} %"
    if entry["interval"] is None:
        return text
    low, high = entry["interval"]
    return f"{text} [{format_number(100 * low, 3)}, {format_number(100 * high, 3)}]"


def conclude(summary: Summary) -> list[str]:
    """What the figures allow to say, one sentence each; never more than their intervals do."""
    if summary["status"] != "ok":
        kind = "no sample yet" if summary["status"] == "empty" else "no sample with finite numbers"
        return [f"There is {kind}, so nothing was patched."]
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
    claim = summary["claim"]
    lines.append(f"C5a, {RULES['C5a'].statement}, by this run alone: {claim['verdict']}. {claim['why']}")
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


HEADER = ["patched", "gap closed", "flips back", "new flips", "equal bits", "ways back", "tokens met"]


def make_rows(summary: Summary, direction: str) -> list[list[str]]:
    """The cells of a direction's table, a row a patch."""
    rows = []
    for patch, figures in summary["directions"][direction].items():
        if figures is None:
            continue
        trajectory = figures["trajectory"] or {"recovered": None, "agreeing": None}
        rows.append(
            [
                patch + (" (control)" if patch in CONTROLS else ""),
                _portion(figures["closed"]),
                _count(figures["recovered"]),
                _count(figures["broken"]),
                f"{figures['bit_equal']} of {figures['steps']}",
                _count(trajectory["recovered"]),
                "-" if trajectory["agreeing"] is None else f"{format_percent(trajectory['agreeing']['rate'])} %",
            ]
        )
    return rows


def _count(entry: Mapping[str, Any] | None) -> str:
    return "-" if entry is None else f"{entry['count']} of {entry['total']}"


def make_layer_rows(summary: Summary, direction: str) -> list[list[str]]:
    """Share of the gap closed by one layer at a time: a row a layer, a column a patch; the first row names them."""
    found = {
        patch: dict(zip(figures["by_layer"]["layer"], figures["by_layer"]["closed"], strict=True))
        for patch, figures in summary["directions"][direction].items()
        if figures is not None and figures["by_layer"] is not None
    }
    layers = sorted({layer for column in found.values() for layer in column})
    cells = [
        [
            str(layer) if layer < summary["num_layers"] else "out",
            *(_percent(column.get(layer)) for column in found.values()),
        ]
        for layer in layers
    ]
    return [["layer", *found], *cells] if layers else []


def _percent(entry: Mapping[str, Any] | None) -> str:
    return "-" if entry is None else f"{format_number(100 * entry['share'], 3)} %"


def write_patching(summary: Summary) -> list[Block]:
    """What is said of the patches, and their tables by direction."""
    blocks: list[Block] = [Paragraph(f"{describe_problems(summary)}."), Bullets(conclude(summary))]
    for direction in DIRECTIONS if summary["status"] == "ok" else ():
        tables: list[Block] = [
            Table(HEADER, make_rows(summary, direction), terminal=(0, 1, 2, 5)),
            Paragraph(NOTE, "note"),
        ]
        if by_layer := make_layer_rows(summary, direction):
            tables.append(Only("page", [Table(by_layer[0], by_layer[1:], "Share closed, one layer at a time")]))
        blocks.append(Fold(direction, tables))
    return blocks


REPORT = Report(
    "Activation patching", lambda run: summarize_patching(run.records, run.run), write_patching, draw_patching
)
