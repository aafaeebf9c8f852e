"""Fixtures that several test files share."""

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Tiny random models of every family, as transformers' and as ours (tests/tiny_models.py)."""
    pytest.importorskip("torch")
    from tiny_models import TinyModels

    return TinyModels(tmp_path_factory.mktemp)
