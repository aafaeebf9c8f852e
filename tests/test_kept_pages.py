"""The tables of the pages on changed caches are what the kept summaries give."""

import importlib.util
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


def test_an_unknown_table_is_named(script):
    with pytest.raises(ValueError, match="no table is named seeed"):
        script.fill("<!-- seeed -->\n<!-- end -->", PAGES[0].parent)
