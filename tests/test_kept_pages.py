"""The tables of the pages on changed caches are what the kept summaries give."""

import importlib.util
import json
import pathlib

import pytest

ANALYSIS = pathlib.Path(__file__).parents[1] / "analysis"
PAGES = [ANALYSIS / "injection" / "README.md", ANALYSIS / "h200" / "injection" / "README.md"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kept_injection", ANALYSIS / "injection.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ANALYSIS)))
def test_the_page_says_what_the_summaries_say(script, page):
    text = page.read_text()
    assert script.fill(text, page.parent) == text


def test_every_table_stands_on_a_page(script):
    assert set(script.TABLES) == {found[2] for page in PAGES for found in script.MARKED.finditer(page.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ANALYSIS)))
def test_a_typed_figure_is_replaced(script, page):
    text = page.read_text()
    assert "| control |" in text
    assert script.fill(text.replace("| control |", "| typed |"), page.parent) == text


def test_a_part_takes_its_files_alone(script):
    directory = PAGES[1].parent
    both, one = (script.fill(f"<!-- {name} -->\n<!-- end -->", directory) for name in ("kl", "kl of gemma3-270m"))
    assert "gemma3-270m-gsm8k" in both
    assert "smollm2-135m-gsm8k" in both
    assert "gemma3-270m-gsm8k" in one
    assert "smollm2" not in one


def test_perplexity_of_what_was_not_run_is_a_dash(script, tmp_path):
    kept = json.loads((ANALYSIS / "h200" / "perplexity" / "gpu_seed-gemma3-270m-wikitext.json").read_text())
    changes = kept["summary"]["changes"]
    broken = {"change": "int4", "windows": 0}
    for name, chosen in (("a", [*changes[:2], broken]), ("b", changes[:1])):
        path = tmp_path / "perplexity" / f"cpu_seed-{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"summary": {"changes": chosen}}))
    page = script.fill("<!-- perplexity of seed -->\n<!-- end -->", tmp_path / "injection")
    row = next(line for line in page.splitlines() if changes[1]["change"] in line)
    assert row.endswith("| - | - | - | - | - |")
    assert f"{changes[1]['cached']['perplexity']:.4g}" in row
    assert page.splitlines()[3].startswith("| `int4` | - |")


def test_perplexity_has_errors_and_quantizers_of_a_model(script):
    page = script.fill("<!-- perplexity -->\n<!-- end -->", PAGES[1].parent)
    assert "`uniform:-1,1`" in page
    assert "`kvarn:k2v2`" in page


def test_an_unknown_table_is_named(script):
    with pytest.raises(ValueError, match="no table is named seeed"):
        script.fill("<!-- seeed -->\n<!-- end -->", PAGES[0].parent)
