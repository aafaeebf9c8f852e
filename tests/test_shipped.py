"""The checkpoints that come with the package: by name, in a wheel, and to transformers."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
import transformers
from checkpoint_files import weights
from tiny_models import load_torch, run_whole

from jaxkv.checkpoints import load, shipped
from jaxkv.checkpoints.export import export
from jaxkv.checkpoints.shipped import SHIPPED, find_shipped
from jaxkv.config import make_precision
from jaxkv.errors import UserError
from jaxkv.models.families import get_preset, parse_config
from jaxkv.provenance import sha256_file
from jaxkv.tasks import arith

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOADED = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors")
FILES = {*LOADED, "tokenizer_config.json", "training.json"}
FP16 = make_precision("fp16")
# Six layers of width 256 sum more than the models of tests/test_parity.py, whose tolerance is 2e-5.
TOLERANCE = 1e-4
LENGTH = 480  # tokens: several windows of 64


def make_text():
    return "\n\n".join(f"{problem.question}\n{problem.solution}" for problem in arith.generate("test", 12))


@pytest.mark.parametrize("name", SHIPPED)
def test_loads_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = load(name, precision=FP16, config=get_preset(name))
    home = find_shipped(name)
    assert checkpoint.config == get_preset(name)
    facts = checkpoint.provenance
    assert (facts.source, facts.kind, facts.revision, facts.add_bos) == (name, "safetensors", None, True)
    assert facts.dtypes == {"fp16": len(weights(checkpoint))}
    assert facts.files == {file: sha256_file(home / file) for file in LOADED}
    trained = json.loads((home / "training.json").read_text())["files"]
    assert facts.files.items() <= trained.items()
    tokenizer = checkpoint.tokenizer
    assert tokenizer.vocab_size <= checkpoint.config.vocab_size
    stops = checkpoint.generation["eos_token_id"]
    assert (checkpoint.generation["bos_token_id"], (stops,)) == (tokenizer.bos_id, tokenizer.eos_ids)


@pytest.mark.parametrize("name", SHIPPED)
def test_transformers_computes_its_logits(name):
    checkpoint, home = load(name, precision=make_precision("fp32")), find_shipped(name)
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    text = make_text()
    ids = checkpoint.tokenizer.encode(text)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids, skip_special_tokens=True) == text
    tokens = np.array([ids[:LENGTH]], np.int32)
    assert tokens.shape[1] == LENGTH
    ours = np.asarray(run_whole(checkpoint.config, make_precision("fp32"), checkpoint.state, tokens)[0])
    with torch.no_grad():
        expected = load_torch(home)(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    difference = np.abs(ours - expected).max()
    print(f"{name}: {difference:.2g} of {np.abs(expected).max():.3g}")
    assert difference < TOLERANCE


@pytest.mark.parametrize("name", SHIPPED)
def test_its_window_binds(name):
    checkpoint, fp32 = load(name, precision=make_precision("fp32")), make_precision("fp32")
    config = checkpoint.config
    if name == "tiny-llama2":
        assert config.window is None
        return
    tokens = np.array([checkpoint.tokenizer.encode(make_text())[:LENGTH]], np.int32)
    wide = dataclasses.replace(config, window=LENGTH)
    narrow, open_ = (np.asarray(run_whole(c, fp32, checkpoint.state, tokens)[0]) for c in (config, wide))
    apart = np.abs(narrow - open_).max((0, 2))
    assert apart[: config.window].max() < 1e-4
    assert np.median(apart[config.window :]) > 1e-2


@pytest.mark.parametrize("name", SHIPPED)
def test_its_export_is_itself(name, tmp_path):
    home = find_shipped(name)
    export(load(name, precision=FP16), str(tmp_path / "dest"))
    for file in ("model.safetensors", "generation_config.json"):
        assert sha256_file(tmp_path / "dest" / file) == sha256_file(home / file)
    configs = [json.loads((path / "config.json").read_text()) for path in (home, tmp_path / "dest")]
    assert parse_config(configs[0], name) == parse_config(configs[1], name) == get_preset(name)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_was_trained_to_the_right_degree(name):
    """Neither hopeless nor so sure that nothing comes near a tie."""
    facts = json.loads((find_shipped(name) / "training.json").read_text())
    held_out = facts["accuracy"]["zero_shot"]
    assert held_out["problems"] == 500
    assert 0.60 <= held_out["accuracy"] <= 0.97


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    path = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(path.glob("*.whl"))


def test_wheel_holds_the_package_checkpoints_and_flagfiles_alone(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {pathlib.PurePosixPath(name) for name in file.namelist()}
    assert {name.parts[0] for name in names} == {"jaxkv", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    data = {str(name.relative_to("jaxkv/data")) for name in names if name.parts[1] == "data"}
    flagfiles = {f"launch/{path.name}" for path in (ROOT / "launch").glob("*.flags")}
    assert data == {f"{name}/{file}" for name in SHIPPED for file in FILES} | flagfiles
    code = {name.relative_to("jaxkv") for name in names if name.parts[0] == "jaxkv" and name.parts[1] != "data"}
    kept = {path.relative_to(ROOT / "jaxkv") for path in (ROOT / "jaxkv").rglob("*") if path.is_file()}
    assert {str(path) for path in code} == {str(path) for path in kept if "__pycache__" not in path.parts}
    assert pathlib.PurePosixPath("py.typed") in code
    assert wheel.stat().st_size < 25.5e6


INSTALLED = """
import sys
import jaxkv
from jaxkv.checkpoints import load
from jaxkv.checkpoints.shipped import find_shipped
from jaxkv.config import make_precision

for name in sys.argv[1:]:
    checkpoint = load(name, precision=make_precision("fp16"))
    print(name, jaxkv.__file__, find_shipped(name), checkpoint.provenance.files["model.safetensors"])
"""


def test_wheel_loads_them_outside_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    command = [sys.executable, "-c", INSTALLED, *SHIPPED]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    home = tmp_path / "site" / "jaxkv"
    for name, line in zip(SHIPPED, done.stdout.splitlines(), strict=True):
        digest = sha256_file(find_shipped(name) / "model.safetensors")
        assert line == f"{name} {home / '__init__.py'} {home / 'data' / name} {digest}"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A package whose shipped tiny-mistral, in `checkpoints` beside it, is a random one."""
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path / "jaxkv")
    random = load("random:1", precision=FP16, config=get_preset("tiny-mistral"))
    export(random, str(tmp_path / "checkpoints" / "tiny-mistral"))
    monkeypatch.chdir(tmp_path)
    return tmp_path, random


def test_installed_files_come_before_those_of_a_checkout(tree):
    root, random = tree
    assert find_shipped("tiny-mistral") == root / "checkpoints" / "tiny-mistral"
    again = load("tiny-mistral", precision=FP16)
    assert weights(again) == weights(random)
    assert again.provenance.source == "tiny-mistral"
    shutil.copytree(root / "checkpoints", root / "jaxkv" / "data")
    assert find_shipped("tiny-mistral") == root / "jaxkv" / "data" / "tiny-mistral"


def test_a_path_of_that_name_comes_first(tree):
    root, _ = tree
    other = load("random:2", precision=FP16, config=get_preset("tiny-mistral"))
    export(other, str(root / "tiny-mistral"))
    assert weights(load("tiny-mistral", precision=FP16)) == weights(other)


def test_faults_are_one_line(tree):
    cases = {
        "the files of tiny-gemma2 are missing.*install jaxkv again": ("tiny-gemma2", {}),
        "revision belongs to a hub id, and tiny-mistral ships": ("tiny-mistral", {"revision": "main"}),
        "tiny-mistral is not a tiny-llama2: family mistral": ("tiny-mistral", {"config": get_preset("tiny-llama2")}),
        "tiny-gemma does not exist.*a shipped model .tiny-llama2, ": ("tiny-gemma", {}),
    }
    for words, (name, given) in cases.items():
        with pytest.raises(UserError, match=words) as caught:
            load(name, precision=FP16, **given)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"no checkpoint 'tiny-gemma' ships.*did you mean 'tiny-gemma2'"):
        find_shipped("tiny-gemma")
