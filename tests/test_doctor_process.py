"""Doctor's second process: equal bits, other bits, and no answer are told apart."""

import numpy as np
import pytest
from sample_records import damage

from jaxkv.experiments.doctor.process import child_environment, compare_processes, find_error, start_process
from jaxkv.experiments.doctor.run import DoctorSpec
from jaxkv.experiments.doctor.shapes import hash_array


def test_hashes_are_of_the_bits():
    zero = np.zeros((2, 3), np.float16)
    assert hash_array(zero) == hash_array(zero.copy()) != hash_array(np.full((2, 3), -0.0, np.float16))


HASHES = {"fp16": {"matmul": {"1": "aa", "4": "cc"}, "layer": {"1": "bb", "4": "dd"}}}


def test_another_process_is_compared_by_hashes():
    equal = {"fp16": {"matmul": {"1": True, "4": True}, "layer": {"1": True, "4": True}}}
    assert compare_processes(HASHES, lambda: HASHES) == {"status": "ok", "reason": None, "equal": equal}
    other = damage(HASHES, "fp16.layer.4", "ee")
    assert compare_processes(HASHES, lambda: other)["equal"] == damage(equal, "fp16.layer.4", False)


def test_a_process_that_says_nothing_is_no_agreement():
    def fail():
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")

    untold = {"status": "cannot tell", "reason": "CUDA_ERROR_OUT_OF_MEMORY", "equal": {}}
    assert compare_processes(HASHES, fail) == untold
    for ours, theirs in ((HASHES, {}), ({}, HASHES)):
        assert compare_processes(ours, lambda theirs=theirs: theirs)["status"] == "cannot tell"


def test_a_process_that_fails_says_why_in_one_line():
    with pytest.raises(RuntimeError, match="no answer within 0 s"):
        start_process(DoctorSpec().to_json(), 0.01)
    with pytest.raises(RuntimeError, match=r"ValidationError.*\$\.config") as caught:
        start_process({"config": {}}, 60)
    assert "\n" not in str(caught.value)


def test_the_error_is_found_above_what_jax_writes_below_it():
    log = "Traceback:\n  x\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: no memory\n-----\nFor simplicity, JAX has\n"
    assert find_error(log) == "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: no memory"
    assert find_error("Killed\n") == "Killed"
    assert find_error("") == ""


def test_the_second_process_has_no_compiled_programs_of_others(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "somewhere")
    env = child_environment()
    assert "JAX_COMPILATION_CACHE_DIR" not in env
    assert env["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
