"""Samples of experiment 'divergence' for tests."""

import functools
import json
import operator

from jaxkv.experiments.divergence.record import CONTROLS

SETTING = ("prompt_tokens", "prompt_sha256", "shapes", "sampling", "headroom", "status", "invalid")


def make_sample(problem: int = 3, tokens: int = 4) -> dict:
    comparison = {
        "flip": [False] * tokens,
        "bit_equal": [False] * tokens,
        **{name: [0.5] * tokens for name in ("kl", "kl_reverse", "js", "max_abs", "mean_abs", "margin")},
    }
    score = {name: {"answer": "18", "correct": True} for name in ("strict", "flexible", "numeric")}
    arm = {"tokens": list(range(tokens)), "text": "It is 18", "stop": "eos", "scores": score}
    sample = {
        "experiment": "divergence",
        "problem": problem,
        "key": ["divergence", problem],
        "prompt_tokens": 20,
        "prompt_sha256": "ab" * 32,
        "shapes": {"batch": 1, "prefill": 64, "slots": 128, "uncached": "padded to 128", "left_pad": 0, "tile": None},
        "sampling": {"sampler": "greedy", "temperature": 1.0, "top_k": None, "top_p": None, "seed": 0},
        "status": "ok",
        "invalid": None,
        "headroom": {"max_abs": 1000.0, "layer": 1, "op": "resid_pre", "limit": 65504.0},
        "arms": {"cached": arm, "uncached": arm},
        "teacher_forced": comparison,
        "free_running": {"diverged": False, "first_diverged": None, "differing_after": 0, "compared_after": 0},
        "controls": dict.fromkeys(CONTROLS) | {"cached_rerun": comparison},
        "label_change": dict.fromkeys(("strict", "flexible", "numeric"), "same"),
    }
    return json.loads(json.dumps(sample))  # No two fields share a list.


def make_invalid(problem: int = 3) -> dict:
    sample = make_sample(problem)
    sample |= {"status": "invalid", "teacher_forced": None, "free_running": None}
    sample["controls"] = dict.fromkeys(sample["controls"])
    sample["invalid"] = {"arm": "cached", "layer": 8, "op": "resid_pre", "position": 5, "step": 2, "value": "inf"}
    return sample


def make_setting(problem: int, tokens: int = 4) -> dict:
    """What records of every experiment on problems have."""
    sample = make_sample(problem, tokens)
    return {name: sample[name] for name in ("problem", *SETTING)}


def grade(sample, right, **labels):
    """Says of both arms whether they are right, and labels a change of answer."""
    for arm, correct in zip(("cached", "uncached"), right, strict=True):
        for score in sample["arms"][arm]["scores"].values():
            score["correct"] = correct
    if right[0] != right[1]:
        sample["label_change"] = dict.fromkeys(sample["label_change"], "answer_changed") | labels


def find_at(record, path):
    """What stands at a path of keys and indices."""
    return functools.reduce(operator.getitem, path, record)


def damage(record, path, change):
    """The record with a field replaced, or dropped by `...`. The path may be one text with dots between its parts."""
    key, *rest = path.split(".") if isinstance(path, str) else path
    key = int(key) if isinstance(record, list) else key
    changed = record.copy()
    if rest:
        changed[key] = damage(record[key], rest, change)
    elif change is ...:
        del changed[key]
    else:
        changed[key] = change
    return changed
