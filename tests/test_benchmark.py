"""The benchmarks at tiny shapes: they measure what they say, and their figures hang together."""

import datetime
import json
import re
import subprocess
import sys
import types

import jax
import pytest
from checkpoint_files import make_random
from commands import DATA, start_in_process
from quantized_models import HEAD_DIM, wide_config
from small_models import unaudited

from jaxkv import benchmark
from jaxkv.benchmark import Work, compare_caches, measure_memory, time_blocks, time_steps, write_figures
from jaxkv.checkpoints.export import export
from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments import cost

CONFIG = wide_config(layers=1)
SMALL = {"model": "wide", "prompt_tokens": 12, "new_tokens": 24, "memory_tokens": 256, "repeats": 1}


@pytest.fixture
def small_work(monkeypatch):
    """Makes Work of a small model whose heads suit every quantizer."""
    monkeypatch.setattr(benchmark, "get_preset", {"wide": CONFIG}.__getitem__)
    monkeypatch.setattr(benchmark, "copy_bandwidth", lambda bytes_each: 1e9)
    return lambda quant="kvarn:k2v2,tile=16,first=8", **fields: Work(**(SMALL | fields), quant=quant)


def run(*arguments):
    command = [sys.executable, "-m", "jaxkv.benchmark", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_memory_is_counted_and_compiled(small_work):
    found = measure_memory(small_work())
    elements = 2 * CONFIG.num_layers * 256 * CONFIG.num_kv_heads * HEAD_DIM
    assert found["plain"]["counted"] == 2 * elements
    assert found["plain"]["bits"] == 16
    packed, waiting = 15 * 16, 15 + 8
    # K: 2 bits, 24 of a channel and tile, 8 of a token; V: 24 of a token, 8 of a channel and tile.
    bits = packed * (2 + (24 / 16 + 8 / HEAD_DIM + 24 / HEAD_DIM + 8 / 16) / 2) + waiting * 16
    assert found["packed"]["counted"] == pytest.approx(bits / 256 * elements / 8)
    assert found["packed_over_plain"] == pytest.approx(bits / 256 / 16)
    for part in (found["plain"], found["packed"]):
        assert part["program_alias"] >= part["counted"]  # the cache is updated where it lies
    saved = found["plain"]["program_argument"] - found["packed"]["program_argument"]
    assert saved == pytest.approx(found["plain"]["counted"] - found["packed"]["counted"], abs=64)


@pytest.mark.nightly
def test_steps_and_blocks_are_timed(small_work):
    work, config = small_work(tiles=("4",)), CONFIG
    plain, packed, tile = time_steps(work), time_steps(small_work(), packed=True), time_blocks(work)
    assert plain["tokens_a_second"] == pytest.approx(1e3 / plain["ms_a_step"])
    assert plain["aligned_ms_a_step"]["4"] > 0
    assert plain["cache_bytes"] == 2 * 2 * config.num_layers * (12 + 24) * config.num_kv_heads * HEAD_DIM
    read = plain["weights_and_cache_share_of_copy_bandwidth"] * 1e9 * plain["ms_a_step"] / 1e3
    assert read == pytest.approx(plain["weight_bytes"] + plain["cache_bytes"])
    assert tile["block"] == 16
    assert tile["packings"] == 2 * config.num_layers
    assert tile["ms_a_token"] == tile["ms_a_block"] / 16
    assert compare_caches({"plain": plain, "packed": packed, "tile": tile}) == {
        "packed_over_plain_step": packed["ms_a_step"] / plain["ms_a_step"],
        "packing_over_plain_step": tile["ms_a_token"] / plain["ms_a_step"],
    }
    assert compare_caches({"packed": packed, "tile": tile}) == {}


def test_timed_runs_get_fresh_arguments(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(cost, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))

    def wait(seconds):
        clock[0] += seconds

    def prepare():
        wait(7)  # does not count
        return (next(waits),)

    waits = iter([16, 4, 1, 2, 8])  # nor does the first run
    assert cost.time_runs(wait, 4, prepare) == [4000, 1000, 2000, 8000]
    assert next(waits, None) is None


def test_generation_without_a_cache_is_timed(one_layer, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "Arms", lambda *given: unaudited(Arms(*given)))
    checkpoint = str(tmp_path / "model")
    export(make_random(precision=make_precision("fp32")), checkpoint, dtype="fp32")
    work = Work(
        precision="fp32", checkpoint=checkpoint, data=str(DATA / "problems.jsonl"), batch_size=2,
        batches=1, new_tokens=4,
    )  # fmt: skip
    found = benchmark.time_uncached(work)
    seconds = found["seconds_a_batch"]
    assert set(seconds) == {"cached", "check", "uncached_by_drafts", "uncached_stepwise"}
    assert seconds["uncached_by_drafts"] >= seconds["check"]
    assert found["stepwise_over_drafts"] == seconds["uncached_stepwise"] / seconds["uncached_by_drafts"]
    assert set(benchmark.time_uncached_transformers(work)["seconds_a_batch"]) == {"cached", "uncached"}


def test_what_is_refused(request):
    with pytest.raises(UserError, match="powers of two"):
        _ = Work(model="test-llama2").changed
    with pytest.raises(UserError, match="give --checkpoint"):
        Work().load()
    with pytest.raises(UserError, match="1 and 128"):
        time_blocks(request.getfixturevalue("small_work")("kivi:2"))


@pytest.mark.nightly
def test_the_command_writes_the_parts_of_a_benchmark(tmp_path):
    out, small = tmp_path / "figures.json", ["--memory_tokens=256", "--quant=kvarn:k2v2,tile=16,first=8"]
    done = run("quantized", "--model=tiny-llama2", *small, "--parts=memory", f"--out={out}")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["results"]
    told = [found[name] for name in ("model", "precision", "new_tokens", "repeats")]
    assert told == ["tiny-llama2", "fp16", 257, 3]
    assert found["memory"]["engine"] == "jaxkv"
    assert f'"counted": {found["memory"]["packed"]["counted"]}' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["speed"], "'speed' is no benchmark; give one first: decode, aligned, uncached, quantized"),
        (["--model=tiny-llama2", "quantized"], "'quantized' is no benchmark; give one first"),
        (["aligned", "--parts=torch"], "--parts has no 'torch' in aligned; known: jaxkv"),
        (["quantized", "--model=tiny-llama2", "--quant=kivi:k2v2"], "packs 1 and 128 tokens at a time"),
        (["decode", "--quant=kivi:2"], "Unknown command line flag 'quant'"),
        (["aligned", "--tiles=four"], "give numbers of rows"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, words):
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        start_in_process(benchmark, *arguments)
    assert "\n" not in str(caught.value).strip()


def test_a_mistake_ends_the_command():
    done = run("speed")
    assert done.returncode == 2
    assert "'speed' is no benchmark" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_of_figures_says_where_they_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "quantized", "--quant=kvarn:k2v2,first=8"])
    out = tmp_path / "figures.json"
    before = datetime.datetime.now(datetime.UTC).date()
    write_figures(str(out), {"plain": {"ms_a_step": 1.5}})
    found = json.loads(out.read_text())
    assert found["results"] == {"plain": {"ms_a_step": 1.5}}
    assert found["command"] == "python -m jaxkv.benchmark quantized --quant=kvarn:k2v2,first=8"
    assert before <= datetime.date.fromisoformat(found["date"]) <= datetime.datetime.now(datetime.UTC).date()
    assert found["packages"]["jax"] == jax.__version__
    assert "git" in found
    with pytest.raises(UserError, match="cannot write"):
        write_figures(str(tmp_path), [])
