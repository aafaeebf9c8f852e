"""Results made elsewhere (vLLM, llama.cpp, another machine) as a run directory, to be set beside ours.

    python -m jaxkv.foreign FILE                     checks the file
    python -m jaxkv.foreign FILE OUT                 checks it and writes the run directory OUT
    python -m jaxkv.foreign FILE OUT --against=RUN   also that both were asked the same: prompts equal token by token

FILE is JSONL, one problem a line, of one engine and precision::

    {"problem": 0,                                   index in the data: that of our record of the same problem
     "prompt_ids": [1, 450, ...],                    the token ids fed, or their hash instead:
     "prompt_sha256": "9e10...",                       SHA-256 of the ids as little-endian int32, as in our records
     "framework": "vllm",                            the engine
     "versions": {"vllm": "0.11.0", "torch": "2.9"}, of whatever decides numbers
     "arms": {"cached":   {"tokens": [12, 7, ...]},  ids generated, the stop token included; one arm or both
              "uncached": {"tokens": [12, 9, ...]}},
     "precision": "fp16", "device": "H100",          optional, as are
     "attention": "flash", "gold": "18",               `gold`: the right answer, for scores of `text`, and
     "sampling": {"sampler": "greedy", "temperature": 1.0, "top_k": null, "top_p": null, "seed": 0}}

An arm may also have `text` (what the tokens say), `stop` ("eos", "length" or "stop_string") and one of `top_logprobs`
and `top_logits`: for each token a list of [token id, value], the largest first, as many as the engine gives. What is
written is described in jaxkv.experiments.foreign.record. Needs no jax.
"""

from jaxkv import stopping

if __name__ == "__main__":
    stopping.watch()

import argparse
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct

from jaxkv.errors import UserError, nearest
from jaxkv.experiments.foreign.record import (
    Digest,
    ForeignRecord,
    ForeignSampling,
    Listed,
    Stop,
    Versions,
    check_listed,
)
from jaxkv.experiments.record_parts import ARMS, Sample, require, require_length
from jaxkv.files import check, decode_json, read_text
from jaxkv.provenance import environment, git_revision, hash_tokens, sha256_file
from jaxkv.records import RunDirectory, read_run
from jaxkv.reporting.metrics import free_running
from jaxkv.tasks.scoring import label_change, score

Ids = Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1)]


class _Arm(Struct, forbid_unknown_fields=True):
    """An arm of a line; `top_logprobs` and `top_logits` are one of them at most."""

    tokens: Ids
    text: str | None = None
    stop: Stop | None = None
    top_logprobs: Listed | None = None
    top_logits: Listed | None = None

    def __post_init__(self) -> None:
        require("top_logits", self.top_logprobs is None or self.top_logits is None, "beside top_logprobs")
        for name in ("top_logprobs", "top_logits"):
            if (listed := getattr(self, name)) is not None:
                require_length(name, listed, len(self.tokens))
                check_listed(listed, name)


class _Arms(Struct, forbid_unknown_fields=True):
    cached: _Arm | None = None
    uncached: _Arm | None = None

    def __post_init__(self) -> None:
        require("", bool(self.cached or self.uncached), "empty")


class _Line(Struct, forbid_unknown_fields=True):
    """A line of the file."""

    problem: Annotated[int, Meta(ge=0)]
    framework: str
    versions: Versions
    arms: _Arms
    precision: str | None = None
    device: str | None = None
    attention: str | None = None
    gold: str | None = None
    sampling: ForeignSampling | None = None
    prompt_ids: Ids | None = None
    prompt_sha256: Digest | None = None

    def __post_init__(self) -> None:
        require("prompt_sha256", not (self.prompt_ids is self.prompt_sha256 is None), "missing")
        if self.prompt_ids and self.prompt_sha256:
            fits = self.prompt_sha256 == hash_tokens(self.prompt_ids)
            require("prompt_sha256", fits, "is not that of prompt_ids")


ONE = ("framework", "versions", "precision", "device", "attention")  # a file has one of each
KINDS = ("logprobs", "logits")
# What to do about a field at fault, that of either arm by `arm`; the longest prefix counts.
REMEDIES = {
    "problem": "give the problem's index in the data, a whole number",
    "prompt_ids": "give the token ids that were fed, as whole numbers",
    "prompt_sha256": "give the SHA-256 of the prompt's ids as little-endian int32, or prompt_ids instead",
    "framework": "name the engine, e.g. vllm",
    "versions": 'give the versions of what decides numbers, e.g. {"vllm": "0.11.0"}',
    "arms": f"give {' or '.join(ARMS)} or both, each an object with tokens",
    "sampling": "give sampler, temperature, top_k, top_p and seed, or leave sampling out if it is not known",
    **dict.fromkeys(("precision", "device", "attention", "gold", "arm.text"), "give a string, or leave it out"),
    "arm.tokens": "give the generated ids as whole numbers",
    "arm.stop": f"give {', '.join(get_args(Stop))}, or leave it out",
    **dict.fromkeys(
        [f"arm.top_{kind}" for kind in KINDS],
        "list [token id, value] with the largest value first for each token, without ids of no finite value, or leave "
        "it out",
    ),
}


class _Mendable(ValueError):
    """A fault whose message tells the remedy already."""


def make_record(values: dict[str, Any]) -> dict[str, Any]:
    """The record (jaxkv.experiments.foreign.record) of one line of a file.

    Raises ValueError that starts with the dotted name of the first field at fault.
    """
    line = check(values, _Line)
    read = {
        arm: _describe_arm(found, values["arms"][arm], line.gold)
        for arm in ARMS
        if (found := getattr(line.arms, arm)) is not None
    }
    both = len(read) == 2
    changes = None
    if both and all(read[arm]["scores"] for arm in ARMS):
        changes = label_change(read["uncached"]["scores"], read["cached"]["scores"])
    return {
        "experiment": "foreign",
        "problem": line.problem,
        "key": ["foreign", line.problem],
        **{name: getattr(line, name) for name in ONE},
        "prompt_tokens": line.prompt_ids and len(line.prompt_ids),
        "prompt_sha256": hash_tokens(line.prompt_ids) if line.prompt_ids else line.prompt_sha256,
        "sampling": values.get("sampling"),  # numbers as they are written, whole ones without a point
        "arms": read,
        "free_running": free_running(read["uncached"]["tokens"], read["cached"]["tokens"]) if both else None,
        "label_change": changes,
        "shared_prefix": compare_top(read["uncached"], read["cached"]) if both else None,
    }


def _describe_arm(arm: _Arm, values: Mapping[str, Any], gold: str | None) -> dict[str, Any]:
    kind = next((kind for kind in KINDS if getattr(arm, f"top_{kind}") is not None), None)
    try:
        scores = None if arm.text is None or gold is None else score(arm.text, gold)
    except UserError as error:
        raise _Mendable(f"gold: {error}") from error
    return {
        "tokens": arm.tokens,
        "text": arm.text,
        "stop": arm.stop,
        "scores": scores,
        "top": {"kind": kind, "steps": values[f"top_{kind}"]} if kind else None,
    }


def compare_top(uncached: Mapping[str, Any], cached: Mapping[str, Any]) -> dict[str, list] | None:
    """`shared_prefix` of two arms; None unless both list values of one kind."""
    if uncached["top"] is None or cached["top"] is None or uncached["top"]["kind"] != cached["top"]["kind"]:
        return None
    pairs = list(zip(uncached["tokens"], cached["tokens"], strict=False))
    first = next((step for step, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    columns: dict[str, list] = {"flip": [], "margin": [], "max_abs": []}
    for step in range(first + 1):
        a, b = uncached["top"]["steps"][step], cached["top"]["steps"][step]
        other = dict(map(tuple, b))
        apart = [abs(value - other[token]) for token, value in a if token in other]
        columns["flip"].append(a[0][0] != b[0][0])
        columns["margin"].append(a[0][1] - a[1][1] if len(a) > 1 else None)
        columns["max_abs"].append(max(apart, default=None))
    return columns


def read_foreign(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads and checks a file. Raises UserError: one line with file, line, field and remedy."""
    lines = read_text(pathlib.Path(path).expanduser()).split("\n")
    records: list[dict[str, Any]] = []
    seen: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        values = decode_json(line, dict[str, Any], where, "write one JSON object a line, with finite numbers alone")
        try:
            record = make_record(values)
            if record["problem"] in seen:
                again = f"problem: {record['problem']} was in line {seen[record['problem']]} already; write it once"
                raise _Mendable(again)
            for name in ONE if records else ():
                if record[name] != records[0][name]:
                    before = f"{records[0][name]} in line {min(seen.values())}"
                    mixed = f"{name}: {record[name]} beside {before}; write a file for each engine and precision"
                    raise _Mendable(mixed)
        except ValueError as error:
            remedy = "" if isinstance(error, _Mendable) else _find_remedy(str(error))
            raise UserError(f"{where}, {error}{remedy}") from error
        seen[record["problem"]] = number
        records.append(record)
    if not records:
        raise UserError(f"{path} has no lines; write one JSON object a problem (python -m jaxkv.foreign --help)")
    return records


def _find_remedy(message: str) -> str:
    field, _, told = message.partition(": ")
    parent, _, name = field.rpartition(".")
    if told == "unknown field" and parent != "sampling":
        known = {"": _Line, "arms": _Arms}.get(parent, _Arm).__struct_fields__
        return f"{nearest(name, list(known))}; known: {', '.join(known)}"
    field = re.sub(rf"^arms\.({'|'.join(ARMS)})\.", "arm.", field)
    fitting = [name for name in REMEDIES if field == name or field.startswith((f"{name}.", f"{name}["))]
    return f"; {REMEDIES[max(fitting, key=len)]}" if fitting else ""


def check_against(records: Sequence[Mapping[str, Any]], run: str | os.PathLike[str]) -> int:
    """How many problems records and a run of ours share. Raises UserError on another prompt, or if there is none."""
    ours = {r.problem: r.prompt_sha256 for r in read_run(run)[1] if isinstance(r, Sample | ForeignRecord)}
    shared = [record for record in records if record["problem"] in ours]
    if not shared:
        raise UserError(f"{run} has none of these problems; check the indices, or run it on them")
    odd = [str(record["problem"]) for record in shared if record["prompt_sha256"] != ours[record["problem"]]]
    if odd:
        raise UserError(
            f"prompt_sha256: other prompts than in {run} at {len(odd)} of {len(shared)} problems (the first is "
            f"{odd[0]}); feed the same token ids, BOS included"
        )
    return len(shared)


def write_foreign(path: str | os.PathLike[str], out: str | os.PathLike[str], records: Sequence[dict[str, Any]]) -> int:
    """Writes records of the file at `path` into the run directory `out`, or what is missing of them, and says how many.

    Raises UserError if the directory belongs to another file or cannot be written.
    """
    config = {
        "experiments": ["foreign"],
        **{name: records[0][name] for name in ONE},
        "file": sha256_file(path),
        "num_problems": len(records),
    }
    with RunDirectory.open(out, config, provenance=environment() | {"git": git_revision()}) as run:
        done = run.done_keys()
        missing = [record for record in records if tuple(record["key"]) not in done]
        for record in missing:
            run.append(record)
    return len(missing)


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxkv.foreign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", help="JSON lines, one problem a line")
    parser.add_argument("out", nargs="?", metavar="OUT", help="run directory to write; without it FILE is only checked")
    parser.add_argument("--against", metavar="RUN", help="a run of ours that was asked the same")
    options = parser.parse_args(arguments)
    try:
        records = read_foreign(options.file)
        arms = " and ".join(arm for arm in ARMS if any(arm in record["arms"] for record in records))
        print(f"{options.file}: {len(records)} problems by {records[0]['framework']}, {arms}")
        if options.against:
            print(f"the prompts of {check_against(records, options.against)} problems are those of {options.against}")
        if options.out:
            print(f"{options.out}: {write_foreign(options.file, options.out, records)} records added")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
