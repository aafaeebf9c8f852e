"""What the terminal's table and the reports of a run call things: arms, controls, gate, sampling, invalid samples."""

from collections.abc import Mapping
from typing import Any

from jaxkv.reporting.format import format_counted_share, format_expected, format_number

MAIN = "cached vs uncached"
# Each control is an arm against itself.
LABELS = {
    "cached_rerun": "cached again",
    "uncached_rerun": "uncached again",
    "uncached_other_length": "uncached padded otherwise",
    "uncached_stepwise": "uncached by brute force",
}
RULES_OUT = {
    "cached_rerun": "the cached arm differing from itself between runs (atomics, another kernel picked)",
    "uncached_rerun": "the uncached arm differing from itself between runs",
    "uncached_other_length": "if it differs, the cache as the only cause: no cache is involved, only another padded"
    " length. If it does not, a shape as the cause is not ruled out: both forwards are long and may share a kernel that"
    " one row a step does not use",
    "uncached_stepwise": "a flaw of draft and check: every step is recomputed by itself",
}
Summary = Mapping[str, Any]


def list_comparisons(summary: Summary) -> list[tuple[str, Mapping[str, Any]]]:
    """The arms' comparison and those of the controls that were run, with their labels."""
    rows = [(MAIN, summary["teacher_forced"])] + [(LABELS[n], c) for n, c in summary["controls"].items()]
    return [(label, comparison) for label, comparison in rows if comparison is not None]


def describe_gate(gate: Mapping[str, Any] | None) -> str:
    """What the gate found, or that it was off."""
    if gate is None:
        return "off: nothing rules out a bug of the cache"
    if "why" in gate:
        return gate["why"]
    if not gate["steps"]:
        return f"had nothing to compare: the numbers of {gate['problems']} problems broke off at once"
    said = (
        f"passed: aligned arms bit-equal at {gate['steps']} of {gate['steps']} steps of {gate['problems']} problems "
        f"(tile {gate['tile']})"
    )
    if (plain := gate.get("plain")) is None:
        return said
    if plain["passed"] is None:
        return f"{said}; the plain programs cannot be tried without rounding in this precision"
    within = f" within {format_number(plain['tolerance'])}" if plain["tolerance"] else " in every bit"
    return f"{said}; plain programs, under weights that nothing rounds, equal{within} at {plain['steps']} steps"


def describe_sampling(sampling: Mapping[str, Any]) -> str:
    """The effective sampling in a few words, e.g. ``top_k, temperature 0.7, top_k 50, seed 0``."""
    if sampling["sampler"] == "greedy":
        return "greedy"
    parts = [sampling["sampler"], f"temperature {sampling['temperature']}"]
    parts += [f"{name} {sampling[name]}" for name in ("top_k", "top_p") if sampling[name] is not None]
    return ", ".join([*parts, f"seed {sampling['seed']}"])


def describe_invalid(summary: Summary) -> str:
    """Where the numbers of invalid samples broke off, and what was found to mend it."""
    places = [
        f"{g['samples']} at {g['reason']} ({g['arm']}, {g['value']}, from position {g['first_position']})"
        for g in summary["invalid"]
    ]
    return "; ".join([*places, summary["remedy"]] if "remedy" in summary else places)


def describe_missing(summary: Summary) -> str:
    """That a run is unfinished; empty if it is not."""
    problems = summary["problems"]
    missing = problems["asked"] - problems["total"]
    return f"UNFINISHED: {missing} of {problems['asked']} problems have no sample yet" if missing > 0 else ""


def describe_divergence(free: Mapping[str, Any]) -> str:
    """How many free-running sequences part, how many the flips would give, and when the first does."""
    text = format_counted_share(free["diverged"])
    if free["expected"] is not None:
        text += f"; expected from the flips per token: {format_expected(free['expected'])}"
    if free["first_diverged"] is not None:
        text += f"; first at token {format_number(free['first_diverged']['quartiles'][1], 3)} (median)"
    return text
