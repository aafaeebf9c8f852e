"""Records of experiment 'accumulation' for tests of what is made of them; no figure in them is measured."""

from plain_records import summarize_accumulation
from sample_records import make_setting

LAYERS, PROMPT, STEPS = 2, 20, 13
KVARN, KIVI = "kvarn:k2v2,tile=32", "kivi:k2v2,window=32"
N = 8  # problems
REGIMES = ("static", "accumulated:4", "decode")


def plan_bins(steps=STEPS):
    """Four bins of the prompt, and bins of two and four positions after it."""
    bins = [[begin, begin + 5] for begin in range(0, PROMPT, 5)]
    end, width = PROMPT, 2
    while end < PROMPT + steps - 1:
        begin, end = end, min(end + width, PROMPT + steps - 1)
        bins.append([begin, end])
        width = 6 - width
    return bins


def make_record(
    problem,
    quantizer=KVARN,
    regime="decode",
    error=0.2,
    growth=0.0,
    left=(1.0, 0.9, 0.5, 0.4),
    kl=0.01,
    missed=0,
    packed=0.9,
    bits=3.0,
    norm_share=0.25,
    steps=STEPS,
):
    """A record of the schema, with such an `error` after the prompt and half of it in the prompt.

    `growth` is what the last position's error has more than the first one's after the prompt, `left` what the repairs
    leave of it, `missed` the steps with another top token, `packed` a share of the tokens.
    """
    bins = plan_bins(steps)
    fed = PROMPT + steps - 1

    def grid(factor=1.0):
        row = []
        for begin, end in bins:
            along = ((begin + end - 1) / 2 - PROMPT) / max(1, fed - PROMPT - 1)
            row.append(factor * (error / 2 if end <= PROMPT else error + growth * along))
        return [[value * (1 + 0.1 * layer) for value in row] for layer in range(LAYERS)]

    places = [(end - begin if begin >= PROMPT else int(end == PROMPT)) for begin, end in bins]
    agree, lost = [], missed
    for count in places:
        taken = min(count, lost)
        lost -= taken
        agree.append(count - taken if count else None)
    exact = regime == "static"
    tokens = round(packed * fed)
    side = {
        "packed": [tokens] * LAYERS,
        "relative": [0.3 if tokens else None] * LAYERS,
        "norm_share": [norm_share if tokens else None] * LAYERS,
    }
    return make_setting(problem) | {
        "experiment": "accumulation",
        "key": ["accumulation", problem, quantizer, regime],
        "tokens_sha256": f"{problem:064x}",
        "steps": steps,
        "num_layers": LAYERS,
        "quantizer": quantizer,
        "regime": regime,
        "storage": {"bytes": int(bits * 1000), "clean_bytes": 16000, "slots": 64, "bits": bits},
        "saturated": None,
        "bins": bins,
        "attention_error": {"error": grid()},
        "logits": {
            "kl": [(0.0 if exact else kl) if count else None for count in places],
            "agree": [count or None for count in places] if exact else agree,
            "places": places,
            "kl_sum": 0.0 if exact else kl * steps,
            "agree_sum": steps if exact else steps - missed,
            "bit_equal": steps if exact else 0,
        },
        "stored": {"k": side, "v": {name: list(values) for name, values in side.items()}},
        "repair": dict(zip(("nothing", "worst", "others", "everything"), map(grid, left), strict=True))
        if exact
        else None,
        "instrumented_bit_equal": {"clean": steps, "changed": steps if regime == "decode" else None},
    }


def make_quantizer(quantizer=KVARN, problems=N, extra=0.1, wobble=0.01, regimes=REGIMES, error=0.2, **more):
    """All records of a quantizer: what accumulates is `extra` in decode, half of it in blocks, wobbling by problem."""
    shares = {"static": 0.0, "accumulated:4": 0.5, "decode": 1.0}
    records = []
    for problem in range(problems):
        for regime in regimes:
            fed = shares[regime] * (extra + wobble * (problem % 3 - 1))
            own = {name: value for name, value in more.items() if name != "growth"}
            growth = shares[regime] * more.get("growth", 0.0) * (1 + 0.1 * (problem % 3))
            left = more.get("left", (1.0, 0.9, 0.5, 0.4))[1:]
            own["left"] = [1.0, *(x + 0.01 * ((problem + 1) * n % 4) for n, x in enumerate(left, start=1))]
            records.append(make_record(problem, quantizer, regime, error + fed, growth, **own))
    return records


def make_broken(record):
    """The record as an invalid one."""
    why = {"arm": "decode", "layer": 1, "op": "logits", "position": 9, "step": 2, "value": "nan"}
    figures = ("bins", "attention_error", "logits", "stored", "repair", "instrumented_bit_equal")
    return record | dict.fromkeys(figures) | {"status": "invalid", "invalid": why}


def summary_of(records, **config):
    return summarize_accumulation(records, {"config": {"num_problems": N} | config, "fingerprint": "f"})


def both(**more):
    return make_quantizer(KVARN, extra=0.05, wobble=0.005, **more) + make_quantizer(KIVI, extra=0.1, **more)


def of(summary, quantizer=KVARN):
    return next(entry for entry in summary["quantizers"] if entry["quantizer"] == quantizer)


def verdicts(summary):
    return {claim["id"]: claim["verdict"] for claim in summary["claims"]}
