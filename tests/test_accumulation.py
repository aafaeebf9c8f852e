"""The regimes: static feeds no error back, accumulated(1) is decode, records say what was measured."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from cases import daily
from quantized_models import weights_of, wide_arms, wide_config
from small_models import NEW_TOKENS, SAMPLERS, make_prompts, same_bits, unaudited

from jaxkv.config import make_precision
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments.accumulation import run as accumulation
from jaxkv.experiments.accumulation.run import Accumulation, list_regimes, plan_bins
from jaxkv.experiments.batches import Item, RunSpec, plan_batches
from jaxkv.interventions.quantizers import parse_cache_quant
from jaxkv.interventions.repaired_cache import CHOICES, repair_tokens
from jaxkv.records import to_line, to_record

LENGTHS = (9, 6)
ITEMS = tuple(Item(index, tuple(make_prompts((n,), index)[0]), "1") for index, n in enumerate(LENGTHS))
SPEC = RunSpec(new_tokens=NEW_TOKENS, batch_size=2, padding="left", bucket=8)
PACKED = "k=kivi:2,group=4,window=4;v=fp8:e4m3,scale=0.002"  # whole groups, and a format with an end
PLAIN = "k=mask:16;v=none"  # every bit of fp16
# A step sees its own row as it is in a cache of the first kind, and packed in the second, but for a prefill's rows; all
# history is packed anew every 9 tokens.
KIVI, KVARN, HISTORY = "kivi:k2v2,group=4,window=4", "kvarn:2,tile=8,first=0", "k=hf:2,every=9;v=none"
BLOCKS = (1, 5)


@functools.cache
def set_up():
    arms = wide_arms("mistral", "fp16", sampler=SAMPLERS["greedy"])
    state = weights_of(arms)
    runs = Accumulation(
        unaudited(arms),
        state,
        SPEC,
        [parse_cache_quant(spec) for spec in (PACKED, PLAIN, KIVI, KVARN, HISTORY)],
        BLOCKS,
    )
    return runs, runs.begin(plan_batches(ITEMS, SPEC)[0])


@functools.cache
def ran(regime, quant=PACKED):
    runs, begun = set_up()
    return runs.run(begun, (parse_cache_quant(quant), regime))


def record_of(regime, quant=PACKED, row=1, replay=None):
    runs, begun = set_up()
    return runs.record(ITEMS[row], row, begun, (parse_cache_quant(quant), regime), replay or ran(regime, quant))


def valid_logits(logits):
    lengths = np.asarray(set_up()[1].reference.cached.lengths)
    return [logits[row, :length] for row, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("quant", "own"),
    daily([(PACKED, "step")], [(PACKED, "step"), (KIVI, "step"), (KVARN, "prompt"), (HISTORY, "step")]),
)
def test_accumulated_1_is_decode(quant, own):
    """Blocks of one token by the program of the regimes, and the arm's own loop: bit for bit, left padding included."""
    quantizer = parse_cache_quant(quant).k.quantizer
    assert (quantizer.own, quantizer.whole_history) == (own, quant == HISTORY)
    blocks, decode = ran("accumulated:1", quant), ran("decode", quant)
    assert same_bits(valid_logits(blocks.replay.logits), valid_logits(decode.arm.logits))
    assert same_bits(blocks.replay.errors, decode.replay.errors)
    assert not same_bits(valid_logits(blocks.replay.logits), valid_logits(set_up()[1].reference.cached.logits))


def test_longer_blocks_see_other_things():
    assert not same_bits(ran("accumulated:1").replay.errors, ran("accumulated:5").replay.errors)


def test_saturated_elements_are_counted():
    """Values that fp8 e4m3 at this scale cannot hold; keys of KIVI have no such end."""
    clean, record = set_up()[1].clean, record_of("decode")
    to_record(json.loads(to_line(record)))
    cache, over, elements = ran("decode").replay.cache, 0, 0
    for layer in range(record["num_layers"]):
        k, v = (np.asarray(packed)[1] for packed in cache.packed(layer))
        values = np.asarray(clean.values[f"v.{layer}"], np.float64)[1]
        over += (np.abs(values[v]) > 448 * 0.002).sum()
        elements += (k.sum() + v.sum()) * values[0].size
    assert record["saturated"] == {"k": 0, "v": over, "elements": elements}
    assert 0 < over < elements
    assert record_of("accumulated:1")["saturated"] == record["saturated"]


@pytest.mark.parametrize("quant", daily([PACKED], [PACKED, KIVI]))
def test_static_feeds_nothing_back(quant):
    """The model goes on from the clean run's values: its logits are the clean ones, its first layers' error its own."""
    reference = set_up()[1].reference
    static, decode = ran("static", quant), ran("decode", quant)
    assert same_bits(valid_logits(static.replay.logits), valid_logits(reference.cached.logits))
    errors = [np.asarray(x) for x in static.replay.errors]
    assert all((error > 0).any() for error in errors)
    prompt = reference.layout.prompt
    assert any(error[:, :prompt].any() for error in errors) == (quant == PACKED)  # KIVI's prefill sees rows as they are
    # Layer 0 has clean inputs in both regimes, later layers have them in one.
    assert same_bits(np.asarray(decode.replay.errors[0]), errors[0])
    assert not same_bits(np.asarray(decode.replay.errors[1])[:, prompt:], errors[1][:, prompt:])


@pytest.mark.parametrize("repaired", daily([False], [False, True]))
def test_a_quantizer_of_nothing_errs_nowhere(repaired, monkeypatch):
    choices = CHOICES if repaired else ()
    monkeypatch.setattr(accumulation, "CHOICES", choices)
    run, reference = ran.__wrapped__("static", PLAIN), set_up()[1].reference
    assert same_bits(valid_logits(run.replay.logits), valid_logits(reference.cached.logits))
    assert not any(np.asarray(error).any() for error in run.replay.errors)
    record = record_of("static", PLAIN, replay=run)
    assert record["logits"]["kl_sum"] == 0
    assert record["logits"]["bit_equal"] == record["steps"]
    assert record["stored"]["k"]["relative"] == [0.0, 0.0]
    assert record["stored"]["k"]["packed"] == [LENGTHS[1] + record["steps"] - 1] * 2
    assert not np.any([record["repair"][choice] for choice in choices])


def test_repair():
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(1, 40, 1, 8)).astype(np.float32)
    scale = np.ones(40)
    scale[[3, 7]], scale[20:] = (3.0, 0.2), 1.05
    view = exact * scale[None, :, None, None].astype(np.float32)
    packed, repair = np.arange(40)[None] < 39, jax.jit(repair_tokens)  # 5 % of 39 tokens are 2
    size = lambda x: np.linalg.norm(np.asarray(x)[0, :, 0], axis=-1) / np.linalg.norm(exact[0, :, 0], axis=-1)  # noqa: E731
    nothing, worst, others, everything = (size(repair(view, exact, packed, n)) for n in range(4))
    assert np.allclose(nothing, scale)
    assert np.allclose(worst[[3, 7]], 1)
    assert np.allclose(np.delete(worst, [3, 7]), np.delete(scale, [3, 7]))
    assert np.allclose(others[[3, 7]], [3.0, 0.2])
    assert np.allclose(np.delete(others, [3, 7])[:-1], 1)
    assert np.allclose(everything[:39], 1)
    assert everything[39] == pytest.approx(1.05)


def test_an_oracle_repairs_norms_alone():
    """Repairing nothing is the static regime; repairing all leaves less error than the tokens' norms had made."""
    static = ran("static")
    assert same_bits([np.asarray(x) for x in static.replay.errors], static.repairs["nothing"])
    mean = {choice: float(np.mean([e.mean() for e in errors])) for choice, errors in static.repairs.items()}
    assert len(set(mean.values())) == 4
    assert mean["worst"] < mean["nothing"]


def test_records_are_valid():
    for given in ({"regime": "static"}, {"regime": "accumulated:5"}, {"regime": "decode", "row": 0}):
        to_record(json.loads(to_line(record_of(**given))))
    record = record_of("decode")
    steps = record["steps"]
    assert record["bins"][-1][1] == LENGTHS[1] + steps - 1
    assert record["instrumented_bit_equal"] == {"clean": steps, "changed": steps}
    assert record["logits"]["agree_sum"] == sum(n for n in record["logits"]["agree"] if n is not None)
    packed = (LENGTHS[1] + steps - 1) // 4 * 4
    assert record["stored"]["k"]["packed"] == [packed, packed]
    assert all(0 < share < 1 for share in record["stored"]["k"]["norm_share"])
    assert record["storage"]["bytes"] < record["storage"]["clean_bytes"]
    assert len(to_line(record_of("static"))) < 5000


def test_invalid_samples_have_no_figures():
    broken = dataclasses.replace(ran("decode"), nonfinite_step=np.asarray([-1, 3]))
    record = json.loads(to_line(record_of("decode", replay=broken)))
    assert record["invalid"]["step"] == 3
    to_record(record)
    to_record(json.loads(to_line(record_of("decode", row=0, replay=broken))))


def test_bins_and_regimes():
    assert plan_bins(3, 0) == [[0, 1], [1, 2], [2, 3]]
    bins = plan_bins(100, 1000)
    assert len(bins) == 24
    assert bins[11][1] == bins[12][0] == 100
    assert bins[-1][1] == 1100
    assert list(list_regimes((1, 64))) == ["static", "accumulated:1", "accumulated:64", "decode"]
    with pytest.raises(UserError, match="blocks of 0 tokens"):
        list_regimes((64, 0))
    arms = Arms(wide_config(), make_precision("fp16"), tile=8)
    with pytest.raises(ValueError, match="plain regime"):
        Accumulation(arms, None, SPEC, [parse_cache_quant(PACKED)])
