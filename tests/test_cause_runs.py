"""Twelve faults in the command's plain programs: a default run of two precisions calls none of them rounding.

Each is planted where the aligned gate does not see it. The runs are those of the command and the verdicts those of the
report; no flag is about checking.
"""

import json

import planted_bugs
import pytest
from cases import daily
from commands import DATA, run_in_process
from small_models import find_nothing

from jaxkv import report
from jaxkv.decode import Arms
from jaxkv.experiments.divergence.cause import CANNOT_TELL, FAULT, ROUNDING

pytestmark = pytest.mark.usefixtures("one_layer")
PREFILL, STEP, UNCACHED = "prefill", "cached_loop", "tile_loop"
# The window of the test models is 24, their texts are some 150 tokens long.
FAULTS = {
    "position in the step": ("llama2", STEP, planted_bugs.positions_off),
    "rotation in the step": ("gemma3", STEP, planted_bugs.rotation_off),
    "rotation in the prefill": ("llama3", PREFILL, planted_bugs.rotation_off),
    "window in the step": ("gemma3", STEP, planted_bugs.window_off),
    "window uncached": ("mistral", UNCACHED, planted_bugs.window_off),
    "mask in the prefill": ("qwen2", PREFILL, planted_bugs.first_key_lost),
    "softcap in the step": ("gemma2", STEP, planted_bugs.softcap_lost),
    "scale uncached": ("qwen3", UNCACHED, lambda: planted_bugs.scaled("qk.", 1.01)),
    "K normed in bf16 in the step": ("gemma3", STEP, planted_bugs.narrow_k_norm),
    "V in bf16 in the prefill": ("gemma2", PREFILL, lambda: planted_bugs.narrowed("v.")),
    "norm in bf16 uncached": ("llama2", UNCACHED, planted_bugs.narrow_norm),
    "cache in bf16 in the step": ("mistral", STEP, planted_bugs.narrow_cache),
}


@pytest.fixture(autouse=True)
def no_audit(monkeypatch):
    """Verdicts do not ask it."""
    monkeypatch.setattr(Arms, "_audit_pass", staticmethod(find_nothing))


def run(family, out, cache, problems=2):
    """What the report on a default run in two precisions says: precision -> verdict."""
    run_in_process(
        f"--model=test-{family}", "--checkpoint=random:0", f"--data={DATA / 'problems.jsonl'}",
        "--prompt=zero_shot", f"--num_problems={problems}", "--max_new_tokens=8", "--bucket=256", f"--out={out}", cache,
    )  # fmt: skip
    assert report.main([str(out)]) == 0
    causes = json.loads((out / "summary.json").read_text())["causes"]
    page = (out / "report.md").read_text()
    for found in causes:
        assert any(found["name"] in line and found["verdict"] in line for line in page.splitlines())
    return {found["precision"]: found["verdict"] for found in causes}


@pytest.mark.parametrize(
    "fault",
    daily(["mask in the prefill"], FAULTS),
)
def test_a_default_run_calls_a_fault_by_its_name(fault, tmp_path, cache):
    """Not alone not rounding: in fp16 too, where the fault may hide, since fp32 shows it."""
    family, program, bug = FAULTS[fault]
    with planted_bugs.planted(program, bug):
        assert run(family, tmp_path, cache) == {"fp16": FAULT, "fp32": FAULT}


def test_the_same_run_without_a_fault_is_rounding(tmp_path, cache):
    """Of as many problems as it takes beside the gate's two; in fp16 a CPU's arms agree in too many of them to tell."""
    found = run("qwen2", tmp_path, cache, problems=6)
    assert found["fp32"] == ROUNDING
    assert found["fp16"] in (ROUNDING, CANNOT_TELL)
