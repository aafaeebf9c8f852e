"""`jaxkv VERB`, `import jaxkv` and flags: help at once, one line for a slip, and nothing heavy before it is needed."""

import json
import subprocess
import sys
import time

import pytest
from commands import LAUNCH, parse

from jaxkv import __main__ as front
from jaxkv.cli import read_flagfile
from jaxkv.errors import UserError
from jaxkv.experiments.experiment import NAMES
from jaxkv.options import OPTIONS
from jaxkv.usage import COMPARE_OPTIONS, VERBS, verb_help

HEAVY = ("jax", "torch", "transformers", "datasets", "pandas", "numpy", "absl")


def python(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


def test_importing_the_package_imports_nothing_heavy_and_offers_its_names():
    """They stay functions once modules of the package are imported."""
    code = f"import jaxkv, sys; print(dir(jaxkv)); print([m for m in {HEAVY} if m in sys.modules])"
    calls = "import jaxkv.api, jaxkv.launch; print(*(callable(getattr(jaxkv, n)) for n in jaxkv.__all__))"
    names, heavy, callables = python(f"{code}; {calls}").stdout.splitlines()
    assert heavy == "[]"
    assert all(name in names for name in ("load", "compare", "generate", "read_run"))
    assert set(callables.split()) == {"True"}


@pytest.mark.parametrize("arguments", [["-h"], ["--version"], *([verb, "--help"] for verb in VERBS)])
def test_help_comes_without_jax(arguments):
    code = f"""import sys
from jaxkv.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(code, [m for m in {HEAVY} if m in sys.modules])"""
    begin = time.perf_counter()
    done = python(code, *arguments)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    assert time.perf_counter() - begin < 20  # under a second where nothing else runs


def test_the_help_of_run_has_every_flag_and_of_compare_what_it_takes():
    told = verb_help("run")
    assert all(
        f"--{one.flag.replace('_', '-')} " in told or f"--{one.flag.replace('_', '-')}\n" in told for one in OPTIONS
    )
    assert ", ".join(NAMES) in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= 80
    assert all(f"--{one.flag.replace('_', '-')}" in verb_help("compare") for one in COMPARE_OPTIONS)
    assert told.index("jaxkv run --model") < told.index("--checkpoint ")  # examples first


def test_unknown_verbs_and_flags_name_the_nearest(capsys):
    assert front.main(["comapre"]) == 2
    assert "did you mean 'compare'" in capsys.readouterr().err
    with pytest.raises(UserError, match="Did you mean: precision"):
        parse("--precisoin=fp16")


def test_dashes_and_underscores_both_work():
    (one,) = parse("--max-new-tokens=7", "--precision=fp16", "--allow-code-execution", "--problems", "3,4")
    assert (one.decoding.max_new_tokens, one.data.allow_code_execution, one.data.problems) == (7, True, (3, 4))


def test_flagfiles_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = read_flagfile(str(LAUNCH / "paper.flags"))
    assert read_flagfile("paper") == read_flagfile("paper.flags") == whole
    with pytest.raises(UserError, match="did you mean 'paper'"):
        read_flagfile("papers")
    (tmp_path / "paper").write_text("--seed=3\n")
    assert read_flagfile("paper") == ["--seed=3"]  # a file of the user's comes first


def test_the_notebook_runs(monkeypatch):
    cells = json.loads((LAUNCH / "compare.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    scope: dict = {}
    for source in code:
        exec(compile(source, "compare.ipynb", "exec"), scope)
    assert scope["found"].status in ("rounding", "equal")
    assert len(scope["found"].steps) == len(scope["found"].sides[0].tokens)
