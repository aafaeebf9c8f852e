"""Where a result came from: revision, versions, hashes. Imports neither jax nor flax; the caller adds the device."""

import hashlib
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from jaxkv.files import reading

PACKAGES = ("jaxkv", "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "numpy")
# Environment variables that change what is computed.
VARIABLES = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "NVIDIA_TF32_OVERRIDE",
)


def sha256_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, in hex. Raises UserError if it cannot be read."""
    with reading(path, "check the path"), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_tokens(ids: Sequence[int] | np.ndarray) -> str:
    """SHA-256 of token ids as little-endian int32, in hex: the `prompt_sha256` of every record."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()


def describe_device() -> dict[str, str]:
    """JAX's default device."""
    import jax

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "runtime": " ".join(device.client.platform_version.split()),
    }


def git_revision() -> str | None:
    """Commit of the source tree this package runs from, with '-dirty' if tracked files differ; None outside one.

    JAXKV_REVISION goes before it: who sends a copy to another machine, with a git history of its own or none, sets it.
    """
    if said := os.environ.get("JAXKV_REVISION"):
        return said
    here = pathlib.Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # An installed copy may lie inside somebody else's repository.
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def environment() -> dict[str, Any]:
    """Python, platform, package versions (None: not installed) and the environment variables that change numbers."""
    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "variables": {name: " ".join(os.environ[name].split()) for name in VARIABLES if name in os.environ},
    }
