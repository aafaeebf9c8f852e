"""With every class aligned, cached and uncached are equal in every bit, in every family and precision."""

import pytest
from attribution_runs import TILE, differing, make_arms
from cases import daily
from small_models import make_prompts, set_up, small_state

from jaxkv.experiments.attribution.record import ALL, FENCED, VARIANTS
from jaxkv.models.alignment import align

# llama in fp16 is in test_attribution_causes.py, mistral in fp32 in test_attribution.py.
CASES = [
    ("mistral", "fp16"), ("gemma2", "fp16"), ("gemma3", "fp16"),
    ("llama", "bf16"), ("gemma2", "bf16"),
    ("llama", "fp32"), ("gemma2", "fp32"), ("gemma3", "fp32"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "precision"), daily([("gemma3", "fp32")], CASES))
def test_all_aligned_is_exact(family, precision):
    deep = (family, precision) == ("gemma3", "fp32")  # with two RoPE bases; one layer is quicker to compile
    arms = make_arms(family, precision, layers=1 + deep)
    state = arms.prepare(small_state(family, precision, layers=1 + deep))
    layout, tokens, rows = set_up(make_prompts((4, 9)))
    reference, _ = arms.run_cached_keeping(state, tokens, rows, layout, align=align(TILE, VARIANTS[ALL]))
    assert differing(arms, state, ALL, reference, rows, layout) == 0
    if precision == "fp32":  # there the programs do differ
        assert differing(arms, state, FENCED, reference, rows, layout) > 8
