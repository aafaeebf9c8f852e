"""What a run's quantizers say of the KVarN study: no verdict is stronger than its interval."""

import math

import pytest
from accumulation_records import KIVI, KVARN, N, both, make_quantizer, make_record, of, summary_of, verdicts
from shown import show_by

from jaxkv.experiments.accumulation.report import write_accumulation
from jaxkv.reporting.format import format_number, format_percent

_, to_markdown, _ = show_by(write_accumulation)


def claim_of(summary, name):
    return next(claim for claim in summary["claims"] if claim["id"] == name)


def test_do_errors_accumulate_with_every_quantizer():
    assert verdicts(summary_of(both()))["K1a"] == "holds"
    mixed = summary_of(make_quantizer(KVARN, extra=0.0) + make_quantizer(KIVI, extra=0.1))
    assert verdicts(mixed)["K1a"] == "cannot tell"


def test_a_quantizer_that_errs_nowhere_says_nothing():
    exact = make_quantizer("mask:16", error=0.0, extra=0.0, wobble=0.0, kl=0.0, norm_share=0.0)
    summary = summary_of(exact)
    assert set(verdicts(summary).values()) == {"cannot tell"}
    assert verdicts(summary_of(exact + both()))["K1a"] == "holds"
    assert "`mask:16` errs at no decoded position" in to_markdown(summary)
    packed = summary_of(make_quantizer(packed=0.0, error=0.0, extra=0.0, wobble=0.0))
    assert (
        f"`{KVARN}` packed nothing: its windows, or layers that it leaves alone, hold the whole text."
        in to_markdown(packed)
    )


def test_does_kvarn_accumulate_least():
    def judged(rival=0.1, name=KIVI, ours=KVARN, mine=0.05, **more):
        return summary_of(make_quantizer(ours, extra=mine, wobble=0.005) + make_quantizer(name, extra=rival, **more))

    line = next(c for c in judged()["claims"] if c["id"] == "K2")["figure"][0]
    assert "3 bits, 91 % packed; 3 bits, 91 % packed" in line
    # Windows that differ, fewer bits, more bits.
    assert verdicts(judged(packed=0.7))["K2"] == "cannot tell"
    assert verdicts(judged(0.02, packed=0.7))["K2"] == "cannot tell"
    assert verdicts(judged(bits=2.5))["K2"] == "cannot tell"
    assert verdicts(judged(0.02, bits=2.5))["K2"] == "does not hold"
    assert verdicts(judged(bits=3.5))["K2"] == "holds"
    assert verdicts(judged(0.02, bits=3.5))["K2"] == "cannot tell"
    # Nothing to compare with, other widths, a variant of KVarN's.
    assert verdicts(summary_of(make_quantizer()))["K2"] == "cannot tell"
    assert verdicts(judged(name="kivi:k4v4"))["K2"] == "cannot tell"
    assert verdicts(judged(ours="kvarn:k2v2,rotate=off"))["K2"] == "cannot tell"
    assert verdicts(judged(ours="kvarn:k2v2,tile=64,first=32,recent=16,aux=fp16"))["K2"] == "holds"
    wide, none = "its codes have 4 bits", "its sides differ, or its format has no bits of a code"
    why = {"kivi:k4v4": wide, "int4,recent=32": wide, "kvarn:k4v2": none, "fp8:e4m3": none, "llama:q4_0": none}
    for name, reason in (why | {"k=kvarn:2;v=kivi:2": none}).items():
        assert f"`{name}` is not compared: {reason}" in claim_of(judged(name=name), "K2")["figure"]
    # One rival that accumulates less refutes it, one that has more bits leaves it open.
    records = both()
    assert verdicts(summary_of(records + make_quantizer("quarot:2", extra=0.02)))["K2"] == "does not hold"
    assert verdicts(summary_of(records + make_quantizer("quarot:2", extra=0.02, bits=4.0)))["K2"] == "cannot tell"


def test_a_larger_static_error_hides_what_kivi_accumulates():
    """Errors add in quadrature: KIVI's difference is the smaller one, though more is fed back."""

    def judged(static, extra):
        kvarn = make_quantizer(KVARN, error=0.21, extra=0.053, wobble=0.005)
        return summary_of(kvarn + make_quantizer(KIVI, error=static, extra=extra))

    summary = judged(0.357, 0.043)
    assert of(summary, KIVI)["regimes"]["decode"]["extra"]["decoded"]["interval"][1] < 0.053
    claim = claim_of(summary, "K2")
    assert claim["verdict"] == "cannot tell"
    assert claim["figure"][0].endswith(
        "cannot tell, since the static errors differ so that the two measures disagree (difference: does not hold; "
        "quadrature: holds)"
    )
    for name, error, extra, wobble in ((KIVI, 0.357, 0.043, 0.01), (KVARN, 0.21, 0.053, 0.005)):
        fed = [extra + wobble * (problem % 3 - 1) for problem in range(N)]
        mean = sum(1.05 * math.sqrt((error + own) ** 2 - error**2) for own in fed) / N  # 1.05: mean over the layers
        assert f"`{name}` {format_number(mean)} [" in claim["figure"][0]
    # Where both measures are on one side, they decide.
    assert verdicts(judged(0.357, 0.1))["K2"] == "holds"
    assert verdicts(judged(0.357, 0.02))["K2"] == "does not hold"
    assert "in quadrature: sqrt(decode^2 - static^2)" in to_markdown(summary).lower()


def test_growth_beside_a_static_error_that_grows():
    """The difference shrinks along the text, while what is fed back does not."""

    def judged(static_growth, growth):
        records = []
        for problem in range(N):
            own = growth + 0.002 * (problem % 3)
            records.append(make_record(problem, regime="static", error=0.2, growth=static_growth))
            records.append(make_record(problem, error=0.3, growth=own))
        return claim_of(summary_of(records), "K1b")

    claim = judged(0.3, 0.28)
    assert claim["verdict"] == "cannot tell"
    assert "disagree (difference: does not hold; quadrature: holds)" in claim["figure"][0]
    assert judged(0.3, 0.4)["verdict"] == "holds"
    assert judged(0.3, 0.22)["verdict"] == "does not hold"


@pytest.mark.parametrize(
    ("left", "worst", "reason"),
    [
        ((1.0, 0.9, 0.95, 0.8), "holds", "does not hold"),
        ((1.0, 1.1, 1.2, 0.69), "does not hold", "cannot tell"),  # repairing the worst makes it worse
        ((1.0, 0.9, 0.95, 0.6), "holds", "holds"),  # 40 % of the norm, 64 % of the squared error
    ],
)
def test_are_token_scales_the_reason(left, worst, reason):
    found = verdicts(summary_of(make_quantizer(left=left)))
    assert (found["K3a"], found["K3b"]) == (worst, reason)


def test_the_reason_is_a_share_of_the_squared_error():
    claim = claim_of(summary_of(make_quantizer(left=(1.0, 0.9, 0.95, 0.6))), "K3b")
    shares = [1 - (0.6 + 0.01 * ((problem + 1) * 3 % 4)) ** 2 for problem in range(N)]
    assert "of the squared static error" in claim["claim"]
    assert f"of the squared static error: {format_percent(sum(shares) / N)} % [" in claim["figure"][0]


@pytest.mark.parametrize(("problems", "wobble"), [(1, 0.04), (2, 0.04), (2, 0)])
def test_few_problems_decide_nothing(problems, wobble):
    """Nor two that are alike: a spread that they do not show is none that can be relied on."""
    records = make_quantizer(problems=problems, extra=0.05, wobble=wobble)
    records += make_quantizer(KIVI, problems, wobble=2 * wobble)
    assert {verdicts(summary_of(records))[name] for name in ("K1a", "K2")} == {"cannot tell"}
