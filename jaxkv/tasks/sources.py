"""Reads the rows or the text of a task: from a file, or from the Hugging Face hub."""

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from jaxkv import files, hub
from jaxkv.errors import UserError
from jaxkv.tasks.task import Problem

Rows = list[tuple[str, Any]]  # each with where it stands
Text = Annotated[str, msgspec.Meta(pattern=r"\S")]  # in a row: one that says something
ROW_FILES = (".jsonl", ".jsonl.gz", ".parquet")
LOUDEST = {"huggingface_hub": logging.ERROR, "datasets": logging.ERROR, "lm_eval": logging.CRITICAL}  # of what is told


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a task's rows come from: a `split` of a data set on the hub, or a file in its place.

    `title` and `shape`, what a row looks like, are for messages, and `files` says what a file may be. `config` is None
    for the only one, and `revision` for the current commit: the content hash says what that was. `row` is the
    msgspec.Struct of the fields that the task needs of a row; None leaves rows as they are. `columns` are the fields
    read of a Parquet file, None for all.
    """

    title: str
    shape: str
    hub: str
    config: str | None
    split: str
    row: type | None = None
    revision: str | None = None
    columns: tuple[str, ...] | None = None
    files: str = "a .jsonl or .parquet file"

    def remedy(self, flag: str) -> str:
        """What to do where the data cannot be had."""
        return f"pass {flag} FILE, {self.files}: {self.shape}"


def load_rows(source: Source, data: str | None, flag: str = "--data") -> tuple[Rows, dict[str, Any]]:
    """The rows of a .jsonl, .jsonl.gz or .parquet file, or without one of the hub; `flag` names the file in messages.

    Their provenance is `source`, `sha256` of the file (None from the hub), `content` (`hash_rows`), `rows`, `split` and
    `revision`.

    Raises:
      UserError: no network or no `datasets` package for the hub; a file that is missing, empty, of an unknown type or
        not UTF-8; a row that is not JSON, or lacks a field or has it of another type or, as a `Text`, blank.
    """
    name, sha256 = data or source.hub, None
    if data is None:
        rows = [(f"{name} row {number}", row) for number, row in enumerate(fetch(source, flag), start=1)]
    else:
        rows, sha256 = _read_rows(source, data, f"{flag} takes {source.files}: {source.shape}")
    if not rows:
        raise UserError(f"{name}: holds no rows; {flag} takes a file with {source.shape}")
    with files.reading(name):
        content = hash_rows([row for _, row in rows])
    if (kind := source.row) is not None:
        rows = [(where, files.convert(row, kind, where, f"the file needs {source.shape}")) for where, row in rows]
    return rows, {
        "source": name,
        "sha256": sha256,
        "content": content,
        "rows": len(rows),
        "split": source.split,
        "revision": None if data else source.revision,
    }


def hash_rows(rows: Sequence[Any]) -> str:
    """SHA-256 over rows as canonical JSON, one a line: the same whatever file they came in."""
    lines = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False, default=str) + "\n" for row in rows)
    return hashlib.sha256(lines.encode()).hexdigest()


def hash_problems(problems: Iterable[Problem]) -> str:
    """SHA-256 over questions and solutions, one JSON array a line."""
    return hash_rows([[problem.question, problem.solution] for problem in problems])


def _read_rows(source: Source, data: str, remedy: str) -> tuple[Rows, str]:
    """A file's rows, which may be none, and its SHA-256."""
    name = data.lower()
    if not name.endswith(ROW_FILES) and not Path(data).is_dir():
        raise UserError(f"{data}: unknown extension '{Path(data).suffix}'; {remedy}")
    content = files.read_bytes(data, remedy)
    sha256 = hashlib.sha256(content).hexdigest()
    if name.endswith(".parquet"):
        return _read_parquet(data, content, source, remedy), sha256
    # Read here rather than by `datasets`, whose errors name no line and which stumbles on blank lines.
    text = files.to_text(files.unzip(content, data) if name.endswith(".gz") else content, data)
    placed = ((f"{data} line {number}", line.strip()) for number, line in enumerate(text.split("\n"), start=1))
    whole = "each line must be one JSON object"
    return [(at, files.decode_json(line, dict[str, Any], at, whole)) for at, line in placed if line], sha256


def _read_parquet(data: str, content: bytes, source: Source, remedy: str) -> Rows:
    import pyarrow
    import pyarrow.parquet

    again, kinds = f"{files.AGAIN} or give a .jsonl file", (*files.BROKEN, pyarrow.ArrowException)
    with files.reading(data, again, kinds):
        file = pyarrow.parquet.ParquetFile(io.BytesIO(content), page_checksum_verification=True)
        held, groups = file.schema_arrow.names, file.num_row_groups
    missing = [name for name in source.columns or () if name not in held]
    if missing:
        raise UserError(f"{data}: has no column {_quote(missing)}, but {_quote(held)}; {remedy}")
    rows: list[dict[str, Any]] = []
    for group in range(groups):
        columns = {}
        for name in source.columns or held:
            with files.reading(f"{data} row group {group} column '{name}'", again, kinds):
                columns[name] = file.read_row_group(group, columns=[name])[name].to_pylist()
        rows += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [(f"{data} row {number}", row) for number, row in enumerate(rows, start=1)]


def _quote(names: Iterable[str]) -> str:
    return " and ".join(f"'{name}'" for name in names) or "none"


def fetch(source: Source, flag: str) -> Any:
    """Fetches a split from the hub as a `datasets.Dataset`; from its cache where the hub gives nothing.

    Raises UserError: no package; nothing from the hub and nothing cached, or another revision than the one asked for.
    """
    with asking_hub(source, flag) as datasets:
        table = datasets.load_dataset(source.hub, source.config, revision=source.revision, split=source.split)
    # Without a network `datasets` takes the latest commit that it has.
    folders = [Path(file["filename"]).parent.name for file in table.cache_files]
    if source.revision is not None and folders and set(folders) != {source.revision}:
        raise UserError(
            f"{source.title} is cached at revision {folders[0]} and {source.revision} is wanted, which the hub does "
            f"not give now; run once with a network, or {source.remedy(flag)}"
        )
    return table


@contextlib.contextmanager
def asking_hub(source: Source, flag: str) -> Iterator[Any]:
    """Gives the `datasets` module, quiet, and offline where the hub does not answer. Raises UserError as `fetch`."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{source.title} from the hub needs `datasets`: run `pip install datasets`, or {source.remedy(flag)}"
        ) from error
    failure = None
    with quiet(datasets), contextlib.ExitStack() as stack:
        try:
            hub.ask(source.hub, source.revision, "dataset")
        except Exception as error:  # each HTTP stack has its own classes
            failure = error
            stack.enter_context(hub.offline())
        try:
            yield datasets
        except Exception as error:
            told = hub.describe_failure(failure or error, source.hub, source.revision, "dataset")
            raise UserError(
                f"{source.title} could not be fetched from the Hugging Face hub: {told}; or {source.remedy(flag)}"
            ) from error


@contextlib.contextmanager
def quiet(datasets: Any) -> Iterator[None]:
    """Silences progress bars and notices of `datasets`, of the hub's client and of lm_eval while they read."""
    barred = datasets.are_progress_bars_disabled()
    levels = {logger: logger.level for logger in map(logging.getLogger, LOUDEST)}
    datasets.disable_progress_bars()
    for logger in levels:
        logger.setLevel(LOUDEST[logger.name])
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        if not barred:
            datasets.enable_progress_bars()
