"""What reports of different experiments share: a run as it was read, picking out samples, saying how many there are."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from msgspec.structs import asdict

from jaxkv.experiments import law
from jaxkv.experiments.injection.record import InjectionRecord
from jaxkv.experiments.perplexity.record import PerplexityRecord
from jaxkv.experiments.record_parts import CacheSize, Comparison, Invalid, Record, Sample, Saturated
from jaxkv.reporting.document import Block, Brief
from jaxkv.reporting.format import format_mean, format_number
from jaxkv.reporting.shares import clustered_share, describe_column, share

S = TypeVar("S", bound=Sample)
Plain = dict[str, Any]
Summary = Mapping[str, Any]
R = TypeVar("R", bound=Record)


class Keyed(Protocol):
    """A record, of an experiment that this version knows or not."""

    @property
    def key(self) -> tuple[str | int, ...]: ...

    @property
    def experiment(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory as it was read.

    Attributes:
      name: of the directory, with as much of its path as tells it from the others.
      run: content of run.json.
      records: samples.
      timings: lines of timing.jsonl.
      flags: content of run.flags, empty if there is none.
      parts: runs that it was joined of.
      pieces: text of each token (jaxkv.pieces); empty where it was not kept.
    """

    name: str
    run: Mapping[str, Any]
    records: Sequence[Keyed]
    timings: Sequence[Mapping[str, Any]] = ()
    flags: str = ""
    parts: Sequence["Run"] = ()
    pieces: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def of(self, kind: type[R]) -> list[R]:
        """The records of one experiment, by their type."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def experiments(self) -> set[str]:
        """Names of the experiments that it has records of."""
        return {record.experiment for record in self.records}


@dataclasses.dataclass(frozen=True)
class Report:
    """What is said of an experiment, from its records alone.

    Attributes:
      title: of its section.
      summarize: run -> its summary.
      write: summary -> its section as blocks; headings from level 3 on.
      draw: runs, as in the summary of a study -> figures of them all.
    """

    title: str
    summarize: Callable[[Run], Summary]
    write: Callable[[Summary], list[Block]]
    draw: Callable[[Summary], Sequence[Block]] = lambda study: ()


def collect(records: Sequence[object], kind: type[S]) -> list[S]:
    """The records of an experiment in order of their problems."""
    return sorted((r for r in records if isinstance(r, kind)), key=lambda sample: sample.problem)


def begin_summary(records: Sequence[object], run: Mapping[str, Any], kind: type[S]) -> tuple[Plain, list[S], list[S]]:
    """What every summary begins with, all samples in order of their problems, and the valid ones.

    Records of another `kind` are left out, and an invalid sample enters no figure but the count of them. `status` is
    'ok', 'invalid' (no sample is valid) or 'empty'; the fingerprint of `run` (run.json) ties the summary to it.
    """
    samples = collect(records, kind)
    valid = [sample for sample in samples if sample.status == "ok"]
    head = {
        "experiment": str(kind.__struct_config__.tag),
        "fingerprint": run.get("fingerprint"),
        "status": "ok" if valid else "invalid" if samples else "empty",
        "problems": count_problems(samples, run),
        "invalid": group_invalid(samples),
    }
    return head, samples, valid


def count_problems(samples: Sequence[Sample], run: Mapping[str, Any]) -> dict[str, int]:
    """How many problems were asked for, have a sample, and have no invalid one."""
    problems = {s.problem for s in samples}
    broken = {s.problem for s in samples if s.invalid is not None}
    asked = run.get("config", {}).get("num_problems", len(problems))
    return {"asked": asked, "total": len(problems), "ok": len(problems - broken), "invalid": len(broken)}


def say_nothing(summary: Summary, so: str) -> list[str]:
    """Of a summary without a valid sample, that there is none, and what follows from it; nothing of others."""
    kinds = {"empty": "no sample yet", "invalid": "no sample with finite numbers"}
    return [f"There is {kinds[summary['status']]}, so {so}."] if summary["status"] in kinds else []


def say_invalid(group: Summary) -> str:
    """Where the numbers of a group of `group_invalid` broke off."""
    return f"{group['samples']} samples invalid at {group['reason']} ({group['arm']}, {group['value']})"


def average_caches(caches: Sequence[CacheSize]) -> dict[str, float] | None:
    """Means over caches; None of no cache."""
    if not caches:
        return None
    return {part: float(np.mean([getattr(c, part) for c in caches])) for part in CacheSize.__struct_fields__}


def add_saturated(found: Iterable[Saturated | None]) -> dict[str, int] | None:
    """Sums over those that are there; None if none is."""
    kept = [asdict(counts) for counts in found if counts]
    return {part: sum(counts[part] for counts in kept) for part in kept[0]} if kept else None


def say_odd(name: str, invalid: Sequence[Summary], packed: Sequence[float], saturated: Summary | None) -> list[str]:
    """What is odd about a change of the cache or a quantizer: invalid samples, nothing packed, elements beyond format.

    `packed` are its shares of packed elements, none where nothing is quantized; the rest is of `group_invalid` and
    `add_saturated`.
    """
    lines = [f"{name}: {say_invalid(group)}; counted nowhere." for group in invalid]
    if packed and not any(packed):
        lines.append(f"{name} packed nothing: its windows, or layers that it leaves alone, hold the whole text.")
    if saturated and (count := saturated["k"] + saturated["v"]):
        lines.append(f"{name}: {count} of {saturated['elements']} elements lie outside its format.")
    return lines


def say_change(entry: Summary) -> list[str]:
    """`say_odd` of a change with its `spec` and mean `cache`."""
    quantized = entry["spec"] is not None and entry["spec"]["family"] == "quant" and entry["cache"]
    packed = [entry["cache"]["packed"]] if quantized else []
    return say_odd(f"`{entry['change']}`", entry["invalid"], packed, entry["saturated"])


def describe_problems(summary: Mapping[str, Any]) -> str:
    """The header of a table."""
    problems = summary["problems"]
    text = f"{problems['ok']} of {problems['total']} problems valid"
    missing = problems["asked"] - problems["total"]
    unfinished = [f"{missing} of {problems['asked']} problems have no record yet"] if missing > 0 else []
    if summary.get("samples_missing"):
        unfinished.append(f"{summary['samples_missing']} samples are missing")
    return text + (f"; UNFINISHED: {', '.join(unfinished)}" if unfinished else "")


def show_mean(entry: Summary) -> Brief:
    """A mean; its interval where there is room."""
    return Brief(format_mean(entry), format_number(entry["mean"]))


def say_few(problems: int) -> list[str]:
    """What few problems mean for the intervals."""
    if problems == 1:
        return ["With one problem there are no intervals."]
    return [f"An interval over {problems} problems is wide and rough."] if problems < 20 else []


def list_unfinished(
    samples: Sequence[InjectionRecord | PerplexityRecord], run: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Changes of the cache that lack samples of problems which have some, how many they have and how many were `asked`.

    The sessions of `run` (run.json) say what they asked for; of older runs only what was begun is known.
    """
    problems = {s.problem for s in samples}
    name = samples[0].experiment if samples else ""
    sessions = [session.get("asked", {}).get(name, ()) for session in run.get("sessions", ())]
    wanted = [(change, seed) for session in sessions for change, seed in session]
    wanted += [(s.change, s.seed) for s in samples]
    seeds = Counter(change for change, _ in dict.fromkeys(wanted))
    have = Counter(s.change for s in samples)
    asked = {change: len(problems) * count for change, count in seeds.items()}
    return [{"change": c, "samples": have[c], "asked": asked[c]} for c in asked if have[c] < asked[c]]


def say_unfinished(unfinished: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each of `list_unfinished`."""
    return [f"UNFINISHED: `{u['change']}` has {u['samples']} of {u['asked']} samples." for u in unfinished]


TIES_LISTED = 50


def summarize_comparisons(pairs: Sequence[tuple[int, Comparison | None]]) -> dict[str, Any] | None:
    """Figures of one comparison over all problems that have it; None if none has a token of it."""
    kept = [(problem, comparison) for problem, comparison in pairs if comparison and comparison.flip]
    if not kept:
        return None
    sizes = [len(comparison.flip) for _, comparison in kept]

    def column(name: str) -> list[np.ndarray]:
        return [np.asarray(getattr(comparison, name), np.float64) for _, comparison in kept]

    flips, margins = column("flip"), column("margin")
    ties = [
        {"problem": problem, "step": int(step), "flip": bool(flip[step])}
        for (problem, _), margin, flip in zip(kept, margins, flips, strict=True)
        for step in np.flatnonzero(margin == 0)
    ]
    return {
        "sequences": len(kept),
        "tokens": sum(sizes),
        "flips": clustered_share([int(f.sum()) for f in flips], sizes),
        "sequences_with_flip": share(sum(bool(f.any()) for f in flips), len(kept)),
        "bit_equal": clustered_share([int(c.sum()) for c in column("bit_equal")], sizes),
        "sequences_with_other_bits": share(sum(not c.all() for c in column("bit_equal")), len(kept)),
        "law": law.check_law([comparison for _, comparison in kept]),
        "ties": {"count": len(ties), "flips": sum(tie["flip"] for tie in ties), "listed": ties[:TIES_LISTED]},
        **{name: describe_column(column(name), sizes) for name in ("kl", "kl_reverse", "js", "max_abs", "mean_abs")},
    }


def group_invalid(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Invalid samples by where their numbers broke, with how many there are and which."""
    groups: dict[tuple[str, int, str, str], list[tuple[int, Invalid]]] = {}
    for sample in samples:
        if (why := sample.invalid) is not None:
            layer = -1 if why.layer is None else why.layer
            groups.setdefault((why.op, layer, why.arm, why.value), []).append((sample.problem, why))
    return [
        {
            "reason": op if layer < 0 else f"{op}, layer {layer}",
            "arm": arm,
            "value": value,
            "samples": len(members),
            "first_position": min(why.position for _, why in members),
            "problems": [problem for problem, _ in members][:TIES_LISTED],
        }
        for (op, layer, arm, value), members in sorted(groups.items())
    ]


def name_of(value: Any) -> str | None:
    """The name of a model or precision, which is a mapping, a string or missing."""
    return value.get("name") if isinstance(value, Mapping) else value


def base_precision(condition: Mapping[str, Any]) -> str | None:
    """'fp16' of 'fp16+residual=fp32'."""
    name = condition["precision"]
    return name.split("+")[0] if name else None
