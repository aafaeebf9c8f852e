"""Fixtures that several test files share."""

import pytest


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
