"""The page in a real browser: contents, hover, sort, fold, CSV, keyboard, contrast, widths, print, no error."""

import csv
import json
import time

import pytest
from browser import Browser, find_browser
from layer_records import make_drift
from plain_records import write_blocks
from study_records import as_torch, make_parity, make_run, make_samples

from jaxkv.reporting.html import to_html

pytestmark = pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome: apt install chromium")
FLIP = 5
SCHEMES = ("light", "dark")

# Text whose contrast with what lies behind it is below WCAG AA: 4.5, or 3 if it is large.
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (text) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor);
    if (c[3] === 255) return c; } return [255, 255, 255]; };
  const odd = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || e.closest("script, style") || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), svg = e.closest("svg");
    if (svg && e.getAttribute("fill")?.startsWith("#")) continue;  // stands in a cell
    const a = light(rgba(svg ? style.fill : style.color)), b = light(behind(svg ?? e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) odd.push([e.outerHTML.slice(0, 99), ratio]);
  }
  return odd; })()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of several runs: texts that part with their pieces, figures, tables, claims and folds."""
    pieces = {token: f" <t{token}>" for token in range(200)} | {7: "\n"}
    parting = make_samples(flips=lambda p: (FLIP, 9) if p % 3 == 0 else ())
    parting[0]["teacher_forced"]["margin"][3] = 0.0
    runs = [
        make_run(parting, "fp16"),
        make_run(make_samples("bf16", flips=lambda p: (p,)), "bf16", "bf16"),
        make_run(make_samples("fp32"), "fp32", "fp32"),
        make_run(as_torch(make_samples(flips=lambda p: (2,) if p == 3 else ())), "torch"),
        make_run(make_parity(), "parity"),
        make_run(make_drift(count=3), "drift", experiments=["drift"]),
    ]
    for run in runs:
        object.__setattr__(run, "pieces", pieces)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_html("Several runs", write_blocks(runs, ["2604.15409"])), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(autouse=True)
def no_error(browser):
    browser.faults.clear()
    yield
    assert browser.faults == []


def test_the_first_screen_answers_before_all_else(browser, page):
    for width, height in ((1280, 900), (390, 1500)):
        browser.open(page, width, height)
        inside = (
            "[...document.querySelectorAll('.status, .tile, dl.said dd')].map(e => e.getBoundingClientRect().bottom)"
        )
        assert len(bottoms := browser.run(inside)) == 7
        assert max(bottoms) < height


def test_contents_lead_to_every_section(browser, page):
    browser.open(page)
    links = browser.run("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))")
    assert {"#examples", "#overview", "#figures", "#controls", "#claims", "#provenance"} <= set(links)
    browser.click("nav a[href='#controls']")
    time.sleep(0.1)
    assert -1 <= browser.run("document.getElementById('controls').getBoundingClientRect().top") < 200
    assert browser.run("document.querySelector('nav').getBoundingClientRect().left") == 0  # stays at the side


def test_marks_and_tokens_say_their_values(browser, page):
    browser.open(page)
    for mark, part in (
        (".side .t.parts", "margin 0.01, largest logit difference 0.01"),
        ("figure [data-tip]", " part, "),
    ):
        browser.point(mark)
        said = browser.run("[tip.hidden, tip.textContent]")
        assert said == [False, browser.run(f"document.querySelector({json.dumps(mark)}).dataset.tip")]
        assert part in said[1]
    browser.press("Escape", 27)
    assert browser.run("tip.hidden")


def test_both_texts_show_where_they_part(browser, page):
    browser.open(page)
    texts = browser.run("[...document.querySelectorAll('.example:first-of-type .t.parts')].map(e => e.textContent)")
    assert texts == [f" <t{FLIP}>", f" <t{FLIP + 100}>"]
    kinds = browser.run("[...document.querySelector('.side').querySelectorAll('.t')].map(e => e.className)")
    assert kinds[3] == "t flip tie"
    assert kinds[FLIP] == "t flip parts"
    assert kinds[0] == "t far"


def column(browser, number):
    return browser.run(
        "[...document.querySelector('[aria-label=\"Every run\"] table').tBodies[0].rows]"
        f".map(row => row.cells[{number}].textContent)"
    )


def test_a_table_is_sorted_by_pointer_and_by_key(browser, page):
    browser.open(page)
    before = column(browser, 0)
    head = '[aria-label="Every run"] th:nth-child(3) button'
    browser.click(head)
    counts = [int(cell.split()[0]) for cell in column(browser, 2)]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    browser.run(f"document.querySelector({json.dumps(head)}).focus()")
    browser.press("Enter", 13)
    assert [int(cell.split()[0]) for cell in column(browser, 2)] == counts[::-1]
    assert browser.run(f"document.querySelector({json.dumps(head)}).parentElement.ariaSort") == "descending"
    assert sorted(column(browser, 0)) == sorted(before)


def test_a_table_is_saved_as_csv(browser, page, tmp_path):
    browser.open(page)
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.run("document.querySelector('[aria-label=\"Every run\"]').previousElementSibling.id = 'save'")
    browser.click("#save")
    for _ in range(100):
        if found := list(tmp_path.glob("*.csv")):
            break
        time.sleep(0.1)
    (header, *rows) = list(csv.reader(found[0].read_text(encoding="utf-8").splitlines()))
    assert header[:3] == ["run", "valid", "argmax flips per token"]
    assert [row[0] for row in rows] == column(browser, 0)
    assert all(len(row) == len(header) for row in rows)


def test_folds_open_by_key_and_in_print(browser, page):
    browser.open(page)
    assert browser.run("document.querySelectorAll('details').length") > 3
    browser.run("document.querySelector('summary').focus()")
    browser.press("Enter", 13)
    assert browser.run("document.querySelector('details').open")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("[...document.querySelectorAll('details')].every(fold => fold.open)")


def test_the_keyboard_reaches_what_the_pointer_does(browser, page):
    browser.open(page)
    reached = []
    for _ in range(60):
        browser.press("Tab", 9)
        reached.append(browser.run("document.activeElement.tagName + '.' + document.activeElement.className"))
    assert "A." in reached
    assert any(name.startswith("SPAN.t") for name in reached)
    assert {"BUTTON.csv", "SUMMARY."} <= set(reached)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_contrast(browser, page, scheme):
    browser.open(page, scheme=scheme)
    browser.run("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    assert browser.run(CONTRAST) == []
    dark = browser.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_nothing_is_wider_than_the_screen(browser, page, width):
    browser.open(page, width)
    browser.run("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= width
    wide = browser.run("[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().width)")
    assert wide
    assert min(wide) > 250
    assert max(wide) <= width


def test_the_first_column_stays_while_a_table_scrolls(browser, page):
    browser.open(page, 390)
    box = "document.querySelector('[aria-label=\"Every run\"]')"
    browser.run(f"{box}.scrollLeft = 300")
    assert browser.run(f"{box}.scrollLeft") == 300
    edges = browser.run(f"[{box}, {box}.querySelector('tbody th')].map(e => e.getBoundingClientRect().left)")
    assert edges[0] == edges[1]


def test_print_is_dark_on_white_without_controls(browser, page):
    browser.open(page, 800, scheme="dark", media="print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("[...document.querySelectorAll('nav, button.csv')].every(e => !e.getClientRects().length)")
    assert browser.run("document.documentElement.scrollWidth") <= 800
    assert browser.run(CONTRAST) == []
