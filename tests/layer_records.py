"""Records of drift, patching and attribution for tests of what is made of them; no figure in them is measured."""

import itertools

from sample_records import make_setting

from jaxkv.experiments.attribution.record import FENCED, VARIANTS
from jaxkv.experiments.drift.record import SEGMENTS, TENSORS
from jaxkv.experiments.patching.record import (
    DIRECTIONS,
    EVERYTHING,
    ITSELF,
    KEYS_VALUES,
    PATCHES,
    RESIDUAL,
    RESIDUAL_NOW,
)

STEPS, PLACES, LAYERS = 10, 9, 3


def _setting(problem):
    return make_setting(problem) | {"tokens_sha256": "0" * 64, "steps": STEPS}


def _rise(share, problem):
    """Residual drift that ends at 1e-3 and has reached a share of it after one layer, give or take."""
    begin = 1e-3 * share * (1 + 0.02 * (problem % 3 - 1))
    return [0.0, *(begin + (1e-3 - begin) * n / (LAYERS - 1) for n in range(LAYERS))]


def _of_tensors(residual):
    return {tensor: residual if tensor == "resid_pre" else residual[1:] for tensor in TENSORS}


def _layers(residual):
    def column(values):
        count = len(values)
        return {"relative": [*values], "cosine": [0.0] * count, "max_abs": [*values], "bit_equal": [0] * count}

    return {t: {segment: column(values) for segment in SEGMENTS} for t, values in _of_tensors(residual).items()}


def _grid(residual):
    def bins(values):
        rows = [[value, 2 * value] for value in values]
        return {"relative": rows, "cosine": rows, "bit_equal": [[0.0, 0.0] for _ in rows]}

    grid = {tensor: bins(values) for tensor, values in _of_tensors(residual).items()}
    return {"bins": [[0, PLACES], [PLACES, 2 * PLACES]], **grid}


def make_drift(first=0.5, repeated=0.5, heads=(4, 2), count=8):
    """Drift of the residual stream that rises as `first` says, and as `repeated` with K/V heads repeated."""
    logits = {"kl": 1e-5, "flips": 0, "max_abs": 1e-2, "bit_equal": 0}
    return [
        _setting(problem)
        | {
            "experiment": "drift", "key": ["drift", problem], "num_layers": LAYERS,
            "heads": {"query": heads[0], "kv": heads[1]},
            "instrumented_bit_equal": {kind: {"cached": STEPS, "uncached": STEPS} for kind in ("figures", "walk")},
            "places": dict.fromkeys(SEGMENTS, PLACES), "layers": _layers(_rise(first, problem)),
            "logits": dict(logits), "grid": _grid(_rise(first, problem)), "first": dict.fromkeys(SEGMENTS),
            "path": {"name": ["logits"], "relative": [1e-3], "max_abs": [1e-2], "bit_equal": [0]},
            "repeated": {"layers": _layers(_rise(repeated, problem)), "logits": dict(logits)}
            if heads[0] != heads[1] else None,
        }
        for problem in range(count)
    ]  # fmt: skip


def make_patched(problem, direction, patch, gap, left, unchanged, met, steps=STEPS, flips=1, equal=0):
    """One patch that leaves `left` of a KL, has so many bit-equal steps, and brings the trajectory back if `met`."""
    return _setting(problem) | {
        "experiment": "patching", "key": ["patching", problem, direction, patch], "steps": steps,
        "direction": direction, "patch": patch, "num_layers": LAYERS, "heads": {"query": 4, "kv": 2},
        "instrumented_bit_equal": {"cached": steps, "uncached": steps},
        "gap": {"kl": gap, "flips": flips, "bit_equal": 0},
        "all": {"kl": left, "recovered": 0, "broken": 0, "bit_equal": equal},
        "unchanged": unchanged, "by_layer": None, "grid": None,
        "trajectory": {"steps": steps, "parted": 4, "until": None if met else 4, "agreeing": steps - 4 if met else 1},
    }  # fmt: skip


def make_patching(now=0.0, residual=0.2, state=0.9, back=(), back_state=(), count=12):
    """Shares of the gap closed by three patches; `back` and `back_state` are the problems whose trajectory returns."""
    closed = {RESIDUAL_NOW: now, RESIDUAL: residual, KEYS_VALUES: state, EVERYTHING: 1.0, ITSELF: 0.0}
    returns = {RESIDUAL_NOW: back, KEYS_VALUES: back_state, EVERYTHING: range(count)}
    records = []
    for problem, direction, patch in itertools.product(range(count), DIRECTIONS, PATCHES):
        gap, equal = 1e-4 * (1 + problem % 3), STEPS if patch == EVERYTHING else 0
        share = closed.get(patch, 0.5) * (1 - 0.01 * (problem % 2) * (patch not in (EVERYTHING, ITSELF)))
        met, unchanged = problem in returns.get(patch, ()), STEPS if patch == ITSELF else 0
        record = make_patched(problem, direction, patch, gap, gap * (1 - share), unchanged, met, equal=equal)
        record["by_layer"] = {"layer": [0, 1, 2]} | {name: [value] * 3 for name, value in record["all"].items()}
        record["grid"] = {"layer": [0, 2], "bins": [[0, 4], [4, 9]], "kl": [[gap, gap / 2]] * 2}
        records.append(record)
    return records


def make_attribution(problem, variant, kl, moved=(8, 8)):
    """A variant under which every step of 8 has this KL."""
    n = 8
    comparison = {name: [kl] * n for name in ("kl", "kl_reverse", "js", "max_abs", "mean_abs", "margin")}
    comparison |= {"flip": [False] * n, "bit_equal": [kl == 0] * n}
    setting = _setting(problem) | {"shapes": {"batch": 1, "prefill": 8, "slots": 16, "left_pad": 0}}
    del setting["headroom"]
    return setting | {
        "experiment": "attribution", "key": ["attribution", problem, variant], "variant": variant,
        "aligned": VARIANTS[variant], "tile": 8, "steps": n, "teacher_forced": comparison,
        "moved": dict(zip(("cached", "uncached"), (0, 0) if variant == FENCED else moved, strict=True)),
    }  # fmt: skip
