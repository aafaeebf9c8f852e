"""The benchmark of quantized caches at a tiny shape: it measures what it says, and its figures hang together."""

import datetime
import json
import sys

import jax
import pytest
from quantized_models import HEAD_DIM, wide_config

from jaxkv.benchmark import write_figures
from jaxkv.benchmark_quantized import Work, describe, make_work, measure_memory, time_blocks, time_steps
from jaxkv.config import make_precision
from jaxkv.errors import UserError
from jaxkv.interventions.quantized_cache import Quantization
from jaxkv.interventions.quantizers import parse_cache_quant


def small_work(spec="kvarn:k2v2,tile=16,first=8"):
    return Work(wide_config(), make_precision("fp16"), Quantization(parse_cache_quant(spec)), 12, 24, 256, 1)


def test_memory_is_counted_and_compiled():
    found = measure_memory(small_work())
    elements = 2 * 2 * 256 * wide_config().num_kv_heads * HEAD_DIM
    assert found["plain"]["counted"] == 2 * elements
    assert found["plain"]["bits"] == 16
    packed, waiting = 15 * 16, 15 + 8
    # K: 2 bits, 24 of a channel and tile, 8 of a token; V: 24 of a token, 8 of a channel and tile.
    bits = packed * (2 + (24 / 16 + 8 / HEAD_DIM + 24 / HEAD_DIM + 8 / 16) / 2) + waiting * 16
    assert found["packed"]["counted"] == pytest.approx(bits / 256 * elements / 8)
    for part in found.values():
        assert part["program_alias"] >= part["counted"]  # the cache is updated where it lies
    saved = found["plain"]["program_argument"] - found["packed"]["program_argument"]
    assert saved == pytest.approx(found["plain"]["counted"] - found["packed"]["counted"], abs=64)
    assert f"memory counted: {found['packed']['counted']} bytes" in "\n".join(describe({"memory": found}))


def test_steps_and_blocks_are_timed():
    work = small_work()
    plain, packed, tile = time_steps(work, changed=False), time_steps(work, changed=True), time_blocks(work)
    assert tile["block"] == 16
    assert tile["packings"] == 4
    assert tile["ms_a_token"] == tile["ms_a_block"] / 16
    share = 100 * tile["ms_a_token"] / plain["ms_a_step"]
    lines = describe({"plain": plain, "packed": packed, "tile": tile})
    assert lines[0] == f"plain cache: {plain['ms_a_step']:.3f} ms a step"
    assert f"{packed['ms_a_step'] / plain['ms_a_step']:.2f} times" in lines[1]
    assert f"{share:.2f} % of a plain step" in lines[2]


def test_what_is_refused():
    with pytest.raises(UserError, match="1, 128"):
        time_blocks(small_work("kivi:2"))
    with pytest.raises(UserError, match="powers of two"):
        make_work("test-llama2", "fp16", "kvarn:k2v2", 8, 8, 64, 1)


def test_a_file_of_figures_says_where_they_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark_quantized.py", "--model=tiny-llama2", "--quant=kvarn:k2v2,first=8"])
    out = tmp_path / "figures.json"
    before = datetime.datetime.now(datetime.UTC).date()
    write_figures(str(out), "jaxkv.benchmark_quantized", {"plain": {"ms_a_step": 1.5}})
    found = json.loads(out.read_text())
    assert found["results"] == {"plain": {"ms_a_step": 1.5}}
    assert found["command"] == ("python -m jaxkv.benchmark_quantized --model=tiny-llama2 --quant=kvarn:k2v2,first=8")
    assert before <= datetime.date.fromisoformat(found["date"]) <= datetime.datetime.now(datetime.UTC).date()
    assert found["packages"]["jax"] == jax.__version__
    assert "git" in found
    with pytest.raises(UserError, match="cannot write"):
        write_figures(str(tmp_path), "jaxkv.benchmark", [])
