"""Packages of the `eval` extra: imported where a score needs them, named with their command where they are missing."""

import importlib
import importlib.metadata
from types import ModuleType

from jaxkv.errors import UserError

COMMAND = "pip install 'jaxkv[eval]'"


def require(task: str, module: str) -> ModuleType:
    """Imports a module that a task's scores need. Raises UserError, with the command, where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise UserError(f"the {task} task needs the package of '{missing}': run `{COMMAND}`") from error


def versions(*names: str) -> dict[str, str]:
    """Versions of distributions that are installed."""
    return {name: importlib.metadata.version(name) for name in names}
