"""Run directories: resumable records, provenance, and the schema of a sample. Imports neither jax nor flax.

A run directory holds

* ``run.flags``: an absl flagfile that replays the run;
* ``run.json``: ``{"format", "config", "fingerprint", "sessions", "samples"}``. ``config`` is what decides the numbers;
  a directory belongs to one config for good. ``samples`` is the size and hash of what samples.jsonl had when run.json
  was written, which is every half minute and when a process closes the directory: of a run that was killed it is an
  earlier part of the file. ``sessions`` has one entry for each process that opened the directory, with
  ``started`` (UTC) and the provenance it recorded (git revision, versions, device, XLA flags, hashes, sampling);
* ``samples.jsonl``: one record a line, append-only, each with a natural ``key``;
* ``tokens.json``: the text of each token of the samples, for reports (jaxkv.pieces);
* ``timing.jsonl``: timings, apart from the samples, so that the samples of a run that was killed and resumed are byte
  for byte those of an undisturbed run;
* ``lock``: locked while a process has the directory open.

JSON is strict: a non-finite float is written as the string "nan", "inf" or "-inf", which ``float()`` turns back.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union

import msgspec
import numpy as np

from jaxkv import run_file
from jaxkv.errors import UserError
from jaxkv.experiments.experiment import EXPERIMENTS
from jaxkv.experiments.record_parts import Record
from jaxkv.files import check, decode_json
from jaxkv.run_file import FORMAT, check_samples, read_run_file
from jaxkv.writing import Busy, Lines, is_locked, new_directories, read_complete, take_lock
from jaxkv.writing import write_atomically as write_atomically

Key = tuple[str | int, ...]
SEALING = 30.0  # seconds after which run.json learns what samples.jsonl has grown to
# What a process that was killed before it wrote run.json, or that failed, leaves in a directory.
LEFTOVERS = ("lock", "sweep.lock", "traceback.txt", "run.*.tmp", "overview.*.tmp", ".probe.*")
# Fields of a session that say what it did, not by what: resuming a run changes them.
OF_ONE_SESSION = ("started", "done_before", "gate", "asked", "remedy", "totals", "seconds")
AGAIN = "put back a copy, or delete the directory to run it again"


def to_plain(value: Any) -> Any:
    """Returns `value` in JSON's own types: numpy and tuples unpacked, non-finite floats as "nan", "inf" or "-inf"."""
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, pathlib.PurePath):
        return str(value)
    return value


def to_line(record: Mapping[str, Any]) -> bytes:
    """Returns the record as one line of strict JSON, newline included."""
    return json.dumps(to_plain(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def fingerprint(config: Mapping[str, Any]) -> str:
    """SHA-256 of the config as canonical JSON; the order of keys and tuple against list make no difference."""
    return run_file.fingerprint(to_plain(config))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one level with dotted keys: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class OtherRecord(msgspec.Struct, frozen=True):
    """A record of an experiment that this version does not know: no more than its key is read."""

    key: Annotated[tuple[str | int, ...], msgspec.Meta(min_length=1)]
    experiment: str = ""


AnyRecord = Record | OtherRecord
RECORDS = {one.name: one.record for one in EXPERIMENTS.values()}
_KNOWN: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Union[tuple(RECORDS.values())])  # noqa: UP007


def to_record(values: Mapping[str, Any]) -> AnyRecord:
    """A record of plain values as one of its experiment's type.

    Raises:
      ValueError: it is none; starts with the dotted name of a field at fault.
    """
    other = check(values, OtherRecord)
    return check(values, RECORDS[other.experiment]) if other.experiment in RECORDS else other


def read_record(line: bytes, where: str) -> AnyRecord:
    """A line of samples.jsonl. Raises UserError with the field at fault."""
    try:
        return _KNOWN.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # say what, by name
        values = decode_json(line, dict[str, Any], where, AGAIN)
        try:
            return to_record(values)
        except ValueError as error:
            raise UserError(f"{where}: {error}; {AGAIN}") from error


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The JSON objects in the complete lines of a file; none if there is no file.

    Raises:
      UserError: a complete line is not a JSON object, or the file cannot be read.
    """
    return [decode_json(line, dict[str, Any], where, AGAIN) for where, line in _number_lines(read_complete(path), path)]


def _number_lines(lines: bytes, path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(lines.split(b"\n")[:-1], start=1):
        yield f"{path}, line {number}", line


def _read_samples(run: Mapping[str, Any], directory: pathlib.Path) -> dict[Key, AnyRecord]:
    """The records of samples.jsonl by key, in order.

    Raises:
      UserError: a file that was changed, a line that is no record of its type, or a key twice.
    """
    path = directory / "samples.jsonl"
    lines = read_complete(path)
    check_samples(run, lines, directory)
    records: dict[Key, AnyRecord] = {}
    for where, line in _number_lines(lines, path):
        record = read_record(line, where)
        if record.key in records:
            lines_of = f"{list(records).index(record.key) + 1} and {len(records) + 1}"
            raise UserError(f"{path} has key {list(record.key)} twice, in lines {lines_of}; {AGAIN}")
        records[record.key] = record
    return records


def read_run(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[AnyRecord]]:
    """Reads a run directory without locking or changing it, e.g. for a report on a run that still goes on.

    Returns:
      The content of run.json and the complete records of samples.jsonl.

    Raises:
      UserError: not a run directory, another format, or one whose files are corrupt or were changed.
    """
    directory = pathlib.Path(path)
    run = read_run_file(directory)  # before the samples: they may grow meanwhile
    if run is None:
        raise UserError(f"{directory} is not a run directory (it has no run.json); check the path")
    return run, list(_read_samples(run, directory).values())


def check_place(directory: pathlib.Path) -> None:
    """Whether a directory is there for a run: new, empty, or a run directory.

    Raises:
      UserError: it is a file, or holds files that are not ours: nothing of the user's is overwritten.
      Busy: another process has it open.
    """
    if not directory.is_dir():
        if directory.exists():
            raise UserError(f"{directory} is a file, not a directory; choose another --out")
        return
    if is_locked(directory):
        raise Busy(f"another process is at work in {directory}; wait for it to end or choose another --out")
    if not (directory / "run.json").exists() and (odd := find_foreign(directory)):
        raise UserError(f"{directory} is no run directory and holds {odd}; choose another --out, or move what is there")


def find_foreign(directory: pathlib.Path) -> str | None:
    """The name of something in a directory that no run of ours leaves there before it has begun; None without."""
    names = (place.name for place in sorted(directory.iterdir()) if not any(map(place.match, LEFTOVERS)))
    return next(names, None)


@dataclasses.dataclass
class RunDirectory:
    """An open run directory. Use as a context manager; made by `RunDirectory.open`."""

    path: pathlib.Path
    run: dict[str, Any]
    _keys: set[Key]
    _samples: Lines
    _timing: Lines
    _held: contextlib.ExitStack
    _sealed: float = dataclasses.field(default_factory=time.monotonic)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        flags_text: str | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> "RunDirectory":
        """Creates a run directory, or resumes one of the same config.

        Args:
          path: the directory; made with its parents if missing.
          config: all that decides the numbers, checkpoint and data hashes included, as JSON values. A directory that
            was begun with another config is refused.
          flags_text: a flagfile that replays the run, or None to write none.
          provenance: what is known of this process; `record_provenance` adds to it later.

        Raises:
          UserError: another config, another process at work in the directory, corrupt records, or not writable.
        """
        directory, ours = pathlib.Path(path), to_plain(config)

        def take_back(fault: object, *_: object) -> None:
            if fault is not None and not (directory / "run.json").exists():
                (directory / "lock").unlink(missing_ok=True)

        with contextlib.ExitStack() as held:
            held.enter_context(new_directories(directory))
            check_place(directory)
            held.enter_context(take_lock(directory, "lock"))
            held.push(take_back)
            for leftover in directory.glob("run.*.tmp"):
                leftover.unlink(missing_ok=True)
            run = read_run_file(directory)
            if run is None:
                run = {"format": FORMAT, "config": ours, "fingerprint": fingerprint(ours), "sessions": []}
            elif run["fingerprint"] != fingerprint(ours):
                raise UserError(
                    f"{directory} was begun with another configuration: {describe_difference(run['config'], ours)};"
                    " choose another --out or delete that directory"
                )
            keys = set(_read_samples(run, directory))
            started = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            run["sessions"].append({"started": started, "done_before": len(keys)} | to_plain(provenance or {}))
            write_atomically(directory / "run.json", _pretty(run))
            if flags_text is not None and not (directory / "run.flags").exists():
                write_atomically(directory / "run.flags", flags_text)
            samples, timing = Lines(directory / "samples.jsonl"), Lines(directory / "timing.jsonl")
            return cls(directory, run, keys, samples, timing, held.pop_all())

    def record_provenance(self, provenance: Mapping[str, Any]) -> None:
        """Adds fields to this session's entry in run.json, e.g. once device and checkpoint are known."""
        self.run["sessions"][-1] |= to_plain(provenance)
        self._write()

    def _write(self) -> None:
        """Writes run.json, with what samples.jsonl is now."""
        self.run["samples"] = self._samples.seal()
        write_atomically(self.path / "run.json", _pretty(self.run))
        self._sealed = time.monotonic()

    def done_keys(self) -> set[Key]:
        """Keys of the records on disk, as tuples."""
        return set(self._keys)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one record; it is on disk when this returns.

        Raises:
          ValueError: the record breaks its experiment's schema, or its key is there already.
          UserError: disk full or not writable; the records so far stay whole.
        """
        plain = to_plain(record)
        key = to_record(plain).key
        if key in self._keys:
            raise ValueError(f"key: {list(key)} is recorded already")
        self._samples.append(to_line(plain))
        self._keys.add(key)
        if time.monotonic() - self._sealed > SEALING:
            self._write()

    def append_timing(self, timing: Mapping[str, Any]) -> None:
        """Adds one line to timing.jsonl. A kill between the two files may lose or repeat a timing, never a sample."""
        self._timing.append(to_line(timing))

    def read(self) -> list[AnyRecord]:
        """The records on disk, oldest first."""
        path = self.path / "samples.jsonl"
        return [read_record(line, where) for where, line in _number_lines(read_complete(path), path)]

    def close(self) -> None:
        """Writes run.json, closes the files and lets go of the lock."""
        try:
            self._write()
        finally:
            self._samples.close()
            self._timing.close()
            self._held.close()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # What went wrong before says more than that run.json could not be written either.
        with contextlib.suppress(UserError) if kind else contextlib.nullcontext():
            self.close()


def _pretty(values: Mapping[str, Any]) -> str:
    return json.dumps(to_plain(values), allow_nan=False, indent=2) + "\n"


def describe_difference(stored: Mapping[str, Any], ours: Mapping[str, Any], most: int = 5) -> str:
    """Names the keys in which two configs differ, e.g. ``precision is fp16 there, bf16 here``."""
    there, here = flatten(to_plain(stored)), flatten(to_plain(ours))
    names = sorted(name for name in there.keys() | here.keys() if there.get(name, "unset") != here.get(name, "unset"))

    def show(values: dict[str, Any], name: str) -> str:
        text = str(values[name]) if name in values else "unset"
        return text if len(text) <= 40 else text[:37] + "..."

    parts = [f"{name} is {show(there, name)} there, {show(here, name)} here" for name in names[:most]]
    return ", ".join(parts + ([f"and {len(names) - most} more"] if len(names) > most else []))
