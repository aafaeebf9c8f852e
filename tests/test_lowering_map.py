"""The map of what sums were compiled to: read from texts of H200 and TPU programs, and made for this CPU."""

import dataclasses
import pathlib
import tarfile

import jax
import msgspec
import pytest
from commands import parse
from small_models import small_config

from jaxkv.config import make_precision
from jaxkv.errors import UserError
from jaxkv.experiments.lowering import run as lowering
from jaxkv.experiments.lowering.hlo import Program
from jaxkv.experiments.lowering.kernels import find_kernels
from jaxkv.experiments.lowering.record import LoweringRecord
from jaxkv.experiments.lowering.report import conclude, find_changes, find_evidence, judge, name_layers
from jaxkv.experiments.lowering.rows import compare_orders
from jaxkv.experiments.lowering.targets import parse_target
from jaxkv.models import alignment
from jaxkv.rollout import make_layout

# Lines of programs that XLA compiled for an H200 (jax 0.11.2, LLaMA-2 7B in fp16), shortened in their configurations.
GPU = """\
%region_4.8 (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a.1, %b.1)
}

%gemm_fusion_dot.292_computation (p.0: f16[512,32,128], p.1: f16[32,512,512]) -> f16[32,128,512] {
  %p.0 = f16[512,32,128]{2,1,0} parameter(0)
  %p.1 = f16[32,512,512]{2,1,0} parameter(1)
  %dot.492 = f32[32,128,512]{2,1,0} dot(%p.0, %p.1), lhs_batch_dims={1}, lhs_contracting_dims={0}, rhs_batch_dims={0}, \
rhs_contracting_dims={1}, operand_precision={highest,highest}, metadata={op_name="jit(_tile_loop)/while/body/layer.1/\
attention/bkgts,bskh->btkgh/dot_general" stack_frame_id=37}, backend_config={"sizes":["128"]}
  ROOT %convert.1266 = f16[32,128,512]{2,1,0} convert(%dot.492)
}

%fused_add.29 (q.0: f32[2,256,4096], q.1: f16[256,4096]) -> f16[256,4096] {
  %q.1 = f16[256,4096]{1,0} parameter(1)
  %q.0 = f32[2,256,4096]{2,1,0} parameter(0)
  %zero.1 = f32[] constant(0)
  %reduce.5.7 = f32[256,4096]{1,0} reduce(%q.0, %zero.1), dimensions={0}, to_apply=%region_4.8, \
metadata={op_name="jit(_prefill)/layer.1/output/btf,df->btd/dot_general" stack_frame_id=68}
  %convert.143 = f16[256,4096]{1,0} convert(%reduce.5.7)
  ROOT %add.209 = f16[256,4096]{1,0} add(%q.1, %convert.143)
}

%fused_reduce.181 (r.0: f16[4096,32,128], r.1: f16[32,128]) -> f16[4096] {
  %r.1 = f16[32,128]{1,0} parameter(1)
  %bitcast.37 = f16[4096]{0} bitcast(%r.1)
  %convert.1811 = f32[4096]{0} convert(%bitcast.37)
  %broadcast.477 = f32[4096,4096]{1,0} broadcast(%convert.1811), dimensions={1}
  %bitcast.38 = f32[4096,32,128]{2,1,0} bitcast(%broadcast.477)
  %r.0 = f16[4096,32,128]{2,1,0} parameter(0)
  %convert.604 = f32[4096,32,128]{2,1,0} convert(%r.0)
  %multiply.428 = f32[4096,32,128]{2,1,0} multiply(%bitcast.38, %convert.604)
  %bitcast.1139 = f32[4096,4096]{1,0} bitcast(%multiply.428)
  %zero.2 = f32[] constant(0)
  %reduce.15.3 = f32[4096]{0} reduce(%bitcast.1139, %zero.2), dimensions={1}, to_apply=%region_4.8, \
metadata={op_name="jit(_cached_loop)/while/body/layer.1/output/btf,df->btd/dot_general" stack_frame_id=153}
  ROOT %convert.143.1 = f16[4096]{0} convert(%reduce.15.3)
}

ENTRY %main.1 (s.0: f16[512,32,128], s.1: f16[32,512,512], s.2: f16[2,256,2048], s.3: f16[4096,2,2048], \
s.4: f16[256,4096], s.5: f16[4096,32,128], s.6: f16[32,128]) -> f16[4096] {
  %s.0 = f16[512,32,128]{2,1,0} parameter(0)
  %s.1 = f16[32,512,512]{2,1,0} parameter(1)
  %gemm_fusion_dot.292 = f16[32,128,512]{2,1,0} fusion(%s.0, %s.1), kind=kCustom, \
calls=%gemm_fusion_dot.292_computation, \
backend_config={"fusion_backend_config":{"block_level_fusion_config":{"num_ctas":1,"num_stages":3,"num_warps":"4",\
"output_tiles":[{"sizes":["1","128","64"]}]},"kind":"__triton_nested_gemm_fusion"}}
  %s.2 = f16[2,256,2048]{2,1,0} parameter(2)
  %s.3 = f16[4096,2,2048]{2,1,0} parameter(3)
  %custom-call.0 = (f32[2,256,4096]{2,1,0}, s8[33554432]{0}) custom-call(%s.2, %s.3), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(_prefill)/layer.1/output/btf,df->btd/dot_general"}, \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_batch_dimensions":["0"],\
"lhs_contracting_dimensions":["2"],"rhs_batch_dimensions":["1"],"rhs_contracting_dimensions":["2"]},\
"selected_algorithm":"2"}}
  %gte.1 = f32[2,256,4096]{2,1,0} get-tuple-element(%custom-call.0), index=0
  %s.4 = f16[256,4096]{1,0} parameter(4)
  %loop_add_fusion.29 = f16[256,4096]{1,0} fusion(%gte.1, %s.4), kind=kCustom, calls=%fused_add.29, \
backend_config={"fusion_backend_config":{"block_level_fusion_config":{"num_warps":"4","output_tiles":[{"sizes":["1",\
"1024"]}]},"kind":"__triton"}}
  %s.5 = f16[4096,32,128]{2,1,0} parameter(5)
  %s.6 = f16[32,128]{1,0} parameter(6)
  ROOT %input_reduce_fusion.181 = f16[4096]{0} fusion(%s.5, %s.6), kind=kInput, calls=%fused_reduce.181, \
metadata={op_name="jit(_cached_loop)/while/body/layer.1/output/convert_element_type"}
}
"""


def test_kernels_of_a_gpu_are_read():
    found = {one.kernel.instruction: one for one in find_kernels(GPU, "prefill", 512)}
    triton, library, parts, loop = (found[name] for name in ("dot.492", "custom-call.0", "reduce.5.7", "reduce.15.3"))
    assert len(found) == 4
    assert (triton.place.layer, triton.place.op_class) == (1, "attention")
    kernel = triton.kernel
    assert (kernel.kind, kernel.by, kernel.blocks) == (
        "product",
        "Triton",
        {"tile": "1x128x64", "k": "128", "warps": "4"},
    )
    assert (kernel.operands, kernel.sums_in, kernel.writes, kernel.summed) == ("f16", "f32", "f16", 512)
    assert (library.kernel.by, library.kernel.summed, library.kernel.blocks) == ("cuBLASLt", 2048, {"algorithm": "2"})
    assert (parts.kernel.kind, parts.kernel.summed, parts.kernel.writes) == ("sum of parts", 2, "f16")
    kernel = loop.kernel
    assert (kernel.kind, kernel.by, kernel.operands, kernel.summed) == ("multiply and add", "XLA", "f16", 4096)
    assert kernel.line.startswith("%reduce.15.3 = f32[4096]{0} reduce(")
    assert "metadata" not in kernel.line


def test_a_region_in_16_bits_is_a_sum_in_16_bits():
    narrow = GPU.replace("f32[] add(", "f16[] add(")
    kernel = next(one.kernel for one in find_kernels(narrow, "decode", 512) if one.kernel.instruction == "reduce.15.3")
    assert kernel.sums_in == "f16"


def test_a_maximum_is_no_sum():
    assert not [
        one
        for one in find_kernels(GPU.replace("f32[] add(", "f32[] maximum("), "p", 512)
        if "reduce" in one.kernel.line
    ]


def test_a_value_is_followed_to_its_parameter():
    program = Program(GPU)
    assert program.source("q.0").name == "custom-call.0"
    assert program.source("convert.604").name == "s.5"


SIZES = {"vocab_size": 64, "model_dim": 64, "mlp_dim": 128, "head_dim": 16, "num_query_heads": 4, "num_kv_heads": 4}
CONFIG = dataclasses.replace(small_config("llama", layers=1), **SIZES)  # columns that kernels treat alike


def make_asked(precision="fp16", aligned=False, tile=8, seconds=0.0):
    layout = make_layout([[0] * 8], 24, 8, CONFIG, tile if aligned else None)
    return lowering.Asked(CONFIG, make_precision(precision), parse_target("here"), layout, aligned, tile, seconds)


def make_record(asked):
    made = lowering.make_map(asked, lowering.make_arms(asked), None)
    return msgspec.convert(made, LoweringRecord)


@pytest.fixture(scope="module")
def plain():
    return make_record(make_asked(seconds=60.0))


def test_every_sum_of_a_layer_is_placed(plain):
    assert not plain.unplaced
    assert {row.operation for row in plain.rows} == set(alignment.CLASSES) - {"rope"}
    for row in plain.rows:
        assert set(row.kernels) == {"prefill", "decode", "recompute"}
        assert row.layers == ([] if row.operation == "head" or not row.layers else [0])
    products = [k for row in plain.rows for k in row.kernels["recompute"] if k.kind == "product"]
    assert {row.operation for row in plain.rows if row.operation != "norms"} >= {
        "qkv",
        "scores",
        "attention",
        "output",
        "mlp",
    }
    assert products


def test_trees_are_recovered_and_settle_what_programs_do_not_tell(plain):
    assert all(one.shape is not None and one.again and one.rounding != "neither" for one in plain.recovered)
    assert {one.rows for one in plain.recovered} == {1, 8, 32}
    untold = [(row.operation, pair) for row in plain.rows for pair, order in row.orders.items() if order == "not told"]
    settled = {judge(plain, plain.rows, *one) for one in untold}
    assert settled & {"same", "different"}
    without = msgspec.structs.replace(plain, recovered=[])
    assert {judge(without, plain.rows, *one) for one in untold} == {"not told"}


def test_a_tree_of_another_kernel_settles_nothing(plain):
    others = [
        msgspec.structs.replace(one, kernels=[msgspec.structs.replace(k, by="another") for k in one.kernels])
        for one in plain.recovered
    ]
    changed = msgspec.structs.replace(plain, recovered=others)
    for row in plain.rows:
        for pair, order in row.orders.items():
            if order == "not told":
                assert judge(changed, plain.rows, row.operation, pair) == "not told"


def test_aligned_arms_have_one_order():
    aligned = make_record(make_asked(aligned=True))
    assert {order for row in aligned.rows for order in row.orders.values()} == {"same"}
    assert "one program" in conclude(aligned)[0]


def test_another_tile_is_seen():
    eight, four = (make_record(make_asked(aligned=True, tile=tile)) for tile in (8, 4))
    assert {"qkv", "output", "mlp"} <= set(find_changes(eight, four))
    assert not find_changes(eight, eight)


def test_a_barrier_that_is_gone_is_seen(plain, monkeypatch):
    def run_at_once(aligned, slot, op_class, fn, *arrays, rows_in=1, rows_out=1):
        with jax.named_scope(op_class), jax.named_scope(alignment.AT_ONCE):
            return fn(*arrays)

    monkeypatch.setattr(alignment, "_in_tiles", run_at_once)
    changed = make_record(make_asked())
    assert find_changes(plain, changed)
    assert not any(":in_tiles" in name for row in changed.forms for name in row.kernels)


def test_evidence_is_of_kernels_that_differ(plain):
    for row in plain.rows:
        if row.orders["step"] == "different":
            one, other = find_evidence(plain, row.operation)
            assert (one.program, other.program) == ("decode", "recompute")
            assert compare_orders([one], [other]) != "same"


def test_a_kept_map_is_what_is_compiled_here():
    """Of one model the map in analysis/ was made on a CPU: its versions give the same kernels again."""
    with tarfile.open(pathlib.Path(__file__).parents[1] / "analysis" / "lowering" / "runs.tar.xz") as tar:
        line, flags = (
            tar.extractfile(f"tiny-llama2-fp16-cpu/{name}").read() for name in ("samples.jsonl", "run.flags")
        )
    kept = msgspec.json.decode(line, type=LoweringRecord)
    if kept.environment["packages"]["jaxlib"] != jax.lib.__version__:
        pytest.skip("the map was made by another version of jaxlib, which may choose other kernels")
    (options,) = parse(*flags.decode().split())
    asked = lowering.read_asked(options, make_precision("fp16"))
    programs = lowering.list_programs(asked, lowering.make_arms(asked), None)
    texts = {name: program.compile().as_text() for name, program in programs.items() if "fenced" not in name}
    rows = lowering.list_rows({n: find_kernels(text, n, asked.layout.slots) for n, text in texts.items()}, False)
    fresh = msgspec.structs.replace(kept, rows=rows, forms=[])
    assert find_changes(msgspec.structs.replace(kept, forms=[]), fresh) == []
    assert [row.orders for row in rows] == [row.orders for row in kept.rows]


@pytest.mark.parametrize(
    ("target", "told"),
    [("gpu", "is not understood"), ("tpu:v9:2x2", "is not known"), ("tpu:v5e:two", "grid")],
)
def test_targets_that_are_none(target, told):
    with pytest.raises(UserError, match=told):
        parse_target(target)


def test_layers_are_named_in_spans():
    assert [name_layers(one) for one in ([], [3], [0, 1, 2, 5, 7, 8])] == ["-", "3", "0-2, 5, 7-8"]
