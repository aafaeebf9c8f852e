"""What doctor concludes: never more than its record says. Records here are made up."""

import copy

import pytest
from sample_records import damage
from shown import as_markdown, on_terminal

from jaxkv.experiments.doctor.report import conclude, write_doctor
from jaxkv.experiments.doctor.run import DoctorSpec
from jaxkv.records import to_record


def write(record):
    return write_doctor(record | {"conclusions": conclude(record)})


def text_of(record, width=80):
    return on_terminal(write(record), width)


def clean_figure(differ=0, nonfinite=0):
    if nonfinite:
        return {"elements": 100, "nonfinite": nonfinite, "differ": None, "max_ulp": None}
    return {"elements": 100, "nonfinite": 0, "differ": differ, "max_ulp": float(differ)}


def made_record(dtype="fp16"):
    counts = {"rows": ("4", "8"), "rows_from_most": ("4",), "slots": ("256",), "batch": ("2",), "neighbours": ("2",)}
    counts |= {"following": ("4", "8"), "rerun": ("all",), "place": ()}
    names = {"slots": ("softmax", "attention"), "place": ()}
    values = {
        question: {name: {n: clean_figure() for n in ns} for name in names.get(question, ("matmul", "layer"))}
        for question, ns in counts.items()
    }
    wide, good = {"exact": 24.0, "rounded": 22.0}, {"1": 21.0, "64": 20.0}
    sums = {"1": dict(wide), "64": dict(wide)}
    values |= {"held": {"param": "float16", "operand": "float16", "activation": "float16"}}
    values |= {"process": {"matmul": {"1": True, "4": True}, "layer": {"1": True, "4": True}}}
    if dtype == "fp32":
        values |= {"operand_bits": {"highest": dict(good), "default": dict(good)}}
    else:
        values |= {"sum_bits": {"fp32": copy.deepcopy(sums), dtype: copy.deepcopy(sums)}}
        values |= {"casts_dropped": {o: {"chain": 0.0, "widened": 0.0} for o in ("ours", "default")}}
    spec = DoctorSpec(rows=(1, 4, 8), slots=(128, 256), batches=(2,), process_rows=(1, 4)).to_json()
    record = {
        "experiment": "doctor",
        "key": ["doctor", "device"],
        "device": {"platform": "gpu", "kind": "device", "runtime": "", "preallocated": False},
        "environment": {"packages": {"jax": "0"}},
        "compiler_options": {},
        "spec": spec,
        "dtypes": {dtype: values},
        "process": {"status": "ok", "reason": None},
        "missing": {},
        "compilations": 1,
        "compile_seconds": {},
        "seconds": 1.0,
    }
    to_record(record)
    return record


def changed(path, value, dtype="fp16"):
    """What is concluded, in one string, once a value of a clean record is changed."""
    record = damage(made_record(dtype), path if path == "missing" else f"dtypes.{dtype}.{path}", value)
    assert text_of(record)
    assert as_markdown(write(record))
    return " ".join(conclude(record))


def test_of_a_clean_device_nothing_bad_is_said():
    for dtype in ("fp16", "fp32"):
        text = " ".join(conclude(made_record(dtype)))
        bad = ("other bits among", "can then differ", "bits at 8 rows", "stepwise", "deterministic", "no control")
        assert not [words for words in (*bad, "dropped", "Not m") if words in text]
        assert f"{dtype}: no operation gave other bits at 4, 8 rows than at 1." in text
        assert "draft and check needs" in text
    assert "errors of true fp32." in text


DIFFERS = clean_figure(differ=5)


@pytest.mark.parametrize(
    ("path", "value", "said", "unsaid"),
    [
        ("rows.layer.8", DIFFERS, "fp16 (layer: up to 5 %, 5 ulp): a row has other bits", "no operation"),
        ("rows.layer.8", DIFFERS, "--regime=aligned removes that", "in a whole layer"),
        ("rows.layer.8", DIFFERS, "a layer's bits at 8 rows are those at 4: a control", "can differ as much"),
        ("rows.matmul.8", DIFFERS, "no difference was seen in a whole layer", "can then differ"),
        ("rows.matmul.8", clean_figure(nonfinite=1), "matmul: up to not finite", "no operation"),
        ("rows", {}, "whether the number of rows matters was not measured", "no operation"),
        ("slots.softmax.256", DIFFERS, "depend on the number of slots. Fix it", "bits did not"),
        ("batch.layer.2", DIFFERS, "has other bits than alone", "had the bits of a row alone"),
        ("neighbours.layer.2", DIFFERS, "Decode one problem at a time", "hold did not"),
        ("following.layer.8", DIFFERS, "use --uncached=stepwise", "as draft and check needs"),
        ("following", {}, "", "draft and check"),
        ("rerun.layer.all", DIFFERS, "--xla_gpu_deterministic_ops=true", "run again gave the same"),
        ("process.layer.1", False, "fp16 (layer): a second process", "got the same bits"),
        ("process", {}, "", "second process"),
        ("casts_dropped.ours.chain", 0.5, "fp16 (chain 50 % of results) are dropped as jaxkv", "kept as jaxkv"),
        ("casts_dropped.default.chain", 0.5, "programs compiled so are not 16-bit", "kept with XLA"),
        ("sum_bits.fp16.1.rounded", 12.0, "products rounded to 16 bits at 1 row and", "in whichever dtype"),
        ("sum_bits.fp16.1.rounded", 12.0, "--accumulation decides", "in whichever dtype"),
        ("sum_bits.fp16.64.exact", 9.0, "16-bit partial sums at 64 rows", "in whichever dtype"),
        ("sum_bits.fp16.64.exact", None, "not finite at 64 rows", "in whichever dtype"),
        ("missing", {"rows 1x4": "out of time"}, "Not measured: rows 1x4 (out of time).", "no such"),
        (
            "missing",
            {f"{shape}, 128 slots, {d}": "out of time" for shape in ("rows 1x4", "rows 1x8") for d in ("fp16", "fp32")},
            "Not measured: rows 1x4, 128 slots in fp16, fp32, rows 1x8, 128 slots in fp16, fp32 (out of time).",
            "no such",
        ),
    ],
)  # fmt: skip
def test_a_finding_changes_what_is_concluded(path, value, said, unsaid):
    text = changed(path, value)
    assert said in text
    assert unsaid not in text


def test_a_process_that_could_not_be_asked_is_said_so():
    record = made_record()
    record["process"] = {"status": "cannot tell", "reason": "no answer within 60 s"}
    record["dtypes"]["fp16"]["process"] = {}
    assert "cannot be told: no answer within 60 s." in " ".join(conclude(record))
    assert "cannot tell" in text_of(record)


def test_a_void_fp32_control_is_called_so():
    text = changed("operand_bits.default.64", 10.0, "fp32")
    assert "default precision has the errors of fp32 at 1 row and TF32 at 64 rows: only precision highest" in text
    assert "(precision highest) has the errors of true fp32." in text
    text = changed("operand_bits.highest.64", 10.0, "fp32")
    assert "(precision highest) has the errors of fp32 at 1 row and TF32 at 64 rows: it is no control here." in text
