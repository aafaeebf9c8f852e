"""Reads the rows or the text of a task: from a file, or from the Hugging Face hub."""

import dataclasses
import gzip
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError

Rows = list[tuple[str, Any]]
ROW_FILES = (".jsonl", ".jsonl.gz", ".parquet")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a task's rows come from.

    Attributes:
      title: the data set's name, for messages.
      shape: what a row looks like, for messages.
      hub: the data set on the hub.
      config: its configuration, None for the only one.
      split: of it.
      revision: a commit of it; None takes whatever is current, and the content hash says what that was.
      columns: fields read of a Parquet file, None for all.
      files: what a file may be.
    """

    title: str
    shape: str
    hub: str
    config: str | None
    split: str
    revision: str | None = None
    columns: tuple[str, ...] | None = None
    files: str = "a .jsonl or .parquet file"

    def remedy(self, flag: str) -> str:
        """What to do where the data cannot be had."""
        return f"pass {flag} FILE, {self.files}: {self.shape}"


def load_rows(source: Source, data: str | None, flag: str = "--data") -> tuple[Rows, dict[str, Any]]:
    """Loads the rows of a task, each with where it stands.

    Args:
      source: what to load.
      data: a .jsonl, .jsonl.gz or .parquet file; None fetches the rows from the hub.
      flag: the flag that names `data`, for error messages.

    Returns:
      The rows and their provenance: `source`, `sha256` of the file (None from the hub), `content` (`hash_rows`),
      `rows`, `split`, `revision`.

    Raises:
      UserError: no network or no `datasets` package for the hub; a file that is missing, empty, of an unknown type or
        not UTF-8; a row that is not JSON.
    """
    if data is None:
        rows, name, sha256 = (
            [(f"{source.hub} row {i + 1}", r) for i, r in enumerate(fetch(source, flag))],
            source.hub,
            None,
        )
    else:
        rows, sha256 = read_rows(source, data, flag)
        name = data
    if not rows:
        raise UserError(f"{name}: holds no rows; {flag} takes a file with {source.shape}")
    return rows, {
        "source": name,
        "sha256": sha256,
        "content": hash_rows([row for _, row in rows]),
        "rows": len(rows),
        "split": source.split,
        "revision": None if data else source.revision,
    }


def hash_rows(rows: Sequence[Any]) -> str:
    """SHA-256 over rows as canonical JSON, one a line: the same whatever file they came in."""
    lines = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False, default=str) + "\n" for row in rows)
    return hashlib.sha256(lines.encode()).hexdigest()


def read_rows(source: Source, data: str, flag: str) -> tuple[Rows, str]:
    """Reads a file's rows, and its SHA-256. They may be none. Raises UserError as `load_rows`."""
    path = Path(data)
    if not path.name.endswith(ROW_FILES):
        raise UserError(f"{data}: unknown extension '{path.suffix}'; {flag} takes {source.files}: {source.shape}")
    content = read_bytes(data, f"{flag} takes a file with {source.shape}")
    sha256 = hashlib.sha256(content).hexdigest()
    if path.suffix == ".parquet":
        return _read_parquet(data, path, source.columns), sha256
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise UserError(f"{data}: is not a gzip file that can be read; copy it again") from error
    # Read here rather than by `datasets`, whose errors name no line and which stumbles on blank lines.
    return _read_jsonl(data, content), sha256


def read_bytes(data: str, remedy: str) -> bytes:
    """Reads a file. Raises UserError, with a remedy, if it cannot be read."""
    try:
        return Path(data).read_bytes()
    except OSError as error:
        raise UserError(f"{data}: cannot be read ({error.strerror}); {remedy}") from error


def _read_jsonl(data: str, content: bytes) -> Rows:
    rows = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{data} line {number}"
        try:
            text = line.decode("utf-8").strip()
            if text:
                rows.append((where, json.loads(text)))
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: is not UTF-8; save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: is not JSON ({error.msg}); each line must be one JSON object") from error
    return rows


def _read_parquet(data: str, path: Path, columns: tuple[str, ...] | None) -> Rows:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{data}: Parquet needs pyarrow; run `pip install pyarrow` or give a .jsonl file") from error
    try:
        rows = pyarrow.parquet.read_table(path, columns=columns and list(columns)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{data}: is not a Parquet file that can be read; copy it again or give a .jsonl file"
        ) from error
    return [(f"{data} row {number}", row) for number, row in enumerate(rows, start=1)]


def check_row(where: str, row: Any, fields: Sequence[str]) -> None:
    """Raises UserError if a row is not a JSON object with text in every one of these fields."""
    needed = " and ".join(f"'{field}'" for field in fields)
    if not isinstance(row, dict):
        raise UserError(f"{where}: is not a JSON object; every row needs {needed}")
    for field in fields:
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise UserError(f"{where}: has no text in '{field}'; every row needs {needed}")


def fetch(source: Source, flag: str) -> Any:
    """Fetches a split from the hub as a `datasets.Dataset`. Raises UserError without network or package."""
    datasets = import_datasets()
    if datasets is None:
        raise UserError(
            f"{source.title} from the hub needs `datasets`: run `pip install datasets`, or {source.remedy(flag)}"
        )
    name = (source.hub,) if source.config is None else (source.hub, source.config)
    with _NoProgress(datasets):
        try:
            return datasets.load_dataset(*name, revision=source.revision, split=source.split)
        except Exception as error:
            raise UserError(
                f"{source.title} could not be fetched from the Hugging Face hub ({type(error).__name__}); "
                f"{source.remedy(flag)}"
            ) from error


def import_datasets() -> Any:
    """Returns the `datasets` module, or None where it is not installed."""
    try:
        import datasets
    except ImportError:
        return None
    return datasets


class _NoProgress:
    """Silences progress bars and retry notices of `datasets` while it reads."""

    def __init__(self, datasets: Any):
        self._datasets = datasets
        self._logger = logging.getLogger("huggingface_hub")

    def __enter__(self):
        self._bars = self._datasets.are_progress_bars_disabled()
        self._level = self._logger.level
        self._datasets.disable_progress_bars()
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_):
        self._logger.setLevel(self._level)
        if not self._bars:
            self._datasets.enable_progress_bars()
