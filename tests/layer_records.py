"""Records of drift and patching for tests of what is made of them; no figure in them is measured."""

from sample_records import make_sample

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

KEPT = ("prompt_tokens", "prompt_sha256", "shapes", "sampling", "headroom", "status", "invalid")
STEPS, PLACES = 10, 9


def _setting(problem):
    sample = make_sample(problem)
    return {name: sample[name] for name in KEPT} | {"problem": problem, "tokens_sha256": "0" * 64, "steps": STEPS}


def _layers(residual, layers):
    def columns(length, values):
        return {
            segment: {
                "relative": list(values), "cosine": [0.0] * length, "max_abs": list(values), "bit_equal": [0] * length,
            }
            for segment in SEGMENTS
        }  # fmt: skip

    return {t: columns(layers, residual[1:]) for t in TENSORS} | {"resid_pre": columns(layers + 1, residual)}


def make_drift(first=0.5, repeated=0.5, heads=(4, 2), layers=3, count=8):
    """Residual drift that ends at 1e-3 and has reached the share `first` of it after one layer, give or take."""
    records = []
    for problem in range(count):

        def rise(share, problem=problem):
            begin = 1e-3 * share * (1 + 0.02 * (problem % 3 - 1))
            return [0.0, *(begin + (1e-3 - begin) * n / (layers - 1) for n in range(layers))]

        residual = rise(first)
        logits = {"kl": 1e-5, "flips": 0, "max_abs": 1e-2, "bit_equal": 0}
        grid = {
            t: {name: [[v, 2 * v] for v in (residual if t == "resid_pre" else residual[1:])] for name in
                ("relative", "cosine")} | {"bit_equal": [[0.0, 0.0]] * (layers + (t == "resid_pre"))}
            for t in TENSORS
        }  # fmt: skip
        records.append(
            _setting(problem)
            | {
                "experiment": "drift", "key": ["drift", problem], "num_layers": layers,
                "heads": dict(zip(("query", "kv"), heads, strict=True)),
                "instrumented_bit_equal": {kind: {"cached": STEPS, "uncached": STEPS} for kind in ("figures", "walk")},
                "places": dict.fromkeys(SEGMENTS, PLACES), "layers": _layers(residual, layers), "logits": logits,
                "grid": {"bins": [[0, PLACES], [PLACES, 2 * PLACES]], **grid},
                "first": dict.fromkeys(SEGMENTS),
                "path": {"name": ["logits"], "relative": [1e-3], "max_abs": [1e-2], "bit_equal": [0]},
                "repeated": {"layers": _layers(rise(repeated), layers), "logits": logits}
                if heads[0] != heads[1] else None,
            }
        )  # fmt: skip
    return records


def make_patching(now=0.0, residual=0.2, state=0.9, back=(), back_state=(), count=12, layers=3):
    """Shares of the gap closed by three patches; `back` and `back_state` are the problems whose trajectory returns."""
    closed = {RESIDUAL_NOW: now, RESIDUAL: residual, KEYS_VALUES: state, EVERYTHING: 1.0, ITSELF: 0.0}
    returns = {RESIDUAL_NOW: back, KEYS_VALUES: back_state, EVERYTHING: range(count)}
    records = []
    for problem in range(count):
        gap = 1e-4 * (1 + problem % 3)
        for direction in DIRECTIONS:
            for patch in PATCHES:
                share = closed.get(patch, 0.5) * (1 - 0.01 * (problem % 2) * (patch not in (EVERYTHING, ITSELF)))
                equal = STEPS if patch == EVERYTHING else 0
                figures = {"kl": gap * (1 - share), "recovered": 0, "broken": 0, "bit_equal": equal}
                column = {name: [value] * layers for name, value in figures.items()}
                met = problem in returns.get(patch, ())
                records.append(
                    _setting(problem)
                    | {
                        "experiment": "patching", "key": ["patching", problem, direction, patch],
                        "direction": direction, "patch": patch, "num_layers": layers, "heads": {"query": 4, "kv": 2},
                        "instrumented_bit_equal": {"cached": STEPS, "uncached": STEPS},
                        "gap": {"kl": gap, "flips": 1, "bit_equal": 0}, "all": figures,
                        "unchanged": STEPS if patch == ITSELF else 0,
                        "by_layer": {"layer": list(range(layers)), **column},
                        "grid": {"layer": [0, 2], "bins": [[0, 4], [4, 9]], "kl": [[gap, gap / 2]] * 2},
                        "trajectory": {
                            "steps": STEPS, "parted": 4, "until": None if met else 4, "agreeing": 6 if met else 0,
                        },
                    }
                )  # fmt: skip
    return records
