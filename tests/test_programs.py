"""Compiled programs are let go of in time, and that changes no result."""

import jax
import jax.numpy as jnp
import pytest
from commands import SMALL, run_in_process
from plain_records import read_run

from jaxkv import programs


def compile_many(count):
    x = jnp.ones(8)
    functions = [jax.jit(lambda x, n=n: jnp.tanh(x * n).sum()) for n in range(count)]
    return functions, [float(function(x)) for function in functions]


@pytest.mark.skipif(programs.count_maps() is None, reason="the system has no /proc/self/maps")
def test_programs_go_when_maps_near_the_limit(monkeypatch):
    functions, results = compile_many(20)
    held, _ = programs.count_maps()
    assert not programs.release_programs()
    assert functions[0]._cache_size() == 1
    with monkeypatch.context() as near:
        near.setattr(programs, "count_maps", lambda: (held, held))
        assert programs.release_programs()
    assert functions[0]._cache_size() == 0
    assert programs.count_maps()[0] < held - 2 * 20
    assert [float(function(jnp.ones(8))) for function in functions] == results


def test_a_system_that_does_not_say_is_left_alone(monkeypatch):
    monkeypatch.setattr(programs.pathlib.Path, "read_text", lambda _: "no number")
    assert programs.count_maps() is None
    assert not programs.release_programs()


@pytest.mark.nightly
@pytest.mark.usefixtures("one_layer")
def test_a_run_whose_programs_are_dropped_has_the_same_records(tmp_path, cache, monkeypatch):
    few = ["--cache_error=normal:0.1,0", "--num_problems=2", "--gate=off"]
    command = [*SMALL, cache, "--experiments=injection", *few]
    run_in_process(*command, f"--out={tmp_path / 'whole'}")
    dropped = []
    monkeypatch.setattr("jaxkv.study.release_programs", lambda: dropped.append(jax.clear_caches()))
    run_in_process(*command, f"--out={tmp_path / 'dropped'}")
    assert len(dropped) == 2 * 2  # problems, each by itself, with a clean and a changed cache
    assert read_run(tmp_path / "dropped")[1] == read_run(tmp_path / "whole")[1]
