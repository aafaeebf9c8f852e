"""Fixtures that several test files share."""

import dataclasses
import gc
import itertools
import os
import pathlib

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network; the hub's clients read it when they are imported
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # of commands in processes of their own too

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

gc.disable()  # until all tests are collected, see `pytest_collection_finish`

MOST_BYTES = 2**31


def find_programs():
    """Where compiled programs are kept: of all files and workers, and from one test run to the next."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxkv" / "tests"


@pytest.fixture(scope="session")
def programs():
    return find_programs()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """A program that several tests need is compiled once: XLA takes more time than all else in them.

    Said before every test, for one may have had its programs kept elsewhere, or, as a TPU's are, nowhere.
    """
    wanted = {"jax_compilation_cache_dir": str(find_programs()), "jax_enable_compilation_cache": True}
    if any(getattr(jax.config, name) != value for name, value in wanted.items()):
        for name, value in wanted.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_collection_finish():
    """Spares the collector the millions of objects of torch, transformers and jax, which took it a quarter of a run."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session):
    """Forgets the programs that were not used for longest. JAX's own bound reads every file's age at each write."""
    if not hasattr(session.config, "workerinput"):  # xdist's first process alone
        files = sorted(find_programs().glob("*-cache"), key=lambda file: file.stat().st_atime, reverse=True)
        for file, size in zip(files, itertools.accumulate(file.stat().st_size for file in files), strict=True):
            if size > MOST_BYTES:
                file.unlink(missing_ok=True)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Lets go of a file's compiled programs: on a CPU each keeps memory maps, and a process may have 65530 (Linux)."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def own_arms():
    """A test's commands trace for themselves, as in a process of their own: it may have broken the code."""
    from jaxkv.experiments.driver import share_arms

    share_arms.cache_clear()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Tiny random models of every family, as transformers' and as ours (tests/tiny_models.py)."""
    pytest.importorskip("torch")
    from tiny_models import TinyModels

    return TinyModels(tmp_path_factory.mktemp)


def cut_presets(monkeypatch):
    from jaxkv.models.families import PRESETS

    for name, config in PRESETS.items():
        if name.startswith("test-"):
            changed = dataclasses.replace(config, num_layers=1, window_pattern=(config.window is not None,))
            monkeypatch.setitem(PRESETS, name, changed)


@pytest.fixture
def one_layer(monkeypatch):
    """Test models of one layer, for commands in this process: compiling takes nearly all their time."""
    cut_presets(monkeypatch)


@pytest.fixture(scope="module")
def file_of_one_layer():
    """As `one_layer`, for all tests of a file and what they share."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut_presets(monkeypatch)
        yield


@pytest.fixture(scope="session")
def cache(programs):
    """The flag that has the command keep its programs there."""
    return f"--compilation_cache={programs}"
