"""Run directories: resumable records and their provenance. Imports neither jax nor flax. A run directory holds

* ``run.flags``: an absl flagfile that replays the run;
* ``run.json``: ``config`` is what decides the numbers; a directory belongs to one for good. ``samples`` is the size and
  hash of what samples.jsonl had when run.json was written, which is every half minute and when a process closes the
  directory: of a run that was killed it is an earlier part of the file. ``sessions`` has one entry for each process
  that opened the directory, with ``started`` (UTC) and its provenance (revision, versions, device, XLA flags, hashes);
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
import hashlib
import json
import math
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union

import msgspec
import numpy as np

from jaxkv.errors import UserError
from jaxkv.experiments.experiment import EXPERIMENTS
from jaxkv.experiments.record_parts import Count, Record
from jaxkv.files import Path, check, convert, decode_json
from jaxkv.writing import Busy, Lines, is_locked, new_directories, read_complete, take_lock
from jaxkv.writing import write_atomically as write_atomically

Key = tuple[str | int, ...]
Values = Mapping[str, Any]
SEALING = 30.0  # seconds after which run.json learns what samples.jsonl has grown to
# What a process that was killed before it wrote run.json, or that failed, leaves in a directory.
LEFTOVERS = ("lock", "sweep.lock", "traceback.txt", "run.*.tmp", "overview.*.tmp", ".probe.*")
# Fields of a session that say what it did, not by what: resuming a run changes them.
OF_ONE_SESSION = ("started", "done_before", "gate", "asked", "remedy", "totals", "seconds")
FORMAT = 1
_SCALARS = frozenset({str, int, bool, type(None)})
AGAIN = "put back a copy, or delete the directory to run it again"


def to_plain(value: Any) -> Any:
    """Returns `value` in JSON's own types: numpy and tuples unpacked, non-finite floats as "nan", "inf" or "-inf"."""
    kind = type(value)
    if kind in _SCALARS or (kind is float and math.isfinite(value)):  # nearly all of a record
        return value
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, pathlib.PurePath) else value


def fingerprint(config: Values) -> str:
    """SHA-256 of a config as canonical JSON; the order of keys and tuple against list make no difference."""
    text = json.dumps(to_plain(config), allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _dump(value: Any, **style: Any) -> str:
    return json.dumps(to_plain(value), allow_nan=False, **style) + "\n"


def to_line(record: Values) -> bytes:
    """Returns the record as one line of strict JSON, newline included."""
    return _dump(record, separators=(",", ":")).encode()


def flatten(values: Values, prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one level with dotted keys: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# What readers ask of the fields of run.json; a config and a session may hold more.
Names = dict[str, str | None]


def _struct(*fields: tuple[Any, ...], **optional: Any) -> Any:
    """A struct: fields as msgspec has them, and the type of each field that may be missing or null."""
    return msgspec.defstruct("Part", [*fields, *((name, kind | None, None) for name, kind in optional.items())])


class _Gate(msgspec.Struct):
    passed: bool | None
    why: str = ""
    problems: Count | None = None
    steps: Count | None = None
    tile: Count | None = None
    plain: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.why and None in (self.problems, self.steps, self.tile):
            raise ValueError("a gate has problems, steps and tile, or says why there was none")


class _Session(msgspec.Struct):
    started: str = ""
    git: str | None = None
    packages: Names | None = None
    variables: Names | None = None
    checkpoint: dict[str, Any] | None = None
    gate: _Gate | None = None
    asked: dict[str, list[tuple[str, int]]] = {}


_CONFIG = _struct(
    ("experiments", list[str], []), ("num_problems", Count, 0),
    framework=str, attention=str, task=str, held=Names, versions=Names, checkpoint=dict[str, Any],
    data=dict[str, Any] | str,
    model=_struct(name=str, family=str, num_layers=Count, num_query_heads=Count, num_kv_heads=Count) | str,
    precision=_struct(name=str, accumulation=str) | str,
    sampling=_struct(sampler=str, temperature=float, top_k=Count, top_p=float, seed=int),
    decoding=_struct(new_tokens=Count, batch_size=Count, padding=str, tile=Count),
    device=_struct(kind=str, platform=str) | str,
)  # fmt: skip
_FORMAT = _struct(("format", int))
# How much of samples.jsonl a process knew when it wrote run.json last: that prefix stays for good.
_SAMPLES = _struct(("bytes", Count), ("sha256", Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]))
_RUN_FILE = _struct(("config", _CONFIG), ("fingerprint", str), ("sessions", list[_Session]), samples=_SAMPLES)


class OtherRecord(msgspec.Struct, frozen=True):
    """A record of an experiment that this version does not know: no more than its key is read."""

    key: Annotated[tuple[str | int, ...], msgspec.Meta(min_length=1)]
    experiment: str = ""


AnyRecord = Record | OtherRecord
RECORDS = {one.name: one.record for one in EXPERIMENTS.values()}
_KNOWN: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Union[tuple(RECORDS.values())])  # noqa: UP007


def to_record(values: Values) -> AnyRecord:
    """A record of plain values as one of its experiment's type. Raises ValueError as `jaxkv.files.check`."""
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
    """The JSON objects in the complete lines of a file, none if there is no file. Raises UserError as `decode_json`."""
    return [decode_json(line, dict[str, Any], where, AGAIN) for where, line in _number_lines(read_complete(path), path)]


def _number_lines(lines: bytes, path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(lines.split(b"\n")[:-1], start=1):
        yield f"{path}, line {number}", line


def read_run_file(directory: pathlib.Path) -> dict[str, Any] | None:
    """The content of a directory's run.json, None if it has none.

    Raises UserError if it cannot be read, is of another format, has a field of another type, or a config that is not
    the one of its fingerprint.
    """
    path = directory / "run.json"
    remedy = "put back a copy, or delete the directory or choose another --out"
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    run = decode_json(content, dict[str, Any], path, remedy)
    found = convert(run, _FORMAT, path, remedy).format
    if found != FORMAT:
        raise UserError(f"{path} has format {found}, this jaxkv reads {FORMAT}; choose another --out")
    convert(run, _RUN_FILE, path, remedy)
    if fingerprint(run["config"]) != run["fingerprint"]:
        raise UserError(f"{path}: the config is not the one of its fingerprint, so it was changed by hand; {remedy}")
    return run


def _read_samples(run: Values, directory: pathlib.Path) -> dict[Key, AnyRecord]:
    """The records of samples.jsonl by key, in order.

    Raises UserError unless they begin with those that run.json knows of (older runs know of none), and on a line that
    is no record of its type, or a key twice.
    """
    path, lines = directory / "samples.jsonl", read_complete(directory / "samples.jsonl")
    seal = run.get("samples") or {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    known = seal["bytes"]
    if len(lines) < known:
        raise UserError(f"{path} is missing or cut: it has {len(lines)} bytes, and run.json knows of {known}; {AGAIN}")
    if hashlib.sha256(lines[:known]).hexdigest() != seal["sha256"]:
        raise UserError(
            f"{path} was changed by hand: its first {known} bytes have another hash than in run.json; {AGAIN}"
        )
    records: dict[Key, AnyRecord] = {}
    for where, line in _number_lines(lines, path):
        record = read_record(line, where)
        if record.key in records:
            lines_of = f"{list(records).index(record.key) + 1} and {len(records) + 1}"
            raise UserError(f"{path} has key {list(record.key)} twice, in lines {lines_of}; {AGAIN}")
        records[record.key] = record
    return records


def read_run(path: Path) -> tuple[dict[str, Any], list[AnyRecord]]:
    """The content of run.json and the complete records of samples.jsonl, e.g. for a report on a run that still goes on.

    Locks and changes nothing. Raises UserError if it is not a run directory, of another format, corrupt or changed.
    """
    directory = pathlib.Path(path)
    run = read_run_file(directory)  # before the samples: they may grow meanwhile
    if run is None:
        raise UserError(f"{directory} is not a run directory (it has no run.json); check the path")
    return run, list(_read_samples(run, directory).values())


def check_place(directory: pathlib.Path) -> None:
    """Raises UserError unless a directory is there for a run: new, empty, or a run directory; Busy if it is open.

    Nothing of the user's is overwritten.
    """
    if not directory.is_dir():
        if directory.exists():
            raise UserError(f"{directory} is a file, not a directory; choose another --out")
        return
    if is_locked(directory):
        raise Busy(f"another process is at work in {directory}; wait for it to end or choose another --out")
    refuse_foreign(directory, "run directory", "run.json")


def refuse_foreign(directory: pathlib.Path, what: str, *marks: str) -> None:
    """Raises UserError on what no run of ours leaves in a directory before it has one of the marks."""
    names = (place.name for place in sorted(directory.iterdir()) if not any(map(place.match, LEFTOVERS)))
    if not any((directory / mark).exists() for mark in marks) and (odd := next(names, None)):
        raise UserError(f"{directory} is no {what} and holds {odd}; choose another --out, or move what is there")


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
        cls, path: Path, config: Values, flags_text: str | None = None, provenance: Values | None = None
    ) -> "RunDirectory":
        """Creates a run directory with its parents, or resumes one of the same config.

        `config` has all that decides the numbers, hashes of checkpoint and data included; `flags_text` is a flagfile
        that replays the run, and `provenance` what is known of this process. Raises UserError on another config,
        another process at work in the directory, corrupt records, or what cannot be written.
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
            write_atomically(directory / "run.json", _dump(run, indent=2))
            if flags_text is not None and not (directory / "run.flags").exists():
                write_atomically(directory / "run.flags", flags_text)
            samples, timing = Lines(directory / "samples.jsonl"), Lines(directory / "timing.jsonl")
            return cls(directory, run, keys, samples, timing, held.pop_all())

    def record_provenance(self, provenance: Values) -> None:
        """Adds fields to this session's entry in run.json, e.g. once device and checkpoint are known."""
        self.run["sessions"][-1] |= to_plain(provenance)
        self._write()

    def _write(self) -> None:
        """Writes run.json, with what samples.jsonl is now."""
        self.run["samples"] = self._samples.seal()
        write_atomically(self.path / "run.json", _dump(self.run, indent=2))
        self._sealed = time.monotonic()

    def done_keys(self) -> set[Key]:
        """Keys of the records on disk, as tuples."""
        return set(self._keys)

    def append(self, record: Values) -> None:
        """Adds one record; it is on disk when this returns.

        Raises ValueError if it breaks its experiment's schema or its key is there already, UserError if the disk is
        full or not writable; the records so far stay whole.
        """
        plain = to_plain(record)
        key = to_record(plain).key
        if key in self._keys:
            raise ValueError(f"key: {list(key)} is recorded already")
        self._samples.append(to_line(plain))
        self._keys.add(key)
        if time.monotonic() - self._sealed > SEALING:
            self._write()

    def append_timing(self, timing: Values) -> None:
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


def describe_difference(stored: Values, ours: Values, most: int = 5) -> str:
    """Names the keys in which two configs differ, e.g. ``precision is fp16 there, bf16 here``."""
    there, here = flatten(to_plain(stored)), flatten(to_plain(ours))
    pairs = {name: (there.get(name, "unset"), here.get(name, "unset")) for name in sorted(there.keys() | here.keys())}

    def show(value: Any) -> str:
        text = str(value)
        return text if len(text) <= 40 else text[:37] + "..."

    found = [f"{name} is {show(a)} there, {show(b)} here" for name, (a, b) in pairs.items() if a != b]
    return ", ".join(found[:most] + ([f"and {len(found) - most} more"] if len(found) > most else []))
