"""The first screen of a report: one status, three figures, three sentences. From records alone, without HTML.

No sentence is stronger than its evidence: that a difference is rounding is said where
`jaxkv.experiments.divergence.cause` says so, an absence of differences stands beside its bound, and what the records
cannot tell is called open.
"""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from jaxkv.experiments.divergence import cause
from jaxkv.experiments.divergence.record import DivergenceRecord
from jaxkv.experiments.divergence.wording import describe_invalid
from jaxkv.experiments.record_parts import ARMS, find_headline
from jaxkv.experiments.report_parts import Run
from jaxkv.overview.gather import Condition, list_values, name_conditions
from jaxkv.reporting.document import Block, Paragraph, Terms, Tile, Tiles
from jaxkv.reporting.format import format_number, format_percent, say_count

Cause = Mapping[str, Any]  # an entry of `diagnose`


class Status(enum.Enum):
    """What the runs are together; the value is how it is said."""

    EQUAL = "equal bit for bit"
    ROUNDING = "rounding"
    FAULT = "fault"
    INVALID = "invalid"
    OPEN = "cause open"
    NOTHING = "nothing compared yet"


VERDICTS = {
    cause.EQUAL: Status.EQUAL,
    cause.ROUNDING: Status.ROUNDING,
    cause.FAULT: Status.FAULT,
    cause.CANNOT_TELL: Status.OPEN,
}


class FirstScreen(msgspec.Struct, frozen=True):
    """What is read first: what was run and is together, what that means, how we know, and what to do.

    The share says how much has that status, empty for all. Without a valid sample there are no tiles.
    """

    ran: str
    status: Status
    means: str
    how: str
    todo: str
    share: str = ""
    tiles: tuple[Tile, ...] = ()

    def to_blocks(self) -> list[Block]:
        """As a report shows it."""
        said = f"{self.status.value}{self.share and f': {self.share}'}"
        terms = [("What this means", self.means), ("How we know", self.how), ("What to do", self.todo)]
        return [
            Paragraph(self.ran),
            Paragraph(said[0].upper() + said[1:], f"status {self.status.name.lower()}"),
            *([Tiles(self.tiles)] if self.tiles else []),
            Terms([(name, text) for name, text in terms if text]),
        ]


class _Compared(msgspec.Struct, frozen=True):
    """A run that compares the arms: its name, what it is with its summary of 'divergence', and its records."""

    name: str
    condition: Condition
    samples: Sequence[DivergenceRecord]

    @property
    def found(self) -> Mapping[str, Any]:
        return self.condition["divergence"]

    @property
    def forced(self) -> Mapping[str, Any] | None:
        return self.found.get("teacher_forced")

    @property
    def valid(self) -> list[DivergenceRecord]:
        return [sample for sample in self.samples if sample.status == "ok"]


def describe(conditions: Sequence[Condition], causes: Sequence[Cause], runs: Sequence[Run]) -> FirstScreen:
    """What runs, by their conditions and causes (`diagnose`), say together about cached against uncached decoding."""
    kept = [c for c in conditions if c.get("divergence")]
    records = {run.name: run.of(DivergenceRecord) for run in runs}
    found = [_Compared(n, c, records[c["name"]]) for n, c in zip(name_conditions(kept), kept, strict=True)]
    ran = _say_what_ran(found)
    valid = [one for one in found if one.found["status"] == "ok" and one.forced]
    if not valid:
        if broken := [one for one in found if one.found["status"] == "invalid"]:
            return FirstScreen(ran, Status.INVALID, *_describe_broken(broken))
        text = "No run here has compared cached with uncached decoding."
        return FirstScreen(ran, Status.NOTHING, text, "", "Let the run finish; the same command goes on.")
    status, share = _find_status(valid, causes)
    means = " ".join(filter(None, (_say_meaning(valid, status), _say_left_out(found))))
    how, todo = _say_evidence(valid, causes, status), _advise(valid, causes, status)
    return FirstScreen(ran, status, means, how, todo, share, _make_tiles(valid))


def _say_what_ran(found: Sequence[_Compared]) -> str:
    if not found:
        return "No run with samples of cached beside uncached decoding."
    texts = say_count(sum(one.found["problems"]["total"] for one in found), "text")
    models, devices = (list_values([one.condition for one in found], key) for key in ("model", "device"))
    what = found[0].name if len(found) == 1 else f"{len(found)} runs of {', '.join(models)}"
    where = f" on {' and '.join(devices)}" if devices else ""
    return f"{what}: {texts}, decoded with the cache and without it{where}."


def _is_equal(one: _Compared) -> bool:
    return bool(one.forced and one.forced["bit_equal"]["count"] == one.forced["tokens"])


def _find_status(valid: Sequence[_Compared], causes: Sequence[Cause]) -> tuple[Status, str]:
    """The worst of what is known of each model and precision, and how much of it that is.

    Runs of PyTorch or of one program alone have no cause told; of the latter any difference is a fault.
    """
    found = [VERDICTS[entry["verdict"]] for entry in causes]
    if not found:
        odd = [Status.FAULT if one.condition["regime"] != "plain" else Status.OPEN for one in valid]
        found = [Status.EQUAL if _is_equal(one) else status for one, status in zip(valid, odd, strict=True)]
    worst = next(s for s in (Status.FAULT, Status.OPEN, Status.ROUNDING, Status.EQUAL) if s in found)
    if worst is Status.EQUAL and not all(map(_is_equal, valid)):
        return Status.OPEN, ""  # runs without a cause differ
    counts = [f"{found.count(s)} {s.value}" for s in Status if s in found and s is not worst]
    total = f"{found.count(worst)} of {len(found)} models and precisions; {', '.join(counts)}"
    return worst, total if counts else ""


def _make_tiles(valid: Sequence[_Compared]) -> tuple[Tile, ...]:
    """The largest value with its interval, and the smallest where there are several."""
    parted = [(one.name, one.found["free_running"]["diverged"]) for one in valid if one.found["free_running"]]
    flips = [(one.name, one.forced["flips"]) for one in valid if one.forced]
    kl = [(one.name, one.forced["kl"] | {"tokens": one.forced["tokens"]}) for one in valid if one.forced]
    figures: list[tuple[str, list[tuple[str, Any]], str, Callable[[Any], str], str, Callable[[Any], str]]] = [
        ("sequences that part", parted, "rate", format_percent, " %", lambda entry: _detail(entry, "texts")),
        ("flips per token", flips, "rate", format_percent, " %", lambda entry: _detail(entry, "tokens")),
        ("mean KL, nats", kl, "mean", format_number, "", _detail_mean),
    ]
    tiles = []
    for name, entries, key, show, unit, detail in figures:
        if entries:
            (most, largest), (_, least) = (f(entries, key=lambda pair: pair[1][key]) for f in (max, min))
            ends = dict.fromkeys(entry[key] for entry in (least, largest))  # once where they are one
            where = f"most in {most}: " if len(entries) > 1 else ""
            tiles.append(Tile(name, " – ".join(map(show, ends)) + unit, where + detail(largest)))
    return tuple(tiles)


def _detail(entry: Mapping[str, Any], unit: str) -> str:
    inside = f" in {entry['clusters']} texts" if "clusters" in entry else ""
    counts = f"{entry['count']} of {entry['total']} {unit}{inside}"
    if "upper_bound" in entry:
        return f"{counts}; 95 % upper bound {format_percent(entry['upper_bound'])} % of texts"
    low, high = map(format_percent, entry["interval"])
    return f"{counts}, 95 % [{low}, {high}] %"


def _detail_mean(entry: Mapping[str, Any]) -> str:
    ends = map(format_number, entry["interval"] or ())
    interval = f", 95 % [{', '.join(ends)}]" if entry["interval"] and entry["max"] else ""
    return say_count(entry["tokens"], "token") + interval


def _count_near(samples: Iterable[DivergenceRecord]) -> int:
    """Steps at which a flip was possible: the margin is at most twice the largest difference of a logit."""
    compared = [sample.teacher_forced for sample in samples if sample.teacher_forced]
    pairs = (pair for found in compared for pair in zip(found.margin, found.max_abs, strict=True))
    return sum(moved > 0 and margin <= 2 * moved for margin, moved in pairs)


def _say_answers(samples: Sequence[DivergenceRecord]) -> str:
    """Whether texts that part give other answers; nothing where there are none to set side by side."""
    parted = [s for s in samples if s.free_running and s.free_running.diverged]
    pairs = [
        tuple(getattr(s.arms, arm).scores[find_headline(s.arms.cached.scores)].answer for arm in ARMS) for s in parted
    ]
    answered = [pair for pair in pairs if any(answer is not None for answer in pair)]
    if other := sum(a != b for a, b in answered):
        return f"In {other} of them the answer is another one too."
    same = "all" if len(answered) == len(parted) else len(answered)
    return f"In {same} of them both arms give the same answer." if answered else ""


def _say_meaning(valid: Sequence[_Compared], status: Status) -> str:
    said = _say_meaning_of_several(valid) if len(valid) > 1 else _say_meaning_of_one(valid[0])
    if status is Status.FAULT:
        said += " More than rounding is at work: these figures are not of the cache alone."
    return said


def _say_meaning_of_one(one: _Compared) -> str:
    forced, free = one.forced or {}, one.found["free_running"]
    steps = say_count(forced["tokens"], "step")
    if _is_equal(one):
        return (
            f"In {one.name} the cache changes nothing that was seen: at all {steps} of "
            f"{say_count(forced['sequences'], 'text')} both arms have the same logits, bit for bit."
        )
    begin = f"In {one.name} the arms' logits differ at {forced['tokens'] - forced['bit_equal']['count']} of {steps}"
    if free and free["diverged"]["count"]:
        parted = f"{free['diverged']['count']} of {free['diverged']['total']}"
        return f"{begin}, and {parted} texts go on in other words. {_say_answers(one.valid)}".rstrip()
    if forced["flips"]["count"]:
        return f"{begin}, and another token is the best at {forced['flips']['count']} of them; no free text parts."
    if near := _count_near(one.valid):
        return f"{begin}, but no best token changes. At {say_count(near, 'step')} two are so near that it could have."
    return (
        f"{begin}, but no best token changes, and none could: at every step the margin between the two best is over "
        "twice the largest difference of a logit."
    )


def _say_meaning_of_several(valid: Sequence[_Compared]) -> str:
    equal = [one for one in valid if _is_equal(one)]
    if len(equal) == len(valid):
        return f"In all {len(valid)} runs both arms have the same logits at every step, bit for bit."
    free = [(one.found["free_running"]["diverged"], one.name) for one in valid if one.found["free_running"]]
    parted = [(share["rate"], name) for share, name in free if share["count"]]
    said = f"In {len(parted)} of {len(valid)} runs the cache makes some texts go on in other words"
    if parted:
        rate, most = max(parted)
        said += f", most in {most} ({format_percent(rate)} % of its texts)"
    lines = [f"{said}.", f"{len(equal)} are equal bit for bit." if equal else ""]
    answers = _say_answers([sample for one in valid for sample in one.valid])
    return " ".join(filter(None, [*lines, answers.replace("of them", "of the texts that part")]))


def _say_left_out(found: Sequence[_Compared]) -> str:
    lines = []
    for one in found:
        asked, total, invalid = (one.found["problems"][part] for part in ("asked", "total", "invalid"))
        if invalid:
            said = f"{invalid} of {total} samples of {one.name} are invalid and count nowhere"
            lines.append(f"{said} ({_say_where(one)}).")
        if total < asked:
            lines.append(f"UNFINISHED: {one.name} has {total} of {asked} samples.")
    return " ".join(lines)


def _find_broken(one: _Compared) -> list[set[str]]:
    """The arms that broke off in each invalid sample.

    An arm broke off where the first fault is its own, or its text ends neither at a stop token nor at full length.
    """
    length, stops = one.condition["new_tokens"] or 0, one.condition["stop_ids"]

    def broke(tokens: Sequence[int]) -> bool:
        return len(tokens) < length and not (tokens and tokens[-1] in stops)

    return [
        {s.invalid.arm.split(" ")[0]} | {arm for arm in ARMS if broke(getattr(s.arms, arm).tokens)}
        for s in one.samples
        if s.invalid is not None
    ]


def _say_where(one: _Compared) -> str:
    broken = _find_broken(one)
    both = sum(len(arms) > 1 for arms in broken)
    if both == len(broken):
        return "in both arms"
    if both == 0 and len(arms := set.union(*broken)) == 1:
        return f"in the {arms.pop()} arm alone"
    return f"in both arms in {both}, in one arm in {len(broken) - both}"


def _describe_broken(broken: Sequence[_Compared]) -> tuple[str, str, str]:
    """Meaning, evidence and advice where no sample is valid."""
    total = sum(one.found["problems"]["total"] for one in broken)
    where = "; ".join(f"{one.name}: {_say_where(one)}" for one in broken) if len(broken) > 1 else _say_where(broken[0])
    means = (
        f"Nothing can be said of the cache: in all {say_count(total, 'sample')} a number stopped being finite, "
        f"{where}. Two arms that both hold NaN agree on nothing."
    )
    if all(len(arms) == 1 for one in broken for arms in _find_broken(one)):
        means += " That one arm stays finite is a difference by itself, of overflow or of a fault in the other arm."
    how = f"First it was {'; '.join(describe_invalid({'invalid': one.found['invalid']}) for one in broken)}."
    remedy = next((one.found["remedy"] for one in broken if "remedy" in one.found), None)
    return means, how, remedy or "Run it again with a wider `--precision`, or with `--residual=fp32`."


def _say_evidence(valid: Sequence[_Compared], causes: Sequence[Cause], status: Status) -> str:
    steps, sequences = (sum(one.forced[part] for one in valid if one.forced) for part in ("tokens", "sequences"))
    counts = f"{say_count(steps, 'step')} of {say_count(sequences, 'text')}"
    lines = [f"Both arms took the same tokens at {counts}; their logits were compared bit by bit."]
    if status is Status.EQUAL:
        bound = max(one.forced["sequences_with_other_bits"]["upper_bound"] for one in valid if one.forced)
        of = "such texts" if len(valid) == 1 else "the texts of a run"
        lines.append(f"Up to {format_percent(bound)} % of {of} may still differ (95 % bound).")
    lines += _say_controls(valid)
    if len(causes) == 1:
        lines += _say_cause(causes[0], valid)
    if causes and (odd := sum(one.condition["framework"] != "jax" and not _is_equal(one) for one in valid)):
        lines.append(
            f"{say_count(odd, 'run')} of PyTorch, whose arms have no gate, {'is' if odd == 1 else 'are'} not judged."
        )
    for verdict, said in VERDICTS.items() if len(causes) > 1 else ():
        if names := [entry["name"] for entry in causes if entry["verdict"] == verdict]:
            lines.append(f"{said.value[0].upper() + said.value[1:]}: {', '.join(names)}.")
    return " ".join(lines)


def _say_controls(valid: Sequence[_Compared]) -> list[str]:
    again = [c for one in valid for name in ("cached_rerun", "uncached_rerun") if (c := one.found["controls"][name])]
    if not again:
        return ["No arm was run against itself."]
    if odd := sum(c["bit_equal"]["count"] < c["tokens"] for c in again):
        return [f"An arm run again has other bits in {odd} of {len(again)} controls: its program is not deterministic."]
    every = {1: "the one control", 2: "both controls"}.get(len(again), f"all {len(again)} controls")
    return [f"An arm run again has the same bits in {every}."]


def _say_cause(entry: Cause, valid: Sequence[_Compared]) -> list[str]:
    through = "With both arms through one program, cache on,"
    if (aligned := entry["aligned"]) is None:
        said = "The arms were not set side by side through one program."
    elif aligned["count"]:
        said = f"{through} {aligned['count']} of {aligned['total']} texts differ: that is no other order of sums."
    else:
        said = f"{through} none of {say_count(aligned['total'], 'text')} differs."
    distances = [found for one in valid if (found := cause.read_distance(one.found)) is not None]
    left = ["That is not enough to call it rounding."] if entry["verdict"] == cause.CANNOT_TELL else []
    return [said, *(f"Distance to float64: {cause.describe_distance(found)}." for found in distances), *left]


def _advise(valid: Sequence[_Compared], causes: Sequence[Cause], status: Status) -> str:
    if status is Status.FAULT:
        return (
            "Do not read these figures as rounding. Run `--experiments=drift`, which names the first value that "
            "differs, and `--gate=full`."
        )
    if status is Status.OPEN:
        return _advise_open(causes)
    if status is Status.EQUAL:
        return "Nothing needs mending. Another batch size, length or device has other programs: run what you use."
    if any(one.found["free_running"] and one.found["free_running"]["diverged"]["count"] for one in valid):
        return (
            "Nothing is broken. Where texts must be the same, run both arms through one program "
            "(`--regime=aligned`); else compare answers over many texts, not text by text."
        )
    return "Nothing needs mending; longer texts and more of them would come nearer to a flip."


def _advise_open(causes: Sequence[Cause]) -> str:
    left = [entry for entry in causes if entry["verdict"] == cause.CANNOT_TELL]
    if not left:
        return "These arms have no gate here: run the same in JAX, where rounding and a fault can be told apart."
    names = ", ".join(entry["name"] for entry in left)
    if any(entry["odd"] for entry in left):
        return (
            f"In {names} a step is not as rounding has it, and no fault is shown. Run `--experiments=drift`, which "
            "names the first value that differs, and more problems in float64 (`--truth_problems`)."
        )
    wanted = []
    if any(entry["aligned"] is None for entry in left):
        wanted.append("the gate (`--gate=on`)")
    elif not all(entry["enough"] for entry in left):
        wanted.append("more problems, through one program too (`--num_problems`, `--gate_problems=8`)")
    if samplers := sorted({sampler for entry in left for sampler in entry["unmeasured"]}):
        flags = f"--precision=fp32 --sampler={','.join(samplers)} --truth_problems=2"
        wanted.append(f"fp32 with float64 beside the arms (`{flags}`), reported together with these")
    return f"To settle {names}, run {' and '.join(wanted)}; or the full gate (`--gate=full`)."
