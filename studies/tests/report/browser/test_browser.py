"""The page in a browser: first screen, width, filter and sort, keyboard, colours, paper.

See `conftest.open_page`.
"""

from __future__ import annotations

import re

import pytest

from gradcheck_suite.core.case import DTYPES
from studies.tests.report.made_up import EVIL

WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
SEEN = """element => { const box = element.getBoundingClientRect();
  return box.top >= 0 && box.bottom <= innerHeight && box.left >= 0 && box.right <= innerWidth && box.height > 0 }"""
KEPT = "kept.html"
"""The page of the records under `reports`, which `conftest` builds."""
PAGES = (
    "overview",
    "verification",
    "cost",
    "claims",
    "zoo",
    "trust",
    "trainers",
    "atlas",
    "violations",
    "environment",
)


def _until(page, expression, seconds=10):
    """Wait for an expression to be true.

    Playwright's own waiting needs a policy that lets strings be evaluated.
    """
    for _ in range(20 * seconds):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(expression)


@pytest.mark.share(4)
def test_the_first_screen_has_four_answers_and_four_pictures_without_scrolling(open_page):
    page = open_page("plain.html")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    for card in ("holds", "differs", "costs", "claims"):
        assert page.locator(f".card.{card} .answer").evaluate(SEEN)
    assert page.locator(".card.holds td.good").count() == 8 * len(DTYPES)
    assert page.locator(".card.holds td.good").last.evaluate(SEEN)
    for card, plots in (("differs", 2), ("costs", 2)):
        drawn = page.locator(f".card.{card} .chart svg")
        assert drawn.count() == plots
        assert all(drawn.nth(i).evaluate(SEEN) for i in range(plots))
        assert page.locator(f".card.{card} .chart svg .mark-group").count() > 0
    lines = page.locator("ul.claims li")
    assert lines.count() == 20
    assert lines.last.evaluate(SEEN)
    heights = lines.evaluate_all("lines => lines.map(line => line.clientHeight)")
    assert max(heights) <= 28  # one line each
    colours = lines.evaluate_all(
        "lines => lines.map(line => getComputedStyle(line).backgroundColor)"
    )
    assert len(set(colours)) == 3
    assert page.locator(".card.costs .chart svg .mark-rule line").count() >= 3  # intervals


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain.html", KEPT], ids=["made-up", "kept"])
def test_a_laptop_shows_all_four_answers_without_scrolling(open_page, name):
    page = open_page(name)
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert not page.locator("ul.claims .said").evaluate_all(f"all => all.some({CUT})")
    box = page.locator(".card.holds .scroll")  # the matrix is whole
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain.html", KEPT], ids=["made-up", "kept"])
def test_a_phone_shows_all_four_answers_without_scrolling(open_page, name):
    page = open_page(name, width=390, height=844)
    brief = page.locator(".brief li")
    assert brief.count() == 3
    assert all(brief.nth(i).evaluate(SEEN) for i in range(3))
    claims = page.locator("ul.claims li")
    assert claims.count() == 20
    assert claims.evaluate_all(f"all => all.every({SEEN})")
    said = page.locator(".card.claims .key").inner_text()
    assert [int(number) for number in re.findall(r"\d+", said)] == [
        page.locator(f"ul.claims li.{kind}").count() for kind in ("good", "warn", "bad")
    ]
    places = page.locator("#overview :is(a, summary):visible").evaluate_all(
        "all => all.map(place => place.getBoundingClientRect().top)"
    )
    assert places == sorted(places)  # the keyboard goes as the eye does
    for i, card in enumerate(("holds", "differs", "costs")):
        page.evaluate("scrollTo(0, 0)")
        brief.nth(i).locator("a").click()
        _until(page, f"document.activeElement.id === 'question-{card}'")
        assert page.locator("#overview.current").count() == 1


CUT = "said => said.scrollWidth > said.clientWidth"


@pytest.mark.full
def test_a_claim_that_is_cut_is_shown_whole_on_hover_on_focus_and_on_a_phone(open_page):
    def long_claim(page):
        said = page.locator("ul.claims .said").nth(3)
        said.evaluate("said => { said.textContent = 'a claim of many words '.repeat(6) }")
        return said

    page = open_page("plain.html")
    said, link = long_claim(page), page.locator("ul.claims a").nth(3)
    assert said.evaluate(CUT)
    link.hover()
    assert not said.evaluate(CUT)
    page.mouse.move(0, 0)
    assert said.evaluate(CUT)
    page.keyboard.press("Tab")  # focus is made visible for readers with a keyboard
    link.focus()
    assert not said.evaluate(CUT)
    assert not long_claim(open_page("plain.html", width=390, height=844)).evaluate(CUT)


@pytest.mark.full
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_scrolls_sideways(open_page, width):
    page = open_page(width=width, height=844)
    for name in PAGES:
        page.evaluate("name => { location.hash = name }", name)
        page.wait_for_selector(f"#{name}.current")
        page.evaluate("name => drawPlots(document.getElementById(name))", name)
        assert not page.evaluate(WIDE), name
        overlong = page.locator(f"#{name} svg").evaluate_all(
            "all => all.some(svg => svg.getBoundingClientRect().right > innerWidth + 1)"
        )
        assert not overlong, name
    alone = open_page("violation.html", width=width, height=844)
    assert not alone.evaluate(WIDE)


@pytest.mark.full
def test_the_claims_move_with_the_width_of_the_window(open_page):
    page = open_page("plain.html", width=390, height=844)

    def order():
        return page.locator(".card").evaluate_all("all => all.map(card => card.classList[1])")

    assert order() == ["claims", "holds", "differs", "costs"]
    assert all(
        box["width"] <= 390 for box in (card.bounding_box() for card in page.locator(".card").all())
    )
    page.set_viewport_size({"width": 1280, "height": 800})
    _until(page, "document.querySelector('.answers .card.claims') !== null")
    assert order() == ["holds", "differs", "costs", "claims"]


@pytest.mark.full
def test_tables_sort_and_filter(open_page):
    page = open_page(hash_="#verification")
    part = page.locator("#verification details.table").first
    assert not part.evaluate("details => details.open")
    part.locator("summary").click()
    rows = part.locator("tbody tr")
    everything = rows.count()

    def column(index):
        return part.locator(f"tbody tr:visible td:nth-child({index})").all_inner_texts()

    part.locator("thead button").first.click()
    assert part.locator("thead th").first.get_attribute("aria-sort") == "ascending"
    assert column(1) == sorted(column(1), key=str.lower)
    part.locator("thead button").first.click()
    assert part.locator("thead th").first.get_attribute("aria-sort") == "descending"
    part.locator("input").fill("holds zero_grad float64")
    assert set(column(1)) == {"zero_grad", "zero_grad_foreach"}
    assert part.locator("output").inner_text() == f"2 of {everything} rows"
    part.locator("input").fill("")
    assert len(column(1)) == everything
    counts = page.locator("#cost details.table").first
    page.evaluate("location.hash = 'cost'")
    counts.locator("summary").click()
    counts.locator("thead button").first.click()
    numbers = [
        int(cell.replace(",", ""))
        for cell in counts.locator("tbody td:first-child").all_inner_texts()
    ]
    assert numbers == sorted(numbers) == [10**5, 10**6, 10**7]


@pytest.mark.full
def test_the_keyboard_reaches_every_page_and_every_table(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-overview"
    reached = []
    for _ in PAGES[1:]:
        page.keyboard.press("ArrowRight")
        _until(page, "document.activeElement.getAttribute('aria-selected') === 'true'")
        reached.append(page.evaluate("document.activeElement.getAttribute('aria-controls')"))
    assert tuple(reached) == PAGES[1:]
    assert page.locator("[role=tabpanel]:visible").get_attribute("id") == "environment"
    page.keyboard.press("Home")
    page.wait_for_selector("#overview.current")
    page.go_back()
    page.wait_for_selector("#environment.current")
    summary = page.locator("#environment details.table summary").first
    summary.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.locator("#environment details.table th[aria-sort=ascending]").count() == 1


@pytest.mark.full
def test_a_link_opens_a_claim_and_a_violation(open_page):
    page = open_page()
    page.locator(".card.claims a").last.click()
    page.wait_for_selector("#claims.current")
    assert page.evaluate("document.activeElement.id") == "claims/C2.5"
    violations = open_page(hash_="#violations")
    violations.locator("#violations .list a").first.click()
    _until(violations, "document.activeElement.className === 'violation'")


@pytest.mark.full
def test_the_page_of_a_violation_has_its_parts_and_copies_its_script(open_page):
    page = open_page("violation.html", permissions=["clipboard-read", "clipboard-write"])
    assert page.locator(".split li").count() == 2
    assert page.locator(".split li.wrong .block").all_inner_texts() == ["1", "3"]
    bars = page.locator(".chart").first.locator("svg .mark-rect path")
    assert bars.count() == 4
    assert page.locator(".chart").nth(1).locator("svg .mark-rect.role-mark path").count() == 6
    button = page.locator("details.copy [data-copy]")
    button.click()
    _until(page, "document.querySelector('details.copy [data-copy]').textContent !== 'Copy'")
    if button.inner_text() == "Copied":  # where a file may use the clipboard
        assert page.evaluate("navigator.clipboard.readText()") == f"# {EVIL}\nprint('the script')\n"


@pytest.mark.full
def test_colours_follow_the_system_and_the_button(open_page):
    def ground(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = open_page(), open_page(color_scheme="dark")
    assert ground(light) != ground(dark)
    axis = "getComputedStyle(document.querySelector('.chart svg .role-axis-label text')).fill"
    assert light.evaluate(axis) != dark.evaluate(axis)
    want = ground(dark)
    light.locator("#theme").click()
    light.locator("#theme").click()
    assert light.locator("#theme").get_attribute("aria-label") == "Colours: dark"
    assert ground(light) == want
    assert light.evaluate(axis) == dark.evaluate(axis)


@pytest.mark.full
def test_on_paper_the_first_screen_is_a_few_pages_with_its_plots(open_page):
    page = open_page(color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("nav").is_hidden()
    empty = "all => all.filter(place => place.clientWidth && !place.querySelector('svg')).length"
    assert page.locator(".chart").evaluate_all(empty) == 0
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(26, 28, 31)"
    pdf = page.pdf(format="A4")
    assert 1 <= len(re.findall(rb"/Type\s*/Page[^s]", pdf)) <= 8


@pytest.mark.full
def test_every_plot_of_a_telephone_is_drawn_at_its_own_width(open_page):
    page = open_page(width=390, height=844)
    page.wait_for_timeout(500)
    off = """all => all.filter(place => place.clientWidth).map(place => [place, place.querySelector('svg')]).filter(
      ([place, svg]) => !svg || !place.classList.contains('wide') &&
        Math.abs(svg.getBoundingClientRect().width - svg.getAttribute('width')) > 1)
      .map(([place]) => place.dataset.chart)"""
    assert page.locator(".chart").evaluate_all(off) == []


@pytest.mark.full
def test_a_screen_reader_is_told_what_plots_and_tables_show(open_page):
    page = open_page()
    names = page.locator(".chart").evaluate_all(
        "all => all.map(e => e.parentElement.getAttribute('aria-label'))"
    )
    assert all(names)
    assert page.locator("[role=img] > .chart[role]").count() == 0
    assert page.locator("[role=img] > .chart > svg:not([aria-hidden=true])").count() == 0
    assert (
        page.locator("table:not(:has(caption)):has(thead)").count()
        == page.locator(".document table").count()
    )
    assert page.locator("thead th:not([scope=col])").count() == page.locator(".document th").count()
    assert page.locator("html[lang=en]").count() == 1
    assert page.locator("h1").count() == 1
