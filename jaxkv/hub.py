"""The Hugging Face hub: a model's files and a data set's rows, from the network or from the local cache.

The hub's own clients do the work. One short question comes first: it tells in seconds whether the hub can be reached,
where the clients would retry for half a minute, and it names the commit and the bytes to come.
"""

import contextlib
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import huggingface_hub
from huggingface_hub import constants
from rich.filesize import decimal

from jaxkv.errors import UserError, offline_example
from jaxkv.files import explain

Kind = Literal["model", "dataset"]
Tell = Callable[[str], None]

TIMEOUT = 10.0  # seconds that the first question may take
_PATTERNS = ["*.json", "*.jinja", "tokenizer.model", "model.safetensors", "model-*.safetensors"]


def ask(hub_id: str, revision: str | None, kind: Kind = "model") -> tuple[str, dict[str, int]]:
    """Asks the hub, once and for at most `TIMEOUT`, for the commit of a revision, and bytes of each file by its name.

    Raises whatever the hub's client does.
    """
    api = huggingface_hub.HfApi()
    read = api.model_info if kind == "model" else api.dataset_info
    found = read(hub_id, revision=revision, files_metadata=True, timeout=TIMEOUT)
    return str(found.sha), {file.rfilename: file.size or 0 for file in found.siblings or ()}


def describe_failure(error: Exception, hub_id: str, revision: str | None, kind: Kind = "model") -> str:
    """What a failure of the hub's client means and what to do about it, in one line."""
    from huggingface_hub import errors

    what = {"model": "model", "dataset": "data set"}[kind]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        page = hub_id if kind == "model" else f"datasets/{hub_id}"
        return f"{hub_id} is gated: accept its terms at https://huggingface.co/{page}, then set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub_id} has no revision '{revision}'; pass an existing branch, tag or commit"
    if status == 401 and huggingface_hub.get_token():
        return f"the hub refuses your token for {hub_id} (401); set HF_TOKEN to a valid one, or unset it"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return f"the hub has no {what} '{hub_id}', or it is private; check the id, or set HF_TOKEN"
    if status is not None:
        told = {
            403: f"denies access to {hub_id} (403); give HF_TOKEN the right to read it",
            429: f"asks for fewer requests (429) while {hub_id} is fetched; wait some minutes, or set HF_TOKEN",
        }
        return f"the hub {told.get(status, f'fails with status {status} while {hub_id} is fetched; try again later')}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"cannot download {hub_id} (HF_HUB_OFFLINE is set); unset it where there is a network"
    said, name = explain(error).rstrip("."), type(error).__name__
    return f"cannot download {hub_id} ({name if name == said else f'{name}: {said}'}); check network and HF_ENDPOINT"


def download(hub_id: str, revision: str | None = None, tell: Tell | None = None) -> tuple[pathlib.Path, str]:
    """Fetches a model's files from the hub, or finds them in the local cache: their directory, and the commit it is.

    A file whose download was cut, or that lies truncated or changed in the cache, is fetched again. `tell` is called
    about once a second with what is being downloaded, and bytes of how many. Raises UserError: no network and nothing
    cached, a gated or unknown repository, an unknown revision, a full disk.
    """
    huggingface_hub.logging.set_verbosity_error()  # its retries would be a dozen lines before ours
    try:
        commit, sizes = ask(hub_id, revision)
    except Exception as error:  # each HTTP stack has its own classes
        return _find_cached(hub_id, revision, error)
    patterns, wanted = _choose_files(hub_id, sizes)
    folder = f"models--{hub_id.replace('/', '--')}"
    target = pathlib.Path(constants.HF_HUB_CACHE, folder, "snapshots", commit)
    missing = {name: size for name, size in wanted.items() if not (target / name).exists()}
    _check_space(hub_id, sum(missing.values()))
    bars = _make_bars(hub_id, target, missing, tell or (lambda text: None))
    try:
        path = huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=patterns, tqdm_class=bars)
        for name in _find_damaged(pathlib.Path(path), wanted):
            huggingface_hub.hf_hub_download(
                hub_id, name, revision=os.path.basename(path), force_download=True, tqdm_class=bars
            )
    except Exception as error:
        raise UserError(describe_failure(error, hub_id, revision)) from error
    return pathlib.Path(path), os.path.basename(path)


def _find_cached(hub_id: str, revision: str | None, failure: Exception) -> tuple[pathlib.Path, str]:
    """A model's files in the cache. Raises UserError with what is cached instead, or with why the hub gave nothing."""
    from huggingface_hub import errors

    try:
        options: dict[str, Any] = {"allow_patterns": _PATTERNS, "local_files_only": True}
        path = pathlib.Path(huggingface_hub.snapshot_download(hub_id, revision=revision, **options))
    except errors.LocalEntryNotFoundError as error:
        told = describe_failure(failure, hub_id, revision)
        if isinstance(failure, errors.HfHubHTTPError):  # the hub is there and says no
            raise UserError(told) from failure
        state = "the local copy is incomplete" if "is incomplete" in str(error) else "no local copy is cached"
        problem = f"{told.rpartition('; ')[0]} and {state}"
        wanted = revision or "main"
        if others := [line for line in _cached_revisions(hub_id) if wanted not in line]:
            raise UserError(f"{problem} of revision {wanted}; cached is {' or '.join(others)}") from failure
        raise UserError(
            f"{problem}; give local weights with --checkpoint, or run offline with {_offline_options(hub_id)}"
        ) from failure
    if damaged := _find_damaged(path, {}):
        raise UserError(f"{path / damaged[0]} is damaged; delete it and run again with a network")
    return path, path.name


def _cached_revisions(hub_id: str) -> list[str]:
    """Commits of a model that are cached with a config, the newest first, and how to use each."""
    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.CacheNotFound:
        return []
    revisions = [one for repo in repos if (repo.repo_id, repo.repo_type) == (hub_id, "model") for one in repo.revisions]
    found = [one for one in revisions if any(file.file_name == "config.json" for file in one.files)]
    return [
        f"{', '.join([*sorted(one.refs), f'commit {one.commit_hash}'])} (use it with --revision={one.commit_hash})"
        for one in sorted(found, key=lambda one: one.last_modified, reverse=True)
    ]


def _choose_files(hub_id: str, sizes: Mapping[str, int]) -> tuple[list[str], dict[str, int]]:
    """What we read of a model, as patterns and with bytes, and not its weights in other forms.

    Raises UserError without weights.
    """
    from huggingface_hub.utils import filter_repo_objects

    weights = [name for name in sizes if name.endswith(".safetensors")]
    if not weights:
        if any(name.endswith(".gguf") for name in sizes):
            raise UserError(f"{hub_id} holds GGUF files; download one of them and give its path with --checkpoint")
        raise UserError(f"{hub_id} has no safetensors weights; choose a repository that has, or convert them first")
    usual = any(filter_repo_objects(weights, allow_patterns=_PATTERNS))
    patterns = _PATTERNS if usual else [*_PATTERNS, "*.safetensors"]
    return patterns, {name: sizes[name] for name in filter_repo_objects(sizes, allow_patterns=patterns)}


def _check_space(hub_id: str, size: int) -> None:
    """Raises UserError if the cache's disk cannot take this many bytes."""
    folder = pathlib.Path(constants.HF_HUB_CACHE)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if size > free:
        raise UserError(
            f"downloading {hub_id} takes {decimal(size)} and {folder} has {decimal(free)} free; "
            "free some, or set HF_HOME to another disk"
        )


def _make_bars(hub_id: str, target: pathlib.Path, missing: Mapping[str, int], tell: Tell) -> type:
    """A class for the client's progress bars that draws none, and tells the bytes of all files together."""
    from tqdm.auto import tqdm

    total, told = sum(missing.values()), time.monotonic()
    if missing:
        tell(f"downloading {hub_id}: {decimal(total)} in {len(missing)} files")

    class Bars(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{k: v for k, v in options.items() if k != "name"} | {"disable": True})
            self.bytes = 0 if options.get("unit") == "B" else None

        def update(self, n: float | None = 1) -> None:
            nonlocal told
            if self.bytes is None:
                return
            self.bytes += int(n or 0)
            if time.monotonic() - told >= 1:
                told = time.monotonic()
                left = [name for name in missing if not (target / name).exists()]
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                tell(f"downloading {', '.join(left[:1])}{more}: {decimal(self.bytes)} of {decimal(total)}")

    return Bars


def _find_damaged(directory: pathlib.Path, sizes: Mapping[str, int]) -> list[str]:
    """Files of a snapshot that have another size than the hub says, or are small ones with another content.

    The cache names a blob by its hash: git's for small files; SHA-256 for large ones, which `check_digests` looks at.
    """
    from huggingface_hub.utils.sha import git_hash

    found = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        blob = path.resolve().name
        resized = path.stat().st_size != sizes.get(name, path.stat().st_size)
        if resized or (re.fullmatch("[0-9a-f]{40}", blob) and git_hash(path.read_bytes()) != blob):
            found.append(name)
    return found


def check_digests(directory: pathlib.Path, digests: Mapping[str, str]) -> None:
    """Compares the SHA-256 of what was read of a snapshot, by file name, with what the hub published.

    Raises UserError if a large file was changed in the cache.
    """
    for name, digest in digests.items():
        blob = (directory / name).resolve().name
        if re.fullmatch("[0-9a-f]{64}", blob) and blob != digest:
            raise UserError(
                f"{directory / name} is damaged: its content is not what the hub published; delete it and run again"
            )


def _offline_options(hub_id: str) -> str:
    """Options that run without a network, with a small model of the same family where there is one."""
    words = {"gemma-2": "test-gemma2", "gemma-3": "test-gemma3", "mistral": "test-mistral"}
    return offline_example(next((test for word, test in words.items() if word in hub_id.lower()), "test-llama2"))


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Has the clients of models and data sets look into their caches alone."""
    import datasets

    kept = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = kept
