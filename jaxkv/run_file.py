"""run.json of a run directory: what its fields must be, and whether directory and file still belong together.

The structs have what readers ask of the fields; a config and a session may hold more. Imports neither jax nor flax.
"""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from jaxkv.errors import UserError
from jaxkv.files import convert, decode_json

FORMAT = 1
Count = Annotated[int, msgspec.Meta(ge=0)]
Names = dict[str, str | None]


class _Model(msgspec.Struct):
    name: str | None = None
    family: str | None = None
    num_layers: Count | None = None
    num_query_heads: Count | None = None
    num_kv_heads: Count | None = None


class _Precision(msgspec.Struct):
    name: str | None = None
    accumulation: str | None = None


class _Sampling(msgspec.Struct):
    sampler: str | None = None
    temperature: float | None = None
    top_k: Count | None = None
    top_p: float | None = None
    seed: int | None = None


class _Decoding(msgspec.Struct):
    new_tokens: Count | None = None
    batch_size: Count | None = None
    padding: str | None = None
    tile: Count | None = None


class _Device(msgspec.Struct):
    kind: str | None = None
    platform: str | None = None


class _Config(msgspec.Struct):
    experiments: list[str] = []
    num_problems: Count = 0
    framework: str | None = None
    attention: str | None = None
    task: str | None = None
    model: _Model | str | None = None
    precision: _Precision | str | None = None
    held: Names | None = None
    sampling: _Sampling | None = None
    decoding: _Decoding | None = None
    device: _Device | str | None = None
    checkpoint: dict[str, Any] | None = None
    versions: Names | None = None
    data: dict[str, Any] | str | None = None


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


class _Samples(msgspec.Struct):
    """How much of samples.jsonl a process knew when it wrote run.json last: that prefix stays for good."""

    bytes: Count
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _RunFile(msgspec.Struct):
    config: _Config
    fingerprint: str
    sessions: list[_Session]
    samples: _Samples | None = None


class _Format(msgspec.Struct):
    format: int


def fingerprint(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config of plain values as canonical JSON."""
    text = json.dumps(config, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_run_file(directory: pathlib.Path) -> dict[str, Any] | None:
    """The content of a directory's run.json, None if it has none.

    Raises:
      UserError: it cannot be read, is of another format, has a field of another type, or a config that is not the one
        of its fingerprint.
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
    found = convert(run, _Format, path, remedy).format
    if found != FORMAT:
        raise UserError(f"{path} has format {found}, this jaxkv reads {FORMAT}; choose another --out")
    read = convert(run, _RunFile, path, remedy)
    if fingerprint(run["config"]) != read.fingerprint:
        raise UserError(f"{path}: the config is not the one of its fingerprint, so it was changed by hand; {remedy}")
    return run


def check_samples(run: Mapping[str, Any], lines: bytes, directory: pathlib.Path) -> None:
    """Whether the complete lines of samples.jsonl begin with those that run.json knows of.

    Older runs know of none, and are taken as they are.

    Raises:
      UserError: they do not.
    """
    if (samples := run.get("samples")) is None:
        return
    known = samples["bytes"]
    if len(lines) < known:
        raise UserError(
            f"{directory / 'samples.jsonl'} is missing or cut: it has {len(lines)} bytes, and run.json knows of "
            f"{known}; put back a copy, or delete the directory to run it again"
        )
    if hashlib.sha256(lines[:known]).hexdigest() != samples["sha256"]:
        raise UserError(
            f"{directory / 'samples.jsonl'} was changed by hand: its first {known} bytes have another hash than in "
            "run.json; put back a copy, or delete the directory to run it again"
        )
