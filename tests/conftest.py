"""Fixtures that several test files share."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Lets go of a file's compiled programs: on a CPU each keeps memory maps, and a process may have 65530 (Linux)."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def own_arms():
    """A test's commands compile for themselves, as in a process of their own: it may have broken the code."""
    from jaxkv.condition import _share_arms

    _share_arms.cache_clear()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Tiny random models of every family, as transformers' and as ours (tests/tiny_models.py)."""
    pytest.importorskip("torch")
    from tiny_models import TinyModels

    return TinyModels(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Where the command keeps compiled programs in tests, apart from the user's own."""
    return f"--compilation_cache={tmp_path_factory.mktemp('xla')}"
