"""Run directories: resumable records, provenance, and the schema of a sample. Imports neither jax nor flax.

A run directory holds

* ``run.flags``: an absl flagfile that replays the run;
* ``run.json``: ``{"format", "config", "fingerprint", "sessions"}``. ``config`` is what decides the numbers; a directory
  belongs to one config for good. ``sessions`` has one entry for each process that opened the directory, with
  ``started`` (UTC) and the provenance it recorded (git revision, versions, device, XLA flags, hashes, sampling);
* ``samples.jsonl``: one record a line, append-only, each with a natural ``key``;
* ``timing.jsonl``: timings, apart from the samples, so that the samples of a run that was killed and resumed are byte
  for byte those of an undisturbed run;
* ``lock``: locked while a process has the directory open.

JSON is strict: a non-finite float is written as the string "nan", "inf" or "-inf", which ``float()`` turns back.
"""

import contextlib
import dataclasses
import datetime
import errno
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.errors import UserError
from jaxkv.schema_accumulation import validate_accumulation
from jaxkv.schema_attribution import validate_attribution
from jaxkv.schema_doctor import validate_doctor
from jaxkv.schema_drift import validate_drift
from jaxkv.schema_foreign import validate_foreign
from jaxkv.schema_injection import validate_injection
from jaxkv.schema_mitigations import validate_mitigation
from jaxkv.schema_parity import validate_parity
from jaxkv.schema_patching import validate_patching
from jaxkv.schema_perplexity import validate_perplexity
from jaxkv.schemas import validate_sample

FORMAT = 1
VALIDATORS = {
    "accumulation": validate_accumulation,
    "attribution": validate_attribution,
    "divergence": validate_sample,
    "doctor": validate_doctor,
    "drift": validate_drift,
    "foreign": validate_foreign,
    "injection": validate_injection,
    "mitigations": validate_mitigation,
    "parity": validate_parity,
    "patching": validate_patching,
    "perplexity": validate_perplexity,
}
Key = tuple[str | int, ...]


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
    text = json.dumps(to_plain(config), allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one level with dotted keys: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step: a reader, or a kill at any moment, finds the old text or the new one.

    Raises:
      UserError: the directory is not writable or the disk is full.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _write_error(path, error) from error


def _sync_directory(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(path: pathlib.Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(f"no space left to write {path}; free some and run the same command again, it resumes")
    return UserError(f"cannot write {path}: {error.strerror or error}; choose another --out")


def record_key(record: Mapping[str, Any]) -> Key:
    """Returns the record's natural key. Raises ValueError if it has none, or one that is not strings and integers."""
    key = record.get("key")
    if not isinstance(key, list | tuple) or not key:
        raise ValueError(f"key: a record needs a non-empty list of strings and integers, got {key!r}")
    if any(isinstance(part, bool) or not isinstance(part, str | int | np.integer) for part in key):
        raise ValueError(f"key: only strings and integers identify a record, got {key!r}")
    return tuple(part if isinstance(part, str) else int(part) for part in key)


def read_lines(path: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
    """Reads the complete lines of a records file; what follows the last newline is a torn line and is left out.

    Returns:
      The records and the length in bytes of the complete lines; ([], 0) if there is no file.

    Raises:
      UserError: a complete line is not a JSON object, or the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    length = content.rfind(b"\n") + 1
    records = []
    for number, line in enumerate(content[:length].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line, parse_constant=_refuse_constant)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise UserError(
                f"{path}, line {number} is corrupt ({error}); delete that line to have its record run again"
            ) from error
        records.append(record)
    return records, length


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _keys_of(records: Sequence[Mapping[str, Any]], path: pathlib.Path) -> set[Key]:
    lines: dict[Key, int] = {}
    for number, record in enumerate(records, start=1):
        try:
            key = record_key(record)
        except ValueError as error:
            raise UserError(f"{path}, line {number} is corrupt ({error}); delete that line") from error
        if key in lines:
            raise UserError(f"{path} has key {list(key)} twice, in lines {lines[key]} and {number}; delete one of them")
        lines[key] = number
    return set(lines)


def read_run(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reads a run directory without locking or changing it, e.g. for a report on a run that still goes on.

    Returns:
      The content of run.json and the complete records of samples.jsonl.

    Raises:
      UserError: not a run directory, another format, or corrupt records.
    """
    directory = pathlib.Path(path)
    run = _read_run_json(directory)
    if run is None:
        raise UserError(f"{directory} is not a run directory (it has no run.json); check the path")
    samples = directory / "samples.jsonl"
    records, _ = read_lines(samples)
    _keys_of(records, samples)
    return run, records


def _read_run_json(directory: pathlib.Path) -> dict[str, Any] | None:
    path = directory / "run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["format"] != FORMAT:
            raise UserError(f"{path} has format {run['format']}, this jaxkv reads {FORMAT}; choose another --out")
        if not isinstance(run["config"], dict) or not isinstance(run["sessions"], list):
            raise ValueError("config or sessions missing")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is corrupt ({error}); delete the directory or choose another --out") from error
    return run


class _Lines:
    """An append-only file of JSON lines that survives a kill and a full disk at any byte."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        _, self._length = read_lines(path)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._file, self._length)
            os.fsync(self._file)
            _sync_directory(path.parent)
        except OSError as error:
            raise _write_error(path, error) from error

    def append(self, line: bytes) -> None:
        """Writes a line and waits for the disk; on failure the file is cut back to its complete lines."""
        try:
            os.ftruncate(self._file, self._length)
            written = 0
            while written < len(line):
                written += os.pwrite(self._file, line[written:], self._length + written)
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # Else the next append or the next open drops the torn line.
                os.ftruncate(self._file, self._length)
            raise _write_error(self.path, error) from error
        self._length += len(line)

    def close(self) -> None:
        os.close(self._file)


@dataclasses.dataclass
class RunDirectory:
    """An open run directory. Use as a context manager; made by `RunDirectory.open`."""

    path: pathlib.Path
    run: dict[str, Any]
    resumed: bool
    _keys: set[Key]
    _samples: _Lines
    _timing: _Lines
    _lock: int

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
        directory = pathlib.Path(path)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except FileExistsError as error:
            raise UserError(f"{directory} is a file, not a directory; choose another --out") from error
        except OSError as error:
            raise _write_error(directory, error) from error
        try:
            _take_lock(lock, directory)
            return cls._open_locked(directory, to_plain(config), flags_text, provenance or {}, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def _open_locked(
        cls,
        directory: pathlib.Path,
        config: dict[str, Any],
        flags_text: str | None,
        provenance: Mapping[str, Any],
        lock: int,
    ) -> "RunDirectory":
        for leftover in directory.glob("run.*.tmp"):
            leftover.unlink(missing_ok=True)
        run = _read_run_json(directory)
        records, _ = read_lines(directory / "samples.jsonl")
        resumed = run is not None
        if run is None:
            if records:
                raise UserError(f"{directory} has samples.jsonl but no run.json; choose another --out or delete it")
            run = {"format": FORMAT, "config": config, "fingerprint": fingerprint(config), "sessions": []}
        elif fingerprint(run["config"]) != fingerprint(config):
            raise UserError(
                f"{directory} was begun with another configuration: {describe_difference(run['config'], config)};"
                " choose another --out or delete that directory"
            )
        keys = _keys_of(records, directory / "samples.jsonl")
        if flags_text is not None and not (directory / "run.flags").exists():
            write_atomically(directory / "run.flags", flags_text)
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        run["sessions"].append({"started": started, "done_before": len(keys)} | to_plain(provenance))
        write_atomically(directory / "run.json", _pretty(run))
        samples, timing = _Lines(directory / "samples.jsonl"), _Lines(directory / "timing.jsonl")
        return cls(directory, run, resumed, keys, samples, timing, lock)

    def record_provenance(self, provenance: Mapping[str, Any]) -> None:
        """Adds fields to this session's entry in run.json, e.g. once device and checkpoint are known."""
        self.run["sessions"][-1] |= to_plain(provenance)
        write_atomically(self.path / "run.json", _pretty(self.run))

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
        key = record_key(plain)
        if key in self._keys:
            raise ValueError(f"key: {list(key)} is recorded already")
        if validate := VALIDATORS.get(plain.get("experiment", "")):
            validate(plain)
        self._samples.append(to_line(plain))
        self._keys.add(key)

    def append_timing(self, timing: Mapping[str, Any]) -> None:
        """Adds one line to timing.jsonl. A kill between the two files may lose or repeat a timing, never a sample."""
        self._timing.append(to_line(timing))

    def read(self) -> list[dict[str, Any]]:
        """The records on disk, oldest first."""
        return read_lines(self.path / "samples.jsonl")[0]

    def close(self) -> None:
        """Closes the files and lets go of the lock."""
        self._samples.close()
        self._timing.close()
        os.close(self._lock)

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pretty(values: Mapping[str, Any]) -> str:
    return json.dumps(to_plain(values), allow_nan=False, indent=2) + "\n"


def _take_lock(descriptor: int, directory: pathlib.Path) -> None:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"another process is at work in {directory}; wait for it to end or choose another --out"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot lock {directory}: {error.strerror}; choose another --out on a local file system"
        ) from error


def describe_difference(stored: Mapping[str, Any], ours: Mapping[str, Any], most: int = 5) -> str:
    """Names the keys in which two configs differ, e.g. ``precision is fp16 there, bf16 here``."""
    there, here = flatten(to_plain(stored)), flatten(to_plain(ours))
    names = sorted(name for name in there.keys() | here.keys() if there.get(name, "unset") != here.get(name, "unset"))

    def show(values: dict[str, Any], name: str) -> str:
        text = str(values[name]) if name in values else "unset"
        return text if len(text) <= 40 else text[:37] + "..."

    parts = [f"{name} is {show(there, name)} there, {show(here, name)} here" for name in names[:most]]
    return ", ".join(parts + ([f"and {len(names) - most} more"] if len(names) > most else []))
