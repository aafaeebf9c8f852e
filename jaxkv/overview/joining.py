"""Runs that differ in their changes of the cache alone, as several processes make them, joined into one."""

import dataclasses
import itertools
from collections.abc import Container, Sequence

from jaxkv.errors import UserError
from jaxkv.experiments.accumulation.record import AccumulationRecord
from jaxkv.experiments.experiment import CHANGING
from jaxkv.experiments.report_parts import Keyed, Run, name_of


def join_runs(name: str, runs: Sequence[Run]) -> Run:
    """One run of several that differ in the changes of the cache that they were asked for, which no config holds.

    Records come in the runs' order; those that several have, of the clean arm above all, must be the same in each.

    Raises:
      UserError: runs of other conditions, a record that is not the same in all, or clean arms that took other tokens.
    """
    first = runs[0]
    found: dict[tuple, Keyed] = {}
    clean: dict[tuple, tuple[str, str]] = {}
    whose: dict[tuple, str] = {}
    for run in runs:
        if run.run["fingerprint"] != first.run["fingerprint"]:
            raise UserError(
                f"{first.name} and {run.name} are of different conditions, versions or devices (their fingerprints "
                "differ) and cannot be joined; join runs whose lists of changes differ, and nothing else"
            )
        for record in run.records:
            key = record.key
            same = found.setdefault(key, record) == record
            if isinstance(record, AccumulationRecord) and record.status == "ok":
                # Its clean arm has no record of its own: the tokens of every record are the clean arm's.
                key = ("accumulation", record.problem)
                tokens = record.prompt_sha256, record.tokens_sha256
                same = same and clean.setdefault(key, tokens) == tokens
            if not same:
                raise UserError(
                    f"{whose[key]} and {run.name} have different records of {' '.join(map(str, key))}, so that their "
                    "clean arms are not the same; run them with one --compilation_cache"
                )
            whose.setdefault(key, run.name)
    sessions = [session for run in runs for session in run.run["sessions"]]
    timings = [timing for run in runs for timing in run.timings]
    return Run(name, {**first.run, "sessions": sessions}, list(found.values()), timings, first.flags, runs)


def join_parts(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Runs, with those joined into one that were asked for changed caches alone and differ in nothing else.

    Returns:
      The runs, and why any of them stand apart from others of their condition.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        asked = run.run["config"].get("experiments", ())
        changed = bool(asked) and set(asked) <= set(CHANGING)
        groups.setdefault(run.run["fingerprint"] if changed else f"only {run.name}", []).append(run)
    found: list[Run] = []
    notes: list[str] = []
    for members in groups.values():
        for run in _join_agreeing(members, notes):
            taken = {other.name for other in (*runs, *found)}
            found.append(dataclasses.replace(run, name=_name_parts(run, taken)) if run.parts else run)
    return found, notes


def _join_agreeing(runs: Sequence[Run], notes: list[str]) -> list[Run]:
    """The runs, each joined to the first that it agrees with."""
    found: list[Run] = []
    for run in runs:
        for place, joined in enumerate(found):
            try:
                found[place] = join_runs("", [*(joined.parts or [joined]), run])
            except UserError as error:
                notes.append(str(error).partition(";")[0])
            else:
                break
        else:
            found.append(run)
    return found


def _name_parts(run: Run, taken: Container[str]) -> str:
    """What was run, as in ``smollm2-135m-fp16-greedy-injection-gsm8k``, and what tells it from names that are taken."""
    config = run.run["config"]
    sampler = (config.get("sampling") or {}).get("sampler")
    what = [name_of(config.get("model")), name_of(config.get("precision")), sampler]
    name = "-".join(part for part in (*what, *config["experiments"], config.get("task")) if part)
    longer = f"{name}-{run.run['fingerprint'][:8]}"
    names = itertools.chain([name, longer], (f"{longer}-{number}" for number in itertools.count(2)))
    return next(one for one in names if one not in taken)
