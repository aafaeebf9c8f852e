"""Runs of a small study for tests: samples whose flips, figures and answers are chosen, none of them measured."""

import copy

from layer_records import make_drift
from sample_records import grade, make_sample, make_setting

from jaxkv.experiments.parity.record import CELLS, PAIRS
from jaxkv.experiments.report_parts import Run
from jaxkv.records import RunDirectory
from jaxkv.reporting.metrics import free_running

SCALES = {"fp16": 1e-2, "bf16": 1e-1, "fp32": 1e-6}  # of the logits' difference
MODEL = {"name": "tiny", "num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2}


def make_run(samples, name="fp16", precision="fp16", fingerprint=None, flags="--precision=fp16\n", **changes):
    """A run as `gather.read_runs` gives it."""
    config = {
        "experiments": ["divergence"],
        "model": MODEL,
        "precision": {"name": precision, "accumulation": "float32"},
        "held": {"param": "float32", "operand": "float32"},
        "num_problems": len(samples),
        "decoding": {"new_tokens": 20, "tile": None},
        "device": {"platform": "cpu", "kind": "cpu", "runtime": "cpu"},
    } | changes
    session = {"started": "2026-01-02T00:00:00+00:00", "git": "f" * 40, "packages": {"jax": "0.10.2"}}
    run = {"format": 1, "config": config, "fingerprint": fingerprint or name, "sessions": [session]}
    return Run(name, run, samples, (), flags)


def make_samples(
    precision="fp16", count=12, tokens=20, flips=lambda problem: (), right=lambda problem: (True, True), wobble=0.1
):
    """Samples whose logits differ by the precision's scale, and flip and score as told."""
    samples = []
    for problem in range(count):
        sample = make_sample(problem, tokens)
        sample["prompt_sha256"] = f"{problem:064x}"
        scale = SCALES[precision] * (1 + wobble * (problem % 3))
        comparison = sample["teacher_forced"]
        comparison["max_abs"], comparison["mean_abs"] = [scale] * tokens, [scale / 2] * tokens
        comparison["kl"] = comparison["kl_reverse"] = comparison["js"] = [scale**2] * tokens
        chosen = flips(problem)
        for step in chosen:
            comparison["flip"][step], comparison["margin"][step] = True, scale
        if chosen:
            cached = sample["arms"]["cached"]["tokens"]
            sample["arms"]["uncached"]["tokens"] = [
                token + 100 * (step >= min(chosen)) for step, token in enumerate(cached)
            ]
            sample["free_running"] = free_running(sample["arms"]["uncached"]["tokens"], cached)
        same = comparison | {"flip": [False] * tokens, "bit_equal": [True] * tokens}
        same |= {column: [0.0] * tokens for column in ("kl", "kl_reverse", "js", "max_abs", "mean_abs")}
        for control in ("cached_rerun", "uncached_rerun"):  # no two share a list
            sample["controls"][control] = {column: [*values] for column, values in same.items()}
        grade(sample, right(problem))
        samples.append(sample)
    return samples


def lead(problems, arm=0):
    """Of `make_samples`: that one arm alone gets so many problems right."""
    return lambda p: ((True, False), (False, True))[arm] if p < problems else (True, True)


def drift_run(family, first, repeated=0.5, heads=(4, 2), **changes):
    """A run of drift alone, of a model of this family."""
    run = make_run(make_drift(first, repeated, heads, **changes), name=family, experiments=["drift"])
    run.run["config"]["model"] = MODEL | {"name": family, "family": family}
    return run


def write_run(path, run):
    """Writes a run as a directory."""
    with RunDirectory.open(path, run.run["config"], run.flags, {"git": "f" * 40}) as directory:
        for record in run.records:
            directory.append(record)


def align(samples):
    """The same samples of the aligned regime: no step differs."""
    for sample in samples:
        sample["teacher_forced"] = copy.deepcopy(sample["controls"]["cached_rerun"])
        sample["shapes"]["tile"] = 8
    return samples


def as_torch(samples):
    for sample in samples:
        sample |= {"framework": "torch", "attention": "eager", "versions": {"torch": "2.9"}}
    return samples


def make_parity(count=6, tokens=5, framework=1e-2, cache=1e-4, layers=2):
    """'parity' records whose KL between the frameworks and between the arms is as told, a little more a problem."""
    records = []
    for problem in range(count):
        sample = make_sample(problem, tokens)
        pairs = {}
        for pair, (a, b) in PAIRS.items():
            comparison = copy.deepcopy(sample["teacher_forced"])
            size = (cache if a.split()[0] == b.split()[0] else framework) * (1 + problem / 10)
            comparison["kl"] = [size] * tokens
            pairs[pair] = comparison
        records.append(make_setting(problem) | {
            "experiment": "parity", "key": ["parity", problem], "attention": "eager",
            "versions": {"torch": "2.9"}, "torch_uncached": "growing", "tokens": list(range(tokens)),
            "choices": {cell: list(range(tokens)) for cell in CELLS}, "pairs": pairs, "cosine": [0.5] * tokens,
            "layers": {
                "bit_equal": dict.fromkeys(CELLS, tokens),
                "distance": {p: {"mean": [0.0] + [1e-3] * layers, "max": [0.0] + [1e-2] * layers} for p in PAIRS},
            },
        })  # fmt: skip
    return records
