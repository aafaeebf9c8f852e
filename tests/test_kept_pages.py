"""The tables of analysis/injection/README.md are what the kept summaries give."""

import importlib.util
import pathlib

import pytest

ANALYSIS = pathlib.Path(__file__).parents[1] / "analysis"
PAGE = ANALYSIS / "injection" / "README.md"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kept_injection", ANALYSIS / "injection.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_the_summaries_say(script):
    text = PAGE.read_text()
    assert set(script.TABLES) == {found[2] for found in script.MARKED.finditer(text)}
    assert script.fill(text, PAGE.parent) == text


def test_a_typed_figure_is_replaced(script):
    text = PAGE.read_text()
    assert script.fill(text.replace("| control |", "| typed |"), PAGE.parent) == text


def test_an_unknown_table_is_named(script):
    with pytest.raises(ValueError, match="no table is named seeed"):
        script.fill("<!-- seeed -->\n<!-- end -->", PAGE.parent)
