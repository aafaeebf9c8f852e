"""Targets: what they are called, how a model lies over chips, and what is compiled for a TPU that is not there."""

import dataclasses
import importlib.metadata
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, SingleDeviceSharding
from small_models import small_config

from jaxkv.checkpoints.fill import flat_paths
from jaxkv.config import make_precision
from jaxkv.decode import COMPILER_OPTIONS, Arms
from jaxkv.errors import UserError
from jaxkv.experiments.lowering import targets
from jaxkv.experiments.lowering.targets import (
    AXIS,
    CHIP_GIB,
    Placing,
    abstract_programs,
    choose_placing,
    count_held,
    describe_program,
    parse_target,
)
from jaxkv.models.decoder import abstract_decoder
from jaxkv.models.families import FAMILIES, get_preset
from jaxkv.models.layers import product
from jaxkv.rollout import Layout

LAYOUT = Layout(batch=1, prompt=5, prefill=8, slots=16, new_tokens=8)
GRIDS = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}


@pytest.fixture
def libtpu():
    """Skips where libtpu is not installed."""
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu: pip install 'jaxkv[tpu]'")


def test_targets_are_parsed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert parse_target("here").platform == jax.default_backend()
    assert parse_target("cpu").devices() == tuple(jax.devices("cpu")[:1])
    found = parse_target("TPU:v5p:2x2x4")
    assert (found.text, found.platform, found.chip, found.grid) == ("tpu:v5p:2x2x4", "tpu", "v5p", (2, 2, 4))
    assert (found.count, found.memory) == (16, int(95.74 * 2**30))
    assert parse_target("cpu").memory is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' is not understood; known: here, cpu, tpu:v5e:2x2, tpu:v5p:2x2x1, tpu:v6e:2x2"),
        ("tpu", "'tpu' is not understood"),
        ("cpu:2", "'cpu:2' is not understood"),
        ("gpu", "'gpu' is not understood"),
        ("tpu:v9:2x2", "TPU 'v9' is not known; known: v5e, v5p, v6e"),
        ("tpu:v5e:2x2x1", "'2x2x1' is no grid of 2 numbers; use tpu:v5e:2x2"),
        ("tpu:v5p:2x2", "'2x2' is no grid of 3 numbers; use tpu:v5p:2x2x1"),
        ("tpu:v6e:0x2", "'0x2' is no grid of 2 numbers"),
        ("tpu:v6e:２x2", "is no grid of 2 numbers"),
        ("tpu:v6e:2x2:1", "is not understood"),
        ("tpu:v5e:999x999", "has 998001 chips; use at most 256"),
    ],
)
def test_other_targets_are_refused(text, told):
    with pytest.raises(UserError, match=re.escape(told)):
        parse_target(text)


def test_a_missing_libtpu_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    lines = ['jaxlib==1; extra == "cuda"', 'libtpu==0.0.42.*; extra == "tpu"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    with pytest.raises(UserError, match=re.escape("not installed: pip install 'libtpu==0.0.42.*'")):
        parse_target("tpu:v5e:2x2")


def test_jax_says_which_libtpu_fits_it():
    assert re.fullmatch(r"libtpu==[\d.*]+", targets.fitting_libtpu())


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_cover_every_parameter_and_divide(family):
    for preset in FAMILIES[family].presets.values():
        config = dataclasses.replace(preset, num_layers=1)
        state = abstract_decoder(config, make_precision("bf16"))[1]
        for chips in (1, 2, 3, 4, 8):
            placing = Placing(AbstractMesh((chips,), (AXIS,)))
            placed = flat_paths(placing.place_state(state))
            assert set(placed) == set(flat_paths(state))
            shards = {path: leaf.get_value().sharding.shard_shape(leaf.shape) for path, leaf in placed.items()}
            F, K = config.mlp_dim, config.num_kv_heads  # what does not divide is whole
            assert shards["layers/0/mlp/down"][1] == (F if F % chips else F // chips)
            assert shards["layers/0/attn/k"][0] == (K if K % chips else K // chips)
            assert shards["final_norm/weight"] == (config.model_dim,)


def test_a_parameter_that_no_rule_names_is_an_error():
    with pytest.raises(ValueError, match="no rule says how layers/0/attn/sinks lies"):
        targets.parameter_spec("layers/0/attn/sinks", (8,), 2)


def test_held_bytes_are_those_of_the_weights_and_the_cache():
    """meta-llama/Llama-2-7b-hf has 13476831232 bytes of weights (its model.safetensors.index.json)."""
    arms = Arms(get_preset("llama2-7b"), make_precision("bf16"), backend="tpu")
    layout = Layout(batch=1, prompt=250, prefill=256, slots=320, new_tokens=64)
    cache, positions = 2 * 32 * 320 * 32 * 128 * 2, 320 * 4
    assert count_held(arms, layout, 1) == 13476831232 + cache + positions
    norms = (2 * 32 + 1) * 4096 * 2
    assert count_held(arms, layout, 4) == (13476831232 - norms + cache) // 4 + norms + positions


def test_the_fewest_chips_that_hold_a_model_are_taken(libtpu):
    layout = Layout(batch=1, prompt=250, prefill=256, slots=320, new_tokens=64)
    target = parse_target("tpu:v5e:2x2")
    arms = {name: Arms(get_preset("llama2-7b"), make_precision(name), backend="tpu") for name in ("bf16", "fp32")}
    assert choose_placing(arms["bf16"], layout, target).chips == 1
    assert choose_placing(arms["fp32"], layout, target).chips == 2
    assert choose_placing(arms["bf16"], layout, target, chips=4).chips == 4
    with pytest.raises(UserError, match="has 4 chips, not 5; use a larger grid or fewer chips"):
        choose_placing(arms["bf16"], layout, target, chips=5)
    large = Arms(get_preset("llama2-70b"), make_precision("bf16"), backend="tpu")
    with pytest.raises(UserError, match=r"llama2-70b in bf16 needs 32\.1 GiB on each of 4 chips .* has 15\.8; use a"):
        choose_placing(large, layout, target)


def test_a_grid_that_libtpu_does_not_know_is_refused(monkeypatch):
    def refuse(**_):
        raise RuntimeError("INVALID_ARGUMENT: no such layout\nand more")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(targets.topologies, "get_topology_desc", refuse)
    with pytest.raises(
        UserError, match=r"libtpu knows no tpu:v5e:3x7 \(INVALID_ARGUMENT: no such layout\); use another"
    ):
        parse_target("tpu:v5e:3x7").devices()


@pytest.mark.parametrize("chip", CHIP_GIB)
def test_a_program_that_is_too_large_tells_the_memory_of_the_chip(libtpu, chip):
    target = parse_target(f"tpu:{chip}:{GRIDS[chip]}")
    large = jax.ShapeDtypeStruct((1 << 17, 1 << 20), jnp.bfloat16, sharding=SingleDeviceSharding(target.devices()[0]))
    with pytest.raises(UserError, match=rf"available HBM \({CHIP_GIB[chip]}G\); use more chips") as error:
        targets.Program(jax.jit(lambda x: x + 1), (large,)).compile()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("chips", [1, 2])
def test_programs_compile_for_chips_that_are_not_there(libtpu, chips, capfd):
    target = parse_target("tpu:v5e:2x2")
    arms = Arms(small_config("gemma2", layers=1), make_precision("bf16"), backend=target.platform)
    placing = choose_placing(arms, LAYOUT, target, chips)
    program = abstract_programs(arms, LAYOUT, placing)["decode"]
    compiled = program.compile()
    facts = describe_program(compiled, compiled.as_text(), target, 0.0)
    held = count_held(arms, LAYOUT, chips)
    assert facts.chips == chips
    assert held <= facts.arguments <= facts.needed <= target.memory
    assert facts.fits
    cache = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * 2
        for leaf in (*program.arguments[-1].k, *program.arguments[-1].v)
    )
    assert facts.aliased >= cache  # donated: it is not held twice
    assert facts.flops > 0
    assert facts.accessed > 0
    between = re.findall(r"= (\w+)\[\S+ all-reduce\(.*/dot_general", compiled.as_text())
    assert set(between) == ({"f32"} if chips > 1 else set())  # sums over chips
    assert not any(capfd.readouterr())


def sums_in(text):
    """(dtype of the result, dtype of the summands) of each sum of more than one summand in a compiled program."""
    adds = set(re.findall(r"^%(\S+) \(.*?\{\n(?:  .*\n)*?  ROOT \S+ = \S+ add\(", text, re.M))
    shapes = dict(re.findall(r"%(\S+) = (\w+\[[\d,]*\])", text))
    found = []
    for out, operand, over, region in re.findall(
        r"= (\w+)\[\S+ reduce\(%(\S+?), .*?dimensions=\{([\d,]*)\}, to_apply=%(\S+?)[,\s]", text
    ):
        dtype, _, shape = shapes[operand].rstrip("]").partition("[")
        extent = np.prod([int(shape.split(",")[int(axis)]) for axis in over.split(",")])
        if region in adds and extent > 1:
            found.append((out, dtype))
    return found


@pytest.mark.parametrize("chip", CHIP_GIB)
def test_a_sum_on_a_tpu_rounds_its_result_alone(libtpu, chip):
    """XLA rounds each summand as well where a sum's result is narrower than they are (analysis/tpu.md)."""
    target = parse_target(f"tpu:{chip}:{GRIDS[chip]}")
    one = SingleDeviceSharding(target.devices()[0])
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=one) for shape in ((1, 1, 512), (256, 512)))

    def compile_product(precision):
        function = jax.jit(lambda x, w: product("btd,fd->btf", x, w, precision), compiler_options=COMPILER_OPTIONS)
        return sums_in(function.lower(x, w).compile().as_text())

    usual = make_precision("bf16")
    assert ("bf16", "f32") in compile_product(usual)
    held = compile_product(usual.held_on("tpu"))
    assert held
    assert set(held) == {("f32", "f32")}


def test_a_decoder_on_a_tpu_sums_in_fp32(libtpu):
    target = parse_target("tpu:v6e:2x2")
    arms = Arms(small_config("qwen2", layers=1), make_precision("bf16"), backend=target.platform)
    compiled = abstract_programs(arms, LAYOUT, choose_placing(arms, LAYOUT, target))["decode"].compile()
    found = sums_in(compiled.as_text())
    assert len(found) >= 7
    assert set(found) == {("f32", "f32")}
