"""Records of experiment 'injection' for tests of what is made of them; no figure in them is measured."""

import copy

from sample_records import make_sample, make_setting

from jaxkv.experiments.record_parts import CLEAN

TOKENS = 6
ERROR = {
    "family": "error", "law": "normal", "numbers": [0.0, 0.5], "bits": None, "mean": 0.0, "std": 0.5,
    "flip_share": 0.02275, "kind": "mul", "sign": "any", "correlate": "none", "draw": "write", "side": "kv",
    "layers": None, "heads": None, "positions": None,
}  # fmt: skip


def error(law="normal", numbers=(0.0, 0.5), mean=0.0, std=0.5, flips=0.0, **more):
    """The spec of an error."""
    return ERROR | {"law": law, "numbers": list(numbers), "mean": mean, "std": std, "flip_share": flips} | more


def quant(method="int4", bits=4.25, first=0, recent=0, block=1, own="none"):
    """The spec of a quantized cache, alike on both sides."""
    side = {"method": method, "bits": bits, "first": first, "recent": recent, "block": block, "own": own}
    return {"family": "quant", "k": dict(side), "v": dict(side)}


SEED_SPECS = {
    "llama:q8_0": quant("llama", 8.5),
    "llama:q4_0": quant("llama", 4.5),
    "uniform:-1,1": error("uniform", (-1, 1), std=3**-0.5),
    "uniform:-1.5,1.5": error("uniform", (-1.5, 1.5), std=0.75**0.5, flips=1 / 6),
    "normal:0,0.25": error(numbers=(0, 0.25), std=0.25, flips=3.2e-5),
    "normal:0,0.5": ERROR,
}


def make_record(problem, change=CLEAN, spec=None, seed=0, right=True, kl=0.5, flips=0):
    """A record of the schema whose figures are as told; a change with flips parts at the first."""
    sample, clean = make_sample(problem, TOKENS), change == CLEAN
    comparison = sample["teacher_forced"] | {"kl": [kl] * TOKENS, "flip": [i < flips for i in range(TOKENS)]}
    free = {"diverged": flips > 0, "first_diverged": 0 if flips else None, "differing_after": 0, "compared_after": 0}
    own = 16.0 if spec is None or spec["family"] == "error" else spec["k"]["bits"]
    run = copy.deepcopy(sample["arms"]["cached"])
    run["scores"]["numeric"]["correct"] = run["scores"]["strict"]["correct"] = right
    return make_setting(problem) | {
        "experiment": "injection",
        "change": change,
        "seed": seed,
        "key": ["injection", problem, change, seed],
        "spec": copy.deepcopy(spec),
        "run": run,
        "teacher_forced": None if clean else comparison,
        "free_running": None if clean else free,
        "cache": {"bytes": 4096, "written": 25, "bits": own, "exact_bits": 16.0, "packed": float(own != 16)},
        "saturated": None,
    }


def make_change(change, spec, rights, kl=0.5, seeds=(0,), **more):
    """Records of a change on problems 0, 1, ... for each seed; `kl` wobbles by problem."""
    return [
        make_record(problem, change, spec, seed, right, kl * (1 + 0.05 * ((problem + seed) % 3)), **more)
        for problem, right in enumerate(rights)
        for seed in seeds
    ]


def make_control(rights):
    """The clean arm."""
    return [make_record(problem, right=right) for problem, right in enumerate(rights)]


def some(count, total):
    """`count` of `total` right, spread evenly."""
    return [(i * count) // total != ((i + 1) * count) // total for i in range(total)]


def make_broken(record):
    """The record as an invalid one."""
    why = {"arm": "changed", "layer": 3, "op": "logits", "position": 9, "step": 2, "value": "nan"}
    return record | {"status": "invalid", "invalid": why, "teacher_forced": None, "free_running": None}
