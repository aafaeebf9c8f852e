"""The page on KVarN's ablation: which cells are set beside which, and what of them is shown."""

import importlib
import math
import pathlib
import re
import sys
from types import SimpleNamespace

import pytest

from jaxkv.interventions.quantizers import parse_cache_quant

ROOT = pathlib.Path(__file__).parents[1]
FLAGFILES = sorted((ROOT / "launch").glob("ablation-*.flags"))
sys.path.insert(0, str(ROOT / "analysis"))
ablation = importlib.import_module("ablation")
sys.path.pop(0)


def read_specs(path):
    """The caches that a flagfile asks for."""
    return [line.removeprefix("--cache_quant=") for line in path.read_text().splitlines() if "--cache_quant=" in line]


def factorial():
    """The names of the factorial's cells, as records have them."""
    names = [re.fullmatch(r"ablation-(kvarn|k|v)-\d+", path.stem) and read_specs(path) for path in FLAGFILES]
    return [str(parse_cache_quant(text)) for found in names if found for text in found]


def make_cell(*gaps, tokens=10):
    """A cell whose windows lose so many nats."""
    logits = SimpleNamespace(kl=0.5, flips=1)
    windows = {
        index: SimpleNamespace(
            tokens=tokens, prompt_tokens=32, nats=SimpleNamespace(uncached=20.0, cached=20.0 + gap), logits=logits
        )
        for index, gap in enumerate(gaps)
    }
    return {"spec": {"k": {"bits": 2.5}, "v": None}, "cache": {"bits": 9.25}, "windows": windows}


def test_the_factorial_is_whole():
    names = factorial()
    assert len(names) == len(set(names)) == 32  # of each tile 8 on both sides, 4 on each alone
    assert sum(parse_cache_quant(name).k.quantizer is None for name in names) == 8


def test_cells_of_a_tile_and_side_have_the_same_bits():
    for name in factorial():
        quant = parse_cache_quant(name)
        for side in (quant.k, quant.v):
            if side.quantizer is not None:
                plain = parse_cache_quant(f"kvarn:2,tile={side.quantizer.tile}")
                plain = getattr(plain, side.quantizer.side).quantizer
                assert side.quantizer.bits_per_element(256) == plain.bits_per_element(256)
                assert side.first == 16


@pytest.mark.parametrize("path", FLAGFILES, ids=lambda path: path.stem)
def test_every_flagfile_is_run_and_reads(path):
    assert path.stem.removeprefix("ablation-") in (ROOT / "launch" / "ablation.sh").read_text()
    specs = read_specs(path)
    assert specs
    assert len({str(parse_cache_quant(text)) for text in specs}) == len(specs)
    for text in specs:
        parse_cache_quant(text).check(256, 1152)


@pytest.mark.parametrize(("factor", "pairs"), [(0, 12), (1, 12), (2, 16), (3, 16)])
def test_pairs_differ_in_one_factor(factor, pairs):
    found = ablation.list_pairs(factorial(), factor)
    assert len(found) == pairs
    assert len({second for _, second in found}) == pairs
    assert not {first for first, _ in found} & {second for _, second in found}


def test_an_effect_is_the_geometric_mean_of_ratios():
    pairs = [(make_cell(4, 8), make_cell(2, 2)), (make_cell(2, 4), make_cell(0, 0))]
    mean = float(ablation.show_effect(pairs).split(" ")[0])
    assert mean == pytest.approx(math.exp((2 + 6 + 2 + 4) / 2 / 20), rel=1e-3)
    alone = ablation.show_effect([(make_cell(3), make_cell(1))])
    assert float(alone) == pytest.approx(math.exp(0.2), rel=1e-3)
    assert ablation.show_effect([(make_cell(3, 99), make_cell(1))]) == alone  # a window that both have


def test_the_page():
    clean = make_cell(0, 0)
    cells = {"none": clean, "kvarn:k2v2,tile=32,first=16": make_cell(5, 5)}
    cells["k=kvarn:2,tile=32,rotate=off,first=16;v=kvarn:2,tile=32,first=16"] = make_cell(1, 1)
    cells["int4"] = make_cell()
    origin = {
        "commands": ["python -m jaxkv.launch"], "dates": ["2026-12-01"], "device": {"kind": "cpu"}, "revisions": [],
        "versions": {"jax": "0.0"}, "checkpoint": {"files": {"x.gguf": "ab" * 32}},
        "data": {"problems": {"sha256": "cd" * 32}},
    }  # fmt: skip
    page = ablation.render({"gemma": {"origin": origin, "cells": cells}})
    effect = f"{math.exp(0.4):.4g} [{math.exp(0.4):.4g}, {math.exp(0.4):.4g}]"
    assert f"| rotation of K | K and V | 32 | 1 | {effect} |" in page
    assert f"| `kvarn:k2v2,tile=32,first=16` | 2.5 / 16; 9.25 | {math.exp(0.5):.4g} [" in page
    assert "| `int4` | - | none valid | - | - |" in page
    assert "windows of 32 tokens" in " ".join(page.split())
    assert "3 caches of a model" in " ".join(page.split())
